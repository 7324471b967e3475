"""A server as an operator starts it, real clients, a real Redis, and a soak: processes that no notebook has."""
import os, random, re, shutil, signal, threading, time
from collections import Counter
from pathlib import Path
import httpx, openai, psutil, pytest
from redis_server import RedisServer
import served
from served import complete

os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True' # or it asks the network for prices

NAMES = [f'a{i:02}' for i in range(24)]
PROMPTS = ['hello', 'what now', 'abc']

@pytest.fixture(scope='module')
def files(tmp_path_factory): return served.make_files(tmp_path_factory.mktemp('soak'), NAMES)

@pytest.fixture(scope='module')
def said(files): return served.expected(files, NAMES, PROMPTS)

def test_openai_litellm_and_langchain_talk_to_a_real_server(tmp_path_factory):
    "SmolLM2 with the example adapters and the router, a Redis, changes at run time; nothing compiles once it is ready."
    import litellm
    from langchain_openai import ChatOpenAI
    folder = tmp_path_factory.mktemp('real')
    root = Path(__file__).parents[1] / 'examples'
    sizes = dict(rows=4, slots=4, max_len=512, max_rank=16, memory=64 << 20, router=str(root / 'router'), adapters=str(root / 'adapters'))
    with RedisServer(folder) as redis, served.ServerProcess(folder / 'log', model='smollm2', state=folder / 'state', redis=redis.url, **sizes) as server:
        client = openai.OpenAI(base_url=f'{server.url}/v1', api_key='none', max_retries=0)
        talk = [dict(role='user', content='What are the upper-level classes that offer 8 credits ?')]
        chat = lambda model, **more: client.chat.completions.create(model=model, messages=talk, max_tokens=24, temperature=0, **more)
        assert {m.id for m in client.models.list()} == {'smollm2', 'auto', 'bard', 'bash', 'chinese', 'maths', 'slots', 'sql'}
        sql, base = chat('sql'), chat('smollm2')
        assert 'SELECT' in sql.choices[0].message.content and sql.choices[0].message.content != base.choices[0].message.content
        routed = chat('auto')
        assert routed.model == 'sql' and routed.choices[0].message.content == sql.choices[0].message.content
        assert routed.model_extra['lorajax']['layer'] == 'classifier'
        streamed = ''.join(e.choices[0].delta.content or '' for e in chat('sql', stream=True))
        assert streamed == sql.choices[0].message.content
        post = lambda path, **body: httpx.post(f'{server.url}/v1/{path}', json=body, timeout=60)
        assert post('load_lora_adapter', lora_name='second', lora_path='sql').status_code == 200
        assert chat('second').choices[0].message.content == sql.choices[0].message.content
        assert post('lorajax/compositions', name='half', weights=dict(sql=.5, bard=.5)).status_code == 200 and chat('half').model == 'half'
        assert post('unload_lora_adapter', lora_name='second').status_code == 200
        with pytest.raises(openai.NotFoundError, match='no model'): chat('second')
        lite = litellm.completion(model='openai/sql', messages=talk, max_tokens=24, temperature=0, api_base=f'{server.url}/v1', api_key='none')
        assert lite.choices[0].message.content == sql.choices[0].message.content
        lang = ChatOpenAI(model='sql', base_url=f'{server.url}/v1', api_key='none', max_tokens=24, temperature=0)
        assert lang.invoke(talk[0]['content']).content == sql.choices[0].message.content
        page = httpx.get(server.url)
        assert page.status_code == 200 and "default-src 'none'" in page.headers['content-security-policy']
        assert re.search(r'^lorajax_recompilations_total 0\.0$', httpx.get(f'{server.url}/metrics').text, re.M)
        assert server.stop() in (0, -signal.SIGTERM)
        log = server.log.read_text()
        assert 'upper-level' not in log and 'SELECT' not in log, 'prompts and answers stay out of the log'

