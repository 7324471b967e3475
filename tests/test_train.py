"""Training beside PEFT and torch, in separate runs, in other processes and under faults: too much for a lesson."""
import json, os, subprocess, sys
from dataclasses import replace
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, pytest, torch, typer
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
import dense
from lorajax import fit as fit_module
from lorajax.adapters import random_adapter
from lorajax.base import byte_tokenizer, load_base, random_base
from lorajax.cli_train import add_merge, add_train
from lorajax.core import ModelConfig, Refused, Sampling
from lorajax.engine import Config, Engine
from lorajax.examples import Example, batch_rows, drawn, end_token, example_of, fitting, read_examples
from lorajax.fit import Checkpoints, Task, fit
from lorajax.lora_config import LoraSettings, rank_at, scale_at
from lorajax.loss import mean_losses, routing_table, row_losses
from lorajax.model import random_tensors
from lorajax.peft import load_adapter, save_adapter
from lorajax.train import (Recipe, fresh_adapter, gradient, groups_of, learning_rate, numbers_of, scales_of, start, update,
                           with_numbers)
from lorajax.working_set import working_set

SEVEN = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
torch.set_num_threads(1)
M0 = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=128)
quiet_peft = pytest.mark.filterwarnings('ignore::UserWarning', 'ignore:`is_gradient_checkpointing`:FutureWarning')

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    "A tiny Llama in torch, and the same weights as a base here."
    folder = tmp_path_factory.mktemp('llama')
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=.2, bos_token_id=None, eos_token_id=256,
        pad_token_id=None))
    model.save_pretrained(folder)
    byte_tokenizer().codec.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(eos_token='<|end|>')))
    return model, load_base(folder, 'float32', 'tiny')

def filled(adapter, seed, std=.2):
    "The adapter with random numbers in both matrices, so that all gradients differ from zero."
    rng = np.random.default_rng(seed)
    draw = lambda x: (std * rng.standard_normal(x.shape)).astype(np.float32)
    return replace(adapter, modules={path: replace(p, a=draw(p.a), b=draw(p.b)) for path,p in adapter.modules.items()})

@pytest.fixture(scope='module', autouse=True)
def compiled_once(tmp_path_factory):
    "The processes that these tests start share their programs; compiling is most of their time."
    CACHE.update(JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp('xla')), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
                 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1')

CACHE = {}

def sums(base, n=6): return [example_of(base.tokenizer, f'{i}+{i * 7}=', str(i + i * 7)) for i in range(3, 3 + n)]

def torch_loss(model, examples):
    "Mean cross entropy over all answer tokens of the examples, row by row."
    total, count = 0., 0
    for e in examples:
        ids = torch.tensor([e.tokens])
        logits = model(input_ids=ids).logits[0, e.start - 1:-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, e.start:], reduction='sum')
        count += len(e.tokens) - e.start
    return total / count

CONFIGS = dict(seven=dict(r=4, lora_alpha=8, target_modules=SEVEN),
               patterns=dict(r=4, lora_alpha=8, use_rslora=True, target_modules=('q_proj', 'down_proj'),
                             rank_pattern=((r'layers\.1\.mlp\.down_proj', 7),), alpha_pattern=(('q_proj', 3.),)),
               subset=dict(r=3, target_modules=('v_proj', 'up_proj'), layers_to_transform=(1,)),
               ends=dict(r=2, lora_alpha=4, target_modules=('embed_tokens', 'lm_head')))

@quiet_peft
def test_gradients_equal_those_of_peft(pair, tmp_path):
    "Four adapters in one batch here; one after another there. Largest difference over the largest gradient: 1e-3."
    model, base = pair
    adapters = [filled(fresh_adapter(base, name, LoraSettings(**c)), i) for i,(name, c) in enumerate(CONFIGS.items())]
    examples = [sums(base)[i:] for i in range(len(adapters))] # another number of rows for each
    slots = [i for i,e in enumerate(examples, 1) for _ in e]
    g = gradient(base, [numbers_of(a, base.config) for a in adapters], [scales_of(a, base.config) for a in adapters],
                 batch_rows(sum(examples, []), slots))
    for i,a in enumerate(adapters):
        peft = PeftModel.from_pretrained(model, save_adapter(a, tmp_path / a.name), is_trainable=True)
        loss = torch_loss(peft, examples[i])
        loss.backward()
        np.testing.assert_allclose(g.sums[i] / g.counts[i], loss.item(), rtol=1e-5)
        ours = with_numbers(a, jax.tree.map(lambda x: np.asarray(x / g.counts[i]), g.grads[i]), base.config)
        theirs = dict(peft.named_parameters())
        for path,p in ours.modules.items():
            kind = 'lora_embedding_{}.default' if 'embed' in path else 'lora_{}.default.weight'
            for part, mine in zip('AB', (p.a, p.b)):
                want = theirs[f'base_model.model.{path}.{kind.format(part)}'].grad.numpy()
                assert np.abs(mine - want).max() <= 1e-3 * np.abs(want).max() > 0, (a.name, path, part)
        peft.unload()

