"Not notebook cells: each case of the router's failure list, on models that were trained here, stored and spoiled on purpose."
import json, os, pickle, shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from lorajax.classifiers import Forest, KINDS, Linear, floats, labelled
from lorajax.core import Refused
from lorajax.encoders import DIMS, LIMIT, TABLE, HashedEncoder, SentenceEncoder, StaticEncoder, digest, first_tokens, quantised
from lorajax.evaluation import calibration_error, conversations, evaluate, ndcg_rows, replayed
from lorajax.router import ORDERS, Policy, Recent, Router, RouteRequest, Scores, Session, Snapshot, decide
from lorajax.router_model import encoded, load_model, save_model, split, support_examples, train
from lorajax.shared_state import SharedMemory

EXAMPLES = support_examples()
LINES = EXAMPLES['lines']
TRAIN, TEST = split(LINES)
SCRIPTS = ['我的包裹在哪里', 'أين طردي؟', 'Где моя посылка?', 'मेरा पार्सल कहाँ है', '🙂🙂🙂', '\x00\x01', '\ud800', ' \n\t ', '']

@pytest.fixture(scope='module')
def model(): return train(*zip(*TRAIN))

@pytest.fixture(scope='module')
def forest(): return train(*zip(*TRAIN[:48]), kind='forest')

@pytest.fixture
def stored(model, tmp_path): return save_model(model, tmp_path)

def edited(path, **edits):
    "A copy of a stored model with changed facts."
    other = path.parent / 'edited'
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(path, other)
    facts = json.loads((path / 'router.json').read_text())
    (other / 'router.json').write_text(json.dumps(facts | {k: f(facts.get(k)) for k,f in edits.items()}))
    return other

def route(model, text, available=LINES, policy=Policy(), **kw): return Router(model, policy).route(RouteRequest(text, **kw), available, 0)

# ---- B87: one row, thirty-two at once

def test_B87_single_rows_are_scored_on_one_thread_and_waiting_rows_in_one_batch(forest):
    options = forest.classifier.session.get_session_options()
    assert options.intra_op_num_threads == options.inter_op_num_threads == 1
    texts = [t for t,_ in TEST][:32]
    together, alone = forest.scores(texts), [forest.scores([t])[0] for t in texts]
    for a,b in zip(together, alone): np.testing.assert_allclose(a.p, b.p, atol=1e-6)
    with ThreadPoolExecutor(4) as pool: threaded = list(pool.map(lambda t: forest.scores([t])[0], texts))
    for a,b in zip(threaded, alone): np.testing.assert_array_equal(a.p, b.p)

# ---- B89: files from other versions, damaged files

@pytest.mark.parametrize('library', ['scikit-learn', 'tokenizers'])
def test_B89_other_library_version_is_refused_by_naming_both(stored, library):
    import importlib.metadata
    with pytest.raises(Refused, match=rf'made with {library} 0\.1\.2 and here is {importlib.metadata.version(library)}'):
        load_model(edited(stored, made_with=lambda v: v | {library: '0.1.2'}))

def test_B89_other_patch_version_is_accepted_up_to_the_name(stored):
    have = json.loads((stored / 'router.json').read_text())['made_with']['scikit-learn']
    series = '.'.join(have.split('.')[:2]) + '.99'
    with pytest.raises(Refused, match='has the content of'): # only since an edited file is no longer the version it is called
        load_model(edited(stored, made_with=lambda v: v | {'scikit-learn': series}))

@pytest.mark.parametrize('edit', [
    dict(format=lambda v: 2), dict(format=lambda v: None), dict(classifier=lambda v: 'svm'), dict(labels=lambda v: v[:-1]),
    dict(labels=lambda v: v[::-1]), dict(temperature=lambda v: 'hot'), dict(temperature=lambda v: None), dict(probes=lambda v: []),
    dict(files=lambda v: {'../../etc/passwd': 'x'}), dict(files=lambda v: {}), dict(features=lambda v: None),
    dict(features=lambda v: v | dict(dims=64)), dict(made_with=lambda v: None), dict(threshold=lambda v: [])])
