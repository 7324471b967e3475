"""The engine under traffic: many adapters against one, many registered against few, and more than the arena holds.

SmolLM2 in bfloat16, rank-16 adapters on all seven linears, 64 prompt tokens and 64 new ones, greedy, at most 16 at a
time. The cases of a comparison take turns, as quiet.py says. --json FILE keeps all repetitions.
"""
import argparse, json, platform, statistics, threading, time
from dataclasses import replace
from pathlib import Path
import jax, numpy as np
from lorajax.adapters import random_adapter
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.engine import Config, Engine
from quiet import machine, median, quiet, take_turns

LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
RULES = Sampling(max_new_tokens=64, ignore_eos=True)
CONFIG = Config(rows=16, slots=16, max_rank=16, max_len=256, chunks=((1, 64),), memory=512 << 20, prompt_logprobs=False)

def zipf(n, over, seed=0): # n draws of over adapters, popularity 1/k
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, over + 1)
    return [f'a{i}' for i in rng.choice(over, n, p=p / p.sum())]

def traffic(engine, names, at_a_time=16, seed=1):
    "Closed-loop traffic; seconds in all, and each request's seconds to its first token."
    rng, todo, firsts, lock = np.random.default_rng(seed), list(enumerate(names)), {}, threading.Lock()
    prompts = rng.integers(17, 49152, (len(names), 64)).tolist()
    def client():
        while True:
            with lock:
                if not todo: return
                i, name = todo.pop(0)
            start = time.perf_counter()
            for e in engine.submit(prompts[i], name, RULES): firsts.setdefault(i, time.perf_counter() - start)
    start = time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(at_a_time)]
    for c in clients: c.start()
    for c in clients: c.join()
    return dict(total=time.perf_counter() - start, first=statistics.median(firsts.values()), worst=max(firsts.values()))

def loaded(base, n, config=CONFIG):
    engine = Engine(base, config)
    for i in range(n): engine.load(random_adapter(base.config, f'a{i}', 16, LINEARS, 1., i, .02))
    return engine

def show(runs, names, tokens=64 * 64):
    print(f'{"tokens/s":34}' + ''.join(f'{h:>14}' for h in ('all new', 'first (s)', 'worst (s)', 'undisturbed')))
    for name in names:
        r = runs[name]
        cells = [f'{tokens / median(r, "total"):.0f}', *(f'{median(r, k):.2f}' for k in ('first', 'worst')), f'{len(quiet(r))} of {len(r)}']
        print(f'{name:34}' + ''.join(f'{c:>14}' for c in cells))

def mix(base, args):
    "One adapter, eight, and 32 of which few are popular."
    with loaded(base, 32) as engine:
        cases = {'one adapter': ['a0'] * 64, '32 adapters, Zipf': zipf(64, 32), 'eight adapters': [f'a{i % 8}' for i in range(64)]}
        for names in cases.values(): traffic(engine, names[:16])
        runs = take_turns({k: (lambda names=names: traffic(engine, names)) for k,names in cases.items()}, args.reps)
        show(runs, cases)
        print(f'Zipf over 32 / one adapter: {median(runs["one adapter"], "total") / median(runs["32 adapters, Zipf"], "total"):.2f} '
              f'({engine.stats().swaps} swaps)\n')
    return runs

def registered(base, args):
    "Eight active adapters among eight, and among many."
    eight, small = [f'a{i % 8}' for i in range(64)], replace(CONFIG, rows=8, slots=8)
    with loaded(base, 8, small) as few, loaded(base, 8, replace(small, store_memory=1 << 30)) as many:
        for i in range(8, args.registered): # on one module only, or they would fill the disk
            many.load(random_adapter(base.config, f'a{i}', 16, ('q_proj',), 1., i, .02))
        things = {'8 registered': few, f'{args.registered} registered': many}
        for engine in things.values(): traffic(engine, eight[:8], 8)
        runs = take_turns({k: (lambda e=e: traffic(e, eight, 8)) for k,e in things.items()}, args.reps)
    show(runs, things)
    print(f'{args.registered} / 8: {median(runs["8 registered"], "total") / median(runs[f"{args.registered} registered"], "total"):.2f}\n')
    return runs

def tight(base, args):
    "Sixteen active adapters in turn, in an arena with room for eight: every request finds that its own was evicted."
    memory = (27 * 8 + 16 * 9 + 17) * 368_640 # pages of 8 adapters, of 16 sequences, and to spare
    names = [f'a{i % 16}' for i in range(64)]
    with loaded(base, 16) as fits, loaded(base, 16, replace(CONFIG, slots=8, memory=memory)) as room_for_8:
        things = {f'{n} at a time, room for {room}': (lambda e=e, n=n: traffic(e, names, n))
                  for n in (8, 16) for room, e in (('all', fits), ('8', room_for_8))}
        for engine in (fits, room_for_8): traffic(engine, names[:16])
        runs = take_turns(things, args.reps)
        show(runs, things)
        for n in (8, 16):
            first = [median(runs[f'{n} at a time, room for {room}'], 'first') for room in ('8', 'all')]
            print(f'{n} at a time: time to first token, room for 8 / room for all: {first[0] / first[1]:.2f}')
        print(f'swaps with room for 8: {room_for_8.stats().swaps}\n')
    return runs

def parts(base, args):
    "Where a decode step's time goes, with eight rows: seconds of the loop's parts, each the median of 40 steps."
    found = {}
    with loaded(base, 8, replace(CONFIG, rows=8, slots=8)) as engine:
        sched, runner = engine.scheduler, engine.runner
        spent = {k: [] for k in ('plan', 'run', 'commit', 'round')}
        def timed(name, what):
            def call(*a):
                start = time.perf_counter()
                try: return what(*a)
                finally: spent[name].append(time.perf_counter() - start)
            return call
        sched.plan, runner.run, sched.commit = timed('plan', sched.plan), timed('run', runner.run), timed('commit', sched.commit)
        for what, names in {'base': [None] * 8, 'one adapter': ['a0'] * 8, 'eight adapters': [f'a{i}' for i in range(8)]}.items():
            traffic(engine, names, 8)
            for times in spent.values(): times.clear()
            start = time.perf_counter()
            traffic(engine, names, 8)
            found[what] = {k: statistics.median(v[-40:]) for k,v in spent.items() if v} | dict(all=time.perf_counter() - start)
    for what, times in found.items(): print(f'{what:16}' + ''.join(f'{k} {1e3 * v:8.2f} ms  ' for k,v in times.items() if k != 'all'))
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = dict(mix=mix, registered=registered, tight=tight, parts=parts)
    parser.add_argument('what', nargs='*', choices=[*cases, []], help=f'of {", ".join(cases)}; all by default')
    parser.add_argument('--reps', type=int, default=3, help='repetitions of each case')
    parser.add_argument('--registered', type=int, default=1000, help='adapters of the large fleet')
    parser.add_argument('--json', type=Path, help='keep all repetitions in this file; what it holds of other cases stays')
    args = parser.parse_args()
    print(machine())
    base, runs = load_base('smollm2'), {}
    for name in args.what or cases: runs |= {name: cases[name](base, args)}
    if args.json:
        record = json.loads(args.json.read_text()) if args.json.exists() else {}
        record |= dict(machine=platform.platform(), jax=jax.__version__, date=time.strftime('%Y-%m-%d')) | runs
        args.json.write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main()
