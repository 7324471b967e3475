"""The C products against float64 arithmetic, by tiles and by vectors, at every remainder; from many threads at once; and
machines that can't have them."""
import platform, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
import jax, jax.numpy as jnp, ml_dtypes, numpy as np, pytest
from lorajax import native, ops
from lorajax.core import Refused
from lorajax.ops import LoraGroup

INTEL = platform.machine() == 'x86_64'
WAYS = dict(here=[], vectors=['-mno-amx-bf16'] if INTEL else [], narrow=['-march=haswell'] if INTEL else []) # this processor; older ones

@cache
def most_tokens(way):
    "Makes a way's functions known to XLA, as `here_dot` and so on."
    try: library = native.compiled(*WAYS[way])
    except Refused as e: pytest.skip(str(e))
    for name in ('dot', 'linear'):
        jax.ffi.register_ffi_target(f'{way}_{name}', jax.ffi.pycapsule(getattr(library, name)), platform='cpu')
    return library.most_tokens()

@pytest.fixture(params=WAYS)
def most(request, monkeypatch): # tokens, with `native` going this way
    most, call = most_tokens(request.param), jax.ffi.ffi_call
    monkeypatch.setattr(jax.ffi, 'ffi_call', lambda name, *a, **kw: call(name.replace('lorajax', request.param), *a, **kw))
    return most

def half(rng, *shape): return rng.normal(size=shape).astype(ml_dtypes.bfloat16)

def close(got, *exact): # float64 arithmetic, and the same with magnitudes
    want, size = exact
    assert (np.abs(np.asarray(got) - want) <= 1e-5 * size + 1e-30).all()

def by_hand(x, w): # [T, in], [out, in]
    x, w = x.astype('f8'), w.astype('f8')
    return x @ w.T, np.abs(x) @ np.abs(w).T

SIZES = [(1, 32, 32), (2, 64, 33), (3, 576, 960), (5, 96, 47), (8, 1536, 576), (8, 32, 5000), (7, 4096, 300)]

@pytest.mark.parametrize('tokens, n_in, n_out', [*SIZES, (15, 64, 65), (16, 96, 64), (17, 64, 97), (33, 576, 192), (64, 96, 130), (128, 64, 34)])
def test_products_of_all_remainders(most, tokens, n_in, n_out):
    if tokens > most: pytest.skip(f'{most} tokens at most')
    rng = np.random.default_rng(tokens)
    x, w = half(rng, tokens, n_in), half(rng, 3, n_out, n_in)
    w[0], w[2] = np.nan, np.inf # other layers are not looked at
    close(native.dot_native(jnp.array(x), jnp.array(w), jnp.int32(1)), *by_hand(x, w[1]))
    close(native.dot_native(jnp.array(x), jnp.array(w[1])), *by_hand(x, w[1]))

def test_a_row_is_the_same_in_any_company(most):
    rng = np.random.default_rng(0)
    x, w = jnp.array(half(rng, most, 576)), jnp.array(half(rng, 500, 576))
    together = np.asarray(native.dot_native(x, w))
    for n in range(1, most, 3):
        np.testing.assert_array_equal(native.dot_native(x[-n:], w), together[-n:])

def group_of(rng, n_in, outs, ranks, layers=3): # ranks: m times one for each slot from 1 on
    "Rank rows with padding between adapters, which is NaN and nobody's."
    a, bs, owners, rows = [], [], [], []
    for out, own in zip(outs, ranks):
        owner = np.concatenate([[slot] * r + [-1] * (-r % 8 + 8) for slot,r in enumerate(own, 1)]).astype(np.int32)
        one, other = half(rng, layers, len(owner), n_in), half(rng, layers, len(owner), out)
        one[:, owner < 0], other[:, owner < 0] = np.nan, np.nan
        where = np.full((len(own) + 1, max(own)), len(owner), np.int32)
        for slot,r in enumerate(own, 1): where[slot, :r] = np.flatnonzero(owner == slot)
        a.append(one), bs.append(other), owners.append(owner), rows.append(where)
    a, owner = np.concatenate(a, axis=1), np.concatenate(owners)
    scale = rng.uniform(.5, 2, (layers, len(owner))).astype('f4')
    return LoraGroup(*jax.tree.map(jnp.array, (a, tuple(bs), scale, owner, tuple(rows))))