def test_B89_any_edited_fact_is_refused_at_load(stored, edit):
    with pytest.raises(Refused) as e: load_model(edited(stored, **edit))
    assert str(e.value).count('\n') == 0 and ('train the router again' in str(e.value) or 'no part of a router' in str(e.value))

@pytest.mark.parametrize('spoil', ['cut', 'empty', 'missing', 'flipped', 'not json'])
def test_B89_damaged_files_are_refused_at_load(stored, spoil):
    file = stored / ('router.json' if spoil == 'not json' else 'tensors.safetensors')
    content = file.read_bytes()
    if spoil == 'missing': file.unlink()
    else: file.write_bytes(dict(cut=content[:-9], empty=b'', flipped=content[:-1] + bytes([content[-1] ^ 1]))
                           .get(spoil, content[:40]))
    with pytest.raises(Refused, match='train the router again'): load_model(stored)

def test_B89_explicit_requests_work_without_a_router():
    assert route(None, 'hello', adapter='refunds').layer == 'explicit'
    answer = route(None, 'hello')
    assert answer.adapter is None and answer.why == 'there is no model to ask'

@pytest.mark.parametrize('place', ['router.json', 'tensors.safetensors', 'classifier.onnx', 'router.pkl'])
def test_B111_a_pickle_in_any_place_is_never_run(forest, tmp_path, place):
    path, marker = save_model(forest, tmp_path), tmp_path / 'marker'
    class Evil:
        def __reduce__(self): return os.mkdir, (str(marker),)
    (path / place).write_bytes(pickle.dumps(Evil()))
    if place == 'router.pkl': assert load_model(path).version == forest.version
    else:
        with pytest.raises(Refused): load_model(path)
    assert not marker.exists()

def test_a_forest_whose_graph_is_not_onnx_is_refused_even_with_the_right_hash(forest, tmp_path):
    path = save_model(forest, tmp_path)
    broken = edited(path, files=lambda v: v | {'classifier.onnx': digest(b'nonsense')})
    (broken / 'classifier.onnx').write_bytes(b'nonsense')
    with pytest.raises(Refused, match='holds no usable router'): load_model(broken)

# ---- B91: threshold and fallback

def test_B91_confident_flat_empty_foreign_unloaded_and_absent(model):
    sure = route(model, 'I forgot my password')
    assert (sure.name, sure.layer, sure.model) == ('password', 'classifier', model.version)
    for text in ('', 'Is there life on Mars', *SCRIPTS[:6]):
        answer = route(model, text)
        assert (answer.name, answer.layer) == ('base', 'default') and answer.why, text
        assert route(model, text, policy=Policy(default='advice')).name == 'advice'
    unloaded = route(model, 'I forgot my password', available=set(LINES) - {'password'})
    assert unloaded.name != 'password' and unloaded.why
    assert route(model, 'I forgot my password', available=()).name == 'base'
    assert route(None, 'I forgot my password').name == 'base'
    assert route(model, 'hi', policy=Policy(default='gone'), available=LINES).adapter is None

def test_B91_the_decision_is_the_classifiers_own(model):
    for text, _ in TEST:
        s, routed = model.scores([text])[0], route(model, text, policy=Policy(order='classify'))
        accepted = s.readable and s.confidence.max() >= s.threshold
        assert routed.adapter == (s.labels[s.p.argmax()] if accepted else None)
        assert routed.ranked[:10] == tuple(s.ranked()[:10])

