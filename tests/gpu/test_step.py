"""The engine's own step, for SmolLM2 and adapters in the arena's pages, compiled for an H200 and an A100: read, not run."""
import re
from functools import partial
import jax, numpy as np, pytest
from flax import nnx
from jax.sharding import Mesh
import lorajax.step as step_module
from lorajax.arena import Arena, Residents
from lorajax.base import Base, byte_tokenizer
from lorajax.core import ModelConfig, module_shapes
from lorajax.model import Decoder, pack
from lorajax.split import AXIS, EVERYWHERE, WORDS, Split, share, weight_spec
from lorajax.step import Runner, StepShape, page_layout
from lorajax.store import ImageFolder, Store
from deviceless import named_mesh, needs_plugin, target_devices
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

# Four H200 that share a model

LLAMA = ModelConfig(vocab_size=32768, width=2048, mlp_width=8192, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
                    max_len=8192, tied=True) # Llama 3.2 1B with a quarter of its words

@pytest.fixture(scope='module')
def one_of_four(tmp_path_factory):
    "A device's share of the model as a model of its own: all its arrays are those that one of four devices has."
    config = share(LLAMA, 4)
    base = Base('zeros', config, no_weights(config), byte_tokenizer(), '')
    layout = page_layout(base)
    store = Store(ImageFolder(tmp_path_factory.mktemp('images'), layout), budget=64 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, '_compiled', lambda runner, progress: {})
        yield Runner(base, Residents(store, Arena(layout, 20)), list(SHAPES.values()), slots=64, max_rank=64, max_len=1024, paged=True)

def on_four(runner, path, adapters): # the step's program for four H200
    split, shape_ = Split(Mesh(target_devices(4), (AXIS,))), SHAPES[path]
    def whole(x, spec): # of all devices, from what one has
        dims = list(np.shape(x))
        for i, axis in enumerate(spec): dims[i] *= 4 if axis else 1
        return jax.ShapeDtypeStruct(dims, x.dtype, sharding=split.at(spec))
    own, arrays = runner.running[shape_.blocks if adapters else 0], step_module._arrays(runner, shape_, (), (), {None: 0})[:4]
    graph, weights = nnx.split(Decoder(runner.layout.config, nnx.to_pure_dict(nnx.state(runner.base.decoder)), AXIS))
    def spec_of(path, _): # ('layers', module, part, …)
        names = [getattr(k, 'key', None) for k in path]
        return weight_spec(*names[1:3]) if names[0] == 'layers' else EVERYWHERE
    words = jax.ShapeDtypeStruct((PAGES, runner.layout.words), runner.layout.word)
    args = weights, words, own.groups, own.routing, *arrays
    specs = jax.tree_util.tree_map_with_path(spec_of, weights), WORDS, *jax.tree.map(lambda x: EVERYWHERE, args[2:])
    program = Split(named_mesh(4)).each(lambda *own: step_module.step(*own, None, graph, runner.layout, 'lora=pallas,attend_pages=pallas|xla'),
                         specs, (EVERYWHERE, EVERYWHERE, WORDS), donate=1)
    return program.lower(*jax.tree.map(whole, args, specs)).compile()

@pytest.mark.parametrize('path', SHAPES)
def test_four_devices_exchange_what_the_base_does(one_of_four, path):
    "Two sums in the layers' loop, with 64 adapters and without; each device's arena, of 20,000 pages, is written in place."
    for adapters in (True, False):
        program = on_four(one_of_four, path, adapters)
        exchanged = re.findall(r' (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(', program.as_text())
        assert exchanged == ['all-reduce'] * 2
        memory, arena = program.memory_analysis(), PAGES * 16 * 2 * 16 * 2 * 64 * 2
        assert memory.alias_size_in_bytes == arena and memory.temp_size_in_bytes < .05 * arena
