"""The benchmark's program from start to end on short time, and runs that can't be read or compared: processes and files."""
import json, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import psutil, pytest
from lorajax.bench import Figure, Run, change, changes, earlier_run, read_run, rows, write_run
from lorajax.core import Refused

ROOT = Path(__file__).resolve().parents[1]

def fig(*values, others=None, part='batch', name='base', unit='tokens/s'):
    return Figure(part, name, unit, tuple(map(float, values)), tuple(others or [0.] * len(values)))

def run(*figures, date='2026-11-30T09:00', **machine):
    return Run(dict(cpu='one', cores=2, memory_gb=8) | machine, dict(jax='0.12'), date, dict(read=3e10, copy=2e10), figures)

@pytest.mark.parametrize('new, old, ratio, clear', [
    (fig(10, 11, 12), fig(20, 22, 24), .5, True),
    (fig(10, 11, 12), fig(11, 12, 13), 11 / 12, False), # each median within the other's spread
    (fig(10, 11, 20), fig(14, 15, 16), 11 / 15, False), # 15 lies between 10 and 20
    (fig(10, 11, 99, others=[0., 0., .5]), fig(20, 21), 10.5 / 20.5, True), # 99 was disturbed
    (fig(10, 11), fig(20), 10.5 / 20, False), # a single value has no spread
    (fig(10, 99, others=[0., .5]), fig(20, 21), 10 / 20.5, False), # nor has a single undisturbed one
    (fig(10, 11), fig(20, 21, others=[.9, .9]), 10.5 / 20.5, False)])
def test_a_change_is_clear_if_each_median_lies_outside_the_other_spread(new, old, ratio, clear):
    c = change(new, old)
    assert c.ratio == pytest.approx(ratio) and c.clear == clear

def test_only_the_same_figure_in_the_same_unit_is_compared():
    new = run(fig(10, 10), fig(3, name='mixed'), fig(7, part='http'))
    old = run(fig(20, 20), fig(6, name='mixed', unit='ms'))
    found = changes(new, old)
    assert found.keys() == {('batch', 'base')} and found['batch', 'base'].ratio == .5
    assert changes(new, None) == {}
    head, *body = rows(new, old)
    assert head[5] == 'before = 1' and [line[5] for line in body] == ['0.50 *', '', '']
    assert 'before = 1' not in next(rows(new))

def test_quartiles_of_many_and_the_range_of_few():
    assert fig(*range(1, 11)).spread == (1, 10)
    assert fig(*range(1, 102)).spread == (26, 76)
    f = fig(1, 50, 3, others=[0., .2, .1])
    assert (f.median, f.spread, f.undisturbed) == (2, (1, 3), 2)

def test_the_newest_earlier_run_of_this_machine_with_these_parts(tmp_path):
    first, second, third = run(fig(1)), run(fig(2), fig(3, part='swap')), run(fig(4), cpu='other')
    assert earlier_run(tmp_path, first.machine, {'batch'})[0] is None
    for i, r in enumerate((first, second, third)): write_run(r, tmp_path / f'2026-11-3{i}.json')
    assert earlier_run(tmp_path, first.machine, {'batch'})[0] == second
    assert earlier_run(tmp_path, first.machine, {'batch', 'swap'})[0] == second
    found, why = earlier_run(tmp_path, first.machine | dict(cores=64), {'batch'})
    assert found is None and 'another machine' in why and 'cpu other' in why
    (tmp_path / '2026-11-32.json').unlink()
    found, why = earlier_run(tmp_path, first.machine, {'http'})
    assert found is None and 'lacks' in why

def test_a_file_that_is_no_run_is_left_out_and_named(tmp_path):
    (tmp_path / '2026-12-01.json').write_text('half of')
    found, why = earlier_run(tmp_path, run().machine, {'batch'})
    assert found is None and why.startswith('there is no earlier run') and '2026-12-01.json is no run' in why
    write_run(run(fig(1)), tmp_path / '2026-11-30.json')
    found, why = earlier_run(tmp_path, run().machine, {'batch'})
    assert found == run(fig(1)) and '2026-11-30.json' in why and '2026-12-01.json is no run' in why