def test_B91_two_turns_of_one_chat_share_the_prefix_and_a_switch_says_what_it_lost(model):
    router = Router(model)
    first = router.route(RouteRequest('I forgot my password', session='s', tokens=900), LINES, 0)
    second = router.route(RouteRequest('Yes please', session='s', tokens=1200), LINES, 1)
    assert first.name == second.name == 'password' and (second.layer, second.lost, second.switched) == ('session', 0, False)
    third = router.route(RouteRequest('When do I get my money back', session='s', tokens=1300), LINES, 2)
    assert (third.name, third.lost, third.switched) == ('refunds', 1200, True)
    back = router.route(RouteRequest('The login code never arrives on my phone', session='s', tokens=1500), LINES, 3)
    assert (back.name, back.lost) == ('password', 100), 'what was said in the first bucket still counts'

def test_unknown_explicit_adapter_is_refused_and_nothing_is_remembered(model):
    router = Router(model)
    with pytest.raises(Refused, match="'nobody' is not loaded"):
        router.route(RouteRequest('hi', 'ann', 's', 'nobody'), LINES, 0)
    assert len(router.users) == len(router.sessions) == 0

# ---- B92: features

def test_B92_a_restarted_process_gives_the_same_probabilities(model, stored):
    import subprocess, sys
    texts = [t for t,_ in TEST] + [s for s in SCRIPTS if s != '\ud800']
    code = ('import json, sys; from lorajax.router_model import load_model; m = load_model(sys.argv[1]);'
            'json.dump([s.p.tolist() for s in m.scores(json.load(sys.stdin))], sys.stdout);'
            'assert not {"torch", "sklearn", "jax", "transformers", "onnxruntime", "redis"} & sys.modules.keys()')
    done = subprocess.run([sys.executable, '-c', code, stored], input=json.dumps(texts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.float32(json.loads(done.stdout)), [s.p for s in model.scores(texts)])

def test_B92_another_encoder_or_table_is_refused(model, stored, tmp_path):
    with pytest.raises(Refused, match="encoder='static' and the encoder here has 'hashed'"): load_model(stored, HashedEncoder())
    other = StaticEncoder()
    other.schema = other.schema | dict(table='0' * 16)
    with pytest.raises(Refused, match='table='): load_model(stored, other)

def test_B92_columns_in_another_order_are_noticed(model, stored):
    "Same schema, same shapes, other numbers: only the probes can tell."
    class Reversed(StaticEncoder):
        def encode(self, texts): f = super().encode(texts); return replace(f, x=f.x[:, ::-1])
    with pytest.raises(Refused, match='no longer answers'): load_model(stored, Reversed())

@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 1e39, 1e300])
def test_B92_features_that_are_not_finite_are_unreadable(model, value):
    rows = np.ones((3, DIMS))
    rows[1, 7] = value
    f = quantised(rows)
    assert f.readable.tolist() == [True, False, True] and not f.x[1].any() and f.x.dtype == np.int8
    class Broken:
        schema, tensors = model.encoder.schema, {}
        def encode(self, texts): return quantised(np.full((len(texts), DIMS), value))
    answer = route(replace(model, encoder=Broken()), 'where is my refund')
    assert (answer.name, answer.why) == ('base', 'the text has nothing that the classifier can read')
    with pytest.raises(Refused, match='can read 0 of 2'): encoded(['a', 'b'], ['x', 'y'], Broken())

def test_B92_a_classifier_takes_nothing_but_eight_bits(model, forest):
    for m in (model, forest):
        for x in (np.zeros((1, DIMS)), np.full((1, DIMS), np.nan, np.float32), np.zeros((1, 64), np.int8)):
            with pytest.raises(AssertionError, match='features of'): m.probabilities(x)

@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=DIMS, max_size=DIMS))
@settings(max_examples=50, deadline=None)
def test_eight_bits_keep_the_direction(v):
    f = quantised(np.array([v]))
    if not f.readable[0]: return
    unit = np.array(v) / np.linalg.norm(v)
    np.testing.assert_allclose(f.x[0] * (LIMIT / 127), np.clip(unit, -LIMIT, LIMIT), atol=LIMIT / 127 / 2 + 1e-9)

# ---- prompts

