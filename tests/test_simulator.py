"Not notebook cells: the real engine runs the same trace, a loop steps every row, and public traces."
import csv, gc, json, math, random, subprocess, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest
from traces import conversations, traffic as real_traffic
from lorajax import engine as engine_module
from lorajax.adapters import random_adapter
from lorajax.affinity import rendezvous, spread
from lorajax.base import random_base
from lorajax.core import ModelConfig, Refused, Sampling
from lorajax.cost import Fitted, Roofline, Work, prompt_pairs
from lorajax.engine import Config, Engine
from lorajax.kv import KV, Block
from lorajax.pages import Pages
from lorajax.plan import Limits, Request
from lorajax.policies import merged, padded, paged, pod, pod_each, prefetched, simulate_fleet, together
from lorajax.scheduler import Scheduler
from lorajax.simulator import Clock, Group, Prefetched, Swapped, simulate
from lorajax.traffic import Visit, popularity, traffic, visits

LLAMA70 = ModelConfig(vocab_size=128256, width=8192, mlp_width=28672, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                      max_len=131072)
EIGHT, TWO = Roofline(LLAMA70), Roofline(LLAMA70, devices=2)
RANKS = {f'a{i}': (8, 16, 64)[i % 3] for i in range(40)}
SECOND = Fitted(1., 0., 0., 0., 0., 0., 2.) # a step takes a second, a page of an adapter half of one
PRICED = Fitted(1., .01, .003, 1e-4, 1e-5, .02, 2.)

def small(sizes, pages, cost=SECOND, early=False, **limits):
    "A group with room for so many pages."
    def versions(kv, clock):
        swapped = Swapped(kv.pages, sizes, cost.swap, clock, kv.left)
        return Prefetched(swapped) if early else swapped
    options = dict(rows=4, chunks=((1, 4), (1, 8), (2, 8)), tokens=24, slots=3, max_len=200, overtakes=3) | limits
    return Group('small', cost, Limits(**options), 4, pages + 1, sizes, versions, page_bytes=1, memory=pages)

def same(one, other):
    assert one.first.tolist() == other.first.tolist()
    assert vars(one) | dict(first=None) == vars(other) | dict(first=None)

def numbered(start, n): return range(start, start + n)

# ---- by hand

def test_one_request_takes_what_its_steps_cost():
    group = paged(EIGHT, RANKS)
    alone = simulate([Visit(5., 'a0', (range(2000),), range(3))], group)
    swap, read = EIGHT.swap(group.reads['a0']), group.reads['a0']
    chunks = [(0, 1024), (1024, 976)]
    prompt = [EIGHT.step(Work(i == 1, 1024, start + n, prompt_pairs(start, n), read)) for i,(start, n) in enumerate(chunks)]
    assert alone.first.tolist() == pytest.approx([swap + sum(prompt)], rel=.001) # the row that samples is below that
    more = [EIGHT.step(Work(1, 0, n, n, read)) for n in (2001, 2002)]
    assert alone.seconds == pytest.approx(5 + swap + sum(prompt + more), rel=.001)
    assert (alone.requests, alone.prompt_tokens, alone.new_tokens, alone.steps, alone.swaps) == (1, 2000, 3, 4, 1)

def test_order_of_eviction_by_hand():
    """Nine pages; a and b take three each, a sequence of 5 + 3 tokens two, and leaves the one that is full. a and b leave
    3 + 1 and 3 + 1, and one is free. The second request for a needs two more: the oldest block goes, since a block costs .001 to
    bring back and a page of an adapter half a second. It leaves one, so again one is free, and c needs four: the blocks
    go, and then b, which was used before a. c's own two are there then."""
    gone = []
    asked = [Visit(20. * i, v, (numbered(100 * i, 5),), numbered(100 * i + 50, 3)) for i,v in enumerate('abac')]
    f = simulate(asked, small(dict(a=3, b=3, c=4), 9), left=gone.extend)
    names = [key if isinstance(key, str) else (key.owner, key.tokens[0]) for key in gone]
    assert names == [('a', 0), ('b', 100), ('a', 200), 'b'], names
    assert (f.swaps, f.resident, f.requests) == (3, 1, 4)

