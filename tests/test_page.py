"Not notebook cells: the page in a real browser, headless Chromium, against a server that speaks the interface."
import contextlib, copy, json, re, shutil, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import httpx, pytest
import served

playwright = pytest.importorskip('playwright.sync_api', reason="no playwright: pip install -e '.[dev]'")
expect = playwright.expect
expect.set_options(timeout=20_000)

SERVING = Path(__file__).resolve().parents[1] / 'serving'
FILES = {'/': ('page.html', 'html'), '/page.js': ('page.js', 'javascript'), '/page.css': ('page.css', 'css')}
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " \
      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>'

def adapter(name, **facts):
    return dict(name=name, version='ab12cd34', state='resident', reason='', parts={}, requests=12, hit_rate=.5) | facts

STATUS = dict(
    base='smollm2', ready=True, uptime_s=130.5,
    signals=dict(swap_p99_ms=14.26, prefix_hit_rate=.41, route_p99_ms=.4, ttft_p50_ms=80, tpot_p50_ms=None),
    sequences=dict(running=2, waiting=1), pages=dict(free=100, kv=20, adapter=30),
    adapters=[adapter('sql'), adapter('bash', state='stored', hit_rate=None), adapter(MARKUP),
              adapter('torn', state='broken', reason='its file is cut off'),
              adapter('both', parts=dict(sql=.7, bash=.3))],
    rollouts=[dict(name='sql', old='ab12', new='cd34', stage=10, since=1.79e9, requests=31, errors=0)],
    alerts=[dict(name='slow swap', detail='P99 is 14.3 ms', since=1.79e9)], fallbacks=3)

class Stub:
    "What the page asks for, and what a test decides: the status, the error, and when an answer goes on."
    def __init__(self):
        self.status, self.error, self.pieces = copy.deepcopy(STATUS), None, ['Hel', 'lo ', MARKUP]
        self.go, self.gone, self.asked, self.keys, self.headers = threading.Event(), threading.Event(), [], [], {}

    def models(self):
        names = 'smollm2', *(a['name'] for a in self.status['adapters']), 'auto'
        return dict(object='list', data=[dict(id=n, object='model') for n in names])

def handler(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'
        def log_message(self, *a): pass

        def reply(self, content, kind='application/json', status=200, **headers):
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            headers |= {'content-type': kind, 'content-length': len(content), 'content-security-policy': CSP}
            for k,v in headers.items(): self.send_header(k, str(v))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            stub.keys.append(self.headers.get('authorization'))
            if self.path in FILES:
                name, kind = FILES[self.path]
                self.reply((SERVING / name).read_bytes(), f'text/{kind}; charset=utf-8')
            elif self.path == '/v1/lorajax/status': self.reply(stub.status)
            elif self.path == '/v1/models': self.reply(stub.models())
            else: self.reply(dict(error=dict(message='no such path')), status=404)

        def do_POST(self):
            stub.asked.append(json.loads(self.rfile.read(int(self.headers['content-length']))))
            if stub.error: return self.reply(*stub.error[:1], status=stub.error[1], **stub.error[2])
            self.send_response(200)
            for k,v in {'content-type': 'text/event-stream', 'connection': 'close', **stub.headers}.items():
                self.send_header(k, v)
            self.end_headers()
            self.close_connection = True
            try:
                for i,piece in enumerate(stub.pieces):
                    if i == 1: stub.go.wait(20)
                    match piece:
                        case None: return
                        case dict(): self.event(**piece)
                        case _: self.event(model='sql', lorajax=dict(why='the caller names it'),
                                           choices=[dict(index=0, delta=dict(content=piece))])
                    time.sleep(.002)
                self.event(model='sql', choices=[], usage=dict(prompt_tokens=9, completion_tokens=3))
                self.wfile.write(b'data: [DONE]\r\n\r\n')
            except OSError: stub.gone.set()

        def event(self, **body):
            text = json.dumps(body, ensure_ascii=False).encode()
            for part in (b'data: ' + text[:11], text[11:] + b'\r', b'\n\r\n'): # an event needn't come in one piece
                self.wfile.write(part)
                self.wfile.flush()
    return Handler

@pytest.fixture
def stub():
    stub = Stub()
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        def handle_error(self, *a): pass # a browser that has closed its connections
    server = Server(('127.0.0.1', 0), handler(stub))
    stub.url = f'http://127.0.0.1:{server.server_port}/'
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield stub
    stub.go.set()
    server.shutdown()
    server.server_close()

@pytest.fixture(scope='module')
def browser():
    path = shutil.which('chromium')
    if path is None: pytest.skip('there is no chromium here; .ci/browser installs one')
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path)
        yield browser
        browser.close()

@contextlib.contextmanager
def opened(browser, url):
    "The page; at the end its console must hold no error that the test didn't provoke."
    page = browser.new_page()
    page.set_default_timeout(15_000)
    errors = page.errors = []
    page.on('console', lambda m: errors.append(m.text) if m.type in ('error', 'warning') else None)
    page.on('pageerror', lambda e: errors.append(str(e)))
    page.goto(url)
    expect(page.locator('#model option')).not_to_have_count(0)
    yield page
    page.close()
    assert errors == []

