"""The load generator against servers whose delays and faults are set by hand, and against our own: sockets and processes,
which would bore a reader."""
import asyncio, gzip, json, socket, sys, threading, time
from contextlib import contextmanager
from dataclasses import replace
import pytest, uvicorn
from lorajax import cli
from lorajax.core import Refused
from lorajax.load import Arrival, Server, arrivals, read_trace, run_load, summary, told
import served

HEAD = 'TIMESTAMP,ContextTokens,GeneratedTokens'

asked = [] # the bodies of those requests that aren't streamed

@contextmanager
def listening(answer):
    "A server whose `answer` is a coroutine function of the request's body and of a function that sends an event or bytes."
    async def app(scope, receive, send):
        parts, more = b'', True
        while more:
            message = await receive()
            parts, more = parts + message['body'], message.get('more_body')
        body, headers = json.loads(parts), dict(scope['headers'])
        async def start(status=200, kind=b'text/event-stream'):
            await send(dict(type='http.response.start', status=status, headers=[(b'content-type', kind)]))
        async def say(what):
            data = what if isinstance(what, bytes) else f'data: {json.dumps(what)}\n\n'.encode()
            await send(dict(type='http.response.body', body=data, more_body=True))
        if not body.get('stream'): asked.append(body); await start(); await say(b'{}')
        else: await answer(body | dict(path=scope['path'], key=headers.get(b'authorization', b'').decode()), start, say)
        await send(dict(type='http.response.body', body=b''))
    sock = socket.socket()
    sock.bind(('127.0.0.1', 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level='critical', lifespan='off'))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try: yield f'http://127.0.0.1:{sock.getsockname()[1]}'
    finally:
        server.should_exit = True
        thread.join()

def text(word, end=None): return dict(choices=[dict(delta=dict(content=word), finish_reason=end)])

def load(url, planned, **kw): return asyncio.run(run_load(Server(url, **kw), planned))

def test_a_slow_server_delays_no_request_and_times_are_as_set():
    "No text before all thirty requests have come and 0.3 s have gone, then three more, 0.1 s apart: 0.6 s in all."
    come = []
    async def answer(body, start, say):
        come.append(body)
        await start()
        while len(come) < 30: await asyncio.sleep(.01) # for ever, if a request waits for another's end
        await asyncio.sleep(.3)
        for i in range(4):
            if i: await asyncio.sleep(.1)
            await say(text('so ', 'stop' if i == 3 else None))
        await say(b'data: [DONE]\n\n')
    with listening(answer) as url: outcomes = load(url, [Arrival(i / 100, 'm', 4, 4) for i in range(30)])
    for o in outcomes:
        assert not o.error and o.tokens == 4 and not o.counted and o.lag >= 0
        assert .3 <= o.first - o.lag and .599 <= o.end - o.lag and o.first < o.end
        assert abs(o.per_token - (o.end - o.first) / 3) < 1e-9
    assert [o.arrival.at for o in outcomes] == [i / 100 for i in range(30)]

def test_times_count_from_the_plan_when_the_client_is_late():
    "The first request blocks the client's loop for a second; what was planned meanwhile is late, and says so in its times."
    blocking = []
    async def answer(body, start, say):
        if blocking: blocking.pop().call_soon_threadsafe(time.sleep, 1.)
        await start(), await say(text('so ', 'stop')), await say(b'data: [DONE]\n\n')
    async def blocked(url):
        blocking.append(asyncio.get_running_loop())
        return await run_load(Server(url), [Arrival(i / 20, 'm', 4, 4) for i in range(50)])
    with listening(answer) as url: outcomes = asyncio.run(blocked(url))
    latest = max(outcomes, key=lambda o: o.lag)
    assert latest.lag > .8 and outcomes[-1].lag < latest.lag
    assert all(o.lag <= o.first <= o.end for o in outcomes)
    assert any('overloaded' in line for line in told(summary([latest])))

