"""The engine under traffic: how its speed depends on adapters that are active, registered, or more than the arena holds.

SmolLM2 in bfloat16, rank-16 adapters on all seven linears, 64 prompt tokens and 16 new ones a request, greedy, at most 16
at a time. What is compared takes turns, as quiet.py says.
"""
import statistics, threading, time
from dataclasses import replace
import numpy as np
from lorajax.adapters import random_adapter
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.engine import Config, Engine
from quiet import figure, ratio, take_turns

LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
REQUESTS, PROMPT, NEW = 32, 64, 16
CONFIG = Config(rows=16, slots=16, max_rank=16, max_len=256, chunks=((1, 64),), memory=512 << 20, prompt_logprobs=False)
EIGHT = replace(CONFIG, rows=8, slots=8)

def in_turn(n): return [f'a{i % n}' for i in range(REQUESTS)]

def zipf(over, seed=0): # popularity 1/k
    p = 1 / np.arange(1, over + 1)
    return [f'a{i}' for i in np.random.default_rng(seed).choice(over, REQUESTS, p=p / p.sum())]

def random_prompts(n, length, seed): return np.random.default_rng(seed).integers(17, 49152, (n, length)).tolist()

def traffic(engine, names, at_a_time=16, new=NEW, prompts=None):
    "Closed-loop traffic; seconds in all, and of the requests' first tokens the median and the last."
    todo, firsts, lock, rules = list(enumerate(names)), {}, threading.Lock(), Sampling(max_new_tokens=new, ignore_eos=True)
    prompts = prompts or random_prompts(len(names), PROMPT, time.perf_counter_ns()) # new ones, or they were cached
    def client():
        while True:
            with lock:
                if not todo: return
                i, name = todo.pop(0)
            start = time.perf_counter()
            for _ in engine.submit(prompts[i], name, rules): firsts.setdefault(i, time.perf_counter() - start)
    start = time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(at_a_time)]
    for c in clients: c.start()
    for c in clients: c.join()
    return dict(total=time.perf_counter() - start, first=statistics.median(firsts.values()), worst=max(firsts.values()))

def loaded(base, n, config=CONFIG):
    engine = Engine(base, config)
    for i in range(n): engine.load(random_adapter(base.config, f'a{i}', 16, LINEARS, 1., i, .02))
    return engine

def speed(part, name, runs, note=''):
    return figure(part, f'{name}, all new', 'tokens/s', runs, lambda r: REQUESTS * NEW / r['total'], note)
def first(part, name, runs, note=''): return figure(part, f'{name}, first token', 's', runs, lambda r: r['first'], note)
def worst(part, name, runs, note=''): return figure(part, f'{name}, last first token', 's', runs, lambda r: r['worst'], note)

def active(budget, options):
    "From one adapter to 32 in turn, and 32 of which few are popular."
    cases = {f'{n} active': in_turn(n) for n in (1, 2, 4, 8, 16, 32)} | {'32, Zipf': zipf(32)}
    with loaded(load_base('smollm2'), 32) as engine:
        traffic(engine, in_turn(32), new=4)
        runs = take_turns({k: (lambda names=names: traffic(engine, names)) for k,names in cases.items()}, budget)
    found = [f for name in cases for f in (speed('active', name, runs[name]), first('active', name, runs[name]))]
    return [*found, ratio('active', '32, Zipf / 1 active', runs['1 active'], runs['32, Zipf'], 'total', 'popularity 1/k'),
            ratio('active', '16 active / 1 active', runs['1 active'], runs['16 active'], 'total', 'one adapter a row')]

def registered(budget, options):
    "Eight active adapters among eight, and among many, which target one module, or they would fill the disk."
    base, n = load_base('smollm2'), options.registered
    with loaded(base, 8, EIGHT) as few, loaded(base, 8, replace(EIGHT, store_memory=1 << 30)) as many:
        for i in range(8, n): many.load(random_adapter(base.config, f'a{i}', 16, ('q_proj',), 1., i, .02))
        things = {'8 registered': few, f'{n} registered': many}
        for engine in things.values(): traffic(engine, in_turn(8), 8, 4)
        runs = take_turns({k: (lambda e=e: traffic(e, in_turn(8), 8)) for k,e in things.items()}, budget)
    found = [f for name in things for f in (speed('registered', name, runs[name], 'eight of them active'),
                                            first('registered', name, runs[name]))]
    return [*found, ratio('registered', f'{n} / 8 registered', runs['8 registered'], runs[f'{n} registered'], 'total')]

