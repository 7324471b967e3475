"""The arena under long random use, and counts of compilations, allocations, memory: too long and dry for a lesson."""
import gc, hashlib, random, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np, psutil, pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
import dense
from flax import nnx
from lorajax.adapters import LoraPair, random_adapter
from lorajax.base import random_base
from lorajax.model import KV, random_tensors
from lorajax.rows import fetch_rows, plan_rows
from lorajax.arena import Arena, Residents, compose, kv_view, tile_view
from lorajax.core import ModelConfig, Refused
from lorajax.images import PageLayout, image_of, layout_of, rows_of
from lorajax.pages import NoRoom
from lorajax.store import ImageFolder, Store, chunk_sizes, default_budget, pinned

TINY = ModelConfig(vocab_size=257, width=64, mlp_width=96, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, max_len=64)
LAYOUT = PageLayout(TINY, 16)
SEVEN = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')

def compilations():
    "Counts XLA compilations from here on; read `.n`."
    class Count: n = 0
    def listen(event, seconds, **kw):
        if event == '/jax/core/compile/backend_compile_duration': Count.n += 1
    jax.monitoring.register_event_duration_secs_listener(listen)
    return Count

def digest(pages): return hashlib.sha256(np.ascontiguousarray(pages).tobytes()).hexdigest()

class Machine(RuleBasedStateMachine):
    "Requests come and go, adapters are added, dropped, composed and removed; no byte of a live version ever changes."
    steps = 0

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(ImageFolder(self.folder.name, LAYOUT), budget=300_000)
        self.residents = Residents(self.store, ARENA)
        self.digests, self.used, self.made = {}, [], 0

    def teardown(self):
        self.store.close()
        self.folder.cleanup()

    @rule(rank=st.integers(1, 40), modules=st.sets(st.sampled_from(SEVEN), min_size=1, max_size=3))
    def add(self, rank, modules):
        version = f'v{self.made}'
        self.made += 1
        adapter = random_adapter(TINY, version, rank, modules, seed=self.made)
        self.store.add(version, adapter)
        self.digests[version] = digest(image_of(adapter, LAYOUT).pages)

    def versions(self): return sorted(self.digests) + sorted(self.residents.recipes)

    @rule(pick=st.integers(0, 1000), weights=st.lists(st.sampled_from([.5, 1., -.25]), min_size=1, max_size=3))
    def compose(self, pick, weights):
        versions = self.versions()
        if not self.digests: return
        compose(self.residents, {versions[(pick + i) % len(versions)]: w for i,w in enumerate(weights)})

    @rule(pick=st.integers(0, 1000))
    def use(self, pick):
        if not (versions := self.versions()): return
        version, before = versions[pick % len(versions)], dict(self.residents.tables)
        self.residents.ahead(version)
        for part,_ in self.residents.recipe(version):
            if part not in self.residents.pages: self.store.fetch(part)
        try:
            if self.residents.use(version): self.used.append(version)
        except (NoRoom, Refused):
            unchanged = version in self.residents.recipes or self.residents.tables == before
            assert unchanged, 'a refused use must change nothing'

    @rule(pick=st.integers(0, 1000))
    def done(self, pick):
        if self.used: self.residents.done(self.used.pop(pick % len(self.used)))

    @rule(pick=st.integers(0, 1000))
    def drop(self, pick):
        versions = [v for v in self.versions() if v in self.residents.pages]
        if versions: self.residents.drop(versions[pick % len(versions)])

    @invariant()
    def books_balance(self):
        Machine.steps += 1
        self.residents.pages.check()
        assert set(self.residents.tables) == {h.key for h in self.residents.pages.holdings.values() if h.pages}

    @invariant()
    def no_byte_of_a_live_version_changes(self):
        if not self.residents.tables: return
        words = np.asarray(ARENA.words)
        for version, ids in self.residents.tables.items():
            assert digest(words[list(ids)]) == self.digests[version], version

ARENA = Arena(LAYOUT, 40)

def test_random_use_keeps_every_live_byte(request):
    "At least 10,000 steps; five times as many with --slow."
    runs = 2000 if request.config.getoption('--slow') else 400
    run_state_machine_as_test(Machine, settings=settings(max_examples=runs, stateful_step_count=100, deadline=None,
                              suppress_health_check=list(HealthCheck), derandomize=True))
    assert Machine.steps >= 25 * runs

def swarm(folder, n=200, ranks=(4, 8, 16, 32, 64)):
    store = Store(ImageFolder(folder, LAYOUT))
    for i in range(n): store.add(f'v{i}', random_adapter(TINY, f'a{i}', ranks[i % len(ranks)], SEVEN, seed=i))
    return store

@pytest.fixture(scope='module')
def many(tmp_path_factory): return swarm(tmp_path_factory.mktemp('many'))