def test_errors_by_kind_and_usage():
    "The model's name says what goes wrong."
    over = threading.Event()
    async def answer(body, start, say):
        kind = body['model']
        assert body['stream_options'] == dict(include_usage=True) and body['messages'][0]['role'] == 'user'
        if kind == 'busy': await start(429, b'application/json'); return await say(b'{"error": {"message": "later"}}')
        await start()
        while kind == 'slow' and not over.is_set(): await asyncio.sleep(.01)
        if kind == 'page': return await say(b'data: <html>\n\n')
        await say(text('so '))
        if kind == 'cut': return
        if kind == 'inside': return await say(dict(error=dict(message='out of memory')))
        await say(text('so ', 'length'))
        await say(dict(choices=[], usage=dict(prompt_tokens=11, completion_tokens=7)))
        await say(b'data: [DONE]\n\n')
    names = ['good', 'busy', 'slow', 'page', 'cut', 'inside', 'good']
    with listening(answer) as url:
        outcomes = load(url, [Arrival(.01 * i, n, 4, 4) for i,n in enumerate(names)], timeout=3.)
        over.set()
    assert [o.error for o in outcomes] == ['', 'HTTP 429', 'timeout', 'no event stream', 'cut off', 'error event', '']
    s = summary(outcomes)
    assert (s.requests, s.answered, s.tokens, s.prompt_tokens, s.counted) == (7, 2, 14, 22, True)
    assert s.errors == {'HTTP 429': 1, 'timeout': 1, 'no event stream': 1, 'cut off': 1, 'error event': 1}
    assert s.models == dict(good=2, busy=1, slow=1, page=1, cut=1, inside=1)

def test_prompts_are_new_in_each_run_unless_the_seed_is_given():
    seen = []
    async def answer(body, start, say):
        seen.append(body['messages'][0]['content'])
        await start(), await say(text('so ', 'stop')), await say(b'data: [DONE]\n\n')
    planned = [Arrival(0., 'm', 20, 4), Arrival(.05, 'm', 20, 4)]
    with listening(answer) as url:
        for seed in (None, None, 3, 3): asyncio.run(run_load(Server(url), planned, seed))
    assert len(seen) == 8 and len(set(seen)) == 6 and len({s[:25] for s in seen}) == 6, 'they differ from the beginning'

def test_usage_of_a_foreign_server():
    "The model's name says what its usage is; only whole numbers count."
    usages = dict(none=dict(prompt_tokens=None, completion_tokens=5), word=dict(prompt_tokens='9', completion_tokens='5'),
                  text='many', fine=dict(prompt_tokens=9, completion_tokens=5))
    async def answer(body, start, say):
        await start()
        for end in (None, 'stop'): await say(text('so ', end))
        await say(dict(choices=[], usage=usages[body['model']])), await say(b'data: [DONE]\n\n')
    with listening(answer) as url: found = {k: load(url, [Arrival(0., k, 4, 4)])[0] for k in usages}
    assert {k: (o.error, o.tokens, o.prompt_tokens, o.counted) for k,o in found.items()} == dict(
        none=('', 5, None, True), word=('', 2, None, False), text=('', 2, None, False), fine=('', 5, 9, True))
    assert summary([found['fine'], found['fine']]).prompt_tokens == 18
    assert summary([found['fine'], found['none']]).prompt_tokens is None

def test_thoughts_are_text_and_one_event_has_no_time_between_tokens():
    "The first model thinks, then answers; the second says all its tokens at once."
    async def answer(body, start, say):
        await start()
        if body['model'] == 'thinks':
            await say(dict(choices=[dict(delta=dict(reasoning_content='hm'))]))
            await asyncio.sleep(.2) # or both events may come in one read
        await say(text('so', 'stop'))
        await say(dict(choices=[], usage=dict(prompt_tokens=9, completion_tokens=3))), await say(b'data: [DONE]\n\n')
    with listening(answer) as url: thinks, whole = (load(url, [Arrival(0., k, 4, 4)])[0] for k in ('thinks', 'whole'))
    assert (thinks.events, thinks.tokens) == (2, 3) and thinks.per_token == pytest.approx((thinks.end - thinks.first) / 2)
    assert thinks.per_token > 0 and (whole.events, whole.tokens, whole.per_token) == (1, 3, None)
    s = summary([thinks, whole])
    assert s.per_token == pytest.approx((thinks.per_token,) * 3) and s.at_once == 1
    assert any('1 of the answers came in one event' in line for line in told(s))

def test_no_answer_at_all():
    async def answer(body, start, say): await start(503)
    with listening(answer) as url: s = summary(load(url, [Arrival(0., 'm', 4, 4)]))
    assert (s.answered, s.counted, s.prompt_tokens) == (0, False, None)
    assert 'counted by the server' not in '\n'.join(told(s)) and 'errors: HTTP 503 1' in told(s)