def test_the_step_waits_for_a_copy_unless_it_was_prefetched():
    """a's sequence runs from 1 (two pages of a half second each); b is asked for at 2.5 and seen at 3. Plain: its copy
    makes the next step wait a second, b's first token comes at 5, and a's six tokens end at 8. Prefetched: b arrives at 4
    and its first token comes at 5; a's aren't held up."""
    asked = [Visit(0., 'a', (numbered(0, 3),), numbered(10, 6)), Visit(2.5, 'b', (numbered(20, 3),), numbered(30, 1))]
    plain, early = (simulate(asked, small(dict(a=2, b=2), 20, early=e)) for e in (False, True))
    assert plain.first.tolist() == early.first.tolist() == [2., 2.5]
    assert (plain.seconds, early.seconds) == (8., 7.)

def test_two_adapters_and_room_for_one():
    """Five pages; each adapter takes three, each sequence one. a's copy is under way until 1.5, and a is in use until its
    two tokens have come, at 3.5. Only then is there room for b: its copy ends at 5, its token comes at 6."""
    asked = [Visit(0., 'a', (numbered(0, 3),), numbered(10, 2)), Visit(0., 'b', (numbered(20, 3),), numbered(30, 1))]
    f = simulate(asked, small(dict(a=3, b=3), 5, early=True))
    assert (f.requests, f.swaps, f.resident) == (2, 2, 0) and f.first.tolist() == [2.5, 6.] and f.seconds == 6.

def test_a_copy_under_way_is_not_there_yet():
    "a takes two seconds to come; it's asked for again after one, and after three."
    asked = [Visit(at, 'a', (numbered(20 * i, 3),), numbered(20 * i + 10, 1)) for i,at in enumerate((0., 1., 3.))]
    f = simulate(asked, small(dict(a=4), 20, early=True))
    assert (f.requests, f.resident, f.swaps) == (3, 1, 1)

def test_memory_by_hand():
    """Ten pages. a takes two, its copy a second, its prompt a page from 0 on, its first token another from 2 to 3: 3·2 + 4·1.
    Until 9 nobody runs; a and its full block are held: 3·6. The base's request needs a page from 9 to 10, beside them."""
    asked = [Visit(0., 'a', (numbered(0, 4),), numbered(10, 2)), Visit(9., None, (numbered(20, 3),), numbered(30, 1))]
    f = simulate(asked, small(dict(a=2), 10))
    assert f.seconds == 10. and f.after == (0., .3)
    assert (f.used * 100, f.held * 100) == pytest.approx((3 * 2 + 4 + 1, 3 * 2 + 4 + 3 * 6 + 3 + 1))

def test_memory_of_slots_beside_the_pages():
    """Two slots of 5, in which a needs 2 and b 3. Each runs for two seconds, one for its copy, with one page of 1: used are
    2 + 1 and 3 + 1; held is a slot of 5 from 0, another from 10, and the pages that run."""
    sizes = dict(a=1, b=1)
    group = Group('slots', SECOND, Limits(rows=2, chunks=((1, 4),), tokens=8, slots=2), 4, 21, dict(a=5, b=5),
                  lambda kv, clock: Swapped(Pages(3), sizes, lambda n: 1., clock, beside=True), page_bytes=1, memory=100,
                  beside=dict(a=2, b=3))
    f = simulate([Visit(at, v, (numbered(20 * i, 3),), range(1)) for i,(at, v) in enumerate([(0., 'a'), (10., 'b')])], group)
    assert f.seconds == 12. and f.after == (0., .1)
    assert (f.used * 1200, f.held * 1200) == pytest.approx((2 * 3 + 2 * 4, 5 * 12 + 5 * 2 + 2 + 2))

def test_a_fleet_is_counted_over_its_own_time():
    "Two groups of ten pages; one has ended after three seconds and holds three pages for seven more, until the other ends."
    group = small(dict(a=2), 10)
    one = simulate([Visit(0., 'a', (numbered(0, 4),), numbered(10, 2))], group)
    other = simulate([Visit(9., None, (numbered(20, 3),), numbered(30, 1))], group)
    assert (one.seconds, other.seconds, other.devices) == (3., 10., 1)
    both = together([one, other])
    assert (both.used * 200, both.held * 200) == pytest.approx((10 + 1, 10 + 3 * 7 + 1))
    assert both.after == pytest.approx((0., .15))

def test_merged_adapters_share_keys_and_values():
    group = paged(EIGHT, RANKS)
    text = numbered(0, 500)
    asked = [Visit(0., 'a0', (text,), range(9000, 9005)), Visit(60., 'a30', (text,), range(9005, 9010))]
    apart, shared = simulate(asked, group), simulate(asked, merged(group, 30))
    assert (apart.hits.cached, shared.hits.cached) == (0, 9 * 51) and (apart.swaps, shared.swaps) == (2, 1)

