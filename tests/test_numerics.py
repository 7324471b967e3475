"""Products and whole models against dense arithmetic, on many shapes and dtypes: too many for a lesson."""
from dataclasses import replace
import jax.numpy as jnp, ml_dtypes, numpy as np, pytest
import dense, whole
from lorajax import ops
from lorajax.adapters import Adapter, LoraPair, random_adapter
from lorajax.base import random_base
from lorajax.core import ModelConfig, Refused, Sampling
from lorajax.generate import generate, stream
from lorajax.model import Linear, Paged, Segment, random_tensors
from lorajax.peft import load_adapter, save_adapter
from lorajax.step import page_layout
from lorajax.working_set import working_set

M0 = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=512)
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
GREEDY = Sampling(max_new_tokens=12, ignore_eos=True)

def last_logits(base, ids, adapter=None):
    "One prompt's logits at its last position, through the decoder itself."
    used = [adapter] if adapter else []
    return whole.logits(base, [ids], used, [len(used)])[0][-1]

def one_group(adapters, config, name, dtype=jnp.float32):
    "A group of the first layer."
    return working_set(adapters, config, dtype)[name].at(0)

@pytest.mark.parametrize('backend', ['xla-decode', 'xla', 'ref'])
@pytest.mark.parametrize('width', [32, 48])
@pytest.mark.parametrize('tokens', [1, 7])
def test_B26_any_rank_alone_and_mixed(backend, width, tokens):
    rng, ranks = np.random.default_rng(0), [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 512]
    normal = lambda *shape: rng.normal(size=shape).astype('f4')
    pairs = [LoraPair(normal(r, width), normal(40, r), 16 / r) for r in ranks]
    x = rng.normal(size=(tokens, width)).astype('f4')
    config, path = replace(M0, width=width, n_layers=1, head_dim=10), 'model.layers.0.self_attn.q_proj'
    def product(chosen, slots):
        group = one_group([Adapter(f'r{p.rank}', {path: p}) for p in chosen], config, 'qkv')
        return np.asarray(ops.lora(jnp.array(x)[:, None], group, jnp.array(slots), backend=backend)[0][:, 0])
    want = lambda p, x: p.scale * (p.b.astype('f8') @ (p.a.astype('f8') @ x.astype('f8')))
    for p in pairs:
        expected = np.stack([want(p, t) for t in x])
        np.testing.assert_allclose(product([p], [1] * tokens), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    for first in range(len(ranks)):
        slots = [(first + t) % (len(ranks) + 1) for t in range(tokens)]
        expected = np.stack([want(pairs[s-1], t) if s else np.zeros(40) for s,t in zip(slots, x)])
        atol = 1e-5 * max(np.abs(expected).max(), 1)
        np.testing.assert_allclose(product(pairs, slots), expected, rtol=1e-5, atol=atol)

@pytest.mark.parametrize('targets', [LINEARS, ('q_proj',), ('v_proj', 'down_proj'), ('embed_tokens',), ('lm_head',),
                                     LINEARS + ('embed_tokens', 'lm_head')])
@pytest.mark.parametrize('tied', [False, True])
def test_logits_equal_the_dense_reference(targets, tied):
    base = random_base(replace(M0, tied=tied))
    adapter = random_adapter(base.config, rank=5, targets=targets)
    w, ids = random_tensors(base.config), list(b'multi-LoRA serving')
    for modules in ({}, adapter.modules):
        expected = dense.logits(base.config, dense.merged(w, modules), ids)[-1]
        np.testing.assert_allclose(last_logits(base, ids, adapter if modules else None), expected, atol=2e-4)
    assert np.abs(last_logits(base, ids, adapter) - last_logits(base, ids)).max() > .1

def test_B21_alpha_is_divided_by_the_rank(tmp_path):
    config = ModelConfig(vocab_size=8, width=4, mlp_width=4, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, max_len=8)
    path = 'model.layers.0.self_attn.q_proj'
    adapter = Adapter('ones', {path: LoraPair(np.ones((8, 4), 'f4'), np.ones((4, 8), 'f4'), 16 / 8)})
    group = one_group([load_adapter(save_adapter(adapter, tmp_path/'ones'), config)], config, 'qkv')
    for backend in ('xla-decode', 'xla', 'ref'):
        q = ops.lora(jnp.ones((1, 1, 4)), group, jnp.array([1]), backend=backend)[0][0]
        assert q.tolist() == [[64., 64., 64., 64.]]

def test_B23_nan_next_to_live_rows_is_never_seen():
    base = random_base(M0)
    red = random_adapter(base.config, 'red', 4)
    groups = working_set([red], base.config, jnp.float32)
    assert all((np.asarray(g.owner) == -1).sum() for g in groups.values()), 'a rank of 4 leaves padding rows'
    for g in groups.values():
        unused = np.asarray(g.owner) == -1
        alike = len({b.shape[2] for b in g.bs}) == 1
        b = np.concatenate([np.asarray(b) for b in g.bs], axis=1) if alike else np.asarray(g.bs[0])
        assert not np.asarray(g.a)[:, unused].any() and not b[:, unused[:b.shape[1]]].any()
    unused = ops.LoraGroup(jnp.array([[1.] * 4, [jnp.nan] * 4]), (jnp.ones((2, 3)),), jnp.ones(2), jnp.array([1, -1]),
                           (jnp.array([[2], [0]]),))
    for backend in ('xla-decode', 'xla', 'ref'):
        y = ops.lora(jnp.ones((2, 1, 4)), unused, jnp.array([1, 0]), backend=backend)[0]
        assert y[:, 0].tolist() == [[4.] * 3, [0.] * 3]

def test_B23_weights_that_would_overflow_are_refused_not_spread():
    base, path = random_base(M0), 'model.layers.0.self_attn.q_proj'
    huge = Adapter('huge', {path: LoraPair(np.ones((1, 32), 'f4'), np.full((32, 1), 3e38, 'f4'), 8.)})
    with pytest.raises(Refused, match="'huge': its weights at model.layers.0.self_attn.q_proj overflow"):
        generate(base, ['a', 'b'], [None, huge], GREEDY)

def test_B24_rows_with_and_without_adapter_do_not_touch_each_other():
    base, w = random_base(M0), random_tensors(M0)
    red, blue = (random_adapter(M0, n, r, LINEARS, seed=s) for n,r,s in (('red', 4, 1), ('blue', 11, 2)))
    prompts, use = ['a', 'bc', 'some words', 'x' * 33, 'y' * 300, 'last one'], [None, red, None, blue, red, None]
    alone = [generate(base, [p], [u], GREEDY)[0].tokens for p,u in zip(prompts, use)]
    assert [c.tokens for c in generate(base, prompts, use, GREEDY)] == alone
    assert [c.tokens for c in generate(base, prompts[::-1], use[::-1], GREEDY)] == alone[::-1]
    for p,u,tokens in zip(prompts[:4], use, alone):
        assert dense.greedy(M0, dense.merged(w, u.modules if u else {}), list(p.encode()), 12) == list(tokens)
    one_prompt = generate(base, ['same'] * 3, [None, red, blue], GREEDY)
    assert len({c.tokens for c in one_prompt}) == 3, 'the adapters must be strong enough to tell rows apart'

def test_B28_adapter_on_a_tied_head_leaves_the_embedding_alone():
    base = random_base(replace(M0, tied=True))
    before = base.tensor('model.embed_tokens.weight').copy()
    head, w, ids = random_adapter(base.config, 'head', 4, ('lm_head',)), random_tensors(base.config), list(b'tied')
    embed = 'model.embed_tokens.weight'
    adapted = w[embed] + head.modules['lm_head'].delta
    expected = dense.logits(base.config, w | {'lm_head.weight': adapted}, ids)[-1]
    np.testing.assert_allclose(last_logits(base, ids, head), expected, atol=2e-4)
    np.testing.assert_array_equal(base.tensor('model.embed_tokens.weight'), before)
    both = dense.logits(base.config, w | {embed: adapted}, ids)[-1]
    assert np.abs(both - expected).max() > .1, 'adapting the embedding too must show'

def bf16_ulp(x): return np.ldexp(1., np.frexp(np.maximum(np.abs(x), 1e-30))[1] - 8)

@pytest.mark.parametrize('stored', ['float32', 'bfloat16', 'float16'])
def test_B31_adapter_dtype_unlike_the_base(tmp_path, stored):
    c, rng, path = replace(M0, n_layers=1), np.random.default_rng(0), 'model.layers.0.self_attn.o_proj'
    a, b = rng.normal(size=(6, 32)).astype(stored), (1e-4 * rng.normal(size=(32, 6))).astype(stored)
    b[0, 0] = np.dtype(stored).type(6e-8) # a float16 subnormal
    adapter = load_adapter(save_adapter(Adapter('small', {path: LoraPair(a, b, 16 / np.sqrt(6))}), tmp_path/'small'), c)
    assert adapter.modules[path].a.dtype == stored
    np.testing.assert_array_equal(adapter.modules[path].b.astype('f4'), b.astype('f4'))
    x, w = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((9, 32), (32, 32)))
    term, = ops.lora(jnp.array(x)[:, None], one_group([adapter], c, 'o', jnp.bfloat16), jnp.ones(9, jnp.int32))
    got = np.asarray(Linear(jnp.array(w))(jnp.array(x), lambda x, w: ops.dot(x, w) + term[:, 0])).astype('f8')
    wide = lambda m: m.astype('f8')
    exact = wide(x) @ wide(w).T + 16 / np.sqrt(6) * (wide(x) @ wide(a).T) @ wide(b).T
    assert (np.abs(got - exact) <= 2 * bf16_ulp(exact)).all()

