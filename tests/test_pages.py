"Not notebook cells: thousands of random steps against a slow model, a real trace, and accounts falsified on purpose."
import csv, gzip, random, time
import xml.etree.ElementTree as ET
from collections import Counter, OrderedDict
from dataclasses import dataclass
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                 run_state_machine_as_test)
from lorajax.core import Refused
from lorajax.pages import Holding, NoRoom, Pages, page_map

def state(pages):
    "Everything that a pool remembers, in comparable form."
    return (list(pages._free), pages._idle.pages, pages._idle.age, [h.key for h in pages._idle.order],
            {k: (h.tenant, h.cost, [p.key for p in h.parts], h.pages, h.uses, h.pins, h.dependents, h.dropped, h.rank)
             for k,h in pages.holdings.items()})

def put(pages, *keys, n=1, cost=1., parts=()):
    "Brings in idle holdings, one after the other; all keys that were evicted for them."
    evicted = []
    for key in keys:
        evicted += pages.take(key, n, 'adapter', cost, parts)[1]
        pages.done(key)
    return evicted

def touch(pages, key):
    pages.use(key)
    pages.done(key)

# ---- the model: it keeps no counts and no order, and searches for everything

@dataclass
class Entry:
    n: int
    parts: list
    cost: float
    tenant: str
    uses: int = 1
    dropped: bool = False
    rank: tuple = ()

class Model:
    def __init__(self, capacity): self.capacity, self.held, self.age, self.time = capacity, {}, 0., 0
    def behind(self, keys): return set(keys).union(*(self.behind(self.held[k].parts) for k in keys))
    def needed(self): return self.behind([k for k,e in self.held.items() if e.uses])
    def usable(self): return [k for k,e in self.held.items() if not e.dropped]
    def size(self, keys): return sum(self.held[k].n for k in keys)
    @property
    def free(self): return self.capacity - self.size(self.held)
    def can_go(self, spared=()):
        kept = self.needed() | set(spared) | {p for e in self.held.values() for p in e.parts}
        return [k for k in self.held if k not in kept]
    def room(self, parts): return self.free + self.size(set(self.held) - self.needed() - self.behind(parts))

    def sweep(self, spared=()):
        "Dropped holdings that nothing keeps leave."
        left = set()
        while gone := [k for k in self.can_go(spared) if self.held[k].dropped]:
            for k in gone: del self.held[k]
            left |= set(gone)
        return left

    def follow_evictions(self, evicted, n, spared):
        "Replays the pool's choice, each time among the holdings of lowest rank; equal time: they fell idle together."
        evicted = list(evicted)
        while self.free < n:
            lowest = min(self.held[k].rank for k in self.can_go(spared))
            first = evicted[0]
            may_go = first in self.can_go(spared) and self.held[first].rank == lowest
            assert may_go, f'{first!r} was not the first to go'
            self.age = max(self.age, lowest[0])
            del self.held[evicted.pop(0)]
            left = self.sweep(spared)
            assert set(evicted[:len(left)]) == left
            del evicted[:len(left)]
        assert not evicted, f'{evicted} left for nothing'

    def done(self, key):
        before = self.needed()
        self.held[key].uses -= 1
        self.time += 1
        for k in before - self.needed():
            self.held[k].rank = (self.age + self.held[k].cost / max(1, self.held[k].n), self.time)
        return self.sweep()

picks, costs, sizes = st.integers(0, 10**6), st.sampled_from([0., .5, 1., 1., 1., 4.]), st.integers(0, 5)
NAMES = [f'h{i}' for i in range(16)]

