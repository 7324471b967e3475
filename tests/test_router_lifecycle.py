"Not notebook cells: retraining in another process under load, several processes on one folder, and every way a log can be bad."
import asyncio, json, subprocess, sys, time, zlib
from dataclasses import replace
import numpy as np
import pytest
from typer.testing import CliRunner
from lorajax.core import Refused
from lorajax.lifecycle import (DAY, WEEK, Feedback, FeedbackLog, Follower, ModelFolder, Shadow, drift, due, feedback, fitted,
                               joined, retrain, rows_of, schema_digest, shadow)
from lorajax.route_cli import route_app
from lorajax.router import Routed, Router, RouteRequest
from lorajax.router_model import encoded, fit_model, split, support_examples, train
from lorajax.shared_state import SharedMemory, SharedRouter
from redis_server import RedisServer

LINES = support_examples()['lines']
TRAIN, TEST = split(LINES)
ROUTED = Routed('refunds', 'classifier', 'a test')

@pytest.fixture(scope='module')
def model(): return train(*zip(*TRAIN))

@pytest.fixture
def folder(model, tmp_path):
    models = ModelFolder(tmp_path / 'router')
    models.promote(model, encoded(*zip(*TRAIN), model.encoder), now=0)
    return models

def outcomes(model, pairs, now=1., label=True):
    return [feedback(model, text, replace(ROUTED, adapter=name), 1., now + i, name if label else None)
            for i,(text, name) in enumerate(pairs)]

def autumn(n=10):
    "Sentences that resemble the test part, each with its right label."
    words = [t.split()[-1] for t,_ in TEST]
    return [(f'{text} {words[(7 * i + k) % len(words)]}', name) for k in range(n) for i,(text, name) in enumerate(TEST)]

@pytest.fixture
def log(folder, model):
    log = FeedbackLog(folder.path / 'feedback.jsonl')
    for f in outcomes(model, autumn(5)): log.append(f)
    return log

# ---- the log

def test_a_log_survives_torn_lines_other_schemas_and_rubbish(model, tmp_path):
    log = FeedbackLog(tmp_path / 'log')
    assert log.read() == ([], 0)
    good = outcomes(model, TEST[:3])
    for f in good: log.append(f)
    line = log.path.read_bytes().splitlines()[0]
    bad = [b'', b'{}', b'[]', b'null', line[:40], b'\xff\xfe', line.replace(b'"x": "', b'"x": "!!'), line.replace(b'"outcome": 1.0', b'"outcome": NaN'),
           line.replace(b'"label": "', b'"label": 3, "z": "')]
    with open(log.path, 'ab') as f: f.write(b'\n'.join(bad) + b'\n')
    log.append(replace(good[0], schema='other'))
    found, broken = log.read()
    assert len(found) == 4 and broken == len(bad)
    assert len(rows_of(found, schema_digest(model.encoder))) == 3

def test_two_processes_append_whole_lines(model, tmp_path):
    code = ('import sys; from lorajax.lifecycle import FeedbackLog, Feedback; import numpy as np;'
            'log = FeedbackLog(sys.argv[1]);'
            '[log.append(Feedback(float(i), np.full(128, i % 100, np.int8), "s", "a" * 50, 1.)) for i in range(500)]')
    running = [subprocess.Popen([sys.executable, '-c', code, tmp_path / 'log']) for _ in range(2)]
    assert [p.wait() for p in running] == [0, 0]
    found, broken = FeedbackLog(tmp_path / 'log').read()
    assert len(found) == 1000 and broken == 0

def test_what_can_be_learned_from_an_outcome(model):
    x = np.ones(128, np.int8)
    def one(adapter, outcome, label=None): return Feedback(0., x, 's', adapter, outcome, label)
    rows = rows_of([one('a', 1.), one('a', .2), one('b', .6), one('a', 0., 'c'), one('oos', .9)], 's')
    assert [(rows.labels[y], round(float(w), 2)) for y,w in zip(rows.y, rows.weight)] == [('a', 1), ('b', .6), ('c', 1), ('oos', .9)]
    assert rows_of([one('a', .1)], 's') is None and rows_of([], 's') is None
    assert feedback(model, 'hi', ROUTED, 0., 1., 'base').label == 'oos'
    for bad in (-1, 2, float('nan')):
        with pytest.raises(Refused, match='from 0 to 1'): feedback(model, 'hi', ROUTED, bad, 1.)