@quiet_peft
def test_fifty_updates_give_the_loss_curve_of_peft(pair, tmp_path):
    model, base = pair
    recipe = Recipe(steps=50, rows=4, accumulate=2, lr=5e-3, warmup=5, weight_decay=.01, clip=.5)
    task = Task(fresh_adapter(base, 'sums', LoraSettings(r=4, lora_alpha=8, target_modules=SEVEN), seed=3), sums(base, 20))
    ours = fit(base, [task], recipe)[0].losses
    peft = PeftModel.from_pretrained(model, save_adapter(task.adapter, tmp_path / 'a'), is_trainable=True)
    own = [p for p in peft.parameters() if p.requires_grad]
    adamw, theirs = torch.optim.AdamW(own, weight_decay=.01), []
    for step in range(50):
        for group in adamw.param_groups: group['lr'] = float(learning_rate(step, recipe))
        batch = sum((fit_module._chosen(task, 2 * step + i, recipe) for i in range(2)), [])
        loss = torch_loss(peft, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, .5)
        adamw.step(), adamw.zero_grad()
        theirs.append(loss.item())
    peft.unload()
    print(f'largest difference {np.abs(np.subtract(ours, theirs)).max():.1e}, loss {ours[0]:.2f} to {ours[-1]:.2f}')
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert ours[-1] < ours[0] - 1

def test_B101_padding_by_length_and_not_by_id():
    "pad = eos = 2: the true ends count, padding does not; with the prompt masked only the answers do."
    rows = batch_rows([Example((5, 6, 2), 1), Example((7, 2), 1)], [1, 1], step=4)
    assert rows.tokens.tolist() == [[5, 6, 2, 0], [7, 2, 0, 0]]
    found = [(r, p, t) for r,p,t in zip(rows.row, rows.place, rows.target) if t >= 0]
    assert found == [(0, 0, 6), (0, 1, 2), (1, 0, 2)]
    masked = batch_rows([Example((5, 6, 2), 2), Example((7, 2), 1)], [1, 1], step=4)
    assert [t for t in masked.target if t >= 0] == [2, 2]

def test_B101_the_loss_of_padded_rows_is_that_of_each_alone():
    base = random_base(M0)
    examples = [Example((5, 6, 256), 1), Example((7, 256), 1), Example((9, 8, 7, 6, 5, 256), 3)]
    rows = batch_rows(examples, [0] * 3, step=8)
    together = np.asarray(row_losses(base, rows))[:6]
    w = random_tensors(M0)
    def alone(e):
        logits = dense.logits(M0, w, e.tokens).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return [-logp[p - 1, e.tokens[p]] for p in range(e.start, len(e.tokens))]
    np.testing.assert_allclose(together, sum(map(alone, examples), []), rtol=1e-4)

def test_an_answer_ends_with_the_token_that_ends_a_turn():
    tokenizer = byte_tokenizer()
    e = example_of(tokenizer, 'ab', 'cd')
    assert e.tokens == (97, 98, 99, 100, 256) and e.start == 2 and end_token(tokenizer) == 256
    chat = ('{% for m in messages %}<{{m.role}}>{{m.content}}<|end|>{% endfor %}'
            '{% if add_generation_prompt %}<assistant>{% endif %}')
    templated = replace(tokenizer, template=chat)
    e = example_of(templated, 'ab', 'cd')
    assert templated.decode(e.tokens, skip_special=False) == '<user>ab<|end|><assistant>cd<|end|>'
    assert templated.decode(e.tokens[e.start:], skip_special=False) == 'cd<|end|>'

