"""The Mosaic GPU product: simulated with a look-out for races, and its machine code for an H200; both too slow for cells."""
import re
from dataclasses import replace
from functools import partial
import jax, jax.numpy as jnp, ml_dtypes, numpy as np, pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as simulator
from lorajax.hopper import SIDE, STAGES, lora_hopper, not_on_hopper
from lorajax import hopper, ops
from lorajax.kernels import page_group, paged_rows, tiles_for
from deviceless import needs_plugin
from ladder import aot, assemble
from shapes import TABLE

# int8 words read as bfloat16 are any number at all, to the simulator's dismay
pytestmark = pytest.mark.filterwarnings('ignore:(overflow|invalid value) encountered:RuntimeWarning')

N_IN, WIDTHS = (STAGES + 1) * SIDE, (96, 40) # more steps than stages; outputs that end within a tile

def example(ranks, S, seed=0): # ranks of each slot's modules, negative for int8
    rng = np.random.default_rng(seed)
    def module(rank, out):
        if rank > 0: return *(rng.normal(size=(rank, n)).astype(ml_dtypes.bfloat16) for n in (N_IN, out)), rng.random(rank, 'f4')
        return *(rng.integers(-127, 128, (-rank, n), np.int8) for n in (N_IN, out)), rng.random(-rank, 'f4')
    g = page_group([[module(*m) for m in zip(one, WIDTHS)] for one in ranks])
    return g, jnp.asarray(rng.normal(size=(len(ranks) + 1, S, N_IN)), jnp.bfloat16)

def close(y, x, rows, slot): # [S, out], [S, in]
    a, b, scale, owner = (np.asarray(r) for r in rows)
    a, b, scale = (r[owner == slot].astype(np.float64) for r in (a, b, scale))
    wanted = np.asarray(x, np.float64) @ a.T * scale @ b
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-2 * np.abs(wanted).max())

def run_watched(run, *args): # -> what it gives, whether there was a race in each of its kernels
    "JAX 0.12 stops at a race; 0.11 goes on, and forgets a kernel's races when the next one starts, hence the list."
    watches, watch = [], simulator.GPURaceDetectionState
    def kept(**kwargs):
        watches.append(watch(**kwargs))
        return watches[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, 'GPURaceDetectionState', kept)
        ys = jax.block_until_ready(run(*args))
    return ys, [w.races_found for w in watches]

@pytest.fixture(scope='module')
def simulated(): # rows of slots 2, 0, 1: ranks 72 and 8, none, int8
    g, x = example([(-9, -9), (72, 8)], SIDE - 3)
    slots = jnp.array([2, 0, 1], jnp.int32)
    return g, x, slots, *run_watched(partial(lora_hopper, interpret=True), x, g, slots)

def test_terms(simulated):
    g, x, _, ys, _ = simulated
    for y, rows in zip(ys, paged_rows(g, N_IN)):
        close(y[0], x[0], rows, slot=2)
        assert not y[1].any()

def test_the_operation_takes_a_model_s_token_tiles(simulated, monkeypatch):
    g, x, slots, ys, _ = simulated
    monkeypatch.setattr(ops, 'lora_hopper', partial(lora_hopper, interpret=True))
    run = ops.BACKENDS['lora']['hopper'].run
    for y, z in zip(run(x[:1], g, tiles_for(slots[:1], x.shape[1], g)), ys): np.testing.assert_array_equal(y, z[:1])

def test_no_races(simulated): assert simulated[-1] == [False, False], 'shrink and expand'

def test_a_missing_wait_is_caught(simulated, monkeypatch):
    monkeypatch.setattr(hopper.plgpu, 'barrier_wait', lambda barrier: None)
    g, x, slots, *_ = simulated
    try: assert run_watched(partial(lora_hopper, interpret=True), x[:1], g, slots[:1])[1] == [True, True]
    except jax.errors.JaxRuntimeError as e: assert re.search('RACE DETECTED|no threads observed', str(e))

CAN = [c for c in TABLE if not_on_hopper(c.x, c.group, c.slots) is None]

def test_the_table_has_every_width_for_hopper(): assert {c.n_in for c in CAN} == {576, 2048, 4096, 8192}

@pytest.mark.slow
@pytest.mark.parametrize('case', CAN, ids=lambda c: c.name)
def test_the_table(case):
    ys, races = run_watched(partial(lora_hopper, interpret=True), jnp.asarray(case.x), case.group, jnp.asarray(case.slots))
    assert case.error(ys) < case.tolerance and races == [False, False]

def test_int8_is_seen(simulated):
    "Refused where the flags can be read, and no number at all where they were not looked at."
    g, x, slots, ys, _ = simulated
    assert 'int8' in not_on_hopper(jnp.zeros((3, SIDE, N_IN), jnp.bfloat16), g, slots)
    assert all(jnp.isnan(y[2]).all() for y in ys)

def test_a_layer_without_the_module():
    "Slot 1 has no block in this layer; slot 2 lacks the second of its two."
    g, x = example([(4, 4), (16, 16)], SIDE)
    holed = lambda tables: tuple(t.at[0, jnp.array([0, 2])].set(-1) for t in tables)
    g = replace(g, a=holed(g.a), b=holed(g.b))
    ys = lora_hopper(x[:2], g, jnp.array([1, 2], jnp.int32), interpret=True)
    for y, rows in zip(ys, paged_rows(g, N_IN)):
        close(y[1], x[1], rows, slot=2)
        assert not y[0].any()

@pytest.mark.parametrize('ranks, S, reason', [([(8, 8)], SIDE - 1, '63 tokens a row'), ([(8, 8)], SIDE, None)])
def test_reasons(ranks, S, reason):
    g, x = example(ranks, S)
    found = not_on_hopper(x, g, None)
    assert found is None if reason is None else reason in found
    assert 'float32' in not_on_hopper(x.astype(jnp.float32), g, None)

@pytest.mark.parametrize('case', CAN, ids=lambda c: c.name)
def test_machine_code(case, tmp_path, monkeypatch, capsys):
    needs_plugin()
    monkeypatch.setenv('MOSAIC_GPU_DUMP_TO', str(tmp_path))
    monkeypatch.setenv('MOSAIC_GPU_DUMP_PTX', '1')
    g, slots = case.group, jnp.asarray(case.slots)
    g = jax.tree.map(lambda t: jax.ShapeDtypeStruct((1_000_000, 8, 64), t.dtype) if t is g.words else t, g)
    program = aot(lora_hopper, jnp.asarray(case.x), g, slots)
    values = case.x.size * 2 + len(case.ranks) * max(case.ranks) * len(case.outs) * case.rows * case.tokens * 2
    assert program.memory.temp_size_in_bytes < 8 * values + (1 << 20) # the buffer of 1 GB is not copied to change its dtype
    files = sorted(tmp_path.glob('*.ptx'))
    assert len(files) == 2
    for ptx in files:
        [kernel] = assemble(ptx, 'sm_90a').values()
        with capsys.disabled(): print(f'\nsm_90a {case.name} hopper {ptx.stem}: {kernel.registers} registers a thread', end=' ')
        assert kernel.spills == kernel.stack == 0
        assert kernel.uses('HGMMA') and kernel.uses('UTMALDG') and kernel.uses('UTMASTG')
