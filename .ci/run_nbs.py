"""Run notebooks in order and store their outputs: `run_nbs.py [--check] [NOTEBOOK...]`; --check runs them and writes nothing.

Each runs in a process of its own, on the CPU. Cells with one of settings.ini's `tst_flags` are skipped and keep what they hold.
"""
import argparse, os, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / 'nbs'

SVG = """
import matplotlib as mpl
mpl.rcParams.update({'svg.hashsalt': 'lorajax', 'svg.fonttype': 'none', 'axes.spines.top': False, 'axes.spines.right': False, 'font.size': 9})
from matplotlib_inline.backend_inline import set_matplotlib_formats
set_matplotlib_formats('svg', metadata={'Date': None})
"""

def run_one(path, write):
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.clean import clean_nb
    from nbdev.config import get_config
    from nbdev.process import NBProcessor
    flags = set(get_config().tst_flags.split())
    stored, nb = read_nb(path), NBProcessor(path, process=True).nb   # processing takes the directives out of the cells
    shell = CaptureShell(path)
    shell.run(SVG)
    def skipped(cell):
        if cell.cell_type != 'code' or flags & (getattr(cell, 'directives_', None) or {}).keys(): return True
        cell.outputs = []
    os.chdir(path.parent)
    try: shell.run_all(nb, exc_stop=True, preproc=skipped)
    except BaseException: sys.exit(shell.prettytb(path))
    if write:
        for old, new in zip(stored.cells, nb.cells, strict=True):
            if old.cell_type == 'code': old.outputs = new.outputs
        clean_nb(stored)
        write_nb(stored, path)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('notebooks', nargs='*', type=Path, help='default: all of nbs/')
    parser.add_argument('--check', action='store_true', help='run, but write nothing')
    parser.add_argument('--inside', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    paths = [p.resolve() for p in args.notebooks] or sorted(NBS.glob('[!_]*.ipynb'))
    if args.inside: return run_one(paths[0], not args.check)
    env = os.environ | {'JAX_PLATFORMS': 'cpu', 'MPLBACKEND': 'module://matplotlib_inline.backend_inline', 'HF_HUB_OFFLINE': '1', 'COLUMNS': '100'}
    failed = []
    for p in paths:
        start = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, '--inside', *(['--check'] if args.check else []), str(p)], env=env, cwd=ROOT)
        if done.returncode: failed.append(p.name)
        print(f'{"failed" if done.returncode else "ok":7}{time.perf_counter() - start:6.1f} s  {p.name}', flush=True)
    print(f'{len(paths) - len(failed)} of {len(paths)} notebooks ran')
    return bool(failed)

if __name__ == '__main__': sys.exit(main())
