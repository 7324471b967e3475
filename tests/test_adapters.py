"Not notebook cells: PEFT and torch are the oracles here, and most inputs are files that are broken on purpose."
import gzip, json, math, os, pickle, struct, subprocess, sys
from collections import Counter
from dataclasses import replace
import ml_dtypes, numpy as np, pytest, torch
import peft
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_load
from transformers import LlamaConfig, LlamaForCausalLM
from lorajax.adapters import (Adapter, LoraPair, adapter_fingerprint, base_fingerprint, check_name, random_adapter, tensor_digest,
                              version_id)
from lorajax.core import ModelConfig, Refused, RopeScaling, module_shapes
from lorajax.lora_config import adapts, check_adapter_config, rank_at, scale_at
from lorajax.peft import load_adapter, peft_config, save_adapter

M0 = ModelConfig(vocab_size=64, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=64)
SMOLLM2 = ModelConfig(vocab_size=49152, width=576, mlp_width=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                      max_len=8192, rms_eps=1e-5, rope_theta=100000., tied=True)
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
pytestmark = pytest.mark.filterwarnings('ignore:`is_gradient_checkpointing` is deprecated:FutureWarning') # PEFT reads it
peft_warns = pytest.mark.filterwarnings('ignore::UserWarning') # PEFT comments on saved embeddings, unused keys and tied weights

def llama(c=M0, device='cpu'):
    "A random float32 Llama of this shape."
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, tie_word_embeddings=c.tied,
            bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()

def trained(c=M0, **settings):
    "A PEFT model whose pairs are all normally distributed, as if it had been trained."
    model = get_peft_model(llama(c), LoraConfig(task_type='CAUSAL_LM', **settings)).eval()
    generator = torch.Generator().manual_seed(1)
    for name,p in model.named_parameters():
        if 'lora_' in name: p.data = torch.randn(p.shape, generator=generator) * .5
    return model

def lora_layers(model):
    return {name.removeprefix('base_model.model.'): m for name,m in model.named_modules() if isinstance(m, LoraLayer)}

def merged_logits(c, adapter, ids):
    "The dense reference: every adapted weight of the plain model replaced by W + s·B·A. An embedding's delta is [D, V]."
    model = llama(c)
    modules = dict(model.named_modules())
    for path,pair in adapter.modules.items():
        delta = torch.from_numpy(pair.delta)
        modules[path].weight.data += delta.T if path == 'model.embed_tokens' else delta
    with torch.no_grad(): return model(ids).logits

def keys_for(path): return [f'base_model.model.{path}.lora_{part}.weight' for part in 'AB']

def tensors_for(paths, rank=4, c=M0, seed=0, dtype=np.float32):
    rng, shapes = np.random.default_rng(seed), module_shapes(c)
    draw = lambda *shape: (.5 * rng.standard_normal(shape)).astype(dtype)
    return {key: x for p in paths for key,x in zip(keys_for(p), (draw(rank, shapes[p][0]), draw(shapes[p][1], rank)))}

def all_layers(*names, c=M0): return [p for p in module_shapes(c) if p.rpartition('.')[2] in names]

Q, QV = all_layers('q_proj'), all_layers('q_proj', 'v_proj')
A0, B0 = keys_for('model.layers.0.self_attn.q_proj')

def write(folder, tensors, **config):
    "A PEFT directory with these tensors (or these bytes) and rank 4, alpha 8 unless `config` says otherwise."
    folder.mkdir(exist_ok=True)
    if isinstance(tensors, bytes): (folder / 'adapter_model.safetensors').write_bytes(tensors)
    else: save_file(tensors, folder / 'adapter_model.safetensors', metadata=dict(format='pt'))
    raw = dict(peft_type='LORA', task_type='CAUSAL_LM', r=4, lora_alpha=8, target_modules=['q_proj', 'v_proj']) | config
    (folder / 'adapter_config.json').write_text(json.dumps(raw))
    return folder

def refusal(*args, **kwargs):
    "The sentence with which `load_adapter` refuses."
    with pytest.raises(Refused) as e: load_adapter(*args, **kwargs)
    sentence = str(e.value)
    assert '\n' not in sentence and len(sentence) < 700
    return sentence

# load

STRAY_KEYS = ( # none is one PEFT would load into a plain Llama
    'model.layers.0.self_attn.q_proj.lora_A.weight', 'base_model.model.lora_A.weight', 'base_model.model.model.norm.weight',
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A', 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.x.weight',
    'base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A', 'base_model.model.model.embed_tokens.lora_A.weight',
    'base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight', 'base_model.model.lm_head.lora_embedding_A',
    'base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight', 'base_model.model.classifier.weight')

def test_B01_names_that_match_nothing(tmp_path):
    good = tensors_for(QV)
    wrapped = {k.replace('model.layers', 'model.language_model.layers'): x for k,x in good.items()}
    assert f'{min(wrapped)!r} fits no module' in refusal(write(tmp_path / 'a', wrapped), M0)
    one_off = {k.replace('layers.1.self_attn.v_proj.lora_A', 'layers.9.self_attn.v_proj.lora_A'): x for k,x in good.items()}
    sentence = refusal(write(tmp_path / 'b', one_off), M0)
    assert 'layers.9.self_attn.v_proj' in sentence and 'up to layer 1' in sentence
    for i,key in enumerate(STRAY_KEYS):
        assert key in refusal(write(tmp_path / f'c{i}', good | {key: np.zeros((4, 32), np.float32)}), M0)

def test_B01_default_segment_changes_nothing(tmp_path):
    good = tensors_for(QV) | {f'base_model.model.model.embed_tokens.lora_embedding_{part}': np.ones(shape, np.float32)
                              for part,shape in (('A', (4, 64)), ('B', (32, 4)))}
    targets = dict(target_modules=['q_proj', 'v_proj', 'embed_tokens'])
    plain = load_adapter(write(tmp_path / 'plain', good, **targets), M0)
    named = {k.replace('.weight', '.default.weight') if k.endswith('.weight') else f'{k}.default': x for k,x in good.items()}
    assert load_adapter(write(tmp_path / 'named', named, **targets), M0).fingerprint == plain.fingerprint
    twice = good | {A0.replace('.weight', '.default.weight'): good[A0]}
    assert 'same tensor' in refusal(write(tmp_path / 'twice', twice, **targets), M0)

