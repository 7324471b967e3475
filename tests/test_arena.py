"""The arena under long random use, and counts of compilations, allocations, memory: too long and dry for a lesson."""
import gc, hashlib, random, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
import jax, jax.numpy as jnp, numpy as np, psutil, pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
import dense
from flax import nnx
from lorajax.adapters import Adapter, LoraPair, random_adapter
from lorajax.base import random_base
from lorajax.model import Segment, WholeRows, random_tensors
from lorajax import rows, store as store_module
from lorajax.rows import RowBuffers, fetch_rows, plan_rows
from lorajax.arena import Arena, Residents, compose, kv_view, tile_view
from lorajax.core import ModelConfig, Refused, module_shapes
from lorajax.images import PageLayout, image_of, layout_of, pieces_of, rows_of
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

class DeviceError(RuntimeError): pass

@contextmanager
def failing_device(arena, at):
    "Its write number `at` fails before it begins, counted from 0."
    programs, writes = arena.programs, count()
    def failing(program):
        def write(*arrays):
            if next(writes) == at: raise DeviceError('out of memory')
            return program(*arrays)
        return write
    arena.programs = {n: failing(program) for n,program in programs.items()}
    try: yield
    finally: arena.programs = programs

picks = st.integers(0, 1000)

class Machine(RuleBasedStateMachine):
    "Requests come and go, adapters are added, dropped, composed, removed and lost, writes fail; no live byte changes."
    steps, failed = 0, 0

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(ImageFolder(self.folder.name, LAYOUT), budget=300_000)
        self.residents = Residents(self.store, ARENA)
        self.adapters, self.digests, self.used = {}, {}, []

    def teardown(self):
        self.store.close()
        self.folder.cleanup()

    def versions(self): return sorted(self.store.folder.known) + sorted(self.residents.recipes)

    def pick(self, i, versions=None):
        if versions := self.versions() if versions is None else versions: return versions[i % len(versions)]

    @rule(rank=st.integers(1, 40), modules=st.sets(st.sampled_from(SEVEN), min_size=1, max_size=3),
          dtype=st.sampled_from([None, 'int8']))
    def add(self, rank, modules, dtype):
        version = f'v{len(self.adapters)}'
        adapter = random_adapter(TINY, version, rank, modules, seed=len(self.adapters))
        self.adapters[version] = adapter, dtype
        self.store.add(version, adapter, dtype)
        self.digests[version] = digest(image_of(adapter, LAYOUT, dtype).pages)

    @rule(i=picks)
    def add_again(self, i):
        if (version := self.pick(i, sorted(self.adapters))) is None: return
        self.store.add(version, *self.adapters[version])
        assert self.store.fetch(version).known.n_pages

    @rule(i=picks)
    def remove(self, i):
        if (version := self.pick(i, sorted(self.store.folder.known))) is not None: self.store.remove(version)

    @rule(i=picks)
    def lose_the_file(self, i):
        if (version := self.pick(i, sorted(self.store.folder.known))) is None: return
        self.store.versions.pop(version, None)
        self.store.folder.file(version).unlink()
        for _ in range(2):
            with pytest.raises(Refused, match='can no longer be read'): self.store.fetch(version)
        assert version not in self.store.folder.known

    @rule(i=picks, weights=st.lists(st.sampled_from([.5, 1., -.25]), min_size=1, max_size=3))
    def compose(self, i, weights):
        chosen = {self.pick(i + n): weight for n,weight in enumerate(weights)}
        if None in chosen: return
        parts = {part for v in chosen for part,_ in self.residents.recipe(v)}
        if parts <= set(self.store.folder.known): compose(self.residents, chosen)
        else:
            with pytest.raises(Refused, match='add its adapter first'): compose(self.residents, chosen)

    def begin(self, version):
        "A request for `version`; whatever becomes of it, those that run are as before."
        pages, before = self.residents.pages, dict(self.residents.tables)
        running = {key for key,h in pages.holdings.items() if h.pins}
        try:
            parts = [part for part,_ in self.residents.recipe(version)]
            for _ in parts: # reading one part may push another out of the store, but each attempt brings one to the device
                for part in parts:
                    if part not in pages.holdings: self.store.fetch(part)
                if ready := self.residents.use(version): break
            assert ready
            self.used.append(version)
        except (NoRoom, Refused, DeviceError) as e:
            assert version not in pages.holdings and running <= set(pages.holdings)
            if isinstance(e, DeviceError): Machine.failed += 1
            elif version not in self.residents.recipes: assert self.residents.tables == before
        assert running <= set(pages.holdings)

    @rule(i=picks)
    def use(self, i):
        if (version := self.pick(i)) is not None: self.begin(version)

    @rule(i=picks, at=st.integers(0, 3))
    def use_on_a_failing_device(self, i, at):
        if (version := self.pick(i)) is None: return
        with failing_device(ARENA, at): self.begin(version)

    @rule(i=picks)
    def done(self, i):
        if self.used: self.residents.done(self.used.pop(i % len(self.used)))

    @rule(i=picks)
    def drop(self, i):
        version = self.pick(i, sorted(v for v in self.residents.pages.holdings if v in self.residents.pages))
        if version is not None: self.residents.drop(version)

    @invariant()
    def books_balance(self):
        Machine.steps += 1
        self.residents.pages.check()
        held = {h.key for h in self.residents.pages.holdings.values() if h.pages}
        assert set(self.residents.tables) == set(self.residents.known) == held

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
    assert Machine.steps >= 25 * runs and Machine.failed >= runs / 2

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
    np.testing.assert_array_equal(np.asarray(tile_view(jnp.array(words)))[7], words.reshape(-1, 8, 64)[7])

