"A server for tests: a tiny base with adapters on disk, an app in a thread, or a process as an operator starts it."
import contextlib, json, os, signal, socket, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
import httpx, uvicorn
from lorajax.adapters import random_adapter
from lorajax.base import load_base, random_base, save_base
from lorajax.core import ModelConfig, Sampling
from lorajax.generate import generate
from lorajax.peft import save_adapter
from serving.app import create_app
from serving.settings import Settings

SMALL = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=256)
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

def adapter_of(name, seed, rank=4): return random_adapter(SMALL, name, rank, LINEARS, seed=seed, std=.3)

def make_files(folder:Path, names) -> dict: # where things are
    "A base with a chat template, and adapters that say different things."
    base = random_base(SMALL)
    save_base(replace(base, name='tiny', tokenizer=replace(base.tokenizer, template=TEMPLATE)), folder / 'tiny')
    for i, name in enumerate(names): save_adapter(adapter_of(name, i + 1), folder / 'adapters' / name)
    return dict(model=str(folder / 'tiny'), adapters=str(folder / 'adapters'), state=str(folder / 'state'))

TOKENS = 12

def expected(files, names, prompts) -> dict: # (adapter, prompt) -> text
    "What each adapter and the base say, from closed batches."
    base, found = load_base(files['model']), {}
    adapters = {n: base.load_adapter(f'{files["adapters"]}/{n}', n) for n in names} | {'tiny': None}
    pairs = [(n, p) for n in adapters for p in prompts]
    for i in range(0, len(pairs), 25):
        part = pairs[i:i + 25]
        done = generate(base, [p for _,p in part], [adapters[n] for n,_ in part], Sampling(max_new_tokens=TOKENS))
        found |= {pair: d.text for pair, d in zip(part, done)}
    assert len({found[n, prompts[0]] for n in adapters}) == len(adapters), 'every adapter can be told from the others'
    return found

def until(what, seconds=30):
    end = time.monotonic() + seconds
    while not what(): assert time.monotonic() < end; time.sleep(.05)

def complete(url, name, prompt, stream, timeout=60, cut=None): # the text, or what went wrong
    body = dict(model=name, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=stream)
    try:
        if not stream:
            r = httpx.post(f'{url}/v1/completions', json=body, timeout=timeout)
            return r.json()['choices'][0]['text'] if r.status_code == 200 else r.status_code
        with httpx.stream('POST', f'{url}/v1/completions', json=body, timeout=timeout) as r:
            if r.status_code != 200: return r.status_code
            lines = []
            for line in r.iter_lines():
                if line: lines.append(line.removeprefix('data: '))
                if cut and len(lines) == cut: return 'cut'
        if lines[-1] != '[DONE]': return 'broken'
        return ''.join(json.loads(l)['choices'][0]['text'] for l in lines[:-1])
    except httpx.HTTPError: return 'away'

def free_port() -> int:
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

SIZES = dict(rows=4, slots=2, max_rank=16, max_len=256, memory=2 << 20)

@contextlib.contextmanager
def app_in_thread(**settings): # (URL, app)
    "The app under uvicorn, in this process, so that a test can look inside."
    app = create_app(Settings(**SIZES | settings))
    server = uvicorn.Server(uvicorn.Config(app, port=(port := free_port()), log_level='error', timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 300
    while not server.started: assert thread.is_alive() and time.monotonic() < end, 'the app did not start'; time.sleep(.05)
    try: yield f'http://127.0.0.1:{port}', app
    finally:
        server.should_exit = True
        thread.join()

class ServerProcess:
    "`lorajax serve`, with settings as environment variables."
    def __init__(self, log:Path, *flags, **settings):
        self.port, self.log, self.flags, self.process = free_port(), log, flags, None
        self.url = f'http://127.0.0.1:{self.port}'
        self.env = os.environ | {f'LORAJAX_{k.upper()}': str(v) for k,v in (SIZES | settings).items()}

    def launch(self):
        command = [sys.executable, '-c', 'from lorajax.cli import main; main()', 'serve', '--port', str(self.port), *self.flags]
        with open(self.log, 'ab') as out: self.process = subprocess.Popen(command, env=self.env, stdout=out, stderr=out, cwd=Path(__file__).parents[1])

    def start(self):
        self.launch()
        return self.wait()

    def wait(self, seconds=180): # until it answers
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None and time.monotonic() < end, f'the server did not start:\n{self.log.read_text()[-3000:]}'
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f'{self.url}/ready', timeout=1).status_code == 200: return self
            time.sleep(.1)

    def kill(self): self.process.kill(), self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def __enter__(self): return self.start()
    def __exit__(self, *error):
        if self.process.poll() is None: self.stop()
