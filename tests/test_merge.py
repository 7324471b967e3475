"""Merges against dense float64 arithmetic and reloaded in PEFT, for every method, and the cases that others met."""
import zlib
from dataclasses import replace
import jax, jax.numpy as jnp, ml_dtypes, numpy as np, pytest, torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
import dense
from lorajax.adapters import Adapter, LoraPair, random_adapter
from lorajax.arena import Arena, Residents, compose
from lorajax.bake import added, bake
from lorajax.base import random_base, restore_base, save_base
from lorajax.coefficients import blended_losses, coordinate_search, descend, fusion_weights, judged
from lorajax.core import ModelConfig, Refused, module_shapes
from lorajax.examples import batch_rows, example_of
from lorajax.fleet import clusters, cosines, inner_products, replay, shrunk
from lorajax.images import PageLayout
from lorajax.lora_config import LoraSettings, rank_at, scale_at
from lorajax.loss import row_losses
from lorajax.merge import compressed, factor_svd, rounded, weighted_sum
from lorajax.model import Segment, WholeRows, random_tensors
from lorajax.peft import load_adapter, save_adapter
from lorajax.rows import fetch_rows, plan_rows
from lorajax.sparse_merge import METHODS, SPARSE, dense_svd, elect, keep_largest, merged, sparse_sum
from lorajax.store import ImageFolder, Store
from lorajax.working_set import working_set

M0 = ModelConfig(vocab_size=64, width=32, mlp_width=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_len=64)
SEVEN = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
peft_comments = pytest.mark.filterwarnings('ignore::UserWarning', 'ignore:`is_gradient_checkpointing`:FutureWarning')

def delta(pair): return np.float64(pair.scale) * (pair.b.astype('f8') @ pair.a.astype('f8'))

def deltas(adapters, weights): # path -> the weighted sum in float64
    total = {}
    for a,w in zip(adapters, weights):
        for path,p in a.modules.items(): total[path] = total.get(path, 0) + w * delta(p)
    return total

def apart(adapter, want): # largest relative distance of a module
    assert adapter.modules.keys() == want.keys()
    norm = np.linalg.norm
    return max(norm(delta(p) - want[path]) / max(norm(want[path]), 1e-30) for path,p in adapter.modules.items())

def by_settings(name, settings, seed):
    "A random adapter whose ranks and scales are what a config says."
    rng = np.random.default_rng(seed)
    def pair(path, n_in, n_out):
        r = rank_at(settings, path)
        a, b = (rng.normal(scale=.5, size=shape).astype(np.float32) for shape in ((r, n_in), (n_out, r)))
        return LoraPair(a, b, scale_at(settings, path))
    return Adapter(name, {path: pair(path, *shape) for path,shape in module_shapes(M0).items()
                          if path.rpartition('.')[2] in settings.target_modules})

RSLORA = by_settings('rslora', LoraSettings(4, 8, True), 1)
PATTERNS = by_settings('patterns', LoraSettings(4, 8, rank_pattern=(('v_proj', 2), (r'layers\.1\.mlp\.up_proj', 6)),
    alpha_pattern=(('q_proj', 3.),), target_modules=('q_proj', 'v_proj', 'up_proj')), 2)
ENDS = by_settings('ends', LoraSettings(3, 5, target_modules=('embed_tokens', 'lm_head', 'down_proj')), 3)

@pytest.mark.parametrize('weights', [(1, 1, 1), (.3, -2, 0), (-1, 1e-3, 7)])
def test_an_exact_sum_is_the_dense_sum(weights):
    adapters = [RSLORA, PATTERNS, ENDS]
    total = weighted_sum(adapters, weights)
    want = deltas(adapters, weights)
    for path,p in total.modules.items():
        np.testing.assert_allclose(delta(p), want[path], atol=1e-5 * (1 + np.abs(want[path]).max()))
    q = 'model.layers.0.self_attn.q_proj'
    assert total.modules[q].rank == sum(a.modules[q].rank for a,w in zip(adapters, weights) if w and q in a.modules)