def test_joined_rows_keep_labels_and_the_latest(model):
    a, b = encoded(['where is it', 'send it'], ['x', 'b'], model.encoder), encoded(['pay me', 'stop'], ['c', 'x'], model.encoder)
    rows = joined(a, b)
    assert rows.labels == ('b', 'c', 'x') and [rows.labels[y] for y in rows.y] == ['x', 'b', 'c', 'x']
    assert [joined(a, b, most=2).labels[y] for y in joined(a, b, most=2).y] == ['c', 'x']

# ---- the comparison

def test_the_interval_covers_what_resampling_by_hand_gives(model):
    rows = encoded(*zip(*TEST), model.encoder)
    half = train(*zip(*TRAIN[::2]))
    s = shadow(half, model, rows)
    from sklearn.metrics import ndcg_score
    gain = np.eye(17)[[model.labels.index(n) for _,n in TEST]]
    assert s.new == pytest.approx(ndcg_score(gain, model.probabilities(rows.x), k=10))
    assert s.old == pytest.approx(ndcg_score(gain, half.probabilities(rows.x), k=10))
    each = [ndcg_score(gain[i:i + 1], model.probabilities(rows.x[i:i + 1]), k=10) -
            ndcg_score(gain[i:i + 1], half.probabilities(rows.x[i:i + 1]), k=10) for i in range(len(TEST))]
    normal = 1.96 * np.std(each) / np.sqrt(len(each)) # the bootstrap's interval is near the normal one
    assert s.low == pytest.approx(np.mean(each) - normal, abs=.02) and s.high == pytest.approx(np.mean(each) + normal, abs=.02)

def test_a_label_that_one_of_both_lacks(model):
    fewer = train(*zip(*[(t, n) for t,n in TRAIN if n != 'repair']))
    rows = encoded(['please fix my toaster'] * 5, ['repair'] * 5, model.encoder)
    s = shadow(fewer, model, rows)
    assert s.old < .5 < s.new and s.not_worse() and not shadow(model, fewer, rows).not_worse()

def test_the_same_model_is_not_worse_and_does_not_drift(model):
    rows = encoded(*zip(*TEST), model.encoder)
    s = shadow(model, model, rows)
    assert (s.low, s.high) == (0, 0) and s.not_worse()
    d = drift(model, rows.x, rows.x)
    assert d.psi == 0 and d.messages == len(TEST)

# ---- the job

def test_when_training_is_due():
    assert due(dict(trained=0, full=0), DAY - 1) is None
    assert due(dict(trained=0, full=0), DAY) == 'incremental'
    assert due(dict(trained=6.5 * DAY, full=0), WEEK) == 'full'

def test_incremental_then_full_and_every_version_can_be_gone_back_to(folder, log, model):
    first = retrain(folder, log, now=DAY)
    assert (first.kind, first.promoted) == ('incremental', True) and first.shadow.new > first.shadow.old
    assert folder.current().threshold == model.threshold, 'an incremental training keeps it'
    assert retrain(folder, log, DAY + 60).kind == 'none'
    for f in outcomes(model, autumn(3), now=2 * DAY): log.append(f)
    second = retrain(folder, log, now=WEEK)
    assert (second.kind, second.promoted) == ('full', True)
    assert len({model.version, first.version, second.version}) == 3
    assert folder.state()['former'] == [first.version, model.version]
    assert [folder.rollback(), folder.rollback()] == [first.version, model.version] and folder.current().version == model.version
    with pytest.raises(Refused, match='no former version'): folder.rollback()

def test_a_worse_model_is_not_promoted(folder, model):
    log = FeedbackLog(folder.path / 'poison')
    names = sorted(LINES)
    for f in outcomes(model, [(t, names[zlib.crc32(t.encode()) % 17]) for t,_ in autumn(4)]): log.append(f) # nonsense that nothing can learn
    good = outcomes(model, TEST, now=5000)
    for f in good: log.append(f)
    state = folder.state()
    done = retrain(folder, log, now=WEEK)
    if not done.promoted: assert folder.state() == state and done.why == 'the new model may be worse'
    assert done.shadow is not None and done.promoted == done.shadow.not_worse()

