"""Milliseconds per swap of SmolLM2 adapters, beside allocating anew and beside a memcpy of the same bytes, in one run.

40 adapters of ranks 16 to 64 on all seven linears in page-locked memory, and an arena for about eight. They come in
random order. A swap is timed from `Residents.use` until the arena is ready. The things compared take turns from swap to
swap, each with another adapter of the same rank and another place to copy to, so that caches help none. Rounds of such
turns are kept or left out as quiet.py says. --json FILE keeps all times.
"""
import argparse, json, platform, random, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import jax, numpy as np, psutil
from lorajax.arena import Arena, Residents
from lorajax.base import open_base
from lorajax.core import module_shapes
from lorajax.images import Image, PageLayout, pieces_of
from lorajax.store import ImageFolder, Store
from quiet import machine, quiet, take_turns

RANKS, EACH = (16, 32, 48, 64), 10 # adapters of each rank
ROOM, TURNS = 8, 12 # adapters in the arena; turns of each rank in a round
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')

def random_image(rank, layout, rng):
    "An adapter's image with any words in it; nothing here reads them as numbers."
    ranks = {path: rank for path in module_shapes(layout.config) if path.rpartition('.')[2] in LINEARS}
    pieces = pieces_of(ranks, layout.config)
    shape = -(-pieces.tiles // layout.tiles), layout.words
    return Image(rng.integers(0, 1 << 16, shape, layout.word), pieces, layout)

def residents_over(folder, images):
    "The adapters on disk, then in page-locked memory; none in the arena yet."
    layout = images[RANKS[0], 0].layout
    store = Store(ImageFolder(folder, layout), sum(image.nbytes for image in images.values()))
    for (rank, i), image in images.items():
        store.folder.add(f'{rank}-{i}', image)
        store.fetch(f'{rank}-{i}')
    return Residents(store, Arena(layout, 1 + ROOM * sum(len(image.pages) for image in images.values()) // len(images)))

def things_to_time(residents, images, pool, rng):
    cores, device = psutil.cpu_count(), jax.devices()[0]
    target = np.ones(residents.arena.words.shape, residents.arena.words.dtype) # touched, as the arena is
    def source_and_target(which):
        pages = images[which].pages
        start = rng.randrange(len(target) - len(pages))
        return pages, target[start:start + len(pages)]
    def swap(rank, i):
        assert residents.use(f'{rank}-{i}')
        residents.arena.words.block_until_ready()
        residents.done(f'{rank}-{i}')
    def allocate(*which): jax.device_put(images[which].pages, device, may_alias=False).block_until_ready()
    def memcpy(*which):
        source, target = source_and_target(which)
        np.copyto(target, source)
    def memcpy_all_cores(*which):
        source, target = source_and_target(which)
        list(pool.map(np.copyto, np.array_split(target, cores), np.array_split(source, cores)))
    return {'swap': swap, 'allocate': allocate, 'memcpy': memcpy, 'memcpy, all cores': memcpy_all_cores}

def one_round(things, residents, rng):
    seconds = {name: {rank: [] for rank in RANKS} for name in things}
    for rank in rng.sample(RANKS * TURNS, len(RANKS) * TURNS):
        adapters = rng.sample(range(EACH), len(things))
        residents.drop(f'{rank}-{adapters[0]}') # the swap's, should it still be there
        for (name, f), i in zip(things.items(), adapters):
            start = time.perf_counter()
            f(rank, i)
            seconds[name][rank].append(time.perf_counter() - start)
    return dict(seconds=seconds)

def table(rounds, nbytes):
    heads = ('MB', 'swaps', 'swap P50', 'swap P99', 'GB/s', 'of memcpy', 'of all cores', 'alloc P50', 'alloc P99')
    yield f'{"ms by rank":12}' + ''.join(f'{h:>14}' for h in heads)
    for rank, n in nbytes.items():
        times = {name: np.concatenate([r['seconds'][name][rank] for r in rounds]) for name in rounds[0]['seconds']}
        p50, p99 = ({name: np.percentile(t, p) for name,t in times.items()} for p in (50, 99))
        ms = lambda name: [f'{p[name] * 1e3:.2f}' for p in (p50, p99)]
        shares = [f'{p50[name] / p50["swap"]:.2f}' for name in ('memcpy', 'memcpy, all cores')]
        speed = f'{n / p50["swap"] / 1e9:.1f}'
        cells = [f'{n / 1e6:.1f}', len(times['swap']), *ms('swap'), speed, *shares, *ms('allocate')]
        yield f'{rank:<12}' + ''.join(f'{c:>14}' for c in cells)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--reps', type=int, default=10, help=f'rounds, each with {TURNS} swaps of every rank')
    parser.add_argument('--json', type=Path, help='keep all times in this file')
    args = parser.parse_args()
    layout, draw = PageLayout(open_base('smollm2').config, 16), np.random.default_rng(0)
    images = {(rank, i): random_image(rank, layout, draw) for rank in RANKS for i in range(EACH)}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(psutil.cpu_count()) as pool:
        residents, rng = residents_over(folder, images), random.Random(0)
        things = things_to_time(residents, images, pool, rng)
        one_round(things, residents, rng) # to warm up
        runs = take_turns({'round': lambda: one_round(things, residents, rng)}, args.reps)['round']
        residents.store.close()
    print(f'{machine()}; {len(images)} adapters, an arena of {residents.arena.nbytes / 1e6:.0f} MB')
    print(f'{len(quiet(runs))} of {len(runs)} rounds undisturbed\n')
    for line in table(quiet(runs) or runs, {rank: images[rank, 0].nbytes for rank in RANKS}): print(line)
    result = dict(machine=platform.platform(), jax=jax.__version__, rounds=runs)
    if args.json: args.json.write_text(json.dumps(result, indent=1) + '\n')

if __name__ == '__main__': main()