@pytest.mark.parametrize('line, sentence', [
    ('{"input": "a"}', "needs strings 'input' and 'output'"), ('[1]', 'a list and not a JSON object'), ('{', 'line 2'),
    ('{"input": "a", "output": 3}', 'needs strings'), ('{"text": ""}', 'its text is empty'),
    ('{"input": "a", "output": "b", "text": "c"}', "has 'text' beside another prompt"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "needs strings"), ('{"input": "", "output": "b"}', 'no tokens'),
    ('{"input": "<|end|>\\ufdd0", "output": "b"}', 'U+FDD0')])
def test_a_bad_line_is_named(tmp_path, line, sentence):
    (tmp_path / 'x.jsonl').write_text('{"text": "fine", "label": 3}\n' + line + '\n')
    with pytest.raises(Refused, match='x.jsonl, line 2: ') as e: read_examples(tmp_path / 'x.jsonl', byte_tokenizer())
    assert sentence in str(e.value)

def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / 'x.jsonl.gz').write_bytes(b'not gzip')
    (tmp_path / 'empty.jsonl').write_text('\n')
    (tmp_path / 'latin.jsonl').write_bytes(b'\xff')
    for name in ('x.jsonl.gz', 'empty.jsonl', 'latin.jsonl', 'none.jsonl'):
        with pytest.raises(Refused, match=name): read_examples(tmp_path / name, byte_tokenizer())

# One run in several processes. The script trains, and says with which bits it ended.
RUN = '''
import sys
sys.path.insert(0, {tests!r})
import test_train as t
from lorajax.base import random_base
base = random_base(t.M0)
done = t.fit(base, t.two_tasks(base), t.RECIPE, {folder!r})
print([(x.adapter.fingerprint, x.losses, x.held_out, x.stopped) for x in done])
'''
RECIPE = Recipe(steps=10, rows=3, accumulate=2, lr=.02, warmup=2, dropout=.1, evaluate_every=4, save_every=3, seed=5)

def two_tasks(base, rank=4):
    def task(name, seed, **kw):
        adapter = fresh_adapter(base, name, LoraSettings(r=rank, target_modules=('q_proj', 'up_proj')), seed, **kw)
        return Task(adapter, sums(base, 8), sums(base, 12)[8:])
    return [task('red', 1), task('blue', 2, routing=True)]

def run(folder, first=''):
    env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUMPY_DTYPE_PROMOTION': 'strict', 'JAX_NUMPY_RANK_PROMOTION': 'raise'}
    env |= CACHE
    script = RUN.format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run([sys.executable, '-c', first + script], capture_output=True, text=True, env=env)
    if done.returncode not in (0, 1): return f'exit status {done.returncode}'
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]

def result(done): return str([(x.adapter.fingerprint, x.losses, x.held_out, x.stopped) for x in done])

def test_B103_ten_steps_equal_five_and_five_in_a_new_process(tmp_path):
    base = random_base(M0)
    straight = fit(base, two_tasks(base), RECIPE)
    half = fit(base, two_tasks(base), RECIPE, tmp_path / 'run', until=5)
    assert [len(t.losses) for t in half] == [5, 5] and {t.stopped for t in half} == {'paused'}
    assert run(tmp_path / 'run') == result(straight), 'adapters, losses and judgements must agree in every bit'
    for other, tasks, recipe in [(base, two_tasks(base, rank=2), RECIPE), (random_base(M0, seed=1), two_tasks(base), RECIPE),
                                 (base, two_tasks(base), replace(RECIPE, lr=.01)), (base, two_tasks(base)[:1], RECIPE)]:
        with pytest.raises(Refused, match='holds another run'): fit(other, tasks, recipe, tmp_path / 'run')

DIE = """
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath
import os
async def die(self): os._exit(9) # the arrays are written, and have not got their name yet
AtomicRenameTemporaryPath.finalize = die
"""

def test_B103_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path):
    base = random_base(M0)
    fit(base, two_tasks(base), RECIPE, tmp_path, until=3)
    assert run(tmp_path, first=DIE) == 'exit status 9'
    assert Checkpoints(tmp_path, '').manager.latest_step() == 3
    assert result(fit(base, two_tasks(base), RECIPE, tmp_path)) == result(fit(base, two_tasks(base), RECIPE))