@peft_warns
def test_B01_targeted_modules_without_tensors(tmp_path):
    "PEFT leaves them at their starting values: nothing for true, random for false."
    part = tensors_for(Q)
    adapter = load_adapter(write(tmp_path / 'zero', part), M0)
    assert list(adapter.modules) == Q and '2 targeted modules have no tensors' in adapter.notes[0]
    assert 'random' in refusal(write(tmp_path / 'random', part, init_lora_weights=False), M0)
    for start in ('zero', 'random'):
        v_proj = lora_layers(PeftModel.from_pretrained(llama(), tmp_path / start))['model.layers.0.self_attn.v_proj']
        assert v_proj.get_delta_weight('default').any() == (start == 'random')

def test_B01_tensors_that_the_config_leaves_out(tmp_path):
    sentence = refusal(write(tmp_path / 'a', tensors_for(all_layers('q_proj', 'v_proj', 'k_proj'))), M0)
    assert 'layers.0.self_attn.k_proj' in sentence and 'PEFT would drop it' in sentence
    assert 'layers.1' in refusal(write(tmp_path / 'b', tensors_for(QV), layers_to_transform=[0]), M0)
    assert 'v_proj' in refusal(write(tmp_path / 'c', tensors_for(QV), exclude_modules='.*v_proj'), M0)

@peft_warns
def test_B03_modules_to_save(tmp_path):
    model = trained(r=4, target_modules=['q_proj'], modules_to_save=['lm_head'])
    model.save_pretrained(tmp_path / 'a')
    assert 'base_model.model.lm_head.weight' in load_file(tmp_path / 'a/adapter_model.safetensors')
    assert "modules_to_save=['lm_head']" in refusal(tmp_path / 'a', M0)
    # the same head without the config's word for it is compared with the base, never dropped
    other = tensors_for(Q) | {'base_model.model.lm_head.weight': np.ones((64, 32), np.float32)}
    zeros = lambda name: np.zeros((64, 32), np.float32)
    assert 'differs from lm_head.weight' in refusal(write(tmp_path / 'b', other), M0, base_tensor=zeros)

@peft_warns
def test_B05_copies_of_the_base(tmp_path):
    trained(r=4, target_modules=['q_proj', 'embed_tokens', 'lm_head']).save_pretrained(tmp_path / 'a')
    base = {k: v.numpy() for k,v in llama().state_dict().items()}
    adapter = load_adapter(tmp_path / 'a', M0, base_tensor=base.__getitem__)
    assert list(adapter.modules) == ['model.embed_tokens', *Q, 'lm_head']
    assert 'give base_tensor' in refusal(tmp_path / 'a', M0)
    for name in ('lm_head.weight', 'model.embed_tokens.weight'):
        changed = base | {name: base[name] + np.eye(64, 32, dtype=np.float32) * 1e-3}
        assert f'differs from {name}' in refusal(tmp_path / 'a', M0, base_tensor=changed.__getitem__)
    # copies compare in the coarser dtype, whichever side it is on
    in_bf16 = lambda name: base[name].astype(ml_dtypes.bfloat16)
    assert load_adapter(tmp_path / 'a', M0, base_tensor=in_bf16).fingerprint == adapter.fingerprint
    tensors = load_file(tmp_path / 'a/adapter_model.safetensors')
    narrow = {k: x.astype(ml_dtypes.bfloat16) if 'base_layer' in k else x for k,x in tensors.items()}
    targets = dict(target_modules=['q_proj', 'embed_tokens', 'lm_head'])
    assert load_adapter(write(tmp_path / 'b', narrow, **targets), M0, base_tensor=base.__getitem__)
    # a larger vocabulary
    grown = {k: np.concatenate([x, x[:2]]) if 'lm_head.base_layer' in k else x for k,x in tensors.items()}
    sentence = refusal(write(tmp_path / 'c', grown, **targets), M0, base_tensor=base.__getitem__)
    assert '[66, 32]' in sentence and 'added vocabulary' in sentence

ROUNDED = { # by torch, to the nearest
    'float32': lambda x: x, 'float16': lambda x: torch.from_numpy(x).half().numpy(),
    'bfloat16': lambda x: torch.from_numpy(x).bfloat16().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)}

@pytest.mark.parametrize('served', ROUNDED)
@pytest.mark.parametrize('saved', ROUNDED)
def test_B05_copies_that_were_rounded_on_their_own(tmp_path, served, saved):
    "A float32 base served in one dtype and copied in another; float16 is the coarser of the 16-bit dtypes below 2**-17."
    c, rng = replace(M0, vocab_size=5000), np.random.default_rng(0)
    exact = (rng.choice([-1, 1], (5000, 32)) * 10 ** rng.uniform(-9, 1, (5000, 32))).astype(np.float32)
    exact[0, :3], exact[17, 3], exact[4999, 31] = (0, -0., 1 - 2**-10), .01, -.02
    base, copy = ROUNDED[served](exact), ROUNDED[saved](exact)
    def load(copy):
        tensors = tensors_for(Q, c=c) | {'base_model.model.lm_head.base_layer.weight': copy}
        return load_adapter(write(tmp_path / 'a', tensors, target_modules=['q_proj']), c, base_tensor=lambda name: base)
    assert load(copy).max_rank == 4
    changes = [(4999, 31, 3e-3), (2500, 0, -1.), (0, 0, 2**-22), (17, 3, -.02)]
    for row,column,change in changes:
        other = exact.copy()
        other[row, column] += change
        with pytest.raises(Refused, match='differs from lm_head.weight'): load(ROUNDED[saved](other))
    with pytest.raises(Refused, match='differs'): load(ROUNDED[saved](exact[::-1].copy()))
    if served == saved: # equal means equal
        other = copy.copy()
        other[7, 7] = np.nextafter(other[7, 7], other.dtype.type(9))
        with pytest.raises(Refused, match='differs'): load(other)

@peft_warns
def test_B05_tied_base_has_one_matrix(tmp_path):
    tied = replace(M0, tied=True)
    trained(tied, r=4, target_modules=['embed_tokens', 'lm_head']).save_pretrained(tmp_path / 'a')
    asked = []
    def base_tensor(name):
        asked.append(name)
        return llama(tied).state_dict()['model.embed_tokens.weight'].numpy()
    assert len(load_adapter(tmp_path / 'a', tied, base_tensor=base_tensor).modules) == 2
    assert asked == ['model.embed_tokens.weight'] * 2
    trained(tied, r=4, target_modules=['embed_tokens'], ensure_weight_tying=True).save_pretrained(tmp_path / 'b')
    assert 'ensure_weight_tying' in refusal(tmp_path / 'b', tied, base_tensor=base_tensor)
    assert load_adapter(write(tmp_path / 'c', tensors_for(QV), ensure_weight_tying=True), tied) # nothing tied is targeted