@pytest.mark.parametrize('adapter', [RSLORA, PATTERNS, ENDS], ids=lambda a: a.name)
@pytest.mark.parametrize('method', METHODS)
@peft_comments
def test_B93_a_merge_of_one_is_that_adapter(method, adapter, tmp_path):
    kw = dict(rank=adapter.max_rank) if method == 'svd' else dict(density=1.) if method in SPARSE else {}
    m = merged([adapter], [1.], method, name='same', **kw)
    want = deltas([adapter], [1])
    assert m.lost < 1e-5 and apart(m.adapter, want) <= 1e-5
    back = load_adapter(save_adapter(m.adapter, tmp_path / 'same'), M0)
    assert apart(back, want) <= 1e-5
    peft = PeftModel.from_pretrained(llama(), tmp_path / 'same')
    for path,layer in lora_layers(peft).items(): # PEFT's own idea of the update
        np.testing.assert_allclose(layer.get_delta_weight('default').detach().numpy(),
                                   want[path].T if 'embed' in path else want[path], atol=2e-5 * np.abs(want[path]).max())

def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=M0.rms_eps, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()

def lora_layers(peft):
    return {n.removeprefix('base_model.model.'): m for n,m in peft.named_modules() if hasattr(m, 'get_delta_weight')}

@pytest.mark.parametrize('kw', [dict(), dict(method='svd', rank=3), dict(method='ties', density=.4), dict(method='dare', rank=5),
                                dict(method='prune', density=.7, rank=64)], ids=str)
@peft_comments
def test_B96_a_merged_adapter_reloads_with_equal_logits(kw, tmp_path):
    "Inputs with patterns, of unlike ranks, on unlike modules; logits of PEFT and of the dense reference, 2e-4 apart."
    m = merged([RSLORA, PATTERNS, ENDS], [.2, -.1, .15], name='new', **kw)
    folder = save_adapter(m.adapter, tmp_path / 'new')
    back = load_adapter(folder, M0)
    assert back.fingerprint == m.adapter.fingerprint
    assert {path: p.rank for path,p in back.modules.items()} == {path: p.rank for path,p in m.adapter.modules.items()}
    ids, model = [5, 9, 33, 1, 60, 12], llama()
    weights = {k: v.numpy() for k,v in model.state_dict().items()}
    want = dense.logits(M0, dense.merged(weights, back.modules), ids)
    with torch.inference_mode(): theirs = PeftModel.from_pretrained(model, folder)(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(theirs - want).max() < 2e-4 and np.abs(want - dense.logits(M0, weights, ids)).max() > .1

def test_B96_names_and_ranks_are_checked(tmp_path):
    with pytest.raises(Refused, match='a name of its own'): merged([RSLORA, ENDS], name='ends')
    save_adapter(merged([RSLORA, ENDS]).adapter, tmp_path / 'there')
    with pytest.raises(Refused, match='is there already'): save_adapter(merged([RSLORA, ENDS]).adapter, tmp_path / 'there')
    many = [random_adapter(M0, f'a{i}', 64, seed=i) for i in range(9)]
    with pytest.raises(Refused, match='rank 576, over the limit of 512; choose svd'): merged(many)
    m = merged(many, method='svd', rank=16)
    assert m.adapter.max_rank == 16 and 0 < m.lost < 1 and 'is missing' in m.adapter.notes[0]

@pytest.mark.parametrize('method', ['dare', 'dare-ties', 'ties', 'prune'])
def test_B95_densities(method):
    for bad in (0, 0., -.1, 1.5, float('nan'), True, '1'):
        with pytest.raises(Refused, match='density='): sparse_sum([RSLORA], method=method, density=bad)
    tiny = sparse_sum([RSLORA, PATTERNS], method=method, density=1e-6)
    assert all(np.isfinite(p.a).all() and np.isfinite(p.b).all() for p in tiny.adapter.modules.values())
    for seed in range(5):
        one = sparse_sum([RSLORA], method=method, density=1., seed=seed)
        assert apart(one.adapter, deltas([RSLORA], [1])) < 1e-5

def test_B95_dare_is_unbiased_and_draws_independent_masks():
    path, pair = next(iter(RSLORA.modules.items()))
    one = Adapter('one', {path: pair})
    def draw(seed, *adapters):
        return delta(sparse_sum(adapters or [one], method='dare', density=.5, rank=32, seed=seed).adapter.modules[path])
    want, found = delta(one.modules[path]), np.stack([draw(seed) for seed in range(200)])
    error = found.std(axis=0, ddof=1) / np.sqrt(200)
    assert (np.abs(found.mean(axis=0) - want) <= 3 * error + 1e-6).mean() > .99
    np.testing.assert_array_equal(draw(7), draw(7))
    twin = replace(one, name='twin', modules={path: replace(one.modules[path], scale=1.001 * one.modules[path].scale)})
    both = draw(3, one, twin) # equal masks would leave only 0 and 4 times the value; independent ones also leave 2
    share = np.round(both / want)
    assert {0, 2, 4} <= set(np.unique(share[np.abs(want) > .1]).astype(int))

def test_ties_and_pruning_against_plain_loops():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 7, 9)).astype(np.float32)
    thin = np.stack([keep_largest(m, .3, rng) for m in x])
    for m,t in zip(x, thin):
        kept = np.abs(m) >= np.sort(np.abs(m), axis=None)[-round(.3 * 63)]
        np.testing.assert_array_equal(t, np.where(kept, m, 0))
    got = elect(thin)
    for i in range(7):
        for j in range(9):
            column = thin[:, i, j].astype(float)
            side = [v for v in column if v * column.sum() > 0]
            assert got[i, j] == pytest.approx(np.mean(side) if side else 0, abs=1e-6)

