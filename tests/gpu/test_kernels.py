"""The LoRA kernels on every shape of the table, down to machine code: minutes of work, and a CUDA compiler's."""
import ast
from dataclasses import replace
from functools import partial
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from deviceless import needs_plugin, shape
from ladder import aot, lowered_ttir_run
from lorajax import ops
from lorajax.gradients import lora
from lorajax.kernels import blocks_for, lora_pallas, paged_rows
from lorajax.ref import lora_ref
from shapes import QKV, SMALL, TABLE, Case
from ttir import Fault

pytestmark = pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')
interpreted = jax.jit(partial(lora_pallas, interpret=True))
CASES = [pytest.param(c, id=c.name, marks=[] if c in SMALL else pytest.mark.slow) for c in TABLE]

def lowered(case): return lowered_ttir_run(lora_pallas, jnp.asarray(case.x), case.group, jnp.asarray(case.slots))

# Values

def test_the_table_has_every_width_rank_and_kind_of_batch():
    ranks, tokens = {r for c in TABLE for r in c.ranks}, {c.rows * c.tokens for c in TABLE}
    assert {c.n_in for c in TABLE} >= set(QKV) and ranks >= {1, 8, 16, 48, 64, 128, 512}
    assert min(tokens) == 1 and max(tokens) == 512 and {c.use for c in TABLE} == {'one', 'each', 'base', 'none'}
    assert any(c.int8 and c.path == p for c in TABLE for p in ('decode', 'prefill'))
    assert any(len(c.ranks) == c.rows > 8 for c in TABLE), 'all different'
    assert any(set(range(1, len(c.ranks) + 1)) - set(c.slots) for c in TABLE), 'an adapter that nobody uses'

@pytest.mark.parametrize('case', SMALL, ids=lambda c: c.name)
def test_the_table_expects_what_ref_says(case):
    flat = case.x.reshape(-1, case.n_in).astype('f4')
    slots = np.repeat(case.slots, case.tokens)
    def term(m):
        a, b, scale = (np.concatenate([modules[m][part].astype('f4') for modules in case.adapters]) for part in range(3))
        owner = np.repeat(np.arange(1, len(case.ranks) + 1), [len(modules[m][0]) for modules in case.adapters])
        return lora_ref(*map(jnp.asarray, (flat, a, b, scale, owner.astype(np.int32), slots)))
    ys = [np.asarray(term(m)).reshape(case.rows, case.tokens, -1) for m in range(len(case.outs))]
    assert case.error(ys) < 1e-5

@pytest.mark.parametrize('case', CASES)
def test_interpret_mode_equals_the_dense_product(case):
    assert case.error(interpreted(case.x, case.group, case.slots)) < case.tolerance

@pytest.mark.parametrize('case', CASES)
def test_lowered_triton_ir_equals_the_dense_product(case): assert case.error(lowered(case)) < case.tolerance

@pytest.mark.parametrize('case', SMALL, ids=lambda c: c.name)
def test_pages_read_back_are_the_adapters_rows(case):
    for m, (a, b, scale, owner) in enumerate(paged_rows(case.group, case.n_in)):
        for slot, modules in enumerate(case.adapters, 1):
            own = np.flatnonzero(np.asarray(owner) == slot)[:len(modules[m][0])]
            for got, want in zip((a, b, scale), modules[m]):
                np.testing.assert_array_equal(np.asarray(got)[own], want.astype(got.dtype))
        assert (np.asarray(owner) == -1).sum() == 8, 'the spare block'

@pytest.mark.parametrize('backend', ['xla', 'ref'])
@pytest.mark.parametrize('case', SMALL, ids=lambda c: c.name)
def test_other_backends_take_pages_too(case, backend):
    assert case.error(ops.lora(jnp.asarray(case.x), case.group, jnp.asarray(case.slots), backend=backend)) < case.tolerance

