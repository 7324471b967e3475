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

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--reps', type=int, default=3, help='repetitions of each case')
    parser.add_argument('--registered', type=int, default=1000, help='adapters of the large fleet')
    parser.add_argument('--json', type=Path, help='keep all repetitions in this file')
    args = parser.parse_args()
    print(machine())
    base, runs = load_base('smollm2'), {}
    with loaded(base, 32) as engine:
        cases = {'one adapter': ['a0'] * 64, '32 adapters, Zipf': zipf(64, 32), 'eight adapters': [f'a{i % 8}' for i in range(64)]}
        for names in cases.values(): traffic(engine, names[:16])
        runs |= take_turns({k: (lambda names=names: traffic(engine, names)) for k,names in cases.items()}, args.reps)
        swaps = engine.stats().swaps
    print(f'{"tokens/s":34}' + ''.join(f'{h:>14}' for h in ('all new', 'first (s)', 'undisturbed')))
    def show(names):
        for name in names:
            r = runs[name]
            cells = f'{64 * 64 / median(r, "total"):.0f}', f'{median(r, "first"):.2f}', f'{len(quiet(r))} of {len(r)}'
            print(f'{name:34}' + ''.join(f'{c:>14}' for c in cells))
    show(cases)
    print(f'Zipf over 32 / one adapter: {median(runs["one adapter"], "total") / median(runs["32 adapters, Zipf"], "total"):.2f} '
          f'({swaps} swaps)\n')
    eight = [f'a{i % 8}' for i in range(64)]
    small = replace(CONFIG, rows=8, slots=8)
    with loaded(base, 8, small) as few, loaded(base, 8, replace(small, store_memory=1 << 30)) as many:
        for i in range(8, args.registered): # on one module only, or they would fill the disk
            many.load(random_adapter(base.config, f'a{i}', 16, ('q_proj',), 1., i, .02))
        things = {'8 registered': few, f'{args.registered} registered': many}
        for engine in things.values(): traffic(engine, eight[:8], 8)
        runs |= take_turns({k: (lambda e=e: traffic(e, eight, 8)) for k,e in things.items()}, args.reps)
        show(things)
        print(f'{args.registered} / 8: {median(runs["8 registered"], "total") / median(runs[f"{args.registered} registered"], "total"):.2f}\n')
    memory = (27 * 8 + 16 * 9 + 17) * 368_640 # pages of 8 adapters, of 16 sequences, and to spare
    sixteen = [f'a{i % 16}' for i in range(64)]
    with loaded(base, 16, CONFIG) as fits, loaded(base, 16, replace(CONFIG, slots=8, memory=memory)) as tight:
        things = {'16 active, room for all': fits, '16 active, room for 8': tight}
        for engine in things.values(): traffic(engine, sixteen[:16])
        runs |= take_turns({k: (lambda e=e: traffic(e, sixteen)) for k,e in things.items()}, args.reps)
        show(things)
        first = [median(runs[k], 'first') for k in reversed(things)]
        print(f'time to first token, room for 8 / room for all: {first[0] / first[1]:.2f}; swaps {tight.stats().swaps}')
    if args.json:
        record = dict(machine=platform.platform(), jax=jax.__version__, date=time.strftime('%Y-%m-%d'), runs=runs)
        args.json.write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main()
