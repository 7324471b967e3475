"Not notebook cells: thousands of random steps with an arena too small, bounds as properties, and cases by their names."
import gzip, json, random, subprocess, sys, time
from collections import Counter
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                 run_state_machine_as_test)
from lorajax.core import Refused
from lorajax.fake import FakeModel, FakeVersions, cold_run
from lorajax.kv import KV, Block
from lorajax.pages import NoRoom, Pages
from lorajax.plan import Limits, Plan, Request, plan_table
from lorajax.scheduler import Scheduler, best_shape

SIZES = dict(a=1, b=2, c=3, d=1, e=2, f=1)

def machine(n_pages=100, block=4, sizes=SIZES, reads={}, **limits):
    "A scheduler and a fake model; limits small enough to be felt."
    pages = Pages(n_pages)
    options = dict(rows=4, chunks=((1, 4), (1, 8), (2, 8)), tokens=24, slots=3, max_len=200, overtakes=3) | limits
    return Scheduler(KV(pages, block), FakeVersions(pages, sizes, reads), Limits(**options)), FakeModel(block)

def step(sched, model, now=0.):
    "Plan, run, commit; the plan."
    plan = sched.plan(now)
    check_plan(sched, plan)
    sched.commit(plan, {s: (token, None) for s,token in model.run(plan).items()})
    sched.check()
    return plan

def check_plan(sched, plan):
    "What a device step relies on."
    limits, block, (P, S) = sched.limits, sched.kv.block, plan.shape
    assert all(len(r.tokens) == 1 for r in plan.decode) and len(plan.rows) == len({r.sequence for r in plan.rows})
    assert len(plan.prefill) <= P and all(1 <= len(r.tokens) <= S for r in plan.prefill)
    assert plan.shape in limits.chunks if plan.prefill else plan.shape == (0, 0)
    assert len(plan.decode) + P * S <= limits.tokens and len({r.version for r in plan.rows} - {None}) <= limits.slots
    written = {r.pages[p // block] for r in plan.rows for p in range(r.start, r.start + len(r.tokens))}
    held_by = Counter(page for s in sched.running for page in s.table.pages)
    assert all(held_by[page] == 1 for page in written), 'a page is written that another sequence has too'
    sources, targets = {s for s,_ in plan.copies}, [t for _,t in plan.copies]
    assert len(set(targets)) == len(targets) and set(targets) <= written and not sources & (written & set(targets))
    for r in plan.rows:
        end, invoked, request = r.start + len(r.tokens), r.sequence.request.invocation, r.sequence.request
        assert 0 not in r.pages and len(set(r.pages)) == len(r.pages) and end <= len(r.pages) * block
        assert r.version == (request.version if r.start >= invoked else None) and (r.start >= invoked or end <= invoked)
        assert request.version is None or sched.kv.pages.holdings[request.version].uses

def finish(sched, model, most=10_000):
    "Steps until nobody is left; the plans."
    plans = []
    while sched.running or sched.waiting:
        plans.append(step(sched, model))
        assert len(plans) < most, 'nothing moves any more'
    assert sched.kv.pages.available == sched.kv.pages.capacity
    return plans

def answer(s): return s.tokens[len(s.request.tokens):]
def check_answers(sequences):
    for s in sequences:
        want = cold_run(s.request, s.index)
        assert answer(s) == want[:s.generated] and (s.finished != 'length' or answer(s) == want), s

def prompt(n, seed=0): return tuple(random.Random(seed).choices(range(1, 1000), k=n))

def ask(name, length=10, version=None, new=4, seed=0, **options): # equal seeds: one prompt begins like the other
    return Request(name, prompt(length, seed), version, new, **options)

def together(sched, model, *requests):
    "Submits all, runs to the end; the sequences."
    sequences = [s for r in requests for s in sched.submit(r)]
    finish(sched, model)
    check_answers(sequences)
    return sequences

# ---- random steps

def random_request(rng, i):
    tokens = prompt(20, rng.randrange(3))[:rng.randrange(0, 20)] + prompt(rng.randrange(1, 12), rng.randrange(1000))
    version = rng.choice([None, None, None, *SIZES])
    kind = rng.choice(['plain', 'plain', 'routed', 'activated']) if version else 'plain'
    n, priority = rng.choice([1, 1, 1, 2, 3]), rng.randrange(2)
    return Request(f'r{i}', tokens, version, rng.randrange(0, 40), n, priority,
                   deadline=rng.choice([1e9, 1e9, 1e9, rng.randrange(400)]), routing_token=kind == 'routed',
                   invocation=rng.randrange(len(tokens) + 1) if kind == 'activated' else 0, reuse=rng.random() < .9)

class Traffic(RuleBasedStateMachine):
    outcomes = Counter()

    @initialize(seed=st.integers(0, 2**32), n_pages=st.sampled_from([11, 13, 15, 15, 17, 20, 60]),
                slots=st.integers(1, 3), rows=st.integers(1, 6), overtakes=st.integers(0, 4))
    def start(self, seed, n_pages, **limits):
        self.rng, self.now, self.everyone, self.plan, self.ends = random.Random(seed), 0, [], None, {}
        self.sched, self.model = machine(n_pages, reads=dict(c=5, d=2), tokens=40, look=4, **limits)

    def pick(self, some): return self.rng.choice(some)

    @rule(n=st.integers(1, 4))
    def submit(self, n):
        for _ in range(n):
            try: self.everyone += self.sched.submit(random_request(self.rng, len(self.everyone)))
            except Refused: self.outcomes['refused'] += 1

    def takes(self):
        self.plan = self.sched.plan(self.now)
        check_plan(self.sched, self.plan)
        self.now += 1
        self.outcomes['preempted'] += len(self.plan.preempted)
        for s in self.plan.preempted:
            assert self.ends.get(s) != self.sched.ends, 'preempted twice, and nobody ended in between'
            self.ends[s] = self.sched.ends
        self.outcomes['copied'] += len(self.plan.copies)
        self.outcomes.update(why for _,why in self.plan.waiting)

    def gives(self):
        for s, token in (results := self.model.run(self.plan)).items():
            results[s] = token, 'stop' if self.rng.random() < .02 else None
        self.sched.commit(self.plan, results)

    @rule(n=st.integers(1, 12))
    def steps(self, n):
        for _ in range(n):
            self.takes()
            self.gives()
            self.sched.check()

    @precondition(lambda self: self.everyone)
    @rule()
    def cancel(self): self.sched.cancel(self.pick(self.everyone))

    @rule()
    def cancel_in_the_middle_of_a_step(self):
        self.takes()
        if self.sched.running: self.sched.cancel(self.pick(self.sched.running))
        self.gives()

    @rule()
    def forget(self): self.sched.kv.forget(self.pick([*SIZES]))

    @rule()
    def unload(self):
        version = self.pick([*SIZES])
        if version in self.sched.kv.pages: self.sched.kv.pages.drop(version)

    @invariant()
    def accounts(self):
        if hasattr(self, 'sched'): self.sched.check()

    def teardown(self):
        if not hasattr(self, 'sched'): return
        self.outcomes['preempted'] += sum(len(p.preempted) for p in finish(self.sched, self.model))
        check_answers(self.everyone)
        self.outcomes['steps'] += self.sched.steps
        self.outcomes.update(s.finished for s in self.everyone)

def random_steps(examples, **options):
    Traffic.outcomes = Counter()
    run_state_machine_as_test(Traffic, settings=settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), **options))
    return Traffic.outcomes