def test_B105_adapters_in_one_batch_train_as_each_would_alone():
    "With clipping, weight decay, dropout, unlike ranks and a routing token."
    base = random_base(M0)
    recipe = replace(RECIPE, clip=.1, weight_decay=.1)
    red, blue = two_tasks(base)
    unlike = LoraSettings(r=7, target_modules=('v_proj', 'lm_head'))
    blue = replace(blue, adapter=fresh_adapter(base, 'blue', unlike, 2, routing=True))
    together = fit(base, [red, blue], recipe)
    for mixed, task in zip(together, (red, blue)):
        alone = fit(base, [task], recipe)[0]
        np.testing.assert_allclose(mixed.losses, alone.losses, rtol=1e-4)
        for path,p in alone.adapter.modules.items():
            np.testing.assert_allclose(mixed.adapter.modules[path].a, p.a, atol=1e-4)
            np.testing.assert_allclose(mixed.adapter.modules[path].b, p.b, atol=1e-4)

def test_B105_gradients_do_not_reach_other_adapters():
    "An adapter without rows has a gradient of zero, and a loss that is not finite is its own adapter's alone."
    base = random_base(M0)
    adapters = [random_adapter(M0, n, r, ('q_proj', 'down_proj'), seed=r) for n,r in (('a', 3), ('b', 5), ('c', 2))]
    numbers, scales = zip(*((numbers_of(a, M0), scales_of(a, M0)) for a in adapters))
    g = gradient(base, numbers, scales, batch_rows(sums(base)[:2], [1, 3]))
    biggest = [max(float(np.abs(x).max()) for x in jax.tree.leaves(grads)) for grads in g.grads]
    assert biggest[1] == 0 and min(biggest[0], biggest[2]) > 0 and g.counts[1] == 0
    broken = jax.tree.map(np.copy, numbers[0])
    broken['modules']['q_proj']['a'][:] = np.nan
    bad = gradient(base, [broken, *numbers[1:]], scales, batch_rows(sums(base)[:2], [1, 3]))
    assert np.isnan(bad.sums[0]) and bad.sums[2] == g.sums[2]

def test_B105_a_recreated_adapter_starts_anew():
    base = random_base(M0)
    first, again = (fit(base, two_tasks(base)[:1], RECIPE)[0] for _ in range(2))
    assert first.adapter.fingerprint == again.adapter.fingerprint
    numbers = numbers_of(first.adapter, M0)
    assert all(not np.any(x) for x in jax.tree.leaves(start(numbers, RECIPE)))

B107 = dict(CONFIGS, routed=dict(r=4, target_modules=('q_proj',)))

@pytest.fixture(scope='module')
def trained(pair):
    "An adapter of each kind, after six updates in one batch."
    base = pair[1]
    start = {n: fresh_adapter(base, n, LoraSettings(**c), seed=4, routing=n == 'routed') for n,c in B107.items()}
    recipe = Recipe(steps=6, rows=2, lr=.02, warmup=1, dropout=.2)
    return {t.adapter.name: t.adapter for t in fit(base, [Task(a, sums(base, 8)) for a in start.values()], recipe)}

@quiet_peft
@pytest.mark.parametrize('name', B107)
def test_B107_the_file_holds_what_was_trained(pair, trained, tmp_path, name):
    "Logits of the trainer's forward, of serving, and of PEFT agree to 1e-5 of their size."
    (model, base), done = pair, trained[name]
    loaded = load_adapter(save_adapter(done, tmp_path / 'a', 'tiny/base'), base.config, name)
    settings = LoraSettings(**B107[name])
    assert loaded.fingerprint == done.fingerprint
    for path,p in loaded.modules.items(): assert (p.rank, p.scale) == (rank_at(settings, path), scale_at(settings, path))
    e = sums(base, 1)[0]
    rows = batch_rows([e], [1], [name == 'routed'])
    trainer = groups_of([numbers_of(done, base.config)], [scales_of(done, base.config)], base.config)
    served = working_set([loaded], base.config, jnp.float32)
    losses = [np.asarray(row_losses(base, rows, groups, routing_table([done], base))) for groups in (trainer, served)]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)
    raw = json.loads((tmp_path / 'a/adapter_config.json').read_text())
    assert raw['base_model_name_or_path'] == 'tiny/base' and raw['peft_type'] == 'LORA'
    if name == 'routed': return # PEFT knows no routing token
    peft = PeftModel.from_pretrained(model, tmp_path / 'a').eval()
    with torch.inference_mode(): theirs = torch_loss(peft, [e]).item()
    np.testing.assert_allclose(losses[0].sum() / (rows.target >= 0).sum(), theirs, rtol=1e-5)
    peft.unload()

