"""What test_mesh.py runs in processes of their own, since JAX takes its number of devices once: `mesh.py FOLDER` prints JSON.

One engine on one device and others on 2, 4 and 8 simulated ones answer the same requests, with an arena too small for all adapters.
"""
import json, re, sys
from dataclasses import replace
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh
from lorajax import engine as engine_module, generate as closed
from lorajax.adapters import random_adapter
from lorajax.base import divided, load_base, random_base, save_base
from lorajax.core import ModelConfig, Refused, Sampling
from lorajax.engine import Config, Engine, generate
from lorajax.follow import follow
from lorajax.hosts import join_hosts
from lorajax.images import pieces_of
from lorajax.model import pack, random_tensors
from lorajax.split import split_over
from lorajax.step import StepShape, page_layout

TOGETHER = sys.argv[2:] == ['hosts']
if TOGETHER: join_hosts() # before anything is on a device

SHAPE = ModelConfig(vocab_size=257, width=32, mlp_width=64, n_layers=2, n_heads=16, n_kv_heads=8, head_dim=8, max_len=160,
                    qkv_bias=True, o_bias=True, qk_norm=True)
LINEARS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
TARGETS = [('q_proj', 'v_proj'), LINEARS, ('down_proj',), ('k_proj', 'o_proj', 'up_proj'), LINEARS, ('lm_head', 'embed_tokens', 'q_proj')]
BASE = random_base(SHAPE)
ADAPTERS = [random_adapter(SHAPE, f'a{i}', 1 + 5 * i % 16, targets, seed=i, std=.3) for i, targets in enumerate(TARGETS)]
NAMES = [None, *(a.name for a in ADAPTERS), 'a1-int8', 'mix']
SMALL = Config(rows=4, slots=2, max_rank=16, outside=16, chunks=((2, 16),), max_len=160, prompt_logprobs=False)
GREEDY = Sampling(max_new_tokens=8, ignore_eos=True)
engine_module.step_shapes = lambda *_: [StepShape(4), StepShape(4, blocks=4), StepShape(4, 2, 16, 4)] # few, to compile less
COLLECTIVE = r' (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\('

def engine_on(mesh, folder): # a base and a config
    "With pages for four sequences of 80 tokens, and for half of the adapters."
    base = divided(BASE, mesh)
    layout = page_layout(base)
    pages = lambda a: -(-pieces_of({p: m.rank for p,m in a.modules.items()}, layout.config).tiles // layout.tiles)
    memory = (4 * 80 // layout.block + sum(map(pages, ADAPTERS)) // 2) * layout.nbytes
    return base, replace(SMALL, memory=memory, folder=folder / f'images-{base.split.n}')

def answers(engine):
    "Every name in mixed batches, twice, so that the second time finds prefixes; and seeded sampling."
    for a in ADAPTERS: engine.load(a)
    engine.load(ADAPTERS[1], 'a1-int8', 'int8')
    engine.compose('mix', {'a0': .7, 'a1-int8': -.4})
    rng, found = np.random.default_rng(0), []
    prompts = [rng.integers(0, 256, n).tolist() for n in (5, 33, 18, 40, 21, 60, 37, 9, 50)]
    prompts = [prompts[0][:3] + p for p in prompts] # with a beginning in common
    for rules in (GREEDY, GREEDY, replace(GREEDY, temperature=1., seed=3, logprobs=2)):
        found += [[t.token for t in out.tokens] for out, in generate(engine, prompts, NAMES, rules)]
    found += [[t.token for t in out.tokens] for out, in generate(engine, prompts, NAMES[::-1], GREEDY)]
    return found

def collectives(program): return re.findall(COLLECTIVE, program.as_text())

def programs(engine): # what they exchange: the step without and with adapters, with prompts; and all others
    at = lambda shape: next(p for s,p in engine.runner.programs.items() if shape(s))
    steps = dict(bare=at(lambda s: not s.blocks and not s.prompts), adapted=at(lambda s: s.blocks and not s.prompts),
                 prompts=at(lambda s: s.blocks and s.prompts))
    aliased = {name: p.memory_analysis().alias_size_in_bytes for name,p in steps.items()}
    others = [*engine.residents.arena.programs.values(), engine.residents.arena.look]
    return {name: collectives(p) for name,p in steps.items()}, aliased, sum((collectives(p) for p in others), [])

def run(mesh, folder):
    with Engine(*engine_on(mesh, folder)) as engine:
        found, stats = answers(engine), engine.stats()
        chunk = next(iter(engine.store.versions.values())).chunks[0]
        exchanged, aliased, by_others = programs(engine)
        return dict(tokens=found, swaps=stats.swaps, cached=sum(h.cached for h in stats.hits.values()), exchanged=exchanged,
                    aliased=aliased, arena=engine.residents.arena.nbytes, by_others=by_others,
                    pinned=[chunk.sharding.memory_kind, len(chunk.addressable_shards), chunk.addressable_shards[0].data.shape[1]],
                    words=engine.runner.layout.words)

def refusals(folder):
    "What can't be divided, and what was made for another number of devices."
    two = divided(BASE, 2)
    asked = dict(heads=lambda: divided(BASE, 3), devices=lambda: divided(BASE, 9), number=lambda: split_over('two'),
                 axes=lambda: split_over(Mesh(np.array(jax.devices()), ('x',))), again=lambda: divided(two, 4),
                 folder=lambda: Engine(BASE, replace(SMALL, mesh=2, memory=1 << 20, folder=folder / 'images-4')),
                 closed=lambda: closed.generate(two, [[1]]), save=lambda: save_base(two, folder / 'saved'))
    said = {}
    for name, ask in asked.items():
        try: ask()
        except Refused as e: said[name] = str(e)
    return said

def leaves(base): return [np.asarray(x) for x in jax.tree.leaves(nnx.state(base.decoder))]

def loaded(folder): # whether a base that is divided while it is loaded, in either way, is that which is divided later
    want = divided(BASE, 4)
    kept = load_base(save_base(BASE, folder / 'kept'), mesh=4)
    packed = replace(want, decoder=pack(SHAPE, random_tensors(SHAPE).get, np.float32, split=want.split))
    return [all(map(np.array_equal, leaves(want), leaves(b))) for b in (kept, packed)]

def on_several_hosts(folder): # this process's part
    base, config = engine_on(len(jax.devices()), folder)
    if jax.process_index(): return follow(base, config)
    with Engine(base, config) as engine: print(json.dumps(dict(tokens=answers(engine), swaps=engine.stats().swaps)))

if __name__ == '__main__':
    folder = Path(sys.argv[1])
    if TOGETHER: on_several_hosts(folder)
    else: print(json.dumps(dict(runs={n: run(n, folder) for n in (1, 2, 4, 8)}, refused=refusals(folder), loaded=loaded(folder))))