def test_terms_as_large_as_the_base_stay_within_the_sum_of_magnitudes():
    "Where base and term cancel, an ulp of their sum means nothing; the bound is one of all that was added."
    c, rng, path = replace(M0, n_layers=1), np.random.default_rng(1), 'model.layers.0.self_attn.o_proj'
    for std in (.02, .1, .5):
        sizes = (1, (64, 32)), (1, (32, 32)), (1, (6, 32)), (std, (32, 6))
        x, w, a, b = (rng.normal(scale=s, size=z).astype(ml_dtypes.bfloat16) for s,z in sizes)
        group = one_group([Adapter('large', {path: LoraPair(a, b, 3.)})], c, 'o', jnp.bfloat16)
        term, = ops.lora(jnp.array(x)[:, None], group, jnp.ones(64, jnp.int32))
        got = np.asarray(Linear(jnp.array(w))(jnp.array(x), lambda x, w: ops.dot(x, w) + term[:, 0])).astype('f8')
        x, w, a, b = (m.astype('f8') for m in (x, w, a, b))
        magnitude = np.abs(x) @ np.abs(w).T + 3 * np.abs(x @ a.T) @ np.abs(b).T
        error = np.abs(got - (x @ w.T + 3 * (x @ a.T) @ b.T))
        assert (error <= 2 ** -8 * magnitude).all() and error.max() > 0