def test_pods_lose_everything_when_they_restart():
    asked = [Visit(200. * i, v, (numbered(0, 500),), range(9000, 9005)) for i,v in enumerate(['a0', 'a0', 'a1', 'a0'])]
    f = simulate(asked, pod(TWO, RANKS))
    assert f.swaps == 3 and f.hits.cached == 9 * 51, 'only the second finds what was there'
    assert f.first[-1] == pytest.approx(TWO.base_bytes / 5e9, rel=.02) and f.first[0] < .1

def test_what_cannot_run_is_counted():
    f = simulate([Visit(0., None, (range(300),), range(3)), Visit(1., None, (range(30),), range(3))], small({}, 20))
    assert (f.refused, f.requests, f.hits.tokens) == (1, 1, 30)
    with pytest.raises(Refused, match="no version 'x'"): simulate([Visit(0., 'x', (range(3),), range(3))], small({}, 20))
    with pytest.raises(Refused, match='at least one token'): Visit(0., None, (range(3),), ())
    assert simulate([], small({}, 20)).usd() == math.inf
    with pytest.raises(Refused, match='at least one visit'): pod_each([], pod(TWO, RANKS), 40)
    with pytest.raises(Refused, match='at least one group'): together([])
    assert simulate_fleet([], small({}, 20), 2).requests == 0
    with pytest.raises(Refused, match='no version'): Swapped(Pages(2), {}, SECOND.swap, Clock()).size('x')

# ---- nothing is lost

def groups():
    group = paged(EIGHT, RANKS)
    return [group, prefetched(group), padded(EIGHT, RANKS, 8), merged(prefetched(group), 5), replace(group, pages=700)]

@pytest.mark.parametrize('i', range(5))
def test_everybody_is_answered_once_and_twice_the_same(i):
    asked = traffic(40, 10, 40, p_switch=.2, seed=3)
    one, other = simulate(asked, groups()[i]), simulate(traffic(40, 10, 40, p_switch=.2, seed=3), groups()[i])
    same(one, other)
    assert one.requests == len(one.first) == 400 and not one.refused and min(one.first) > 0
    assert one.prompt_tokens == one.hits.tokens == sum(len(v.prompt) for v in asked)
    assert one.new_tokens == sum(len(v.answer) for v in asked)
    assert simulate(traffic(40, 10, 40, p_switch=.2, seed=4), groups()[i]).seconds != one.seconds

def test_a_fleet_answers_everybody_within_its_bound():
    asked = traffic(60, 40, 40)
    shares = spread(asked, 5, slack=1.2, window=5.)
    assert sorted(v.at for share in shares for v in share) == [v.at for v in asked]
    came = sorted((v.at, g) for g,share in enumerate(shares) for v in share)
    for i,(at, g) in enumerate(came): # nobody comes to a group that has its part of the last five seconds already
        recent = [group for t,group in came[:i + 1] if t > at - 5]
        assert recent.count(g) <= math.ceil(1.2 * len(recent) / 5)
    fleet = simulate_fleet(asked, paged(EIGHT, RANKS), 5)
    assert fleet.requests == len(asked) and fleet.devices == 40
    assert fleet.new_tokens == sum(len(v.answer) for v in asked)

def test_when_a_group_leaves_only_its_adapters_move():
    before, after = ([rendezvous(f'a{i}', range(n))[0] for i in range(500)] for n in (8, 7))
    assert all(b == a for b,a in zip(before, after) if b != 7) and 30 < sum(b == 7 for b in before) < 100

# ---- sleeping is exact

def moved(clock, now, versions, pages, sums): # time passes; sums: pages times seconds, in use and held
    for i,n in enumerate((pages.available, pages.free)): sums[i] += (now - clock.now) * (pages.capacity - n)
    clock.now = now
    versions.land()

def work_of(plan, reads): # from its rows alone
    ends = [row.start + len(row.tokens) for row in plan.rows]
    pairs = sum(prompt_pairs(row.start, len(row.tokens)) for row in plan.rows)
    read = sum(reads[v] for v in {row.sequence.request.version for row in plan.rows} - {None})
    return Work(len(plan.decode), plan.shape[0] * plan.shape[1], sum(ends), pairs, read)

