"""The LoRA kernels on a GPU: first whether they are right, then how long they take and beside what.

One run of at most five minutes; `make gpu-bench` starts it with the Python that has JAX with CUDA. It needs jax and NumPy
only, and safetensors for the swap's part. Times are of one product (q, k and v of Llama 3.1 8B, rank 16, bfloat16), or of
one layer's attention, inside a scan over as many layers as don't fit into the GPU's cache; the shapes are those of
tests/gpu/shapes.py. The floor is the bytes that must move, over this device's own copy bandwidth. What the time limit
left out is said.
--json FILE keeps the figures; --tune tries block sizes and keeps the best for this device in lorajax/kernel_blocks.json;
--dry runs all of it on tiny shapes in interpret mode, on a CPU: its times mean nothing.
"""
import argparse, json, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / 'gpu'), str(TESTS)]
import lorajax.kernels as kernels
from lorajax.attention import PagedKV, attend_paged_pallas, attend_paged_xla
from lorajax.hopper import lora_hopper
from lorajax.kernels import PagedGroup, blocks_for, device, lora_pallas, paged_lora, token_tiles
from lorajax.ops import BACKENDS
from paged import EVERYTHING, Pages
from shapes import ATTENTION, ATTENTION_LOADS, LENGTHS, LOADS, RANK, SMALL, SMOLLM2, TABLE, AttentionLoad, Load

DRY, DRY_ATTENTION = [Load(2, 1, 2, 64, (64,), 2), Load(2, 5, 1, 64, (64,), 2)], [AttentionLoad(3, 40, 4, 2, 16, 8, 2)]

# The products that are timed

@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Data:
    "Adapters of all layers, dense and in pages, and a batch; all numbers are random."
    x: jax.Array # [T, in]
    slots: jax.Array # [T] 1 to the number of adapters
    a: tuple # m times [L, n, R, in]
    b: tuple # m times [L, n, R, out_m]
    weights: tuple # m times [l, in, out_m], a base with an adapter merged into it; enough of them that no cache holds all
    pages: PagedGroup

def make(load):
    keys = iter(jax.random.split(jax.random.key(0), 16))
    draw = lambda *dims: jax.random.normal(next(keys), dims, jnp.bfloat16) * jnp.bfloat16(dims[-1] ** -.5)
    L, n, m = load.layers, load.adapters, len(load.outs)
    a, b = (tuple(draw(L, n, RANK, width) for width in widths) for widths in ([load.n_in] * m, load.outs))
    tiles = [w.reshape(L, n * RANK // 8, 8, -1, 64).swapaxes(2, 3) for w in (*a, *b)] # [L, blocks, n tiles, 8, 64]
    counts = [t[..., 0, 0].size for t in tiles]
    place = jax.random.permutation(next(keys), sum(counts)).astype(jnp.int32)
    tables = [p.reshape(t.shape[:3]) for p,t in zip(jnp.split(place, list(np.cumsum(counts))[:-1]), tiles)]
    numbers = jnp.concatenate([t.reshape(-1, 8, 64) for t in tiles])
    words = jnp.zeros_like(numbers).at[place].set(numbers, unique_indices=True)
    per, each = RANK // 8, lambda f: tuple(f() for _ in load.outs)
    pages = PagedGroup(jax.lax.bitcast_convert_type(words, jnp.uint16), tuple(tables[:m]), tuple(tables[m:]),
                       each(lambda: jnp.ones((L, n * RANK), jnp.float32)), each(lambda: jnp.zeros(n * per, bool)),
                       each(lambda: jnp.zeros(n + 1, bool)),
                       each(lambda: jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.arange(n + 1, dtype=jnp.int32) * per])),
                       jnp.int32(0), load.outs)
    rows = 1 + np.random.default_rng(0).permutation(np.arange(load.rows) % n).astype(np.int32)
    return Data(draw(load.T, load.n_in), jnp.asarray(np.repeat(rows, load.tokens)), a, b,
                tuple(draw(load.base_layers, load.n_in, out) for out in load.outs), pages)

# Each takes the data inside the program that is timed, and gives a function of x and a layer's number.

