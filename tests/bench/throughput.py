"""Tokens/s of closed batches: the base, one adapter, and eight, beside the machine's memory limit and PEFT.

Batch of 8 rows, 64 prompt tokens and 64 new ones, greedy, SmolLM2 in bfloat16; eight different rank-16 adapters on all seven
linears. PEFT runs in a process of its own.
"""
import multiprocessing, statistics, tempfile, time
from contextlib import contextmanager, nullcontext
from pathlib import Path
import psutil
from quiet import chosen, figure, ratio, take_turns

ROWS, PROMPT, NEW, RANK = 8, 64, 64, 16
PRODUCTS, XLAS = 'products alone', "XLA's products"
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')

def prompts():
    import numpy as np
    return np.random.default_rng(0).integers(17, 49152, (ROWS, PROMPT)).tolist()

# ---- the measured things: functions that return a dict of seconds

def ours(base, adapter_folders):
    "The things, and the bytes of weights that a step of each reads."
    import jax
    from lorajax.core import Sampling
    from lorajax.generate import token_stream
    from lorajax.working_set import working_set
    adapters = [base.load_adapter(f) for f in adapter_folders]
    rules, ids = [Sampling(max_new_tokens=NEW, ignore_eos=True)] * ROWS, prompts()
    def once(groups, slots):
        start = time.perf_counter()
        arrivals = [time.perf_counter() for _ in token_stream(base, ids, groups, slots, rules)]
        return dict(prefill=arrivals[0] - start, decode=arrivals[-1] - arrivals[0], total=arrivals[-1] - start)
    group = lambda some: working_set(some, base.config, base.dtype)
    cases = {'base': ({}, [0] * ROWS), 'one adapter': (group(adapters[:1]), [1] * ROWS),
             'eight adapters': (group(adapters), list(range(1, ROWS + 1)))}
    for case in cases.values(): once(*case)
    things = {name: (lambda case=case: once(*case)) for name,case in cases.items()}
    things |= {PRODUCTS: products(base, None), XLAS: products(base, 'dot=xla')}
    return things, {name: base.nbytes + sum(x.nbytes for x in jax.tree.leaves(groups)) for name,(groups,_) in cases.items()}

def products(base, backend):
    "A decode step's products with the base's weights and nothing else: what they leave of the memory's speed."
    import jax, jax.numpy as jnp
    from lorajax.ops import dot
    layers = base.decoder.layers
    stacks, head = [m.weight[...] for m in (layers.qkv, layers.o, layers.gate_up, layers.down)], base.decoder.embed[...]
    @jax.jit
    def step(x, stacks, head):
        def layer(x, i):
            for w in stacks: x = dot(x[:, :w.shape[2]], w, i, backend=backend).astype(base.dtype)
            return x, None
        return dot(jax.lax.scan(layer, x, jnp.arange(len(stacks[0])))[0], head, backend=backend)
    x = jnp.ones((ROWS, base.config.width), base.dtype)
    def once():
        start = time.perf_counter()
        for _ in range(NEW - 1): step(x, stacks, head).block_until_ready()
        return dict(decode=time.perf_counter() - start)
    once()
    return once

def peft_worker(pipe, adapter_folders):
    "transformers + PEFT in a process of its own, so that neither engine's threads disturb the other."
    import os, warnings
    os.environ.update(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', TQDM_DISABLE='1')
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
    x, names = torch.tensor(prompts()), [f'a{i}' for i in range(ROWS)]
    @torch.inference_mode()
    def run(new=NEW):
        start = time.perf_counter()
        out = peft.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=new, adapter_names=names)
        assert out.shape == (ROWS, PROMPT + new)
        return dict(total=time.perf_counter() - start)
    run(4)
    pipe.send('ready')
    try:
        while pipe.recv(): pipe.send(run())
    except EOFError: pass # the other end is done

@contextmanager
def peft(adapter_folders):
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context('spawn').Process(target=peft_worker, args=(there, adapter_folders))
    worker.start()
    there.close()
    assert here.recv() == 'ready'
    def ask():
        here.send(True)
        return here.recv()
    try: yield {'PEFT, eight adapters': ask}
    finally:
        here.close()
        worker.join()

# ---- figures

def limits(weights, step, speed): # bytes, s, bytes/s
    shares = ' and '.join(f'{weights / speed[k] / step:.2f} of the {k} limit' for k in speed)
    return f'{weights / 1e6:.0f} MB a step: {shares}'

def shown(runs, weights, speed):
    for name in weights:
        step = statistics.median(r['decode'] for r in chosen(runs[name])) / (NEW - 1)
        yield figure('batch', f'{name}, prefill', 'tokens/s', runs[name], lambda r: ROWS * PROMPT / r['prefill'])
        yield figure('batch', f'{name}, decode', 'tokens/s', runs[name], lambda r: ROWS * (NEW - 1) / r['decode'],
                     limits(weights[name], step, speed))
    for name in (name for name in runs if name not in (PRODUCTS, XLAS)):
        yield figure('batch', f'{name}, all new', 'tokens/s', runs[name], lambda r: ROWS * NEW / r['total'])
    base, mixed = runs['base'], runs['eight adapters']
    yield ratio('batch', 'products alone / base', runs[PRODUCTS], base, 'decode', 'in the time of a step')
    yield ratio('batch', "XLA's products / ours", runs[XLAS], runs[PRODUCTS], 'decode', 'times as long')
    yield ratio('batch', 'one adapter / base, decode', base, runs['one adapter'], 'decode')
    yield ratio('batch', 'eight adapters / base, decode', base, mixed, 'decode')
    yield ratio('batch', 'eight adapters / base, all new', base, mixed, 'total')
    if peers := runs.get('PEFT, eight adapters'):
        yield ratio('batch', 'eight adapters / PEFT, all new', peers, mixed, 'total', 'times as many tokens/s as PEFT')

def batch(budget, options):
    from lorajax.adapters import random_adapter
    from lorajax.base import load_base
    from lorajax.peft import save_adapter
    with tempfile.TemporaryDirectory() as tmp:
        base = load_base('smollm2')
        adapters = [random_adapter(base.config, f'a{i}', RANK, LINEARS, 1., i, .02) for i in range(ROWS)]
        folders = [save_adapter(a, f'{tmp}/{a.name}') for a in adapters]
        things, weights = ours(base, folders)
        with peft(folders) if options.peers == 'peft' else nullcontext({}) as peer:
            runs = take_turns(things | peer, budget)
    return list(shown(runs, weights, options.bandwidth))