def test_B50_parallel_loads_of_one_version_are_one(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    adapter = random_adapter(TINY, 'a', 8)
    with ThreadPoolExecutor(20) as pool: list(pool.map(lambda _: store.add('v', adapter), range(20)))
    assert [p.name for p in tmp_path.iterdir()] == ['v.safetensors'] and list(store.versions) == ['v']
    store.versions.clear()
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
    assert len(store.versions) == 4

def test_B56_a_deleted_file_fails_only_its_own_request(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    for name in 'ab': store.add(name, random_adapter(TINY, name, 8))
    store.versions.clear()
    (tmp_path / 'a.safetensors').unlink()
    with pytest.raises(Refused, match='can no longer be read'): store.fetch('a')
    assert store.fetch('b') and list(store.reading) == ['a'] and list(store.folder.known) == ['b']
    with pytest.raises(Refused, match='can no longer be read'): store.fetch('a')

def test_disk_reads_do_not_block_others(tmp_path):
    "While one version is read slowly, its request is told no, and another's use goes on."
    store, gate = Store(ImageFolder(tmp_path, LAYOUT)), threading.Event()
    for name in 'ab': store.add(name, random_adapter(TINY, name, 8))
    del store.versions['a']
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
        a, b, scale = rows_of(image, path)
        assert scale.shape == (rank,) and (scale == 1).all()
        np.testing.assert_array_equal(a, pair.a.astype(a.dtype))
        np.testing.assert_array_equal(b, (np.float32(pair.scale) * pair.b.T).astype(b.dtype))

def by_hand(m):
    "Rounded to 127ths of each row's largest number: int8 [R, width] and steps."
    steps = np.abs(m).max(axis=1, keepdims=True) / np.float32(127)
    return np.round(m / np.where(steps > 0, steps, 1)).astype(np.int8), steps[:, 0]

@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('rank', [1, 7, 8, 9, 40])
def test_int8_images_by_the_book(rank, dtype):
    "Walks the tiles in order: byte j of word [r, c] in tile t is row r, channel (t·itemsize + j)·64 + c."
    layout = PageLayout(TINY, 16, dtype)
    adapter = random_adapter(TINY, rank=rank, targets=SEVEN + ('lm_head', 'embed_tokens'), seed=rank)
    image = image_of(adapter, layout, 'int8')
    tiles, per_word, at, factor = image.pages.reshape(-1, 8, 64), layout.word.itemsize, 0, iter(image.scale)
    for first in range(0, rank, 8):
        for path in (p for p in module_shapes(TINY) if p in adapter.modules):
            pair = adapter.modules[path]
            (a, p), (b, q) = by_hand(pair.a), by_hand(np.float32(pair.scale) * pair.b.T)
            n = len(a[first:first + 8])
            for m in a[first:first + 8], b[first:first + 8]:
                width = m.shape[1]
                for t in range(-(-width // (64 * per_word))):
                    for j in range(per_word):
                        byte = (tiles[at] >> 8 * j & 255).astype(np.uint8).view(np.int8)
                        channels = m[:, (t * per_word + j) * 64:][:, :64]
                        np.testing.assert_array_equal(byte[:n, :channels.shape[1]], channels)
                        assert not byte[n:].any() and not byte[:, channels.shape[1]:].any()
                    at += 1
            np.testing.assert_allclose(next(factor)[:n], (p * q)[first:first + 8], rtol=1e-6)
    assert at == image.pieces.tiles and next(factor, None) is None

def test_a_row_of_zeros_has_no_step_of_zero():
    a, b = np.zeros((2, 64), np.float32), np.zeros((64, 2), np.float32)
    a[0, 3] = 5.
    adapter = Adapter('zeros', {'model.layers.0.self_attn.q_proj': LoraPair(a, b, 1.)})
    assert np.isfinite(image_of(adapter, LAYOUT, 'int8').scale).all()

def test_a_version_keeps_its_width(tmp_path):
    store, adapter = Store(ImageFolder(tmp_path, LAYOUT)), random_adapter(TINY)
    store.add('v', adapter, 'int8')
    store.add('v', adapter, 'int8')
    with pytest.raises(AssertionError, match='its dtype belongs into its identity'): store.add('v', adapter)
    with pytest.raises(Refused, match="choose 'int8'"): store.add('w', adapter, 'int4')
    assert list(store.folder.known) == ['v']

def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    def full(tensors, path, metadata):
        path.write_bytes(b'half')
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as m:
        m.setattr('lorajax.store.save_file', full)
        with pytest.raises(Refused, match='No space left'): store.add('v', random_adapter(TINY))
    assert not list(tmp_path.iterdir()) and not store.versions and not store.folder.known
    store.add('v', random_adapter(TINY))
    assert store.fetch('v')

def test_a_slow_disk_holds_no_lock(tmp_path, monkeypatch):
    store, gate, save = Store(ImageFolder(tmp_path, LAYOUT)), threading.Event(), store_module.save_file
    store.add('a', random_adapter(TINY))
    monkeypatch.setattr(store_module, 'save_file', lambda *args: (gate.wait(20), save(*args))[1])
    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(store.add, 'b', random_adapter(TINY, seed=1))
        try: assert pool.submit(store.fetch, 'a').result(5) and not adding.done()
        finally: gate.set()
        adding.result()
    assert list(store.versions) == ['a', 'b']

def test_whatever_a_read_meets_is_refused(tmp_path, monkeypatch):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    store.add('a', random_adapter(TINY, rank=8)), store.add('b', random_adapter(TINY, rank=64))
    store.versions.clear()
    store.folder.file('b').rename(store.folder.file('a'))
    with pytest.raises(Refused, match='no longer the image'): store.fetch('a')
    store.add('c', random_adapter(TINY))
    store.versions.clear()
    def full(*_): raise MemoryError
    monkeypatch.setattr(store_module, 'pinned', full)
    with pytest.raises(Refused, match='brought into memory .MemoryError'): store.fetch('c')
    assert list(store.folder.known) == ['b']

def test_a_version_larger_than_the_budget_is_read_once(tmp_path):
    Store(ImageFolder(tmp_path, LAYOUT)).add('a', random_adapter(TINY))
    store = Store(ImageFolder(tmp_path, LAYOUT), budget=1)
    assert store.fetch('a') and store.ahead('a').done() and list(store.versions) == ['a']
    with pytest.raises(Refused, match='larger budget'): store.add('b', random_adapter(TINY, seed=1))

def test_a_size_asked_for_while_the_version_leaves(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    residents = Residents(store, Arena(LAYOUT, 40))
    store.add('a', random_adapter(TINY))
    residents.use('a')
    size = store.folder.known['a'].n_pages
    store.remove('a')
    assert residents.size('a') == size, 'what is on the device has a size'
    residents.known.pop('a') # as between two lines of the engine's thread
    with pytest.raises(Refused, match='has no version a'): residents.size('a')

def test_a_failed_write_gives_the_pages_back(tmp_path):
    store = Store(ImageFolder(tmp_path, LAYOUT))
    residents = Residents(store, Arena(LAYOUT, 32))
    for i,name in enumerate('abc'): store.add(name, random_adapter(TINY, name, 8, SEVEN, seed=i))
    residents.use('a')
    free, mix = residents.pages.free, compose(residents, {'a': 1., 'b': 1., 'c': 1.})
    assert len(store.fetch('b').chunks) >= 2
    with failing_device(residents.arena, 1), pytest.raises(DeviceError): residents.use('b')
    assert residents.pages.free == free and list(residents.tables) == ['a']
    with failing_device(residents.arena, len(store.fetch('b').chunks)), pytest.raises(DeviceError): residents.use(mix)
    residents.pages.check()
    assert sorted(residents.tables) == ['a', 'b'] and residents.pages.holdings['b'].pins == 0
    assert residents.use(mix) and residents.pages.holdings['c'].pins == 1

def test_a_device_that_dies_while_it_writes_is_noticed(tmp_path):
    "The donated buffer is gone; nothing goes on with other content in its place."
    residents = Residents(Store(ImageFolder(tmp_path, LAYOUT)), Arena(LAYOUT, 40))
    residents.store.add('a', random_adapter(TINY))
    def dies(words, *_):
        words.delete()
        raise DeviceError('lost')
    residents.arena.programs = dict.fromkeys(residents.arena.programs, dies)
    with pytest.raises(DeviceError): residents.use('a')
    residents.pages.check()
    assert not residents.tables
    with pytest.raises(RuntimeError, match='deleted'): np.asarray(residents.arena.words)

def test_a_version_removed_while_it_runs_goes_on(tmp_path):
    residents = Residents(Store(ImageFolder(tmp_path, LAYOUT)), Arena(LAYOUT, 40))
    residents.store.add('a', random_adapter(TINY))
    residents.use('a')
    residents.store.remove('a')
    assert plan_rows(residents, ['a'], 4, 1)['qkv'][0].blocks[:2] == (('a', 0), None)
    residents.done('a'), residents.drop('a')
    with pytest.raises(Refused, match='add its adapter first'): residents.use('a')

def test_mixed_ranks_fill_the_arena():
    "Half rank 8, half rank 64, on SmolLM2's shapes: at least 95 % of what the bytes allow is resident."
    c = ModelConfig(vocab_size=49152, width=576, mlp_width=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                    max_len=8192, tied=True)
    layout, pool = PageLayout(c, 16), 2 << 30
    shapes = {p: widths for p,widths in module_shapes(c).items() if p.split('.')[-1] in SEVEN}
    per_rank = 2 * sum(i + o for i,o in shapes.values())
    pages = lambda r, per_word=1: -(-pieces_of(dict.fromkeys(shapes, r), c, per_word).tiles // layout.tiles)
    pairs = (pool // layout.nbytes - 1) // (pages(8) + pages(64))
    assert 2 * pairs >= .95 * 2 * pool / ((8 + 64) * per_rank)
    slots = pool // (64 * per_rank)
    assert 2 * pairs > 1.7 * slots, 'a pool of slots padded to rank 64 holds far fewer'
    assert all(pages(r, 2) < .58 * pages(r) for r in (8, 16, 64)), 'int8 takes little more than half the pages'

def test_page_bytes_are_honoured():
    layout = layout_of(TINY, 100_000)
    assert layout.nbytes <= 100_000 < layout.nbytes + PageLayout(TINY, PageLayout.step(TINY)).nbytes
    with pytest.raises(Refused, match='at least'): layout_of(TINY, 100)
    with pytest.raises(Refused, match='multiple of'): PageLayout(TINY, 3)

def test_default_budget(): # a virtual machine's memory grows and shrinks a little
    assert default_budget() == pytest.approx(min(16 << 30, psutil.virtual_memory().total / 4), rel=.01)

@pytest.mark.parametrize('n', [1, 2, 63, 64, 65, 127, 128, 217])
def test_chunks_sum_to_the_pages(n):
    sizes = chunk_sizes(n)
    assert sum(sizes) == n and sizes == sorted(sizes, reverse=True) and all(s & (s - 1) == 0 and s <= 64 for s in sizes)

def dequantised(adapter, dtype):
    "The pairs that a version of this dtype stands for."
    def pair(m):
        if dtype is None: return m
        (a, p), (b, q) = by_hand(m.a), by_hand(np.float32(m.scale) * m.b.T)
        return LoraPair(a * p[:, None], (b * q[:, None]).T, 1.)
    return {path: pair(m) for path,m in adapter.modules.items()}

@pytest.fixture(scope='module')
def zoo(tmp_path_factory):
    "Versions of all ranks, targets and dtypes over a float32 arena, and compositions; the pairs they stand for."
    layout, rng = PageLayout(TINY, 16, 'float32'), random.Random(1)
    residents = Residents(Store(ImageFolder(tmp_path_factory.mktemp('zoo'), layout)), Arena(layout, 64))
    pairs = {}
    for i in range(16):
        targets = rng.sample(SEVEN + ('lm_head', 'embed_tokens'), rng.randint(1, 7))
        adapter = random_adapter(TINY, f'a{i}', rng.choice([1, 4, 8, 13, 16]), targets, seed=i, std=.3)
        dtype = rng.choice([None, 'int8'])
        residents.store.add(f'v{i}', adapter, dtype)
        pairs[f'v{i}'] = dequantised(adapter, dtype)
    mixes = [compose(residents, {f'v{i}': .5, f'v{i+1}': 1.5, f'v{i+2}': -.25}) for i in (0, 3, 6)]
    return residents, [*pairs, *mixes], pairs

@contextmanager
def in_use(residents, versions):
    for v in versions:
        for part,_ in residents.recipe(v): residents.store.fetch(part)
        assert residents.use(v)
    yield
    for v in versions: residents.done(v)
    residents.pages.check()

def test_B61_steps_between_swaps_compile_nothing_and_say_the_same(zoo):
    """Decoding over rows from pages, a new mix each time: no compilation, and the logits of the dense reference. Ranks,
    targets, the embedding and the head among them, numbers of both widths, and compositions of all of them."""
    (residents, versions, pairs), rng = zoo, random.Random(2)
    base = random_base(TINY)
    graph, weights = nnx.split(base.decoder)
    tokens, positions = jnp.array([[3, 9, 4], [7, 7, 1], [5, 0, 2]]), jnp.broadcast_to(jnp.arange(3)[None], (3, 3))
    @jax.jit
    def logits(groups, slots):
        decoder = nnx.merge(graph, weights)
        (states,), _ = decoder([Segment(tokens, positions, slots)], WholeRows(), groups)
        return decoder.score(states[:, -1], slots, groups)
    buffers = RowBuffers(plan_rows(residents, [], 12, 2, 12), residents.arena.layout)
    def run(chosen):
        with in_use(residents, chosen):
            groups = buffers.fetch(residents.arena.words, plan_rows(residents, chosen, 12, 2, 12))
            return np.asarray(logits(groups, np.arange(3, dtype=np.int32)))
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
                scaled = {p: LoraPair(m.a, m.b, weight * m.scale) for p,m in pairs[part].items()}
                merged = dense.merged(merged, scaled)
            np.testing.assert_allclose(out[row], dense.logits(TINY, merged, ids[row])[-1], atol=2e-3)

def same_groups(groups, others):
    a, b = jax.tree.leaves(groups), jax.tree.leaves(others)
    assert len(a) == len(b)
    for x, y in zip(a, b): np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

def test_renewing_what_changed_is_fetching_all(zoo):
    "Batches that share some versions, in any slots, while pages move; scratch holds NaN, which nothing must pick up."
    (residents, versions, _), rng, chosen = zoo, random.Random(3), []
    arena, layout = residents.arena, residents.arena.layout
    arena.words = arena.words.at[0].set(np.uint32(0x7fc00000))
    plan = lambda chosen: plan_rows(residents, chosen, 16, 3, 16)
    buffers = RowBuffers(plan([]), layout)
    for _ in range(30):
        mixed = list(dict.fromkeys([*chosen, *rng.sample(versions, 2)]))
        chosen = rng.sample(mixed, min(len(mixed), rng.randint(0, 3)))
        with in_use(residents, chosen):
            same_groups(buffers.fetch(arena.words, plan(chosen)), fetch_rows(arena.words, plan(chosen), layout))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(buffers.held))

def test_a_gpu_gets_the_same_rows_block_by_block(zoo, monkeypatch):
    residents, versions, _ = zoo
    with in_use(residents, versions[:2]):
        words, plan, layout = residents.arena.words, plan_rows(residents, versions[:2], 8, 2, 8), residents.arena.layout
        tile_by_tile = fetch_rows(words, plan, layout)
        monkeypatch.setattr(jax.lax, 'platform_dependent', lambda x, cpu, default: default(x))
        monkeypatch.setattr(rows, 'renew', jax.jit(rows.renew.__wrapped__))
        same_groups(fetch_rows(words, plan, layout), tile_by_tile)

def test_a_plan_says_whose_blocks_are_where(zoo):
    "What a kernel reads: slots in order, blocks in one piece each, slot 0 without any."
    residents, versions, _ = zoo
    chosen = [versions[0], versions[-1], versions[2]]
    with in_use(residents, chosen):
        for plans in plan_rows(residents, chosen, 12, 4, 12).values():
            for p in plans:
                assert p.first.shape == (6,) and p.first[0] == p.first[1] == 0 and (np.diff(p.first) >= 0).all()
                ends = p.first[-1]
                assert (p.first[len(chosen) + 1:] == ends).all() and (p.a[:, ends:] == -1).all()
                assert all(block is None for block in p.blocks[ends:])
                for slot, version in enumerate([None, *chosen, None]):
                    own = range(p.first[slot] * 8, p.first[slot + 1] * 8)
                    assert list(np.flatnonzero(p.owner == slot)) == list(own)
                    assert list(p.rows[slot]) == [*own, *[len(p.owner)] * (len(p.owner) - len(own))]
                    parts = {part for part,_ in residents.recipe(version)} if version else set()
                    assert {v for v,_ in p.blocks[p.first[slot]:p.first[slot + 1]]} <= parts
                for i, block in enumerate(p.blocks[:ends]):
                    assert p.packed[i] == (residents.known[block[0]].pieces.per_word == 4)

def test_a_batch_that_needs_too_many_rank_blocks_is_refused(many):
    residents = Residents(many, Arena(LAYOUT, 1 + 3 * many.folder.known['v4'].n_pages))
    residents.use('v4')
    with pytest.raises(Refused, match='more than 4 rank blocks'): plan_rows(residents, ['v4'], capacity=4, n_slots=2)