def test_completions_a_key_and_more_fields():
    seen = []
    async def answer(body, start, say):
        seen.append(body)
        await start(), await say(dict(choices=[dict(text='so ', finish_reason='stop')])), await say(b'data: [DONE]\n\n')
    with listening(answer) as url:
        out = load(f'{url}/v1/', [Arrival(0., 'm', 5, 3)], chat=False, key='secret', extra=dict(temperature=0))
    assert out[0].tokens == 1 and not out[0].error
    assert {k: seen[0][k] for k in ('path', 'key', 'temperature', 'max_tokens', 'model')} == dict(
        path='/v1/completions', key='Bearer secret', temperature=0, max_tokens=3, model='m')
    assert len(seen[0]['prompt'].split()) == 5
    assert asked[-1] == dict(model='m', prompt='hello', max_tokens=1), 'the question before the clock has no more fields'

def test_percentiles_by_hand():
    "Eleven answers, 0.0 to 1.0 s: the median is 0.5, P90 0.9, and P99 lies nine tenths of the way from 0.9 to 1.0."
    async def answer(body, start, say): await start(), await say(text('so ', 'stop')), await say(b'data: [DONE]\n\n')
    with listening(answer) as url: one = load(url, [Arrival(0., 'm', 4, 4)])[0]
    s = summary([replace(one, first=i / 10, end=i / 10, tokens=2, events=2, lag=0.) for i in range(11)])
    assert s.first == pytest.approx((.5, .9, .99)) and s.per_token == (0, 0, 0)
    assert (s.seconds, s.tokens_per_second) == (1., 22.)

@pytest.fixture(scope='module')
def ours(tmp_path_factory):
    files = served.make_files(tmp_path_factory.mktemp('load'), ['red', 'blue'])
    with served.app_in_thread(**files) as (url, _): yield url

def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, 'argv', ['lorajax', 'bench', 'serve', *map(str, words)])
    code = 0
    try: cli.main()
    except SystemExit as stop: code = stop.code or 0
    return code, *capsys.readouterr()

def test_our_own_server(ours, monkeypatch, capsys, tmp_path):
    "Both endpoints, three models, lengths exact: 24 requests of 6 tokens."
    for more in ([], ['--completions']):
        kept = tmp_path / 'load.json'
        who = '-m', 'red', '-m', 'blue', '-m', 'tiny', '--zipf', 1
        rules = '{"temperature": 0, "ignore_eos": true}'
        what = '--rate', 40, '-n', 24, '--prompt-tokens', 3, '--max-tokens', 6, '--body', rules
        code, out, _ = command(monkeypatch, capsys, '--url', ours, *who, *what, '--json', kept, *more)
        found = json.loads(kept.read_text())
        s = found['summary']
        assert code == 0 and '24 of 24 requests answered' in out and 'counted by the server' in out
        assert (s['answered'], s['tokens'], s['counted'], s['errors']) == (24, 144, True, {})
        assert s['models'].keys() == {'red', 'blue', 'tiny'} and sum(s['models'].values()) == 24
        assert len(found['requests']) == 24 and all(r['first'] <= r['end'] for r in found['requests'])

def test_a_trace_against_our_own_server(ours, monkeypatch, capsys, tmp_path):
    rows = [HEAD, '2023-11-16 18:17:04.5000000,40,80', '2023-11-16 18:17:03.5000000,20,40']
    trace = tmp_path / 'trace.csv.gz'
    trace.write_bytes(gzip.compress('\n'.join(rows).encode()))
    assert read_trace(trace, speed=10, shorter=10) == [(0., 2, 4), (pytest.approx(.1), 4, 8)]
    what = '--trace', trace, '--speed', 10, '--shorter', 10, '--body', '{"ignore_eos": true}'
    code, out, _ = command(monkeypatch, capsys, '--url', ours, '-m', 'red', *what)
    assert code == 0 and '2 of 2 requests answered' in out and '12 tokens generated' in out