@pytest.mark.parametrize('content', ['', '[]', '{}', '{"figures": [{"part": "a"}]}'])
def test_a_file_that_is_no_run(tmp_path, content):
    (tmp_path / 'x.json').write_text(content)
    with pytest.raises(Refused, match='x.json is no run of the benchmark'): read_run(tmp_path / 'x.json')

def test_a_run_comes_back_with_four_digits(tmp_path):
    r = run(fig(1.23456, 2), fig(.000123456, others=[.0123456], name='b'))
    write_run(r, tmp_path / 'a/x.json')
    back = read_run(tmp_path / 'a/x.json')
    assert back['batch', 'base'].values == (1.235, 2.) and back['batch', 'b'].others == (.01235,)
    assert replace(back, figures=()) == replace(r, figures=()) and back.minutes is None
    write_run(replace(r, minutes=8.5), tmp_path / 'a/x.json')
    assert read_run(tmp_path / 'a/x.json').minutes == 8.5
    assert json.loads((tmp_path / 'a/x.json').read_text())['undisturbed'] == 1.

def run_bench(*words):
    command = [sys.executable, ROOT / 'tests/bench/main.py', *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)

def bench(*words):
    done = run_bench(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout

def test_the_program_on_short_time(tmp_path):
    "Memory and routes; the file says what machine, which versions, and every repetition."
    out = bench('--only', 'route', '--minutes', .1, '--json', tmp_path / 'run.json', '--runs', tmp_path / 'runs')
    r = read_run(tmp_path / 'run.json')
    assert [read_run(p) for p in (tmp_path / 'runs').iterdir()] == [r] and r.minutes > 0
    assert r.parts == {'memory', 'route'} and 'route: L1 user, P50' in out and 'undisturbed' in out
    assert r.machine.keys() == {'cpu', 'cores', 'memory_gb'}
    assert {'python', 'jax', 'jaxlib', 'numpy', 'lorajax'} <= r.versions.keys()
    assert all(len(f.values) >= 2 and min(f.values) > 0 for f in r.figures) and r.bandwidth.keys() == {'read', 'copy'}
    assert r['route', 'L1 user, P50'].median < r['route', 'L3, 64 tokens, P50'].median

def test_a_part_that_is_not_there():
    done = run_bench('--only', 'nothing')
    assert done.returncode == 2 and "no part 'nothing'" in done.stderr

def test_a_part_that_takes_too_long_is_stopped(tmp_path):
    "Three seconds are over before the first part has JAX and its figures, or at the latest within the second."
    done = run_bench('--only', 'tight', '--limit', .05, '--runs', tmp_path)
    assert done.returncode == 1 and ('tight failed: it took too long' in done.stderr or 'tight was not begun' in done.stderr)
    assert 'without figures: ' in done.stdout and 'tight' in done.stdout

def test_a_signal_ends_the_parts_too(tmp_path):
    command = [sys.executable, ROOT / 'tests/bench/main.py', '--only', 'memory', '--runs', tmp_path]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        end = time.monotonic() + 60
        while not (parts := psutil.Process(bench.pid).children(recursive=True)) and time.monotonic() < end: time.sleep(.05)
        bench.terminate()
        assert parts and bench.wait(60) == 1
    assert psutil.wait_procs(parts, 30)[1] == []

def test_time_of_children_that_have_ended_is_ours(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tests/bench')
    from quiet import cpu_seconds
    before = cpu_seconds()[1]
    subprocess.run([sys.executable, '-c', 'import time\nwhile time.process_time() < 1: pass'], check=True)
    assert cpu_seconds()[1] - before > .9

@pytest.mark.slow
def test_all_parts_once(tmp_path):
    bench('--least', 1, '--minutes', .1, '--registered', 12, '--limit', 30, '--json', tmp_path / 'run.json',
          '--runs', tmp_path / 'runs')
    r = read_run(tmp_path / 'run.json')
    assert r.parts == {'memory', 'batch', 'active', 'registered', 'tight', 'prefix', 'step', 'swap', 'route', 'http'}
    stays = 480 / 672 # whole blocks of 16: 48, 96, 144 and 192 tokens of 96, 144, 192 and 240
    assert set(r["prefix", "stays, hit rate"].values) == {float(f"{stays:.4g}")}
