"""Milliseconds per swap of SmolLM2 adapters, beside allocating anew and beside a memcpy of the same bytes.

Adapters of ranks 16 to 64 on all seven linears, in bfloat16 and in int8, in page-locked memory, and an arena for about
eight. They come in random order. A swap is timed from `Residents.use` until the arena is ready. The things compared
take turns from swap to swap, each with another adapter of the same kind and another place to copy to, so that caches
help none. Rounds of such turns are kept or left out as quiet.py says.
"""
import random, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
import jax, numpy as np, psutil
from lorajax.arena import Arena, Residents
from lorajax.base import open_base
from lorajax.core import module_shapes
from lorajax.images import RANK_BLOCK, Image, PageLayout, numbers_per_word, pieces_of
from lorajax.store import ImageFolder, Store
from quiet import chosen, figure, take_turns

KINDS = [(rank, dtype) for dtype in (None, 'int8') for rank in (16, 32, 64)]
EACH, ROOM, TURNS = 10, 8, 10 # adapters of each kind; adapters in the arena; turns of each kind in a round
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')

def random_image(rank, dtype, layout, rng):
    "An adapter's image with any words in it; nothing here reads them as numbers."
    ranks = {path: rank for path in module_shapes(layout.config) if path.rpartition('.')[2] in LINEARS}
    pieces = pieces_of(ranks, layout.config, numbers_per_word(layout, dtype))
    pages = rng.integers(0, 1 << 16, (-(-pieces.tiles // layout.tiles), layout.words), layout.word)
    return Image(pages, np.ones((len(pieces.starts), RANK_BLOCK), np.float32), pieces, layout)

def name(kind, i): return f'{kind[0]}-{kind[1] or "own"}-{i}'

def residents_over(folder, images):
    "The adapters on disk, then in page-locked memory; none in the arena yet."
    layout = images[KINDS[0], 0].layout
    store = Store(ImageFolder(folder, layout), sum(image.nbytes for image in images.values()))
    for which, image in images.items():
        store.folder.add(name(*which), image)
        store.fetch(name(*which))
    return Residents(store, Arena(layout, 1 + ROOM * sum(len(image.pages) for image in images.values()) // len(images)))

def things_to_time(residents, images, pool, rng):
    cores, device = psutil.cpu_count(), jax.devices()[0]
    target = np.ones(residents.arena.words.shape, residents.arena.words.dtype) # touched, as the arena is
    def source_and_target(which):
        pages = images[which].pages
        start = rng.randrange(len(target) - len(pages))
        return pages, target[start:start + len(pages)]
    def swap(*which):
        assert residents.use(name(*which))
        residents.arena.words.block_until_ready()
        residents.done(name(*which))
    def allocate(*which): jax.device_put(images[which].pages, device, may_alias=False).block_until_ready()
    def memcpy(*which):
        source, target = source_and_target(which)
        np.copyto(target, source)
    def memcpy_all_cores(*which):
        source, target = source_and_target(which)
        list(pool.map(np.copyto, np.array_split(target, cores), np.array_split(source, cores)))
    return {'swap': swap, 'allocate': allocate, 'memcpy': memcpy, 'memcpy, all cores': memcpy_all_cores}

def one_round(things, residents, rng):
    "Milliseconds of each thing for each kind, in turn."
    ms = {(thing, kind): [] for thing in things for kind in KINDS}
    for kind in rng.sample(KINDS * TURNS, len(KINDS) * TURNS):
        adapters = rng.sample(range(EACH), len(things))
        residents.drop(name(kind, adapters[0])) # the swap's, should it still be there
        for (thing, f), i in zip(things.items(), adapters):
            start = time.perf_counter()
            f(kind, i)
            ms[thing, kind].append(1e3 * (time.perf_counter() - start))
    return ms

def figures(runs, things, nbytes):
    "Of each kind the swaps and what they are beside; last, the slowest swap of any kind."
    for kind, n in nbytes.items():
        times = {t: np.concatenate([r[t, kind] for r in chosen(runs)]) for t in things}
        p50 = {t: np.median(x) for t,x in times.items()}
        label = f'rank {kind[0]} {kind[1] or "bfloat16"}'
        shares = ', '.join(f'{p50[t] / p50["swap"]:.2f} of {t}' for t in ('memcpy', 'memcpy, all cores'))
        notes = dict(swap=f'{n / 1e6:.1f} MB; slowest {max(times["swap"]):.2f}; speed {shares}')
        for thing in ('swap', 'allocate', 'memcpy'):
            yield figure('swap', f'{label}, {thing}', 'ms', runs, lambda r: r[thing, kind], notes.get(thing, ''))
    every = lambda r: list(chain(*(r['swap', kind] for kind in KINDS)))
    yield figure('swap', 'all kinds, slowest swap', 'ms', runs, lambda r: max(every(r)), f'of a round: {len(KINDS) * TURNS}')

def swap(budget, options):
    layout, draw = PageLayout(open_base('smollm2').config, 16), np.random.default_rng(0)
    images = {(kind, i): random_image(*kind, layout, draw) for kind in KINDS for i in range(EACH)}
    nbytes = {kind: images[kind, 0].nbytes for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(psutil.cpu_count()) as pool:
        residents, rng = residents_over(folder, images), random.Random(0)
        things = things_to_time(residents, images, pool, rng)
        one_round(things, residents, rng) # to warm up
        runs = take_turns({'round': lambda: one_round(things, residents, rng)}, budget)['round']
        residents.store.close()
    return list(figures(runs, things, nbytes))