@pytest.mark.parametrize('method', SPARSE)
def test_sparse_merges_equal_dense_arithmetic(method):
    "At full rank, with unequal weights, and modules that only some adapters target."
    weights = [1.5, -.5, 2.]
    m = sparse_sum([RSLORA, PATTERNS, ENDS], weights, method, .6, rank=64, seed=4)
    assert m.lost < 1e-6
    for path,p in m.adapter.modules.items():
        has = [(w, a.modules[path].delta) for a,w in zip((RSLORA, PATTERNS, ENDS), weights) if path in a.modules]
        thin, join = SPARSE[method]
        rngs = [np.random.default_rng([4, i, zlib.crc32(path.encode())]) for i in range(len(has))]
        want = join(np.stack([np.float32(w) * thin(d, .6, rng) for (w, d),rng in zip(has, rngs)]))
        np.testing.assert_allclose(delta(p), want, atol=1e-4 * np.abs(want).max())

def test_B97_truncation_is_the_best_there_is_and_says_what_it_costs():
    "A rank-4 and an unrelated rank-2 adapter."
    total = weighted_sum([random_adapter(M0, 'a', 4, seed=1), random_adapter(M0, 'b', 2, seed=2)])
    assert total.max_rank == 6 and compressed(total, 6).lost == 0 and compressed(total, 6).adapter.notes == ()
    dropped = {}
    for rank in (4, 1):
        m = compressed(total, rank)
        for path,p in total.modules.items():
            values = np.linalg.svd(delta(p), compute_uv=False)
            dropped[path] = np.linalg.norm(values[rank:])
            assert np.linalg.norm(delta(p) - delta(m.adapter.modules[path])) == pytest.approx(dropped[path], rel=1e-5)
            assert m.by_module[path] == pytest.approx(dropped[path] / np.linalg.norm(values), rel=1e-5)
        whole = np.sqrt(sum(np.linalg.norm(delta(p)) ** 2 for p in total.modules.values()))
        assert m.lost == pytest.approx(np.linalg.norm(list(dropped.values())) / whole, rel=1e-5) and m.lost > .1
        assert f'merged at rank {rank}' in m.adapter.notes[0]

@pytest.mark.parametrize('shape', [(96, 160, 16), (160, 96, 16), (12, 40, 16), (40, 12, 16), (8, 8, 1)])
def test_the_svd_of_factors_is_that_of_the_product(shape):
    out, width, rank = shape
    rng = np.random.default_rng(0)
    pair = LoraPair(rng.normal(size=(rank, width)).astype('f4'), rng.normal(size=(out, rank)).astype('f4'), -1.5)
    u, values, vt = factor_svd(pair)
    k = min(out, width, rank)
    assert u.shape == (out, k) and vt.shape == (k, width)
    np.testing.assert_allclose(values, np.linalg.svd(delta(pair), compute_uv=False)[:k], rtol=1e-9)
    np.testing.assert_allclose(u * values @ vt, delta(pair), atol=1e-9 * values[0])
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-9)
    for n in (1, k): np.testing.assert_allclose(dense_svd(delta(pair).astype('f4'), n)[1], values[:n], rtol=1e-4)

