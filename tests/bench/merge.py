"""What merging costs: in time, on factors beside dense products, and in loss, on the six example adapters.

    merge.py svd      seconds of a truncated SVD at width 4096 and rank 16, from the factors and from the product
    merge.py tasks    loss of SmolLM2 on six tasks with every merge of their adapters; writes nbs/data/merging.json
"""
import argparse, datetime, json, time
import numpy as np
from lorajax.adapters import LoraPair
from lorajax.base import load_base
from lorajax.coefficients import blended_losses, descend, judged
from lorajax.loss import mean_losses
from lorajax.merge import factor_svd, weighted_sum
from lorajax.peft import load_adapter
from lorajax.sparse_merge import merged
from quiet import machine
from train import OUT, ROOT, TASKS, examples

WAYS = [('exact', None, {}), *(('svd', r, {}) for r in (4, 8, 16)), *(('ties', r, dict(density=.5)) for r in (8, 32)),
        *(('dare', r, dict(density=.9, seed=0)) for r in (8, 32)), ('prune', 32, dict(density=.5))]

def seconds(f):
    start = time.perf_counter()
    found = f()
    return found, time.perf_counter() - start

def svd(width=4096, rank=16):
    rng = np.random.default_rng(0)
    pair = LoraPair(rng.standard_normal((rank, width), np.float32), rng.standard_normal((width, rank), np.float32), 2.)
    factor_svd(pair)
    runs = [seconds(lambda: factor_svd(pair)) for _ in range(5)]
    thin, fast = runs[0][0], min(t for _,t in runs)
    dense, slow = seconds(lambda: np.linalg.svd(pair.delta))
    error = np.abs(thin[1] - dense[1][:rank]).max() / dense[1][0]
    print(f'{machine()}\nwidth {width}, rank {rank}: {fast * 1e3:.1f} ms from the factors, {slow:.1f} s from the product, '
          f'{slow / fast:.0f} times as long; largest difference of a singular value {error:.1e} of the largest')

def tasks(n):
    base = load_base('smollm2')
    six = [load_adapter(OUT / name, base.config, name) for name in TASKS]
    tune, test = ([[e for _,e in examples(base, name, split, n)] for name in TASKS] for split in ('train', 'test'))
    alone, untrained = (mean_losses(base, [(who(i), rows) for i,rows in enumerate(test)]) for who in (six.__getitem__, lambda i: None))
    common = min((.25, .5, .75), key=lambda w: judged(base, weighted_sum(six, [w] * 6), tune).mean())
    rows = {'own adapter': alone, 'no adapter': untrained}
    for way, rank, kw in WAYS:
        m = merged(six, [1.] * 6 if way == 'ties' else [common] * 6, way, rank, **kw)
        name = f'{way}, rank {m.adapter.max_rank}'
        rows[name] = list(map(float, judged(base, m.adapter, test)))
        print(f'{name:20} mean {np.mean(rows[name]):.3f}, {m.lost:.1%} of the update missing', flush=True)
    found = descend(blended_losses(base, six, [some[:4] for some in tune]), [common] * 6, steps=12)
    rows['searched weights'] = list(map(float, judged(base, weighted_sum(six, found.weights), test)))
    result = dict(machine=machine(), date=str(datetime.date.today()), tasks=list(TASKS), examples=n, equal_weight=common,
                  weights=found.weights, losses=rows)
    (ROOT / 'nbs/data').mkdir(exist_ok=True)
    (ROOT / 'nbs/data/merging.json').write_text(json.dumps(result, indent=1) + '\n')
    for name,losses in rows.items(): print(f'{name:20}' + ''.join(f'{x:9.3f}' for x in losses) + f'{np.mean(losses):9.3f}')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['svd', 'tasks'])
    parser.add_argument('--examples', type=int, default=16, help='of each task')
    args = parser.parse_args()
    if args.what == 'svd': svd()
    else: tasks(args.examples)