@pytest.mark.parametrize('targets, paths', [
    (r'.*layers\.1.*(q|v)_proj', [p for p in QV if 'layers.1' in p]),
    ('all-linear', all_layers(*LINEARS)),
    (sorted(all_layers(*LINEARS), reverse=True), all_layers(*LINEARS)),
    (['self_attn.q_proj', 'model.layers.1.mlp.up_proj'], [*Q[:1], Q[1], 'model.layers.1.mlp.up_proj']),
    (None, QV)], ids=['regex', 'all-linear', 'full paths', 'suffixes', 'null'])
def test_B06_target_modules(tmp_path, targets, paths):
    adapter = load_adapter(write(tmp_path / 'a', tensors_for(paths), target_modules=targets), M0)
    assert list(adapter.modules) == [p for p in module_shapes(M0) if p in paths] and not adapter.notes

def test_B06_a_bare_string_is_a_regex(tmp_path):
    assert "target_modules='q_proj'" in refusal(write(tmp_path / 'a', tensors_for(Q), target_modules='q_proj'), M0)

def test_B08_dora(tmp_path):
    trained(r=4, target_modules=['q_proj', 'v_proj'], use_dora=True).save_pretrained(tmp_path / 'a')
    tensors = load_file(tmp_path / 'a/adapter_model.safetensors')
    assert {x.shape for k,x in tensors.items() if k.endswith('lora_magnitude_vector')} == {(32,), (16,)}
    assert 'use_dora=True' in refusal(tmp_path / 'a', M0)
    sentence = refusal(write(tmp_path / 'b', tensors), M0) # the flag lost, the magnitudes still there
    assert 'lora_magnitude_vector' in sentence and 'DoRA' in sentence

def test_B10_file_without_tensors(tmp_path):
    header = b'{"__metadata__":{"format":"pt"}}'
    assert 'no LoRA tensors' in refusal(write(tmp_path / 'a', struct.pack('<Q', len(header)) + header), M0)
    copy_only = {'base_model.model.lm_head.base_layer.weight': np.ones((64, 32), np.float32)}
    assert 'no LoRA tensors' in refusal(write(tmp_path / 'b', copy_only), M0)

BROKEN = {
    'A of shape [0]': (lambda t: t | {A0: np.zeros(0, np.float32)}, A0),
    'rank of B': (lambda t: t | {B0: np.zeros((32, 8), np.float32)}, B0),
    'rank 0': (lambda t: t | {A0: np.zeros((0, 32), np.float32), B0: np.zeros((32, 0), np.float32)}, A0),
    'three axes': (lambda t: t | {A0: np.zeros((4, 32, 1), np.float32)}, A0),
    'transposed': (lambda t: t | {A0: t[A0].T.copy()}, A0),
    'B missing': (lambda t: {k: x for k,x in t.items() if k != B0}, f"'{A0}' has no partner"),
    'A missing': (lambda t: {k: x for k,x in t.items() if k != A0}, f"'{B0}' has no partner"),
    'NaN': (lambda t: t | {B0: np.full((32, 4), np.nan, np.float32)}, f"'{B0}' holds numbers that are not finite"),
    'infinity in bfloat16': (lambda t: t | {A0: np.full((4, 32), np.inf, ml_dtypes.bfloat16)}, A0),
    'float64': (lambda t: t | {A0: t[A0].astype(np.float64)}, f"'{A0}' is F64"),
    'int8': (lambda t: t | {A0: t[A0].astype(np.int8)}, f"'{A0}' is I8")}

@pytest.mark.parametrize('kind', BROKEN)
def test_B11_broken_tensors(tmp_path, kind):
    change, named = BROKEN[kind]
    good = tensors_for(QV)
    assert named in refusal(write(tmp_path / 'bad', change(good)), M0)
    assert load_adapter(write(tmp_path / 'good', good), M0).n_params == 2 * 4 * (32 + 32 + 32 + 16)

def test_B11_cut_files_and_configs(tmp_path):
    good = tensors_for(QV)
    whole = (write(tmp_path / 'good', good) / 'adapter_model.safetensors').read_bytes()
    for i,cut in enumerate((whole[:-3], b'', whole[:4], whole[:100], whole + b'...')):
        assert 'adapter_model.safetensors: not a whole safetensors file' in refusal(write(tmp_path / f'cut{i}', cut), M0)
    folder = write(tmp_path / 'config', good)
    texts = {b'{': 'JSON', b'': 'JSON', b'[' * 100_000: 'JSON', b'\xff': 'text', b'[]': 'a list', b'{"r": 4}': 'peft_type'}
    for text,named in texts.items():
        (folder / 'adapter_config.json').write_bytes(text)
        assert (sentence := refusal(folder, M0)).startswith("adapter 'config': ") and 'adapter_config.json' in sentence
        assert named in sentence
    (folder / 'adapter_config.json').unlink()
    assert 'adapter_config.json: no such file' in refusal(folder, M0)
    (folder / 'adapter_config.json').mkdir()
    assert 'adapter_config.json is not readable as text (Is a directory)' in refusal(folder, M0)
    assert 'Not a directory' in refusal(tmp_path / 'good/adapter_model.safetensors', M0, 'name')
    assert 'no such file' in refusal(tmp_path / 'nothing', M0)
    assert 'rank 8' in refusal(write(tmp_path / 'rank', good, r=8), M0)
    assert load_adapter(write(tmp_path / 'pattern', good, r=8, rank_pattern={'q_proj': 4, 'v_proj': 4}), M0).max_rank == 4
    for r in (0, -1, 513, 4., True, '4', None, [4]): assert f'r={r!r}' in refusal(write(tmp_path / 'r', good, r=r), M0)

def test_B11_damaged_files_load_or_are_refused(tmp_path):
    "Any byte of the header or value of the config may be wrong; nothing but `Refused` comes out."
    folder = save_adapter(random_adapter(M0, targets=('q_proj', 'embed_tokens')), tmp_path / 'a')
    weights, config = ((folder / name).read_bytes() for name in ('adapter_model.safetensors', 'adapter_config.json'))
    rng, refused = np.random.default_rng(0), 0
    fields = [*json.loads(config), 'layers_to_transform', 'layers_pattern', 'exclude_modules', 'init_lora_weights', 'use_dora']
    values = [None, True, 0, -1, 1e400, 'x', '(', [1], [None], {'a': 1}, {'a': None}, {'q_proj': [1]}, [[1]], '\ud800', 2**70]
    for _ in range(300):
        damaged = bytearray(weights)
        damaged[rng.integers(1000)] = rng.integers(256)
        changed = json.loads(config) | {fields[rng.integers(len(fields))]: values[rng.integers(len(values))]}
        for bad_weights, bad_config in ((damaged, config), (weights, json.dumps(changed).encode())):
            (folder / 'adapter_model.safetensors').write_bytes(bad_weights)
            (folder / 'adapter_config.json').write_bytes(bad_config)
            try: load_adapter(folder, M0)
            except Refused as e: refused += '\n' not in str(e)
    assert 300 < refused < 600

