"""What HTTP costs: 64 streamed answers at 16 at a time from the engine itself, and the same through a server of its own.

SmolLM2 in bfloat16 with the six example adapters in turn, 64 prompt tokens and 64 new ones, greedy. The two take turns, as
quiet.py says; the client of the server runs in this process and takes its share of the machine, as a real one would.
"""
import argparse, asyncio, json, platform, sys, tempfile, threading, time
from pathlib import Path
import httpx, jax, numpy as np
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.engine import Config, Engine
from quiet import machine, median, quiet, take_turns
sys.path.insert(0, str(Path(__file__).parents[1]))
import served

ADAPTERS = Path(__file__).parents[2] / 'examples/adapters'
NAMES = sorted(p.name for p in ADAPTERS.iterdir() if p.is_dir())
SIZE = dict(rows=16, slots=6, max_rank=16, max_len=256, memory=512 << 20)
N, AT_A_TIME, NEW = 64, 16, 64
PROMPTS = np.random.default_rng(1).integers(17, 49152, (N, 64)).tolist()

def by_engine(engine):
    todo, lock, rules = list(range(N)), threading.Lock(), Sampling(max_new_tokens=NEW, ignore_eos=True)
    def client():
        while True:
            with lock:
                if not todo: return
                i = todo.pop(0)
            assert sum(e.scored is not None for e in engine.submit(PROMPTS[i], NAMES[i % len(NAMES)], rules)) == NEW
    start, clients = time.perf_counter(), [threading.Thread(target=client) for _ in range(AT_A_TIME)]
    for c in clients: c.start()
    for c in clients: c.join()
    return dict(total=time.perf_counter() - start)

def by_http(url):
    async def ask(client, i):
        body = dict(model=NAMES[i % len(NAMES)], prompt=PROMPTS[i], max_tokens=NEW, temperature=0, ignore_eos=True, stream=True,
                    stream_options=dict(include_usage=True))
        async with client.stream('POST', f'{url}/v1/completions', json=body) as r: lines = [l async for l in r.aiter_lines() if l]
        assert lines[-1] == 'data: [DONE]' and json.loads(lines[-2][6:])['usage']['completion_tokens'] == NEW
    async def all_of_them():
        room = asyncio.Semaphore(AT_A_TIME)
        async def one(i):
            async with room: await ask(client, i)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=AT_A_TIME)) as client:
            start = time.perf_counter()
            await asyncio.gather(*map(one, range(N)))
            return dict(total=time.perf_counter() - start)
    return asyncio.run(all_of_them())

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--reps', type=int, default=5, help='repetitions of each')
    parser.add_argument('--json', type=Path, help='keep all repetitions in this file')
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as tmp:
        server = served.ServerProcess(Path(tmp) / 'log', model='smollm2', adapters=ADAPTERS, state=f'{tmp}/state', **SIZE)
        with server, Engine(load_base('smollm2'), Config(**SIZE)) as engine:
            for name in NAMES: engine.load(ADAPTERS / name)
            runs = take_turns({'engine': lambda: by_engine(engine), 'HTTP': lambda: by_http(server.url)}, args.reps)
    for name, r in runs.items(): print(f'{name:8} {N * NEW / median(r, "total"):6.0f} tokens/s, {len(quiet(r))} of {len(r)} undisturbed')
    print(f'HTTP / engine: {median(runs["engine"], "total") / median(runs["HTTP"], "total"):.2f}')
    if args.json:
        record = dict(machine=platform.platform(), jax=jax.__version__, date=time.strftime('%Y-%m-%d'), runs=runs)
        args.json.write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main()