def stepped(asked, group, left): # what `simulate` does, every row in every step
    clock, sums = Clock(), [0., 0.]
    kv = KV(Pages(group.pages), group.block, group.kv_seconds, left)
    versions = group.versions(kv, clock)
    sched, waiting, answers, first, steps, preempted = Scheduler(kv, versions, group.limits), list(asked), {}, [], 0, 0
    while waiting or sched.running or sched.waiting:
        while waiting and waiting[0].at <= clock.now:
            v = waiting.pop(0)
            s, = sched.submit(Request(str(len(answers)), v.prompt, v.adapter, len(v.answer)))
            answers[s] = v
        plan = sched.plan(clock.now)
        preempted += len(plan.preempted)
        if not plan.rows:
            moved(clock, min(waiting[0].at if waiting else math.inf, versions.arriving()), versions, kv.pages, sums)
            continue
        steps += 1
        seconds = group.cost.step(work_of(plan, group.reads))
        moved(clock, max(clock.now, versions.ready()) + seconds, versions, kv.pages, sums)
        sampled = [row.sequence for row in plan.rows if row.samples]
        sched.commit(plan, {s: (answers[s].answer[s.generated], None) for s in sampled})
        first += [clock.now - answers[s].at for s in sampled if s.generated == 1]
        sched.check()
    return dict(first=sorted(first), seconds=clock.now, hits=kv.total, swaps=versions.swaps, steps=steps,
                preempted=preempted, shares=[n / clock.now / group.memory for n in sums])

@pytest.mark.parametrize('cost', [SECOND, PRICED], ids=['second', 'priced'])
@pytest.mark.parametrize('seed', range(12))
def test_sleeping_rows_change_nothing(seed, cost):
    rng, n = random.Random(seed), 150
    sizes = dict(a=1, b=2, c=3, d=1, e=2)
    arrivals = sorted(rng.uniform(0, 12 * n) for _ in range(n))
    lengths = [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(n)]
    asked = list(visits(arrivals, lengths, rng.choices([None, *sizes], k=n), .6, .3, (5., 500.), seed))
    rows, tokens = rng.choice([(3, 24), (6, 24), (6, 10), (6, 18)]) # a chunk is of 4, 8 or 16
    group = small(sizes, rng.choice([40, 44, 60, 200]), cost, seed % 2 == 1, rows=rows, tokens=tokens)
    ours, theirs = [], []
    f, plain = simulate(asked, group, ours.extend), stepped(asked, group, theirs.extend)
    assert f.first.tolist() == plain['first'] and (f.seconds, f.steps) == (plain['seconds'], plain['steps'])
    assert (f.hits, f.swaps, f.preemptions) == (plain['hits'], plain['swaps'], plain['preempted'])
    assert [whole(key) for key in ours] == [whole(key) for key in theirs] and f.requests == n
    assert [f.used, f.held] == pytest.approx(plain['shares'], rel=1e-9)

def whole(key): # of what left the pool: an adapter, or a block with all that comes before it
    if not isinstance(key, Block): return key
    return key.owner, key.acts, (whole(key.before.key)[2] if key.before else ()) + key.tokens

# ---- the real engine

M0 = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=160)
CONFIG = Config(rows=4, slots=3, max_rank=16, chunks=((1, 8), (2, 16)), max_len=160, block=8, memory=112 << 10,
                prompt_logprobs=False)

class Driver:
    "Submits requests by the number of steps that an engine has run; half of them go on with a text that has ended."
    def __init__(self, engine, names, n, seed):
        self.engine, self.names, self.left, self.rng = engine, names, n, random.Random(seed)
        self.steps, self.asked, self.texts, self.streams = 0, [], [[i] * 20 for i in range(4)], []

    def submit(self):
        for _ in range(min(self.left, self.rng.choice([0, 0, 0, 1, 1, 2]) if self.steps else 3)):
            self.left -= 1
            old = self.rng.choice(self.texts)[:100]
            prompt = old[:len(old) if self.rng.random() < .5 else self.rng.randrange(len(old))] + [self.rng.randrange(256)]
            name, new = self.rng.choice(self.names[:self.rng.choice([3, 9])]), self.rng.randrange(5, 60)
            self.streams.append(self.engine.submit(prompt, name, Sampling(max_new_tokens=new, ignore_eos=True)))
            self.asked.append((float(self.steps), self.streams[-1].version, tuple(prompt), answer := []))
            def deliver(e, prompt=prompt, answer=answer):
                answer.append(e.scored.token)
                if e.finish: self.texts.append(prompt + answer)
            self.streams[-1].listen(deliver)

