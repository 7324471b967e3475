"""The HTTP service under real clients: shapes of answers, refusals, changes at run time; a notebook has no server."""
import json, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
import httpx, numpy as np, openai, pytest
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.generate import generate
from lorajax.peft import save_adapter
import dense, served
from lorajax.model import random_tensors

NAMES = ['alpha', 'beta', 'gamma', 'delta', 'omega', 'sigma']

@pytest.fixture(scope='module')
def files(tmp_path_factory): return served.make_files(tmp_path_factory.mktemp('served'), NAMES)

@pytest.fixture(scope='module')
def running(files):
    with served.app_in_thread(**files, queue=40) as (url, app): yield url, app

@pytest.fixture
def url(running): return running[0]

@pytest.fixture
def service(running): return running[1].state.service

@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client: yield client

@pytest.fixture
def client(url): return openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0)

@pytest.fixture(scope='module')
def oracle(files):
    "What an adapter says on its own: the closed batch of the library, which is checked against dense arithmetic elsewhere."
    base, memo = load_base(files['model']), {}
    def say(name, prompt, n=8):
        key = name, prompt, n
        if key not in memo:
            adapter = None if name == 'tiny' else base.load_adapter(f'{files["adapters"]}/{name}', name)
            memo[key] = generate(base, [prompt], [adapter], Sampling(max_new_tokens=n))[0].text
        return memo[key]
    return say

def ask(http, path='/v1/completions', **fields):
    fields = dict(model='alpha', prompt='hello', max_tokens=4, temperature=0) | fields
    return http.post(path, json={k: v for k,v in fields.items() if v is not ...})

def talk(http, **fields):
    return ask(http, '/v1/chat/completions', **dict(prompt=..., messages=[dict(role='user', content='hello')]) | fields)

def is_error(response, status, code=...):
    body = response.json()
    assert response.status_code == status, body
    assert body.keys() == {'error'} and body['error'].keys() == {'message', 'type', 'param', 'code'}, body
    assert body['error']['message'] and 'Traceback' not in body['error']['message']
    if code is not ...: assert body['error']['code'] == code
    return body['error']

def chunks_of(http, path='/v1/completions', **fields):
    with http.stream('POST', path, json=dict(model='alpha', prompt='hello', max_tokens=4, temperature=0, stream=True) | fields) as r:
        assert r.status_code == 200 and r.headers['content-type'].startswith('text/event-stream'), r.read()
        lines = [line.removeprefix('data: ') for line in r.iter_lines() if line]
    assert lines[-1] == '[DONE]'
    return [json.loads(line) for line in lines[:-1]]

def is_quiet(service, seconds=5):
    "Everything given back: no sequence, no pinned page."
    end = time.monotonic() + seconds
    pages = service.engine.residents.pages
    while service.live or service.engine._live or pages.available != pages.capacity:
        assert time.monotonic() < end, (service.live, service.engine._live, pages.available, pages.capacity)
        time.sleep(.02)

@contextmanager
def cut_short(service, tokens):
    "Of as many tokens that were asked for, few are computed, and everything is given back."
    before = service.engine.stats().generated_tokens
    yield
    is_quiet(service)
    assert service.engine.stats().generated_tokens - before < tokens / 2

# Answers

def test_every_name_says_what_it_says_alone(http, oracle):
    with ThreadPoolExecutor(8) as pool:
        names = [*NAMES, 'tiny'] * 3
        said = list(pool.map(lambda n: ask(http, model=n, max_tokens=8).json(), names))
    for name, body in zip(names, said):
        assert body['choices'][0]['text'] == oracle(name, 'hello') and body['model'] == name
    assert len({b['choices'][0]['text'] for b in said}) == len(NAMES) + 1

