"""Paged decode attention up the ladder: Pallas' interpreter, its lowered Triton IR, an H200's and an A100's machine code.

Not notebook cells, as the upper rungs take JAX's internals and a CUDA compiler.
"""
from functools import partial
import jax, jax.numpy as jnp, numpy as np, pytest
from lorajax.attention import PagedKV, attend_paged_pallas, attend_paged_xla, write_kv
from deviceless import needs_plugin
from ladder import aot, lowered_ttir_run
from paged import EVERYTHING, Pages, close
from shapes import ATTENTION, LENGTHS

pytestmark = pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')

@pytest.fixture(scope='module', params=['bfloat16', 'float32'])
def dtype(request): return request.param

@pytest.fixture(scope='module', params=ATTENTION, ids=str)
def case(request, dtype): # -> q, kv, positions, window; what is right
    H, K, C, block, window = request.param
    pages = Pages(LENGTHS, block, K, C, dtype=dtype)
    q, positions = pages.queries(1, H), np.array(LENGTHS, np.int32)[:, None] - 1
    return (jnp.asarray(q), pages.kv, jnp.asarray(positions), jnp.int32(window)), pages.wanted(q, positions, window)

@pytest.fixture(scope='module')
def interpreted(case): return np.asarray(attend_paged_pallas(*case[0], interpret=True))

def test_interpreted(case, interpreted, dtype): close(interpreted, case[1], dtype)

def test_lowered(case, interpreted, dtype):
    "Pages and results that nobody wrote are NaN; a lane outside its buffer is a fault."
    lowered = np.asarray(lowered_ttir_run(attend_paged_pallas, *case[0]))
    close(lowered, case[1], dtype)
    np.testing.assert_allclose(lowered, interpreted, rtol=0, atol=1e-6 if dtype == 'float32' else 1e-2)

def test_company_changes_no_bit():
    "A row alone, and the same row beside others, in a table with room for more."
    pages = Pages([300, 700, 12], 16, 2, 32, dtype='bfloat16')
    q, positions = jnp.asarray(pages.queries(1, 6)), jnp.array([[299], [699], [11]])
    run = partial(lowered_ttir_run, partial(attend_paged_pallas, window=EVERYTHING))
    together, kv = run(q, pages.kv, positions), pages.kv
    for b, n in enumerate((19, 44, 1)): # the row's own pages
        alone = PagedKV(kv.words, kv.layer, kv.tables[b:b+1, :n], kv.block, kv.heads, kv.channels)
        np.testing.assert_array_equal(run(q[b:b+1], alone, positions[b:b+1])[0], together[b])

# Machine code

def numbers(dtype, *dims): return jax.ShapeDtypeStruct(dims, dtype)

@pytest.fixture(params=['sm_90a', 'sm_80'])
def arch(request):
    needs_plugin()
    return request.param

@pytest.mark.parametrize('H, K, C', [(9, 3, 64), (32, 8, 128), (32, 4, 80), (64, 8, 128)])
def test_machine_code(H, K, C, dtype, arch, capsys):
    def attend(q, words, layer, tables, positions, window):
        return attend_paged_pallas(q, PagedKV(words, layer, tables, 16, K, C), positions, window)
    B, word = 8, dict(bfloat16=jnp.uint16, float32=jnp.uint32)[dtype]
    ints = partial(numbers, jnp.int32)
    program = aot(attend, numbers(dtype, B, 1, H, C), numbers(word, 1000, 32 * 2 * 16 * K * C), ints(), ints(B, 512),
                  ints(B, 1), ints(), arch=arch)
    for name in ('attend_walk', 'attend_join'):
        kernel = program.kernel(name)
        with capsys.disabled(): print(f'\n{arch} {name} {H}/{K} heads of {C} {dtype}: {kernel.registers} registers a thread', end=' ')
        assert kernel.spills == kernel.stack == 0
    walk = program.kernel('attend_walk')
    assert walk.uses('LDGSTS') # pages are copied to shared memory while others are worked on
    assert walk.uses('HMMA') == (dtype == 'bfloat16')

@pytest.mark.parametrize('attend, S', [(attend_paged_pallas, 1), (attend_paged_xla, 64)])
def test_all_layers_in_place(attend, S):
    "SmolLM2's 30 layers write and read the buffer in a scan: it is aliased, and nothing of its size lies beside it."
    needs_plugin()
    @partial(jax.jit, donate_argnums=0)
    def layers(words, tables, positions, q, k, v):
        def layer(carry, i):
            words, q = carry
            kv = write_kv(PagedKV(words, i, tables, 16, 3, 64), positions, k, v)
            return (kv.words, attend(q, kv, positions, EVERYTHING).astype(q.dtype)), None
        return jax.lax.scan(layer, (words, q), jnp.arange(30))[0]
    P, page, ints = 1000, 30 * 2 * 16 * 192, partial(numbers, jnp.int32)
    rows = [numbers(jnp.bfloat16, 8, S, n, 64) for n in (9, 3, 3)]
    program = aot(layers, numbers(jnp.uint16, P, page), ints(8, 64), ints(8, S), *rows)
    assert program.memory.alias_size_in_bytes == P * page * 2
    assert program.memory.temp_size_in_bytes < .02 * P * page * 2