def test_a_module_that_an_adapter_does_not_target():
    case = Case(64, (64, 72), (4, 9), 5, dtype='float32')
    empty = lambda out: (np.zeros((0, 64), 'f4'), np.zeros((0, out), 'f4'), np.zeros(0, 'f4'))
    case.adapters[0][1] = empty(72)
    assert case.error(lowered(case)) < 1e-5

def test_a_layer_of_several():
    case = Case(64, (72,), (4, 9), 5, dtype='float32')
    g = case.group
    none = lambda tables: tuple(jnp.concatenate([jnp.full_like(t, -1), t]) for t in tables)
    stacked = replace(g, a=none(g.a), b=none(g.b), scale=tuple(jnp.concatenate([jnp.ones_like(s), s]) for s in g.scale))
    at_layer = lambda x, g, slots, layer: lora_pallas(x, g.at(layer, g.words), slots)
    run = lambda layer: lowered_ttir_run(at_layer, jnp.asarray(case.x), stacked, jnp.asarray(case.slots), jnp.int32(layer))
    assert case.error(run(1)) < 1e-5 and not np.asarray(run(0)[0]).any(), 'a layer without tiles adds nothing'

@pytest.mark.parametrize('S', [1, 3])
def test_tiles_behind_four_gigabytes(S):
    "Five million tiles on, a word's number has 32 bits and its byte's 33; pages that nobody touches take no memory here."
    case, far = Case(64, (72,), (4, 9), 5, S), 5_000_000
    g, moved = case.group, lambda tables: tuple(jnp.where(t < 0, t, t + far) for t in tables)
    words = np.zeros((far + len(g.words), 8, 64), np.uint16)
    words[far:] = g.words
    there = replace(g, words=words, a=moved(g.a), b=moved(g.b))
    assert case.error(lowered_ttir_run(lora_pallas, jnp.asarray(case.x), there, jnp.asarray(case.slots))) < case.tolerance

@pytest.mark.parametrize('case', [SMALL[0], SMALL[3]], ids=lambda c: c.name)
def test_the_activations_gradient_is_the_kernels_with_a_and_b_swapped(case):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(case.rows, case.tokens, out)).astype('f4') for out in case.outs]
    loss = lambda x, g, slots: sum((y * w).sum() for y,w in zip(lora(x, g, slots), weights))
    [dx] = lowered_ttir_run(lambda *args: (jax.grad(loss)(*args),), jnp.asarray(case.x), case.group, jnp.asarray(case.slots))
    want = np.zeros(case.x.shape)
    for slot, modules in enumerate(case.adapters, 1):
        for w, (a, b, scale) in zip(weights, modules):
            own = w[case.slots == slot].astype(case.number).astype('f8')
            want[case.slots == slot] += own @ b.T.astype('f8') * scale @ a.astype('f8')
    assert np.abs(np.asarray(dx, 'f8') - want).max() < case.tolerance * np.abs(want).max()

# A row's bits

@pytest.mark.parametrize('case', CASES[:1] + [pytest.param(*c.values, id=c.id, marks=pytest.mark.slow) for c in CASES[1:4]])
def test_a_rows_bits_do_not_depend_on_its_company(case):
    "As lowered: in reverse order, and alone among many rows of another adapter."
    run = lambda rows: [np.asarray(y) for y in lowered_ttir_run(lora_pallas, jnp.asarray(case.x[rows]), case.group,
                                                               jnp.asarray(case.slots[rows]))]
    everything, n = run(np.arange(case.rows)), case.rows
    for rows in (np.arange(n)[::-1], np.array([1] + [n - 1] * 40)):
        for y, z in zip(run(rows), everything): np.testing.assert_array_equal(y, z[rows])

# What the rungs catch

def test_a_tile_number_outside_the_arena_is_caught():
    case = Case(64, (72,), (4, 9), 5)
    g = case.group
    wrong = replace(g, b=(g.b[0].at[0, 0, 0].set(len(g.words)),))
    with pytest.raises(Fault, match='load at .* of expand'):
        lowered_ttir_run(lora_pallas, jnp.asarray(case.x), wrong, jnp.asarray(case.slots))

