"""Hundreds of requests against dense arithmetic, with everything going on at once: nothing that a cell could show."""
import asyncio, random, threading, time
from collections import Counter
from dataclasses import replace
import jax, numpy as np, pytest, tokenizers
import dense
from lorajax import engine as engine_module, native
from lorajax.adapters import Adapter, LoraPair, invoked_at, random_adapter
from lorajax.base import random_base
from lorajax.core import ModelConfig, Refused, ResponseFormat, Sampling
from lorajax.engine import Config, Engine, generate, stream
from lorajax.model import random_tensors
from lorajax.sampler import Room
from lorajax.text import BYTE_ALPHABET, tokenizer_from_codec

M0 = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=160)
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
SMALL = Config(rows=4, slots=3, max_rank=16, chunks=((1, 8), (2, 16)), max_len=160, block=8, memory=160 << 10,
               prompt_logprobs=False)
BASE, WEIGHTS = random_base(M0), random_tensors(M0)
GREEDY = Sampling(max_new_tokens=8, ignore_eos=True)

def nothing_leaks(engine):
    engine.drain()
    def check():
        pages, kept = engine.residents.pages, engine.names.kept
        pages.check()
        assert pages.available == pages.capacity and not engine._live
        named = Counter(n.version for n in engine.names.known.values())
        parts = Counter(p for v in named if v in engine.residents.recipes for p,_ in engine.residents.recipes[v])
        assert dict(kept) == dict(named + parts), "nothing is kept but what names mean"
    engine.call(check)

@pytest.fixture
def checked(monkeypatch):
    "An engine maker whose engines check their books after every step, and give everything back."
    made, step = [], engine_module._run_plan
    def and_check(engine, plan):
        step(engine, plan)
        engine.scheduler.check()
    monkeypatch.setattr(engine_module, '_run_plan', and_check)
    def make(config=SMALL, base=BASE):
        made.append(Engine(base, config))
        return made[-1]
    yield make
    for engine in made:
        if not engine.failed: nothing_leaks(engine)
        engine.close()

def fleet():
    "24 adapters: ranks 1 to 16, several sets of targets, two activated, one with a routing token."
    targets = [('q_proj', 'v_proj'), LINEARS, ('down_proj',), ('k_proj', 'o_proj', 'up_proj')]
    plain = [random_adapter(M0, f'a{i}', 1 + 5 * i % 16, targets[i % 4], seed=i, std=.3) for i in range(21)]
    odd = [random_adapter(M0, f'x{i}', 4, LINEARS, seed=50 + i, std=.3).modules for i in range(3)]
    return plain + [Adapter('x0', odd[0], invocation=(7, 9)), Adapter('x1', odd[1], invocation=(8,)),
                    Adapter('x2', odd[2], routing=np.random.default_rng(5).normal(size=32))]

def cold(adapter, ids, n, memo={}):
    "What a request on its own must say."
    key = adapter and adapter.fingerprint, tuple(ids), n
    if key not in memo:
        w = dense.merged(WEIGHTS, adapter.modules) if adapter else WEIGHTS
        start = invoked_at(adapter.invocation, ids) if adapter else 0
        routed = adapter is not None and adapter.routing is not None
        memo[key] = dense.greedy(M0, w, [-1] * routed + list(ids), n, before=WEIGHTS, start=start,
                                 routing=adapter.routing if routed else None)
    return memo[key]

def tokens(completion): return [t.token for t in completion.tokens]