class PoolAgainstModel(RuleBasedStateMachine):
    steps, outcomes = 0, Counter()

    @initialize(capacity=st.integers(1, 12), reserved=st.integers(0, 2))
    def start(self, capacity, reserved):
        self.pages, self.model = Pages(capacity + reserved, reserved), Model(capacity)
        self.content = ['free'] * (capacity + reserved) # what the holdings' owners have written into the pages

    def pick(self, keys, i): return keys[i % len(keys)]
    def names(self): return [k for k in NAMES if k not in self.model.held]
    def counted(self, outcome):
        type(self).steps += 1
        type(self).outcomes[outcome] += 1
    def unchanged(self, error, call, *args):
        before = state(self.pages)
        with pytest.raises(error) as raised: call(*args)
        assert type(raised.value) is error and state(self.pages) == before
        return str(raised.value)

    def ends(self, key):
        "A request ends its use of `key`."
        left = self.pages.done(key)
        assert len(left) == len(set(left)) and set(left) == self.model.done(key)
        self.counted('done, leaving' if left else 'done')

    def take(self, n, cost, tenant, parts, i, ends=False):
        "Takes and compares; the new key, or None when there was no room."
        m, key = self.model, self.pick(self.names(), i)
        least = n + m.size(m.behind(parts))
        if m.room(parts) < n:
            never = least > m.capacity
            message = self.unchanged(Refused if never else NoRoom, self.pages.take, key, n, tenant, cost, parts)
            wanted = least if never else n
            limit = f'the pool has {m.capacity};' if never else f'{m.room(parts)} can be had;'
            assert f' {wanted} page' in message and limit in message
            return self.counted('refused' if least > m.capacity else 'no room')
        given, evicted = self.pages.take(key, n, tenant, cost, parts)
        m.follow_evictions(evicted, n, m.behind(parts))
        m.held[key] = Entry(n, list(parts), cost, tenant)
        assert len(set(given)) == n
        for p in given: self.content[p] = key
        self.counted('take, evicting' if evicted else 'take')
        if ends: self.ends(key)
        return key

    @precondition(lambda self: self.names())
    @rule(n=sizes, cost=costs, tenant=st.sampled_from(['adapter', 'kv']), i=picks, ends=st.booleans())
    def take_plain(self, n, cost, tenant, i, ends): self.take(n, cost, tenant, [], i, ends)

    @precondition(lambda self: self.names() and self.model.usable())
    @rule(n=sizes, cost=costs, i=picks, chosen=st.lists(picks, min_size=1, max_size=3), ends=st.booleans())
    def take_with_parts(self, n, cost, i, chosen, ends):
        self.take(n, cost, 'kv', [self.pick(self.model.usable(), c) for c in chosen], i, ends)

    @precondition(lambda self: self.names() and self.model.usable())
    @rule(i=picks, chosen=st.lists(picks, min_size=2, max_size=3), ends=st.booleans())
    def compose(self, i, chosen, ends):
        self.take(0, 0., 'adapter', list(dict.fromkeys(self.pick(self.model.usable(), c) for c in chosen)), i, ends)

    def alone(self):
        return [k for k in self.model.usable() if (e := self.model.held[k]).uses and not e.parts
                and not any(k in other.parts for other in self.model.held.values())]

    @precondition(lambda self: self.names() and self.alone())
    @rule(i=picks, j=picks, chosen=st.lists(picks, max_size=3))
    def rename(self, i, j, chosen):
        key, new, usable = self.pick(self.alone(), i), self.pick(self.names(), j), self.model.usable()
        parts = list(dict.fromkeys(k for c in chosen if (k := self.pick(usable, c)) != key))
        self.pages.rename(key, new, parts)
        entry = self.model.held.pop(key)
        entry.parts, self.model.held[new] = parts, entry
        for p in self.pages.holdings[new].pages: self.content[p] = new
        self.counted('rename')

    @precondition(lambda self: self.names())
    @rule(n=sizes, cost=costs, i=picks)
    def take_and_fail_to_fill(self, n, cost, i):
        if (key := self.take(n, cost, 'adapter', [], i)) is None: return
        free = self.pages.free
        self.ends(key)
        assert self.pages.drop(key) == [key]
        del self.model.held[key]
        assert self.pages.free == free + n
        self.counted('failed to fill')

    @precondition(lambda self: self.model.usable())
    @rule(i=picks)
    def use(self, i):
        key = self.pick(self.model.usable(), i)
        self.pages.use(key)
        self.model.held[key].uses += 1
        self.counted('use')

    @precondition(lambda self: self.model.needed())
    @rule(i=picks)
    def done(self, i): self.ends(self.pick([k for k,e in self.model.held.items() if e.uses], i))

    @precondition(lambda self: self.model.needed())
    @rule()
    def all_done(self):
        for key in [k for k,e in self.model.held.items() for _ in range(e.uses)]: self.ends(key)

    @precondition(lambda self: self.model.usable())
    @rule(i=picks)
    def drop(self, i):
        key = self.pick(self.model.usable(), i)
        left = self.pages.drop(key)
        self.model.held[key].dropped = True
        assert len(left) == len(set(left)) and set(left) == self.model.sweep()
        self.counted('drop, leaving' if left else 'drop')

    @precondition(lambda self: len(self.model.usable()) < len(self.model.held))
    @rule(i=picks)
    def keep(self, i):
        key = self.pick([k for k,e in self.model.held.items() if e.dropped], i)
        self.pages.keep(key)
        self.model.held[key].dropped = False
        self.counted('keep')

    @rule(i=picks)
    def slip(self, i):
        "Every misuse of one name fails and changes nothing."
        key, p = self.pick(NAMES, i), self.pages
        held, usable = key in self.model.held, key in self.model.usable()
        assert (key in p) == usable
        if held: self.unchanged(AssertionError, p.take, key, 1, 'kv', 1.)
        if not held or usable: self.unchanged(AssertionError, p.keep, key)
        if not usable:
            for call in (p.use, p.drop): self.unchanged(AssertionError, call, key)
            self.unchanged(AssertionError, p.rename, key, 'new')
            self.unchanged(AssertionError, p.take, 'new', 0, 'kv', 1., [key])
        if not held or not self.model.held[key].uses: self.unchanged(AssertionError, p.done, key)
        self.counted('slip')

    @invariant()
    def agrees(self):
        if not hasattr(self, 'pages'): return
        p, m = self.pages, self.model
        p.check()
        assert p.holdings.keys() == m.held.keys() and (p.free, p._idle.age) == (m.free, m.age)
        assert p.idle == m.size(set(m.held) - m.needed()) and p.available == m.room([])
        assert sorted(h.key for h in p._idle.order) == sorted(m.can_go())
        for key in m.usable(): assert p.room([key]) == m.room([key])
        for tenant in ('adapter', 'kv'):
            assert p.held[tenant] == m.size([k for k,e in m.held.items() if e.tenant == tenant])
        for k,e in m.held.items():
            h = p.holdings[k]
            assert len(h.pages) == e.n and all(self.content[page] == k for page in h.pages)
            assert ([part.key for part in h.parts], h.uses, h.dropped) == (e.parts, e.uses, e.dropped)
            assert (h.pins > 0) == (k in m.needed())

