"""The engine's own step, for SmolLM2 and adapters in the arena's pages, compiled for an H200 and an A100: read, not run."""
from functools import partial
import jax, numpy as np, pytest
import lorajax.step as step_module
from lorajax.arena import Arena, Residents
from lorajax.base import Base, byte_tokenizer
from lorajax.core import module_shapes
from lorajax.model import pack
from lorajax.step import Runner, StepShape, page_layout
from lorajax.store import ImageFolder, Store
from deviceless import needs_plugin
from ladder import aot
from shapes import SMOLLM2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')]
needs_plugin()

PAGES = 20_000 # of 369 kB: an arena of 7.4 GB
SHAPES = {'decode': StepShape(64, blocks=512), 'prefill': StepShape(64, 1, 256, blocks=512)} # 64 adapters of rank 64

def no_weights(c): # whose numbers don't matter to a compiler
    sizes = {f'{path}.weight': (o, i) for path,(i, o) in module_shapes(c).items()} | {'model.embed_tokens.weight': (c.vocab_size, c.width)}
    return pack(c, lambda name: np.broadcast_to(np.float32(0), sizes.get(name, (c.width,))))

@pytest.fixture(scope='module')
def runner(tmp_path_factory):
    base = Base('zeros', SMOLLM2, no_weights(SMOLLM2), byte_tokenizer(), '')
    layout = page_layout(base)
    store = Store(ImageFolder(tmp_path_factory.mktemp('images'), layout), budget=64 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, '_compiled', lambda runner, progress: {}) # for this machine's CPU
        yield Runner(base, Residents(store, Arena(layout, 20)), list(SHAPES.values()), slots=64, max_rank=64, max_len=1024, paged=True)

@pytest.fixture(scope='module', params=[('sm_90a', 'decode'), ('sm_80', 'decode'), ('sm_90a', 'prefill')], ids='-'.join)
def compiled(request, runner): # -> (architecture, a key of `SHAPES`), the program
    arch, path = request.param
    own, arrays = runner.running[SHAPES[path].blocks], step_module._arrays(runner, SHAPES[path], (), (), {None: 0})
    @partial(jax.jit, donate_argnums=0)
    def program(words, weights, *arrays):
        return step_module.step(weights, words, *arrays, follow=None, graph=runner.graph, layout=runner.layout,
                                backend='lora=pallas,attend_pages=pallas|xla')
    words = jax.ShapeDtypeStruct((PAGES, runner.layout.words), runner.layout.word)
    return request.param, aot(program, words, runner.weights, own.groups, own.routing, *arrays[:4], arch=arch)

def test_the_arena_is_written_in_place(compiled, capsys):
    "Adapters and keys/values share the buffer, so a product that read it as it was before would take a copy of it."
    which, program = compiled
    arena, beside = PAGES * 30 * 2 * 16 * 192 * 2, program.memory.temp_size_in_bytes # 30 layers, keys and values of 16 tokens
    with capsys.disabled(): print(f'\n{" ".join(which)}: {beside / 1e6:.0f} MB beside an arena of {arena / 1e9:.1f} GB', end=' ')
    assert program.memory.alias_size_in_bytes == arena and beside < .05 * arena

def test_launches(compiled):
    "Shrink and expand once for each of four groups and each segment, a layer; two kernels for the attention of those that generate."
    (_, path), program = compiled
    launches = [line for line in program.executable.hlo_modules()[0].to_string().splitlines() if '__gpu$xla.gpu.triton' in line]
    assert all('while/body' in line for line in launches) and len(launches) == 8 * (1 + (path == 'prefill')) + 2
    for name in ('shrink', 'expand', 'attend_walk', 'attend_join'): assert any(k.startswith(name) for k in program.kernels)

def test_nothing_spills(compiled):
    "Neither our kernels nor XLA's own."
    assert {name: k.spills for name,k in compiled[1].kernels.items() if k.spills} == {}

def test_tokens_are_sorted_outside_the_layers(compiled):
    lines = compiled[1].executable.hlo_modules()[0].to_string().splitlines()
    assert any('custom-call(' in line and 'while/body' in line for line in lines)
    assert not any('while/body' in line for line in lines if ' sort(' in line)