@pytest.mark.parametrize('rank', [1, 2, 3, 64, 512])
def test_B11_ranks_from_1_to_512(tmp_path, rank):
    assert load_adapter(write(tmp_path / 'a', tensors_for(Q, rank), r=rank, target_modules=['q_proj']), M0).max_rank == rank

BAD_VALUES = dict(
    r=[0, 513, '8', 8., None, True], lora_alpha=['x', None, True, math.inf, math.nan, 10**400], use_rslora=['false', 1],
    rank_pattern=[['q'], 3, {'q_proj': 0}, {'q_proj': 513}, {'q_proj': 2.}, {'(': 2}, {'(?i)q_proj': 2}],
    alpha_pattern=[{'q_proj': 'x'}], target_modules=['(', [1], {'q': 1}, 3], exclude_modules=['[', 3], bias=['some'],
    layers_to_transform=['all', [1.], True], layers_pattern=['layers'],
    ensure_weight_tying=['yes'], peft_type=[None, 'lora', ['LORA'], 'ADALORA'], task_type=['SEQ_CLS', ['CAUSAL_LM']],
    init_lora_weights=['pissa', 'pissa_niter_16', 'olora', 'OLoRA', 'corda', 'loftq', 'lora_ga', 'future', {'a': 1}],
    megatron_config=[{'a': 1}], layer_replication=[[[0, 1]]], arrow_config=[{'top_k': 1}],
    use_qalora=[True], kasa_config=[{'beta': 1e-4}], enable_lora=[[True]], use_dora=[True, 'false'], starts_at_zero=[True],
    some_newer_field=['x'])

@pytest.mark.parametrize('field, value', [(field, value) for field,values in BAD_VALUES.items() for value in values])
def test_B11_config_values_are_refused_by_name(field, value):
    with pytest.raises(Refused, match=rf'^adapter_config.json: {field}(\[.*\])?=') as e:
        check_adapter_config({'peft_type': 'LORA', field: value})
    assert ';' in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 300

@pytest.mark.parametrize('value', [True, False, None, 'gaussian', 'eva', 'orthogonal', 'mica'])
def test_starts_that_leave_the_base_alone(tmp_path, value):
    assert load_adapter(write(tmp_path / 'a', tensors_for(QV), init_lora_weights=value), M0).modules.keys() == set(QV)

@pytest.mark.parametrize('variant', [dict(velora_config=VeloraConfig(num_groups=4)), dict(monteclora_config=MontecloraConfig()),
                                     dict(init_lora_weights='mica')], ids=lambda v: next(iter(v)))
@peft_warns
def test_variants_that_only_training_sees(tmp_path, variant):
    model = trained(r=4, target_modules=['q_proj'], **variant)
    model.save_pretrained(tmp_path / 'a')
    adapter, ids = load_adapter(tmp_path / 'a', M0), torch.arange(3, 15)[None]
    assert bool(adapter.notes) == ('init_lora_weights' not in variant)
    with torch.no_grad(): assert torch.allclose(model(ids).logits, merged_logits(M0, adapter, ids), atol=1e-4)

def test_B12_stored_numbers_are_read_exactly(tmp_path):
    values = np.array([1., 2**-8, 3.140625, -0.], np.float32)
    for name,dtype,extra in (('f32', np.float32, 1e-42), ('bf16', ml_dtypes.bfloat16, 1e-39), ('f16', np.float16, 6e-8)):
        tensors = {k: x.astype(dtype) for k,x in tensors_for(Q).items()}
        tensors[A0] = np.resize(np.append(values, np.float32(extra)), (4, 32)).astype(dtype)
        pair = load_adapter(write(tmp_path / name, tensors, target_modules=['q_proj']), M0).modules[Q[0]]
        assert pair.a.dtype == dtype and pair.a.tobytes() == tensors[A0].tobytes()
        wide = pair.a.astype(np.float32).reshape(-1)[:5]
        assert wide[:4].tobytes() == values.tobytes() and 0 < wide[4] == np.dtype(dtype).type(extra)
        # torch reads the same file independently
        oracle = torch_load(tmp_path / name / 'adapter_model.safetensors')[A0].float().numpy()
        assert oracle.tobytes() == pair.a.astype(np.float32).tobytes()

def test_B14_added_tokens(tmp_path):
    folder = write(tmp_path / 'a', tensors_for(QV))
    forms = {'added_tokens.json': lambda i: {'<|x|>': i},
             'tokenizer.json': lambda i: {'added_tokens': [{'id': 1, 'content': 'a'}, {'id': i, 'content': '<|x|>'}]},
             'tokenizer_config.json': lambda i: {'added_tokens_decoder': {str(i): {'content': '<|x|>'}}}}
    for name,form in forms.items():
        (folder / name).write_text(json.dumps(form(63)))
        assert load_adapter(folder, M0)
        (folder / name).write_text(json.dumps(form(64)))
        sentence = refusal(folder, M0)
        assert f"{name}: '<|x|>' has id 64" in sentence and '64 embeddings' in sentence
        assert load_adapter(folder, replace(M0, vocab_size=65))
        for broken in ('{', '[1]'):
            (folder / name).write_text(broken)
            assert name in refusal(folder, M0)
        (folder / name).unlink()

NAMES = {'org/model-0.6b_v1.2': False, 'a.b': False, 'lora': True, 'default': True, 'lora_A': True, '模型': True, '': False}
BAD_NAMES = ('../x', '/etc', 'a/../../x', r'a\b', 'a\0b', '%2e%2e', 'x' * 10_000, 'x' * 129, '.', '..', 'a b', 'a\n', ' ',
             'a/./b', 'a:b', 'e\u0301', 7)

@pytest.mark.parametrize('name', NAMES)
def test_B15_adapter_names(tmp_path, name):
    folder = write(tmp_path / 'a', tensors_for(QV))
    if NAMES[name]: assert load_adapter(folder, M0, name).name == name == check_name(name)
    else: assert 'letters, digits' in refusal(folder, M0, name)

@pytest.mark.parametrize('name', BAD_NAMES)
def test_B109_names_are_no_paths(tmp_path, name):
    with pytest.raises(Refused, match='^adapter name '): load_adapter(tmp_path / 'never read', M0, name)