def terms_by_hand(x, g, slots, layer): # [B, sum of out] float64, and the same with magnitudes
    found, start = [], 0
    for b in g.bs:
        here, start = slice(start, start + b.shape[1]), start + b.shape[1]
        owner = np.asarray(g.owner)[here]
        a, scale, own = (np.asarray(m)[layer].astype('f8') for m in (g.a[:, here], g.scale[:, here], b))
        y = np.zeros((2, len(x), b.shape[2]))
        for t, slot in enumerate(slots):
            mine = owner == slot
            if not slot or not mine.any(): continue
            h = (a[mine] @ x[t].astype('f8') * scale[mine]).astype('f4').astype(ml_dtypes.bfloat16).astype('f8')
            y[:, t] = h @ own[mine], np.abs(h) @ np.abs(own[mine])
        found.append(y)
    return np.concatenate(found, axis=2)

CASES = [(1, 64, (32,), [[5]], [1]), (8, 96, (64, 32, 96), [[16] * 8] * 3, range(1, 9)), (8, 64, (96,), [[16]], [1] * 8),
         (7, 576, (576, 192, 192), [[1, 64, 3], [8, 2, 16], [5, 5, 9]], [3, 0, 1, 1, 2, 3, 0]), (6, 64, (64, 64), [[4, 4]] * 2, [0] * 6),
         (8, 1536, (1536, 1536), [[48, 8], [1, 512]], [2, 1, 2, 1, 1, 2, 1, 1]),
         (40, 64, (128, 32), [[3, 9, 1], [2, 8, 30]], [i % 4 for i in range(40)]), (20, 32, (64,), [[7]], [1] * 20)]

@pytest.mark.parametrize('tokens, n_in, outs, ranks, slots', CASES)
def test_linears_with_terms(most, tokens, n_in, outs, ranks, slots):
    rng, slots = np.random.default_rng(tokens), np.array(slots, np.int32)
    g, x, w = group_of(rng, n_in, outs, ranks), half(rng, tokens, n_in), half(rng, 3, sum(outs), n_in)
    terms, size = terms_by_hand(x, g, slots, 2)
    alone = native.lora_native(jnp.array(x)[:, None], g.at(2), jnp.array(slots))
    assert [y.shape for y in alone] == [(tokens, 1, out) for out in outs]
    # a sum that lies between two bfloat16 numbers may be rounded to either: an error of h, not of the sums
    error = np.abs(np.concatenate(alone, axis=2)[:, 0] - terms)
    assert (error <= 2 ** -8 * size).all() and (error > 1e-4 * size + 1e-30).mean() < .01
    assert not np.concatenate(alone, axis=2)[:, 0][slots == 0].any()
    if tokens > most: return
    base = np.asarray(native.dot_native(jnp.array(x), jnp.array(w), jnp.int32(2)))
    both = native.linear_native(jnp.array(x), jnp.array(w), 2, g.at(2), jnp.array(slots))
    np.testing.assert_array_equal(both, base + np.concatenate(alone, axis=2)[:, 0])

def test_many_threads_at_once(most):
    "Work is shared with threads that other calls use too; helpers come late, or never."
    rng = np.random.default_rng(0)
    x, w = jnp.array(half(rng, 8, 576)), jnp.array(half(rng, 2000, 576))
    g, slots = group_of(rng, 576, (992, 992), [[16] * 8] * 2).at(jnp.int32(1)), jnp.arange(1, 9, dtype=jnp.int32)
    f = jax.jit(lambda: (native.dot_native(x, w), native.linear_native(x, w[:1984], None, g, slots)))
    want = jax.tree.map(np.asarray, f())
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: jax.tree.map(np.asarray, f()), range(300)):
            for a, b in zip(got, want): np.testing.assert_array_equal(a, b)

