"""The GPU benchmark's script, start to end on tiny shapes, so that the machine with a GPU meets no typing error."""
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
import gpu

def test_dry_run(tmp_path, capsys):
    gpu.main(['--dry', '--json', str(tmp_path / 'figures.json')])
    found = json.loads((tmp_path / 'figures.json').read_text())
    assert found['dry'] and found['device'] and found['jax'] and found['copy_bytes_a_second'] > 0
    assert [len(t['us']) for t in found['times']] == [5, 5] and found['parity'][0]['error'] < 1e-2
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

def test_hopper_agrees():
    load = gpu.Load(2, 64, 2, 128, (64, 128), 2)
    d = gpu.make(load)
    ys, zs = (gpu.METHODS[name](load, d, None, True)(d.x, gpu.jnp.int32(1)) for name in ('hopper', 'gather'))
    for y, z in zip(ys, zs): assert abs(y - z).max() < 2e-2 * abs(z).max()
    assert 'hopper' not in gpu.methods(load, d) # on a CPU
    assert gpu.agree(load, d, ['pallas'], gpu.blocks_for(load.path, 'bfloat16'), True)['pallas'] < 2e-2
