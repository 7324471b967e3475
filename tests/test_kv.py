"Not notebook cells: two real traces, random prompts against a model that remembers everything, and falsified accounts."
import gzip, json, random
from collections import Counter, defaultdict
from itertools import repeat
import pytest
from lorajax.kv import KV, Block, Hits, Prefix, without_copy
from lorajax.pages import Pages
from lorajax.plan import ROUTING_TOKEN

def begin(kv, version, tokens, invocation=0):
    table = kv.open(kv.find(version, tokens, invocation))
    assert kv.grow(table, len(tokens))
    return table

def compute(kv, version, tokens, invocation=0):
    "A sequence that computes all of its tokens and ends."
    table = begin(kv, version, tokens, invocation)
    kv.publish(table, tokens, len(tokens))
    kv.check([table])
    kv.close(table)

# ---- hit rates

def replay(prompts, versions, invocations=None):
    "With an endless cache; each id of the trace stands for a block, and is one token here."
    kv = KV(Pages(sum(map(len, prompts)) + 10), block=1)
    for tokens, version, invocation in zip(prompts, versions, invocations or repeat(0)):
        prefix = kv.find(version, tokens, invocation)
        kv.count(prefix)
        table = kv.open(prefix)
        kv.grow(table, len(tokens))
        kv.publish(table, tokens, len(tokens))
        kv.close(table)
    return kv

def prompts(path):
    with gzip.open(path, 'rt') as f: return [tuple(json.loads(line)['hash_ids']) for line in f]

@pytest.mark.parametrize('name, blocks, found, rate', [('conversation', 288_500, 105_710, '0.366'),
                                                       ('synthetic', 121_877, 77_953, '0.640')])
def test_an_endless_cache_hits_exactly_what_the_mooncake_trace_allows(shared_data, name, blocks, found, rate):
    trace = prompts(shared_data / f'trace_mooncake/{name}_trace.jsonl.gz')
    kv = replay(trace, [None] * len(trace))
    assert (kv.total.blocks, kv.total.found) == (blocks, found) and f'{found / blocks:.3f}' == rate
    kv.pages.check()

def allowed_by_version(trace, versions, sums=None): # sums: what each prompt is counted for; its version -> blocks
    "Leading ids that the version has seen before, counted without any of our code."
    seen, allowed = defaultdict(set), Counter()
    for ids, v, counted in zip(trace, versions, sums or versions):
        allowed[counted] += next((i for i,block in enumerate(ids) if block not in seen[v]), len(ids))
        seen[v] |= set(ids)
    return allowed

def test_with_buckets_the_mooncake_trace_allows_less(shared_data):
    "24 versions at random: what each bucket allows is counted apart, by the trace's own ids."
    trace = prompts(shared_data / 'trace_mooncake/synthetic_trace.jsonl.gz')[:2000]
    rng = random.Random(0)
    versions = [f'v{rng.randrange(24)}' for _ in trace]
    kv = replay(trace, versions)
    assert {v: h.found for v,h in kv.hits.items()} == allowed_by_version(trace, versions)
    assert kv.total.found < replay(trace, [None] * len(trace)).total.found / 2

@pytest.fixture(scope='module')
def synthetic(shared_data): return prompts(shared_data / 'trace_mooncake/synthetic_trace.jsonl.gz')

def sessions(trace, p_switch):
    "Prompts with the same first block are a session, which has one of 500 versions; with p_switch a prompt takes another."
    rng, of, versions, switched = random.Random(0), {}, [], []
    for ids in trace:
        own = of.setdefault(ids[0], f'v{rng.randrange(500)}')
        switched.append(rng.random() < p_switch)
        versions.append(f'v{rng.randrange(500)}' if switched[-1] else own)
    return versions, switched

@pytest.mark.parametrize('p_switch, rate, inter, bound', [
    (0., '0.640', '0.000', '0.640'), (.2, '0.485', '0.000', '0.512'), (.4, '0.336', '0.007', '0.386'),
    (.7, '0.132', '0.006', '0.196'), (1., '0.006', '0.006', '0.006')])