def test_B108_dropout_is_for_training_only(monkeypatch):
    base = random_base(M0)
    task = two_tasks(base)[0]
    seen = []
    original = fit_module.gradient
    def spy(base, numbers, scales, rows, keys, rates, remat):
        if keys is not None: seen.append(jax.random.key_data(keys).tolist())
        return original(base, numbers, scales, rows, keys, rates, remat)
    monkeypatch.setattr(fit_module, 'gradient', spy)
    heavy = fit(base, [task], replace(RECIPE, dropout=.5))[0]
    flat = [tuple(k) for keys in seen for k in keys]
    assert len(flat) == len(set(flat)) == 10 * 2 * 3, 'a new key for each step, micro-batch and row'
    judge = lambda: mean_losses(base, [(heavy.adapter, task.held_out)])
    assert judge() == judge() and judge()[0] == heavy.held_out[-1][1]
    assert heavy.losses != fit(base, [task], replace(RECIPE, dropout=0.))[0].losses

def test_B108_remat_draws_the_same_mask():
    base = random_base(M0)
    adapter = random_adapter(M0, 'a', 4, ('q_proj', 'lm_head'), seed=1, std=.1)
    rows, keys, rates = batch_rows(sums(base)[:3], [1] * 3), jax.random.split(jax.random.key(1), 3), jnp.array([0., .5])
    of = lambda *args: gradient(base, [numbers_of(adapter, M0)], [scales_of(adapter, M0)], rows, *args)
    kept, again, plain = of(keys, rates, False), of(keys, rates, True), of(keys, 0 * rates, False)
    for x,y in zip(jax.tree.leaves(kept), jax.tree.leaves(again)): np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert abs(float(kept.sums[0] - plain.sums[0])) > .01

def test_B108_dropout_falls_on_the_input_of_a_alone():
    "The mean over many keys of a dropped product is the plain one; the base's product never changes."
    base = random_base(M0)
    zero = fresh_adapter(base, 'zero', LoraSettings(r=4, target_modules=('q_proj', 'up_proj'))) # B is zero
    rows, rates = batch_rows(sums(base)[:3], [1] * 3), jnp.array([0., .9])
    of = lambda *args: gradient(base, [numbers_of(zero, M0)], [scales_of(zero, M0)], rows, *args).sums[0]
    assert of(jax.random.split(jax.random.key(0), 3), rates) == of(jax.random.split(jax.random.key(9), 3), rates)

def test_B21_the_trainer_scales_by_alpha_over_r():
    base = random_base(M0)
    a = random_adapter(M0, 'a', 8, ('q_proj',), scale=2., seed=1)
    double = replace(a, modules={path: replace(p, b=2 * p.b, scale=1.) for path,p in a.modules.items()})
    groups = [groups_of([numbers_of(x, M0)], [scales_of(x, M0)], M0) for x in (a, double)]
    for x,y in zip(*map(jax.tree.leaves, groups)): np.testing.assert_array_equal(x, y)

def test_a_run_that_diverges_goes_back_to_the_last_checkpoint(tmp_path, monkeypatch):
    base = random_base(M0)
    original, calls = fit_module.gradient, []
    def poisoned(*args):
        calls.append(1)
        g = original(*args)
        return replace(g, sums=g.sums.at[1].set(jnp.nan)) if len(calls) == 2 * 7 else g # in the seventh update
    good = fit(base, two_tasks(base), RECIPE, until=6)
    monkeypatch.setattr(fit_module, 'gradient', poisoned)
    done = fit(base, two_tasks(base), RECIPE, tmp_path)
    assert [t.stopped for t in done] == ['paused', 'diverged'] and [len(t.losses) for t in done] == [6, 6]
    assert [t.adapter.fingerprint for t in done] == [t.adapter.fingerprint for t in good]
    assert Checkpoints(tmp_path, '').manager.latest_step() == 6