def test_B15_the_default_name_is_the_directory(tmp_path, monkeypatch):
    folder = write(tmp_path / 'slots', tensors_for(QV))
    assert load_adapter(folder, M0).name == load_adapter(f'{folder}/', M0).name == 'slots'
    monkeypatch.chdir(folder)
    assert load_adapter('.', M0).name == 'slots'
    (tmp_path / 'v1.2').symlink_to(folder)
    assert "adapter name 'v1.2'" in refusal(tmp_path / 'v1.2', M0)
    assert load_adapter(tmp_path / 'v1.2', M0, 'v1_2').fingerprint == load_adapter(folder, M0).fingerprint

# numerics

IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 17, 44]])

@pytest.mark.parametrize('rslora, scale', [(True, 8.), (False, 2.)])
def test_B17_rslora(tmp_path, rslora, scale):
    model = trained(r=16, lora_alpha=32, use_rslora=rslora, target_modules=list(LINEARS))
    model.save_pretrained(tmp_path / 'a')
    adapter = load_adapter(tmp_path / 'a', M0)
    assert {p.scale for p in adapter.modules.values()} == {scale} == {m.scaling['default'] for m in lora_layers(model).values()}
    with torch.no_grad(): assert torch.allclose(model(IDS).logits, merged_logits(M0, adapter, IDS), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged_logits(M0, adapter, IDS), llama()(IDS).logits, atol=.1) # the adapter matters

@pytest.mark.filterwarnings('ignore:The following alpha_pattern keys did not match:RuntimeWarning')
@pytest.mark.parametrize('key, scales', [
    ('q_porj', [2., 2.]), ('^q_proj', [2., 2.]), ('^model.layers.0.self_attn.q_proj', [12.5, 2.])])
def test_B19_pattern_keys(tmp_path, key, scales):
    model = trained(r=8, lora_alpha=16, alpha_pattern={key: 100}, target_modules=['q_proj'])
    model.save_pretrained(tmp_path / 'a')
    adapter = load_adapter(tmp_path / 'a', M0)
    assert [p.scale for p in adapter.modules.values()] == scales == [m.scaling['default'] for m in lora_layers(model).values()]
    assert adapter.notes == (() if 12.5 in scales else (f"alpha_pattern key '{key}' decides no module",))

def test_B19_a_key_behind_another_decides_nothing(tmp_path):
    hidden = {'q_proj': 4, 'layers.0.self_attn.q_proj': 2}
    folder = write(tmp_path / 'a', tensors_for(Q), r=8, rank_pattern=hidden, target_modules=['q_proj'])
    assert load_adapter(folder, M0).notes == ("rank_pattern key 'layers.0.self_attn.q_proj' decides no module",)

def test_B21_alpha_is_not_the_scale(tmp_path):
    c = replace(M0, width=4, n_heads=2, n_kv_heads=1, head_dim=2)
    ones = {A0: np.ones((8, 4), np.float32), B0: np.ones((4, 8), np.float32)}
    adapter = load_adapter(write(tmp_path / 'a', ones, r=8, lora_alpha=16, target_modules=[Q[0]]), c)
    assert (adapter.modules[Q[0]].delta @ np.ones(4, np.float32)).tolist() == [64.] * 4

@pytest.mark.parametrize('key, number, alpha, fits', [ # rank 4, so the scale is alpha / 4
    (B0, 3e38, 32, False), (B0, 3e38, 4, True), (B0, 3e38, 2, True), (B0, -3e38, -32, False),
    (B0, 2. ** 126, 4, True), (B0, 2. ** 126, 16, False), (B0, 2. ** 126, 8, True), # 2**127 is bfloat16's largest power of two
    (A0, 3.39e38, 2, True), (A0, 3.4e38, 2, False), (A0, -3.4e38, 2, False)]) # float32 holds these, bfloat16 ends at 3.3895e38
def test_B23_overflowing_scale_is_refused_at_load(tmp_path, key, number, alpha, fits):
    good = tensors_for(QV)
    tensor = good[key].copy()
    tensor[1, 2] = number
    folder = write(tmp_path / 'a', good | {key: tensor}, lora_alpha=alpha)
    as_bfloat16 = torch.tensor(tensor).mul(alpha / 4 if key == B0 else 1).bfloat16()
    assert bool(as_bfloat16.isfinite().all()) == fits
    if fits: assert load_adapter(folder, M0).modules['model.layers.0.self_attn.q_proj'].scale == alpha / 4
    else: assert f'{key!r}' in (sentence := refusal(folder, M0)) and 'overflows bfloat16' in sentence

def test_B30_bias(tmp_path):
    for bias in ('none', 'lora_only', 'all'): assert load_adapter(write(tmp_path / bias, tensors_for(QV), bias=bias), M0)
    assert 'lora_bias=True' in refusal(write(tmp_path / 'a', tensors_for(QV), lora_bias=True), M0)
    for i,suffix in enumerate(('lora_B.bias', 'base_layer.bias', 'bias')):
        key = A0.replace('lora_A.weight', suffix)
        sentence = refusal(write(tmp_path / f'b{i}', tensors_for(QV) | {key: np.ones(32, np.float32)}, bias='all'), M0)
        assert key in sentence and 'bias' in sentence

# security

class Bomb:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return open, (self.marker, 'w')

def test_B111_pickles_are_never_opened(tmp_path):
    marker, tensors = str(tmp_path / 'marker'), tensors_for(QV)
    bomb = pickle.dumps(Bomb(marker))
    folder = write(tmp_path / 'a', tensors)
    (folder / 'adapter_model.bin').write_bytes(bomb)
    both = load_adapter(folder, M0)
    (folder / 'adapter_model.safetensors').unlink()
    assert 'adapter_model.bin: a pickle' in refusal(folder, M0)
    torch.save(dict(a=torch.ones(1)), tmp_path / 'zip')
    for i,content in enumerate((bomb, (tmp_path / 'zip').read_bytes())):
        assert 'not a whole safetensors file' in refusal(write(tmp_path / f'b{i}', content), M0)
    assert not os.path.exists(marker) and both.fingerprint == load_adapter(write(tmp_path / 'c', tensors), M0).fingerprint
    pickle.loads(bomb).close()
    assert os.path.exists(marker) # the bomb was live

def test_B111_loading_imports_neither_torch_nor_jax(tmp_path):
    folder = write(tmp_path / 'a', tensors_for(QV))
    code = ('import sys; from lorajax.peft import load_adapter; from lorajax.core import ModelConfig; '
            f'load_adapter({str(folder)!r}, {M0!r}); print(sorted({{"torch", "jax", "peft"}} & set(sys.modules)))')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == '[]\n'