def test_openai_client_completes_chats_and_streams(client, oracle):
    prompt = 'user: hello\nassistant: '
    answer = client.chat.completions.create(model='beta', messages=[dict(role='user', content='hello')], max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == oracle('beta', prompt) and answer.choices[0].message.role == 'assistant'
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 8
    stream = client.chat.completions.create(model='beta', messages=[dict(role='user', content=[dict(type='text', text='hello')])],
                                            max_tokens=8, temperature=0, stream=True, stream_options=dict(include_usage=True))
    events = list(stream)
    assert ''.join(e.choices[0].delta.content or '' for e in events if e.choices) == oracle('beta', prompt)
    assert events[-1].usage.completion_tokens == 8 and events[0].choices[0].delta.role == 'assistant'
    text = client.completions.create(model='gamma', prompt=['hello', 'bye'], n=2, max_tokens=8, temperature=0)
    assert [c.index for c in text.choices] == [0, 1, 2, 3]
    assert [c.text for c in text.choices] == [oracle('gamma', p) for p in ('hello', 'hello', 'bye', 'bye')]

def test_models_are_listed_with_their_parent(client, http):
    cards = {m.id: m for m in client.models.list()}
    assert cards.keys() == {'tiny', *NAMES} and all(cards[n].parent == 'tiny' for n in NAMES) and cards['tiny'].parent is None
    assert client.models.retrieve('beta').id == 'beta'
    is_error(http.get('/v1/models/nope'), 404, 'model_not_found')

def test_B64_unknown_models_are_404_before_any_byte(http):
    for name in ('nope', '', 'alpha ', 'Alpha', 'ALPHA', 'base', '../alpha', 'auto', 'x' * 10_000):
        for send in (ask, talk):
            for stream in (False, True): is_error(send(http, model=name, stream=stream), 404, 'model_not_found')
    for wrong in (None, 3, ['alpha'], {}, ...):
        for send in (ask, talk): is_error(send(http, model=wrong), 400)

def test_B66_the_model_is_who_answered(http):
    assert ask(http).json()['model'] == talk(http).json()['model'] == 'alpha'
    for path, more in (('/v1/completions', {}), ('/v1/chat/completions', dict(messages=[dict(role='user', content='x')]))):
        fields = dict(model='beta') | more
        with http.stream('POST', path, json=fields | ({} if more else dict(prompt='x')) | dict(max_tokens=3, stream=True)) as r:
            lines = [json.loads(l[6:]) for l in r.iter_lines() if l.startswith('data: {')]
        assert {l['model'] for l in lines} == {'beta'} and r.headers['x-lorajax-model'] == 'beta'

@pytest.mark.parametrize('text', ['é', '日本', '😊', '👩‍👩‍👧', 'a é b'])
def test_B67_characters_are_never_split(http, text):
    fields = dict(model='tiny', response_format=dict(type='regex', pattern=text), max_tokens=40)
    pieces = [c['choices'][0]['text'] for c in chunks_of(http, **fields)]
    assert ''.join(pieces) == text == ask(http, **fields).json()['choices'][0]['text']
    assert '�' not in ''.join(pieces)

def test_B69_no_part_of_a_stop_text_is_sent(http):
    fields = dict(model='tiny', response_format=dict(type='regex', pattern='xaaab.*'), max_tokens=20, stop=['aab'])
    assert ''.join(c['choices'][0]['text'] for c in chunks_of(http, **fields)) == 'xa' == ask(http, **fields).json()['choices'][0]['text']
    assert ask(http, **fields).json()['choices'][0]['finish_reason'] == 'stop'
    fields |= dict(response_format=dict(type='regex', pattern='end\nUser: me'), stop='\nUser:')
    assert ''.join(c['choices'][0]['text'] for c in chunks_of(http, **fields)) == 'end'

def test_B71_fields_are_served_or_refused_by_name(http):
    for ok in (dict(stop='x'), dict(stop=['x']), dict(stop=list('wxyz')), dict(stop=[]), dict(stop=None), dict(suffix=''), dict(best_of=1),
               dict(logit_bias={'65': 5}), dict(presence_penalty=1.), dict(metadata={'a': 'b'}), dict(max_tokens=0, echo=True)):
        assert ask(http, **ok).status_code == 200, ok
    for bad in (dict(stop=list('vwxyz')), dict(stop=''), dict(stop=['']), dict(stop=3), dict(suffix='x'), dict(best_of=3), dict(n=0),
                dict(temperature=-1), dict(top_p=0), dict(top_p=1.5), dict(max_tokens=0), dict(max_tokens=-1), dict(logit_bias={'x': 1}),
                dict(logit_bias={'999': 1}), dict(presence_penalty=3), dict(response_format={'type': 'xml'}), dict(prompt=[]), dict(prompt=''),
                dict(prompt=[1, 'a']), dict(prompt=[999]), dict(n=129), dict(top_k=-2), dict(timeout=0), dict(user=3)):
        is_error(ask(http, **bad), 400)
    said = is_error(ask(http, temprature=1), 400)
    assert 'temprature' in said['message'] and 'temperature?' in said['message'] and said['param'] == 'temprature'
    said = is_error(ask(http, stream=True, stream_options=dict(usage=True)), 400)
    assert 'stream_options' in said['message'] and said['param'] == 'usage'
    assert is_error(ask(http, model='alpha', n='2'), 400)['param'] == 'n'
    assert is_error(ask(http, max_tokens=0), 400)['message'].startswith('max_tokens=0;'), 'as the client called it'
    for bad in (dict(tools=[{}]), dict(tool_choice='required'), dict(modalities=['audio']), dict(reasoning_effort='low'), dict(messages=[]),
                dict(messages=[dict(role='robot', content='x')]), dict(messages=[dict(role='user')]), dict(messages=[dict(role='user', content=3)]),
                dict(messages=[dict(role='user', content=[dict(type='image_url', image_url='x')])]), dict(messages=['x']),
                dict(messages=[dict(role='assistant', content='x', tool_calls=[1])]), dict(max_tokens=3, max_completion_tokens=4)):
        is_error(talk(http, **bad), 400)
    for ok in (dict(tools=[]), dict(tool_choice='none'), dict(store=True), dict(messages=[dict(role='developer', content='x')])):
        assert talk(http, **ok).status_code == 200, ok

def test_B73_usage_comes_once_and_only_when_asked(http):
    for options in (None, dict(include_usage=False)):
        assert all('usage' not in c and c['choices'] for c in chunks_of(http, **({} if options is None else dict(stream_options=options))))
    *body, last = chunks_of(http, n=2, stream_options=dict(include_usage=True))
    assert all(c['usage'] is None and c['choices'] for c in body)
    assert last['choices'] == [] and (last['usage']['prompt_tokens'], last['usage']['completion_tokens']) == (5, 8)
    assert ask(http, n=2).json()['usage'] | dict(prompt_tokens_details=...) == dict(prompt_tokens=5, completion_tokens=8, total_tokens=13, prompt_tokens_details=...)
    is_error(ask(http, stream_options=dict(include_usage=True)), 400)

def test_B75_logprobs_have_the_shapes_of_the_api(http):
    for extra, n in ((dict(logprobs=True), 0), (dict(logprobs=True, top_logprobs=0), 0), (dict(logprobs=True, top_logprobs=5), 5),
                     (dict(logprobs=True, top_logprobs=20), 20)):
        content = talk(http, **extra).json()['choices'][0]['logprobs']['content']
        assert len(content) == 4 and all(len(t['top_logprobs']) == n and bytes(t['bytes']).decode('utf-8', 'replace') == t['token'] for t in content)
        if n: assert all(t['top_logprobs'][0]['logprob'] == t['logprob'] <= 0 for t in content)
    for bad in (dict(logprobs=True, top_logprobs=21), dict(top_logprobs=2), dict(logprobs=False, top_logprobs=1)): is_error(talk(http, **bad), 400)
    none, one, five = (ask(http, logprobs=n, n=2).json()['choices'][1]['logprobs'] for n in (0, 1, 5))
    assert none['top_logprobs'] is None and len(none['token_logprobs']) == 4 and none['text_offset'][0] == 0
    assert all(len(t) <= 5 for t in five['top_logprobs']) and all(max(t.values()) == p for t,p in zip(one['top_logprobs'], one['token_logprobs']))
    is_error(ask(http, logprobs=6), 400)
    assert ask(http, logprobs=None).json()['choices'][0]['logprobs'] is None
    told = ask(http, logprobs=1, echo=True).json()['choices'][0]
    assert told['text'].startswith('hello') and told['logprobs']['token_logprobs'][0] is None and len(told['logprobs']['tokens']) == 9

def test_B75_logprobs_are_log_softmax_of_the_dense_model(http, files):
    "Raw log-probabilities, before temperature; worked out in float32 arithmetic without the engine."
    weights = dense.merged(random_tensors(served.SMALL), served.adapter_of('alpha', 1).modules)
    codec = load_base(files['model']).tokenizer
    z = np.asarray(dense.logits(served.SMALL, weights, codec.encode('hello'))[-1], np.float64)
    want = z - z.max() - np.log(np.exp(z - z.max()).sum())
    for seed in range(4):
        told = ask(http, logprobs=5, temperature=.7, max_tokens=1, seed=seed).json()['choices'][0]['logprobs']
        assert sorted(told['top_logprobs'][0].values())[::-1][:3] == pytest.approx(sorted(want)[::-1][:3], abs=1e-3)
        assert min(abs(want - told['token_logprobs'][0])) < 1e-3

def test_B77_seeds(http):
    warm = lambda **f: ask(http, temperature=1, max_tokens=12, **f).json()['choices'][0]['text']
    assert len({warm() for _ in range(6)}) == 6
    with ThreadPoolExecutor(6) as pool: assert len(set(pool.map(lambda _: warm(), range(6)))) == 6
    assert warm(seed=7) == warm(seed=7) != warm(seed=0) == warm(seed=0)
    for bad in (-1, 2**63, 1.5, '7'): is_error(ask(http, temperature=1, seed=bad), 400)
    assert warm(seed=None)

def test_B80_errors_have_one_shape(http, url):
    is_error(http.get('/nowhere'), 404), is_error(http.get('/v1/nowhere'), 404), is_error(http.get('/v1/completions'), 405)
    is_error(http.delete('/v1/models'), 405)
    for path in ('/v1/completions', '/v1/chat/completions', '/v1/load_lora_adapter', '/v1/unload_lora_adapter', '/v1/lorajax/compositions'):
        for body in (b'', b'{', b'[]', b'null', b'"x"', b'{"model": 1}', b'\xff\xfe', b'[' * 100_000):
            is_error(http.post(path, content=body, headers={'content-type': 'application/json'}), 400)
        is_error(http.post(path, content=b'{"prompt": "' + b'x' * (3 << 20) + b'"}', headers={'content-type': 'application/json'}), 413)
    is_error(http.post('/v1/embeddings', json=dict(model='alpha', input='x')), 400, 'not_offered')

def test_B80_a_failure_inside_is_a_500_without_its_words(http, service, monkeypatch, caplog):
    def fail(*_): raise KeyError('/secret/path')
    monkeypatch.setattr(service, 'choose', fail)
    assert 'secret' not in is_error(ask(http), 500, 'internal_error')['message']
    assert 'secret' in caplog.text

def test_B82_a_client_that_goes_frees_its_pages(http, url, service):
    body = dict(model='alpha', prompt='hello', max_tokens=200, stream=True, ignore_eos=True)
    for after in (3, 1):
        with cut_short(service, 200), http.stream('POST', '/v1/completions', json=body) as r:
            for i, _ in zip(range(after), r.iter_lines()): pass
    with cut_short(service, 12 * 2 * 200), ThreadPoolExecutor(12) as pool: # more than rows: some are queued when they go
        def go(_):
            with pytest.raises(httpx.ReadTimeout): httpx.post(f'{url}/v1/completions', json=body | dict(stream=False, n=2), timeout=httpx.Timeout(5, read=.05))
        list(pool.map(go, range(12)))

def test_B83_health_answers_while_adapters_load_and_prompts_are_long(http, url, service, monkeypatch):
    real, begun, go_on = service.base.load_adapter, threading.Event(), threading.Event()
    def slow(*a): begun.set(); assert go_on.wait(60); return real(*a)
    monkeypatch.setattr(type(service.base), 'load_adapter', lambda self, *a: slow(*a))
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(http.post, '/v1/load_lora_adapter', json=dict(lora_name='slow', lora_path='beta'))
        assert begun.wait(60)
        try:
            for _ in range(5): assert httpx.get(f'{url}/health', timeout=30).status_code == 200
        finally: go_on.set()
        assert loading.result().status_code == 200
    assert http.post('/v1/unload_lora_adapter', json=dict(lora_name='slow')).status_code == 200

def test_B85_context_is_neither_passed_nor_clamped(http, service):
    for prompt, most, status in ((250, 6, 200), (250, 7, 400), (255, 1, 200), (256, 1, 400), (300, 1, 400), (240, ..., 200), (241, ..., 400)):
        r = ask(http, prompt='x' * prompt, max_tokens=most, ignore_eos=True)
        assert r.status_code == status, (prompt, most, r.text)
        if status == 400: is_error(r, 400, 'context_length_exceeded')
    around = len('user: \nassistant: ')
    filled = talk(http, messages=[dict(role='user', content='x' * (240 - around))], max_tokens=..., ignore_eos=True).json()
    assert filled['usage']['completion_tokens'] == 16 and filled['choices'][0]['finish_reason'] == 'length'
    assert talk(http, messages=[dict(role='user', content='x' * (240 - around))], max_tokens=..., max_completion_tokens=16).status_code == 200

def test_B86_an_error_amid_a_stream_is_an_event(http, service, monkeypatch):
    from lorajax import engine as engine_module
    real = engine_module._take_token
    def failing(at):
        seen = 0
        def take(live, token):
            nonlocal seen
            seen += 1
            return ('', 'error', 'injected') if seen == at else real(live, token)
        return take
    monkeypatch.setattr(engine_module, '_take_token', failing(5))
    with http.stream('POST', '/v1/completions', json=dict(model='alpha', prompt='x', max_tokens=9, stream=True, ignore_eos=True)) as r:
        lines = [l for l in r.iter_lines() if l]
    last = json.loads(lines[-1].removeprefix('data: '))
    assert 'injected' in last['error']['message'] and not any('"finish_reason":"stop"' in l for l in lines) and '[DONE]' not in lines[-1]
    monkeypatch.setattr(engine_module, '_take_token', failing(1))
    is_error(ask(http, model='tiny', stream=True), 503, 'generation_failed')
    monkeypatch.setattr(engine_module, '_take_token', failing(1))
    answer = ask(http, model='alpha', stream=False) # nothing was sent yet: the base answers, and says so
    assert answer.json()['model'] == 'tiny' and 'injected' in answer.headers['x-lorajax-fallback'] and 'injected' in answer.json()['lorajax']['fallback']
    monkeypatch.setattr(engine_module, '_take_token', real)
    is_quiet(service)

# Changes

def load(http, name, path, **more): return http.post('/v1/load_lora_adapter', json=dict(lora_name=name, lora_path=str(path)) | more)
def unload(http, name): return http.post('/v1/unload_lora_adapter', json=dict(lora_name=name))

def test_adapters_come_move_and_go(http, client, files, oracle, service):
    assert load(http, 'new', 'beta').status_code == 200 and ask(http, model='new', max_tokens=8).json()['choices'][0]['text'] == oracle('beta', 'hello')
    moved = load(http, 'new', f'{files["adapters"]}/gamma')
    assert moved.status_code == 200 and ask(http, model='new', max_tokens=8).json()['choices'][0]['text'] == oracle('gamma', 'hello')
    assert client.models.retrieve('new').model_extra['version'] == moved.json()['version'] == client.models.retrieve('gamma').model_extra['version']
    assert unload(http, 'new').status_code == 200
    is_error(ask(http, model='new'), 404), is_error(unload(http, 'new'), 404)
    assert ask(http, model='gamma').status_code == 200, 'a version stays while another name has it'

def test_running_requests_finish_on_the_version_they_began_with(http, oracle, service):
    load(http, 'new', 'beta')
    with http.stream('POST', '/v1/completions', json=dict(model='new', prompt='hello', max_tokens=100, temperature=0, stream=True)) as r:
        lines = r.iter_lines()
        first = next(lines)
        assert load(http, 'new', 'gamma').status_code == 200 and unload(http, 'new').status_code == 200
        text = ''.join(json.loads(l[6:])['choices'][0]['text'] for l in [first, *lines] if l.startswith('data: {'))
    assert text == oracle('beta', 'hello', 100)
    is_quiet(service)

def test_B46_unloading_gives_memory_back(http, service):
    used = lambda: (set(service.engine.store.folder.known), set(service.engine.residents.tables))
    load(http, 'spare', 'beta', dtype='int8'), ask(http, model='spare'), unload(http, 'spare')
    is_quiet(service)
    before = used()
    for _ in range(10):
        assert load(http, 'spare', 'beta', dtype='int8').status_code == 200 and ask(http, model='spare').status_code == 200
        assert unload(http, 'spare').status_code == 200
        is_error(ask(http, model='spare'), 404)
    is_quiet(service)
    assert used() == before

def test_B48_a_dropped_request_lets_its_adapter_go(http, url, service):
    load(http, 'spare', 'beta', dtype='int8')
    version = service.fleet.current.names['spare']
    body = dict(model='spare', prompt='x', max_tokens=200, stream=True, ignore_eos=True)
    with cut_short(service, 200):
        with http.stream('POST', '/v1/completions', json=body) as r: next(r.iter_lines())
        assert unload(http, 'spare').status_code == 200
    assert version not in service.engine.store.folder.known and not service.engine.names.kept[version]

def test_B50_parallel_loads_and_unloads_end_in_one_whole_state(http, service, oracle):
    with ThreadPoolExecutor(10) as pool:
        assert all(r.status_code == 200 for r in pool.map(lambda _: load(http, 'p', 'beta'), range(10)))
        assert all(r.status_code == 200 for r in pool.map(lambda i: load(http, 'p', ['beta', 'gamma'][i % 2]), range(10)))
        text = ask(http, model='p', max_tokens=8).json()['choices'][0]['text']
        assert text in (oracle('beta', 'hello'), oracle('gamma', 'hello'))
        mixed = list(pool.map(lambda i: load(http, 'p', 'beta') if i % 3 == 0 else unload(http, 'p') if i % 3 == 1 else ask(http, model='p'), range(60)))
    assert {r.status_code for r in mixed} <= {200, 404}
    unload(http, 'p')
    is_quiet(service)

def test_B52_B55_more_adapters_than_fit_at_once(http, oracle, service):
    "Six adapters through two slots, three rounds, all at once and in turn."
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool: said = list(pool.map(lambda n: ask(http, model=n, max_tokens=20).json()['choices'][0]['text'], NAMES))
        assert said == [oracle(n, 'hello', 20) for n in NAMES]

def test_B56_bad_loads_and_lost_files_touch_nobody_else(http, url, files, oracle, service):
    import shutil
    from pathlib import Path
    root = Path(files['adapters'])
    shutil.copytree(root / 'beta', root / 'cut')
    (root / 'cut/adapter_model.safetensors').write_bytes((root / 'cut/adapter_model.safetensors').read_bytes()[:1000])
    save_adapter(served.adapter_of('big', 9, rank=32), root / 'big')
    def stream(name):
        with httpx.stream('POST', f'{url}/v1/completions', timeout=60, json=dict(model=name, prompt='hello', max_tokens=60, temperature=0, stream=True)) as r:
            return ''.join(json.loads(l[6:])['choices'][0]['text'] for l in r.iter_lines() if l.startswith('data: {'))
    with ThreadPoolExecutor(5) as pool:
        running = {n: pool.submit(stream, n) for n in ('tiny', 'alpha', 'beta', 'gamma', 'delta')}
        assert 'rank' in is_error(load(http, 'big', 'big'), 400)['message']
        is_error(load(http, 'cut', 'cut'), 400), is_error(load(http, 'gone', 'gone'), 400)
        assert load(http, 'good', 'sigma').status_code == 200
        assert {n: f.result() for n,f in running.items()} == {n: oracle(n, 'hello', 60) for n in running}
    save_adapter(served.adapter_of('lost', 77), root / 'lost')
    assert load(http, 'lost', 'lost').status_code == 200
    version, store = service.fleet.current.names['lost'], service.engine.store
    service.engine.call(lambda: service.engine.residents.drop(version))
    with store.lock: store.versions.pop(version, None)
    store.folder.file(version).unlink()
    answer = ask(http, model='lost')
    assert answer.status_code == 200 and answer.json()['model'] == 'tiny' and answer.headers['x-lorajax-fallback']
    assert ask(http, model='beta', max_tokens=8).json()['choices'][0]['text'] == oracle('beta', 'hello')
    row = next(r for r in http.get('/v1/lorajax/adapters').json() if r['name'] == 'lost')
    assert row['state'] == 'broken' and 'lorajax_fallbacks_total{model="lost"' in http.get('/metrics').text
    for name in ('lost', 'good'): assert unload(http, name).status_code == 200

def test_compositions_are_models(http, service, files):
    made = http.post('/v1/lorajax/compositions', json=dict(name='mix', weights=dict(alpha=.7, beta=-.3)))
    assert made.status_code == 200
    base = load_base(files['model'])
    a, b = (base.load_adapter(f'{files["adapters"]}/{n}', n) for n in ('alpha', 'beta'))
    from lorajax.merge import weighted_sum
    want = generate(base, ['hello'], [weighted_sum([a, b], [.7, -.3], 'mix')], Sampling(max_new_tokens=8))[0].text
    assert ask(http, model='mix', max_tokens=8).json()['choices'][0]['text'] == want
    row = next(r for r in http.get('/v1/lorajax/adapters').json() if r['name'] == 'mix')
    assert row['parts'] == dict(alpha=.7, beta=-.3)
    for bad in (dict(name='mix2', weights={}), dict(name='auto', weights=dict(alpha=1)), dict(name='m/x', weights=dict(alpha=1))):
        is_error(http.post('/v1/lorajax/compositions', json=bad), 400)
    is_error(http.post('/v1/lorajax/compositions', json=dict(name='mix2', weights=dict(nope=1))), 404)
    assert unload(http, 'mix').status_code == 200 and ask(http, model='alpha').status_code == 200

def test_B109_no_path_leaves_the_roots(http, files, tmp_path):
    from pathlib import Path
    root = Path(files['adapters'])
    outside = Path(files['model']).parent / 'outside'
    save_adapter(served.adapter_of('outside', 5), outside)
    (root / 'link').symlink_to(outside)
    told = {is_error(load(http, 'x', p), 400)['message'].split(' is no ')[1] for p in (
        '../outside', str(outside), f'{root}/../outside', 'beta/../../outside', 'link', str(root), '.', '/etc', '/nowhere', 'a\0b', '\\etc', '%2e%2e/outside', 'y' * 10_000)}
    assert len(told) == 1
    for name in ('../x', 'a/b', '', 'a.b', 'x' * 129, 'tiny', 'auto', 'base'):
        assert is_error(load(http, name, 'beta'), 400)['param'] == 'lora_name'
    assert load(http, 'x', 'beta').status_code == 200 and unload(http, 'x').status_code == 200

def test_B111_pickles_are_refused_unread(http, files):
    from pathlib import Path
    folder, marker = Path(files['adapters']) / 'pickled', Path(files['model']).parent / 'marker'
    folder.mkdir()
    (folder / 'adapter_config.json').write_text((Path(files['adapters']) / 'beta/adapter_config.json').read_text())
    (folder / 'adapter_model.bin').write_bytes(f'cposix\nsystem\n(Vtouch {marker}\ntR.'.encode())
    assert 'safetensors' in is_error(load(http, 'pickled', 'pickled'), 400)['message'] and not marker.exists()

# Load and rights

def test_a_full_queue_says_429_and_when_to_come_back(http, service):
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: ask(http, max_tokens=60, ignore_eos=True), range(60)))
    turned = [a for a in answers if a.status_code != 200]
    assert turned and all(a.status_code == 429 and a.headers['retry-after'] and is_error(a, 429, 'queue_full') for a in turned)
    is_quiet(service)