@pytest.mark.parametrize('encoder', [StaticEncoder(), HashedEncoder()], ids=['static', 'hashed'])
def test_any_text_has_features(encoder):
    texts = [*SCRIPTS, 'a' * 100_000, ' ' * 100_000, '字' * 100_000, 'word ' * 20_000, '\n' * 50_000 + 'refund', '‮' * 3000]
    f = encoder.encode(texts)
    assert f.x.shape == (len(texts), DIMS) and not f.x[~f.readable].any()
    assert not f.readable[[texts.index(''), texts.index(' \n\t ')]].any()

def test_first_tokens_of_a_long_text_are_those_of_the_whole_text():
    t = StaticEncoder().tokenizer
    rng = np.random.default_rng(0)
    words = [w for texts in LINES.values() for text in texts for w in text.split()] + ['Donaudampfschifffahrt', 'x' * 99, '包裹']
    for n in (3, 64):
        for _ in range(50):
            text = ' '.join(rng.choice(words, 400))
            assert first_tokens(t, text, n) == t.encode(text, add_special_tokens=False).ids[:n]

def test_a_100_kB_prompt_is_not_tokenized_whole(model, monkeypatch):
    seen, encoder = [], model.encoder
    class Spy:
        def encode(self, text, **kw): seen.append(len(text)); return StaticEncoder().tokenizer.encode(text, **kw)
        def __getattr__(self, name): return getattr(StaticEncoder().tokenizer, name)
    monkeypatch.setattr(encoder, 'tokenizer', Spy())
    for text in ('where is my refund ' * 5300, 'x' * 100_000, ' ' * 90_000 + 'refund'): route(model, text)
    assert max(seen) <= 8192 and sum(seen) < 50_000

def test_static_encoder_equals_sentence_transformers(tmp_path):
    "The oracle is the library's own StaticEmbedding over the same table."
    torch = pytest.importorskip('torch')
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    e = StaticEncoder()
    oracle = StaticEmbedding(e.tokenizer, embedding_weights=e.table.astype(np.float32) * e.scale[:, None])
    texts = [t for t,_ in TEST] # all under 64 tokens
    with torch.no_grad(): want = oracle(oracle.preprocess(texts))['sentence_embedding'].numpy()
    np.testing.assert_array_equal(e.encode(texts).x, quantised(want).x)

def test_shipped_table_is_small_and_says_where_it_comes_from():
    from safetensors import safe_open
    with safe_open(TABLE, framework='numpy') as f: facts = f.metadata()
    assert TABLE.stat().st_size < 5_000_000 and facts['licence'] == 'Apache-2.0' and 'MiniLM' in facts['source']

@pytest.mark.filterwarnings('ignore') # of transformers and torch
def test_sentence_encoder_is_stored_with_its_components(tmp_path):
    pytest.importorskip('torch')
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    rng = np.random.default_rng(0)
    wide = StaticEmbedding(StaticEncoder().tokenizer, embedding_weights=rng.normal(size=(29525, 200)).astype(np.float32))
    SentenceTransformer(modules=[wide]).save(str(tmp_path / 'st'))
    texts, names = zip(*TRAIN)
    encoder = SentenceEncoder(tmp_path / 'st').fit(list(texts))
    model = train(texts, names, encoder)
    path = save_model(model, tmp_path / 'models')
    with pytest.raises(Refused, match="'sentence'; give its directory"): load_model(path)
    again = load_model(path, SentenceEncoder(tmp_path / 'st'))
    np.testing.assert_array_equal(again.scores(['a refund', ''])[0].p, model.scores(['a refund', ''])[0].p)
    assert not again.scores([' '])[0].readable
    with pytest.raises(Refused, match='too few'): SentenceEncoder(tmp_path / 'st').fit(list(texts[:99]))
    with pytest.raises(Refused, match='no .safetensors file'): SentenceEncoder(tmp_path / 'models' / 'none')

# ---- classifiers