def linear(x, w, layer, g, slots, backend): # in one call or two, as the decoder does it
    if (y := ops.linear(x, w, layer, g, slots, backend=backend)) is not None: return y
    return ops.dot(x, w, layer, backend=backend) + jnp.concatenate(ops.lora(x[:, None], g, slots, backend=backend), axis=2)[:, 0]

def test_rows_of_several_tokens(most):
    rng, slots = np.random.default_rng(0), np.array([2, 0, 1], np.int32)
    g, x = group_of(rng, 64, (64, 32), [[4, 9]] * 2), half(rng, 3, 11, 64)
    ys = np.concatenate(native.lora_native(jnp.array(x), g.at(1), jnp.array(slots)), axis=2)
    want, size = terms_by_hand(x.reshape(33, 64), g, np.repeat(slots, 11), 1)
    assert (np.abs(ys.reshape(33, 96) - want) <= 2 ** -8 * size).all()

def test_layers_count_from_the_end_and_stop_there_as_everywhere(most):
    rng = np.random.default_rng(0)
    x, w = jnp.array(half(rng, 4, 64)), jnp.array(half(rng, 3, 40, 64))
    for layer in (-1, -3, 7): np.testing.assert_array_equal(native.dot_native(x, w, layer), native.dot_native(x, w[layer % 3 if layer < 0 else 2]))

def test_a_batch_of_products(most):
    rng = np.random.default_rng(0)
    x, w = half(rng, 3, 4, 64), half(rng, 40, 64)
    ys = jax.vmap(native.dot_native, (0, None))(jnp.array(x), jnp.array(w))
    for y, own in zip(ys, x): close(y, *by_hand(own, w))

def test_terms_are_differentiable_as_the_slow_forms():
    if native.registered()[0] == 0: pytest.skip(native.registered()[1])
    rng = np.random.default_rng(0)
    g, x, w, slots = group_of(rng, 64, (64, 32), [[4, 9]] * 2), half(rng, 5, 64), half(rng, 3, 96, 64), jnp.array([1, 2, 0, 2, 1])
    g = jax.tree.map(lambda m: jnp.nan_to_num(m) if m.dtype == jnp.bfloat16 else m, g)
    def loss(op, backend):
        def of(x, a, bs):
            own = LoraGroup(a, bs, g.scale, g.owner, g.rows, jnp.int32(1))
            if op == 'lora': y = jnp.concatenate(ops.lora(x[:, None], own, slots, backend=backend), axis=2)
            else: y = linear(x, jnp.array(w), jnp.int32(1), own, slots, backend)
            return (y ** 2).sum()
        return jax.jit(jax.grad(of, (0, 1, 2)))(jnp.array(x), g.a, g.bs)
    for op in ('lora', 'linear'):
        pairs = zip(*(jax.tree.leaves(loss(op, b)) for b in (None, 'dot=xla,lora=xla-decode')))
        for a, b in pairs: np.testing.assert_allclose(a.astype('f4'), b.astype('f4'), atol=.02 * np.abs(b.astype('f4')).max())

def test_linear_takes_two_layers_by_their_own_numbers():
    rng, slots = np.random.default_rng(0), jnp.array([1, 2, 0, 2, 1])
    g, x, w = group_of(rng, 64, (64, 32), [[4, 9]] * 2), jnp.array(half(rng, 5, 64)), jnp.array(half(rng, 3, 96, 64))
    own = ops.in_one_piece(g.at(0), 64)
    for layer, group in ((2, own), (2, g.at(0)), (None, g.at(1))):
        weights = w[1] if layer is None else w
        ys = [linear(x, weights, layer, group, slots, b) for b in (None, 'dot=xla,lora=ref')]
        np.testing.assert_allclose(*ys, rtol=2e-2, atol=2e-1)

def test_nowhere_to_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'nowhere'))
    with pytest.raises(Refused, match='cannot be compiled and loaded here'): native.compiled()