def random_steps(examples, **options):
    PoolAgainstModel.steps, PoolAgainstModel.outcomes = 0, Counter()
    run_state_machine_as_test(PoolAgainstModel, settings=settings(
        max_examples=examples, stateful_step_count=60, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), **options))
    return PoolAgainstModel.steps, PoolAgainstModel.outcomes

def test_ten_thousand_random_steps_agree_with_the_model():
    steps, outcomes = random_steps(250, derandomize=True)
    assert steps - outcomes['slip'] >= 10_000
    assert len(outcomes) == 13 and min(outcomes.values()) >= 30, outcomes

@pytest.mark.slow
def test_many_more_random_steps(): assert random_steps(3000)[0] >= 150_000

# ---- the order of eviction

def lru(keys, slots):
    "Textbook least recently used: for each access the key evicted, None, or 'hit'."
    cache = OrderedDict()
    for key in keys:
        if key in cache:
            cache.move_to_end(key)
            yield 'hit'
        else:
            yield cache.popitem(last=False)[0] if len(cache) == slots else None
            cache[key] = True

def accesses(keys, slots, cost):
    pages = Pages(slots + 1)
    for key in keys:
        if key in pages:
            touch(pages, key)
            yield 'hit'
        else: yield next(iter(put(pages, key, cost=cost)), None)
    pages.check()

@pytest.mark.parametrize('slots, cost', [(1, 1.), (2, 0.), (7, .1), (40, 1/3), (100, 1e-9)])
def test_exactly_lru_with_equal_costs_and_sizes(slots, cost):
    keys = random.Random(slots).choices(range(60), [1 / i for i in range(1, 61)], k=5000)
    assert list(accesses(keys, slots, cost)) == list(lru(keys, slots))

def test_lru_hit_rates_on_the_real_trace(shared_data):
    with gzip.open(shared_data / 'trace_alibaba_genai_lora/lora_sequence.csv.gz', 'rt') as f:
        loras = [use.split(':')[0] for row in csv.DictReader(f) for use in row['loras'].split('|') if use]
    assert (len(loras), len(set(loras))) == (16_709, 874)
    rates = {slots: Counter(accesses(loras, slots, .004))['hit'] / len(loras) for slots in (4, 8, 16, 32, 64)}
    assert {s: f'{r:.3f}' for s,r in rates.items()} == {4: '0.752', 8: '0.830', 16: '0.857', 32: '0.881', 64: '0.901'}

