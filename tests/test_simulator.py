"Not notebook cells: the real engine runs the same trace, a loop steps every row, and public traces."
import math, random
from dataclasses import replace
import numpy as np, pytest
from traces import conversations, traffic as real_traffic
from lorajax import engine as engine_module
from lorajax.adapters import random_adapter
from lorajax.base import random_base
from lorajax.core import ModelConfig, Refused, Sampling
from lorajax.cost import Fitted, Roofline, Work, prompt_pairs
from lorajax.engine import Config, Engine
from lorajax.kv import KV, Block
from lorajax.pages import Pages
from lorajax.plan import Limits, Request
from lorajax.scheduler import Scheduler
from lorajax.simulator import (Clock, Group, Prefetched, Swapped, Visit, merged, padded, paged, pod, prefetched, rendezvous,
                               simulate, simulate_fleet, spread, traffic, visits)

LLAMA70 = ModelConfig(vocab_size=128256, width=8192, mlp_width=28672, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                      max_len=131072)
EIGHT, TWO = Roofline(LLAMA70), Roofline(LLAMA70, devices=2)
RANKS = {f'a{i}': (8, 16, 64)[i % 3] for i in range(40)}
SECOND = Fitted(1., 0., 0., 0., 0., 0., 2.) # a step takes a second, a page of an adapter half of one

def small(sizes, pages, cost=SECOND, early=False, **limits):
    "A group with room for so many pages."
    def versions(kv, clock):
        swapped = Swapped(kv.pages, sizes, cost.swap, clock, kv.left)
        return Prefetched(swapped) if early else swapped
    options = dict(rows=4, chunks=((1, 4), (1, 8), (2, 8)), tokens=24, slots=3, max_len=200, overtakes=3) | limits
    reads = dict.fromkeys(sizes, 1)
    return Group('small', cost, Limits(**options), 4, pages + 1, reads, versions, page_bytes=1, memory=pages)

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

def test_merged_adapters_share_keys_and_values():
    group = paged(EIGHT, RANKS)
    text = numbered(0, 500)
    asked = [Visit(0., 'a0', (text,), range(9000, 9005)), Visit(60., 'a30', (text,), range(9005, 9010))]
    apart, together = simulate(asked, group), simulate(asked, merged(group, 30))
    assert (apart.hits.cached, together.hits.cached) == (0, 9 * 51) and (apart.swaps, together.swaps) == (2, 1)

def test_pods_lose_everything_when_they_restart():
    asked = [Visit(200. * i, v, (numbered(0, 500),), range(9000, 9005)) for i,v in enumerate(['a0', 'a0', 'a1', 'a0'])]
    f = simulate(asked, pod(TWO, RANKS))
    assert f.swaps == 3 and f.hits.cached == 9 * 51, 'only the second finds what was there'
    assert f.first[-1] == pytest.approx(TWO.base_bytes / 5e9, rel=.02) and f.first[0] < .1

def test_what_cannot_run_is_counted():
    f = simulate([Visit(0., None, (range(300),), range(3)), Visit(1., None, (range(30),), range(3))], small({}, 20))
    assert (f.refused, f.requests, f.hits.tokens) == (1, 1, 30)
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
    for share in shares:
        at = np.array([v.at for v in share])
        for t in range(5, 60, 5): assert ((at > t - 5) & (at <= t)).sum() <= 1.2 * (5 * 40 * 1.35) / 5
    fleet = simulate_fleet(asked, paged(EIGHT, RANKS), 5)
    assert fleet.requests == len(asked) and fleet.devices == 40
    assert fleet.new_tokens == sum(len(v.answer) for v in asked)

def test_when_a_group_leaves_only_its_adapters_move():
    before, after = ([rendezvous(f'a{i}', n)[0] for i in range(500)] for n in (8, 7))
    assert all(b == a for b,a in zip(before, after) if b != 7) and 30 < sum(b == 7 for b in before) < 100

# ---- sleeping is exact

def stepped(asked, group, left): # what `simulate` does, every row in every step
    clock = Clock()
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
            clock.now = min(waiting[0].at if waiting else math.inf, versions.arriving())
            continue
        steps += 1
        clock.now = max(clock.now, versions.ready()) + group.cost.step(Work())
        sampled = [row.sequence for row in plan.rows if row.samples]
        sched.commit(plan, {s: (answers[s].answer[s.generated], None) for s in sampled})
        first += [clock.now - answers[s].at for s in sampled if s.generated == 1]
        sched.check()
    return dict(first=sorted(first), seconds=clock.now, hits=kv.total, swaps=versions.swaps, steps=steps,
                preempted=preempted)

@pytest.mark.parametrize('seed', range(12))
def test_sleeping_rows_change_nothing(seed):
    rng, n = random.Random(seed), 150
    sizes = dict(a=1, b=2, c=3, d=1, e=2)
    arrivals = sorted(rng.uniform(0, 12 * n) for _ in range(n))
    lengths = [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(n)]
    asked = list(visits(arrivals, lengths, rng.choices([None, *sizes], k=n), .6, .3, (5., 500.), seed))
    group = small(sizes, rng.choice([40, 44, 60, 200]), early=seed % 2 == 1, rows=rng.choice([3, 6]))
    ours, theirs = [], []
    f, plain = simulate(asked, group, ours.extend), stepped(asked, group, theirs.extend)
    assert f.first.tolist() == plain['first'] and (f.seconds, f.steps) == (plain['seconds'], plain['steps'])
    assert (f.hits, f.swaps, f.preemptions) == (plain['hits'], plain['swaps'], plain['preempted'])
    assert [whole(key) for key in ours] == [whole(key) for key in theirs] and f.requests == n

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

def test_the_real_traces_run(shared_data):
    asked = real_traffic(shared_data, hours=.1, follow=.7)
    f = simulate(asked, prefetched(paged(EIGHT, {f'a{i}': 16 for i in range(200)})))
    assert f.requests == len(asked) and .3 < f.hits.rate < .7