def pallas(load, d, blocks, interpret):
    tiles = token_tiles(d.slots, 1, load.adapters + 1, blocks.tokens)
    return lambda x, i: paged_lora(x, d.pages.at(i, d.pages.words), tiles, blocks, interpret)

def hopper(load, d, _, interpret):
    by_row = lambda x: x.reshape(load.rows, load.tokens, -1)
    def f(x, i):
        ys = lora_hopper(by_row(x), d.pages.at(i, d.pages.words), by_row(d.slots)[:, 0, 0], interpret=interpret)
        return tuple(y.reshape(load.T, -1) for y in ys)
    return f

def each_module(d, one): return lambda x, i: tuple(one(x, a[i], b[i]) for a,b in zip(d.a, d.b))

def gather(load, d, *_):
    def one(x, a, b):
        h = jnp.einsum('ti,tri->tr', x, a[d.slots - 1], preferred_element_type=jnp.float32).astype(x.dtype)
        return jnp.einsum('tr,tro->to', h, b[d.slots - 1], preferred_element_type=jnp.float32)
    return each_module(d, one)

def one_hot(load, d, *_):
    mine = jax.nn.one_hot(d.slots - 1, load.adapters, dtype=jnp.float32)
    def one(x, a, b):
        h = jnp.einsum('ti,nri->tnr', x, a, preferred_element_type=jnp.float32) * mine[..., None]
        return jnp.einsum('tnr,nro->to', h.astype(x.dtype), b, preferred_element_type=jnp.float32)
    return each_module(d, one)

def ragged_dot(load, d, *_):
    order = jnp.argsort(d.slots)
    back, sizes = jnp.argsort(order), jnp.bincount(d.slots - 1, length=load.adapters).astype(jnp.int32)
    def one(x, a, b):
        dot = partial(jax.lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32)
        return dot(dot(x[order], a.swapaxes(1, 2)).astype(x.dtype), b)[back]
    return each_module(d, one)

def merged(load, d, *_): # the base's product with one adapter in its weights: what a step costs without LoRA terms
    return lambda x, i: tuple(jnp.dot(x, w[i % len(w)], preferred_element_type=jnp.float32) for w in d.weights)

METHODS = dict(pallas=pallas, gather=gather, one_hot=one_hot, ragged_dot=ragged_dot, merged=merged, hopper=hopper)

def hopper_can(x, pages, slots): # [B, S, in], [B]
    return BACKENDS['lora']['hopper'].why_not(x, pages, slots) is None

def methods(load, d):
    if hopper_can(d.x.reshape(load.rows, load.tokens, -1), d.pages, d.slots[::load.tokens]): return [*METHODS]
    return [name for name in METHODS if name != 'hopper']

def over_layers(load, method, *args):
    "The products of many layers in one program of x and the data, each waiting for the one before."
    def run(x, d):
        f = method(load, d, *args)
        def layer(x, i):
            ys = jax.lax.optimization_barrier(f(x, i)) # whole: only a column of them goes on
            return x + (sum(y[:, :1] for y in ys) * 1e-30).astype(x.dtype), None
        return jax.lax.scan(layer, x, jnp.arange(load.trips, dtype=jnp.int32) % load.layers)[0]
    return jax.jit(run)

def agree(load, d, names, blocks, interpret):
    "Largest difference of each method's terms in one layer from those of `gather`, relative to the largest term."
    one = lambda name: jax.jit(lambda d: METHODS[name](load, d, blocks, interpret)(d.x, jnp.int32(load.layers - 1)))(d)
    wanted = one('gather')
    error = lambda ys: max(float(abs(y.astype(jnp.float32) - z).max() / abs(z).max()) for y,z in zip(ys, wanted))
    return {name: error(one(name)) for name in names if name not in ('gather', 'merged')}

def seconds(run, *args, least=5):
    "Median of several calls; the first one doesn't count."
    run(*args).block_until_ready()
    times, until = [], time.perf_counter() + .3
    while len(times) < least or time.perf_counter() < until and len(times) < 50:
        start = time.perf_counter()
        run(*args).block_until_ready()
        times.append(time.perf_counter() - start)
    return float(np.median(times))

# The parts of a run