def test_an_exact_merge_is_served_as_a_composition_without_new_pages(tmp_path):
    "The same logits from the joined pages as from the merged adapter, and not a page more."
    base = random_base(replace(M0, vocab_size=257))
    red, blue = (random_adapter(base.config, n, r, ('q_proj', 'down_proj'), seed=r, std=.3) for n,r in (('red', 3), ('blue', 12)))
    layout = PageLayout(base.config, PageLayout.step(base.config) * 4, 'float32')
    folder = ImageFolder(tmp_path, layout)
    residents = Residents(Store(folder, 1 << 24), Arena(layout, 40))
    for a in (red, blue): residents.store.add(base.version(a), a)
    for a in (red, blue):
        while not residents.use(base.version(a)): pass
    free = residents.pages.free
    both = compose(residents, {base.version(red): .5, base.version(blue): -2.})
    assert residents.use(both) and residents.pages.free == free
    rows = [example_of(base.tokenizer, 'compose', 'and merge')]
    batch = batch_rows(rows, [1])
    plan = plan_rows(residents, [both], 8, 1)
    joined = row_losses(base, batch, fetch_rows(residents.arena.words, plan, layout))
    exact = row_losses(base, batch, working_set([weighted_sum([red, blue], [.5, -2.])], base.config, jnp.float32))
    np.testing.assert_allclose(joined, exact, rtol=1e-4, atol=1e-4)
    residents.store.close()

def test_B99_one_rounding_and_the_original_stays():
    rng = np.random.default_rng(0)
    w = rng.normal(scale=.02, size=(256, 256)).astype(ml_dtypes.bfloat16)
    d = rng.normal(scale=2e-5, size=(256, 256)).astype(np.float32)
    before = w.tobytes()
    new, lost = added(w, d)
    unchanged = (new == w).mean()
    assert .7 < unchanged < .85 and new.dtype == w.dtype and w.tobytes() == before
    exact = w.astype('f8') + d
    assert np.abs(new.astype('f8') - exact).max() <= np.abs(w.astype('f8') - exact).max() * 4
    np.testing.assert_array_equal(new, (w.astype(np.float32) + d).astype(w.dtype))
    assert lost == pytest.approx(np.linalg.norm(new.astype('f8') - exact) / np.linalg.norm(d), rel=1e-3) and lost > .5
    assert added(w.astype(np.float32), d)[1] < 1e-3

def test_B99_three_adapters_a_hundred_times_over_leave_the_base_alone():
    base = random_base(replace(M0, vocab_size=257), 'bfloat16')
    bits = [np.asarray(x).tobytes() for x in jax.tree.leaves(random_base(base.config, 'bfloat16').decoder)]
    adapters = [random_adapter(base.config, f'a{i}', 2, seed=i, std=.01) for i in range(3)]
    first = bake(base, weighted_sum(adapters))
    assert first.lost and max(first.lost.values()) > 0
    for _ in range(100): again = bake(base, weighted_sum(adapters))
    same = lambda one, other: all(np.array_equal(*map(np.asarray, xs)) for xs in zip(*map(jax.tree.leaves, (one, other))))
    assert same(again.base.decoder, first.base.decoder) and again.lost == first.lost
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(base.decoder)] == bits

