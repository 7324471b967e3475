"""The simulator on public traces, its speed, and how far it is from the engine that it stands for.

policies: a Llama 3 70B on eight H100s, by data sheet, with the Azure trace's arrivals and lengths (laid over one another
for a higher rate) and the Alibaba trace's adapters, in the trace's order; of more than its 874, made-up ones. speed: an
hour of a Llama 3 8B on four H100s at 50 requests a second.
fleet: 1,000 a second over 100 groups. placement: a Llama 3 8B on each of eight A100s; placed
by the first half of the requests, simulated on the second. engine: prices fitted to the steps of SmolLM2 under one load
foretell the throughput under another; their runs take turns, as quiet.py says, each with prompts that nobody has seen.
"""
import argparse, json, os, statistics, sys, time
from collections import Counter
from dataclasses import replace
from datetime import datetime
from itertools import count, zip_longest
from pathlib import Path
import numpy as np
from rich.console import Console
from rich.progress import track
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tests'))
from lorajax.affinity import spread
from lorajax.bench import LIMIT
from lorajax.capacity import device_bytes
from lorajax.core import ModelConfig
from lorajax.cost import Device, Roofline, Work, fitted, prompt_pairs
from lorajax.placement import Placement, place, sent
from lorajax.policies import Comparison, merged, padded, paged, pod, pod_each, prefetched, simulate_fleet, together
from lorajax.simulator import Group, Swapped, simulate
from lorajax.traffic import Visit, traffic

LLAMA70 = ModelConfig(vocab_size=128256, width=8192, mlp_width=28672, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                      max_len=131072)
LLAMA8 = replace(LLAMA70, width=4096, mlp_width=14336, n_layers=32, n_heads=32)
A100 = Device(312e12, 1.555e12, 32e9, device_bytes('a100-40')) # its data sheet; PCIe 4 with 16 lanes

def ranks(n): return {f'a{i}': (8, 8, 8, 8, 16, 8, 8, 8, 8, 64)[i % 10] for i in range(n)}

def seen(asked, what): return track(asked, what, console=Console(stderr=True)) # a progress bar over requests

def report(args, title, runs): # names -> figures
    args.tables[title] = Comparison(runs).rows
    print(f'{title}\n{Comparison(runs)}\n')