def test_engine_and_simulator_agree(monkeypatch):
    run = engine_module._run_plan
    def and_submit(engine, plan):
        run(engine, plan)
        driver.steps += 1
        driver.submit()
    monkeypatch.setattr(engine_module, '_run_plan', and_submit)
    with Engine(random_base(M0), CONFIG) as engine:
        names = [None, *(f'a{i}' for i in range(8))]
        targets = ('q_proj',), ('q_proj', 'down_proj')
        versions = [engine.load(random_adapter(M0, f'a{i}', 1 + 4 * i % 16, targets[i % 2], seed=i, std=.3)) for i in range(8)]
        driver, gone, forget = Driver(engine, names, 150, 0), [], engine.residents.forget
        def forgotten(keys):
            gone.extend(map(whole, keys))
            forget(keys)
        engine.residents.forget = engine.kv.left = forgotten
        engine.call(driver.submit)
        engine.drain()
        stats, pages = engine.stats(), engine.residents.pages
        nbytes, sizes = engine.residents.arena.layout.nbytes, {v: engine.residents.size(v) for v in versions}
        group = Group('engine', SECOND, engine.scheduler.limits, engine.kv.block, pages.capacity + pages.reserved,
                      dict.fromkeys(versions, 0), lambda kv, clock:
                      Swapped(kv.pages, sizes, lambda n: n * nbytes / engine.residents.bandwidth, clock, kv.left))
    ours = []
    f = simulate([Visit(at, version, (prompt,), answer) for at, version, prompt, answer in driver.asked], group, ours.extend)
    assert len(driver.asked) == f.requests == 150 and f.steps == driver.steps
    assert f.hits == sum(stats.hits.values(), type(f.hits)()) and f.hits.cached > 300, f
    assert (f.swaps, f.preemptions) == (stats.swaps, stats.preemptions) and f.swaps > 20 and f.preemptions, f
    assert list(map(whole, ours)) == gone and len(gone) > 200
    assert f.new_tokens == stats.generated_tokens

# ---- public traces

def test_the_published_figures_are_the_trace_s(shared_data):
    at, lengths = conversations(shared_data)
    assert len(at) == 19_366 and len(at) / at[-1] == pytest.approx(5.53, abs=.01)
    made = traffic(3500, 5.53, 200)
    for theirs, ours in zip(zip(*lengths), zip(*((len(v.prompt), len(v.answer)) for v in made))):
        for q in (10, 50, 90, 99): assert np.percentile(ours, q) == pytest.approx(np.percentile(theirs, q), rel=.08)
        assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=.05)

def test_made_up_traffic_is_like_the_traces(shared_data):
    gaps = np.diff(at := conversations(shared_data)[0])
    counts = np.histogram(at, np.arange(0, at[-1], 10))[0]
    assert gaps.std() / gaps.mean() == pytest.approx(1.09, abs=.01)
    assert math.sqrt(counts.var() / counts.mean()) == pytest.approx(1.96, abs=.01)
    path = shared_data / 'trace_alibaba_genai_lora/lora_popularity.csv'
    with open(path) as f: uses = [int(r['uses']) for r in csv.DictReader(f)]
    assert len(uses) == 874 and uses == sorted(uses, reverse=True)
    shares = np.cumsum(uses) / sum(uses) - np.cumsum(popularity(874))
    assert all(abs(shares[n - 1]) < .013 for n in (10, 50, 100, 200))

def test_more_adapters_than_the_trace_has(shared_data):
    used = {v.adapter for v in real_traffic(shared_data, 2000, hours=.5, follow=.9)}
    assert len(used) > 700 and any(int(name[1:]) > 873 for name in used)

@pytest.mark.slow
@pytest.mark.parametrize('case', ['policies --adapters 20', 'speed', 'fleet', 'placement', 'engine --reps 1 --requests 9'])
def test_the_benchmark_runs(case, shared_data, tmp_path):
    script = Path(__file__).parent / 'bench/simulate.py'
    small = ['--hours', '.005', '--data', str(shared_data), '--json', str(tmp_path / 'kept.json')]
    done = subprocess.run([sys.executable, str(script), *case.split(), *small], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = json.loads((tmp_path / 'kept.json').read_text())['tables']
    assert tables or 'simulated' in done.stdout

def test_the_real_traces_run(shared_data):
    asked = real_traffic(shared_data, hours=.1, follow=.7)
    f = simulate(asked, prefetched(paged(EIGHT, {f'a{i}': 16 for i in range(200)})))
    assert f.requests == len(asked) and .3 < f.hits.rate < .7

def test_a_run_leaves_no_cycles_behind():
    "It runs without their collector, in an arena that evicts all the time."
    asked, was = traffic(30, 8, 40), gc.isenabled()
    group = replace(prefetched(paged(EIGHT, RANKS)), pages=1500)
    gc.collect()
    gc.disable()
    try:
        assert simulate(asked, group).swaps > 40
        assert gc.collect() == 0
    finally:
        if was: gc.enable()
