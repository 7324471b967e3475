"""Three replicas on a local Ray cluster, as an operator starts them: affinity, changes at run time, one of them killed."""
import asyncio, contextlib, json, os, random, signal, socket, subprocess, sys, tempfile, threading, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import httpx, psutil, pytest
from litestar import Litestar
from redis_server import RedisServer
import served
from lorajax.core import Refused
from served import complete, until
from serving.settings import Settings

pytest.importorskip('ray')
RAY = pytest.importorskip('serving.command').RAY
ROOT = Path(__file__).parents[1]
NAMES = [f'a{i:02}' for i in range(24)]
PROMPTS = ['hello', 'what now', 'abc']
MEMORY = 226 << 12 # pages of 4096 bytes, 14 an adapter: half of them hold 8 adapters

# One engine, so that the others find its programs in the cache.
COMPILED = """
from contextlib import ExitStack
from serving.app import fleet_of
from serving.settings import from_environment
with ExitStack() as stack: fleet_of(from_environment(), iter, stack)
"""

# A second ingress before the same engines, which asks for any of them.
ANYWHERE = """
import ray, sys
from ray import serve
from serving.ray import APP, Ingress, ingress
from serving.settings import from_environment
ray.init(address='auto', log_to_driver=False)
engines = serve.get_deployment_handle('Engine', APP)
serve.run(ingress(from_environment(), engines, False, ('127.0.0.1', int(sys.argv[1]))), name='anywhere', route_prefix='/anywhere')
"""

class Cluster:
    "A server with replicas, and what its processes are."
    def __init__(self, folder:Path, **settings):
        self.temp = tempfile.TemporaryDirectory(prefix='ray-', dir='/tmp') # sockets have short paths
        self.server = served.ServerProcess(folder / 'log', '--ray', **settings)
        self.url, self.other = self.server.url, served.free_port()
        self.anywhere = f'http://127.0.0.1:{self.other}'
        self.server.env |= RAY | dict(RAY_TMPDIR=self.temp.name, PYTHONPATH=str(ROOT),
                                      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
        self.server.env.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'programs'))

    def run(self, program, *words):
        command = [sys.executable, '-c', program, *map(str, words)]
        done = subprocess.run(command, env=self.server.env, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]

    def replicas(self, of) -> list[psutil.Process]:
        family = psutil.Process(self.server.process.pid).children(recursive=True)
        return [p for p in family if f'ServeReplica:lorajax:{of}' in ' '.join(p.cmdline())]
    def engines(self): return self.replicas('Engine')

    def status(self): return httpx.get(f'{self.url}/v1/lorajax/status', timeout=30).json()
    def metric(self, name):
        lines = httpx.get(f'{self.url}/metrics', timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split('{')[0].split()[0] == name)

    def __enter__(self):
        self.run(COMPILED)
        self.server.launch()
        try: self.server.wait(300)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self.server.__exit__(*error)
        self.temp.cleanup()

@pytest.fixture(scope='module')
def files(tmp_path_factory): return served.make_files(tmp_path_factory.mktemp('replicas'), NAMES)

@pytest.fixture(scope='module')
def said(files): return served.expected(files, NAMES, PROMPTS)

@pytest.fixture(scope='module')
def cluster(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp('cluster')
    with RedisServer(folder) as redis:
        with Cluster(folder, **files, redis=redis.url, replicas=3, max_rank=8, memory=MEMORY, log_level='warning') as c:
            c.run(ANYWHERE, c.other)
            yield c

def asked(url, said, n, seed=0):
    "Requests of a dozen clients, for all adapters alike; each answer is the adapter's own."
    mine = random.Random(seed)
    wanted = [(NAMES[i % len(NAMES)], mine.choice(PROMPTS), mine.random() < .5) for i in range(n)]
    mine.shuffle(wanted)
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda w: complete(url, *w), wanted))
    wrong = [(w, t) for w,t in zip(wanted, texts) if t != said[w[:2]]]
    assert not wrong, wrong[:3]

def swaps(cluster, traffic):
    def count():
        time.sleep(2.5) # seconds in which each ingress asks the engines
        return cluster.metric('lorajax_swaps_total')
    traffic(24)
    before = count()
    traffic(240)
    return count() - before