def test_theorem_2_on_the_mooncake_trace(synthetic, p_switch, rate, inter, bound):
    versions, switched = sessions(synthetic, p_switch)
    allowed, blocks = allowed_by_version(synthetic, versions).total(), sum(map(len, synthetic))
    assert replay(synthetic, versions).total.found == allowed and f'{allowed / blocks:.3f}' == rate
    theirs = allowed_by_version(synthetic, versions, switched)[True] # of the prompts that switch
    found = theirs / max(1, sum(len(ids) for ids, s in zip(synthetic, switched) if s))
    at_most = .6396 * (1 - p_switch) + found * p_switch
    assert f'{found:.3f}' == inter and f'{at_most:.3f}' == bound and allowed / blocks < at_most + 1e-4
    routed = replay([(ROUTING_TOKEN,) + ids for ids in synthetic], versions)
    assert routed.total.found == allowed + len(synthetic) - len(set(versions)), "all but a version's first prompt find its token"
    assert replay(synthetic, versions, map(len, synthetic)).total.found == 77_953, 'activated at the end: whoever switches'

def conversations(p_switch, activated, turns=600):
    "Three turns each, as in the notebook, with random switches among 500 adapters; token hit rate, and its two parts."
    rng, kv, parts = random.Random(1), KV(Pages(1 << 17), block=16), dict(stay=Hits(), switch=Hits())
    words = lambda n: [rng.randrange(9999) for _ in range(n)]
    for turn in range(turns * 3):
        if turn % 3 == 0: history, version, switched = words(24), rng.randrange(500), False
        elif switched := rng.random() < p_switch: version = rng.randrange(500)
        tokens = history + words(64)
        history = tokens + words(32)
        invocation = len(tokens) - 4 if activated else 0
        prefix = kv.find(str(version), tokens, invocation)
        kv.count(prefix)
        parts['switch' if switched else 'stay'] += Hits(prefix.length, prefix.computed)
        table = kv.open(prefix)
        kv.grow(table, len(history))
        kv.publish(table, history, len(history))
        kv.close(table)
    return kv.total.rate, parts['stay'].rate, parts['switch'].rate, parts['switch'].tokens / kv.total.tokens

@pytest.mark.parametrize('p_switch', [0., .2, .4, .7, 1.])
def test_theorem_2(p_switch):
    """Buckets: H = H_intra·(1-p) + H_inter·p, where p is the share of tokens looked up after a switch, and H_inter
    nearly 0. By hand, with prompts of 88, 184 and 280 tokens in blocks of 16: buckets find 112 and 208 if nobody
    switches; activated adapters find 80 and 176, up to the block with the last invocation, whoever switches."""
    rate, intra, inter, p = conversations(p_switch, False)
    assert rate == pytest.approx(intra * (1 - p) + inter * p, abs=1e-12) and inter < .01
    if not p_switch: assert rate == pytest.approx((112 + 208) / (88 + 184 + 280))
    activated = conversations(p_switch, True)[0]
    assert activated == pytest.approx((80 + 176) / (88 + 184 + 280), abs=.002)

# ---- against a model that remembers everything

def owners(version, invocation, tokens): # of each position, and where in its block the adapter begins to act
    def owner(p):
        start = p // 4 * 4
        if version is None or start + 4 <= invocation: return None, 0
        return version, max(0, invocation - start)
    return [(t, *owner(p)) for p,t in enumerate(tokens)]

