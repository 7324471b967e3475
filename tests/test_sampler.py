"Not notebook cells: whole vocabularies against sorted float64, transformers' processors, mixtures of neighbours."
from dataclasses import replace
from functools import partial
import jax, jax.numpy as jnp, numpy as np, pytest, torch
from flax import nnx
from hypothesis import given, settings, strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from lorajax.base import random_base
from lorajax.core import Refused, Sampling, check_token_ids, choices
from lorajax.generate import generate
from lorajax.sampler import (Room, altered, kept, likeliest, packed, penalised, sample, sampling_rows,
                             score, smallest_kept, unpacked)

run, keep, least, alter = map(jax.jit, (sample, kept, smallest_kept, altered))
zeros = lambda n: jnp.zeros(n, jnp.int32)

def random_logits(B, V, seed=0, scale=3.):
    return (np.random.default_rng(seed).normal(size=(B, V)) * scale).astype(np.float32)

def distribution(logits, s, history=(), prompt_len=0, mask=None):
    "Float64 and sorted, from the definitions, in the order that the notebook states."
    x = logits.astype(np.float64)
    for t in set(history): x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
    for t in history[prompt_len:]: x[t] -= s.frequency_penalty
    for t in set(history[prompt_len:]): x[t] -= s.presence_penalty
    for t,b in s.logit_bias: x[t] += b
    if mask is not None: x[~mask] = -np.inf
    p = np.exp((x - x.max()) / s.temperature)
    p[p < s.min_p * p.max()] = 0
    order = np.argsort(-x, kind='stable')
    if s.top_k: p[order[s.top_k:]] = 0
    before = np.cumsum(p[order]) - p[order]
    if s.top_p < 1: p[order[before >= s.top_p * p.sum()]] = 0
    return p / p.sum()

