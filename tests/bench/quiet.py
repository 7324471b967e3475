"""Measuring on a machine that others use too.

The things compared take turns, each once it is quiet. A repetition during which other processes used more than 0.15
cores is left out, unless there are no others.
"""
import platform, statistics, time
import psutil
from rich.console import Console
from rich.progress import track

LIMIT = .15 # cores

def machine():
    import jax
    name, cores = platform.processor() or platform.machine(), psutil.cpu_count()
    return f'{name}, {cores} cores, jax {jax.__version__} on {jax.default_backend()}'

def bandwidth(size=1 << 29):
    "Best bytes per second of reading (XLA sums) and of copying (NumPy, a thread a core; read plus written)."
    import jax, jax.numpy as jnp, numpy as np
    from concurrent.futures import ThreadPoolExecutor
    def best(f):
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            f()
            seconds.append(time.perf_counter() - start)
        return size / min(seconds)
    numbers, total = jnp.ones(size // 4, jnp.float32), jax.jit(jnp.sum)
    read = best(lambda: total(numbers).block_until_ready())
    cores = psutil.cpu_count()
    source, target = (np.ones((cores, size // 8 // cores), np.float32) for _ in range(2)) # half of `size` each
    with ThreadPoolExecutor(cores) as pool: copy = best(lambda: list(pool.map(np.copyto, target, source)))
    return dict(read=read, copy=copy)

def cpu_seconds():
    "Seconds used so far by everything, and by this process and its children."
    t, total = psutil.cpu_times(), 0.
    for p in [psutil.Process(), *psutil.Process().children(recursive=True)]: total += sum(p.cpu_times()[:2])
    return t.user + t.nice + t.system + t.irq + t.softirq, total

def others(before, after, wall): return max(0., ((after[0] - before[0]) - (after[1] - before[1])) / wall)

def wait_idle(patience=60):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(.5)
        if others(before, cpu_seconds(), .5) < LIMIT: return

def take_turns(things, reps):
    runs = {name: [] for name in things}
    for rep in track(range(reps), 'measuring', console=Console(stderr=True)):
        for name,f in things.items():
            wait_idle()
            before, start = cpu_seconds(), time.perf_counter()
            run = f()
            run['others'] = others(before, cpu_seconds(), time.perf_counter() - start)
            runs[name].append(run)
    return runs

def quiet(runs): return [r for r in runs if r['others'] < LIMIT]

def median(runs, key): return statistics.median(r[key] for r in quiet(runs) or runs)