def policies(args):
    from traces import traffic as real
    eight, two = Roofline(LLAMA70), Roofline(LLAMA70, devices=2)
    for n in args.adapters:
        asked = real(args.data, n, args.times, args.hours, follow=args.follow, p_switch=args.p_switch)
        group = paged(eight, ranks(n))
        few = asked[:len(asked) // 60]
        single = pod(two, ranks(n))
        runs = {'a pod each': pod_each(seen(asked, 'a pod each'), single, n),
                f'pods that restart, first {len(few)}': simulate_fleet(seen(few, 'pods that restart'), single, 4)}
        for g in (padded(eight, ranks(n)), group, prefetched(group), merged(prefetched(group), 30)):
            runs[g.name] = simulate(seen(asked, g.name), g)
        report(args, f'{n:,} adapters, {len(asked):,} requests, {len(asked) / asked[-1].at:.1f} a second', runs)

def speed(args):
    asked = traffic(3600 * args.hours, 50, 200)
    group = prefetched(paged(Roofline(LLAMA8, devices=4), ranks(200)))
    start, cpu = time.perf_counter(), time.process_time()
    f = simulate(seen(asked, 'simulating'), group)
    print(f'{args.hours} h at 50 requests/s: {f.requests} requests, {f.new_tokens} tokens, {f.steps} steps in '
          f'{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of them on the CPU')
    report(args, f'A Llama 3 8B on four devices, {args.hours} h at 50 requests a second', {group.name: f})

def fleet(args):
    group = prefetched(paged(Roofline(LLAMA70), ranks(200)))
    seconds = min(120, 3600 * args.hours)
    shares = spread(traffic(seconds, 1000, 200), 100)
    f = together([simulate(share, group) for share in seen(shares, 'groups')])
    report(args, f'1,000 requests a second over 100 groups, for {seconds:.0f} s', {group.name: f})

def placed(past, group, learns): # past: adapters that were asked for
    "Spreads requests over replicas by a placement, which is renewed after every 500 if it learns."
    counts, now = Counter(past), Placement()
    pages = {a: nbytes // group.page_bytes for a,nbytes in group.reads.items()}
    def way(asked, n):
        nonlocal counts, now
        shares = [[] for _ in range(n)]
        for i in range(0, len(asked), 500):
            part = asked[i:i + 500]
            now = place(counts, pages, dict.fromkeys(range(n), group.pages // 2), now)
            for share, more in zip(shares, sent(part, now)): share.extend(more)
            if not learns: continue
            counts = Counter({a: .7 * c for a,c in counts.items()})
            counts.update(v.adapter for v in part)
        return shares
    return way

def anywhere(asked, n):
    drawn = np.random.default_rng(0).integers(n, size=len(asked))
    return [[v for v,g in zip(asked, drawn) if g == i] for i in range(n)]

def routes(past, group):
    return {'random': anywhere, 'hash only': lambda asked, n: sent(asked, Placement(replicas=tuple(range(n)))),
            'hash with bounded loads': spread, 'placement': placed(past, group, False),
            'placement, renewed': placed(past, group, True)}

def placement(args):
    from traces import traffic as real
    asked = real(args.data, 874, 8, min(.1, 2 * args.hours), follow=args.follow)
    past, asked = [v.adapter for v in asked[:len(asked) // 2]], asked[len(asked) // 2:]
    group, half = prefetched(paged(Roofline(LLAMA8, A100, 1), ranks(874))), len(asked) // 2
    runs = {name: way(asked, 8) for name,way in routes(past, group).items()}
    for name, way in routes(past, group).items(): # the last replica gets no more requests after half of them
        parts = zip_longest(way(asked[:half], 8), way(asked[half:], 7), fillvalue=[])
        runs[f'{name}; one lost half-way'] = [first + second for first,second in parts]
    figures = {name: together([simulate(share, group) for share in seen(shares, name)]) for name,shares in runs.items()}
    rate = len(asked) / (asked[-1].at - asked[0].at)
    report(args, f'Placement: 874 adapters, eight replicas, {len(asked):,} requests, {rate:.1f} a second', figures)

# ---- against the engine

def load(n, adapters, prompt, answer, seed, words): # requests that are there from the start; words: their tokens' seed
    rng, said = np.random.default_rng(seed), np.random.default_rng([seed, words])
    p = 1 / np.arange(1, adapters + 1)
    names = [f'a{i}' for i in rng.choice(adapters, n, p=p / p.sum())]
    return [(name, said.integers(17, 49152, int(rng.integers(*prompt))).tolist(), int(rng.integers(*answer)))
            for name in names]

def served(engine, asked, reads): # seconds in all, and each step's work and seconds
    from lorajax import engine as module
    from lorajax.core import Sampling
    run, steps, last = module._run_plan, [], [None]
    def timed(e, plan):
        ends = [row.start + len(row.tokens) for row in plan.rows]
        pairs = sum(prompt_pairs(row.start, len(row.tokens)) for row in plan.rows)
        read = sum(reads[v] for v in {row.version for row in plan.rows})
        work = Work(len(plan.decode), plan.shape[0] * plan.shape[1], sum(ends), pairs, read)
        run(e, plan)
        now = time.perf_counter()
        if last[0]: steps.append((work, now - last[0]))
        last[0] = now if e.scheduler.running else None
    module._run_plan = timed
    start = time.perf_counter()
    try:
        submit = lambda name, ids, new: engine.submit(ids, name, Sampling(max_new_tokens=new, ignore_eos=True))
        streams = engine.call(lambda: [submit(*one) for one in asked])
        for s in streams:
            for _ in s: pass
    finally: module._run_plan = run
    return dict(total=time.perf_counter() - start, steps=steps, versions=[s.version for s in streams])

def engine(args):
    from engine import LINEARS
    from lorajax.adapters import random_adapter
    from lorajax.base import load_base
    from lorajax.engine import Config, Engine
    from quiet import Budget, machine, take_turns
    print(machine())
    config = Config(rows=8, slots=8, max_rank=16, max_len=512, chunks=((1, 64),), memory=512 << 20, prompt_logprobs=False)
    base = load_base('smollm2')
    with Engine(base, config) as e:
        for i in range(24): e.load(random_adapter(base.config, f'a{i}', 16, LINEARS, 1., i, .02))
        known_as = list(e.stats().adapters.values())
        nbytes = e.residents.arena.layout.nbytes
        sizes = {v: e.residents.size(v) for v in known_as}
        reads = {None: 0} | {v: n * nbytes for v,n in sizes.items()}
        words, n = count(), args.requests
        loads = {'fitted to': (n, 8, (20, 200), (16, 64), 0), 'foretold': (n * 4 // 3, 24, (20, 120), (24, 96), 1)}
        served(e, load(*loads['fitted to'], next(words))[:8], reads)
        cases = {name: (lambda one=one: served(e, load(*one, next(words)), reads)) for name,one in loads.items()}
        runs = take_turns(cases, Budget(time.monotonic() + 60 * args.reps, args.reps, args.reps))
        size = [e.scheduler.limits, e.kv.block, e.residents.pages.capacity + e.residents.pages.reserved]
    undisturbed = {name: [run for run in some if run['others'] < LIMIT] for name,some in runs.items()}
    best = {name: undisturbed[name] or some for name,some in runs.items()}
    steps = [one for run in best['fitted to'] for one in run['steps']]
    cost = fitted(*zip(*steps), e.residents.bandwidth)
    versions = lambda kv, clock: Swapped(kv.pages, sizes, lambda n: cost.swap(n * nbytes), clock, kv.left)
    group = Group('SmolLM2', cost, *size, reads, versions)
    print(f'{len(steps)} steps; {cost}')
    for name, one in loads.items():
        named = zip(best[name][0]['versions'], load(*one, next(words)))
        fresh = [Visit(0., v, (tuple(ids),), range(50_000, 50_000 + n)) for v,(_, ids, n) in named]
        ours, theirs = simulate(fresh, group), statistics.median(run['total'] for run in best[name])
        measured = ours.new_tokens / theirs
        print(f'{name:10} {measured:6.1f} tokens/s measured, {ours.rate:6.1f} simulated: {ours.rate / measured - 1:+.1%} '
              f'({len(best[name])} of {args.reps} repetitions, {len(undisturbed[name])} undisturbed)')

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = dict(policies=policies, speed=speed, fleet=fleet, placement=placement, engine=engine)
    parser.add_argument('what', nargs='*', choices=[*cases, []], help=f'of {", ".join(cases)}; all by default')
    parser.add_argument('--data', type=Path, default=Path(os.environ.get('LORAJAX_DATA', ROOT.parent / 'shared/data')),
                        help='folder of the public traces; also $LORAJAX_DATA')
    parser.add_argument('--json', type=Path, metavar='FILE', help='keeps the tables of all but engine')
    parser.add_argument('--adapters', type=int, nargs='+', default=[200, 800, 2000],
                        help='registered, the most popular ones')
    parser.add_argument('--times', type=int, default=2, help='hours of the trace laid over one another')
    parser.add_argument('--hours', type=float, default=1., help='simulated')
    parser.add_argument('--follow', type=float, default=.9,
                        help='probability of going on with a session; 0.9 repeats half of the prompts, 1 no more than 0.53')
    parser.add_argument('--p-switch', type=float, default=0., help="probability that a session's turn changes its adapter")
    parser.add_argument('--reps', type=int, default=3, help='repetitions on the engine')
    parser.add_argument('--requests', type=int, default=24, help='on the engine, of the load that prices are fitted to')
    args = parser.parse_args(namespace=argparse.Namespace(tables={}))
    for name in args.what or cases: cases[name](args)
    if args.json:
        facts = dict(date=datetime.now().isoformat(timespec='minutes'), hours=args.hours, tables=args.tables)
        args.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')

if __name__ == '__main__': main()