def words(mask): # [V] bool -> uint32
    bits = np.zeros(-(-len(mask) // 32) * 32, bool)
    bits[:len(mask)] = mask
    return np.packbits(bits, bitorder='little').view(np.uint32)

# --- the distribution

RULES = [dict(temperature=1.), dict(temperature=.5, top_k=5), dict(temperature=2., top_p=.7),
         dict(temperature=1.3, min_p=.2), dict(temperature=.8, top_k=9, top_p=.9, min_p=.05),
         dict(temperature=1., repetition_penalty=1.5),
         dict(temperature=1., presence_penalty=1.5, frequency_penalty=-.7),
         dict(temperature=1., logit_bias={3: 2., 17: -100}),
         dict(temperature=.7, top_p=.8, top_k=20, min_p=.01, repetition_penalty=.8, presence_penalty=-1.,
              frequency_penalty=.5, logit_bias={0: 1., 39: -1.5})]

@pytest.mark.parametrize('rule', RULES, ids=lambda r: '+'.join(r))
@pytest.mark.parametrize('masked', [False, True])
def test_draws_follow_the_definitions(rule, masked):
    V, N, rng = 40, 3000, np.random.default_rng(1)
    logits, history = random_logits(1, V, 5, 1.5)[0], [3, 3, 38, 0, 17, 17, 17, 5, 39]
    mask = rng.random(V) < .6 if masked else None
    rows = sampling_rows([Sampling(**rule, seed=i) for i in range(N)], [history] * N, [4] * N,
                         [words(mask)] * N if masked else None, Room(bias=3, history=12, mask=2))
    p = distribution(logits, Sampling(**rule), history, 4, mask)
    tokens = np.array(run(jnp.tile(logits, (N, 1)), rows, zeros(N)).token)
    counts = np.bincount(tokens, minlength=V)
    assert not counts[p == 0].any()
    assert (np.abs(counts - N * p) < 5 * np.sqrt(N * p * (1 - p)) + 1).all()

@pytest.mark.parametrize('V', [5, 1000])
def test_a_rare_block_and_a_rare_token_keep_their_share(V):
    p = np.full(V, .05 / (V - 1)); p[V - 1] = .95
    N = 4000
    rows = sampling_rows([Sampling(temperature=1., seed=i) for i in range(N)])
    tokens = np.array(run(jnp.tile(jnp.log(jnp.array(p, jnp.float32)), (N, 1)), rows, zeros(N)).token)
    assert abs((tokens < V - 1).sum() - 200) < 60
    few = np.bincount(tokens[tokens < V - 1] * 4 // (V - 1), minlength=4)
    assert (np.abs(few - 50) < 32).all()

def test_kept_is_what_transformers_keeps():
    V, T = 5000, .8
    logits = random_logits(1, V, 2)
    shifted = (logits - logits.max()) / np.float32(T)
    given = torch.tensor(logits / np.float32(T))
    for s, steps in [(dict(top_k=40), [TopKLogitsWarper(40)]), (dict(top_p=.93), [TopPLogitsWarper(.93)]),
                     (dict(min_p=.03), [MinPLogitsWarper(.03)]), (dict(top_k=V + 5), [TopKLogitsWarper(V)]),
                     (dict(top_k=300, top_p=.9), [TopKLogitsWarper(300), TopPLogitsWarper(.9)]),
                     (dict(min_p=.01, top_p=.7), [MinPLogitsWarper(.01), TopPLogitsWarper(.7)])]:
        x = given
        for step in steps: x = step(None, x)
        rows = sampling_rows([Sampling(temperature=T, seed=0, **s)])
        ours = np.array(keep(jnp.array(shifted), jnp.exp(jnp.array(shifted)), rows))[0] > 0
        assert (ours == np.isfinite(x.numpy()[0])).all(), s

def test_repetition_is_what_transformers_does():
    logits, ids = random_logits(3, 50), np.random.default_rng(0).integers(0, 50, (3, 20))
    rows = sampling_rows([Sampling(repetition_penalty=1.7)] * 3, ids, [20, 5, 0], room=Room(history=32))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(ids), torch.tensor(logits)).numpy()
    np.testing.assert_allclose(penalised(jnp.array(logits), rows), expected, rtol=1e-6)

# --- thresholds

edges = st.sampled_from([0., -1., 1., -np.inf, 3.4e38, -3.4e38])
floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | edges

@settings(max_examples=60, deadline=None)
@given(st.lists(floats, min_size=1, max_size=40), st.data())
def test_the_kth_largest_of_any_floats(values, data):
    if max(values) == -np.inf: values[0] = 0.
    k = data.draw(st.integers(1, len(values)))
    padded = np.array([values + [-np.inf] * (40 - len(values))], np.float32)
    found = least(jnp.array(padded), jnp.ones((1, 40)), jnp.array([float(k)]))
    assert float(found[0]) == np.sort(padded[0])[-k]

def test_top_p_over_a_whole_vocabulary_is_exact():
    V, shares = 49152, [1e-30, .01, .3, .5, .9, .99, .9999, 1.]
    scales = [.01, .3, 1., 2., 4., 6., 9., 3.]
    logits = np.concatenate([random_logits(1, V, i, scale) for i,scale in enumerate(scales)])
    x = logits - logits.max(1, keepdims=True)
    rows = sampling_rows([Sampling(temperature=1., seed=0, top_p=p) for p in shares])
    ours = np.array(keep(jnp.array(x), jnp.exp(jnp.array(x)), rows)) > 0
    for row,p,mine in zip(x.astype(np.float64), shares, ours):
        weights = np.sort(np.exp(row))[::-1]
        expected = ((np.cumsum(weights) - weights) < p * weights.sum()).sum() if p < 1 else V
        assert abs(int(mine.sum()) - int(expected)) <= max(1, expected * 2e-4), p # the float32 sum's own rounding
        assert mine[row.argmax()] and row[mine].min() > (row[~mine].max() if (~mine).any() else -np.inf)

def test_equal_logits_stay_or_go_together():
    logits = jnp.array([[1., 3., 2., 2., 0.]] * 2) - 3.
    rows = sampling_rows([Sampling(temperature=1., top_k=2, seed=0), Sampling(temperature=1., top_p=.7, seed=0)])
    assert (np.array(keep(logits, jnp.exp(logits), rows)) > 0).tolist() == [[False, True, True, True, False]] * 2

@pytest.mark.parametrize('V', [1, 2, 127, 128, 129, 300, 1000])
def test_the_likeliest_is_argmax_with_ties(V):
    x = np.random.default_rng(V).integers(-3, 3, (16, V)).astype(np.float32)
    x[0], x[1] = -np.inf, 0.
    assert np.array_equal(likeliest(jnp.array(x)), x.argmax(1))

# --- neighbours, seeds, batches

def a_rule(rng):
    pick = lambda *values: values[rng.integers(len(values))]
    return Sampling(temperature=pick(0., .3, 1., 1.7), top_k=pick(0, 0, 3, 50), top_p=pick(1., 1., .2, .9),
                    min_p=pick(0., 0., .1), repetition_penalty=pick(1., 1., 1.3), presence_penalty=pick(0., 0., .5),
                    frequency_penalty=pick(0., .2), logit_bias=pick({}, {}, {4: 3., 299: -100}),
                    logprobs=pick(None, None, 0, 20), seed=int(rng.integers(2**62)))

def test_rows_do_not_see_each_other():
    V, room, rng = 300, Room(bias=4, history=16, mask=10), np.random.default_rng(0)
    logits = random_logits(8, V)
    logits[6, 7] = np.nan
    def rows(rules): return [rules, [list(h) for h in histories], [5] * 8, masks, room]
    histories = rng.integers(0, V, (8, 11))
    for _ in range(12):
        rules = [a_rule(rng) for _ in range(8)]
        masks = [words(rng.random(V) < .5) if rng.random() < .3 else None for _ in range(8)]
        count = jnp.array(rng.integers(0, 9, 8), jnp.int32)
        whole = packed(run(logits, sampling_rows(*rows(rules)), count))
        calm = [r if i % 2 else Sampling() for i,r in enumerate(rules)]
        masks = [m if i % 2 else None for i,m in enumerate(masks)]
        part = packed(run(logits, sampling_rows(*rows(calm)), count))
        assert np.array_equal(whole[1::2], part[1::2])
        for i in range(1, 8, 2):
            one = sampling_rows([rules[i]], [histories[i]], [5], [masks[i]], room)
            alone = packed(run(logits[i:i+1], one, count[i:i+1]))
            assert int(alone[0, 0]) == int(whole[i, 0])
            if rules[i].logprobs is not None:
                mine, ours = unpacked(np.array(alone)), unpacked(np.array(whole))
                np.testing.assert_allclose(mine.logprob[0], ours.logprob[i], rtol=1e-5)

def test_one_program_for_all_rules():
    traces = []
    @jax.jit
    def step(logits, rows, count):
        traces.append(1)
        return packed(sample(logits, rows, count))
    rng, room = np.random.default_rng(3), Room(bias=4, history=8, mask=2)
    for _ in range(5):
        rows = sampling_rows([a_rule(rng), Sampling()], [[1, 2], []], [1, 0], [None, words(np.ones(40, bool))], room)
        step(random_logits(2, 40), rows, zeros(2))
    assert len(traces) == 1

def test_a_draw_depends_on_seed_and_count_only():
    logits, s = np.tile(random_logits(1, 60, scale=.1), (4, 1)), partial(Sampling, temperature=1.)
    def draw(seeds, counts):
        return run(logits, sampling_rows([s(seed=i) for i in seeds]), jnp.array(counts, jnp.int32)).token.tolist()
    first = draw([7, 7, 2**62, 7 + 2**32], [0, 1, 0, 0])
    assert draw([2**62, 7, 7, 7], [0, 0, 1, 0]) == [first[2], first[0], first[1], first[0]]
    assert len(set(first)) > 1
    many = np.array([draw([i, i + 2**32, i << 32, i], [0, 0, 0, 1]) for i in range(1, 40)])
    assert all(len(set(column)) > 15 for column in many.T)
    assert not any(np.array_equal(many[:, i], many[:, j]) for i in range(4) for j in range(i))

def test_B77_constant_default_seed():
    base = random_base()
    say = lambda **kw: generate(base, ['abc'], sampling=Sampling(8, 1., ignore_eos=True, **kw))[0].tokens
    assert len({say() for _ in range(8)}) == 8
    together = generate(base, ['abc'] * 8, sampling=Sampling(8, 1., ignore_eos=True))
    assert len({c.tokens for c in together}) == 8
    assert say(seed=7) == say(seed=7) != say(seed=0) == say(seed=0)
    for bad in (-1, 2**63, 1.5, True, '7'):
        with pytest.raises(Refused, match='seed='): Sampling(seed=bad)

def test_choices_are_seeded_and_apart():
    s = Sampling(temperature=1., n=5, seed=7, stop='x')
    seeds = [c.seed for c in choices(s)]
    assert seeds[0] == 7 and len(set(seeds)) == 5 and all(0 <= i < 2**63 for i in seeds)
    assert choices(s) == choices(s) and all(c.n == 1 and c.stop == ('x',) for c in choices(s))
    assert not set(seeds[1:]) & {c.seed for c in choices(Sampling(n=128, seed=8))}
    assert len({c.seed for _ in range(20) for c in choices(Sampling(n=2))}) == 40
    with pytest.raises(AssertionError, match='no seed'): sampling_rows([Sampling(temperature=1.)])

# --- what can't be sampled

@pytest.mark.parametrize('rule', [{}, dict(temperature=1.), dict(temperature=1., top_k=3, top_p=.9, min_p=.1),
                                  dict(logprobs=3)])
def test_only_the_broken_row_ends(rule):
    V, logits = 300, random_logits(8, 300)
    for row,(at, value) in enumerate([(0, np.nan), (127, np.nan), (128, np.nan), (299, np.nan), (5, np.inf)]):
        logits[row, at] = value
    logits[5] = -np.inf
    logits[7, 1:] = -np.inf
    masks = [None] * 8
    masks[1] = words(np.arange(V) != 127)
    s = Sampling(seed=1, **rule)
    out = run(logits, sampling_rows([s] * 8, masks=masks, room=Room(mask=10)), zeros(8))
    token = np.array(out.token)
    assert token.tolist()[:6] == [-1] * 6 and token[6] >= 0 and token[7] == 0
    alone = run(logits[6:], sampling_rows([s] * 2, room=Room(mask=10)), zeros(2))
    assert np.array_equal(token[6:], alone.token)

def test_a_mask_that_allows_nothing_is_an_error_of_its_row():
    masks = [np.zeros(2, np.uint32), None, words(np.arange(40) == 39)]
    for T in (0., 1.):
        rows = sampling_rows([Sampling(temperature=T, seed=0)] * 3, masks=masks, room=Room(mask=2))
        assert run(random_logits(3, 40), rows, zeros(3)).token.tolist()[::2] == [-1, 39]

def test_a_broken_row_of_a_closed_batch_ends_with_an_error():
    base = random_base()
    state = nnx.to_pure_dict(nnx.state(base.decoder))
    state['embed'] = state['embed'].at[base.tokenizer.encode('b')[0]].set(jnp.nan)
    nnx.update(base.decoder, state)
    rules = Sampling(4, ignore_eos=True, logit_bias={base.tokenizer.encode('b')[0]: -100})
    out = generate(base, ['ab', 'cd'], sampling=rules)
    assert (out[0].finish, out[0].tokens, out[0].text) == ('error', (-1,), '')
    assert out[1] == generate(base, ['cd'], sampling=rules)[0] and len(out[1].tokens) == 4

# --- penalties, bias, mask

def test_padding_ids_touch_no_token():
    logits = np.full((2, 6), 2., np.float32)
    s = Sampling(repetition_penalty=2., presence_penalty=2., frequency_penalty=2., logit_bias={1: 5.})
    rows = sampling_rows([s, Sampling()], [[0, 0, 5], []], [1, 0], room=Room(bias=3, history=9))
    assert np.array(alter(jnp.array(logits), rows)).tolist() == [[1 - 2 - 2, 7, 2, 2, 2, 1 - 2 - 2], [2] * 6]

def test_presence_and_frequency_look_at_the_output_only():
    s = Sampling(presence_penalty=1., frequency_penalty=.25)
    for prompt_len, expected in [(0, [-1.5, -1.25, 0]), (1, [-1.25, -1.25, 0]), (2, [0, -1.25, 0]), (3, [0, 0, 0])]:
        rows = sampling_rows([s], [[0, 0, 1]], [prompt_len], room=Room(history=3))
        assert np.array(penalised(jnp.zeros((1, 3)), rows)).tolist() == [expected], prompt_len

@pytest.mark.parametrize('V', [5, 32, 33, 64, 100])
def test_masks_at_the_edges_of_words(V):
    for only in {0, V - 1, V // 2, min(31, V - 1), min(32, V - 1)}:
        rows = sampling_rows([Sampling(), Sampling()], masks=[words(np.arange(V) == only), None], room=Room(mask=4))
        x = np.array(alter(jnp.ones((2, V)), rows))
        assert np.flatnonzero(np.isfinite(x[0])).tolist() == [only] and np.isfinite(x[1]).all()

def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest():
    rows = sampling_rows([Sampling()], masks=[np.array([0xffffffff], np.uint32)], room=Room(mask=3))
    assert np.isfinite(np.array(alter(jnp.ones((1, 70)), rows))[0]).sum() == 32

def test_no_room_is_an_error():
    with pytest.raises(AssertionError, match='history'): sampling_rows([Sampling(presence_penalty=1.)])
    with pytest.raises(AssertionError, match='make Room'): sampling_rows([Sampling(logit_bias={1: 1})])
    with pytest.raises(AssertionError, match='make Room'):
        sampling_rows([Sampling()], masks=[np.zeros(3, np.uint32)], room=Room(mask=2))

def test_a_closed_batch_penalises_prompt_and_output(monkeypatch):
    monkeypatch.setattr('lorajax.generate.CHUNK', 16)
    base, prompts = random_base(), ['xyz' * 7, 'a']
    rules = [Sampling(9, 1., seed=3, repetition_penalty=1.8, frequency_penalty=1., logit_bias={65: 1.},
                      ignore_eos=True),
             Sampling(9, presence_penalty=2., ignore_eos=True)]
    together = generate(base, prompts, sampling=rules)
    assert len(set(together[1].tokens)) == 9
    assert together == [generate(base, [p], sampling=s)[0] for p,s in zip(prompts, rules)]
    free = [replace(s, repetition_penalty=1., frequency_penalty=0., presence_penalty=0.) for s in rules]
    assert all(a.tokens != b.tokens for a,b in zip(together, generate(base, prompts, sampling=free)))

@pytest.mark.parametrize('rule', [dict(n=2), dict(logprobs=1), dict(echo=True)])
def test_a_closed_batch_refuses_what_it_has_no_place_for(rule):
    with pytest.raises(Refused, match=f'prompt 0 asks for {next(iter(rule))}='):
        generate(random_base(), ['a'], sampling=Sampling(**rule))

def test_ids_outside_the_vocabulary():
    for s in (Sampling(logit_bias={257: 1}), Sampling(stop_token_ids=[3, 257])):
        with pytest.raises(Refused, match='token id 257; it must be below'): check_token_ids(s, 257)
        with pytest.raises(Refused, match='token id 257'): generate(random_base(), ['a'], sampling=s)
    check_token_ids(Sampling(logit_bias={256: 1}, stop_token_ids=[256]), 257)

# --- log-probabilities

def test_B75_logprobs_are_the_models_own():
    logits = random_logits(3, 700, 4)
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    drawn = Sampling(temperature=.3, top_k=2, seed=1, logit_bias={9: 50}, logprobs=20)
    rules = [Sampling(logprobs=0), drawn, Sampling()]
    out = unpacked(np.array(packed(run(logits, sampling_rows(rules, room=Room(bias=1)), zeros(3)))))
    assert out.token[0] == out.top_ids[0, 0] and out.token[1] == 9
    for i in (0, 1):
        np.testing.assert_allclose(out.logprob[i], expected[i, out.token[i]], rtol=1e-5)
        assert out.top_ids[i].tolist() == np.argsort(-expected[i])[:20].tolist()
        np.testing.assert_allclose(out.top_logprobs[i], np.sort(expected[i])[::-1][:20], rtol=1e-5)
    assert np.isnan(out.logprob[2]) and (out.top_ids[2] == -1).all() and np.isnan(out.top_logprobs[2]).all()
    for bad in (-1, 21, True, 1.5, '5'):
        with pytest.raises(Refused, match='logprobs='): Sampling(logprobs=bad)

def test_a_prompt_is_scored_and_small_vocabularies_have_fewer_alternatives():
    logits = random_logits(6, 7)
    told = score(jnp.array(logits), jnp.arange(6))
    assert told.top_ids.shape == (6, 7)
    expected = torch.log_softmax(torch.tensor(logits), 1).numpy()
    np.testing.assert_allclose(told.logprob, expected[range(6), range(6)], rtol=1e-5)

def test_what_is_packed_comes_back():
    rows = sampling_rows([Sampling(logprobs=1), Sampling(), Sampling(temperature=1., seed=2, logprobs=0)])
    logits = random_logits(3, 90)
    logits[1, 3] = np.nan
    out = run(logits, rows, zeros(3))
    for a,b in zip(jax.tree.leaves(out), jax.tree.leaves(unpacked(np.array(packed(out))))):
        assert np.array_equal(a, b, equal_nan=a.dtype == np.float32)