def test_it_is_differentiable():
    if native.registered()[0] == 0: pytest.skip(native.registered()[1])
    rng = np.random.default_rng(0)
    x, w = jnp.array(half(rng, 5, 64)), jnp.array(half(rng, 2, 40, 64))
    loss = lambda dot: lambda x, w: (dot(x, w) ** 2).sum()
    got = jax.grad(loss(lambda x, w: native.dot_native(x, w, jnp.int32(1))), (0, 1))(x, w)
    want = jax.grad(loss(lambda x, w: native.dot_xla(x, w[1])), (0, 1))(x, w)
    for a, b in zip(got, want): np.testing.assert_allclose(a.astype('f4'), b.astype('f4'), rtol=2e-2, atol=1e-2)

@pytest.mark.parametrize('compiler, says', [('nothing-here -m64', "no C compiler 'nothing-here -m64'"), ('false', "'false' fails (status 1)")])
def test_a_machine_that_cannot_compile_goes_on_with_xla_and_says_why(monkeypatch, compiler, says):
    monkeypatch.setenv('CC', compiler)
    found = native._registered.__wrapped__()
    assert found[0] == 0 and says in found[1]
    monkeypatch.setattr(native, 'registered', lambda: found)
    rng = np.random.default_rng(0)
    x, w, g = jnp.array(half(rng, 4, 64)), jnp.array(half(rng, 96, 64)), group_of(rng, 64, (96,), [[8]]).at(0)
    slots = jnp.ones(4, jnp.int32)
    assert ops.choose('dot', x, w) == 'xla' and ops.choose('lora', x[:, None], g, slots) == 'xla-decode'
    for op, arrays in (('dot', (x, w)), ('lora', (x[:, None], g, slots))):
        with pytest.raises(Refused) as e: ops.choose(op, *arrays, backend=f'{op}=native')
        assert says in str(e.value)

@pytest.mark.parametrize('x, w, says', [((4, 64, 'f4'), (96, 64, 'f4'), 'operands are float32'), ((4, 40), (96, 40), '40 channels'),
                                        ((4, 64), (31, 64), '31 outputs'), ((129, 64), (96, 64), '129 tokens')])
def test_what_it_is_not_for_is_named(x, w, says):
    make = lambda *shape: jax.ShapeDtypeStruct(shape[:2], shape[2] if len(shape) > 2 else jnp.bfloat16)
    if native.registered()[0] == 0: pytest.skip(native.registered()[1])
    assert says in native.not_native_dot(make(*x), make(*w)) and ops.choose('dot', make(*x), make(*w)) == 'xla'

def test_what_ran_is_told_and_can_be_chosen(monkeypatch):
    if native.registered()[0] == 0: pytest.skip(native.registered()[1])
    rng = np.random.default_rng(0)
    x, w, g = jnp.array(half(rng, 4, 64)), jnp.array(half(rng, 3, 96, 64)), group_of(rng, 64, (96,), [[8, 3]]).at(1)
    slots = jnp.array([1, 0, 2, 1])
    monkeypatch.setattr(ops, 'TRACED', type(ops.TRACED)())
    ys = [linear(x, w, jnp.int32(1), g, slots, b) for b in (None, 'lora=ref', 'dot=xla,lora=xla', 'ref')]
    assert ops.TRACED == {('dot', 'native'): 2, ('lora', 'native'): 1, ('lora', 'ref'): 2, ('dot', 'xla'): 1, ('lora', 'xla'): 1,
                          ('dot', 'ref'): 1}
    for y in ys: np.testing.assert_allclose(y, ys[-1], rtol=2e-2, atol=2e-1)

def test_it_is_made_once_although_several_threads_ask_first(monkeypatch):
    made = []
    monkeypatch.setattr(native, '_registered', cache(lambda: made.append(1) or time.sleep(.05) or (8, '')))
    with ThreadPoolExecutor(4) as pool: assert {*pool.map(lambda _: native.registered(), range(4))} == {(8, '')}
    assert made == [1]