def test_recent_means_the_end_of_a_use():
    pages = Pages(4)
    pages.take('long', 1, 'adapter', 1.)
    put(pages, 'a', 'b')
    pages.done('long')
    assert put(pages, 'c', 'd', 'e') == ['a', 'b', 'long']

def test_cost_matters():
    """By hand. The ranks are a 5, b 1, c 1. Then each newcomer evicts one, the age rises to its rank, and it gets one
    more: d evicts b (d 2), e c (2), f d (3), g e (3), h f (4), i g (4), j h (5), k i (5), and l evicts a, older than j
    and k."""
    pages = Pages(4)
    put(pages, 'a', cost=5.)
    put(pages, 'b', 'c')
    assert ''.join(put(pages, *'defghijkl')) == 'bcdefghia'
    assert pages._idle.age == 5.

def test_cost_counts_per_page():
    pages = Pages(9)
    put(pages, 'four pages', n=4, cost=4.)
    put(pages, 'two pages', n=2, cost=3.)
    put(pages, 'one page', cost=1.25)
    put(pages, 'free', cost=0.)
    assert put(pages, 'all', n=8) == ['free', 'four pages', 'one page', 'two pages']

def test_a_use_refreshes_the_parts():
    pages = Pages(4)
    put(pages, 'part', 'other')
    put(pages, 'whole', parts=['part'])
    touch(pages, 'whole')
    assert put(pages, 'x', 'y', 'z') == ['other', 'whole', 'part']

def test_the_age_never_falls():
    "The part is cheap, and only its dear dependent kept it: when both have gone, the age is still the dear one's rank."
    pages = Pages(4)
    put(pages, 'part')
    put(pages, 'whole', cost=5., parts=['part'])
    put(pages, 'other', cost=9.)
    assert put(pages, 'x', n=2, cost=6.) == ['whole', 'part'] and pages.holdings['x'].rank[0] == 5. + 6. / 2
    assert put(pages, 'y', n=3) == ['x', 'other']

def test_both_tenants_share_one_order():
    pages = Pages(5)
    for key, tenant, cost in [('a1', 'adapter', 1.), ('k1', 'kv', 1.), ('a2', 'adapter', 1.), ('k2', 'kv', 3.)]:
        pages.take(key, 1, tenant, cost)
        pages.done(key)
    assert pages.held == {'adapter': 2, 'kv': 2}
    assert put(pages, 'new', n=3) == ['a1', 'k1', 'a2']
    assert pages.held == {'adapter': 3, 'kv': 1}

# ---- parts

def chain(pages, length, name='kv', in_use=False):
    for i in range(length):
        pages.take(f'{name} {i}', 1, 'kv', 1., [f'{name} {i-1}'] if i else [])
        if i: pages.done(f'{name} {i-1}')
    if not in_use: pages.done(f'{name} {length - 1}')

def test_leaves_go_first():
    pages = Pages(7)
    chain(pages, 3)
    chain(pages, 3, 'other')
    assert put(pages, 'x', n=5) == ['kv 2', 'kv 1', 'kv 0', 'other 2', 'other 1']
    assert [k for k in pages.holdings] == ['other 0', 'x']

def test_two_prefixes_share_their_beginning():
    pages = Pages(5)
    chain(pages, 2)
    for leaf in ('left', 'right'): put(pages, leaf, parts=['kv 1'])
    pages.use('left')
    with pytest.raises(NoRoom, match='needs 2 pages, and 1 can be had'): pages.take('x', 2, 'kv', 1.)
    assert put(pages, 'x') == ['right']
    pages.done('left')
    assert put(pages, 'y', n=4) == ['x', 'left', 'kv 1', 'kv 0']

def test_a_part_is_not_evicted_for_its_own_dependent():
    pages = Pages(5)
    put(pages, 'part', n=2)
    pages.take('running', 1, 'kv', 1.)
    before = state(pages)
    with pytest.raises(NoRoom, match="'whole' needs 2 pages, and 1 can be had"):
        pages.take('whole', 2, 'kv', 9., ['part'])
    assert state(pages) == before
    assert pages.take('whole', 1, 'kv', 9., ['part']) == ((4,), [])
    with pytest.raises(NoRoom, match="'x' needs 1 page, and 0 can be had"): pages.take('x', 1, 'kv', 1.)

