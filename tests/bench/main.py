"""One table for this machine: what batches, traffic, swaps, prefixes, routes and HTTP cost, in less than ten minutes.

Each part runs in a process of its own, and has its share of the time that is left; what it compares takes turns for so long,
twice at least. A part that takes far longer is stopped, and has no figures; after --limit minutes all are. The run is kept
as JSON, and the newest earlier run of the same machine is shown beside it.
"""
import argparse, multiprocessing, os, signal, subprocess, sys, time, traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from lorajax.bench import Run, earlier_run, rows, text_table, write_run
from quiet import Budget, machine, versions

PARTS = dict( # name -> module, and its share of the time: seconds of ten minutes' work on two cores
    memory=('memory', 8), batch=('throughput', 120), active=('engine', 110), registered=('engine', 60), tight=('engine', 80),
    prefix=('engine', 40), step=('engine', 30), swap=('swap', 30), route=('route', 15), http=('over_http', 70))
ASKED = dict(ray=('over_ray', 150)) # a part that runs only if it is asked for
RUNS = ROOT / '.lorajax/bench'

@dataclass(frozen=True)
class Options:
    "What all parts are told."
    peers: str # 'peft' or 'none'
    registered: int # adapters of the large fleet
    bandwidth: dict # bytes/s: 'read' and 'copy'

def ended(*_):
    "A signal's end runs all `finally`, as any other."
    sys.exit(1)

def worker(pipe, name, budget, options):
    "One part, in its process."
    signal.signal(signal.SIGTERM, ended)
    import jax
    jax.config.update('jax_compilation_cache_dir', str(Path.home() / '.cache/lorajax/xla')) # the server's
    jax.config.update('jax_persistent_cache_min_compile_time_secs', .2)
    try: pipe.send(getattr(import_module((PARTS | ASKED)[name][0]), name)(replace(budget, tell=pipe.send), options))
    except Exception: pipe.send(traceback.format_exc())

def stop(process, patience=5.): # seconds
    "Ends a part's process and those that it has started."
    if not process.is_alive(): return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    process.join(patience)
    for p in family:
        with suppress(psutil.NoSuchProcess): p.kill()
    process.join()

def last_moment(name, over, minutes): # over: by `time.monotonic`; minutes: of all parts
    "When a part that begins now is stopped: after three times its share, but not within a minute unless all time is over."
    share = PARTS[name][1] / sum(s for _,s in PARTS.values())
    return min(over, time.monotonic() + max(60., 180 * minutes * share))

def figures(name, budget, options, until, tell):
    "What a part measured; what went wrong is printed, and it has none."
    if time.monotonic() >= until:
        print(f'{name} was not begun: the time is over', file=sys.stderr)
        return []
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context('spawn').Process(target=worker, args=(there, name, budget, options))
    process.start()
    there.close()
    try:
        while here.poll(max(0., until - time.monotonic())):
            if not isinstance(news := here.recv(), float): break
            tell(news)
        else: news = 'it took too long, and was stopped'
        if isinstance(news, list): process.join(10.)
    except EOFError:
        news = None
        process.join(10.)
    finally: stop(process)
    if isinstance(news, list): return news
    print(f'{name} failed: {news or f"its process ended with {process.exitcode}"}', file=sys.stderr)
    return []

def commit():
    if not which('git'): return {}
    done = subprocess.run(['git', 'describe', '--always', '--dirty'], capture_output=True, text=True, cwd=ROOT)
    return dict(commit=done.stdout.strip()) if done.returncode == 0 else {}

def measured(names, args, run, paths):
    "The run with all parts' figures, after those of the memory, which others need; kept after each part."
    begin = time.monotonic()
    end = begin + 60 * args.minutes * sum(PARTS[n][1] for n in names) / sum(s for _,s in PARTS.values())
    columns = TextColumn('{task.description:12}'), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as bar:
        for name in names:
            task = bar.add_task(name, total=1.)
            left = sum(PARTS[n][1] for n in names[names.index(name):])
            budget = Budget(time.monotonic() + (end - time.monotonic()) * PARTS[name][1] / left, args.least)
            options = Options(args.peers, args.registered, run.bandwidth)
            until = last_moment(name, begin + 60 * args.limit, args.limit)
            new = figures(name, budget, options, until, lambda share: bar.update(task, completed=share))
            if name == 'memory': run = replace(run, bandwidth={f.name: 1e9 * max(f.values) for f in new})
            bar.update(task, completed=1.)
            bar.stop_task(task)
            run = replace(run, figures=(*run.figures, *new), minutes=round((time.monotonic() - begin) / 60, 1))
            for path in paths: write_run(run, path)
    return run

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = 'peft' if find_spec('peft') and find_spec('torch') else 'none'
    parser.add_argument('--only', default=','.join(PARTS), metavar='PART,…',
                        help=f'{", ".join(PARTS)}; all by default. Besides: {", ".join(ASKED)}')
    parser.add_argument('--peers', choices=('peft', 'none'), default=installed, help='beside whom (%(default)s)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='keep the run there too')
    parser.add_argument('--runs', type=Path, default=RUNS, metavar='FOLDER',
                        help='where runs are kept by date, and earlier ones found; default: .lorajax/bench')
    parser.add_argument('--minutes', type=float, default=5., help='for all parts; fewer have their share (%(default)s)')
    parser.add_argument('--limit', type=float, default=10., help='minutes after which all is stopped (%(default)s)')
    parser.add_argument('--least', type=int, default=2, help='turns of each part, however long they take (%(default)s)')
    parser.add_argument('--registered', type=int, default=1000, help='adapters of the large fleet (%(default)s)')
    args = parser.parse_args()
    chosen = args.only.split(',')
    for name in chosen:
        if name not in PARTS | ASKED: parser.error(f'there is no part {name!r}; there are {", ".join(PARTS | ASKED)}')
        if name in ASKED: PARTS[name] = ASKED[name]
    if 'ray' in chosen and not find_spec('ray'): parser.error("ray is not installed here: pip install 'lorajax[ray]'")
    signal.signal(signal.SIGTERM, ended)
    now = time.strftime('%Y-%m-%dT%H:%M')
    names = [name for name in PARTS if name in chosen or name == 'memory']
    packages = ('lorajax', 'jax', 'jaxlib', 'numpy') + ('peft', 'transformers', 'torch') * (args.peers == 'peft')
    paths = [args.runs / f'{now.replace(":", ".")}.json'] + [args.json] * bool(args.json)
    earlier, why = earlier_run(args.runs, machine(), set(names))
    run = measured(names, args, Run(machine(), versions(*packages) | commit(), now, {}, ()), paths)
    print('  '.join(f'{k} {v}' for k,v in (run.machine | run.versions).items()), end='\n\n')
    print(text_table(list(rows(run, earlier))), end='\n\n')
    print(f'{why}\n{run.undisturbed:.0%} of the values undisturbed by other processes; {run.minutes:.1f} minutes')
    if missing := [n for n in names if n not in run.parts]: print(f'without figures: {", ".join(missing)}')
    print(f'kept in {" and ".join(map(os.path.relpath, paths))}')
    sys.exit(run.parts != set(names))

if __name__ == '__main__': main()