@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('targets', [('lm_head',), ('embed_tokens',), (*SEVEN, 'embed_tokens', 'lm_head')], ids=str)
def test_B28_a_baked_head_unties(tied, targets, tmp_path):
    config = replace(M0, vocab_size=257, tied=tied)
    base = random_base(config)
    adapter = random_adapter(config, 'a', 3, targets, seed=2, std=.2)
    baked = bake(base, adapter).base
    assert baked.config.tied is False
    save_base(baked, tmp_path / 'baked')
    back = restore_base(tmp_path / 'baked')
    assert back.config.tied is False and back.fingerprint == base.version(adapter)
    w, ids = random_tensors(config), [5, 99, 33, 1, 200]
    want = dense.logits(config, dense.merged(w, adapter.modules), ids)
    for b in (baked, back):
        (states,), _ = b.decoder([Segment(jnp.array([ids]), jnp.arange(5)[None], jnp.array([0]))], WholeRows(), {})
        np.testing.assert_allclose(b.decoder.score(states[0], jnp.zeros(5, jnp.int32), {}), want, atol=2e-3)
    embeddings = [b.tensor('model.embed_tokens.weight') for b in (baked, base)]
    assert np.array_equal(*embeddings) == (targets == ('lm_head',))

def test_what_acts_on_part_of_a_text_is_not_baked_or_summed():
    base, red, blue = random_base(M0), random_adapter(M0, 'red'), random_adapter(M0, 'blue', seed=1)
    partly, routed = replace(blue, invocation=(3, 4)), replace(blue, routing=np.ones(32))
    for one in (partly, routed):
        with pytest.raises(Refused, match='serve it as an adapter'): bake(base, one)
        with pytest.raises(Refused, match='merge adapters that agree'): weighted_sum([red, one])
    both = weighted_sum([partly, replace(red, invocation=(3, 4))])
    assert both.invocation == (3, 4) and weighted_sum([routed, replace(red, routing=np.ones(32))]).routing.sum() == 32

@pytest.mark.parametrize('call, sentence', [
    (lambda: weighted_sum([]), 'nothing to merge'), (lambda: weighted_sum([RSLORA], [1, 2]), '2 weights for 1 adapters'),
    (lambda: weighted_sum([RSLORA], [float('inf')]), 'must be a finite number'),
    (lambda: weighted_sum([RSLORA], [True]), 'must be a finite number'),
    (lambda: weighted_sum([RSLORA], name='a.b'), 'without dots'), (lambda: compressed(RSLORA, 0), 'rank=0'),
    (lambda: weighted_sum([RSLORA, random_adapter(replace(M0, width=48), 'x')]), 'merge adapters of one base'),
    (lambda: merged([RSLORA], method='svd'), 'needs the rank'), (lambda: merged([RSLORA], density=.5), 'drops no numbers'),
    (lambda: merged([RSLORA], method='median'), 'choose one of exact, svd'), (lambda: merged([RSLORA], rank=3), 'choose svd'),
    (lambda: merged([RSLORA], method='prune', seed=1), 'draws nothing'), (lambda: clusters(np.eye(3), 4), 'budget=4'),
    (lambda: fusion_weights({}), 'no probabilities'), (lambda: fusion_weights(dict(a=0.)), 'all probabilities are 0'),
    (lambda: fusion_weights(dict(a=1.5)), 'from 0 to 1')])
def test_bad_merges_end_in_one_sentence(call, sentence):
    with pytest.raises(Refused) as e: call()
    assert sentence in str(e.value) and '\n' not in str(e.value)

def test_an_adapter_named_twice_takes_its_rank_once():
    twice = weighted_sum([RSLORA, RSLORA], [.5, .25])
    assert twice.max_rank == 4 and apart(twice, deltas([RSLORA], [.75])) < 1e-6
    gone = weighted_sum([RSLORA, RSLORA], [1., -1.])
    assert gone.max_rank == 1 and not any(delta(p).any() for p in gone.modules.values())

def test_rounding_changes_the_dtype_alone():
    half = rounded(PATTERNS, 'bfloat16')
    assert {p.a.dtype.name for p in half.modules.values()} == {'bfloat16'} and half.nbytes * 2 == PATTERNS.nbytes
    assert apart(half, deltas([PATTERNS], [1])) < .01

def test_inner_products_are_those_of_the_dense_updates():
    fleet = [RSLORA, PATTERNS, ENDS, replace(RSLORA, name='again')]
    flat = [np.concatenate([d.get(path, np.zeros(s[::-1])).ravel() for path,s in module_shapes(M0).items()])
            for d in (deltas([a], [1]) for a in fleet)]
    np.testing.assert_allclose(inner_products(fleet), np.array(flat) @ np.array(flat).T, rtol=1e-4, atol=1e-2)
    assert cosines(inner_products(fleet))[0, 3] == pytest.approx(1)

