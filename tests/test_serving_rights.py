"""Keys, rates, strict mode, rollouts, the semantic cache and alerts over HTTP: a server of its own with all of them on."""
import json, threading, time
from dataclasses import replace
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
import httpx, pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lorajax.base import load_base
from lorajax.core import Refused
from lorajax.peft import save_adapter
from lorajax.registry import Bounds, manifest_of, signed, write_manifest
from serving import watch as watch_module
from serving.guards import read_keys
from serving.settings import Settings, check, from_environment
from serving.signals import Signals, golden
from redis_server import RedisServer
import served
from served import until

SHOP, SLOW, BOSS = 'shop-key-0123456789', 'slow-key-0123456789', 'boss-key-0123456789'

@pytest.fixture(scope='module')
def told(): # what the webhook was told
    return []

@pytest.fixture(scope='module')
def running(tmp_path_factory, told):
    folder = tmp_path_factory.mktemp('rights')
    files = served.make_files(folder, ['alpha', 'beta', 'gamma'])
    base, private = load_base(files['model']), Ed25519PrivateKey.generate()
    for name in ('alpha', 'beta', 'gamma'):
        path = Path(files['adapters']) / name
        adapter = base.load_adapter(path, name)
        write_manifest(path, signed(manifest_of(name, base.fingerprint, adapter.fingerprint, '2026-01-01T00:00:00+00:00'), private))
    (folder / 'keys.json').write_text(json.dumps(dict(keys=[
        dict(key=SHOP, name='shop', adapters=['alpha']), dict(key=SLOW, name='slow', per_minute=3), dict(key=BOSS, name='boss', admin=True)])))
    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers['content-length']))))
            self.send_response(200), self.end_headers()
        def log_message(self, *_): pass
    hook = HTTPServer(('127.0.0.1', 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    settings = dict(api_keys=str(folder / 'keys.json'), strict=True, judge_every=.1, cache=.95, trusted=private.public_key().public_bytes_raw().hex(),
                    webhook=f'http://127.0.0.1:{hook.server_port}')
    with RedisServer(folder) as redis, served.app_in_thread(**files | settings, redis=redis.url, queue=256) as (url, app):
        yield url, app.state.service, base, private, files
    hook.shutdown()
    hook.server_close()

@pytest.fixture
def url(running): return running[0]
@pytest.fixture
def service(running): return running[1]

def call(url, path, key=BOSS, **body): return httpx.post(f'{url}{path}', json=body, headers={'authorization': f'Bearer {key}'} if key else {}, timeout=60)
def ask(url, key=BOSS, **more): return call(url, '/v1/completions', key, **dict(model='alpha', prompt='hello', max_tokens=4, temperature=0) | more)
def names(url, key): return {m['id'] for m in httpx.get(f'{url}/v1/models', headers={'authorization': f'Bearer {key}'}).json()['data']}

def make_version(running, name, folder, seed, sign=True):
    url, service, base, private, files = running
    path = Path(files['adapters']) / folder
    save_adapter(served.adapter_of(name, seed), path)
    adapter = base.load_adapter(path, name)
    manifest = manifest_of(name, base.fingerprint, adapter.fingerprint, '2026-01-01T00:00:00+00:00')
    if sign: write_manifest(path, signed(manifest, private))
    return path

def test_keys_open_what_they_may_use(url):
    for key in (None, 'wrong', ''): assert ask(url, key).status_code == 401 and 'www-authenticate' in ask(url, key).headers
    assert httpx.get(f'{url}/v1/models').status_code == httpx.get(f'{url}/v1/lorajax/status').status_code == 401
    assert httpx.get(f'{url}/health').status_code == httpx.get(f'{url}/metrics').status_code == httpx.get(url).status_code == 200
    assert names(url, SHOP) == {'tiny', 'alpha'} and names(url, BOSS) == {'tiny', 'alpha', 'beta', 'gamma'}
    assert ask(url, SHOP).status_code == ask(url, SHOP, model='tiny').status_code == 200
    other, missing = ask(url, SHOP, model='beta'), ask(url, SHOP, model='nope')
    assert other.status_code == missing.status_code == 404 and other.text.replace('beta', 'nope') == missing.text, 'it tells nothing of others'
    for path, body in (('load_lora_adapter', dict(lora_name='x', lora_path='beta')), ('unload_lora_adapter', dict(lora_name='alpha')),
                       ('lorajax/compositions', dict(name='x', weights=dict(alpha=1))), ('lorajax/drain', {})):
        assert call(url, f'/v1/{path}', SHOP, **body).status_code == 403
    assert httpx.get(f'{url}/v1/lorajax/audit', headers={'authorization': f'Bearer {SHOP}'}).status_code == 403

def test_a_rate_is_kept_in_redis(url, service):
    if time.time() % 60 > 55: time.sleep(6) # or the minute ends amid the test
    answers = [ask(url, SLOW).status_code for _ in range(5)]
    assert answers == [200, 200, 200, 429, 429] and 0 < int(ask(url, SLOW).headers['retry-after']) <= 60

def test_an_unsigned_or_tampered_adapter_is_refused(url, running, service):
    make_version(running, 'unsigned', 'unsigned', 20, sign=False)
    assert call(url, '/v1/load_lora_adapter', lora_name='unsigned', lora_path='unsigned').status_code == 400
    path = make_version(running, 'tampered', 'tampered', 21)
    save_adapter(served.adapter_of('tampered', 22), path.parent / 'other')
    (path / 'adapter_model.safetensors').write_bytes((path.parent / 'other/adapter_model.safetensors').read_bytes())
    said = call(url, '/v1/load_lora_adapter', lora_name='tampered', lora_path='tampered')
    assert said.status_code == 400 and 'tampered' not in names(url, BOSS)
    audit = httpx.get(f'{url}/v1/lorajax/audit', headers={'authorization': f'Bearer {BOSS}'}).json()
    assert {('boss', 'note', 'tampered'), ('boss', 'note', 'unsigned')} <= {(a['actor'], a['action'], a['name']) for a in audit}

def test_a_rollout_goes_forward_by_itself_and_users_stay_where_they_are(url, running, service, monkeypatch):
    make_version(running, 'beta', 'beta2', 30)
    monkeypatch.setattr(watch_module, 'Bounds', lambda: Bounds(least=5, p50=1e9, p99=1e9))
    assert call(url, '/v1/lorajax/rollouts', name='beta', lora_path='beta2', watch_seconds=.3).json()['serves'] is False
    new = service.fleet.current.rollouts['beta'].new
    users, side = [f'u{i}' for i in range(300)], {}
    while 'beta' in service.fleet.current.rollouts:
        with ThreadPoolExecutor(8) as pool:
            for user, r in zip(users, pool.map(lambda u: ask(url, model='beta', user=u, max_tokens=2, temperature=1), users)):
                version = r.json()['lorajax']['version']
                assert not side.get(user) or version == new, 'nobody goes back'
                side[user] = version == new
    assert ask(url, model='beta').json()['lorajax']['version'] == new == service.fleet.current.names['beta']
    actions = [a['action'] for a in httpx.get(f'{url}/v1/lorajax/audit', headers={'authorization': f'Bearer {BOSS}'}).json() if a['name'] == 'beta']
    assert actions[:5] == ['promote', 'advance', 'advance', 'advance', 'start'], actions

def test_a_rollout_that_fails_or_is_disliked_goes_back(url, running, service, monkeypatch):
    make_version(running, 'gamma', 'gamma2', 31)
    monkeypatch.setattr(watch_module, 'Bounds', lambda: Bounds(least=20, p50=1e9, p99=1e9))
    old = service.fleet.current.names['gamma']
    assert call(url, '/v1/lorajax/rollouts', name='gamma', lora_path='gamma2', watch_seconds=3600).status_code == 200
    new = service.fleet.current.rollouts['gamma'].new
    monkeypatch.setattr(type(service.fleet.current), 'version', lambda self, name, user='': (new if hash(user) % 2 else old) if name == 'gamma' else self.names.get(name))
    def rated(user):
        answer = ask(url, model='gamma', user=user, max_tokens=2, temperature=1).json()
        if 'error' in answer: return until(lambda: 'gamma' not in service.fleet.current.rollouts) # it ended this moment
        bad = answer['lorajax']['version'] == new
        assert call(url, '/v1/lorajax/feedback', request_id=answer['id'], score=.1 if bad else .9).status_code == 200
    for i in range(200):
        if 'gamma' not in service.fleet.current.rollouts: break
        rated(f'u{i}')
    until(lambda: 'gamma' not in service.fleet.current.rollouts)
    assert service.fleet.current.names['gamma'] == old
    last = httpx.get(f'{url}/v1/lorajax/audit', headers={'authorization': f'Bearer {BOSS}'}).json()[0]
    assert (last['action'], last['name'], last['actor']) == ('roll back', 'gamma', 'rollout') and 'qualit' in last['detail']

def test_promote_and_roll_back_by_hand(url, running, service):
    make_version(running, 'alpha', 'alpha2', 33)
    first = service.fleet.current.names['alpha']
    assert call(url, '/v1/lorajax/rollouts', name='alpha', lora_path='alpha2', watch_seconds=3600).status_code == 200
    second = call(url, '/v1/lorajax/rollouts/alpha/promote').json()['version']
    assert ask(url, model='alpha').json()['lorajax']['version'] == second != first
    assert call(url, '/v1/lorajax/rollouts/alpha/roll_back', reason='worse').json()['version'] == first
    assert ask(url, model='alpha').json()['lorajax']['version'] == first
    assert call(url, '/v1/lorajax/rollouts/alpha/roll_back', reason='again').status_code == 400
    assert call(url, '/v1/lorajax/rollouts/nope/promote').status_code == 404

def test_strict_mode_says_so_and_the_webhook_is_told(url, service, told):
    version = service.fleet.current.names['beta']
    service.fleet.broken[version] = 'the test says so'
    try:
        said = ask(url, model='beta')
        assert said.status_code == 503 and said.json()['error']['code'] == 'adapter_unavailable' and ask(url, model='alpha').status_code == 200
        until(lambda: any(t['alert'] == 'fallback' and t['state'] == 'raised' for t in told))
    finally: del service.fleet.broken[version]
    until(lambda: any(t['alert'] == 'fallback' and t['state'] == 'ended' for t in told))

def test_the_semantic_cache_keeps_answers_apart_by_version_key_and_rules(url, service):
    prompt = 'How do I cancel the order that I placed yesterday?'
    ask_ = lambda key=BOSS, **more: ask(url, key, **dict(prompt=prompt, max_tokens=5) | more)
    first, again = ask_(), ask_()
    assert 'x-lorajax-cache' not in first.headers and again.headers['x-lorajax-cache'] == 'hit' and again.json()['lorajax']['cached'] is True
    assert again.json()['choices'] == first.json()['choices'] and again.json()['id'] != first.json()['id']
    assert ask_(prompt='How do I cancel the order which I placed yesterday?').headers['x-lorajax-cache'] == 'hit'
    for other in (dict(model='gamma'), dict(key=SHOP), dict(max_tokens=6), dict(stop=['x']), dict(prompt='What is the capital of Chile?'), dict(user='somebody else')):
        assert 'x-lorajax-cache' not in ask_(**other).headers, other
    for never in (dict(temperature=1), dict(logprobs=1), dict(n=2, temperature=1)):
        assert 'x-lorajax-cache' not in ask_(**never).headers and 'x-lorajax-cache' not in ask_(**never).headers
    service_version = service.fleet.current.names['alpha']
    assert first.json()['lorajax']['version'] == service_version

def test_what_a_reviewer_found(url, running, service):
    "Each line was a defect once."
    compose = lambda name: call(url, '/v1/lorajax/compositions', name=name, weights=dict(alpha=.5, gamma=.5))
    assert compose('mix').json()['version'] == compose('mix2').json()['version']
    version = service.fleet.current.names['mix']
    for bad in (dict(logit_bias={'999': 1}), dict(response_format=dict(type='regex', pattern='('))):
        assert ask(url, model='mix', **bad).status_code == 400
    assert version not in service.fleet.broken and ask(url, model='mix').json()['model'] == 'mix', 'a bad request breaks no adapter'
    for name in ('mix', 'mix2'): assert call(url, '/v1/unload_lora_adapter', lora_name=name).status_code == 200
    until(lambda: not service.engine.names.kept[version] and version not in service.engine.residents.recipes)
    for prompt in ([[]], [[dict(role='user', content='x')]], [[1], []]): assert ask(url, prompt=prompt, echo=True).status_code == 400
    assert call(url, '/v1/chat/completions', model='alpha', messages=[dict(role=['user'], content='x')]).status_code == 400
    path = make_version(running, '日本', '日本', 44)
    assert call(url, '/v1/load_lora_adapter', lora_name='日本', lora_path=path.name).status_code == 200
    answer = ask(url, model='日本')
    assert answer.json()['model'] == '日本' and answer.headers['x-lorajax-model'] == '??'
    assert call(url, '/v1/unload_lora_adapter', lora_name='日本').status_code == 200
    id = ask(url, SHOP, prompt='rated').json()['id']
    rate = lambda key: call(url, '/v1/lorajax/feedback', key, request_id=id, score=1).status_code
    assert [rate(BOSS), rate(SHOP), rate(SHOP)] == [404, 200, 404], 'once, and by who asked'
    assert ask(url, prompt=['x'] * 64, n=5, temperature=1).status_code == 400, 'it could never wait here'
    before = service.fallbacks
    service.fleet.broken[service.fleet.current.names['gamma']] = 'it is in /secret/place'
    try: said = ask(url, model='gamma').json()['error']['message']
    finally: service.fleet.broken.clear()
    assert 'secret' not in said and service.fallbacks == before
    rebound = httpx.post(f'{url}/v1/unload_lora_adapter', json=dict(lora_name='alpha'), headers=dict(host='evil.example'))
    assert rebound.status_code == 401

def test_draining_says_so(url, service):
    service.draining = True
    try:
        assert httpx.get(f'{url}/ready').status_code == 503 == ask(url, prompt='new').status_code and httpx.get(f'{url}/health').status_code == 200
    finally: service.draining = False
    assert httpx.get(f'{url}/ready').status_code == 200

# Without a server

def test_settings_come_from_the_environment_or_are_refused():
    assert from_environment({}) == Settings() and from_environment(dict(LORAJAX_ROWS='3', LORAJAX_STRICT='yes', LORAJAX_CACHE='.9')) == Settings(rows=3, strict=True, cache=.9)
    for wrong in (dict(rows=0), dict(cache=2.), dict(dtype='float16'), dict(adapters='/nowhere'), dict(trusted='abc'), dict(log_level='loud')):
        with pytest.raises(Refused): check(replace(Settings(adapters='.'), **wrong))
    for name, value in (('LORAJAX_ROWS', 'x'), ('LORAJAX_STRICT', 'maybe'), ('LORAJAX_ROWZ', '3')):
        with pytest.raises(Refused, match=name): from_environment({name: value})

def test_bad_key_files_are_refused(tmp_path):
    file = tmp_path / 'keys'
    for text in ('', '{}', '{"keys": [{"key": "short", "name": "a"}]}', '{"keys": [{"key": "0123456789abcdef", "name": "a", "typo": 1}]}',
                 '{"keys": []}', '{"keys": [{"key": "0123456789abcdef", "name": "admin"}]}',
                 '{"keys": [{"key": "0123456789abcdef", "name": "a"}, {"key": "0123456789abcdef", "name": "b"}]}'):
        file.write_text(text)
        with pytest.raises(Refused): read_keys(str(file))

def test_golden_signals_have_the_thresholds_of_the_field():
    s = Signals()
    for what, good, bad in (('swap', .009, .011), ('route', .0029, .0031)):
        for _ in range(25): s.saw(what, good, *(['x'] if what == 'route' else []))
    assert golden(s, (3000, 10_000)) == {'slow swap': None, 'slow route': None, 'low prefix hit rate': None}
    for what, bad in (('swap', .011), ('route', .0031)):
        for _ in range(25): s.saw(what, bad, *(['x'] if what == 'route' else []))
    assert all(golden(s, (2999, 10_000)).values()) and golden(s, (0, 9_999))['low prefix hit rate'] is None