@pytest.fixture
def page(browser, stub):
    with opened(browser, stub.url) as page: yield page

def row(page, table, name): return page.locator(f'#{table} tbody tr').filter(has=page.get_by_text(name, exact=True))
def answer(page): return page.locator('#answer')
def facts(page): return page.locator('#facts')

def ask(page, text='Hello?', model='sql'):
    page.get_by_label('Model').select_option(model)
    page.get_by_label('Message').fill(text)
    page.get_by_role('button', name='Send').click()

def test_status_is_shown_and_follows_the_server(page, stub):
    assert 'smollm2, ready, up for 2 min' in page.get_by_role('status').first.inner_text()
    assert row(page, 'adapters', 'sql').inner_text().split() == ['sql', 'ab12cd34', 'resident', '12', '0.5']
    assert 'broken: its file is cut off' in row(page, 'adapters', 'torn').inner_text()
    assert '0.7 × sql + 0.3 × bash' in row(page, 'adapters', 'both').inner_text()
    assert '10 %' in row(page, 'rollouts', 'sql').inner_text()
    assert 'slow swap: P99 is 14.3 ms' in page.locator('#alerts').inner_text()
    assert page.locator('#load').inner_text() == ('2 sequences run, 1 wait. Pages: 100 free, 20 kv, 30 adapter. '
                                                  'Fallbacks to the base: 3.')
    stub.status |= dict(ready=False, adapters=[adapter('new')], rollouts=[], alerts=[])
    expect(row(page, 'adapters', 'new')).to_be_visible()
    expect(page.locator('#server')).to_contain_text('not ready')
    assert page.locator('#alerts').inner_text() == 'none' and 'none' in page.locator('#rollouts').inner_text()
    expect(page.locator('#model option')).to_have_text(['smollm2', 'new', 'auto'])

@pytest.mark.parametrize('key, value, words', [
    ('swap_p99_ms', 10.1, 'Swap, P99'), ('prefix_hit_rate', .29, 'Prefix hit rate'),
    ('route_p99_ms', 3.01, 'Routing, P99')])
def test_only_the_signal_beyond_its_threshold_is_marked(page, stub, key, value, words):
    stub.status['signals'] = dict(swap_p99_ms=10, prefix_hit_rate=.3, route_p99_ms=3, ttft_p50_ms=80, tpot_p50_ms=None)
    expect(page.locator('#signals .bad')).to_have_count(0) # a value on the threshold is fine
    stub.status['signals'] |= {key: value}
    expect(page.locator('#signals .bad')).to_have_count(1)
    expect(row(page, 'signals', words)).to_contain_text('beyond threshold')

def test_an_answer_appears_piece_by_piece_and_its_markup_stays_text(page, stub):
    ask(page, 'Grüße, 世界')
    expect(answer(page)).to_have_text('Hel')
    assert answer(page).get_attribute('aria-busy') == 'true' and page.get_by_role('button', name='Send').is_disabled()
    stub.go.set()
    expect(facts(page)).to_have_text('answered by sql · the caller names it · 9 + 3 tokens')
    assert answer(page).text_content() == 'Hello ' + MARKUP and page.locator('#answer *').count() == 0
    [asked] = stub.asked
    assert asked == dict(model='sql', messages=[dict(role='user', content='Grüße, 世界')], max_tokens=200,
                         stream=True, stream_options=dict(include_usage=True))
    assert page.get_by_role('button', name='Stop').is_disabled()

def test_markup_in_a_name_stays_text(page, stub):
    assert row(page, 'adapters', MARKUP).count() == 1
    assert page.locator('main img, main b').count() == 0 and page.title() == 'lorajax'
    page.get_by_label('Model').select_option(MARKUP)

def test_stop_ends_the_request_and_keeps_what_came(page, stub):
    stub.pieces = ['x '] * 10_000
    stub.go.set()
    ask(page)
    expect(answer(page)).to_contain_text('x x x x')
    page.get_by_role('button', name='Stop').click()
    expect(facts(page)).to_have_text('answered by sql · the caller names it · stopped')
    assert stub.gone.wait(10) and answer(page).text_content().startswith('x x')
    assert page.locator('#error').inner_text() == '' and page.get_by_role('button', name='Send').is_enabled()

def said(page, words, provoked='^$'):
    "The error is shown; the browser notes each refused request in its console too, which is as it should be."
    expect(page.get_by_role('alert')).to_have_text(words)
    page.errors[:] = [e for e in page.errors if not re.search(provoked, e)]

@pytest.mark.parametrize('body, status, headers, words', [
    (dict(error=dict(message="there is no model '<b>x</b>'", type='x', param='model', code='y')), 404, {},
     "there is no model '<b>x</b>'"),
    (dict(error=dict(message='too many wait.')), 429, {'retry-after': 7}, 'too many wait. Try again in 7 s.'),
    (b'<html>Bad gateway', 502, {}, 'The server answered 502 without saying why.')])
