"""Tokens/s of base and mixed batches beside the machine's memory limit and PEFT, in one run.

Batch of 8 rows, 64 prompt tokens and 64 new ones, greedy, bfloat16; eight different rank-16 adapters on all seven
linears. The things compared take turns, as quiet.py says. --json FILE keeps all repetitions.
"""
import argparse, json, multiprocessing, platform, tempfile, time
from contextlib import contextmanager, nullcontext
from pathlib import Path
import psutil
from quiet import bandwidth, machine, median, quiet, take_turns

ROWS, PROMPT, NEW, RANK = 8, 64, 64, 16
PRODUCTS = 'products alone'
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
    things = {name: (lambda case=case: once(*case)) for name,case in cases.items()} | {PRODUCTS: products(base)}
    return things, {name: size(groups) for name,(groups,_) in cases.items()}

def products(base):
    "A decode step's products with the base's weights and nothing else: what XLA leaves of the memory's speed."
    import jax, jax.numpy as jnp
    from lorajax.ops import dot
    layers = base.decoder.layers
    stacks, head = [m.weight[...] for m in (layers.qkv, layers.o, layers.gate_up, layers.down)], base.decoder.embed[...]
    @jax.jit
    def step(x, stacks, head):
        def layer(x, i):
            for w in stacks: x = dot(x[:, :w.shape[2]], w[i]).astype(base.dtype)
            return x, None
        return dot(jax.lax.scan(layer, x, jnp.arange(len(stacks[0])))[0], head)
    x = jnp.ones((ROWS, base.config.width), base.dtype)
    def once():
        start = time.perf_counter()
        for _ in range(NEW - 1): step(x, stacks, head).block_until_ready()
        return dict(total=time.perf_counter() - start)
    once()
    return once

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
    for g in (peft.generation_config, peft.base_model.model.generation_config):
        g.eos_token_id, g.pad_token_id, g.do_sample = None, 0, False
    x = torch.tensor(prompts())
    names = {'PEFT mixed': [f'a{i}' for i in range(ROWS)], 'PEFT base rows': ['__base__'] * ROWS}
    @torch.inference_mode()
    def run(name, new=NEW):
        start = time.perf_counter()
        out = peft.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=new,
                            adapter_names=names[name])
        assert out.shape == (ROWS, PROMPT + new)
        return dict(total=time.perf_counter() - start)
    run('PEFT mixed', 4)
    pipe.send('ready')
    try:
        while True: pipe.send(run(pipe.recv()))
    except EOFError: pass # the other end is done

@contextmanager
def peft(adapter_folders):
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context('spawn').Process(target=peft_worker, args=(there, adapter_folders))
    worker.start()
    there.close()
    assert here.recv() == 'ready'
    def ask(name):
        here.send(name)
        return here.recv()
    try: yield {name: (lambda name=name: ask(name)) for name in ('PEFT mixed', 'PEFT base rows')}
    finally:
        here.close()
        worker.join()

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
    print(machine())
    with tempfile.TemporaryDirectory() as tmp:
        config = open_base('smollm2').config
        adapters = [random_adapter(config, f'a{i}', RANK, LINEARS, 1., i, .02) for i in range(ROWS)]
        folders = [save_adapter(a, f'{tmp}/{a.name}') for a in adapters]
        things, weights = ours(folders)
        with nullcontext({}) if args.no_peft else peft(folders) as peer:
            speed, runs = bandwidth(), take_turns(things | peer, args.reps)
            again = bandwidth()
    speed = {k: max(speed[k], again[k]) for k in speed}
    print(f'memory: read {speed["read"] / 1e9:.1f} GB/s, copy {speed["copy"] / 1e9:.1f} GB/s (read + written)\n')
    heads = ('prefill', 'decode', 'all new', 'ms/step', 'MB/step', 'of read limit', 'of copy limit', 'undisturbed')
    print(f'{"tokens/s":16}' + ''.join(f'{h:>15}' for h in heads))
    for name,r in runs.items():
        if name == PRODUCTS: continue
        cells = ['', '', f'{ROWS * NEW / median(r, "total"):.0f}'] + [''] * 4 + [f'{len(quiet(r))} of {len(r)}']
        if name in weights:
            step = median(r, 'decode') / (NEW - 1)
            cells[:2] = f'{ROWS * PROMPT / median(r, "prefill"):.0f}', f'{ROWS / step:.0f}'
            shares = (f'{weights[name] / speed[k] / step:.2f}' for k in speed)
            cells[3:7] = f'{step * 1e3:.1f}', f'{weights[name] / 1e6:.0f}', *shares
        print(f'{name:16}' + ''.join(f'{c:>15}' for c in cells))
    alone, step = (median(runs[name], key) / (NEW - 1) for name,key in ((PRODUCTS, 'total'), ('lorajax base', 'decode')))
    print(f'\nXLA\'s products alone: {alone * 1e3:.1f} ms, {weights["lorajax base"] / speed["read"] / alone:.2f} of read limit; '
          f'they are {alone / step:.0%} of the base\'s step')
    ratio = lambda a, b, key: median(runs[b], key) / median(runs[a], key)
    decode, total = (ratio('lorajax mixed', 'lorajax base', key) for key in ('decode', 'total'))
    print(f'mixed / base: decode {decode:.2f}, all {total:.2f}')
    if not args.no_peft: print(f'lorajax mixed / PEFT mixed: {ratio("lorajax mixed", "PEFT mixed", "total"):.1f}')
    record = dict(machine=platform.platform(), jax=jax.__version__, bandwidth=speed, runs=runs)
    if args.json: args.json.write_text(json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main()