def tight(budget, options):
    "Sixteen active adapters in turn, in an arena with room for eight: every request finds that its own was evicted."
    base = load_base('smollm2')
    memory = (27 * 8 + 16 * 9 + 17) * 368_640 # pages of 8 adapters, of 16 sequences, and to spare
    with loaded(base, 16) as fits, loaded(base, 16, replace(CONFIG, slots=8, memory=memory)) as room_for_8:
        def counted(engine, n):
            before = engine.stats().swaps
            return traffic(engine, in_turn(16), n) | dict(swaps=engine.stats().swaps - before)
        things = {f'{n} at a time, room for {room}': (lambda e=e, n=n: counted(e, n))
                  for n in (8, 16) for room, e in (('all', fits), ('8', room_for_8))}
        for engine in (fits, room_for_8): traffic(engine, in_turn(16), new=4)
        runs = take_turns(things, budget)
    found = [f('tight', name, runs[name]) for name in things for f in (speed, first, worst)]
    for n in (8, 16):
        short, all = (runs[f'{n} at a time, room for {room}'] for room in ('8', 'all'))
        note = f'{sum(r["swaps"] for r in short)} swaps for {REQUESTS * len(short)} requests'
        found.append(ratio('tight', f'{n} at a time, room for 8 / all, first token', short, all, 'first', note))
    return found

# ---- prefixes

TALKS, TURNS, SAID = 4, 5, 48 # conversations, their turns, and the tokens that a turn adds

def talk(engine, names, rng):
    "A conversation that `names` answer in turn; of each the prompt's tokens, cached ones, seconds to the first new one."
    ids, turns = rng.integers(17, 49152, SAID).tolist(), []
    for name in names:
        start = time.perf_counter()
        stream = engine.submit(ids, name, Sampling(max_new_tokens=1, ignore_eos=True))
        answer = [e.scored.token for e in stream if e.scored]
        turns.append((len(ids), stream.cached, time.perf_counter() - start))
        ids = ids + answer + rng.integers(17, 49152, SAID - 1).tolist()
    return turns

def talks(engine, p_switch, rng):
    "All conversations, each with an adapter that may change before a turn."
    turns = []
    for _ in range(TALKS):
        names = [rng.integers(4)]
        while len(names) < TURNS:
            names.append((names[-1] + rng.integers(1, 4)) % 4 if rng.random() < p_switch else names[-1])
        turns.append(talk(engine, [f'a{n}' for n in names], rng))
    later = [t for talk in turns for t in talk[1:]]
    hit = sum(c for _,c,_ in later) / sum(n for n,_,_ in later)
    return dict(hit=hit, last=statistics.median(talk[-1][2] for talk in turns))

def prefix(budget, options):
    "Conversations that stay with an adapter, change it now and then, or always: who answered before finds the prefix."
    cases, rng = {'stays': 0., 'changes 4 of 10 turns': .4, 'always changes': 1.}, np.random.default_rng(0)
    with loaded(load_base('smollm2'), 4, replace(CONFIG, rows=8, slots=8)) as engine:
        talks(engine, 1., rng)
        runs = take_turns({k: (lambda p=p: talks(engine, p, rng)) for k,p in cases.items()}, budget)
    rate_note, time_note = 'cached tokens of all, from the second turn on', f'fifth turn, {TURNS * SAID} tokens'
    rates = [figure('prefix', f'{k}, hit rate', 'ratio', r, lambda r: r['hit'], rate_note) for k,r in runs.items()]
    times = [figure('prefix', f'{k}, first token', 'ms', r, lambda r: 1e3 * r['last'], time_note) for k,r in runs.items()]
    return rates + times + [ratio('prefix', 'miss / hit, first token', runs['always changes'], runs['stays'], 'last')]

# ---- a step

def step(budget, options):
    "Where a decode step's time goes, with eight rows."
    with loaded(load_base('smollm2'), 8, EIGHT) as engine:
        sched, runner = engine.scheduler, engine.runner
        spent = {k: [] for k in ('plan', 'run', 'commit')}
        def timed(name, what):
            def call(*a):
                start = time.perf_counter()
                try: return what(*a)
                finally: spent[name].append(time.perf_counter() - start)
            return call
        sched.plan, sched.commit = timed('plan', sched.plan), timed('commit', sched.commit)
        runner.run = timed('run', runner.run)
        def decode(names):
            traffic(engine, names, 8)
            found = {k: statistics.median(v[-NEW // 2:]) for k,v in spent.items()}
            for v in spent.values(): v.clear()
            return found
        cases = {'base': [None] * 8, 'one adapter': ['a0'] * 8, 'eight adapters': [f'a{i}' for i in range(8)]}
        for names in cases.values(): decode(names)
        runs = take_turns({k: (lambda names=names: decode(names)) for k,names in cases.items()}, budget)
    note = dict(plan='who runs next', run='the compiled program, packing included', commit='pages and ends')
    return [figure('step', f'{name}, {k}', 'ms', runs[name], lambda r: 1e3 * r[k], note[k]) for name in cases for k in spent]
