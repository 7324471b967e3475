"""What HTTP costs: streamed answers, 16 at a time, from the engine itself, and the same through a server of its own.

SmolLM2 in bfloat16 with the six example adapters in turn, 64 prompt tokens and 16 new ones, greedy. The client of the server
runs in this process and takes its share of the machine, as a real one would.
"""
import asyncio, json, statistics, tempfile, time
from pathlib import Path
import httpx
import served
from engine import NEW, REQUESTS, first, random_prompts, speed, traffic
from lorajax.base import load_base
from lorajax.engine import Config, Engine
from quiet import figure, ratio, take_turns

ADAPTERS = Path(__file__).parents[2] / 'examples/adapters'
NAMES = sorted(p.name for p in ADAPTERS.iterdir() if p.is_dir())
SIZE = dict(rows=16, slots=6, max_rank=16, max_len=256, memory=512 << 20)
AT_A_TIME = 16

def by_http(url, stream=True):
    prompts, firsts = random_prompts(REQUESTS, 64, time.perf_counter_ns()), []
    async def ask(client, i):
        body = dict(model=NAMES[i % len(NAMES)], prompt=prompts[i], max_tokens=NEW, temperature=0, ignore_eos=True)
        if stream: body |= dict(stream=True, stream_options=dict(include_usage=True))
        else:
            answer = await client.post(f'{url}/v1/completions', json=body)
            assert answer.json()['usage']['completion_tokens'] == NEW
            return
        start, lines = time.perf_counter(), []
        async with client.stream('POST', f'{url}/v1/completions', json=body) as r:
            async for line in r.aiter_lines():
                if line and not lines: firsts.append(time.perf_counter() - start)
                if line: lines.append(line)
        assert lines[-1] == 'data: [DONE]' and json.loads(lines[-2][6:])['usage']['completion_tokens'] == NEW
    async def all_of_them():
        room = asyncio.Semaphore(AT_A_TIME)
        async def one(i):
            async with room: await ask(client, i)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=AT_A_TIME)) as client:
            start = time.perf_counter()
            await asyncio.gather(*map(one, range(REQUESTS)))
            return dict(total=time.perf_counter() - start, first=statistics.median(firsts or [0.]))
    return asyncio.run(all_of_them())

def http(budget, options):
    "The two take turns."
    with tempfile.TemporaryDirectory() as tmp:
        server = served.ServerProcess(Path(tmp) / 'log', model='smollm2', adapters=ADAPTERS, state=f'{tmp}/state', **SIZE)
        with server, Engine(load_base('smollm2'), Config(**SIZE, prompt_logprobs=False)) as engine:
            for name in NAMES: engine.load(ADAPTERS / name)
            names = [NAMES[i % len(NAMES)] for i in range(REQUESTS)]
            things = {'engine': lambda: traffic(engine, names), 'HTTP': lambda: by_http(server.url)}
            for f in things.values(): f()
            runs = take_turns(things, budget)
    found = [f for name in things for f in (speed('http', name, runs[name]), first('http', name, runs[name]))]
    requests = figure('http', 'HTTP, requests', '1/s', runs['HTTP'], lambda r: REQUESTS / r['total'], f'{AT_A_TIME} at a time')
    return [*found, requests, ratio('http', 'HTTP / engine, all new', runs['engine'], runs['HTTP'], 'total'),
            ratio('http', 'HTTP / engine, first token', runs['HTTP'], runs['engine'], 'first', 'a time: more is slower')]