def run_kernel(kernel, *args, grid=(1,)):
    shape = jax.ShapeDtypeStruct((16,), jnp.int32)
    call = pl.pallas_call(kernel, out_shape=shape, grid=grid, compiler_params=plt.CompilerParams())
    return np.asarray(lowered_ttir_run(call, *args))

def two_literals(i, o): o[...] = jnp.full((16,), jnp.where(i[0] > 0, 7, 3), jnp.int32)
def one_literal(i, o): o[...] = jnp.full((16,), jnp.where(i[0] > 0, 7, jnp.int32(3)), jnp.int32)
def all_write_one_place(i, o): o[...] = jnp.full((16,), i[0])
def reads_before_writing(i, o): plt.store(o.at[0], o[1] + i[0])

def test_the_miscompiled_where_is_seen_in_the_lowered_ir():
    five = jnp.array([5], jnp.int32)
    assert run_kernel(one_literal, five)[0] == 7
    assert run_kernel(two_literals, five)[0] != 7, 'JAX lowers it rightly now: the lint below can go'

def test_races_and_unwritten_values_are_caught():
    with pytest.raises(Fault, match='two programs write'): run_kernel(all_write_one_place, jnp.array([5], jnp.int32), grid=(2,))
    with pytest.raises(Fault, match='nobody wrote'): run_kernel(reads_before_writing, jnp.array([5], jnp.int32))

def bare(node): # a Python number as a kernel's `jnp.where` would see it
    if isinstance(node, ast.UnaryOp): return bare(node.operand)
    return isinstance(node, ast.Constant) or ast.unparse(node) in ('jnp.inf', 'jnp.nan', 'np.inf', 'np.nan', 'math.inf')

def wheres_of_two_literals(source):
    "Lines of `where` calls whose two choices are bare numbers."
    calls = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith('where'))
    choices = lambda n: [*n.args[1:], *(k.value for k in n.keywords if k.arg in ('x', 'y'))]
    return [n.lineno for n in calls if len(choices(n)) == 2 and all(map(bare, choices(n)))]

def test_no_kernel_chooses_between_two_bare_literals():
    sources = {p.name: p.read_text() for p in Path(ops.__file__).parent.glob('*.py')}
    kernels = {name: source for name,source in sources.items() if 'jax.experimental import pallas' in source}
    assert 'kernels.py' in kernels and {n: wheres_of_two_literals(s) for n,s in kernels.items()} == dict.fromkeys(kernels, [])

def test_the_lint_catches_what_it_should():
    bad = ['y = jnp.where(p, 7, 3)', 'jnp.where(p, -1, 0.)', 'jnp.where(p, x=1, y=2)', 'jnp.where(p, 0., -jnp.inf)']
    good = ['jnp.where(p, x, 0)', 'jnp.where(p, jnp.int32(7), 3)', 'jnp.where(p)', 'other(p, 7, 3)']
    assert wheres_of_two_literals('\n'.join(bad + good)) == [1, 2, 3, 4]

# Machine code

COMPILED = [c for c in TABLE if c.n_in >= 576]
PROGRAMS = [(arch, c) for arch in ('sm_90a', 'sm_80') for c in COMPILED]

@pytest.mark.parametrize('arch, case', PROGRAMS, ids=lambda p: getattr(p, 'name', p))
def test_machine_code_spills_nothing_and_uses_tensor_cores(arch, case, capsys):
    needs_plugin()
    place = lambda a: shape(a.shape, a.dtype)
    program = aot(lora_pallas, place(case.x), case.group, place(case.slots), arch=arch)
    with capsys.disabled():
        print(f'\n{arch} {case.name}: shrink {program.kernel("shrink").registers} registers a thread, '
              f'expand {program.kernel("expand").registers}', end=' ')
    for name in ('shrink', 'expand'):
        k = program.kernel(name)
        assert k.spills == 0 and k.stack == 0, f'{name} spills'
        large = blocks_for(case.path, case.dtype).tokens >= 16 and case.dtype == 'bfloat16'
        assert large == (k.uses('HMMA') or k.uses('HGMMA'))