def test_clusters_are_average_linkage():
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    x = np.random.default_rng(0).normal(size=(40, 6))
    distance = np.linalg.norm(x[:, None] - x[None], axis=-1)
    for k in (1, 5, 17, 40):
        found = fcluster(linkage(squareform(distance), 'average'), k, 'maxclust')
        want = sorted(sorted(map(int, np.flatnonzero(found == c))) for c in set(found))
        assert clusters(-distance, k) == want

def test_a_shrunk_fleet_tells_what_each_task_loses():
    fleet = [random_adapter(M0, f'a{i}', 4, seed=i // 2) for i in range(6)] # three pairs of equals
    small = shrunk(fleet, 3)
    assert len(small.merges) == 3 and max(small.lost.values()) < 1e-3
    smaller = shrunk(fleet, 2)
    by_name = {m.adapter.name: m.adapter for m in smaller.merges}
    for a in fleet:
        new, old = deltas([by_name[smaller.serves[a.name]]], [1]), deltas([a], [1])
        far, norm = (np.sqrt(sum(np.linalg.norm(x) ** 2 for x in xs)) for xs in ([new[p] - old[p] for p in old], old.values()))
        assert smaller.lost[a.name] == pytest.approx(far / norm, abs=1e-3)

def test_a_replay_by_hand():
    "Two adapters of two pages, room for five: the third request finds its adapter and the first block, but not the second."
    r = replay([('a', 'xy'), ('b', 'x'), ('b', 'xz')], dict(a=2, b=2), 5)
    assert (r.requests, r.adapter_hits, r.prefix_hits) == (3, 1 / 3, 1 / 5)
    shared = replay([('a', 'xy'), ('b', 'x'), ('b', 'xz')], dict(m=2), 5, dict(a='m', b='m'))
    assert (shared.adapter_hits, shared.prefix_hits) == (2 / 3, 2 / 5)

def six(base):
    return [random_adapter(base.config, f'a{i}', 2 + i, ('q_proj', 'down_proj', 'lm_head'), seed=i, std=.1) for i in range(3)]

def test_blended_losses_and_their_gradient_are_those_of_the_merged_adapter():
    base = random_base(replace(M0, vocab_size=257))
    adapters, tasks = six(base), [[example_of(base.tokenizer, p, a)] for p,a in (('one', '1'), ('two', '22'))]
    losses, w = blended_losses(base, adapters, tasks), np.array([.5, -1., 2.], np.float32)
    np.testing.assert_allclose(losses(jnp.array(w)), judged(base, weighted_sum(adapters, list(w)), tasks), rtol=1e-4)
    slope = jax.grad(lambda w: losses(w).mean())(jnp.array(w))
    for i in range(3):
        step = np.eye(3, dtype=np.float32)[i] * 1e-2
        by_hand = (losses(jnp.array(w + step)).mean() - losses(jnp.array(w - step)).mean()) / 2e-2
        assert float(slope[i]) == pytest.approx(float(by_hand), rel=.05, abs=1e-3)

def test_both_searches_find_the_lowest_point():
    bowl = lambda w: jnp.stack([(w[0] - .3) ** 2, (w[1] + .8) ** 2 + .1])
    found = descend(bowl, [1., 1.], steps=200), coordinate_search(lambda w: float(bowl(jnp.array(w)).mean()), [1., 1.], least=.01)
    for f in found:
        np.testing.assert_allclose(f.weights, [.3, -.8], atol=.02)
        assert f.loss == pytest.approx(.05, abs=1e-3) and f.before > 1

def test_fusion_weights_by_hand():
    p = dict(a=.5, b=.3, c=.15, d=.05)
    assert fusion_weights(p) == pytest.approx(dict(a=.5 / .95, b=.3 / .95, c=.15 / .95))
    assert fusion_weights(p, most=1) == dict(a=1.) and fusion_weights(p, most=9, least=.5) == pytest.approx(dict(a=.625, b=.375))