def test_a_dropped_part_stays_as_long_as_a_composition_of_it():
    pages = Pages(6)
    put(pages, 'a', 'b', n=2)
    put(pages, 'a+b', n=0, cost=0., parts=['a', 'b'])
    assert pages.drop('a') == [] and 'a' not in pages and pages.holdings['a'].pages == (1, 2)
    touch(pages, 'a+b')
    with pytest.raises(AssertionError, match="'a' is held already"): pages.take('a', 2, 'adapter', 1.)
    assert put(pages, 'c', n=2) == ['a+b', 'a']
    pages.take('a', 1, 'adapter', 1.)
    pages.check()

def test_a_prefix_can_be_dropped_in_any_order():
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        pages = Pages(5)
        chain(pages, 4, in_use=True)
        for i in order: assert pages.drop(f'kv {i}') == []
        assert pages.done('kv 3') == ['kv 3', 'kv 2', 'kv 1', 'kv 0'] and pages.free == 4
        pages.check()

def test_a_prefix_longer_than_the_stack_is_deep():
    N = 5000
    pages = Pages(N + 1)
    chain(pages, N, in_use=True)
    assert pages.idle == 0
    pages.use(f'kv {N-1}'), pages.done(f'kv {N-1}'), pages.done(f'kv {N-1}')
    pages.check()
    assert pages.idle == N and put(pages, 'x', n=N) == [f'kv {i}' for i in reversed(range(N))]
    pages.drop('x')
    chain(pages, N)
    for i in range(N - 1): assert pages.drop(f'kv {i}') == []
    assert len(pages.drop(f'kv {N-1}')) == N and pages.free == N
    pages.check()

def test_compositions_of_compositions():
    "Sixty layers of two, each made of both below: 2**60 ways down, walked once."
    pages = Pages(4)
    put(pages, 'a0', 'b0')
    for i in range(1, 60): put(pages, f'a{i}', f'b{i}', n=0, parts=[f'a{i-1}', f'b{i-1}'])
    with pytest.raises(Refused, match="'x' needs 4 pages with all that it depends on, and the pool has 3"):
        pages.take('x', 2, 'kv', 1., ['a59'])
    touch(pages, 'b59')
    assert put(pages, 'x', n=3)[-2:] == ['a0', 'b0'] and pages.held == {'adapter': 3}
    pages.check()

# ---- all or nothing

def test_no_room_changes_nothing_and_others_go_on():
    pages = Pages(9)
    chain(pages, 2)
    put(pages, 'idle', n=2)
    put(pages, 'a+b', n=0, parts=['idle', 'kv 1'])
    pages.take('running', 3, 'adapter', 1.)
    before = state(pages)
    for n, parts, room in [(6, [], 5), (4, ['idle'], 3), (4, ['kv 1'], 3), (5, ['kv 0'], 4), (2, ['a+b'], 1)]:
        said = f"'x' needs {n} pages, and {room} can be had; wait for a running request to end"
        with pytest.raises(NoRoom, match=said):
            pages.take('x', n, 'kv', 1., parts)
        assert state(pages) == before
    assert pages.take('small', 1, 'kv', 1.)[1] == []
    pages.done('running')
    assert pages.take('x', 4, 'kv', 1., ['idle'])[1] == ['running', 'a+b', 'kv 1']
    pages.check()

def test_no_room_is_no_refusal(): assert not issubclass(NoRoom, Refused)

def test_B41_what_can_never_fit_is_refused_at_once():
    pages = Pages(9)
    pages.take('other', 8, 'kv', 1.)
    said = "'prompt' needs 13 pages with all that it depends on, and the pool has 8; shorten"
    with pytest.raises(Refused, match=said):
        pages.take('prompt', 13, 'kv', 1.)
    with pytest.raises(NoRoom): pages.take('prompt', 8, 'kv', 1.)
    pages.done('other')
    assert put(pages, 'short') == ['other']

def test_B41_a_growing_sequence_ends_at_the_pool_and_not_in_a_wait():
    pages = Pages(9)
    chain(pages, 8, in_use=True)
    before = state(pages)
    with pytest.raises(Refused, match='needs 9 pages .* the pool has 8'): pages.take('kv 8', 1, 'kv', 1., ['kv 7'])
    assert state(pages) == before