# real files

REFUSED = { # the LORA ones among the 104; the other methods are refused by their peft_type
    'wild/old_bloom_enable_lora_list.json': 'enable_lora', 'wild/newest_qwen25_dora_40fields.json': 'use_dora',
    'peft_experiments/lora__rank14-target-mlp-bdlora.json': 'use_bdlora', 'peft_experiments/lora__rank32-dora.json': 'use_dora',
    'peft_experiments/lora__rank32-kasa.json': 'kasa_config', 'threads/vllm_issue_9280_modules_to_save.json': 'modules_to_save',
    'derived/lora_bias_true.json': 'lora_bias', 'derived/trainable_tokens.json': 'trainable_token_indices',
    'derived/target_parameters_moe.json': 'target_parameters', 'derived/unknown_future_field.json': 'use_futurelora'}
REFUSED |= dict.fromkeys((f'wild/{name}.json' for name in (
    'old_t5_seq2seq', 'old_gpt2_dotted_targets', 'old_distilbert_mixed_targets', 'mid_gpt2_c_attn', 'mid_paligemma_regex_targets',
    'mid_indictrans_seq2seq', 'new_feature_extraction', 'new_seqcls_modules_to_save')), 'task_type')

def test_104_public_configs(shared_data):
    index = json.loads((shared_data / 'adapter_configs/index.json').read_text())
    assert len(index) == 104
    outcomes = Counter()
    for entry in index:
        raw = json.loads((shared_data / 'adapter_configs' / entry['file']).read_text())
        named = 'peft_type' if entry['peft_type'] != 'LORA' else REFUSED.get(entry['file'])
        if named:
            with pytest.raises(Refused, match=rf'^adapter_config.json: (no )?{named}\b'): check_adapter_config(raw)
        else:
            s = check_adapter_config(raw)
            alpha, r = raw['lora_alpha'], raw.get('r', 8)
            scale = entry['scaling'] if entry['scaling'] is not None else alpha / r
            assert (s.r, s.lora_alpha) == (r, alpha) and math.isclose(scale_at(s, 'no pattern matches this'), scale)
        outcomes[named] += 1
    assert (outcomes[None], outcomes['peft_type'], outcomes.total()) == (47, 39, 104)

LAYERS28 = replace(M0, n_layers=28)

@peft_warns
def test_public_configs_resolve_as_in_peft(shared_data):
    "PEFT puts the same ranks and scales on the same modules of a 28-layer Llama, or finds none where we find none."
    compared = 0
    for entry in json.loads((shared_data / 'adapter_configs/index.json').read_text()):
        raw = json.loads((shared_data / 'adapter_configs' / entry['file']).read_text())
        if entry['peft_type'] != 'LORA' or entry['file'] in REFUSED: continue
        s = check_adapter_config(raw)
        ours = {p: (rank_at(s, p), scale_at(s, p)) for p in module_shapes(LAYERS28) if adapts(s, p)}
        config = LoraConfig(**{k: v for k,v in raw.items() if k in LoraConfig.__dataclass_fields__})
        try: model = peft.inject_adapter_in_model(config, llama(LAYERS28, 'meta'), low_cpu_mem_usage=True)
        except ValueError as e: assert 'not found in the base model' in str(e) and not ours, entry['file']
        else: assert {p: (m.r['default'], m.scaling['default']) for p,m in lora_layers(model).items()} == ours, entry['file']
        compared += bool(ours)
    assert compared >= 30

@pytest.mark.parametrize('folder, named', [
    ('gpt2_r8_conv1d_f32', 'base_model.model.transformer.h.0.attn.c_attn.lora_A.weight'),
    ('gpt_neox_1b_r1_f16', 'base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_A.weight'),
    ('roberta_unilora_not_lora', "peft_type='UNILORA'"), ('pythia70m_r32_legacy_bin', 'adapter_model.bin: a pickle')])
def test_real_adapters_of_other_models(shared_data, folder, named):
    assert named in refusal(shared_data / 'adapters' / folder, SMOLLM2)

BASES = { # the Llama-shaped bases among the headers; Gemma's attention has Llama's module names
    'ao-wei/gemma3-270m': dict(width=640, n_layers=18, n_heads=4, n_kv_heads=1, head_dim=256),
    'zouhe0/LLM-Homework': dict(width=640, n_layers=18, n_heads=4, n_kv_heads=1, head_dim=256),
    'MuzammelMokhtar': dict(width=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64),
    'Jr1407/SQL': dict(width=2048, n_layers=18, n_heads=8, n_kv_heads=1, head_dim=256)}

def test_real_tensor_tables(tmp_path, shared_data):
    dtypes, loaded = dict(F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16), 0
    for i,table in enumerate(json.load(gzip.open(shared_data / 'adapters/safetensors_headers.json.gz'))):
        tensors = {k: np.full(shape, .5, dtypes[d]) for k,(d, shape) in table['tensors'].items()}
        alpha = table['lora_alpha'] or 8
        settings = {k: table[k] for k in ('r', 'target_modules', 'fan_in_fan_out')} | dict(lora_alpha=alpha)
        folder = write(tmp_path / f'a{i}', tensors, **settings)
        shape = next((v for k,v in BASES.items() if k in table['origin']), None)
        if shape:
            adapter = load_adapter(folder, replace(M0, **shape))
            assert len(tensors) == 2 * len(adapter.modules)
            assert {(p.rank, p.scale) for p in adapter.modules.values()} == {(table['r'], alpha / table['r'])}
            assert 'the base gives it' in refusal(folder, replace(SMOLLM2, n_layers=24))
            loaded += 1
        else: assert min(tensors) in refusal(folder, SMOLLM2)
    assert (i, loaded) == (13, 4)

SHIPPED = dict(slots=(8, 2., ('q_proj', 'v_proj')), bash=(16, 2., LINEARS[:4]), bard=(4, 2., LINEARS[4:]), sql=(4, 2., LINEARS))

@pytest.mark.parametrize('name', SHIPPED)
def test_smollm2_adapters(shared_data, name):
    rank, scale, targets = SHIPPED[name]
    folder = shared_data / 'adapters_smollm2' / name
    adapter = load_adapter(folder, SMOLLM2)
    assert adapter.targets == targets and len(adapter.modules) == 30 * len(targets) and not adapter.notes
    assert {(p.rank, p.scale, p.a.dtype.name) for p in adapter.modules.values()} == {(rank, scale, 'bfloat16')}
    oracle = torch_load(folder / 'adapter_model.safetensors')
    for path,pair in adapter.modules.items():
        for key,x in zip(keys_for(path), (pair.a, pair.b)):
            assert np.array_equal(oracle[key].float().numpy(), x.astype(np.float32))
    assert refusal(folder, M0)