def test_requests_go_where_their_adapter_is(cluster, said):
    there = swaps(cluster, lambda n: asked(cluster.url, said, n))
    anywhere = swaps(cluster, lambda n: asked(cluster.anywhere, said, n))
    print(f'swaps of 240 requests: {there:.0f} with affinity, {anywhere:.0f} without')
    assert anywhere > 40 and anywhere >= 5 * there

def test_what_changes_at_run_time_is_served_by_all(cluster, said):
    post = lambda path, **body: httpx.post(f'{cluster.url}/v1/{path}', json=body, timeout=60)
    assert post('load_lora_adapter', lora_name='late', lora_path='a05').status_code == 200
    assert post('lorajax/compositions', name='half', weights=dict(a01=.5)).status_code == 200
    until(lambda: all(complete(cluster.anywhere, name, 'hello', False) != 404 for name in ('late', 'half'))) # it has taken note
    seen = {complete(cluster.anywhere, 'late', 'hello', False) for _ in range(24)} # each replica answers some
    assert seen == {said['a05', 'hello']}
    halves = {complete(cluster.anywhere, 'half', 'hello', i % 2 == 0) for i in range(24)}
    assert len(halves) == 1 and halves != {said['a01', 'hello']}
    wrong = post('load_lora_adapter', lora_name='wrong', lora_path='/etc')
    assert wrong.status_code == 400 and 'no adapter directory' in wrong.text
    assert post('unload_lora_adapter', lora_name='late').status_code == 200
    for url in (cluster.url, cluster.anywhere): until(lambda: complete(url, 'late', 'hello', False) == 404)
    assert httpx.post(f'{cluster.url}/v1/completions', json=dict(model='a01', prompt='hi', top_p=7)).status_code == 400

def test_a_replica_that_dies_loses_nothing_whole(cluster, said):
    "Non-streaming requests come to their right end; streams that had begun end with an error that says why."
    engines = cluster.engines()
    assert len(engines) == 3
    stop, seen, ends = threading.Event(), [], []
    def work(seed):
        mine = random.Random(seed)
        while not stop.is_set():
            name, prompt = mine.choice(NAMES), mine.choice(PROMPTS)
            seen.append(complete(cluster.url, name, prompt, False, timeout=120) == said[name, prompt])
    def watch(seed): # streams that last
        mine = random.Random(seed)
        while not stop.is_set():
            body = dict(model=mine.choice(NAMES), prompt='hello', max_tokens=200, ignore_eos=True, stream=True)
            with httpx.stream('POST', f'{cluster.url}/v1/completions', json=body, timeout=120) as r:
                lines = [line.removeprefix('data: ') for line in r.iter_lines() if line]
            ends.append(lines[-1] if lines[-1] == '[DONE]' else json.loads(lines[-1])['error'])
    def broken(): return [e for e in ends if e != '[DONE]']
    threads = [threading.Thread(target=w, args=(i,)) for i in range(6) for w in (work, watch, watch)]
    for t in threads: t.start()
    time.sleep(3)
    before = len(seen)
    for engine in engines: # the first one that has a stream just then is the last
        engine.kill()
        time.sleep(4)
        if broken(): break
    stop.set()
    for t in threads: t.join(180)
    assert before and len(seen) > before + 6 and all(seen), Counter(seen)
    assert {(e['code'], e['message']) for e in broken()} == {
        ('generation_failed', 'the answer broke off: the replica that gave it has stopped; ask again')}
    assert len(broken()) < len(ends)

def test_an_ingress_that_dies_comes_back_where_it_was(cluster, said):
    "Although a client keeps a connection to it."
    with httpx.Client(timeout=60) as client:
        assert client.get(f'{cluster.url}/ready').status_code == 200
        ingress, = cluster.replicas('Ingress')
        ingress.kill()
        end = time.monotonic() + 90
        while True:
            assert time.monotonic() < end
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f'{cluster.url}/ready').status_code == 200: break
            time.sleep(.2)
    assert cluster.replicas('Ingress') != [ingress]
    asked(cluster.url, said, 24)

