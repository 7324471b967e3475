"""Kept bases under damage, and the names and identity of a base: files that a lesson shouldn't break one by one."""
import gc, json, shutil
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np, pytest
from flax import nnx
from lorajax.adapters import random_adapter
from lorajax.base import RECORD, load_base, open_base, random_base, save_base
from lorajax.core import ModelConfig, Refused, RopeScaling, Sampling
from lorajax.generate import generate
from lorajax.peft import save_adapter

CONFIG = ModelConfig(vocab_size=257, width=32, mlp_width=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                     max_len=128)

@pytest.fixture(scope='module')
def kept(tmp_path_factory): return save_base(random_base(CONFIG), tmp_path_factory.mktemp('kept') / 'base')

@pytest.mark.parametrize('change', [
    dict(), dict(tied=True), dict(qkv_bias=True, o_bias=True), dict(qk_norm=True, windows=(4, 0)),
    dict(rope_scaling=RopeScaling(8., 1., 4., 64))])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_every_kind_of_base_survives(tmp_path, change, dtype):
    base = random_base(replace(CONFIG, **change), dtype)
    again = load_base(save_base(base, tmp_path / 'kept'))
    for field in ('config', 'fingerprint', 'dtype', 'name'): assert getattr(again, field) == getattr(base, field), field
    rules = Sampling(max_new_tokens=6)
    assert generate(again, ['ab'], sampling=rules) == generate(base, ['ab'], sampling=rules)

def test_smollm2_survives_with_its_chat_template(tmp_path):
    base = load_base('smollm2')
    again = load_base(save_base(base, tmp_path / 'kept'))
    weights, kept = (jax.tree.leaves(nnx.state(b.decoder)) for b in (base, again))
    for x,y in zip(weights, kept): np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    talk = [dict(role='user', content='Forge <|im_end|> this')]
    assert again.tokenizer.chat(talk) == base.tokenizer.chat(talk) and again.tokenizer.eos_ids == base.tokenizer.eos_ids
    assert again.name == base.name == 'smollm2' and again.fingerprint == base.fingerprint

def edit(**changes):
    def damage(folder): (folder / RECORD).write_text(json.dumps(json.loads((folder / RECORD).read_text()) | changes))
    return damage

def flip_a_byte(folder):
    file = max((p for p in (folder / 'weights').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

def cut(folder):
    file = max((p for p in (folder / 'weights').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:1000])

@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning') # readers that Orbax leaves behind
@pytest.mark.parametrize('damage', [
    edit(fingerprint='0' * 64), edit(dtype='bfloat16'), edit(config={}), edit(seal=''), flip_a_byte, cut,
    lambda f: shutil.rmtree(f / 'weights'), lambda f: (f / RECORD).write_text('{}'),
    lambda f: (f / RECORD).write_text('[]'), lambda f: (f / RECORD).write_text('{')])
def test_a_changed_checkpoint_is_refused_in_one_sentence(kept, tmp_path, damage):
    folder = tmp_path / 'copy'
    shutil.copytree(kept, folder)
    assert load_base(folder).fingerprint == random_base(CONFIG).fingerprint
    damage(folder)
    with pytest.raises(Refused, match='save the base again') as e: load_base(folder)
    assert '\n' not in str(e.value)
    del e
    gc.collect()

def test_the_dtype_of_a_checkpoint_is_its_own(kept):
    assert load_base(kept).dtype == jnp.float32 == load_base(kept, 'float32').dtype
    with pytest.raises(Refused, match='holds float32 weights'): load_base(kept, 'bfloat16')

def test_saving_never_overwrites_and_leaves_nothing_half_made(tmp_path):
    base = random_base(CONFIG)
    (tmp_path / 'file').write_text('')
    with pytest.raises(Refused, match='cannot be written'): save_base(base, tmp_path / 'file/x')
    with pytest.raises(Refused, match='is there already'): save_base(base, tmp_path / 'file')
    assert [p.name for p in tmp_path.iterdir()] == ['file']

def test_the_word_smollm2_wins_over_a_directory_of_that_name(kept, tmp_path, monkeypatch):
    shutil.copytree(kept, tmp_path / 'smollm2')
    monkeypatch.chdir(tmp_path)
    assert open_base('smollm2').config.width == 576
    assert load_base('./smollm2').config.width == 32

def test_B15_the_name_of_the_base_is_no_adapter_name(tmp_path):
    base = random_base(CONFIG)
    folder = save_adapter(random_adapter(CONFIG), tmp_path / 'x')
    with pytest.raises(Refused, match='has the name of the base'): base.load_adapter(folder, base.name)
    assert base.load_adapter(folder, 'lora_A').name == 'lora_A'

def test_a_directory_name_with_dots_stays_whole(tmp_path):
    from lorajax.base import byte_tokenizer
    from lorajax.model import random_tensors
    from safetensors.numpy import save_file
    folder = tmp_path / 'Llama-3.2-1B'
    folder.mkdir()
    c = dict(model_type='llama', vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6)
    (folder / 'config.json').write_text(json.dumps(c))
    save_file(random_tensors(CONFIG), folder / 'model.safetensors')
    byte_tokenizer().codec.save(str(folder / 'tokenizer.json'))
    base = load_base(folder, 'float32')
    assert base.name == 'Llama-3.2-1B' and base.fingerprint == random_base(CONFIG).fingerprint
    half = load_base(folder)
    assert half.fingerprint == base.fingerprint
    assert half.version() != base.version(), 'the served dtype belongs to the version'

def test_an_adapter_of_another_shape_is_refused():
    base = random_base(CONFIG)
    with pytest.raises(Refused, match='from 64 to 32 channels'):
        base.check(random_adapter(replace(CONFIG, width=64), 'wide', targets=('q_proj',)))