def test_early_stop_keeps_the_best_and_lets_the_others_go_on():
    "Red is judged by what it never learns, so it gets worse; blue is judged by what it learns."
    base = random_base(M0)
    red, blue = two_tasks(base)
    red = replace(red, held_out=[example_of(base.tokenizer, 'zz', 'QQ')])
    blue = replace(blue, held_out=blue.examples[:2])
    recipe = replace(RECIPE, steps=30, evaluate_every=3, patience=2, lr=.05, dropout=0.)
    one, other = fit(base, [red, blue], recipe)
    best = min(one.held_out, key=lambda x: x[1])
    assert one.stopped == 'early' and len(one.losses) == best[0] + 6 and other.stopped == 'end' and len(other.losses) == 30
    assert mean_losses(base, [(one.adapter, red.held_out)])[0] == pytest.approx(best[1], rel=1e-5)

def test_a_routing_token_is_trained_and_saved(tmp_path):
    base = random_base(M0)
    blue = two_tasks(base)[1]
    done = fit(base, [blue], replace(RECIPE, dropout=0.))[0].adapter
    assert np.abs(done.routing - blue.adapter.routing).max() > .01
    assert np.array_equal(load_adapter(save_adapter(done, tmp_path / 'a'), M0).routing, done.routing)

def test_training_on_a_bfloat16_base_follows_float32():
    f32, bf16 = random_base(M0), random_base(M0, 'bfloat16')
    curves = [fit(b, two_tasks(b)[:1], replace(RECIPE, dropout=0.))[0].losses for b in (f32, bf16)]
    np.testing.assert_allclose(*curves, rtol=.03)
    assert curves[1][-1] < curves[1][0]

def test_every_example_is_read_once_an_epoch():
    assert all(sorted(drawn(7, 7 * k, 7, 3)) == list(range(7)) for k in range(4))
    assert drawn(7, 0, 7, 3) != drawn(7, 7, 7, 3) != drawn(7, 0, 7, 4)

@pytest.mark.parametrize('kw, sentence', [
    (dict(steps=0), 'steps=0'), (dict(rows=1.5), 'rows=1.5'), (dict(lr=float('nan')), 'lr=nan'), (dict(lr=-1), 'lr=-1'),
    (dict(dropout=1.), 'dropout=1.0'), (dict(clip=True), 'clip=True'), (dict(steps=10, warmup=10), 'the warm-up must end')])
def test_a_bad_recipe_is_refused(kw, sentence):
    with pytest.raises(Refused) as e: Recipe(**kw)
    assert sentence in str(e.value)

def test_tasks_that_cannot_be_trained_are_refused():
    base = random_base(M0)
    red, blue = two_tasks(base)
    for tasks, sentence in [([], 'nothing to train'), ([red, red], "two adapters are called 'red'"),
                            ([replace(red, examples=[], held_out=[])], 'has no examples'),
                            ([replace(red, examples=())], 'has nothing to learn from'),
                            ([replace(red, examples=[Example((1,) * 200, 1)])], 'has 200 tokens and the context is 128'),
                            ([replace(red, adapter=replace(red.adapter, invocation=(5,)))], 'acts from its invocation on'),
                            ([Task(random_adapter(replace(M0, width=48)), sums(base))], 'load it on its own base')]:
        with pytest.raises(Refused) as e: fit(base, tasks, RECIPE)
        assert sentence in str(e.value)
    with pytest.raises(Refused, match='fits no module'): fresh_adapter(base, 'x', LoraSettings(target_modules=('query',)))

def test_examples_that_are_too_long_are_left_out_whole():
    assert fitting([Example((1, 2, 3), 1), Example((1, 2), 1)], 2) == [Example((1, 2), 1)]

def test_a_trained_adapter_is_published_to_a_running_engine():
    "From memory, without a file; greedy tokens of the dense reference, before and after."
    base, ids = random_base(M0), list(b'3+21=')
    done = fit(base, two_tasks(base)[:1], replace(RECIPE, lr=.1))[0].adapter
    config = Config(rows=1, slots=1, max_rank=8, chunks=((1, 16),), max_len=64, memory=1 << 20, prompt_logprobs=False)
    greedy = Sampling(max_new_tokens=5, ignore_eos=True)
    want = [dense.greedy(M0, dense.merged(random_tensors(M0), m), ids, 5) for m in ({}, done.modules)]
    assert want[0] != want[1]
    with Engine(base, config) as engine:
        before = [e.scored.token for e in engine.submit(ids, sampling=greedy) if e.scored]
        engine.load(done)
        after = [e.scored.token for e in engine.submit(ids, use='red', sampling=greedy) if e.scored]
    assert [before, after] == want