@pytest.mark.parametrize('seed', range(8))
def test_an_endless_cache_finds_exactly_the_longest_known_prefix(seed):
    rng, kv, known = random.Random(seed), KV(Pages(5000), 4), set()
    for _ in range(150):
        version = rng.choice([None, 'a', 'b'])
        tokens = [rng.choice([1, 2]) if rng.random() < .2 else 1 for _ in range(rng.randrange(1, 24))]
        invocation = rng.choice([0, rng.randrange(len(tokens) + 1)]) if version else 0
        marked = owners(version, invocation, tokens)
        whole = [tuple(marked[:n]) for n in range(4, len(tokens) + 1, 4)]
        found = next((i for i,m in enumerate(whole) if m not in known), len(whole))
        prefix = kv.find(version, tokens, invocation)
        assert prefix.found == found and prefix.length == len(tokens)
        assert prefix.computed == min(found * 4, len(tokens) - 1)
        assert len(prefix.blocks) == min(found, (len(tokens) - 1) // 4)
        assert bool(prefix.source) == (found * 4 == len(tokens))
        compute(kv, version, tokens, invocation)
        known |= set(whole)
    assert kv.pages.held['kv'] == len(known)

def test_sequences_that_fill_the_same_blocks_end_with_one_copy():
    kv, tokens = KV(Pages(20), 4), list(range(10))
    tables = [begin(kv, 'a', tokens) for _ in range(3)]
    assert kv.pages.free == 10
    for done in range(1, 11): # in step with each other
        for t in tables: kv.publish(t, tokens, done)
        kv.check(tables)
    assert len({tuple(t.pages[:2]) for t in tables}) == 1 and len({t.pages[2] for t in tables}) == 3 and kv.pages.free == 14
    for t in tables: kv.close(t)
    assert (kv.pages.idle, kv.pages.free) == (2, 17)

def test_what_continues_a_prefix_pins_it():
    kv = KV(Pages(6), 4)
    compute(kv, 'a', range(12))
    table = kv.open(kv.find('a', range(13)))
    assert len(table.blocks) == 3 and kv.pages.available == 2 and kv.grow(table, 13)
    assert not kv.grow(table, 21) and len(table.blocks) == 4
    kv.close(table)
    kv.pages.take('adapter', 3, 'adapter', 0.)
    kv.check()
    assert kv.find('a', range(13)).found == 2, 'the end goes first'

def test_B33_buckets():
    kv = KV(Pages(50), 4)
    for v in (None, 'a'): compute(kv, v, range(12))
    assert [kv.find(v, range(13)).computed for v in (None, 'a', 'b')] == [12, 12, 0]

def test_B45_a_constant_hash(monkeypatch):
    monkeypatch.setattr(Block, '__hash__', lambda self: 7)
    kv, rng = KV(Pages(200), 4), random.Random(0)
    texts = [(v, [rng.randrange(2) for _ in range(9)]) for v in (None, 'a', 'b') for _ in range(6)]
    for v, tokens in texts: compute(kv, v, tokens)
    for v, tokens in texts: assert kv.find(v, tokens).blocks[-1].key.tokens == tuple(tokens[4:8])
    assert len(kv.pages.holdings) == len({(v, *t[:4]) for v,t in texts} | {(v, *t[:8]) for v,t in texts})

def test_B45_parent_tokens_and_version_all_count():
    "(1 2)(3 4) against (1 2 3 4) split elsewhere, the same block behind another one, and another version."
    kv = KV(Pages(50), 2)
    compute(kv, 'a', [1, 2, 3, 4])
    asked = dict(a=([1, 2, 3, 4], [3, 4], [5, 6, 3, 4], [1, 2, 4, 3], [12, 34]), b=([1, 2, 3, 4],))
    found = {v: [kv.find(v, [*t, 9]).found for t in tokens] for v,tokens in asked.items()}
    assert found == dict(a=[2, 0, 0, 1, 0], b=[0])

def test_a_reused_name_of_a_gone_block_finds_nothing():
    "The same tokens behind a block that was evicted and computed anew are another block, until they are computed anew."
    kv = KV(Pages(4), 2)
    compute(kv, None, [1, 2, 3, 4])
    old = kv.find(None, [1, 2, 3, 4, 5]).blocks
    kv.pages.take('x', 3, 'adapter', 0.)
    kv.pages.done('x')
    compute(kv, None, [1, 2])
    new = kv.find(None, [1, 2, 3, 4, 5])
    assert new.found == 1 and new.blocks[0] is not old[0] and new.blocks[0].key == old[0].key

def test_a_prompt_that_is_cached_whole_needs_one_token():
    kv = KV(Pages(50), 4)
    compute(kv, 'a', range(12))
    cases = {n: kv.find('a', range(n)) for n in (1, 4, 5, 8, 11, 12, 13)}
    assert {n: (p.computed, len(p.blocks), bool(p.source)) for n,p in cases.items()} == {
        1: (0, 0, False), 4: (3, 0, True), 5: (4, 1, False), 8: (7, 1, True), 11: (8, 2, False), 12: (11, 2, True),
        13: (12, 3, False)}
    assert without_copy(cases[12], 4).computed == 8 and without_copy(cases[12], 4).source is None
    kv1 = KV(Pages(50), 1)
    compute(kv1, 'a', range(3))
    assert (p := kv1.find('a', range(3))).computed == 2 and not p.source and p.found == 3

def test_the_source_of_a_copy_stays_until_it_is_made():
    kv = KV(Pages(4), 4)
    compute(kv, 'a', range(4))
    table = begin(kv, 'a', range(4))
    source = table.source
    assert kv.pages.available == 1 and source.pins == 1
    kv.publish(table, range(4), 4)
    assert table.source is None and table.blocks == [source]
    kv.close(table)
    for ends_early in (True, False):
        table = begin(kv, 'a', range(4))
        if not ends_early: kv.publish(table, range(4), 3)
        kv.close(table)
        kv.check()
        assert kv.pages.available == 3

def test_whoever_keeps_books_on_adapters_hears_of_evictions():
    left = []
    kv = KV(Pages(5), 4, left=left.extend)
    for v in 'ab':
        kv.pages.take(v, 2, 'adapter', 0.)
        kv.pages.done(v)
    compute(kv, None, range(11))
    assert left == ['a', 'b'] and kv.pages.free == 2

def test_hits_are_counted_per_version():
    kv = KV(Pages(100), 4)
    for v, n in [('a', 10), ('a', 12), (None, 8)]:
        kv.count(kv.find(v, range(n)))
        compute(kv, v, range(n))
    assert dict(kv.hits) == {'a': Hits(22, 8, 5, 2), None: Hits(8, 0, 2, 0)}
    assert kv.total == Hits(30, 8, 7, 2) and kv.total.rate == 8 / 30 and Hits().rate == 0.

def test_forgetting_a_version_leaves_the_base_and_the_others():
    kv = KV(Pages(100), 4)
    for v in (None, 'a', 'b'): compute(kv, v, range(12))
    compute(kv, 'a', range(20), invocation=10)
    running = begin(kv, 'a', [*range(8), 77])
    kv.forget('a')
    kv.check([running])
    assert [kv.find(v, range(13)).found for v in (None, 'a', 'b')] == [3, 2, 3] and kv.pages.idle == 6
    kv.close(running)
    kv.forget('a')
    assert kv.pages.held['kv'] == 6

# ---- names and accounts

def test_a_block_prints_short_however_long_its_prefix():
    kv = KV(Pages(5000), 4)
    compute(kv, 'legal', range(8000))
    last = kv.find('legal', range(8001)).blocks[-1]
    assert repr(last.key) == "Block('legal: 7996 7997 7998 7999')" and len(repr(last)) < 300

@pytest.mark.parametrize('falsify, found', [
    (lambda kv, t: kv.pages.use(t.blocks[0].key), 'counted wrongly'),
    (lambda kv, t: setattr(t, 'published', 1), 'counted wrongly|mistakes'),
    (lambda kv, t: t.blocks.pop(), 'counted wrongly'),
    (lambda kv, t: t.blocks.reverse(), 'counted wrongly|mistakes|one chain'),
    (lambda kv, t: setattr(kv, 'block', 3), 'filed wrongly'),
])
def test_check_finds(falsify, found):
    kv = KV(Pages(20), 4)
    table = begin(kv, 'a', range(10))
    kv.publish(table, range(10), 10)
    kv.check([table])
    falsify(kv, table)
    with pytest.raises(AssertionError, match=found): kv.check([table])

def test_nothing_known_is_a_prefix_too(): assert Prefix('a', 0).kept() == []

def test_ten_thousand_blocks_behind_one_another():
    kv = KV(Pages(10_100), 1)
    for _ in range(3): compute(kv, None, range(10_000))
    assert kv.find(None, range(10_000)).found == 10_000
