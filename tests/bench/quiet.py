"""Measuring on a machine that others use too.

The things compared take turns, each once it is quiet. Of every repetition it is kept how many cores other processes used
meanwhile; `lorajax.bench` leaves out those in which it was more than 0.15, unless there are no others.
"""
import platform, time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
import numpy as np, psutil
from lorajax.bench import LIMIT, Figure

def nobody(share): pass

@dataclass(frozen=True)
class Budget:
    "How long something may be measured."
    end: float # of its time, by `time.monotonic`
    least: int = 2 # repetitions, however long they take
    most: int = 10
    tell: Callable[[float], None] = nobody # hears which share of the time is used

def machine() -> dict:
    "What a run is compared by."
    facts = Path('/proc/cpuinfo').read_text() if Path('/proc/cpuinfo').exists() else ''
    named = [line.partition(':')[2].strip() for line in facts.splitlines() if line.startswith('model name')]
    cpu = named[0] if named else platform.processor() or platform.machine()
    return dict(cpu=cpu, cores=psutil.cpu_count(), memory_gb=round(psutil.virtual_memory().total / 1e9))

def versions(*packages) -> dict:
    found = dict(python=platform.python_version())
    for name in packages:
        try: found[name] = version(name)
        except PackageNotFoundError: pass
    return found

def bandwidth(size=1 << 29) -> dict:
    "Best bytes per second of reading (XLA sums) and of copying (NumPy, a thread a core; read plus written)."
    import jax, jax.numpy as jnp
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
    "Seconds used so far by everything, and by this process and its children, those that have ended included."
    t, total = psutil.cpu_times(), 0.
    for p in [*psutil.Process().children(recursive=True), psutil.Process()]:
        with suppress(psutil.NoSuchProcess): total += sum(p.cpu_times()[:4]) # its own, then its ended children's
    return t.user + t.nice + t.system + t.irq + t.softirq, total

def others(before, after, wall): return max(0., ((after[0] - before[0]) - (after[1] - before[1])) / wall)

def wait_idle(patience):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(.25)
        if others(before, cpu_seconds(), .25) < LIMIT: return

def take_turns(things:Mapping[str, Callable[[], dict]], budget:Budget) -> dict[str, list[dict]]:
    "What each thing returned in each of its turns, with the cores that other processes used."
    runs, start = {name: [] for name in things}, time.monotonic()
    room = max(1., budget.end - start)
    for rep in range(budget.most):
        turn = (time.monotonic() - start) / max(1, rep) # seconds that one takes
        if rep >= budget.least and time.monotonic() + turn > budget.end: break
        for name, f in things.items():
            wait_idle(min(10., room / 20 / len(things)))
            before, begin = cpu_seconds(), time.perf_counter()
            run = f()
            run['others'] = others(before, cpu_seconds(), time.perf_counter() - begin)
            runs[name].append(run)
            budget.tell(min(1., (time.monotonic() - start) / room))
    return runs

def chosen(runs):
    "Those that count, as in `Figure`."
    return [r for r in runs if r['others'] < LIMIT] or runs

def figure(part, name, unit, runs, value, note='') -> Figure:
    "Of each run one value, or several."
    pairs = [(float(v), r['others']) for r in runs for v in np.atleast_1d(value(r))]
    return Figure(part, name, unit, *zip(*pairs), note)

def ratio(part, name, above, below, key, note='') -> Figure:
    "Of two things that took turns: one divided by the other, turn by turn."
    pairs = [(a[key] / b[key], max(a['others'], b['others'])) for a,b in zip(above, below)]
    return Figure(part, name, 'ratio', *zip(*pairs), note)