@pytest.fixture
def shell(tmp_path, monkeypatch):
    "`lorajax train` and `merge` on a random base, in a directory with three files of examples."
    monkeypatch.chdir(tmp_path)
    base, app, runner = random_base(M0), typer.Typer(), CliRunner()
    for add in (add_train, add_merge): add(app, lambda model, dtype: base)
    for name in ('red', 'blue', 'long'):
        rows = [dict(input=f'{name[0]}{i}=', output=str(7 * i) * (50 if name == 'long' and i else 1)) for i in range(6)]
        Path(f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return base, lambda command: runner.invoke(app, command.split())

def test_train_and_merge_from_the_shell(shell):
    base, lorajax = shell
    run = ('train -d red.jsonl -d blau=blue.jsonl --held-out red=red.jsonl -r 3 --steps 12 --warmup 2 --lr .02 --every 5 '
           '-o out')
    done = lorajax(f'{run} --checkpoints kept')
    assert done.exit_code == 0, done.output
    assert 'red: held-out loss' in done.output and 'after 12 updates; saved in out/red' in done.output.replace('\n', '')
    assert '10/12 red' in done.output and 'blau: loss of its batches' in done.output
    red = load_adapter('out/red', M0)
    assert red.max_rank == 3 and red.targets == ('q_proj', 'v_proj')
    assert json.loads(Path('out/red/adapter_config.json').read_text())['lora_alpha'] == 16
    again = lorajax(run.replace('-o out', '-o again') + ' --checkpoints kept') # the run has ended; it is only saved anew
    assert again.exit_code == 0 and load_adapter('again/red', M0).fingerprint == red.fingerprint
    done = lorajax('merge -a out/red -a out/blau --tune red=red.jsonl --tune blau=blue.jsonl -w .5 -w .5 -o both')
    assert done.exit_code == 0 and 'rank 6, 0.00% of the update is missing' in done.output and 'weights red' in done.output
    assert load_adapter('both', M0).max_rank == 6

@pytest.mark.parametrize('command, sentence', [
    ('train -d none.jsonl -o out', '--data none: there is no none.jsonl'),
    ('train -d a=red.jsonl -d a=blue.jsonl -o out', "'a' is given twice"),
    ('train -d red.jsonl -o .', 'red is there already'), ('train -d red.jsonl --held-out blue.jsonl -o out', 'no --data has that name'),
    ('train -d red.jsonl --patience 2 -o out', 'give --held-out examples'), ('train -d red.jsonl --steps 0 -o out', 'steps=0'),
    ('train -d red.jsonl --rank 0 -o out', 'r=0'), ('train -d red.jsonl --targets query -o out', 'fits no module'),
    ('train -d red.jsonl --save-dtype int8 -o out', 'choose one of bfloat16, float32'),
    ('train -d red.jsonl --max-len 3 -o out', 'raise --max-len'), ('merge -a none -o both', '--adapter none: there is no none'),
    ('merge -a red -w 1 -w 2 -o both', '2 weights for 1 adapters'), ('merge -a red --method mean -o both', 'choose one of exact'),
    ('merge -a red -o red', 'a name of its own'), ('merge -a red -o blue', 'blue is there already'),
    ('merge -a red --tune blue=blue.jsonl -o both', 'no --adapter has that name')])
def test_bad_words_end_in_one_sentence(shell, command, sentence):
    for name in ('red', 'blue'):
        if command.startswith('train') and '-o .' not in command: break
        save_adapter(random_adapter(M0, name), name)
    if '-o red' in command: command = command.replace('-o red', '-o new/red')
    done = shell[1](command)
    assert isinstance(done.exception, Refused) and sentence in str(done.exception)

def test_long_examples_are_left_out_aloud(shell):
    done = shell[1]('train -d long.jsonl --steps 2 --warmup 1 --max-len 20 -o out')
    assert done.exit_code == 0 and '5 of 6 examples exceed 20 tokens' in done.output
