"""A base on 2, 4 and 8 simulated devices beside the same on one: JAX takes its number of devices once, so it runs elsewhere."""
import json, os, socket, subprocess, sys
from pathlib import Path
import httpx, pytest
from served import ServerProcess, make_files

HERE = Path(__file__).parent

def start(devices, *arguments, **environment):
    env = os.environ | dict(JAX_PLATFORMS='cpu', JAX_NUM_CPU_DEVICES=str(devices), JAX_ENABLE_COMPILATION_CACHE='0',
                            XLA_FLAGS='--xla_backend_optimization_level=0', # half the time to compile
                            PYTHONPATH=os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]))
    command = [sys.executable, '-W', 'error::UserWarning', str(HERE / 'mesh.py'), *map(str, arguments)]
    return subprocess.Popen(command, env=env | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def said(process, status=0): # on standard output, on standard error
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    return out, err

@pytest.fixture(scope='module')
def seen(tmp_path_factory): return json.loads(said(start(8, tmp_path_factory.mktemp('mesh')))[0])

def start_hosts(folder): # two, with two devices each
    with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]
    together = dict(JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}', JAX_NUM_PROCESSES='2')
    return [start(2, folder, 'hosts', **together, JAX_PROCESS_ID=str(i)) for i in range(2)]

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

def test_two_hosts_say_what_one_device_says(seen, tmp_path):
    hosts = start_hosts(tmp_path)
    try: first, second = map(said, hosts)
    finally:
        for process in hosts: process.kill()
    found = json.loads(first[0].splitlines()[-1]) # the transport has a line of its own
    assert found['tokens'] == seen['runs']['1']['tokens'] and found['swaps'] > 9
    assert 'Traceback' not in second[1]

@pytest.mark.slow
def test_two_hosts_behind_one_address(tmp_path):
    "As operators start them; the second ends when the first does."
    files, ask = make_files(tmp_path, ['one']), dict(prompt='several hosts', max_tokens=8, temperature=0)
    with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]
    def server(i, count):
        own = dict(tp=count, hosts=int(count > 1), rows=1, slots=1, max_rank=8, state=tmp_path / f'state-{count}-{i}')
        if i: own |= dict(adapters=tmp_path / 'nowhere') # needed on the first alone
        made = ServerProcess(tmp_path / f'log-{count}-{i}', **files | own)
        made.env |= dict(JAX_PLATFORMS='cpu', JAX_NUM_CPU_DEVICES='1', XLA_FLAGS='--xla_backend_optimization_level=0')
        if count > 1: made.env |= dict(JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}', JAX_NUM_PROCESSES=str(count), JAX_PROCESS_ID=str(i))
        made.launch()
        return made
    def said(first): # by the base and the adapter
        first.wait(600)
        post = lambda model: httpx.post(f'{first.url}/v1/completions', json=ask | dict(model=model), timeout=60).json()
        found = [post(model)['choices'][0]['text'] for model in ('tiny', 'one')]
        first.stop()
        return found
    started = [server(0, 1), server(0, 2), server(1, 2)]
    try:
        alone, first, second = started
        assert said(first) == said(alone)
        assert second.process.wait(timeout=60) == 0
    finally:
        for one in started: one.kill()