@pytest.mark.parametrize('n, cost', [(-1, 1.), (1.5, 1.), ('1', 1.), (1, -1.), (1, float('nan')), (1, float('inf'))])
def test_nonsense_is_a_slip(n, cost):
    pages = Pages(4)
    before = state(pages)
    with pytest.raises(AssertionError, match='n must be whole and cost finite, and neither negative'):
        pages.take('x', n, 'kv', cost)
    assert state(pages) == before

def test_a_block_is_filed_when_it_is_full():
    pages = Pages(6)
    chain(pages, 2, in_use=False)
    (page,), _ = pages.take('filling', 1, 'kv', 1.)
    pages.use('filling')
    for key, new, parts in [('filling', 'kv 1', []), ('filling', 'x', ['y']), ('kv 0', 'x', []), ('kv 1', 'x', [])]:
        before = state(pages)
        with pytest.raises(AssertionError): pages.rename(key, new, parts)
        assert state(pages) == before
    pages.rename('filling', 'kv 2', ['kv 1'])
    assert 'filling' not in pages and pages.holdings['kv 2'].pages == (page,) and pages.available == 2
    assert (pages.done('kv 2'), pages.done('kv 2'), pages.available) == ([], [], 5)
    assert pages.take('all', 5, 'adapter', 1.)[1] == ['kv 2', 'kv 1', 'kv 0']

def test_room_beside_what_must_stay():
    pages = Pages(9)
    chain(pages, 3, in_use=False)
    pages.take('a', 2, 'adapter', 1.)
    assert (pages.room(), pages.room(['kv 0']), pages.room(['kv 2', 'kv 1', 'a'])) == (6, 5, 3)

@pytest.mark.parametrize('n_pages, reserved', [(0, 0), (1, 1), (4, 4), (4, -1)])
def test_a_pool_has_something_to_give(n_pages, reserved):
    with pytest.raises(AssertionError, match='leave some to give out'): Pages(n_pages, reserved)

def test_reserved_pages_are_never_given_out():
    assert Pages(6).take('x', 5, 'kv', 1.)[0] == (1, 2, 3, 4, 5)
    assert Pages(6, reserved=2).take('x', 4, 'kv', 1.)[0] == (2, 3, 4, 5)
    assert Pages(2, reserved=0).take('x', 2, 'kv', 1.)[0] == (0, 1)

def test_the_page_freed_last_is_given_first():
    pages = Pages(10)
    put(pages, 'a', 'b', n=3)
    pages.drop('a')
    assert pages.take('c', 4, 'adapter', 1.)[0] == (1, 2, 3, 7)

# ---- unloading, and capacity over time

def test_B46_unload_frees_the_memory():
    pages = Pages(13)
    put(pages, 'a', 'b', 'c', n=3)
    free = pages.free
    assert pages.drop('b') == ['b'] and pages.free == free + 3 and 'b' not in pages
    put(pages, 'd', n=3)
    counts = pages.free, pages.idle, dict(pages.held), len(pages.holdings)
    for _ in range(50):
        assert put(pages, 'b', n=3) == [] and pages.drop('b') == ['b']
        assert (pages.free, pages.idle, dict(pages.held), len(pages.holdings)) == counts
        pages.check()

def test_a_drop_taken_back():
    pages = Pages(5)
    put(pages, 'a', n=2)
    put(pages, 'a+', n=0, parts=['a'])
    assert pages.drop('a') == []
    pages.keep('a')
    touch(pages, 'a')
    assert pages.drop('a+') == ['a+'] and 'a' in pages and pages.drop('a') == ['a']
    pages.take('b', 4, 'adapter', 1.)
    assert pages.drop('b') == []
    pages.keep('b')
    with pytest.raises(AssertionError, match="'b' is not waiting to leave"): pages.keep('b')
    assert pages.done('b') == [] and pages.idle == 4
    pages.check()

def test_B46_unload_while_in_use_frees_the_memory_at_the_end():
    pages = Pages(5)
    pages.take('b', 4, 'adapter', 1.)
    pages.use('b')
    assert pages.drop('b') == [] and pages.available == 0
    with pytest.raises(AssertionError, match="'b' was dropped, and stays only for those that had it before; keep it"):
        pages.use('b')
    with pytest.raises(AssertionError, match="'b' was dropped"): pages.drop('b')
    assert (pages.done('b'), pages.done('b'), pages.free) == ([], ['b'], 4)
    with pytest.raises(AssertionError, match="'b' is not in use"): pages.done('b')
    with pytest.raises(AssertionError, match="'b' is not held"): pages.drop('b')

