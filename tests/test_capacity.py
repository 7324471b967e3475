"""Plans against what the arena gives out and what bases weigh, on shapes and sizes that a cell would be bored by."""
from dataclasses import replace
import pytest
from lorajax.adapters import random_adapter
from lorajax.arena import Arena, Residents
from lorajax.base import random_base
from lorajax.capacity import LINEARS, base_numbers, plan_capacity, rank_counts
from lorajax.core import ModelConfig, Refused
from lorajax.cost import Roofline, Work
from lorajax.images import image_of
from lorajax.pages import NoRoom
from lorajax.store import ImageFolder, Store

M0 = ModelConfig(vocab_size=257, width=96, mlp_width=160, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, max_len=128,
                 tied=True)

@pytest.mark.parametrize('config', [M0, replace(M0, tied=False), replace(M0, qkv_bias=True), replace(M0, qk_norm=True),
                                    replace(M0, qkv_bias=True, o_bias=True, n_kv_heads=6)])
def test_a_base_weighs_what_is_planned(config):
    base = random_base(config)
    assert base_numbers(config) * base.dtype.itemsize == base.nbytes

@pytest.mark.parametrize('rank, targets, adapter_dtype, dtype, block, context, batch', [
    (8, LINEARS, None, 'float32', 16, 64, 4), (13, ('q_proj', 'v_proj'), None, 'bfloat16', 8, 50, 3),
    (16, LINEARS, 'int8', 'bfloat16', 32, 128, 2), (64, ('down_proj',), 'int8', 'float32', 16, 17, 7),
    (1, ('k_proj', 'o_proj', 'up_proj'), None, 'float32', 24, 1, 1)])
def test_the_arena_holds_what_is_planned_to_the_page(tmp_path, rank, targets, adapter_dtype, dtype, block, context, batch):
    device = base_numbers(M0) * (2 if dtype == 'bfloat16' else 4) + 70_000 + 1_500_000
    plan = plan_capacity(M0, device, {rank: 1}, context, batch, targets, adapter_dtype, dtype, block, overhead=70_000)
    arena = Arena(plan.layout, plan.pages)
    assert plan.pages * plan.layout.nbytes <= 1_500_000 < (plan.pages + 1) * plan.layout.nbytes
    store = Store(ImageFolder(tmp_path, plan.layout), 64 << 20)
    residents = Residents(store, arena)
    for i in range(batch): residents.pages.take(i, -(-context // plan.layout.block), 'kv', 0.)
    assert residents.pages.free == plan.left and plan.most == plan.fits[rank] > 3
    for i in range(plan.most + 1):
        adapter = random_adapter(M0, f'a{i}', rank, targets, seed=i)
        assert len(image_of(adapter, plan.layout, adapter_dtype).pages) == plan.sizes[rank]
        store.add(f'v{i}', adapter, adapter_dtype)
        store.fetch(f'v{i}')
        if i < plan.most: assert residents.use(f'v{i}')
    with pytest.raises(NoRoom): residents.use(f'v{plan.most}')
    assert residents.pages.free == plan.left - plan.most * plan.sizes[rank]
    assert plan.host(plan.most) == plan.most * plan.sizes[rank] * plan.layout.nbytes
    residents.close(), store.close()

def test_a_mixture_is_counted_by_its_mean():
    plan = plan_capacity(M0, 8 << 20, {8: 3, 32: 1}, 64, 2, overhead=0)
    assert plan.mean == .75 * plan.sizes[8] + .25 * plan.sizes[32]
    assert plan.most * plan.mean <= plan.left < (plan.most + 1) * plan.mean
    assert plan.fits[32] < plan.most < plan.fits[8]

def test_by_default_the_arena_has_what_the_engine_would_take():
    "JAX takes 0.75 of a device unless told otherwise, and the engine nine tenths of what the base leaves of that."
    base, device = base_numbers(M0) * 2, 8 << 20
    for taken, options in ((.75, {}), (.95, dict(taken=.95))):
        plan = plan_capacity(M0, device, {8: 1}, 64, 2, **options)
        assert plan.pages == int(.9 * (taken * device - base)) // plan.layout.nbytes
        assert abs(plan.base + plan.overhead + .9 * (taken * device - base) - device) < 2

@pytest.mark.parametrize('tied', [True, False])
def test_a_step_goes_through_the_head_and_not_through_the_embedding(tied):
    "The head, the embedding's matrix or one of its own, is read and multiplied once; an embedding alone is looked up."
    layer = 2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 160 + 2 * 96
    cost = Roofline(replace(M0, tied=tied), devices=1)
    through = 2 * (3 * layer + 96 + 257 * 96)
    assert (cost.token_flops, cost.read_bytes, cost.base_bytes) == (through, through, through + (not tied) * 2 * 257 * 96)
    assert cost.step(Work()) == pytest.approx(.002 + through / (3.35e12 * .6))

def test_a_group_s_arena_leaves_the_runtime_and_the_programs_something():
    "A Llama 3 70B weighs 141 GB; eight H100s have 684, two 171: .9·(.95·684 - 141) and .9·(.95·171 - 141)."
    llama = ModelConfig(vocab_size=128256, width=8192, mlp_width=28672, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                        max_len=131072)
    assert Roofline(llama).arena_bytes == pytest.approx(458e9, rel=2e-3)
    assert Roofline(llama, devices=2).arena_bytes == pytest.approx(19.3e9, rel=5e-3)
    with pytest.raises(Refused, match='takes 141 GB and 2 devices have 128 for it; take more devices'):
        Roofline(llama, devices=2, taken=.75).arena_bytes

def test_counts_are_finite():
    assert rank_counts('8:70,16') == {8: 70., 16: 1.}
    for text in ('8:nan', '8:inf', '8:-inf', '', 'x:1'):
        with pytest.raises(Refused, match='write them as'): rank_counts(text)

@pytest.mark.parametrize('change, sentence', [(dict(ranks={}), 'positive counts'), (dict(ranks={8: 0}), 'positive counts'),
                                              (dict(ranks={0: 1}), 'positive counts'), (dict(batch=10_000), 'are too few'),
                                              (dict(device=1000), 'are too few'), (dict(taken=0.), 'at most 1'),
                                              (dict(dtype='int4'), 'choose bfloat16 or float32'),
                                              (dict(targets=('query',)), 'name no module')])
def test_refusals(change, sentence):
    with pytest.raises(Refused, match=sentence):
        plan_capacity(**dict(config=M0, device=8 << 20, ranks={8: 1}, context=64, batch=2) | change)