@pytest.mark.parametrize('words, says', [
    (['-m', 'green', '--rate', '1'], "'green'"), (['-m', 'red'], '--rate or --trace'), (['--rate', '1'], '--model'),
    (['-m', 'red', '--rate', '0'], 'positive'),
    (['-m', 'red', '--rate', '1', '--zipf', 'nan'], 'zipf'), (['-m', 'red', '--rate', '1', '--body', '[]'], 'JSON object'),
    (['-m', 'red', '--rate', '1', '--body', '{"stream": false}'], '--body sets stream'),
    (['-m', 'red', '--rate', '1', '--json', '/proc/nothing/x.json'], '--json /proc/nothing/x.json cannot be written'),
    (['-m', 'red', '--trace', 'nowhere.csv'], 'nowhere.csv cannot be read')])
def test_a_mistake_is_one_sentence(ours, monkeypatch, capsys, words, says):
    code, out, err = command(monkeypatch, capsys, '--url', ours, *words)
    assert code == 1 and not out and err.strip().splitlines()[-1].startswith('lorajax: ') and says in err

def test_nobody_listens(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, '--url', 'http://127.0.0.1:1', '-m', 'red', '--rate', 1)
    assert code == 1 and 'http://127.0.0.1:1 cannot be reached' in err and '--url' in err

@pytest.mark.parametrize('row, says', [('2023-11-16 18:17:03,x,1', 'line 2'), ('2023-11-16 18:17:03,-1,1', 'negative'),
                                       ('2023-11-16 18:17:03,1', 'line 2')])
def test_a_bad_row_of_a_trace_is_named(tmp_path, row, says):
    trace = tmp_path / 'trace.csv'
    trace.write_text(f'{HEAD}\n{row}\n')
    with pytest.raises(Refused, match=says): read_trace(trace)
    trace.write_text('TIMESTAMP,ContextTokens\n')
    with pytest.raises(Refused, match='no column GeneratedTokens'): read_trace(trace)
    trace.write_text(f'{HEAD}\n')
    with pytest.raises(Refused, match='no requests'): read_trace(trace)

def test_a_broken_archive(tmp_path):
    whole = bytearray(gzip.compress(f'{HEAD}\n2023-11-16 18:17:03,5,6\n'.encode()))
    whole[12] ^= 255 # within the compressed data
    (tmp_path / 'trace.csv.gz').write_bytes(whole)
    with pytest.raises(Refused, match='trace.csv.gz cannot be read'): read_trace(tmp_path / 'trace.csv.gz')

def test_a_key_is_sent_only_if_it_is_meant(monkeypatch, capsys):
    seen = []
    async def answer(body, start, say):
        seen.append(body['key'])
        await start(), await say(text('so ', 'stop')), await say(b'data: [DONE]\n\n')
    monkeypatch.setenv('OPENAI_API_KEY', 'for OpenAI')
    with listening(answer) as url:
        words = '--url', url, '-m', 'm', '--rate', 9, '-n', 1
        assert command(monkeypatch, capsys, *words)[0] == 0
        monkeypatch.setenv('BENCH_API_KEY', 'for this')
        assert command(monkeypatch, capsys, *words)[0] == 0
        assert command(monkeypatch, capsys, *words, '--api-key', 'given')[0] == 0
    assert seen == ['', 'Bearer for this', 'Bearer given']

def test_a_real_trace(shared_data):
    "Azure's conversations of 2023-11-16 (Splitwise, ISCA 2024): its length, and the first rows of its sister."
    path = shared_data / 'trace_azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz'
    found, code = read_trace(path), read_trace(path.with_name('AzureLLMInferenceTrace_code.csv.gz'), 3)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert len(found) == len(lines) - 1 == 19366
    assert [(round(t, 4), p, g) for t,p,g in code] == [(0., 4808, 10), (.052, 3180, 8), (.0982, 110, 27)]
    assert found[-1][0] == pytest.approx(3501.721937) # from 18:15:46.6805900 to 19:14:08.4025270

def test_times_of_a_trace_may_have_a_zone(tmp_path):
    "Azure's traces of 2024 write it; 09:00:00.5 at +09:00 is half a second after midnight in Greenwich."
    trace = tmp_path / 'trace.csv'
    trace.write_text(f'{HEAD}\n2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 09:00:00.509930+09:00,7,8\n')
    assert read_trace(trace) == [(0., 5, 6), (pytest.approx(.5), 7, 8)]

def test_models_by_popularity():
    names = [a.model for a in arrivals([(0., 1, 1)] * 7000, ['a', 'b', 'c', 'd'], zipf=0)]
    assert all(abs(names.count(n) - 1750) < 150 for n in 'abcd')