def test_every_sequence_answers_like_a_cold_run_in_an_arena_too_small():
    outcomes = random_steps(80, derandomize=True)
    seen = 'length stop cancelled deadline refused preempted copied room slot loading sibling queued'.split()
    assert outcomes['steps'] > 5000 and min(outcomes[k] for k in seen) >= 10, outcomes

@pytest.mark.slow
def test_many_more_random_steps(): assert random_steps(1000)['steps'] > 50_000

# ---- order and starvation

def starts(sched, model, arrivals, most=20_000):
    "Submits `arrivals[i]` before step i and runs to the end; sequences in the order in which they first started."
    order, everyone = [], []
    for i in range(most):
        everyone += [s for r in (arrivals[i] if i < len(arrivals) else ()) for s in sched.submit(r)]
        before = set(sched.running) | set(order)
        step(sched, model)
        new = [s for s in everyone if s not in before and (s.table or s.finished)]
        order += sorted(new, key=lambda s: s.arrival) # within one step: the best case for those who were passed
        if i >= len(arrivals) and not (sched.running or sched.waiting): return order
    raise AssertionError('nothing moves any more')

@pytest.mark.parametrize('seed', range(12))
def test_at_most_so_many_later_ones_start_first(seed):
    rng = random.Random(seed)
    overtakes = rng.choice([0, 1, 3, 6])
    limits = dict(slots=rng.choice([1, 2]), rows=rng.choice([2, 4]), overtakes=overtakes)
    sched, model = machine(rng.choice([14, 20, 40]), **limits)
    popular = rng.choices([None, *SIZES], [4, 8, 1, 1, 1, 1, 1], k=120)
    arrivals = [[ask(f'r{i}', rng.randrange(1, 20), version, rng.randrange(1, 9), priority=rng.choice([0, 0, 5]))]
                for i,version in enumerate(popular)]
    order = starts(sched, model, arrivals)
    assert len(order) == 120
    for i, s in enumerate(order): assert sum(o.arrival > s.arrival for o in order[:i]) <= overtakes, s
    if overtakes and sched.limits.slots == 1: assert any(s.overtaken for s in order)
    check_answers(order)