def test_bfloat16_rows_in_a_batch_stay_within_rounding_of_their_solo_run():
    base = random_base(M0, 'bfloat16')
    red = random_adapter(M0, 'red', 4, LINEARS)
    prompts = [list(b'some words'), list(b'x' * 33), list(b'other text')]
    slots = [0, 1, 1]
    for row,p,s in zip(whole.logits(base, prompts, [red], slots), prompts, slots):
        alone = last_logits(base, p, red if s else None)
        assert np.abs(row[-1] - alone).max() <= .05 * alone.std()

@pytest.mark.parametrize('length', [3, 9, 300, 500])
def test_windows_chunks_and_an_adapted_embedding_together(length):
    "Layers of different windows, prompts of one and two chunks, an adapter on embedding too: against one call."
    c = replace(M0, n_layers=3, windows=(7, 0, 300))
    base, red = random_base(c), random_adapter(c, 'red', 3, ('embed_tokens', 'q_proj', 'up_proj'), std=.3)
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    tokens = generate(base, [ids, ids[:2]], [red, None], Sampling(max_new_tokens=4, ignore_eos=True))[0].tokens
    for t in tokens:
        assert t == last_logits(base, ids, red).argmax()
        ids.append(t)

def test_sliding_window_forgets():
    "A key outside the window can't change the answer, one inside does."
    c = replace(M0, n_layers=1, windows=(4,))
    base = random_base(c)
    one, other_far, other_near = (last_logits(base, list(p)) for p in (b'abcdefgh', b'zzzdefgh', b'abcdezgh'))
    np.testing.assert_allclose(one, other_far, atol=1e-5)
    assert np.abs(one - other_near).max() > 1e-2

@pytest.mark.parametrize('length', [15, 16, 17, 255, 256, 257, 490])
def test_prompt_lengths_around_the_chunk(length):
    "The same prompt in one piece through the decoder and in chunks through `generate` gives the same first token."
    base = random_base(M0)
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    neighbour = list(b'short')
    first = generate(base, [neighbour, ids], sampling=Sampling(max_new_tokens=1, ignore_eos=True))[1].tokens[0]
    assert first == last_logits(base, ids).argmax()

def test_seeds_decide_and_are_fresh_by_default():
    base = random_base(M0)
    rules = lambda **kw: Sampling(max_new_tokens=16, temperature=1., ignore_eos=True, **kw)
    warm = lambda **kw: generate(base, ['abc'], sampling=rules(**kw))[0].tokens
    assert warm(seed=0) == warm(seed=0) != warm(seed=1)
    assert len({warm() for _ in range(4)}) == 4

def test_end_token_stops_its_row_only():
    base = random_base(M0)
    rules = Sampling(max_new_tokens=12)
    solo = {p: generate(base, [p], sampling=GREEDY)[0].tokens for p in ('ab', 'zz')}
    end = next(t for t in solo['ab'] if t not in solo['zz'])
    stopping = replace(base, tokenizer=replace(base.tokenizer, eos_ids=(end,)))
    stopped, other = generate(stopping, ['ab', 'zz'], sampling=rules)
    assert stopped.tokens == solo['ab'][:solo['ab'].index(end) + 1] and stopped.finish == 'stop'
    assert stopped.text == base.tokenizer.decode(stopped.tokens[:-1], start=False)
    assert other.tokens == solo['zz'] and other.finish == 'length'