def in_time(loads, deadline, left_out):
    "The loads that there is time for; the others are named and kept in `left_out`."
    for load in loads:
        if time.perf_counter() <= deadline: yield load
        else:
            left_out.append(asdict(load))
            print(f'  left out, no time: {load}', flush=True)

def parity(cases, interpret, pool):
    "The kernels' errors; stops the run if one is too large."
    todo = [('pallas', partial(lora_pallas, interpret=interpret), c) for c in cases]
    todo += [('hopper', lora_hopper, c) for c in cases if hopper_can(c.x, c.group, c.slots)]
    programs = pool.map(lambda one: jax.jit(one[1]).lower(one[2].x, one[2].group, one[2].slots).compile(), todo)
    for (kernel, _, c), program in zip(todo, programs):
        error = c.error(program(c.x, c.group, c.slots))
        print(f'  {error:.1e}  {kernel} {c.name}', flush=True)
        if not error < c.tolerance: sys.exit(f'{kernel} is wrong by {error}, allowed are {c.tolerance}; nothing is timed')
        yield dict(kernel=kernel, case=c.name, error=error)

def copy_bandwidth(nbytes):
    "Bytes a second, read plus written."
    x = jnp.zeros(nbytes // 4, jnp.float32)
    return 2 * nbytes / seconds(jax.jit(lambda x: x + 1), x)

def row(load, us, bandwidth):
    floor = load.floor_bytes / bandwidth * 1e6
    shares = dict(share_of_floor=floor / us['pallas'], cost_of_base=us['pallas'] / us['merged'])
    return asdict(load) | dict(us=us, floor_us=floor) | shares

def tried(load, d, blocks, interpret, name):
    "The program, or None if it can't be had: a slow rival may want more memory than there is."
    try: return over_layers(load, METHODS[name], blocks, interpret).lower(d.x, d).compile()
    except jax.errors.JaxRuntimeError as e:
        if name in ('pallas', 'merged'): raise
        print(f'  {name} is left out: {str(e).splitlines()[0]}', flush=True)

def timed(loads, bandwidth, interpret, pool):
    print(f'  {"rows x tokens":>14}{"adapters":>9}{"floor":>9}' + ''.join(f'{m:>11}' for m in METHODS) + '   us; floor/pallas')
    for load in loads:
        d, blocks = make(load), blocks_for(load.path, 'bfloat16')
        names = methods(load, d)
        errors = agree(load, d, names, blocks, interpret)
        if wrong := {n: e for n,e in errors.items() if not e < 2e-2}: sys.exit(f'{load} is computed wrongly: {wrong}')
        programs = pool.map(partial(tried, load, d, blocks, interpret), names)
        us = {name: seconds(run, d.x, d) / load.trips * 1e6 for name,run in zip(names, programs) if run}
        found = row(load, us, bandwidth) | dict(errors=errors)
        print(f'  {load.rows:>7} x {load.tokens:<4}{load.adapters:>9}{found["floor_us"]:>9.1f}' +
              ''.join(f'{us[m]:>11.1f}' if m in us else f'{"-":>11}' for m in METHODS) + f'   {found["share_of_floor"]:.0%}', flush=True)
        yield found

# Attention

def make_attention(load):
    "Queries, and the arena's words and tables: every row's pages are anywhere; all numbers are random."
    keys, n = jax.random.split(jax.random.key(0), 3), -(-load.length // load.block)
    q = jax.random.normal(keys[0], (load.rows, 1, load.heads, load.channels), jnp.bfloat16)
    page = load.layers * 2 * load.block * load.kv_heads * load.channels
    words = jax.random.normal(keys[1], (load.rows * n + 1, page), jnp.bfloat16)
    tables = 1 + jax.random.permutation(keys[2], load.rows * n).astype(jnp.int32).reshape(load.rows, n)
    return q, jax.lax.bitcast_convert_type(words, jnp.uint16), tables

def attention_over_layers(load, attend):
    "The attention of many layers in one program."
    positions = jnp.full((load.rows, 1), load.length - 1, jnp.int32)
    def run(q, words, tables):
        def layer(q, i):
            kv = PagedKV(words, i, tables, load.block, load.kv_heads, load.channels)
            y = jax.lax.optimization_barrier(attend(q, kv, positions, jnp.int32(EVERYTHING)))
            return q + (y * 1e-30).astype(q.dtype), y[0, 0, 0, 0]
        return jax.lax.scan(layer, q, jnp.arange(load.trips, dtype=jnp.int32) % load.layers)[0]
    return jax.jit(run)

ATTENDS = dict(pallas=attend_paged_pallas, xla=attend_paged_xla)

def attention_parity(shapes, interpret):
    "The kernel's errors against float64 NumPy; stops the run if one is too large."
    for (H, K, C, block, window), (dtype, allowed) in product(shapes, [('bfloat16', 2e-2), ('float32', 3e-6)]):
        pages = Pages(LENGTHS, block, K, C, dtype=dtype)
        q, positions = pages.queries(1, H), np.array(LENGTHS, np.int32)[:, None] - 1
        y = attend_paged_pallas(jnp.asarray(q), pages.kv, jnp.asarray(positions), jnp.int32(window), interpret=interpret)
        error, case = float(abs(np.asarray(y) - pages.wanted(q, positions, window)).max()), f'{H}/{K} heads of {C}, pages of {block}'
        print(f'  {error:.1e}  attention {case}, window {window}, {dtype}', flush=True)
        if not error < allowed: sys.exit(f'attention is wrong by {error}, allowed are {allowed}; nothing is timed')
        yield dict(kernel='attention', case=f'{case} {window} {dtype}', error=error)

def attention_timed(loads, bandwidth, interpret):
    print(f'  {"rows x positions":>18}{"floor":>9}' + ''.join(f'{m:>11}' for m in ATTENDS) + '   us; floor/pallas')
    for load in loads:
        data, attends = make_attention(load), ATTENDS | dict(pallas=partial(attend_paged_pallas, interpret=interpret))
        us = {name: seconds(attention_over_layers(load, f), *data) / load.trips * 1e6 for name,f in attends.items()}
        floor = load.floor_bytes / bandwidth * 1e6
        print(f'  {load.rows:>9} x {load.length:<6}{floor:>9.1f}' + ''.join(f'{t:>11.1f}' for t in us.values()) +
              f'   {floor / us["pallas"]:.0%}', flush=True)
        yield asdict(load) | dict(us=us, floor_us=floor, share_of_floor=floor / us['pallas'])

# Swaps

def swaps(nbytes, times):
    "Seconds of bringing an adapter of so many bytes in: as the arena does it, and into memory allocated for it."
    from lorajax.arena import Arena # takes safetensors
    from lorajax.images import PageLayout
    from lorajax.store import pinned
    layout = PageLayout(SMOLLM2, 16, 'bfloat16')
    n = nbytes // layout.nbytes
    image, rng = np.ones((n, layout.words), layout.word), np.random.default_rng(0)
    chunks = pinned(image)
    whole = jax.device_put(image, chunks[0].sharding)
    arena, found = Arena(layout, 4 * n + 1), dict(swap=[], allocate=[])
    for i in range(times + 2): # two to warm up
        ids = (rng.permutation(4 * n)[:n] + 1).tolist()
        start = time.perf_counter()
        arena.write(chunks, ids)
        arena.words.block_until_ready()
        middle = time.perf_counter()
        jax.device_put(whole, jax.memory.Space.Device).block_until_ready()
        if i > 1:
            found['swap'].append(middle - start)
            found['allocate'].append(time.perf_counter() - middle)
    ms = lambda times, percent: float(np.percentile(times, percent) * 1e3)
    return {name: dict(ms_p50=ms(times, 50), ms_p99=ms(times, 99)) for name,times in found.items()}

# Block sizes

def choices(blocks):
    "Block sizes near `blocks`, one thing changed at a time."
    small, warps, stages = (1, 2, 4), (1, 2, 4, 8), (2, 3, 4, 5)
    shrink = dict(blocks=small, tiles=(1, 2), span=(4, 8, 16, 1024), lanes=small, warps=warps, stages=stages)
    expand = dict(blocks=(2, 4), tiles=(1, 2, 4, 8), warps=warps, stages=stages)
    for part, changes in dict(shrink=shrink, expand=expand).items():
        for field, values in changes.items():
            for value in values: yield replace(blocks, **{part: replace(getattr(blocks, part), **{field: value})})
    for tokens in (1, 16, 32, 64, 128): yield replace(blocks, tokens=tokens)

def tuned(loads, interpret, pool, deadline):
    "For each path the best block sizes one change away; run it again to go further."
    best = {}
    for path in ('decode', 'prefill'):
        blocks, own = blocks_for(path, 'bfloat16'), [load for load in loads if load.path == path][-2:]
        data, tried = [make(load) for load in own], {blocks: np.inf} | dict.fromkeys(choices(blocks), np.inf)
        def compiled(k):
            return [over_layers(load, pallas, k, interpret).lower(d.x, d).compile() for load,d in zip(own, data)]
        for k, programs in zip(tried, pool.map(compiled, tried)):
            if time.perf_counter() > deadline: break
            tried[k] = sum(seconds(run, d.x, d, least=3) / load.trips for run,load,d in zip(programs, own, data))
        best[f'{path} bfloat16'] = asdict(min(tried, key=tried.get))
        print(f'  {path}: {np.isfinite(list(tried.values())).sum()} of {len(tried)} tried, '
              f'{tried[blocks] * 1e6:.1f} us before, {min(tried.values()) * 1e6:.1f} us now', flush=True)
    return best

def keep_tuned(best):
    path = Path(kernels.__file__).with_name('kernel_blocks.json')
    table = json.loads(path.read_text('utf-8'))
    table['tuned'][device()[1]] = table['untuned'] | best
    path.write_text(json.dumps(table, indent=1) + '\n', 'utf-8')
    kernels._block_table.cache_clear() # the times that follow use them

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='keep the figures in this file')
    parser.add_argument('--tune', action='store_true', help='look for better block sizes for this device and keep them')
    parser.add_argument('--dry', action='store_true', help='tiny shapes in interpret mode')
    parser.add_argument('--seconds', type=float, default=220, help='start nothing new after so long')
    args = parser.parse_args(argv)
    deadline, (platform, name) = time.perf_counter() + args.seconds, device()
    if platform != 'gpu' and not args.dry: sys.exit(f'the device is a {platform}; a GPU is needed, or --dry')
    print(f'{name}, jax {jax.__version__}{", dry" if args.dry else ""}')
    result = dict(device=name, date=date.today().isoformat(), jax=jax.__version__, dry=args.dry)
    with ThreadPoolExecutor(16) as pool:
        print('error relative to the largest number, by case')
        result['parity'] = list(parity(SMALL[:1] if args.dry else TABLE, args.dry, pool))
        result['parity'] += attention_parity(ATTENTION[:1] if args.dry else ATTENTION, args.dry)
        result['copy_bytes_a_second'] = bandwidth = copy_bandwidth(1 << 20 if args.dry else 2 << 30)
        print(f'copy bandwidth {bandwidth / 1e9:.0f} GB/s; times in us')
        loads = DRY if args.dry else LOADS
        if args.tune: result['tuned'] = tuned(loads, args.dry, pool, time.perf_counter() + args.seconds / 2)
        if args.tune and not args.dry: keep_tuned(result['tuned'])
        attentions = DRY_ATTENTION if args.dry else ATTENTION_LOADS
        result['left_out'] = left_out = []
        for part, found in [('attention', attention_timed(in_time(attentions, deadline, left_out), bandwidth, args.dry)),
                            ('times', timed(in_time(loads, deadline, left_out), bandwidth, args.dry, pool))]:
            result[part] = []
            for one in found:
                result[part].append(one)
                if args.json: args.json.write_text(json.dumps(result, indent=1) + '\n') # what there is, should the rest fail
    nbytes = 4 << 20 if args.dry else 80_000_000
    try: result['swap'] = swaps(nbytes, 3 if args.dry else 200) | dict(bytes=nbytes)
    except ModuleNotFoundError as e: result['swap'] = dict(left_out=str(e))
    print('swap', json.dumps(result['swap']))
    if args.json: args.json.write_text(json.dumps(result, indent=1) + '\n')

if __name__ == '__main__': main()