def test_B61_swapping_200_versions_compiles_nothing_and_changes_no_bit(many):
    largest = many.folder.known['v4'].n_pages
    residents = Residents(many, Arena(LAYOUT, 1 + 20 * largest))
    residents.use('v0'), residents.done('v0')
    count, order = compilations(), random.Random(0).choices(range(200), k=400)
    for i in order:
        assert residents.use(f'v{i}')
        residents.done(f'v{i}')
    assert count.n == 0
    words = np.asarray(residents.arena.words)
    assert len(residents.tables) >= 20
    for version, ids in residents.tables.items():
        i = int(version[1:])
        fresh = image_of(random_adapter(TINY, f'a{i}', (4, 8, 16, 32, 64)[i % 5], SEVEN, seed=i), LAYOUT)
        np.testing.assert_array_equal(words[list(ids)], fresh.pages)

def test_B60_memory_is_flat_over_2000_swaps(many):
    residents = Residents(many, Arena(LAYOUT, 1 + 20 * many.folder.known['v4'].n_pages))
    def swaps(n):
        for i in random.Random(n).choices(range(200), k=n): residents.use(f'v{i}'), residents.done(f'v{i}')
        residents.arena.words.block_until_ready()
        gc.collect()
        return len(jax.live_arrays()), psutil.Process().memory_info().rss
    arrays, rss = swaps(200)
    arrays_after, rss_after = swaps(2000)
    assert arrays_after == arrays, 'a swap must leave no array behind'
    assert rss_after - rss < 32 << 20

def test_write_works_in_place():
    arena = Arena(LAYOUT, 200)
    for n,program in arena.programs.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == arena.nbytes and memory.temp_size_in_bytes < arena.nbytes / 20, n

def test_B59_a_step_in_flight_keeps_what_it_reads():
    "The step started before a swap sees the old pages, the one after it the new; the donated handle is gone at once."
    residents_words = Arena(LAYOUT, 8)
    image = lambda value: pinned(np.full((1, LAYOUT.words), value, np.uint16))
    step = jax.jit(lambda words: words[3].astype(jnp.uint32).sum())
    residents_words.write(image(1), [3])
    old = residents_words.words
    first = step(old)
    residents_words.write(image(2), [3])
    second = step(residents_words.words)
    assert (int(first), int(second)) == (LAYOUT.words, 2 * LAYOUT.words)
    with pytest.raises(RuntimeError, match='deleted'): np.asarray(old)

def test_B62_host_copies_are_whole_arrays_in_pinned_memory():
    pages = np.random.default_rng(0).integers(0, 1 << 16, (5, LAYOUT.words), np.uint16)
    chunks = pinned(pages)
    assert [c.sharding.memory_kind for c in chunks] == ['pinned_host'] * 2 and [len(c) for c in chunks] == [4, 1]
    arena = Arena(LAYOUT, 16)
    arena.write(chunks, [9, 2, 15, 4, 7])
    np.testing.assert_array_equal(np.asarray(arena.words)[[9, 2, 15, 4, 7]], pages)
    assert not np.asarray(arena.words)[[0, 1, 3, 5, 6, 8]].any()
    np.testing.assert_array_equal(np.concatenate([np.asarray(c) for c in chunks]), pages)

def test_every_bit_pattern_survives():
    "NaN patterns of bfloat16 included: words are integers, so nothing canonicalises them."
    pages = np.arange(1 << 16, dtype=np.uint16).reshape(-1, LAYOUT.words)
    arena = Arena(LAYOUT, len(pages) + 1)
    arena.write(pinned(pages), range(1, len(pages) + 1))
    np.testing.assert_array_equal(np.asarray(arena.words)[1:], pages)

def test_views_are_the_same_words():
    words = np.random.default_rng(0).integers(0, 0x3f80, (4, LAYOUT.words), np.uint16)
    numbers = words.view('bfloat16') if hasattr(np, 'bfloat16') else words.view(jnp.bfloat16)
    found = np.asarray(kv_view(jnp.array(words), LAYOUT))
    np.testing.assert_array_equal(found[2, 1, 1, 5], numbers.reshape(4, 2, 2, 16, 32)[2, 1, 1, 5])
    np.testing.assert_array_equal(np.asarray(tile_view(jnp.array(words), LAYOUT))[7], numbers.reshape(-1, 8, 64)[7])