def test_linear_and_forest_give_what_scikit_learn_gives():
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    rng = np.random.default_rng(0)
    y = rng.integers(0, 7, 300)
    x = np.clip(rng.normal(size=(7, DIMS))[y] * 30 + rng.normal(size=(300, DIMS)) * 30, -127, 127).astype(np.int8)
    rows, ask = labelled(x, [f'a{i}' for i in y]), np.clip(rng.normal(size=(50, DIMS)) * 40, -127, 127).astype(np.int8)
    forest = RandomForestClassifier(30, max_depth=10, random_state=3).fit(floats(x), rows.y, rows.weight)
    np.testing.assert_allclose(Forest.fit(rows, seed=3, trees=30).probabilities(ask), forest.predict_proba(floats(ask)), atol=1e-5)
    linear = LogisticRegression(C=40, max_iter=1000).fit(floats(x), rows.y, rows.weight)
    np.testing.assert_allclose(Linear.fit(rows).probabilities(ask), linear.predict_proba(floats(ask)), atol=1e-4)
    two = rows[rows.y < 2]
    linear = LogisticRegression(C=40, max_iter=1000).fit(floats(two.x), two.y)
    p = Linear.fit(two).probabilities(ask)
    np.testing.assert_allclose(p[:, :2], linear.predict_proba(floats(ask)), atol=1e-4)
    assert p.shape == (50, 7) and not p[:, 2:].any(), 'labels without rows keep their column'

@pytest.mark.parametrize('kind', list(KINDS))
def test_every_kind_is_stored_and_loaded(kind, forest, tmp_path):
    model = forest if kind == 'forest' else train(*zip(*TRAIN[:48]), kind=kind)
    again = load_model(save_model(model, tmp_path))
    texts = [t for t,_ in TEST]
    for a,b in zip(again.scores(texts), model.scores(texts)): np.testing.assert_array_equal(a.p, b.p)
    assert again.version == model.version == save_model(again, tmp_path / 'twice').name

def test_labels_that_can_not_be_trained():
    for names, message in ((['a', ''], 'is no label'), (['a', 'base'], 'is no label'), (['a', 'a'], 'one label'), (['a'], '2 texts and 1')):
        with pytest.raises(Refused, match=message): train(['where is it', 'send it back'], names)
    with pytest.raises(Refused, match="no classifier 'svm'"): train(*zip(*TRAIN), kind='svm')

def test_out_of_scope_examples_make_a_label_that_is_the_base():
    texts, names = map(list, zip(*TRAIN))
    model = train(texts + EXAMPLES['out_of_scope'][:15], names + ['oos'] * 15)
    assert 'oos' in model.labels
    answer = route(model, EXAMPLES['out_of_scope'][0])
    assert (answer.name, answer.why) == ('base', 'the text resembles what belongs to no adapter')
    assert 'oos' not in {route(model, t).name for t,_ in TEST}

@pytest.mark.parametrize('module,extra,use', [
    ('onnxruntime', 'router', lambda forest: Forest(forest.classifier.tensors, forest.classifier.graph)),
    ('redis', 'router', lambda forest: SharedMemory('redis://localhost')),
    ('sklearn', 'router-train', lambda forest: train(*zip(*TRAIN))),
    ('sentence_transformers', 'router-train', lambda forest: SentenceEncoder(TABLE.parent))])
def test_a_missing_extra_is_named(monkeypatch, forest, module, extra, use):
    import sys
    for name in [module, *(m for m in sys.modules if m.startswith(f'{module}.'))]: monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Refused, match=rf"this needs {module}.*lorajax\[{extra}\]"): use(forest)

# ---- evaluation

def test_ndcg_by_hand():
    gain, p = np.array([[0, 0, 3, 1.]]), np.array([[.1, .5, .3, .1001]])
    dcg = 0 / np.log2(2) + 3 / np.log2(3) + 1 / np.log2(4)
    ideal = 3 / np.log2(2) + 1 / np.log2(3)
    np.testing.assert_allclose(ndcg_rows(gain, p), dcg / ideal)
    late = np.zeros((1, 20)); late[0, 10] = 1
    assert ndcg_rows(late, -np.arange(20.)[None]) == 0, 'the eleventh place counts nothing'