@pytest.mark.parametrize('low,promoted', [(-.02, False), (-.005, True)])
def test_promotion_follows_the_interval(folder, log, monkeypatch, low, promoted):
    monkeypatch.setattr('lorajax.lifecycle.shadow', lambda *a: Shadow(50, .9, .9, low, .02))
    before = folder.state()
    done = retrain(folder, log, now=DAY)
    assert done.promoted == promoted and (folder.state() == before) == (not promoted)

def test_too_little_feedback_changes_nothing(folder, model):
    log = FeedbackLog(folder.path / 'small')
    assert 'are needed' in retrain(folder, log, now=DAY).why
    for f in outcomes(model, TEST[:20]): log.append(f)
    done = retrain(folder, log, now=DAY)
    assert not done.promoted and 'are needed' in done.why and done.version == model.version

def test_a_new_label_makes_the_training_full(folder, log, model):
    for f in outcomes(model, [(f'{t} please gift wrap it', 'wrapping') for t,_ in TRAIN[:60]], now=500): log.append(f)
    done = retrain(folder, log, now=DAY)
    assert (done.kind, done.promoted) == ('full', True) and 'wrapping' in folder.current().labels
    routed = Router(folder.current()).route(RouteRequest('please gift wrap it'), LINES, 0)
    assert routed.adapter in {*LINES, None}, 'a label that is no adapter here is passed over'

def test_only_a_linear_model_goes_on_from_where_it_is(model):
    rows = encoded(*zip(*TRAIN[:36]), model.encoder)
    for kind, done in (('prior', 'full'), ('linear', 'incremental')):
        assert fitted(fit_model(rows, model.encoder, kind), rows, rows[:12], 'incremental')[1] == done

def test_one_job_at_a_time_and_damaged_folders(folder, log, model):
    import fcntl
    with open(folder.path / '.lock', 'w') as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match='another retraining runs'): retrain(folder, log, now=DAY)
    rows = folder.path / f'{model.version}.rows.safetensors'
    rows.write_bytes(rows.read_bytes()[:100])
    with pytest.raises(Refused, match='holds no training rows'): retrain(folder, log, now=DAY)
    for text in ('{', '[]', '{}', '{"version": 3}', '{"version": "../../etc"}'):
        folder.pointer.write_text(text)
        with pytest.raises(Refused): folder.current()

# ---- following

FOLLOW = '''
import sys, time
from lorajax.lifecycle import Follower, ModelFolder
from lorajax.router import Router, RouteRequest
router = Router()
follower = Follower(router, ModelFolder(sys.argv[1]), every=.02)
for line in sys.stdin:
    end = time.monotonic() + 20
    while router.model.version != line.strip() and time.monotonic() < end: time.sleep(.01)
    print(router.model.version, router.route(RouteRequest("I forgot my password"), router.model.labels, 0).adapter, flush=True)
'''

def test_two_processes_follow_promotion_and_rollback(folder, log, model):
    def follower(): return subprocess.Popen([sys.executable, '-c', FOLLOW, folder.path], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, text=True)
    with follower() as one, follower() as two:
        def both(version):
            for p in (one, two): p.stdin.write(version + '\n'); p.stdin.flush()
            return [p.stdout.readline().split() for p in (one, two)]
        assert both(model.version) == [[model.version, 'password']] * 2
        done = retrain(folder, log, now=DAY)
        assert both(done.version) == [[done.version, 'password']] * 2
        folder.rollback()
        assert both(model.version) == [[model.version, 'password']] * 2
    assert (one.returncode, two.returncode) == (0, 0)

def test_a_follower_keeps_its_model_when_the_new_one_is_refused(folder, model, log):
    router = Router()
    follower = Follower(router, folder, every=.01)
    done = retrain(folder, log, now=DAY)
    wait(lambda: router.model.version == done.version)
    (folder.path / model.version / 'tensors.safetensors').write_bytes(b'')
    folder.rollback()
    wait(lambda: follower.problem)
    assert router.model.version == done.version and 'is not what was stored' in follower.problem
    follower.close()

def wait(happened, seconds=20):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, 'it did not happen'
        time.sleep(.01)