# there and back

@peft_warns
@pytest.mark.parametrize('rslora', [False, True])
def test_peft_to_lorajax(tmp_path, rslora):
    "Mixed ranks, patterns, embedding and head: each delta equals PEFT's, and so do the logits."
    model = trained(r=6, lora_alpha=10, use_rslora=rslora, target_modules=[*LINEARS, 'embed_tokens', 'lm_head'],
                    rank_pattern={'k_proj': 3, r'layers.1.mlp.*': 40}, alpha_pattern={'v_proj': 7, '^lm_head': 2.5},
                    exclude_modules=['layers.0.self_attn.o_proj'])
    model.save_pretrained(tmp_path / 'a')
    adapter = load_adapter(tmp_path / 'a', M0, base_tensor=lambda name: llama().state_dict()[name].numpy())
    layers = lora_layers(model)
    assert adapter.modules.keys() == layers.keys() and len(layers) == 15 and not adapter.notes
    for path,pair in adapter.modules.items():
        assert pair.scale == layers[path].scaling['default'] and pair.rank == layers[path].r['default']
        delta = layers[path].get_delta_weight('default').detach().numpy()
        np.testing.assert_allclose(pair.delta.T if path == 'model.embed_tokens' else pair.delta, delta, rtol=1e-5, atol=1e-5)
    with torch.no_grad(): assert torch.allclose(model(IDS).logits, merged_logits(M0, adapter, IDS), rtol=1e-3, atol=1e-3)

def mixed_adapter(dtype=np.float32):
    kinds = ((8, ('q_proj', 'v_proj'), 2.), (1, ['model.layers.1.self_attn.o_proj'], 32.), (24, ['lm_head'], .1),
             (3, ('down_proj', 'model.layers.0.mlp.up_proj'), 16 / 3), (5, ['embed_tokens'], 1.7))
    parts = [random_adapter(M0, rank=r, targets=targets, scale=s, seed=i, std=.2) for i,(r, targets, s) in enumerate(kinds)]
    cast = lambda pair: replace(pair, a=pair.a.astype(dtype), b=pair.b.astype(dtype))
    pairs = {path: cast(pair) for part in parts for path,pair in part.modules.items()}
    return Adapter('mixed', {path: pairs[path] for path in module_shapes(M0) if path in pairs})

@peft_warns
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16, np.float16])
def test_lorajax_to_peft(tmp_path, dtype):
    adapter = mixed_adapter(dtype)
    folder = save_adapter(adapter, tmp_path / 'new' / 'mixed', base_name='tiny/base')
    assert sorted(p.name for p in (tmp_path / 'new').iterdir()) == ['mixed'] # nothing temporary is left
    model = PeftModel.from_pretrained(llama(), folder).eval()
    layers = lora_layers(model)
    assert layers.keys() == adapter.modules.keys() and model.peft_config['default'].base_model_name_or_path == 'tiny/base'
    for path,pair in adapter.modules.items():
        assert (layers[path].r['default'], layers[path].scaling['default']) == (pair.rank, pair.scale), path
        delta = layers[path].get_delta_weight('default').detach().numpy()
        np.testing.assert_allclose(delta.T if path == 'model.embed_tokens' else delta, pair.delta, rtol=1e-5, atol=1e-5)
    with torch.no_grad(): assert torch.allclose(model(IDS).logits, merged_logits(M0, adapter, IDS), rtol=1e-4, atol=1e-4)
    again = load_adapter(folder, M0)
    assert again.fingerprint == adapter.fingerprint and list(again.modules) == list(adapter.modules) and not again.notes
    assert {p.a.dtype for p in again.modules.values()} == {np.dtype(dtype)}

def test_scales_survive_saving_exactly():
    "Every alpha/r and alpha/sqrt(r) comes back to the last bit, one rank at a time and mixed."
    def pair(r, scale): return LoraPair(np.zeros((r, 2), np.float32), np.zeros((2, r), np.float32), scale)
    def back(pairs):
        s = check_adapter_config(json.loads(json.dumps(peft_config(pairs))))
        return {path: (rank_at(s, path), scale_at(s, path)) for path in pairs}
    for root in (float, math.sqrt):
        for alpha in (0, 1, 8, 16, 2.5, 100, 1e-3, 2 / 3, -4):
            wanted = {f'm.{r}': (r, alpha / root(r)) for r in range(1, 513)}
            for path,want in wanted.items(): assert back({path: pair(*want)}) == {path: want}
            few = {path: want for path,want in wanted.items() if want[0] % 50 in (1, 2)}
            assert back({path: pair(*want) for path,want in few.items()}) == few
    # neither division reaches both of these; and a key not anchored or not escaped would hit the neighbours
    mixed = {'m.a': (3, 16 / 3), 'm.b': (7, 5 / math.sqrt(7)), 'x.m.a': (3, 1.), 'mxa': (2, 3.)}
    for path,(rank, scale) in back({path: pair(*want) for path,want in mixed.items()}).items():
        assert rank == mixed[path][0] and math.isclose(scale, mixed[path][1], rel_tol=2**-52)

def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    adapter = mixed_adapter()
    (tmp_path / 'there').mkdir()
    with pytest.raises(Refused, match='is there already'): save_adapter(adapter, tmp_path / 'there')
    def full(*args, **kwargs): raise OSError(28, 'No space left on device')
    monkeypatch.setattr('lorajax.peft.save_file', full)
    with pytest.raises(OSError, match='No space'): save_adapter(adapter, tmp_path / 'new')
    assert [p.name for p in tmp_path.iterdir()] == ['there']

PAIR = LoraPair(np.ones((2, 8), np.float32), np.ones((6, 2), np.float32), 2.)
def with_number(value): return np.array([[1, value]] * 6, np.float32)

@pytest.mark.parametrize('pair, named', [
    (LoraPair(np.ones((600, 8), np.float32), np.ones((6, 600), np.float32), 2.), 'r=600; the rank must be from 1 to 512'),
    (replace(PAIR, b=with_number(np.nan)), 'lm_head.lora_B.weight'), (replace(PAIR, a=-np.inf * PAIR.a), 'lm_head.lora_A.weight'),
    (replace(PAIR, b=with_number(3e38)), 'times the scale 2 overflows bfloat16'),
    (replace(PAIR, scale=math.inf), 'lora_B.weight'),
    (replace(PAIR, scale=math.nan), 'lora_B.weight'), (replace(PAIR, b=0 * PAIR.b, scale=1e31), 'alpha must be a finite number')])