def test_it_stops_cleanly(cluster):
    "What runs may end first; nothing stays behind."
    log = cluster.server.log.read_text()
    assert 'hello' not in log.replace('/hello', ''), 'prompts stay out of the log'
    assert 'an answer broke off' in log and '"level": "info"' not in log, log
    family = psutil.Process(cluster.server.process.pid).children(recursive=True)
    body = dict(model='a01', prompt='hello', max_tokens=200, ignore_eos=True, stream=True)
    with httpx.stream('POST', f'{cluster.url}/v1/completions', json=body, timeout=60) as r:
        lines = (line for line in r.iter_lines() if line)
        next(lines)
        cluster.server.process.send_signal(signal.SIGTERM)
        assert list(lines)[-1] == 'data: [DONE]'
    assert cluster.server.process.wait(timeout=60) == 0
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive

@pytest.mark.slow
def test_engines_come_while_requests_wait(files, said, tmp_path):
    "One engine, and a second one when more run than it has rows for."
    with Cluster(tmp_path, **files | dict(state=tmp_path / 'state'), most_replicas=2, max_rank=8, memory=MEMORY) as c:
        assert len(c.engines()) == 1
        end = time.monotonic() + 240
        while len(c.engines()) == 1: assert time.monotonic() < end; asked(c.url, said, 60)
        asked(c.url, said, 60)

@pytest.mark.slow
def test_engines_that_cannot_start_say_why(files, tmp_path):
    cluster = Cluster(tmp_path, **files | dict(state=tmp_path / 'state'), memory=100)
    with cluster.temp:
        cluster.server.launch()
        assert cluster.server.process.wait(timeout=300) == 1
    assert cluster.server.log.read_text().splitlines()[-1].startswith("lorajax: memory=100; a page of 'tiny' has ")

@pytest.mark.slow
def test_an_ingress_that_cannot_start_says_why(files, tmp_path):
    (tmp_path / 'empty').mkdir()
    cluster = Cluster(tmp_path, **files | dict(state=tmp_path / 'state'), router=tmp_path / 'empty')
    with cluster.temp:
        cluster.server.launch()
        assert cluster.server.process.wait(timeout=300) == 1
    last = cluster.server.log.read_text().splitlines()[-1]
    assert last.startswith('lorajax: ') and str(tmp_path / 'empty') in last and 'Ray Serve' not in last

def test_an_address_that_another_program_took_is_named():
    "Two may be bound there; only one can listen."
    ray = pytest.importorskip('serving.ray')
    with ray.bound('127.0.0.1', 0) as ours:
        port = ours.getsockname()[1]
        with socket.create_server(('127.0.0.1', port)):
            app = Litestar()
            async def start():
                async with ray.listening(app, ('127.0.0.1', port), ours): pass
            with pytest.raises(Refused, match=f'127.0.0.1:{port} cannot be listened on .*; choose another'): asyncio.run(start())
            assert app.state.refused.startswith(f'127.0.0.1:{port} ')
            with pytest.raises(Refused, match='cannot be listened on'): ray.bound('127.0.0.1', port)

def test_replicas_share_no_gpu():
    check_gpus = pytest.importorskip('serving.ray').check_gpus
    three_pairs = Settings(tp=2, replicas=2, most_replicas=3)
    for there in (0, 6, 8): check_gpus(three_pairs, there)
    with pytest.raises(Refused, match='need 6 GPUs, and this machine has 5'): check_gpus(three_pairs, 5)

def test_without_ray_one_sentence_says_what_to_install(tmp_path):
    (tmp_path / 'ray.py').write_text('raise ModuleNotFoundError("No module named \'ray\'", name="ray")')
    env = os.environ | dict(PYTHONPATH=f'{tmp_path}:{ROOT}', LORAJAX_ADAPTERS=str(ROOT / 'examples/adapters'))
    command = [sys.executable, '-c', 'from lorajax.cli import main; main()', 'serve', '--port', str(served.free_port())]
    def said(*flags): return subprocess.run([*command, *flags], env=env, capture_output=True, text=True, cwd=ROOT).stderr
    assert said('--ray').strip() == "lorajax: this needs ray; install it with: pip install 'lorajax[ray]'"
    assert said('--replicas', '3').strip() == 'lorajax: replicas=3, most_replicas=0; for more than one add --ray'
