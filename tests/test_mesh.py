"""A base on 2, 4 and 8 simulated devices beside the same on one: JAX takes its number of devices once, so it runs elsewhere."""
import json, os, subprocess, sys
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    env = os.environ | dict(JAX_PLATFORMS='cpu', JAX_NUM_CPU_DEVICES='8', JAX_ENABLE_COMPILATION_CACHE='0',
                            XLA_FLAGS='--xla_backend_optimization_level=0', # half the time to compile
                            PYTHONPATH=os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]))
    command = [sys.executable, '-W', 'error::UserWarning', str(HERE / 'mesh.py'), str(tmp_path_factory.mktemp('mesh'))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

@pytest.mark.parametrize('n', ['2', '4', '8'])
def test_tokens_are_those_of_one_device(seen, n):
    "Base rows, six adapters, one in int8, a composition; with swaps, prefix hits and seeded sampling."
    one, run = seen['runs']['1'], seen['runs'][n]
    assert run['tokens'] == one['tokens']
    assert len({str(t) for t in run['tokens'][:9]}) == 9, 'every adapter matters'
    assert run['swaps'] > 9 and one['swaps'] > 9, 'some of seven images came more than once'
    assert run['cached'] > 200

@pytest.mark.parametrize('n', ['2', '4', '8'])
def test_adapters_exchange_nothing(seen, n):
    "Layers are a loop, whose body is in the program once: two sums, after the attention and after the MLP."
    run = seen['runs'][n]
    assert run['exchanged'] == dict.fromkeys(['bare', 'adapted', 'prompts'], ['all-reduce'] * 2)
    assert run['by_others'] == [] and seen['runs']['1']['exchanged']['adapted'] == []

@pytest.mark.parametrize('n', ['1', '2', '4', '8'])
def test_every_device_has_its_part(seen, n):
    "Of a page of 16 tokens, two layers and eight key/value heads of eight channels; written in place."
    run = seen['runs'][n]
    assert run['words'] == 2 * 2 * 16 * 64 // int(n)
    assert run['pinned'] == ['pinned_host', int(n), run['words']]
    assert set(run['aliased'].values()) == {run['arena']}

def test_a_base_is_divided_alike_however_it_comes(seen): assert seen['loaded'] == [True, True]

def test_refused(seen):
    said = seen['refused']
    assert said['heads'] == ('the base has 16 heads and 8 key/value heads and 64 MLP channels, which 3 devices cannot share '
                             'equally; give it 1, 2, 4, 8')
    assert 'needs as many, and JAX finds 8 (cpu)' in said['devices']
    assert said['number'] == "mesh='two'; give a number of devices, or a jax.sharding.Mesh"
    assert said['axes'] == 'the mesh has the axes x; give it one, called model'
    assert "not of {'words': 2048, 'dtype': 'float32', 'devices': 2}; choose another folder" in said['folder']
    for name in ('again', 'closed', 'save'): assert 'lies on 2 devices, and this is done on one' in said[name]