def test_500_requests_of_24_versions_in_an_arena_too_small(checked):
    rng, engine, adapters = random.Random(0), checked(), {a.name: a for a in fleet()}
    for a in adapters.values(): engine.load(a)
    adapters[None] = None
    openings = [[rng.randrange(256) for _ in range(32)] for _ in range(4)]
    waiting, ends = [], Counter()
    def collect(one):
        name, ids, n, running, cancel_after = one
        got, finish = [], None
        for e in running:
            finish = e.finish
            if e.scored: got.append(e.scored.token)
            if finish is None and cancel_after is not None and len(got) > cancel_after: running.cancel()
        want = cold(adapters[name], ids, n)
        assert got == want[:len(got)], f'{name} after {ids} said {got}, not {want}'
        assert finish == 'length' and len(got) == n or finish == 'cancelled' and cancel_after is not None
        ends[finish] += 1
    for i in range(520):
        name = rng.choice([None, *(n for n in adapters if n)][:1 + min(24, 2 + i // 12)])
        ids = rng.choice(openings)[:rng.randrange(8, 33)] + [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        if name in ('x0', 'x1') and rng.random() < .8: ids[len(ids) // 2:len(ids) // 2 + 2] = [7, 9] if name == 'x0' else [8]
        n = rng.randrange(1, 10) if i % 4 else 60
        running = engine.submit(ids, name, replace(GREEDY, max_new_tokens=n), priority=rng.choice([0, 0, 1]))
        waiting.append((name, ids, n, running, rng.randrange(3) if rng.random() < .1 else None))
        if waiting[-1][-1] == 0: running.cancel() # at once; the others' when so many tokens were read
        if len(waiting) > 14: collect(waiting.pop(rng.randrange(len(waiting))))
    for one in waiting: collect(one)
    stats = engine.stats()
    total = sum(stats.hits.values(), type(next(iter(stats.hits.values())))())
    assert total.cached > 200 and stats.preemptions and stats.swaps > 24, stats
    assert ends['cancelled'] > 10, ends

def test_B60_versions_that_left_leave_nothing(checked):
    engine, sizes = checked(), []
    for i in range(60):
        engine.load(random_adapter(M0, 'a', seed=i)) # the name moves on, and the version before leaves
        list(engine.submit([i, 2, 3, 4, 5, 6, 7, 8, 9, 10], 'a', GREEDY))
        looked = sum(h.tokens for h in engine.stats().hits.values())
        sizes.append((len(engine.kv.hits), len(engine.names.kept), len(engine.stats().adapters), len(jax.live_arrays())))
    assert len(set(sizes[5:])) == 1, sizes
    assert looked == 60 * 10, 'those of versions that left are counted still'

def test_B61_zero_compilations_in_traffic(checked):
    engine, compiled = checked(), []
    for a in fleet()[:8]: engine.load(a)
    listen = lambda event, seconds, **kw: compiled.append(event) if 'backend_compile' in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rules = [replace(GREEDY, temperature=1., seed=1, top_p=.9, presence_penalty=.5, logit_bias={3: 2.}), GREEDY,
                 replace(GREEDY, logprobs=3, n=2)]
        for i in range(12): generate(engine, [[1, 2, 3] * (i + 1)] * 3, [f'a{i % 8}', f'a{(i + 3) % 8}', None], rules)
    finally: jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled

def test_composition_and_reload_under_the_same_name(checked):
    engine = checked()
    one, two = (random_adapter(M0, 'one', 3, LINEARS, seed=s, std=.3) for s in (1, 2))
    engine.load(one), engine.load(two, 'two')
    engine.compose('mix', dict(one=.7, two=-.4))
    def weighed(**weights): # the dense sum
        w = dict(WEIGHTS)
        for a,f in weights.items():
            parts = {p: LoraPair(m.a, m.b, f * m.scale) for p,m in dict(one=one, two=two)[a].modules.items()}
            w = dense.merged(w, parts)
        return w
    ids, want = list(b'composed'), dense.greedy(M0, weighed(one=.7, two=-.4), list(b'composed'), 8)
    assert tokens(generate(engine, [ids], ['mix'], GREEDY)[0][0]) == want
    slow = engine.submit(ids, 'one', replace(GREEDY, max_new_tokens=100))
    engine.load(two, 'one') # the name moves; the running request doesn't
    assert tokens(generate(engine, [ids], ['one'], GREEDY)[0][0]) == cold(two, ids, 8)
    assert [e.scored.token for e in slow] == cold(one, ids, 100)
    assert tokens(generate(engine, [ids], ['mix'], GREEDY)[0][0]) == want, 'a composition keeps its parts'
    engine.unload('mix')
    with pytest.raises(Refused, match="no adapter 'mix'"): engine.submit(ids, 'mix')
    with pytest.raises(Refused, match='to unload'): engine.unload('mix')

def test_B33_B35_versions_never_share_a_prefix(checked):
    engine, ids = checked(), list(range(100, 125)) # three full pages
    adapters = {f'on_{t}': random_adapter(M0, f'on_{t}', 4, (t,), seed=3, std=.5) for t in ('q_proj', 'v_proj', 'down_proj')}
    for a in adapters.values(): engine.load(a)
    for name in [None, *adapters, *adapters, None]:
        out, = generate(engine, [ids], [name], GREEDY)[0]
        assert tokens(out) == cold(adapters.get(name), ids, 8)
    hits = engine.stats().hits
    assert all(h.found == 3 for h in hits.values()) and len(hits) == 4, 'each found its own blocks, the second time'

def test_B43_preempted_answers_are_those_of_a_run_alone(checked):
    "Room for two of three growing sequences, under a, b, a; greedy ones and seeded ones; tokens, text and counts."
    adapters = {n: random_adapter(M0, n, 8, LINEARS, seed=i, std=.3) for i,n in enumerate('ab')}
    engine = checked(replace(SMALL, chunks=((1, 8),), memory=144 << 10))
    for adapter in adapters.values(): engine.load(adapter)
    for temperature in (0., 1.):
        asked = [([9, 8, 7 + i, 6, 5, 4], n, Sampling(max_new_tokens=140, ignore_eos=True, temperature=temperature, seed=i))
                 for i,n in enumerate('aba')]
        calm = engine.stats().preemptions
        alone = [generate(engine, [ids], [name], rules)[0][0] for ids,name,rules in asked]
        before = engine.stats()
        assert before.preemptions == calm
        streams = [engine.submit(*one) for one in asked]
        events = [list(s) for s in streams]
        now = engine.stats()
        assert now.preemptions > before.preemptions and now.generated_tokens - before.generated_tokens == 3 * 140
        for got, want in zip(events, alone):
            assert [e.scored.token for e in got] == tokens(want) and ''.join(e.text for e in got) == want.text
    assert len({tuple(tokens(c)) for c in alone}) == 3

def test_B39_two_adapters_in_quick_turns_over_pages_that_are_used_again(checked):
    "Long prompts of one opening are read in chunks under a and b, while short requests take turns and some are cancelled."
    adapters = {n: random_adapter(M0, n, 8, LINEARS, seed=i, std=.3) for i,n in enumerate('ab')}
    engine, rng = checked(replace(SMALL, chunks=((1, 8),), memory=144 << 10)), random.Random(1)
    for adapter in adapters.values(): engine.load(adapter)
    opening, done = [rng.randrange(256) for _ in range(80)], Counter()
    for i in range(10):
        anchors = [(n, opening + [i, ord(n)], engine.submit(opening + [i, ord(n)], n, GREEDY)) for n in 'ab']
        short = [('ab'[k % 2], [k, 3], engine.submit([k, 3], 'ab'[k % 2], GREEDY)) for k in range(12)]
        for k in (3, 8): short[k][2].cancel()
        for name, ids, running in (*anchors, *short):
            got, want = [e.scored.token for e in running if e.scored], cold(adapters[name], ids, 8)
            assert got == want[:len(got)]
            done[len(got)] += 1
    assert done[8] >= 10 * 12, 'all but the cancelled ones'

def test_an_activated_adapter_shares_the_base_prefix(checked):
    engine, ids = checked(), [*range(50, 66), 7, 9, 1]
    active = fleet()[-3]
    engine.load(active)
    generate(engine, [ids], [None], GREEDY)
    running = engine.submit(ids, 'x0', GREEDY)
    assert [e.scored.token for e in running] == cold(active, ids, 8) != cold(None, ids, 8)
    assert running.cached == 16

def test_n_answers_fork_after_the_prompt(checked):
    engine, ids = checked(), list(range(30, 50))
    warm = Sampling(max_new_tokens=6, temperature=1., seed=5, n=3, ignore_eos=True)
    out, = generate(engine, [ids], None, warm)
    again, alone = generate(engine, [ids, ids], None, [warm, replace(warm, n=1)])
    assert [tokens(c) for c in out] == [tokens(c) for c in again] and tokens(alone[0]) == tokens(out[0])
    assert len({tuple(tokens(c)) for c in out}) == 3
    greedy, = generate(engine, [ids], None, replace(GREEDY, n=2))
    assert [tokens(c) for c in greedy] == [cold(None, ids, 8)] * 2

def test_B37_prompt_logprobs_over_a_cached_prefix(checked):
    engine = checked(replace(SMALL, prompt_logprobs=True))
    for length in (1, 3, 4, 5, 8, 15, 16, 17, 32, 33):
        ids = [(7 * i + length) % 256 for i in range(length)]
        want = np.array(dense.logits(M0, WEIGHTS, ids))
        want -= np.log(np.exp(want - want.max(-1, keepdims=True)).sum(-1, keepdims=True)) + want.max(-1, keepdims=True)
        for rules in (replace(GREEDY, max_new_tokens=1), replace(GREEDY, max_new_tokens=0, echo=True),
                      replace(GREEDY, max_new_tokens=1, echo=True)):
            out, = generate(engine, [ids], None, replace(rules, logprobs=2))[0]
            if not rules.echo: continue
            assert [t.token for t in out.prompt] == ids and out.prompt[0].logprob is None and len(out.tokens) == rules.max_new_tokens
            got = [t.logprob for t in out.prompt[1:]]
            np.testing.assert_allclose(got, [want[i, t] for i,t in enumerate(ids[1:])], atol=1e-4)
            for i,t in enumerate(out.prompt[1:]): assert [k for k,_ in t.top] == list(np.argsort(-want[i])[:2])

def test_stops_formats_and_logprobs_reach_the_answer(checked):
    engine = checked()
    text = generate(engine, ['abc'], None, GREEDY)[0][0].text
    cut = next(c for c in text if c.isprintable())
    out = generate(engine, ['abc'], None, replace(GREEDY, stop=cut))[0][0]
    assert out.finish == 'stop' and out.text == text[:text.index(cut)]
    digits = Sampling(max_new_tokens=20, response_format=ResponseFormat('regex', '[0-9]{3}-[0-9]{2}'), logprobs=2)
    out = generate(engine, ['abc'], None, digits)[0][0]
    assert out.finish == 'stop' and len(out.text) == 6 and out.text[3] == '-' and out.text.replace('-', '').isdigit()
    assert all(t.logprob <= t.top[0][1] + 1e-6 for t in out.tokens)

def test_events_come_to_threads_and_coroutines(checked):
    engine = checked()
    async def both():
        async def one(name):
            return [e.scored.token async for e in engine.submit([1, 2, 3], name, GREEDY)]
        return await asyncio.gather(one(None), one(None))
    assert asyncio.run(both()) == [cold(None, [1, 2, 3], 8)] * 2
    events = stream(engine, [[1, 2]] * 3, None, replace(GREEDY, max_new_tokens=100))
    next(events), events.close() # whoever stops listening cancels
    engine.drain()

def test_B41_what_can_never_fit_is_refused_and_blocks_nobody(checked):
    engine = checked()
    with pytest.raises(Refused, match='the limit is 160'): engine.submit([1] * 150, None, replace(GREEDY, max_new_tokens=11))
    page = 2 * 2 * 8 * 16 * 4 # layers, keys and values, positions, channels, bytes
    small = checked(replace(SMALL, memory=9 * page)) # eight pages of 8, for positions within the limit of 160
    for prompt, new in ((100, 8), (50, 30)):
        with pytest.raises(Refused, match='the pool has 8'): small.submit([1] * prompt, None, replace(GREEDY, max_new_tokens=new))
    for e in (engine, small): assert tokens(generate(e, [[1, 2, 3]], None, GREEDY)[0][0]) == cold(None, [1, 2, 3], 8)

@pytest.mark.parametrize('make, sentence', [
    (lambda e: e.submit(''), 'empty prompt'), (lambda e: e.submit([300]), 'token id 300'), (lambda e: e.submit(3), 'type int'),
    (lambda e: e.submit([1], 'nobody'), "no adapter 'nobody'"),
    (lambda e: e.load(random_adapter(M0, 'wide', 17)), 'rank 17, and the engine serves up to 16'),
    (lambda e: e.load(random_adapter(M0, 'head', 4, ('lm_head',))), 'larger outside'),
    (lambda e: e.load(random_adapter(M0), 'a.b'), 'without dots'),
    (lambda e: e.compose('sum', dict(nobody=1.)), "no adapter 'nobody'"),
    (lambda e: generate(e, 'hello'), 'put a single prompt into a list'),
    (lambda e: e.submit([1], None, replace(GREEDY, logit_bias={400: 1.})), 'token id 400'),
    (lambda e: e.submit([1], None, replace(GREEDY, echo=True, logprobs=1)), 'no log-probabilities of prompts')])
def test_refusals_come_at_once_and_leave_nothing(checked, make, sentence):
    engine = checked()
    with pytest.raises(Refused, match=sentence): make(engine)

def test_deadlines_priorities_and_closing():
    engine = Engine(BASE, SMALL)
    late = engine.submit([1, 2], None, replace(GREEDY, max_new_tokens=150), timeout=.05)
    assert [e.finish for e in late][-1] == 'deadline'
    running = engine.submit([1, 2], None, replace(GREEDY, max_new_tokens=150))
    engine.close()
    assert [e.finish for e in running][-1] == 'cancelled'
    with pytest.raises(Refused, match='closed'): engine.submit([1])

def test_head_and_embedding_adapters_are_served_where_there_is_room(checked):
    engine = checked(replace(SMALL, outside=8))
    both = random_adapter(M0, 'both', 5, ('lm_head', 'embed_tokens', 'q_proj'), std=.3)
    engine.load(both)
    ids = list(b'edges')
    out = generate(engine, [ids, ids], ['both', None], GREEDY)
    assert [tokens(c[0]) for c in out] == [cold(both, ids, 8), cold(None, ids, 8)]

@pytest.mark.parametrize('kernel', ['', 'lora=pallas-interpret'])
def test_adapters_are_read_in_their_pages(checked, monkeypatch, kernel):
    monkeypatch.setenv('LORAJAX_BACKEND', kernel)
    engine, (red, *_, blue) = checked(replace(SMALL, paged=True, chunks=((1, 8),))), fleet()[:4]
    for a in (red, blue): engine.load(a)
    engine.load(blue, 'packed', dtype='int8')
    engine.compose('mix', {red.name: .5, blue.name: -.5})
    ids, names = list(b'in their pages'), [None, red.name, blue.name, 'mix', 'packed']
    out = [tokens(c) for c, in generate(engine, [ids] * 5, names, GREEDY)]
    assert out[:3] == [cold(a, ids, 8) for a in (None, red, blue)]
    halves = {p: LoraPair(m.a, m.b, -.5 * m.scale) for p,m in blue.modules.items()}
    mixed = dense.merged(dense.merged(WEIGHTS, {p: LoraPair(m.a, m.b, .5 * m.scale) for p,m in red.modules.items()}), halves)
    assert out[3] == dense.greedy(M0, mixed, ids, 8)
    residents, version = engine.residents, engine.names.known[blue.name].version
    alone = lambda: tokens(generate(engine, [ids], [blue.name], GREEDY)[0][0])
    assert alone() == out[2]
    def moved(): # as when others wanted its pages while it was idle
        before = residents.tables[version]
        for v in [v for v in residents.recipes if v in residents.pages]: residents.drop(v)
        residents.drop(version)
        residents.pages.take('another', 3, 'adapter', 0.)
        return before
    before = engine.call(moved)
    assert alone() == out[2] and residents.tables[version] != before
    engine.call(lambda: (residents.pages.done('another'), residents.pages.drop('another')))

def test_every_program_updates_the_arena_in_place(checked):
    engine = checked(replace(SMALL, memory=64 << 20))
    arena = engine.residents.arena
    for shape, program in engine.runner.programs.items():
        used = program.memory_analysis()
        assert used.alias_size_in_bytes >= arena.nbytes and used.temp_size_in_bytes < .05 * arena.nbytes, shape

@pytest.fixture(scope='module')
def edge():
    "One engine for the corners: ranks that fill no whole block, and room outside the layers."
    size = Config(rows=2, slots=2, max_rank=4, outside=8, chunks=((1, 8),), max_len=160, block=8, memory=256 << 10)
    with Engine(BASE, size) as engine: yield engine

@pytest.fixture
def cornered(edge):
    "The same, with no names at the beginning and its books in order at the end."
    assert not edge.failed and not edge.names.known
    yield edge
    for name in sorted(edge.names.known): edge.unload(name)
    nothing_leaks(edge)

LONG = replace(GREEDY, max_new_tokens=100)

def test_a_listener_that_fails_ends_only_its_own_request(cornered):
    async def first():
        async for e in cornered.submit([1, 2, 3], None, LONG): return e
    assert asyncio.run(first()).scored.token == cold(None, [1, 2, 3], 8)[0]
    def fails(event): raise ValueError('a listener may do anything')
    deaf, other = cornered.submit([4, 5], None, LONG), cornered.submit([1, 2, 3], None, GREEDY)
    try: deaf.listen(fails)
    except ValueError: deaf.cancel() # there was an event already, which it heard on this thread
    assert [e.scored.token for e in other] == cold(None, [1, 2, 3], 8)
    assert list(other) == [], 'it was heard to its end before'

def test_a_listener_may_ask_but_not_wait(cornered):
    said, ended = [], threading.Event()
    def listen(event):
        for wait in (cornered.stats, cornered.close, lambda: cornered.load(random_adapter(M0, 'late'))):
            try: wait()
            except Refused as e: said.append(str(e))
        if event.finish: ended.set()
    gate = threading.Event()
    cornered._inbox.put(gate.wait) # so that the listener is there before the first event
    running = cornered.submit([1, 2, 3], None, replace(GREEDY, max_new_tokens=1))
    running.listen(listen)
    gate.set()
    assert ended.wait(20) and len(said) == 3 and all('called by a listener' in s for s in said)

def test_ranks_round_up_to_blocks_and_are_served_whole(cornered):
    adapters = [random_adapter(M0, f'r{rank}', rank, LINEARS, seed=rank, std=.3) for rank in (1, 4, 6, 8)]
    for a in adapters: cornered.load(a)
    ids = list(b'two at once, a block each')
    out = generate(cornered, [ids] * 4, [a.name for a in adapters], GREEDY)
    assert [tokens(c) for c, in out] == [cold(a, ids, 8) for a in adapters]
    with pytest.raises(Refused, match='rank 9, and the engine serves up to 8'): cornered.load(random_adapter(M0, 'r9', 9))

def test_each_slot_has_room_outside_the_layers(cornered):
    adapters = [random_adapter(M0, f'out{i}', 8, ('embed_tokens', 'lm_head'), seed=i, std=.3) for i in range(2)]
    for a in adapters: cornered.load(a)
    ids = list(b'edges')
    out = generate(cornered, [ids] * 2, [a.name for a in adapters], GREEDY)
    assert [tokens(c) for c, in out] == [cold(a, ids, 8) for a in adapters]
    with pytest.raises(Refused, match='with rank 16, .* larger outside'): cornered.compose('sum', dict(out0=1., out1=1.))

def test_two_names_of_one_version_add_up(cornered):
    red, ids = random_adapter(M0, 'red', 4, LINEARS, seed=1, std=.3), list(b'twice')
    cornered.load(red), cornered.load(red, 'also')
    cornered.compose('sum', dict(red=.25, also=.75))
    assert tokens(generate(cornered, [ids], ['sum'], GREEDY)[0][0]) == cold(red, ids, 8)

def test_files_that_cannot_be_deleted_or_do_not_fit(cornered, monkeypatch):
    version = cornered.load(random_adapter(M0, 'red', 4))
    monkeypatch.setattr(cornered.store, 'budget', 1)
    with pytest.raises(Refused, match='larger store_memory'): cornered.adopt(version, 'again')
    file = cornered.store.folder.file(version)
    file.unlink(), file.mkdir() # which `unlink` refuses
    cornered.unload('red')
    file.rmdir()
    assert tokens(generate(cornered, [[1, 2, 3]], None, GREEDY)[0][0]) == cold(None, [1, 2, 3], 8)

def test_an_adapter_loaded_while_it_leaves_is_there(cornered, monkeypatch):
    red, loads, forget = random_adapter(M0, 'red', 4, LINEARS, seed=1, std=.3), [], cornered.kv.forget
    def meanwhile(version): # in the middle of leaving, another thread loads the same adapter
        loads.append(threading.Thread(target=cornered.load, args=(red, 'again')))
        loads[0].start()
        time.sleep(.3)
        forget(version)
    version = cornered.load(red)
    monkeypatch.setattr(cornered.kv, 'forget', meanwhile)
    cornered.unload('red')
    monkeypatch.undo()
    loads[0].join()
    assert cornered.store.folder.file(version).exists()
    assert tokens(generate(cornered, [[1, 2, 3]], ['again'], GREEDY)[0][0]) == cold(red, [1, 2, 3], 8)

def test_a_routing_token_is_no_token_of_the_prompt(cornered):
    routed, ids = fleet()[-1], list(b'routed')
    cornered.load(routed)
    out, = generate(cornered, [ids], ['x2'], replace(GREEDY, echo=True, logprobs=1))[0]
    assert [t.token for t in out.prompt] == ids and tokens(out) == cold(routed, ids, 8)
    want = dense.logits(M0, dense.merged(WEIGHTS, routed.modules), [-1, *ids], routing=routed.routing)
    want = np.array(jax.nn.log_softmax(want.astype(np.float32)))
    np.testing.assert_allclose([t.logprob for t in out.prompt], [want[i, t] for i,t in enumerate(ids)], atol=1e-3)

def test_cached_counts_for_the_first_answer(cornered):
    ids = list(range(200, 220))
    running = cornered.submit(ids, None, replace(GREEDY, n=3))
    assert sum(e.finish is not None for e in running) == 3 and running.cached == 0, 'the others found what the first computed'

def test_a_tokenizer_larger_than_the_embedding(cornered, monkeypatch):
    codec = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_ALPHABET), []))
    codec.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = tokenizers.decoders.ByteLevel()
    codec.add_special_tokens(['<|end|>', *(f'<|spare {i}|>' for i in range(100))])
    monkeypatch.setattr(cornered, 'base', replace(BASE, tokenizer=tokenizer_from_codec(codec, dict(eos_token='<|end|>'))))
    digits = Sampling(max_new_tokens=20, response_format=ResponseFormat('regex', '[0-9]{3}'))
    assert generate(cornered, ['abc'], None, digits)[0][0].text.isdigit()
    with pytest.raises(Refused, match='token id 257'): cornered.submit([1, 257])

@pytest.mark.parametrize('given, sentence', [(dict(priority='high'), 'give a whole number'), (dict(priority=.5), 'whole number'),
                                             (dict(timeout=float('nan')), 'give seconds'), (dict(timeout='5'), 'give seconds')])
def test_what_the_scheduler_compares_is_checked(cornered, given, sentence):
    with pytest.raises(Refused, match=sentence): cornered.submit([1, 2, 3], None, GREEDY, **given)

@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_failed_engine_ends_every_answer_and_closes(monkeypatch):
    class Broken:
        most, outside, room = 8, 0, Room(mask=9)
        def __init__(self, *_): pass
        def run(self, *_): raise RuntimeError('the device is lost')
    monkeypatch.setattr(engine_module, 'Runner', Broken)
    engine, gate = Engine(BASE, SMALL), threading.Event()
    def lost(*_): raise AssertionError('the books are in no order')
    monkeypatch.setattr(engine.scheduler, 'cancel', lost)
    engine._inbox.put(gate.wait)
    streams = [engine.submit([1, 2, 3], None, replace(GREEDY, n=n)) for n in (1, 2)]
    gate.set()
    for s in streams:
        assert [(e.finish, e.error) for e in s] == [('error', 'RuntimeError: the device is lost')] * s.n
    with pytest.raises(Refused, match='has failed'): engine.submit([1])
    engine.close()
    folder, pools = engine.store.folder.path, (engine.store.loader, engine.residents.watch)
    assert not folder.exists() and not any(t.is_alive() for pool in pools for t in pool._threads)

def test_a_bfloat16_engine_serves_what_float32_arithmetic_says(checked):
    "On a CPU with a C compiler that is the native products: in decode steps, beside prompts, and with several adapters at once."
    shape = replace(M0, n_kv_heads=4, vocab_size=320)
    base, ids = random_base(shape, 'bfloat16'), [list(f'half of {i}'.encode()) for i in range(12)]
    engine = checked(replace(SMALL, memory=320 << 10, outside=8), base)
    adapters = {f'h{i}': random_adapter(shape, f'h{i}', 3 + 5 * i, LINEARS, seed=i, std=.3) for i in range(3)}
    adapters['head'] = random_adapter(shape, 'head', 5, ('lm_head', 'q_proj'), std=.3)
    for a in adapters.values(): engine.load(a)
    use = [None, *adapters] * 3
    out = generate(engine, ids, use[:12], replace(GREEDY, logprobs=1))
    if native.registered()[0]: assert {'dot=native', 'lora=native'} <= set(engine.stats().ran)
    weights = {k: w.astype(jax.numpy.bfloat16).astype('f4') for k,w in random_tensors(shape).items()}
    def error(whose): # mean, in log-probability, if rows had used these adapters
        found = []
        for prompt, name, (one,) in zip(ids, whose, out):
            w = dense.merged(weights, adapters[name].modules) if name else weights
            told = jax.nn.log_softmax(dense.logits(shape, w, prompt + tokens(one)).astype(np.float32))
            found += [abs(t.logprob - told[len(prompt) - 1 + i, t.token]) for i,t in enumerate(one.tokens)]
        return np.mean(found)
    right, wrong = error(use), error(use[1:] + use[:1])
    assert right < .1 and wrong > 5 * right, (right, wrong)