def test_calibration_error_by_hand():
    assert calibration_error(np.array([.8] * 5 + [.3] * 10), np.array([1, 1, 1, 1, 0] + [1, 1, 1] + [0] * 7, bool)) == pytest.approx(0)
    assert calibration_error(np.ones(4), np.array([1, 0, 0, 0], bool)) == pytest.approx(.75)

def test_unknown_labels_are_refused_and_oos_is_not(model):
    with pytest.raises(Refused, match="no label 'sales'"): evaluate(model, ['hi', 'ho'], ['refunds', 'sales'])
    with pytest.raises(Refused, match='nothing to rank'): evaluate(model, ['hi'], ['oos'])
    report = evaluate(model, ['I forgot my password', 'Is there life on Mars'], ['password', 'oos'])
    assert (report.ndcg, report.oos_recall, report.messages) == (1, 1, 2)
    assert evaluate(model, ['I forgot my password'], [('password', 'account')]).calibration is None

def test_switch_aware_routing_beats_both_on_traces_of_all_kinds(model):
    heard = {name: [t for t,n in TEST if n == name] for name in LINES}
    for moves in (.1, .2):
        trace = conversations(heard, EXAMPLES['follow_ups'], n=60, users=15, moves=moves, seed=5)
        utility = {order: replayed(trace, model, Policy(order=order))[0].utility for order in ORDERS}
        assert utility['switch'] > utility['classify'] > utility['first'], utility

def test_real_intents(shared_data):
    "BANKING77, an eighth of the training data, against a floor that only a broken encoder or classifier would miss."
    import csv, gzip
    def read(part): return list(csv.DictReader(gzip.open(shared_data / f'intent_banking77/{part}.csv.gz', 'rt', encoding='utf-8')))
    rows, test = read('train')[::8], read('test')[::10]
    model = train([r['text'] for r in rows], [r['category'] for r in rows])
    assert evaluate(model, [r['text'] for r in test], [r['category'] for r in test]).ndcg > .8

# ---- the decision

@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_decision_is_pure_always_servable_and_explained(data):
    labels = ('a', 'b', 'c', 'oos')
    p = np.array(data.draw(st.lists(st.floats(.001, 1), min_size=4, max_size=4)))
    scores = Scores(labels, (p / p.sum()).astype(np.float32), data.draw(st.floats(0, 1)), data.draw(st.booleans()), .3, 'v')
    some = st.sampled_from([None, 'a', 'b', 'c', 'gone'])
    prefix = data.draw(st.dictionaries(some, st.integers(0, 10_000)))
    session = data.draw(st.sampled_from([None, Session(data.draw(some), prefix)]))
    available = frozenset(data.draw(st.sets(st.sampled_from(['a', 'b', 'c']))))
    snapshot = Snapshot(available, frozenset(data.draw(st.sets(st.sampled_from(['a', 'b'])))), data.draw(some), session,
                        data.draw(st.sampled_from([None, lambda: scores])))
    policy = Policy(data.draw(st.sampled_from(ORDERS)), default=data.draw(some), price=data.draw(st.floats(0, 1e-3)))
    routed = decide(RouteRequest('text', 'u', 's'), snapshot, policy)
    assert routed.adapter is None or routed.adapter in available
    assert routed.why and routed.lost >= 0 and (session is None) <= (not routed.switched)
    assert decide(RouteRequest('text', 'u', 's'), snapshot, policy) == routed

def test_a_map_forgets_by_use_and_by_age():
    r = Recent(3, ttl=10)
    for i,k in enumerate('abc'): r.put(k, k, i)
    r.get('a', 3), r.put('d', 'd', 3)
    assert [r.get(k, 4) for k in 'abcd'] == ['a', None, 'c', 'd']
    assert r.get('a', 10) is None and r.get('c', 10, within=5) is None and r.get('c', 10) == 'c'
