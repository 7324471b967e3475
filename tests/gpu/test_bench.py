"""The GPU benchmark's script, start to end on tiny shapes, so that the machine with a GPU meets no typing error."""
import json, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
import gpu

def test_dry_run(tmp_path, capsys):
    gpu.main(['--dry', '--json', str(tmp_path / 'figures.json')])
    found = json.loads((tmp_path / 'figures.json').read_text())
    assert found['dry'] and found['device'] and found['jax'] and found['copy_bytes_a_second'] > 0
    assert [len(t['us']) for t in found['times']] == [5, 5] and found['parity'][0]['error'] < 1e-2
    [attention] = found['attention']
    assert found['left_out'] == []
    assert attention['us'].keys() == {'pallas', 'xla'} and [p['kernel'] for p in found['parity']].count('attention') == 2
    assert found['swap']['swap']['ms_p50'] > 0, found['swap']
    assert 'floor/pallas' in capsys.readouterr().out

def test_methods_agree():
    "What is timed beside the kernels computes the same product."
    load = gpu.DRY[0]
    d = gpu.make(load)
    blocks = gpu.blocks_for(load.path, 'bfloat16')
    ys = {name: [y.astype('f4') for y in gpu.METHODS[name](load, d, blocks, True)(d.x, gpu.jnp.int32(1))]
          for name in ('pallas', 'gather', 'one_hot', 'ragged_dot')}
    for name, own in ys.items():
        for y, z in zip(own, ys['gather']): assert abs(y - z).max() < 2e-2 * abs(z).max(), name

def test_the_loads_that_are_timed():
    "Every number of rows and of adapters that is asked for, and as many tokens as are said."
    loads = {(load.path, load.T, load.adapters) for load in gpu.LOADS}
    assert {('decode', t, n) for t in (1, 8, 64, 256) for n in (1, 8, 64, 256) if n <= t} <= loads
    assert {('prefill', t, n) for t in (512, 4096) for n in (1, 8, 64, 256)} <= loads

def test_what_there_is_no_time_for_is_kept(capsys):
    left_out = []
    assert list(gpu.in_time(gpu.DRY, 0., left_out)) == [] and [one['tokens'] for one in left_out] == [1, 5]
    assert capsys.readouterr().out.count('no time') == 2

def test_what_attends_beside_the_kernel_computes_the_same():
    load = gpu.DRY_ATTENTION[0]
    q, words, tables = gpu.make_attention(load)
    assert sorted(np.asarray(tables).ravel()) == list(range(1, 16)), 'every page once'
    kv = gpu.PagedKV(words, gpu.jnp.int32(1), tables, load.block, load.kv_heads, load.channels)
    at = gpu.jnp.full((load.rows, 1), load.length - 1, gpu.jnp.int32)
    y, z = (f(q, kv, at, gpu.jnp.int32(load.length)) for f in (gpu.partial(gpu.attend_paged_pallas, interpret=True), gpu.attend_paged_xla))
    assert abs(y - z).max() < 2e-2 and abs(z).max() > .1

def test_hopper_agrees():
    load = gpu.Load(2, 64, 2, 128, (64, 128), 2)
    d = gpu.make(load)
    ys, zs = (gpu.METHODS[name](load, d, None, True)(d.x, gpu.jnp.int32(1)) for name in ('hopper', 'gather'))
    for y, z in zip(ys, zs): assert abs(y - z).max() < 2e-2 * abs(z).max()
    assert 'hopper' not in gpu.methods(load, d) # on a CPU
    assert gpu.agree(load, d, ['pallas'], gpu.blocks_for(load.path, 'bfloat16'), True)['pallas'] < 2e-2