@pytest.mark.parametrize('seed', range(6))
def test_the_wait_is_bounded_in_steps(seed):
    "What was ahead and what overtook have so many chunks and tokens, and in no step do all of them stand still."
    rng = random.Random(seed)
    sched, model = machine(200, slots=1, rows=3)
    sequences, ahead, submitted, began = [], {}, {}, {}
    while len(began) < 80:
        if len(sequences) < 80:
            length, version, new = rng.randrange(1, 30), rng.choice('aaab'), rng.randrange(1, 9)
            new, = sched.submit(ask(f'r{len(sequences)}', length, version, new))
            ahead[new], submitted[new] = [o for o in sequences if not o.finished], sched.steps
            sequences.append(new)
        step(sched, model)
        began |= {s: sched.steps for s in sequences if s not in began and (s.table or s.finished)}
    finish(sched, model)
    work = lambda s: -(-len(s.request.tokens) // 4) + s.request.max_new_tokens # 4: the smallest chunk
    for s in sequences:
        passed = [o for o in sequences if o.arrival > s.arrival and began[o] < began[s]]
        assert len(passed) <= 3 and not s.preemptions
        assert began[s] - submitted[s] <= 1 + sum(map(work, ahead[s] + passed))
    assert any(s.overtaken for s in sequences)

def test_first_come_first_served_among_equals():
    sched, model = machine(rows=2)
    order = starts(sched, model, [[ask(f'r{i}', 3 + i % 5) for i in range(20)]])
    assert [s.arrival for s in order] == list(range(20)) and not any(s.overtaken for s in order)

def test_urgent_ones_go_first_but_not_for_ever():
    "One row, `overtakes` 3: of ten urgent ones that keep coming, three go before the patient one."
    sched, model = machine(rows=1)
    arrivals = [[ask('running'), ask('patient', priority=9)], *([ask(f'urgent {i}', priority=1)] for i in range(10))]
    names = [s.name for s in starts(sched, model, arrivals)]
    assert names[:6] == ['running', 'urgent 0', 'urgent 1', 'urgent 2', 'patient', 'urgent 3']

def test_no_overtaking_at_all_is_strict_order():
    sched, model = machine(slots=1, overtakes=0)
    versions = [random.Random(1).choice('ab') for _ in range(30)]
    order = starts(sched, model, [[ask(f'r{i}', version=v) for i,v in enumerate(versions)]])
    assert [s.arrival for s in order] == list(range(30))

def test_B54_an_adapter_outside_the_running_set_gets_its_turn():
    "One slot, four requests for `a` always in flight, one for `b`."
    sched, model = machine(slots=1, rows=4)
    flow, started, b = [], [], None
    for i in range(60):
        while sum(not s.finished for s in flow) < 4: flow += sched.submit(ask(f'a{len(flow)}', version='a', new=6))
        if i == 10:
            (b,), before = sched.submit(ask('b', version='b')), {s for s in flow if s.table or s.finished}
            ahead = [s for s in flow if s not in before]
        step(sched, model)
        started += [s for s in flow if s not in started and (s.table or s.finished)]
        if b and b.table: break
    passed = [s for s in started if s not in before and s not in ahead]
    assert b.table and b.overtaken == len(passed) <= 3
    assert [s.arrival for s in started] == sorted(s.arrival for s in started)
    finish(sched, model)
    check_answers([*flow, b])

def test_a_skewed_load_starves_none_of_24_versions():
    "Zipf over 24 versions, two slots: each request starts after at most those before it and `overtakes` others."
    rng, versions = random.Random(0), {f'v{i}': 1 + i % 3 for i in range(24)}
    sched, model = machine(40, sizes=versions, slots=2, rows=4)
    picks = rng.choices([*versions], [1 / (i + 1) for i in range(24)], k=200)
    order = starts(sched, model, [[ask(f'r{i}', rng.randrange(1, 12), v, 3)] for i,v in enumerate(picks)])
    for i, s in enumerate(order): assert i <= s.arrival + 3
    assert len({s.request.version for s in order}) > 15

# ---- budgets

@pytest.mark.parametrize('pending, shape', [
    ([2], (1, 4)), ([8], (1, 8)), ([9], (1, 8)), ([9, 1], (2, 8)), ([8, 0], (1, 8)), ([9, 9], (2, 8)), ([5, 4], (2, 8)),
    ([4, 3], (1, 4)), ([1, 1, 9], (1, 4))])
def test_the_shape_with_most_work_and_at_most_half_padding(pending, shape):
    assert best_shape(pending, [(1, 4), (1, 8), (2, 8)]) == shape

def test_decode_rows_leave_less_for_prefill():
    sched, model = machine(tokens=12, rows=6)
    for i in range(4): sched.submit(ask(f'd{i}', 1, new=30))
    step(sched, model)
    sched.submit(ask('long', 40))
    sched.submit(ask('longer', 40, seed=1))
    plan = step(sched, model)
    assert len(plan.decode) == 4 and plan.shape == (1, 8)
    finish(sched, model)

def test_B52_six_adapters_through_two_slots():
    sched, model = machine(slots=2, rows=6)
    sequences = [s for v in SIZES for s in sched.submit(ask(v, version=v, new=20))]
    plans = finish(sched, model)
    check_answers(sequences)
    assert max(len({r.version for r in p.rows}) for p in plans) == 2
    assert {why for p in plans for _,why in p.waiting} == {'slot'}

def test_B55_six_adapters_through_one_slot_three_times():
    sched, model = machine(10, sizes=dict.fromkeys('uvwxyz', 3), slots=1)
    sequences = together(sched, model, *(ask(f'{v}{i}', version=v) for i in range(3) for v in 'uvwxyz'))
    assert all(s.finished == 'length' for s in sequences)

def test_B41_what_can_never_fit_is_refused_and_delays_nobody():
    sched, model = machine(9, block=16, max_len=300)
    for n, new, needs in [(200, 4, 13), (100, 60, 10)]:
        with pytest.raises(Refused, match=f"'big' may need {needs} pages for keys and values and 0 .* the pool has 8"):
            sched.submit(ask('big', n, new=new))
    with pytest.raises(Refused, match='8 pages .* and 2 for its adapter'): sched.submit(ask('big', 100, 'b', new=21))
    s, = together(sched, model, ask('small', 5))
    assert s.finished == 'length' and not sched.waiting

def test_what_just_fits_runs():
    "Eight pages of 16 tokens for 128 tokens and one that is never computed; or six, beside an adapter of two."
    for request in (ask('all', 100, new=29), ask('all', 60, 'b', new=37), ask('all', 128, new=1)):
        sched, model = machine(9, block=16)
        runs = [together(sched, model, request)[0] for _ in range(2)]
        assert [s.finished for s in runs] == ['length', 'length']
    assert [s.cached for s in runs] == [0, 112], 'the last block is cached, and there is no page for a copy of it'

def test_B85_positions_end_at_the_context():
    sched, model = machine(block=16, max_len=64)
    for new in (3, 4): together(sched, model, ask('fits', 60, new=new))
    for n, new, options in [(60, 5, {}), (64, 1, {}), (65, 1, {}), (63, 1, dict(version='a', routing_token=True))]:
        with pytest.raises(Refused, match='may take 6[56] positions'): sched.submit(ask('long', n, new=new, **options))

def test_an_unknown_version_is_refused_at_once():
    sched, _ = machine()
    with pytest.raises(Refused, match="no version 'nope'"): sched.submit(ask('x', version='nope'))
    assert not sched.waiting

@pytest.mark.parametrize('options, message', [
    (dict(prompt=()), 'empty prompt'), (dict(prompt=[1]), 'a tuple'), (dict(prompt=(1, -2)), 'a tuple'),
    (dict(prompt=(True,)), 'a tuple'), (dict(n=0), 'n=0'), (dict(max_new_tokens=-1), 'max_new_tokens=-1'),
    (dict(routing_token=True), 'no adapter'), (dict(invocation=1), 'no adapter'),
    (dict(version='a', invocation=3), 'it is from 0 to 2'), (dict(version='a', invocation=-1), 'it is from 0 to 2'),
    (dict(version='a', invocation=1, routing_token=True), 'not both')])
def test_requests_without_sense(options, message):
    with pytest.raises(Refused, match=message): Request(**dict(id='x', prompt=(1, 2)) | options)

@pytest.mark.parametrize('options', [dict(rows=0), dict(chunks=()), dict(chunks=((0, 4),)), dict(slots=0), dict(look=0),
                                     dict(overtakes=-1), dict(rows=8, tokens=10, chunks=((1, 4),))])
def test_limits_without_sense(options):
    with pytest.raises(Refused): Limits(**options)

def test_only_so_many_are_tried_in_vain():
    for look, started in [(2, False), (3, True)]:
        sched, model = machine(12, rows=6, look=look)
        sched.submit(ask('running', 20, new=20))
        step(sched, model)
        for i in range(2): sched.submit(ask(f'big {i}', 36, new=1, seed=i + 1))
        small, = sched.submit(ask('small', 1, new=1, seed=9))
        step(sched, model)
        assert bool(small.finished) == started
        finish(sched, model)

# ---- loading

def test_a_version_is_read_ahead_as_soon_as_it_is_asked_for():
    sched, model = machine(rows=1)
    asked = []
    sched.versions.ahead = asked.append
    for v in (None, 'a', 'b'): sched.submit(ask(f'{v}', version=v))
    assert asked == ['a', 'b']

def test_a_prefix_is_let_go_while_its_adapter_is_read():
    sched, model = machine(reads=dict(a=1))
    for left in (3, 0, 2):
        sched.versions.reads['a'] = left
        s, = together(sched, model, ask('x', 12, 'a'))
    assert s.cached == 11

def test_having_been_loading_once_is_no_excuse():
    "A patient request was once loading. Urgent ones take the only row again and again, and three may."
    sched, model = machine(rows=1, reads=dict(b=1))
    patient, = sched.submit(ask('patient', version='b', priority=9))
    step(sched, model)
    assert patient.waits == 'loading'
    for i in range(20):
        sched.submit(ask(f'urgent {i}', 1, new=2))
        step(sched, model)
        if patient.table: break
    assert patient.overtaken == 3 and patient.table
    finish(sched, model)

def test_loading_blocks_nobody_and_is_not_held_against_anyone():
    sched, model = machine(reads=dict(b=30), rows=2)
    b, = sched.submit(ask('b', version='b'))
    others = []
    for i in range(25):
        others += sched.submit(ask(f'a{i}', version='a', new=1))
        step(sched, model)
    assert b.waits == 'loading' and b.overtaken == 0 and sum(s.finished == 'length' for s in others) >= 20
    finish(sched, model)
    check_answers([b, *others])

def test_B56_an_adapter_that_cannot_be_read_fails_only_its_own_requests():
    sched, model = machine(reads=dict(c=-1))
    good = [s for i,v in enumerate([None, 'a', 'b', 'a', None]) for s in sched.submit(ask(f'r{i}', version=v, new=12))]
    for _ in range(4): step(sched, model)
    bad, late = (sched.submit(ask(n, version='c'))[0] for n in ('bad', 'late'))
    plans = finish(sched, model)
    assert bad.finished == late.finished == 'error' and "'c' can no longer be read" in bad.error
    assert "no version 'c'" in late.error, 'by then it was forgotten'
    assert [s for p in plans for s in p.ended] == [bad, late]
    check_answers(good)

def test_a_version_without_room_of_its_own_waits():
    "Versions may have limits of their own, which the pool knows nothing of."
    class One(FakeVersions):
        def use(self, version):
            if any(h.uses and k in self.sizes and k != version for k,h in self.pages.holdings.items()): raise NoRoom
            return super().use(version)
    sched, model = machine()
    sched.versions = One(sched.kv.pages, SIZES)
    together(sched, model, *(ask(v, version=v) for v in SIZES))

# ---- preemption

def test_B43_preempted_sequences_go_on_where_they_were():
    "Room for two of three growing sequences, under a, b, a; each forked, so that its random stream counts."
    sched, model = machine(17, rows=6)
    sequences = [s for i,v in enumerate('aba') for s in sched.submit(ask(v, 6, v, 30, seed=i, n=2))]
    streamed = {s: [] for s in sequences}
    while sched.running or sched.waiting:
        plan = sched.plan()
        tokens = model.run(plan)
        for s, token in tokens.items(): streamed[s].append(token)
        sched.commit(plan, {s: (token, None) for s,token in tokens.items()})
        sched.check()
        assert sched.steps < 1000
    assert sum(s.preemptions for s in sequences) >= 3
    for s in sequences: assert streamed[s] == cold_run(s.request, s.index) == answer(s)
    assert sched.kv.total.tokens == 6 * 6, 'look-ups after a preemption are not counted'

def test_the_first_in_the_order_is_never_preempted_and_the_last_is():
    sched, model = machine(14, rows=6)
    sequences = [s for i in range(6) for s in sched.submit(ask(f'r{i}', 6, new=30, seed=i))]
    while sched.running or sched.waiting:
        before = list(sched.running)
        if lost := step(sched, model).preempted: assert lost[0] is max(before, key=lambda s: s.arrival)
    assert sequences[0].preemptions == 0 < sum(s.preemptions for s in sequences)
    check_answers(sequences)

def test_the_least_urgent_loses_its_pages():
    sched, model = machine(20, rows=3)
    late, = sched.submit(ask('patient', 6, new=40, priority=5))
    step(sched, model)
    urgent = [s for i in range(2) for s in sched.submit(ask(f'urgent {i}', 6, new=40, seed=i + 1))]
    finish(sched, model)
    assert late.preemptions and not urgent[0].preemptions
    check_answers([late, *urgent])

@pytest.mark.parametrize('seed', range(10))
def test_nobody_is_preempted_twice_without_an_end_between(seed):
    rng, last = random.Random(seed), {}
    sched, model = machine(rng.choice([16, 20]), rows=6, overtakes=9)
    everyone = [s for i in range(30) for s in sched.submit(ask(f'r{i}', rng.randrange(1, 16), None, 40, seed=i))]
    while sched.running or sched.waiting:
        for s in step(sched, model).preempted:
            assert last.get(s) != s.ends_before
            last[s] = s.ends_before
        assert sched.steps < 10_000
    assert last
    check_answers(everyone)

def test_nobody_starts_into_pages_that_the_next_token_needs():
    """Seven pages, four of them free. The newcomer would take all four, and the running one needs its fourth page two
    tokens later; so it waits, as it would for one page more."""
    for length, starts in [(16, False), (12, True)]:
        sched, model = machine(8)
        sched.submit(ask('running', 11, new=5))
        for _ in range(2): step(sched, model)
        new, = sched.submit(ask('new', length, new=1, seed=1))
        step(sched, model)
        assert bool(new.table or new.finished) == starts and (starts or new.waits == 'room')
        finish(sched, model)
        assert not new.preemptions

# ---- ends

def test_B48_a_cancelled_sequence_keeps_nothing_whatever_it_was_doing():
    sched, model = machine(slots=1, reads=dict(b=3), rows=2)
    pages = sched.kv.pages
    def idle(version): return version not in pages.holdings or not pages.holdings[version].uses
    stages = dict(queued=lambda s: s.waits == 'queued', loading=lambda s: s.waits == 'loading',
                  prefill=lambda s: s.table and s.computed < 20, decode=lambda s: s.generated == 2)
    for stage, reached in stages.items():
        sched.versions.reads['b'] = 3 if stage == 'loading' else 0
        s, = sched.submit(ask(stage, 24, 'b', reuse=False))
        while not reached(s): step(sched, model)
        sched.cancel(s)
        sched.cancel(s)
        assert s.finished == 'cancelled' and idle('b') and pages.available == pages.capacity
        sched.check()
    assert pages.drop('b') == ['b']
    together(sched, model, *(ask(v, version=v) for v in SIZES))

def test_a_cancel_between_plan_and_commit():
    sched, model = machine()
    a, b = (sched.submit(ask(x, 10))[0] for x in 'ab')
    plan = sched.plan()
    sched.cancel(a)
    sched.commit(plan, {s: (t, None) for s,t in model.run(plan).items()})
    finish(sched, model)
    assert a.finished == 'cancelled' and a.generated == 0
    check_answers([b])

def test_deadlines_end_waiting_and_running_sequences():
    sched, model = machine(rows=1)
    ends = dict(r=5., w=3., l=99.)
    running, waiting, later = (sched.submit(ask(x, 3, new=50, deadline=d))[0] for x,d in ends.items())
    ended = {}
    for now in range(8): ended |= {s.name: now for s in step(sched, model, float(now)).ended}
    assert ended == dict(w=3, r=5) and running.finished == waiting.finished == 'deadline' and later.table
    assert running.generated == 5 and answer(running) == cold_run(running.request)[:5]

@pytest.mark.parametrize('given', [dict(priority='high'), dict(priority=None), dict(priority=True), dict(deadline=float('nan')),
                                   dict(deadline='soon')])
def test_what_is_compared_can_be_compared(given):
    with pytest.raises(Refused, match=next(iter(given))): Request('r', (1,), **given)

def test_the_engine_says_why_it_ends():
    sched, model = machine()
    s, = sched.submit(ask('x', 5, new=50))
    while not s.finished:
        plan = sched.plan()
        ended = sched.commit(plan, {q: (t, 'stop' if q.generated == 3 else None) for q,t in model.run(plan).items()})
    assert (s.finished, s.generated, ended) == ('stop', 4, [s])
    s, = sched.submit(ask('nan', 5))
    plan = sched.plan()
    sched.commit(plan, {s: (None, 'error')})
    assert (s.finished, s.generated) == ('error', 0) and sched.kv.pages.available == sched.kv.pages.capacity

def test_no_new_tokens_only_computes_the_prompt():
    sched, model = machine()
    s, = sched.submit(ask('score', 10, new=0, reuse=False))
    plans = finish(sched, model)
    assert s.finished == 'length' and not s.generated and not any(r.samples for p in plans for r in p.rows)
    assert sum(len(r.tokens) for p in plans for r in p.rows) == 10

# ---- the prefix cache in traffic

def test_B33_versions_share_nothing():
    "Base, A, B, A, base with a prompt of three blocks: only the second A and the second base find anything."
    sched, model = machine()
    cached = [together(sched, model, ask(f'r{i}', 12, v))[0].cached for i,v in enumerate([None, 'a', 'b', 'a', None])]
    assert cached == [0, 0, 0, 11, 11]

def test_B35_another_adapter_after_a_long_conversation():
    "Generated tokens are in the version's bucket too: B repeats A's conversation and finds nothing of A's."
    sched, model = machine(rows=1)
    a, = together(sched, model, ask('a', 20, 'a', 12))
    talk = tuple(a.tokens) + (7, 8, 9)
    same, other = Request('same', talk, 'a', 8), Request('other', talk, 'b', 8)
    assert [together(sched, model, r)[0].cached for r in (other, other, same)] == [0, 32, 28]

@pytest.mark.parametrize('n', [15, 16, 17, 32, 33])
def test_B37_a_prompt_whose_logits_are_wanted_is_computed_whole(n):
    for new in (1, 0):
        sched, model = machine(block=16)
        for _ in range(2):
            s, = sched.submit(ask('echo', n, new=new, reuse=False))
            rows = [r for plan in finish(sched, model) for r in plan.rows]
            positions = [p for r in rows for p in range(r.start, r.start + len(r.tokens))]
            assert positions == list(range(n)) and s.cached == 0
            check_answers([s])
        assert sched.kv.pages.idle == n // 16, 'the second time, the same blocks were not kept twice'

@pytest.mark.parametrize('seed', range(10))
def test_B39_two_adapters_in_quick_alternation(seed):
    "Two long prefills with a shared prefix under a and b, and twelve short requests in turn, some cancelled."
    rng = random.Random(seed)
    sched, model = machine(36, rows=5)
    everyone = [s for v in 'ab' for s in sched.submit(ask(f'anchor {v}', 44, v, 8))]
    for i in range(12):
        everyone += sched.submit(ask(f's{i}', rng.randrange(1, 14), 'ab'[i % 2], 4))
        step(sched, model)
        if rng.random() < .3: sched.cancel(everyone[-1])
    finish(sched, model)
    check_answers(everyone)

def test_B45_a_bad_hash_changes_nothing(monkeypatch):
    monkeypatch.setattr(Block, '__hash__', lambda self: 0)
    sched, model = machine()
    requests = [Request(f'{v}{i}', prompt(9, i), v, 6) for v in ('a', 'b') for i in range(3)]
    assert all(s.cached == 0 for s in together(sched, model, *requests))
    assert all(s.cached == 8 for s in together(sched, model, *requests))

def test_B46_unloading_frees_the_prefixes_too():
    sched, model = machine()
    pages = sched.kv.pages
    together(sched, model, ask('base'))
    base = pages.free
    for _ in range(50):
        together(sched, model, ask('b', 30, 'b'))
        sched.kv.forget('b')
        pages.drop('b')
        assert pages.free == base and not any(isinstance(k, Block) and k.owner == 'b' for k in pages.holdings)

def test_forgetting_spares_what_runs():
    sched, model = machine()
    s, = sched.submit(ask('b', 30, 'b', 8))
    for _ in range(6): step(sched, model)
    sched.kv.forget('b')
    finish(sched, model)
    check_answers([s])
    sched.kv.forget('b')
    assert sched.kv.pages.free + 2 == sched.kv.pages.capacity

def test_B60_new_versions_for_ever_leave_nothing_behind():
    sched, model = machine(12, sizes={f'v{i}': 2 for i in range(200)})
    for version in sched.versions.sizes:
        together(sched, model, ask(version, 12, version))
        assert len(sched.kv.pages.holdings) <= 11
    assert not sched.waiting and not sched.running

def test_forks_share_full_blocks_and_copy_the_last():
    "Ten tokens in blocks of four, n = 3: the followers use the first's two blocks and copy positions 8 and 9."
    sched, model = machine()
    first, *others = sched.submit(ask('x', 10, 'a', 6, n=3))
    plans = []
    while not all(s.table for s in others): plans.append(step(sched, model))
    assert [s.name for s in (first, *others)] == ['x.0', 'x.1', 'x.2']
    assert len(plans[-1].copies) == 2 and {source for source,_ in plans[-1].copies} == {first.table.pages[2]}
    assert all(s.cached == 9 and s.table.pages[:2] == first.table.pages[:2] for s in others)
    assert len({s.table.pages[2] for s in (first, *others)}) == 3
    finish(sched, model)
    check_answers([first, *others])
    assert len({tuple(answer(s)) for s in (first, *others)}) == 3

def test_a_follower_starts_alone_when_the_first_has_gone():
    sched, model = machine()
    first, second = sched.submit(ask('x', 30, n=2))
    step(sched, model)
    assert second.waits == 'sibling' and second.overtaken == 0
    sched.cancel(first)
    finish(sched, model)
    check_answers([second])

def test_a_routing_token_is_part_of_the_prefix():
    sched, model = machine()
    routed = ask('r', 12, 'a', routing_token=True)
    cached = [together(sched, model, r)[0].cached for r in (ask('p', 12, 'a'), routed, routed, ask('q', 12, 'a'))]
    assert cached == [0, 0, 12, 11] # 13 tokens, three full blocks

def test_activated_adapters_share_what_comes_before_the_invocation():
    "Invoked at 10 of 14: two blocks of four are the base's, whoever computed them; the third is each version's own."
    sched, model = machine()
    asked = [ask('base', 14), ask('a', 14, 'a', invocation=10), ask('b', 14, 'b', invocation=10),
             ask('b', 14, 'b', invocation=10), ask('plain b', 14, 'b')]
    assert [together(sched, model, r)[0].cached for r in asked] == [0, 8, 8, 12, 0]
    sched, model = machine()
    assert [together(sched, model, r)[0].cached for r in reversed(asked)] == [0, 0, 12, 8, 8]

def test_where_an_adapter_is_invoked_is_part_of_the_block():
    sched, model = machine()
    cached = [together(sched, model, ask('x', 14, 'a', invocation=i))[0].cached for i in (9, 10, 11, 10, 8, 12)]
    assert cached == [0, 8, 8, 12, 8, 8]

# ---- real traffic

def blocks_of(path, most=None):
    with gzip.open(path, 'rt') as f: return [tuple(json.loads(line)['hash_ids']) for line in f][:most]

def replay(prompts):
    "The trace through the scheduler, one request after the other, with an endless cache; a block is one token here."
    sched, _ = machine(sum(map(len, prompts)) + 100, block=1, rows=1, max_len=4096, chunks=((1, 4096),), tokens=4096)
    for i, p in enumerate(prompts):
        s, = sched.submit(Request(f'r{i}', p, max_new_tokens=0))
        while not s.finished: sched.commit(sched.plan(), {})
    return sched

@pytest.mark.parametrize('name, most', [('synthetic', 1500), pytest.param('synthetic', None, marks=pytest.mark.slow),
                                        pytest.param('conversation', None, marks=pytest.mark.slow)])
def test_the_mooncake_trace_through_the_scheduler(shared_data, name, most):
    prompts = blocks_of(shared_data / f'trace_mooncake/{name}_trace.jsonl.gz', most)
    sched, seen, found = replay(prompts), set(), 0
    for p in prompts:
        found += next((i for i,b in enumerate(p) if b not in seen), len(p))
        seen |= set(p)
    assert (sched.kv.total.blocks, sched.kv.total.found) == (sum(map(len, prompts)), found)

def test_a_queue_of_thousands_costs_a_step_little():
    sched, model = machine(60, slots=1, rows=4)
    for i in range(5000): sched.submit(ask(f'r{i}', 20, 'ab'[i % 2], 3))
    start = time.perf_counter()
    for _ in range(50): sched.commit(plan := sched.plan(), {s: (t, None) for s,t in model.run(plan).items()})
    assert time.perf_counter() - start < 5 and sched.running

# ---- printing

def test_a_plan_prints_as_a_table():
    sched, model = machine(17, rows=3)
    for v in ('a', 'b', None): sched.submit(ask(f'r {v}', 10, v, 30, n=2))
    tables = [plan_table(p) for p in finish(sched, model)]
    for line in ('| decode | r a.0 | a | 10 |', '| prefill | r a.0 | a | 0–7 |', 'copies: ', 'preempted: ',
                 'waiting: ', 'prefill: 1×8', '(queued)'):
        assert any(line in t for t in tables), line
    assert plan_table(Plan(3)) == '**step 3**\n\nnothing to compute' == repr(Plan(3))

def test_none_of_this_needs_jax():
    code = 'import sys, lorajax.kv, lorajax.plan, lorajax.fake, lorajax.scheduler; print("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == 'False\n'