def test_an_error_is_said_in_words(page, stub, body, status, headers, words):
    stub.error = (body, status, headers)
    ask(page)
    said(page, words, f'status of {status} ')
    stub.error, stub.pieces = None, ['again']
    ask(page)
    expect(answer(page)).to_have_text('again')
    expect(page.get_by_role('alert')).to_have_text('')

def test_an_answer_that_breaks_off_is_said_and_what_came_stays(page, stub):
    stub.pieces = ['Hel', None]
    stub.go.set()
    ask(page)
    said(page, 'The answer broke off.')
    assert answer(page).text_content() == 'Hel'

def test_an_error_in_the_stream_is_said(page, stub):
    stub.pieces = ['Hel', dict(error=dict(message='it took longer than 600 s'))]
    stub.go.set()
    ask(page)
    said(page, 'it took longer than 600 s')

def test_a_server_that_went_away_is_said(page):
    page.route('**/v1/**', lambda route: route.abort())
    expect(page.locator('#server')).to_have_text("The server can't be reached.")
    ask(page)
    said(page, "The server can't be reached.", 'ERR_FAILED')

def test_a_fallback_is_said(page, stub):
    stub.headers, stub.pieces = {'x-lorajax-fallback': 'its file is cut off'}, ['ok']
    ask(page)
    expect(facts(page)).to_contain_text("the adapter couldn't be served: its file is cut off")

def test_the_key_is_sent_and_stays_with_the_tab(page, stub):
    page.get_by_label('API key').fill('secret-of-the-tab')
    page.get_by_label('API key').blur()
    page.reload()
    expect(page.locator('#model option')).not_to_have_count(0)
    assert stub.keys[-1] == 'Bearer secret-of-the-tab'

def test_a_keyboard_is_enough(page, stub):
    for label in ('Model', 'Most tokens', 'API key', 'Message'): # in this order, from the top
        page.keyboard.press('Tab')
        assert label in page.evaluate('document.activeElement.labels[0].textContent')
    page.keyboard.type('Hello?')
    page.keyboard.press('Control+Enter')
    expect(answer(page)).to_have_text('Hel')
    stub.go.set()
    expect(facts(page)).not_to_be_empty()
    stub.go.clear()
    page.keyboard.press('Tab')
    page.keyboard.press('Enter') # on Send, after which the focus is on Stop
    expect(page.get_by_role('button', name='Stop')).to_be_focused()
    page.keyboard.press('Enter')
    expect(facts(page)).to_contain_text('stopped')
    expect(page.get_by_role('button', name='Send')).to_be_focused()
    assert [a['messages'][0]['content'] for a in stub.asked] == ['Hello?'] * 2

@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_texts_have_contrast(page, scheme):
    "WCAG's ratio of 4.5 for every text, on the background behind it."
    page.emulate_media(color_scheme=scheme)
    low = page.evaluate('''() => {
        const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true })
        const rgb = c => { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1)
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3) }
        const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4
        const light = c => rgb(c).map(v => linear(v / 255))
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0)
        const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor
            if (!/, 0\\)$/.test(c)) return c } return 'white' }
        return [...document.querySelectorAll('h1, h2, p, th, td, caption, label, li, pre, button:enabled, small')]
            .filter(e => e.textContent.trim()).map(e => {
                const [a, b] = [getComputedStyle(e).color, behind(e)].map(light).sort((x, y) => y - x)
                return [e.tagName, e.textContent.slice(0, 30), (a + .05) / (b + .05)] })
            .filter(([, , ratio]) => ratio < 4.5) }''')
    assert low == []

def test_a_narrow_window_needs_no_sideways_scrolling(page):
    page.set_viewport_size(dict(width=320, height=640))
    assert page.evaluate('document.documentElement.scrollWidth') <= 320

def test_the_page_works_on_the_real_server(browser, tmp_path):
    files = served.make_files(tmp_path, ['sql', 'bash'])
    with served.app_in_thread(**files) as (url, app), opened(browser, url) as page:
        assert httpx.get(url).headers['content-security-policy'] == CSP
        expect(page.locator('#server')).to_contain_text('tiny, ready')
        expect(row(page, 'adapters', 'sql')).to_contain_text(app.state.service.fleet.current.names['sql'][:12])
        assert {o.inner_text() for o in page.locator('#model option').all()} == {'tiny', 'bash', 'sql'}
        page.get_by_label('Most tokens').fill('20')
        ask(page, 'hello')
        expect(facts(page)).to_contain_text('answered by sql')
        expect(facts(page)).to_contain_text('tokens')
        assert answer(page).text_content()
        expect(row(page, 'adapters', 'sql')).to_contain_text('resident')
        page.get_by_label('Most tokens').fill('999')
        ask(page, 'hello')
        said(page, re.compile('the context has 256'), 'status of 400 ')
