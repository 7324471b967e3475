"""What the swap does on a GPU, read from its program; not a notebook cell, as it takes a CUDA compiler."""
import re
import jax, jax.numpy as jnp, numpy as np, pytest
from deviceless import compile_for_gpu, lower_for_cuda, named_mesh, needs_plugin, shape
from lorajax.arena import write_pages
from lorajax.images import PageLayout
from lorajax.rows import renew
from lorajax.split import AXIS, EVERYWHERE, WORDS as BY_WORDS, Split
from shapes import SMOLLM2

needs_plugin()

P, WORDS = 1000, 184_320 # pages of SmolLM2: 30 layers, keys and values, 16 tokens, 192 numbers

@pytest.fixture(scope='module', params=[1, 4, 64])
def n(request): return request.param

@pytest.fixture(scope='module')
def lowered(n):
    words, chunk = shape((P, WORDS), jnp.uint16), shape((n, WORDS), jnp.uint16, 'pinned_host')
    return lower_for_cuda(write_pages, words, chunk, shape((n,), jnp.int32))

@pytest.fixture(scope='module')
def executable(lowered): return compile_for_gpu(lowered)

@pytest.fixture(scope='module')
def hlo(executable): return executable.hlo_modules()[0].to_string()

def test_a_gpu_gets_the_scatter(lowered):
    text = lowered.as_text()
    assert 'stablehlo.scatter' in text and 'dynamic_update_slice' not in text

def test_nothing_but_the_chunk_is_in_host_memory(hlo, n):
    "S(5) is XLA's host memory: `xla::Layout::kHostMemorySpace`."
    arguments = f'u16[{P},{WORDS}]{{1,0}}, u16[{n},{WORDS}]{{1,0:S(5)}}, s32[{n}]{{0}}'
    assert f'entry_computation_layout={{({arguments})->u16[{P},{WORDS}]{{1,0}}}}' in hlo
    assert set(re.findall(r'(\w+\[[\d,]*\])\{[^{}]*S\(5\)[^{}]*\}', hlo)) == {f'u16[{n},{WORDS}]'}

def test_one_asynchronous_copy_moves_the_chunk(hlo, n):
    copies, chunk = re.findall(r'= (\S.* copy(?:-start|-done)?\(.*?)[.\d]*\)', hlo), f'u16[{n},{WORDS}]{{1,0'
    assert copies == [f'({chunk}}}, {chunk}:S(5)}}, u32[]) copy-start(%chunk', f'{chunk}}} copy-done(%copy-start']

def test_the_buffer_is_written_in_place(executable, hlo, n):
    memory, chunk = executable.get_compiled_memory_stats(), n * WORDS * 2
    assert 'input_output_alias={ {}: (0, {}, may-alias) }' in hlo
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes == P * WORDS * 2
    assert memory.host_argument_size_in_bytes == chunk and memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < 1.1 * chunk + (1 << 20)

def test_rows_are_renewed_in_place():
    "A block at a time: as many rounds as blocks, and not as tiles."
    layout = PageLayout(SMOLLM2, 16)
    L, N, tiles = 30, 16, {'o': (9, 9), 'down': (24, 9)}
    ids = lambda n: shape((L, N, n), jnp.int32)
    which = shape((N,), jnp.bool_), shape((N,), jnp.int32), shape((), jnp.int32)
    rows = lambda n: shape((L, N * 8, n * 64), jnp.bfloat16)
    held = {g: (rows(a), (rows(b),)) for g,(a, b) in tiles.items()}
    lowered = lower_for_cuda(renew, shape((P, layout.words), jnp.uint16), held,
                             {g: [(ids(a), ids(b), *which)] for g,(a, b) in tiles.items()})
    memory = compile_for_gpu(lowered).get_compiled_memory_stats()
    size = sum(2 * L * N * 8 * n * 64 for g in tiles.values() for n in g)
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / N

@pytest.mark.skipif(len(jax.devices()) < 4, reason='takes four simulated CPU devices: JAX_NUM_CPU_DEVICES=4, as make gpu-check sets it')
def test_each_of_four_devices_fetches_its_own_words(n):
    "From page-locked memory, in one asynchronous copy, into its own arena; the arrays are placed on simulated devices, as above."
    split = Split(jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,)))
    whole = lambda rows, memory: jax.ShapeDtypeStruct((rows, 4 * WORDS), jnp.uint16, sharding=split.at(BY_WORDS, memory))
    program = Split(named_mesh(4)).each(write_pages, (BY_WORDS, BY_WORDS, EVERYWHERE), BY_WORDS, donate=0)
    shapes = whole(P, 'device'), whole(n, 'pinned_host'), jax.ShapeDtypeStruct((n,), jnp.int32, sharding=split.at())
    executable = compile_for_gpu(program.trace(*shapes).lower(lowering_platforms=('cuda',)), n=4)
    hlo, memory = executable.hlo_modules()[0].to_string(), executable.get_compiled_memory_stats()
    assert f'u16[{P},{WORDS}]{{1,0}}, u16[{n},{WORDS}]{{1,0:S(5)}}, s32[{n}]{{0}})->u16[{P},{WORDS}]{{1,0}}' in hlo
    assert hlo.count(' copy-start(') == 1 and not re.search(r' (all-|reduce-scatter|collective-)', hlo)
    assert memory.alias_size_in_bytes == P * WORDS * 2 and memory.host_argument_size_in_bytes == n * WORDS * 2
