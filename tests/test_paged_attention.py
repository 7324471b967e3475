"""Paged attention on XLA against NumPy; not notebook cells, as the sizes and their number would bore."""
from functools import partial
import jax, jax.numpy as jnp, numpy as np, pytest
from lorajax.attention import PagedKV, attend_paged_xla, write_kv
from paged import DTYPES, EVERYTHING, Pages, close

attend = jax.jit(attend_paged_xla)

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('window', [EVERYTHING, 130, 7, 1])
@pytest.mark.parametrize('block', [2, 22, 128, 200]) # smaller than a trip's positions, not a divisor of them, equal, larger
def test_one_query_at_the_end_of_each_row(block, window, dtype):
    lengths = [1, 127, 128, 129, 257, 45]
    pages = Pages(lengths, block, K=3, C=8, dtype=dtype)
    q, positions = pages.queries(1, 9), np.array(lengths, np.int32)[:, None] - 1
    got = attend(q, pages.kv, positions, window)
    close(np.asarray(got), pages.wanted(q, positions, window), dtype)

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('window', [EVERYTHING, 20])
@pytest.mark.parametrize('H, K', [(4, 4), (6, 2), (5, 1)])
def test_a_piece_of_a_prompt_behind_a_prefix(H, K, window, dtype):
    "Rows at different depths, one of them shorter than the piece: its last queries aren't there."
    lengths, S = [150, 40, 16, 5], 16
    pages = Pages(lengths, 24, K, 16, dtype=dtype)
    positions = np.stack([np.arange(n - S, n) if n >= S else np.r_[np.arange(n), np.full(S - n, -1)] for n in lengths])
    q = pages.queries(S, H)
    got = attend(q, pages.kv, positions.astype(np.int32), window)
    close(np.asarray(got), pages.wanted(q, positions, window), dtype)
    assert not np.asarray(got)[positions < 0].any()

@pytest.mark.parametrize('S', [1, 3])
def test_a_row_that_is_not_there(S):
    "Its table shows the scratch page, which is NaN; its own result is zero and the other rows' are what they were."
    pages = Pages([30, 11], 8, 2, 8)
    q, positions = pages.queries(S, 4), np.array([[29] * S, [10] * S], np.int32)
    alone = attend(q, pages.kv, positions, 9)
    more = PagedKV(pages.kv.words, pages.kv.layer, jnp.pad(pages.kv.tables, ((0, 1), (0, 0))), 8, 2, 8)
    got = attend(np.concatenate([q, q[:1]]), more, np.concatenate([positions, np.full((1, S), -1, np.int32)]), 9)
    np.testing.assert_allclose(got[:2], alone, rtol=0, atol=1e-6)
    assert not np.asarray(got[2]).any()

@pytest.mark.parametrize('dtype', DTYPES)
def test_write_touches_its_own_places_only(dtype):
    number, word = DTYPES[dtype]
    L, block, K, C = 3, 5, 2, 4
    tables = np.array([[4, 2, 7], [1, 6, 0]], np.int32)
    positions = np.array([[3, 4, 5, 10], [0, 9, -1, -1]], np.int32) # over block borders; two that aren't there
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(2, 4, K, C)).astype(number) for _ in 'kv')
    before = rng.integers(0, 1 << 16, (8, L * 2 * block * K * C)).astype(word)
    kv = PagedKV(jnp.asarray(before), jnp.int32(2), jnp.asarray(tables), block, K, C)
    got = np.asarray(jax.jit(write_kv)(kv, jnp.asarray(positions), jnp.asarray(k), jnp.asarray(v)).words)
    wanted = before.copy().reshape(8, L, 2, block, K * C)
    for b, s in zip(*np.nonzero(positions >= 0)):
        p = positions[b, s]
        for part, m in enumerate((k, v)): wanted[tables[b, p // block], 2, part, p % block] = m[b, s].reshape(-1).view(word)
    np.testing.assert_array_equal(got[1:], wanted.reshape(before.shape)[1:]) # page 0 is scratch

@partial(jax.jit, donate_argnums=0)
def layers(words, tables, positions, q, k, v):
    "What a decoder does: a scan over layers which writes and reads the buffer in each."
    def layer(carry, i):
        words, q = carry
        kv = write_kv(PagedKV(words, i, tables, 16, 3, 64), positions, k, v)
        return (kv.words, attend_paged_xla(q, kv, positions, EVERYTHING).astype(q.dtype)), None
    return jax.lax.scan(layer, (words, q), jnp.arange(30))[0]

@pytest.mark.parametrize('S', [1, 64])
def test_the_buffer_is_never_copied(S):
    "SmolLM2's shapes: the buffer is aliased, and what the program needs beside it doesn't grow with it."
    def memory(pages, rows=8, dtype=jnp.bfloat16):
        shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
        words, numbers = shape(jnp.uint16, pages, 30 * 2 * 16 * 192), [shape(dtype, rows, S, n, 64) for n in (9, 3, 3)]
        program = layers.lower(words, shape(jnp.int32, rows, 32), shape(jnp.int32, rows, S), *numbers).compile()
        return program.memory_analysis(), pages * 30 * 2 * 16 * 192 * 2
    (small, _), (large, nbytes) = memory(100), memory(1000)
    assert large.alias_size_in_bytes == nbytes
    assert small.temp_size_in_bytes == large.temp_size_in_bytes < .05 * nbytes