def test_what_would_not_load_is_not_saved(tmp_path, pair, named):
    good = {'model.layers.0.self_attn.q_proj': PAIR, 'model.layers.1.self_attn.q_proj': PAIR}
    with pytest.raises(Refused, match=f"^adapter 'x': .*{named}") as e:
        save_adapter(Adapter('x', {'lm_head': pair}), tmp_path / 'new/x')
    assert '\n' not in str(e.value) and not list(tmp_path.iterdir())
    mixed = good | {'lm_head': pair} # as a pattern beside a good majority
    with pytest.raises(Refused, match="^adapter 'x': "): save_adapter(Adapter('x', mixed), tmp_path / 'new/x')
    assert save_adapter(Adapter('x', good), tmp_path / 'new/x')

@pytest.mark.parametrize('targets, named', [
    (('q_proj', 'v_porj'), 'v_porj'), ('q_proj', '_'), (['model.layers.2.self_attn.q_proj'], 'layers.2'),
    (['self_attn.q_proj'], 'self'), (['q_proj', ''], "''")])
def test_random_adapter_drops_no_target(targets, named):
    with pytest.raises(Refused, match=f'^target .*{named}.* is no module of this base'): random_adapter(M0, targets=targets)

# identity

def test_adapter_fingerprint():
    adapter = mixed_adapter(ml_dtypes.bfloat16)
    wide = {p: LoraPair(x.a.astype(np.float32), x.b.astype(np.float32), x.scale) for p,x in reversed(adapter.modules.items())}
    assert adapter_fingerprint(wide) == adapter.fingerprint == replace(adapter, name='other').fingerprint
    path, pair = 'lm_head', wide['lm_head']
    bumped = pair.a.copy()
    bumped[3, 7] = np.nextafter(bumped[3, 7], np.float32(9))
    rest = {p: x for p,x in wide.items() if p != path}
    others = [rest, rest | {'model.lm_head': pair}, *(rest | {path: other} for other in (
        replace(pair, scale=pair.scale * 2), replace(pair, a=bumped), replace(pair, a=pair.a[::-1], b=pair.b[:, ::-1])))]
    assert len({adapter_fingerprint(m) for m in others} | {adapter.fingerprint}) == 6
    flat = np.arange(24, dtype=np.float32) # the same numbers cut differently
    cut = lambda r, n: LoraPair(flat[:r * n].reshape(r, n), flat[r * n:].reshape(-1, r), 1.)
    assert len({adapter_fingerprint({'m': cut(*shape)}) for shape in ((2, 6), (3, 4), (4, 3), (2, 3))}) == 4

def test_an_adapter_cannot_change_under_its_fingerprint():
    a, b = np.ones((2, 8), np.float32), np.ones((6, 2), np.float32)
    frozen = a.view()
    frozen.flags.writeable = False # the array behind it is still the caller's
    for given in (a, a[:], frozen, a.reshape(8, 2).T):
        adapter = Adapter('x', {'lm_head': LoraPair(given, b, 1.)})
        a[:], b[:] = 7, 7
        assert adapter_fingerprint(adapter.modules) == adapter.fingerprint and adapter.modules['lm_head'].delta[0, 0] == 2
        a[:], b[:] = 1, 1

def test_read_only_arrays_are_not_copied_again(tmp_path):
    pair = random_adapter(M0).modules[Q[0]]
    assert replace(pair, scale=1.).a is pair.a and LoraPair(pair.a, pair.b, 1.).b is pair.b
    for loaded in load_adapter(write(tmp_path / 'a', tensors_for(QV)), M0).modules.values():
        assert all(x.base is None and not x.flags.writeable for x in (loaded.a, loaded.b))

def test_a_pair_has_a_dtype_that_files_hold():
    for a,b in ((np.float64, np.float32), (np.float32, np.int32)):
        with pytest.raises(AssertionError, match='float32, bfloat16 or float16'):
            LoraPair(np.ones((2, 8), a), np.ones((6, 2), b), 1.)

def test_arrays_are_read_only():
    pair = random_adapter(M0).modules[Q[0]]
    with pytest.raises(ValueError, match='read-only'): pair.a[0, 0] = 1
    with pytest.raises(TypeError): random_adapter(M0).modules['x'] = pair

def test_base_fingerprint():
    rng = np.random.default_rng(0)
    big, small = rng.standard_normal((3000, 1500)).astype(np.float32), np.ones(5, np.float32) # big takes more than one chunk
    embedding, norm = 'model.embed_tokens.weight', 'model.norm.weight'
    def of(tensors, c=M0): return base_fingerprint({name: tensor_digest(name, x) for name,x in tensors.items()}, c)
    found = of({embedding: big, norm: small})
    in_bf16 = torch.from_numpy(big).bfloat16().view(torch.uint16).numpy().view(ml_dtypes.bfloat16) # rounded by torch
    assert found == of({norm: small, embedding: in_bf16})
    assert found == of({embedding: np.asfortranarray(big), norm: small})
    assert found == of({embedding: big, norm: small}, replace(M0, max_len=7, rms_eps=float(np.float32(1e-6)), rope_theta=10000))
    moved = big.copy()
    moved[2999, 1499] += .5
    others = [of({embedding: big, norm: small}, replace(M0, **change)) for change in (
        dict(rope_theta=1e6), dict(rms_eps=1e-5), dict(n_heads=2), dict(qk_norm=True), dict(windows=(8, 0)),
        dict(rope_scaling=RopeScaling(8.)), dict(rope_scaling=RopeScaling(4.)))]
    others += [of({embedding: moved, norm: small}), of({embedding: big.reshape(1500, 3000), norm: small}),
               of({'x': big, norm: small}), of({embedding: big}), of({embedding: big, norm: small, 'lm_head.weight': moved})]
    assert len({found, *others}) == 13
    # the documented limit: what bfloat16 doesn't tell apart shares a fingerprint
    assert found == of({embedding: in_bf16.astype(np.float32), norm: small}) and (in_bf16.astype(np.float32) != big).any()
    tied = replace(M0, tied=True)
    assert of({embedding: big}, tied) == of({embedding: big, 'lm_head.weight': moved}, tied) != of({embedding: big})

def test_version_id():
    a, b = 'a' * 64, 'b' * 64
    assert len({version_id(a), version_id(b), version_id(a, b), version_id(b, a), version_id(a, a)}) == 5
    assert version_id(a, b) == version_id(a, b) and len(version_id(a)) == 64