def test_B55_six_holdings_through_one_slot():
    pages, names = Pages(2), [f'adapter-{i}' for i in range(6)]
    for turn in range(18):
        (page,), evicted = pages.take(names[turn % 6], 1, 'adapter', .004)
        assert page == 1 and evicted == ([names[(turn - 1) % 6]] if turn else [])
        pages.done(names[turn % 6])
        pages.check()

def test_B60_new_names_for_ever_leave_nothing_behind():
    pages = Pages(5)
    for i in range(2000):
        put(pages, f'new {i}', n=2)
        if i % 3 == 0: pages.drop(f'new {i}')
        assert len(pages.holdings) <= 2 and len(pages._idle.order) <= 2
    for _ in range(2000): touch(pages, 'new 1999')
    assert len(pages._idle.order) <= 2
    pages.check()

def test_twenty_thousand_holdings():
    "A search through all holdings at each eviction takes minutes."
    N, start = 20_000, time.perf_counter()
    pages = Pages(N + 1)
    put(pages, *range(2 * N))
    for key in range(N, 2 * N): touch(pages, key)
    assert put(pages, 'all', n=N) == list(range(N, 2 * N))
    assert time.perf_counter() - start < 20

# ---- the accounts and the drawing

def falsified():
    pages = Pages(9)
    chain(pages, 2)
    put(pages, 'a', n=2)
    pages.take('a+kv', 0, 'adapter', 0., ['a', 'kv 1'])
    put(pages, 'b')
    pages.check()
    return pages, pages.holdings

@pytest.mark.parametrize('falsify, found', [
    (lambda p, h: p._free.pop(), 'every page once'),
    (lambda p, h: p._free.append(0), 'every page once'),
    (lambda p, h: setattr(h['b'], 'pages', h['a'].pages), 'every page once'),
    (lambda p, h: h.update(c=h.pop('b')), 'misfiled'),
    (lambda p, h: setattr(h['a+kv'], 'parts', (*h['a+kv'].parts, Holding('gone', 'kv', 1.))), 'a part has gone'),
    (lambda p, h: setattr(h['b'], 'uses', 1), 'counted wrongly'),
    (lambda p, h: setattr(h['a'], 'pins', 2), 'counted wrongly'),
    (lambda p, h: setattr(h['kv 0'], 'pins', 0), 'counted wrongly'),
    (lambda p, h: setattr(h['kv 0'], 'dependents', 0), 'counted wrongly'),
    (lambda p, h: setattr(h['b'], 'dropped', True), 'nothing keeps it'),
    (lambda p, h: setattr(p._idle, 'pages', 0), 'idle pages'),
    (lambda p, h: p._idle.order.clear(), 'order of eviction'),
    (lambda p, h: p._idle.order.append(h['a']), 'order of eviction'),
])
def test_check_finds(falsify, found):
    pages, holdings = falsified()
    falsify(pages, holdings)
    with pytest.raises(AssertionError, match=found): pages.check()

def test_whether_it_is_held_is_one_look():
    "A thread that asks while the owner evicts gets an answer."
    class Evicting(dict):
        def __contains__(self, key): return True
    pages = Pages(4)
    pages.holdings = Evicting()
    assert 'gone' not in pages

def test_page_map():
    pages = Pages(14)
    pages.take('<&>', 2, 'adapter', 1.)
    put(pages, ('kv', 1))
    svg = '{http://www.w3.org/2000/svg}'
    drawing = ET.fromstring(page_map(pages, across=5))
    cells = drawing.findall(f'{svg}g')
    titles = ['page 0 ·', 'page 1 <&>', 'page 2 <&>', "page 3 ('kv', 1)"] + [f'page {p} ' for p in range(4, 14)]
    assert [c.find(f'{svg}title').text for c in cells] == titles
    assert [c.find(f'{svg}rect').get('fill-opacity') for c in cells[:5]] == ['1', '1', '1', '0.3', '1']
    assert len({c.get('transform') for c in cells}) == 14
    assert drawing.get('height') == '86' and drawing.get('width') == '262'
    assert repr(pages) == 'Pages(2 in use, 1 idle, 10 free)'