def test_soak(files, said, tmp_path_factory, request):
    "Streams over 24 adapters while adapters come, move and go, clients leave, Redis and the server are killed."
    folder, long = tmp_path_factory.mktemp('soaked'), request.config.getoption('--slow')
    clients, seconds = (200, 300) if long else (200, 45)
    root = Path(files['adapters'])
    (root / 'corrupt').mkdir(exist_ok=True)
    for f in ('adapter_config.json', 'adapter_model.safetensors'): shutil.copy(root / 'a00' / f, root / 'corrupt')
    (root / 'corrupt/adapter_model.safetensors').write_bytes(b'\0' * 500)
    redis = RedisServer(folder).start()
    server = served.ServerProcess(folder / 'log', **files, redis=redis.url, queue=400, webhook='').start()
    stop, killed, seen, wrong, lock = threading.Event(), threading.Event(), Counter(), [], threading.Lock()
    moving = {'moving': {'a01', 'a02'}} # a name that two adapters take in turns
    def work(seed):
        mine = random.Random(seed)
        while not stop.is_set():
            name, prompt = mine.choice([*NAMES, 'tiny', 'moving']), mine.choice(PROMPTS)
            cut = mine.choice([None, None, None, 2])
            was_killed = killed.is_set()
            text = complete(server.url, name, prompt, mine.random() < .8, cut=cut)
            right = {said[n, prompt] for n in moving.get(name, {name})}
            with lock:
                kind = 'right' if text in right else text if text in ('cut', 'away', 'broken', 429) or isinstance(text, int) else 'wrong'
                seen[kind] += 1
                unsure = was_killed or killed.is_set()
                if kind == 'wrong' or (kind == 404 and name != 'moving') or (isinstance(kind, int) and kind >= 500 and not unsure) or (kind in ('away', 'broken') and not unsure):
                    wrong.append((kind, name, prompt, text))
    post = lambda path, **body: httpx.post(f'{server.url}/v1/{path}', json=body, timeout=30)
    def change(step):
        assert post('load_lora_adapter', lora_name='moving', lora_path=['a01', 'a02'][step % 2]).status_code == 200
        assert post('load_lora_adapter', lora_name=f'extra{step % 3}', lora_path='a05', dtype='int8').status_code == 200
        assert post('load_lora_adapter', lora_name='corrupt', lora_path='corrupt').status_code == 400
        if step % 4 == 3: assert post('unload_lora_adapter', lora_name=f'extra{step % 3}').status_code == 200
    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    try:
        change(0)
        for t in threads: t.start()
        start, step = time.monotonic(), 1
        events = [(.3, redis.kill), (.45, redis.start)]
        while (done := (time.monotonic() - start) / seconds) < .7:
            while events and done > events[0][0]: events.pop(0)[1]()
            change(step)
            step += 1
            time.sleep(.2)
        before = {m['id']: m['version'] for m in httpx.get(f'{server.url}/v1/models').json()['data']}
        killed.set()
        server.kill()
        time.sleep(1)
        server.start()
        assert {m['id']: m['version'] for m in httpx.get(f'{server.url}/v1/models', timeout=30).json()['data']} == before, 'names outlive a kill'
        time.sleep(2)
        killed.clear()
        memory = psutil.Process(server.process.pid).memory_info().rss
        again = time.monotonic()
        while time.monotonic() - again < seconds / 2:
            change(step)
            step += 1
            time.sleep(.2)
    except BaseException:
        server.kill()
        raise
    finally:
        stop.set()
        for t in threads: t.join(60)
    print(dict(seen), 'changes', step)
    assert not wrong, wrong[:5]
    assert seen['right'] > clients and seen['cut'] > 20 and step > 8
    end = time.monotonic() + 10
    while (pages := httpx.get(f'{server.url}/v1/lorajax/status').json())['sequences'] != dict(running=0, waiting=0):
        assert time.monotonic() < end, pages
        time.sleep(.1)
    time.sleep(1.1)
    status = httpx.get(f'{server.url}/v1/lorajax/status').json()
    assert status['ready'] and not [a for a in status['adapters'] if a['state'] == 'broken'], status
    for prompt in PROMPTS: assert complete(server.url, 'a07', prompt, False) == said['a07', prompt]
    grown = psutil.Process(server.process.pid).memory_info().rss - memory
    assert grown < 200 << 20, grown
    versions = {a['version'] for a in status['adapters']}
    images = {p.stem for p in Path(files['state']).glob('images-*/[!.]*.safetensors')}
    assert versions <= images and len(images) <= len(versions) + 4, 'besides those that a name can go back to, nothing is left'
    audit = httpx.get(f'{server.url}/v1/lorajax/audit', params=dict(limit=10_000)).json()
    assert sum(a['action'] == 'note' and a['name'] == 'corrupt' for a in audit) == step + 2 # at each start as well
    assert server.stop() in (0, -signal.SIGTERM)
    redis.kill()

ASKING = {'/v1/completions': dict(prompt='hello'), '/v1/chat/completions': dict(messages=[dict(role='user', content='hello')])}

def test_the_schema_and_the_server_agree(files, tmp_path_factory):
    "schemathesis against the app's own OpenAPI: no 5xx, no status that isn't documented."
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    folder, counts = tmp_path_factory.mktemp('schema'), Counter()
    with served.ServerProcess(folder / 'log', **files | dict(state=folder / 'state')) as server:
        schema = schemathesis.openapi.from_url(f'{server.url}/schema/openapi.json')
        operations = [o.ok() for o in schema.get_all_operations() if o.ok().path != '/v1/lorajax/drain']
        for operation in operations:
            @settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def send(case):
                if operation.path in ASKING and isinstance(case.body, dict) and (turn := counts.total() % 4):
                    extra = list(case.body.items())[:1] if turn == 1 else [] # one field as it was drawn, or all would be refused
                    case.body = ASKING[operation.path] | dict(extra) | dict(model=[*NAMES[:2], 'tiny'][turn - 1], max_tokens=3)
                response = case.call(base_url=server.url)
                counts[operation.label, response.status_code] += 1
                assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())
                documented = operation.definition.raw['responses']
                assert str(response.status_code) in documented, (operation.label, response.status_code, response.text)
            send()
        print(dict(counts))
    assert counts.total() >= 2000 and sum(n for (label, status), n in counts.items() if status == 200 and 'completions' in label) > 100