def test_B50_parallel_loads_of_one_version_are_one(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    adapter = random_adapter(TINY, 'a', 8)
    with ThreadPoolExecutor(20) as pool: list(pool.map(lambda _: store.add('v', adapter), range(20)))
    assert [p.name for p in tmp_path.iterdir()] == ['v.safetensors'] and list(store.chunks) == ['v']
    store.chunks.clear()
    reads, real = [], store.folder.read
    store.folder.read = lambda version: (reads.append(version), time.sleep(.05), real(version))[2]
    with ThreadPoolExecutor(20) as pool: got = list(pool.map(lambda _: store.fetch('v'), range(20)))
    assert reads == ['v'] and all(g is got[0] for g in got)

def test_B46_dropping_frees_the_pages_and_removing_forgets_the_version(tmp_path):
    store, arena = Store(ImageFolder(tmp_path, LAYOUT)), Arena(LAYOUT, 64)
    residents = Residents(store, arena)
    for name in 'abc': store.add(name, random_adapter(TINY, name, 8))
    for name in 'abc': residents.use(name), residents.done(name)
    free = residents.pages.free
    for _ in range(50):
        residents.drop('b'), store.remove('b')
        with pytest.raises(Refused, match='has no version b'): residents.use('b')
        store.add('b', random_adapter(TINY, 'b', 8))
        residents.use('b'), residents.done('b')
    assert residents.pages.free == free and sorted(p.stem for p in tmp_path.iterdir()) == ['a', 'b', 'c']

def test_B55_capacity_is_no_lifetime_limit(tmp_path):
    adapters = {f'v{i}': random_adapter(TINY, f'a{i}', 8, seed=i) for i in range(6)}
    one = image_of(adapters['v0'], LAYOUT)
    store = Store(ImageFolder(tmp_path, LAYOUT), budget=4 * one.nbytes)
    residents = Residents(store, Arena(LAYOUT, 1 + len(one.pages)))
    for v,a in adapters.items(): store.add(v, a)
    for _ in range(3):
        for v,a in adapters.items():
            store.fetch(v)
            assert residents.use(v) and list(residents.tables) == [v]
            on_device = np.asarray(residents.arena.words)[list(residents.tables[v])]
            np.testing.assert_array_equal(on_device, image_of(a, LAYOUT).pages)
            residents.done(v)
    assert len(store.chunks) == 4

def test_B56_a_deleted_file_fails_only_its_own_request(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    for name in 'ab': store.add(name, random_adapter(TINY, name, 8))
    store.chunks.clear()
    (tmp_path / 'a.safetensors').unlink()
    with pytest.raises(Refused, match='can no longer be read'): store.fetch('a')
    assert store.fetch('b') and not store.reading
    with pytest.raises(Refused, match='can no longer be read'): store.fetch('a')

def test_disk_reads_do_not_block_others(tmp_path):
    "While one version is read slowly, its request is told no, and another's use goes on."
    store, gate = Store(ImageFolder(tmp_path, LAYOUT)), threading.Event()
    for name in 'ab': store.add(name, random_adapter(TINY, name, 8))
    del store.chunks['a']
    real = store.folder.read
    store.folder.read = lambda version: (gate.wait(5), real(version))[1]
    residents = Residents(store, Arena(LAYOUT, 64))
    assert residents.use('a') is False
    assert residents.use('b') is True and residents.use('a') is False
    gate.set()
    store.fetch('a')
    assert residents.use('a') is True

def test_composition_keeps_its_parts_and_adds_up(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    residents = Residents(store, Arena(LAYOUT, 64))
    for i,name in enumerate('abc'): store.add(name, random_adapter(TINY, name, 8, seed=i))
    mix = compose(residents, {'a': .7, 'b': -.3})
    nested = compose(residents, {mix: 2., 'a': 1.})
    assert dict(residents.recipe(nested)) == {'a': 2.4, 'b': -.6}
    assert mix == compose(residents, {'b': -.3, 'a': .7}) != compose(residents, {'a': .7, 'b': .3})
    residents.use(mix)
    held = residents.pages.capacity - residents.pages.free
    assert set(residents.tables) == {'a', 'b'} and held == 2 * store.folder.known['a'].n_pages
    residents.drop('a')
    assert 'a' in residents.tables, 'a dropped part stays as long as a composition uses it'
    residents.done(mix), residents.drop(mix)
    assert 'a' not in residents.tables
    with pytest.raises(Refused, match='must be a finite number'): compose(residents, {'a': float('nan')})

@pytest.mark.parametrize('rank', [1, 7, 8, 9, 40, 64, 512])
def test_images_hold_the_rank_rows(rank):
    adapter = random_adapter(TINY, rank=rank, targets=SEVEN + ('lm_head', 'embed_tokens'))
    image = image_of(adapter, LAYOUT)
    for path, pair in adapter.modules.items():
        a, b = rows_of(image, path)
        np.testing.assert_array_equal(a, pair.a.astype(a.dtype))
        np.testing.assert_array_equal(b, (np.float32(pair.scale) * pair.b.T).astype(b.dtype))

def test_mixed_ranks_fill_the_arena():
    "Half rank 8, half rank 64, on SmolLM2's shapes: at least 95 % of what the bytes allow is resident."
    c = ModelConfig(vocab_size=49152, width=576, mlp_width=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                    max_len=8192, tied=True)
    layout, pool = PageLayout(c, 16), 2 << 30
    from lorajax.core import module_shapes
    from lorajax.images import pieces_of
    shapes = {p: widths for p,widths in module_shapes(c).items() if p.split('.')[-1] in SEVEN}
    per_rank = 2 * sum(i + o for i,o in shapes.values())
    pages = lambda r: -(-pieces_of(dict.fromkeys(shapes, r), c).tiles // layout.tiles)
    pairs = (pool // layout.nbytes - 1) // (pages(8) + pages(64))
    assert 2 * pairs >= .95 * 2 * pool / ((8 + 64) * per_rank)
    slots = pool // (64 * per_rank)
    assert 2 * pairs > 1.7 * slots, 'a pool of slots padded to rank 64 holds far fewer'

def test_page_bytes_are_honoured():
    layout = layout_of(TINY, 100_000)
    assert layout.nbytes <= 100_000 < layout.nbytes + PageLayout(TINY, PageLayout.step(TINY)).nbytes
    with pytest.raises(Refused, match='at least'): layout_of(TINY, 100)
    with pytest.raises(Refused, match='multiple of'): PageLayout(TINY, 3)

def test_default_budget(): assert default_budget() == min(16 << 30, psutil.virtual_memory().total // 4 // 4096 * 4096)

@pytest.mark.parametrize('n', [1, 2, 63, 64, 65, 127, 128, 217])
def test_chunks_sum_to_the_pages(n):
    sizes = chunk_sizes(n)
    assert sum(sizes) == n and sizes == sorted(sizes, reverse=True) and all(s & (s - 1) == 0 and s <= 64 for s in sizes)

def test_B61_steps_between_swaps_compile_nothing_and_say_the_same(tmp_path):
    "Decoding over rows from pages, a new mix each time: no compilation, and the logits of the adapters just loaded."
    layout, rng = PageLayout(TINY, 16, 'float32'), random.Random(1)
    draw = lambda i: random_adapter(TINY, f'a{i}', rng.choice([1, 4, 8, 13, 16]), rng.sample(SEVEN, rng.randint(1, 7)),
                                    seed=i, std=.3)
    adapters = {f'v{i}': draw(i) for i in range(12)}
    residents = Residents(Store(ImageFolder(tmp_path, layout)), Arena(layout, 48))
    for v,a in adapters.items(): residents.store.add(v, a)
    versions = [*adapters, compose(residents, {'v0': .5, 'v1': 1.5})]
    base = random_base(TINY)
    graph, weights = nnx.split(base.decoder)
    tokens, positions = jnp.array([[3, 9, 4], [7, 7, 1], [5, 0, 2]]), jnp.broadcast_to(jnp.arange(3)[None], (3, 3))
    last, kv = jnp.full(3, 2), KV.zeros(TINY, 3, 8, jnp.float32)
    logits = jax.jit(lambda groups, slots: nnx.merge(graph, weights)(tokens, positions, last, kv, slots, groups)[0])
    def run(chosen):
        for v in chosen:
            for part,_ in residents.recipe(v): residents.store.fetch(part)
            assert residents.use(v)
        groups = fetch_rows(residents.arena.words, plan_rows(residents, chosen, capacity=8, n_slots=3), layout)
        out = np.asarray(logits(groups, np.arange(3, dtype=np.int32)))
        for v in chosen: residents.done(v)
        residents.pages.check()
        return out
    run(versions[:2])
    count, seen = compilations(), []
    for _ in range(40):
        chosen = rng.sample(versions, 2)
        seen.append((chosen, run(chosen)))
    assert count.n == 0
    w, ids = random_tensors(TINY), np.asarray(tokens)
    for chosen, out in seen[::4]:
        for row, version in enumerate([None, *chosen]):
            merged = w
            for part, weight in residents.recipe(version) if version else ():
                pairs = {p: LoraPair(m.a, m.b, weight * m.scale) for p,m in adapters[part].modules.items()}
                merged = dense.merged(merged, pairs)
            np.testing.assert_allclose(out[row], dense.logits(TINY, merged, ids[row])[-1], atol=1e-3)

def test_a_batch_that_needs_too_many_rank_blocks_is_refused(many):
    residents = Residents(many, Arena(LAYOUT, 1 + 3 * many.folder.known['v4'].n_pages))
    residents.use('v4')
    with pytest.raises(Refused, match='more than 4 rank blocks'): plan_rows(residents, ['v4'], capacity=4, n_slots=2)