@pytest.mark.parametrize('prompts, kw, sentence', [
    ('hello', {}, 'put a single prompt into a list'), ([1, 2], {}, 'put a single prompt into a list'),
    ([dict(role='user', content='hi')], {}, 'put a single prompt into a list'),
    ([], {}, 'there are no prompts'), ([''], {}, 'prompt 0 has no tokens'), ([[]], {}, 'prompt 0 has no tokens'),
    ([[1.5, 2]], {}, 'prompt 0 holds 1.5'), ([[True]], {}, 'prompt 0 holds True'),
    ([[1, 'x']], {}, "prompt 0 holds 'x'"),
    (['a', [257]], {}, 'token id 257 is outside the vocabulary of 257'), (['a', [-1]], {}, 'token id -1'),
    ([None], {}, 'prompt 0 is of type NoneType'),
    (['a'], dict(use=['red']), "use holds 'red'"), (['a'], dict(use='red'), 'use is of type str'),
    (['a'], dict(use=[None, None]), 'use has 2 entries for 1 prompts'),
    (['a'], dict(sampling=dict(max_new_tokens=2)), 'sampling is of type dict'),
    (['a'], dict(backend='cuda'), "no backend 'cuda'")])
def test_prompts_of_the_wrong_form_are_refused_at_once(prompts, kw, sentence):
    base = random_base(M0)
    with pytest.raises(Refused) as e: stream(base, prompts, **kw)
    assert sentence in str(e.value)

def test_an_empty_prompt_with_a_begin_token_runs():
    base = random_base(M0)
    codec = base.tokenizer.codec
    from tokenizers import processors
    codec.post_processor = processors.TemplateProcessing(single='<|end|> $A', special_tokens=[('<|end|>', 256)])
    assert len(generate(base, [''], sampling=GREEDY)[0].tokens) == 12

def test_numpy_ids_are_ids():
    base = random_base(M0)
    assert generate(base, [np.array([5, 6, 7])], sampling=GREEDY) == generate(base, [[5, 6, 7]], sampling=GREEDY)

def test_events_join_to_the_completion():
    base = random_base(M0)
    events = list(stream(base, ['ab', 'cd'], sampling=GREEDY))
    whole = generate(base, ['ab', 'cd'], sampling=GREEDY)
    for row in (0, 1):
        text = base.tokenizer.decode(whole[row].tokens, start=False)
        assert ''.join(e.text for e in events if e.row == row) == whole[row].text == text
        assert [e.finish for e in events if e.row == row] == [None] * 11 + ['length']

def test_B24_a_prompt_that_arrives_while_another_row_decodes():
    "One call prefills a row while the other decodes its single token; both go on as they would alone."
    base, red, blue = random_base(M0), random_adapter(M0, 'red', 4, LINEARS, seed=1), random_adapter(M0, 'blue', 7, seed=2)
    first, late = list(b'early'), list(b'latecomer')
    alone = [generate(base, [p], [a], GREEDY)[0].tokens for p,a in ((first, red), (late, blue))]
    groups, slots = working_set([red, blue], M0, jnp.float32), jnp.array([1, 2])
    layout = page_layout(base)
    memory = Paged(jnp.zeros((9, layout.words), layout.word), layout)
    tables = jnp.arange(1, 9).reshape(2, 4)
    def call(rows, starts, memory):
        n = max(map(len, rows))
        tokens = jnp.array([row + [0] * (n - len(row)) for row in rows])
        positions = jnp.array([[s + i if i < len(r) else -1 for i in range(n)] for r,s in zip(rows, starts)])
        (states,), memory = base.decoder([Segment(tokens, positions, slots, tables)], memory, groups)
        last = jnp.stack([states[i, len(r) - 1] for i,r in enumerate(rows)])
        return [int(t) for t in base.decoder.score(last, slots, groups).argmax(-1)], memory
    (a, _), memory = call([first, [0]], [0, 40], memory)
    seen, at = ([a], []), [len(first), 0]
    for step in range(8):
        rows = [[seen[0][-1]], late if step == 3 else [seen[1][-1]] if step > 3 else [0]]
        (a, b), memory = call(rows, at, memory)
        seen[0].append(a)
        if step >= 3: seen[1].append(b)
        at = [at[0] + 1, at[1] + len(rows[1]) if step >= 3 else 0]
    assert tuple(seen[0]) == alone[0][:9] and tuple(seen[1]) == alone[1][:5]