def test_retraining_under_load_swaps_the_model_without_a_failed_or_blocked_route(folder, log, model, tmp_path):
    "Done-when 4, with the job as a process of its own, Redis that announces its result, and two routers."
    async def run(server):
        routers, followers = [], []
        for _ in range(2):
            shared, router = SharedMemory(server.url, wait=5., timeout=5.), Router()
            followers.append(Follower(router, folder, every=60.)) # so that only the announcement wakes it
            routers.append(SharedRouter(router, shared, fresh=0, announced=followers[-1].announced))
            assert await shared.start()
        command = [sys.executable, '-c', 'from lorajax.route_cli import route_app; route_app()', 'retrain', str(folder.path),
                   '--force', 'full', '--redis', server.url]
        job = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        routes, seen, start = [], [], time.monotonic()
        async def one(i):
            begin = time.monotonic()
            text, name = TRAIN[i % len(TRAIN)]
            r = await routers[i % 2].route(RouteRequest(text, session=f's{i}', tokens=5), LINES, time.monotonic())
            routes.append((r, time.monotonic() - begin)); seen.append(r.model)
        work = []
        while time.monotonic() - start < 60:
            work.append(asyncio.create_task(one(len(work))))
            await asyncio.sleep(.005)
            if job.returncode is not None and all(r.router.model.version != model.version for r in routers): break
        await asyncio.gather(*work)
        said = (await job.stdout.read()).decode()
        versions = [r.router.model.version for r in routers]
        for r in routers: await r.close()
        for f in followers: f.close()
        return routes, seen, said, versions, job.returncode
    with RedisServer(tmp_path) as server: routes, seen, said, versions, code = asyncio.run(run(server))
    new = folder.state()['version']
    assert code == 0 and 'promoted       yes' in said and new != model.version
    assert versions == [new, new] and {model.version, new} >= set(seen)
    assert len(routes) > 100 and all(r.layer in ('classifier', 'default') for r,_ in routes)
    assert max(s for _,s in routes) < 5, 'no route waited for a training, which takes longer than that only on a very slow machine'

# ---- the command line

def invoke(*words):
    done = CliRunner().invoke(route_app, [str(w) for w in words])
    if done.exception and not isinstance(done.exception, SystemExit): raise done.exception
    return done.output

def test_train_eval_explain_retrain_rollback(tmp_path):
    data, router = tmp_path / 'asks.jsonl', tmp_path / 'router'
    data.write_text('\n'.join(json.dumps(dict(text=t, adapter=n, part=p)) for part,p in ((TRAIN, 'a'), (TEST, 'b')) for t,n in part))
    assert '204 of 204' in invoke('train', data, router, '--where', 'part=a')
    assert 'ndcg           0.8' in invoke('eval', router, data, '--where', 'part=b')
    said = invoke('explain', router, 'I forgot my password')
    assert 'password' in said and 'classifier' in said and 'threshold' in said
    assert 'explicit' in invoke('explain', router, 'I forgot my password', '--adapter', 'refunds')
    assert 'comes first' in invoke('explain', router, 'x', '--user', 'refunds', '--order', 'first')
    assert 'base' in invoke('explain', router, '', '--unloaded', 'password')
    assert 'promoted       no' in invoke('retrain', router)
    invoke('train', data, router, '--encoder', 'hashed')
    assert 'went back to it' in invoke('retrain', router, '--rollback')
    assert 'hashed' not in (router / ModelFolder(router).state()['version'] / 'router.json').read_text()

@pytest.mark.parametrize('name,content', [('a.csv', b'text,x\nhi,there\n'), ('a.csv', b'\xff\xfe\x00'), ('a.jsonl', b'{"text": 3, "label": "a"}\n'),
    ('a.jsonl', b'{'), ('a.csv', b''), ('a.csv.gz', b'not gzip'), ('a.txt', b'hi'), ('a.jsonl', b'{"text": "hi", "label": ""}'),
    ('a.csv', b'text,label\nhi,a\nho,a\n')])
def test_files_that_can_not_be_trained_on(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused) as e: invoke('train', tmp_path / name, tmp_path / 'router')
    assert '\n' not in str(e.value) and not (tmp_path / 'router').exists()

def test_redis_that_can_not_be_told_is_said(folder, tmp_path):
    with pytest.raises(Refused, match='could not be told'): invoke('retrain', folder.path, '--redis', f'unix://{tmp_path}/none')
