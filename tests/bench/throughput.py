"""Tokens/s of base and mixed batches beside the machine's memory limit and PEFT, in one run.

Batch of 8 rows, 64 prompt tokens and 64 new ones, greedy, bfloat16; eight different rank-16 adapters on all seven linears.
The things compared take turns. A repetition during which other processes used more than 0.15 cores is marked and left out of the
medians, unless there are no others. --json FILE keeps all repetitions.
"""
import argparse, json, multiprocessing, platform, statistics, tempfile, time
from pathlib import Path
import psutil
from rich.console import Console
from rich.progress import track

ROWS, PROMPT, NEW, RANK = 8, 64, 64, 16
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')

def prompts():
    import numpy as np
    return np.random.default_rng(0).integers(17, 49152, (ROWS, PROMPT)).tolist()

# ---- the measured things; each yields once when it is ready, then one dict of seconds per `next`

def ours(adapter_folders):
    import jax
    from lorajax.base import load_base
    from lorajax.core import Sampling
    from lorajax.generate import token_stream
    from lorajax.working_set import working_set
    base = load_base('smollm2')
    adapters = [base.load_adapter(f) for f in adapter_folders]
    rules, ids = [Sampling(max_new_tokens=NEW, ignore_eos=True)] * ROWS, prompts()
    def once(groups, slots):
        start = time.perf_counter()
        arrivals = [time.perf_counter() for _ in token_stream(base, ids, groups, slots, rules)]
        return dict(prefill=arrivals[0] - start, decode=arrivals[-1] - arrivals[0], total=arrivals[-1] - start)
    groups = working_set(adapters, base.config, base.dtype)
    cases = {'lorajax base': ({}, [0] * ROWS), 'lorajax mixed': (groups, list(range(1, ROWS + 1)))}
    for case in cases.values(): once(*case), once(*case)
    size = lambda groups: base.nbytes + sum(x.nbytes for x in jax.tree.leaves(groups))
    return {name: (lambda case=case: once(*case)) for name,case in cases.items()}, {name: size(case[0]) for name,case in cases.items()}

def peft_worker(pipe, adapter_folders):
    "transformers + PEFT in a process of its own, so that neither engine's threads disturb the other."
    import os, warnings
    os.environ.update(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false')
    warnings.simplefilter('ignore')
    import torch, transformers
    from lorajax.gguf_files import smollm2_file
    from peft import PeftModel
    transformers.utils.logging.disable_progress_bar(), transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(psutil.cpu_count(logical=True))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'model.gguf').symlink_to(smollm2_file())
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file='model.gguf', dtype=torch.float32)
    model.is_quantized = False
    model.to(torch.bfloat16)
    peft = None
    for i,f in enumerate(adapter_folders):
        if peft is None: peft = PeftModel.from_pretrained(model, f, adapter_name='a0')
        else: peft.load_adapter(f, adapter_name=f'a{i}')
    peft.eval()
    for g in (peft.generation_config, peft.base_model.model.generation_config): g.eos_token_id, g.pad_token_id, g.do_sample = None, 0, False
    x = torch.tensor(prompts())
    names = {'PEFT mixed': [f'a{i}' for i in range(ROWS)], 'PEFT base rows': ['__base__'] * ROWS}
    @torch.inference_mode()
    def run(name, new=NEW):
        start = time.perf_counter()
        out = peft.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=new, adapter_names=names[name])
        assert out.shape == (ROWS, PROMPT + new)
        return dict(total=time.perf_counter() - start)
    run('PEFT mixed', 4)
    pipe.send('ready')
    try:
        while True: pipe.send(run(pipe.recv()))
    except EOFError: pass # the other end is done

def peft(adapter_folders):
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context('spawn').Process(target=peft_worker, args=(there, adapter_folders), daemon=True).start()
    there.close()
    assert here.recv() == 'ready'
    def ask(name):
        here.send(name)
        return here.recv()
    return {name: (lambda name=name: ask(name)) for name in ('PEFT mixed', 'PEFT base rows')}

def bandwidth(size=1 << 29):
    "Bytes per second of reading (XLA sums an array) and of copying (NumPy, one thread a core; bytes read plus written); the best of several."
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

# ---- taking turns on a machine that others use too

def cpu_seconds():
    "Seconds used so far by everything, and by this process and its children."
    t, total = psutil.cpu_times(), 0.
    for p in [psutil.Process(), *psutil.Process().children(recursive=True)]: total += sum(p.cpu_times()[:2])
    return t.user + t.nice + t.system + t.irq + t.softirq, total

def others(before, after, wall): return max(0., ((after[0] - before[0]) - (after[1] - before[1])) / wall)

def wait_idle(limit=.15, patience=60):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(.5)
        if others(before, cpu_seconds(), .5) < limit: return

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

def median(runs, key):
    clean = [r[key] for r in runs if r['others'] < .15]
    return statistics.median(clean or [r[key] for r in runs])

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--reps', type=int, default=7, help='repetitions of each case')
    parser.add_argument('--no-peft', action='store_true', help='leave PEFT out')
    parser.add_argument('--json', type=Path, help='keep all repetitions in this file')
    args = parser.parse_args()
    import jax
    from lorajax.adapters import random_adapter
    from lorajax.base import open_base
    from lorajax.peft import save_adapter
    print(f'{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, jax {jax.__version__} on {jax.default_backend()}')
    with tempfile.TemporaryDirectory() as tmp:
        config = open_base('smollm2').config
        folders = [save_adapter(random_adapter(config, f'a{i}', RANK, LINEARS, 1., i, .02), f'{tmp}/a{i}') for i in range(ROWS)]
        things, weights = ours(folders)
        if not args.no_peft: things |= peft(folders)
        speed, runs = bandwidth(), take_turns(things, args.reps)
        again = bandwidth()
    speed = {k: max(speed[k], again[k]) for k in speed}
    print(f'memory: read {speed["read"] / 1e9:.1f} GB/s, copy {speed["copy"] / 1e9:.1f} GB/s (read + written)\n')
    heads = ('prefill', 'decode', 'all new', 'ms/step', 'MB/step', 'of read limit', 'of copy limit', 'undisturbed')
    print(f'{"tokens/s":16}' + ''.join(f'{h:>15}' for h in heads))
    for name,r in runs.items():
        cells = ['', '', f'{ROWS * NEW / median(r, "total"):.0f}'] + [''] * 4 + [f'{sum(x["others"] < .15 for x in r)} of {len(r)}']
        if name in weights:
            step = median(r, 'decode') / (NEW - 1)
            cells[:2] = f'{ROWS * PROMPT / median(r, "prefill"):.0f}', f'{ROWS / step:.0f}'
            cells[3:7] = f'{step * 1e3:.1f}', f'{weights[name] / 1e6:.0f}', *(f'{weights[name] / speed[k] / step:.2f}' for k in speed)
        print(f'{name:16}' + ''.join(f'{c:>15}' for c in cells))
    ratio = lambda a, b, key: median(runs[b], key) / median(runs[a], key)
    print(f'\nmixed / base: decode {ratio("lorajax mixed", "lorajax base", "decode"):.2f}, all {ratio("lorajax mixed", "lorajax base", "total"):.2f}')
    if not args.no_peft: print(f'lorajax mixed / PEFT mixed: {ratio("lorajax mixed", "PEFT mixed", "total"):.1f}')
    if args.json: args.json.write_text(json.dumps(dict(machine=platform.platform(), jax=jax.__version__, bandwidth=speed, runs=runs), indent=1) + '\n')

if __name__ == '__main__': main()