def test_deadlines(http, service):
    is_error(ask(http, timeout=.001, max_tokens=200, ignore_eos=True), 408, 'deadline_exceeded')
    is_quiet(service)

def test_request_ids_and_metrics(http):
    r = ask(http)
    assert len(r.headers['x-request-id']) == 24 and http.get('/health', headers={'x-request-id': 'mine-1'}).headers['x-request-id'] == 'mine-1'
    text = http.get('/metrics').text
    for name in ('lorajax_time_to_first_token_seconds_bucket{', 'lorajax_swap_seconds_count', 'lorajax_prefix_hit_rate{model="all"}',
                 'lorajax_pages{tenant="free"}', 'vllm:lora_requests_info{', 'lorajax_recompilations_total'): assert name in text, name
    status = http.get('/v1/lorajax/status').json()
    assert status['ready'] and {a['name'] for a in status['adapters']} >= set(NAMES) and status['signals']['ttft_p50_ms'] > 0

def test_feedback_belongs_to_an_answer(http):
    id = ask(http).json()['id']
    is_error(http.post('/v1/lorajax/feedback', json=dict(request_id=id, score=2)), 400)
    assert http.post('/v1/lorajax/feedback', json=dict(request_id=id, score=1)).status_code == 200
    is_error(http.post('/v1/lorajax/feedback', json=dict(request_id='nope', score=1)), 404)

def test_a_page_of_another_origin_changes_nothing(http):
    r = http.post('/v1/load_lora_adapter', json=dict(lora_name='x', lora_path='beta'), headers={'origin': 'https://elsewhere.example'})
    is_error(r, 403)
    for headers in ({'x-forwarded-for': '1.2.3.4'}, {'host': 'evil.example:8000', 'origin': 'http://evil.example:8000'}):
        is_error(http.post('/v1/unload_lora_adapter', json=dict(lora_name='beta'), headers=headers), 403)
