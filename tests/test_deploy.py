"Not notebook cells: what an operator deploys with, each file read as its tool reads it and held against the server."
import dataclasses, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / 'serving/deploy'
signals, settings = (pytest.importorskip(f'serving.{name}') for name in ('signals', 'settings'))

def read(name): return yaml.safe_load((DEPLOY / name).read_text('utf-8'))

RULES = [r for g in read('alerts.yaml')['groups'] for r in g['rules']]
DASHBOARD = json.loads((DEPLOY / 'dashboard.json').read_text('utf-8'))
PANELS, VARIABLES = DASHBOARD['panels'], [v['name'] for v in DASHBOARD['templating']['list']]
QUERIES = [(p['title'], t['expr']) for p in PANELS for t in p['targets']]
COMPOSE = read('compose.yaml')

def samples(): # name of a sample -> labels it may have
    "What a server can say of itself, with the names that Prometheus stores."
    found = {}
    for metric in vars(signals.Signals()).values():
        if not hasattr(metric, 'describe'): continue
        [described], labels = metric.describe(), {*metric._labelnames}
        for end in dict(counter=['_total'], histogram=['_bucket', '_sum', '_count']).get(described.type, ['']):
            found[described.name + end] = labels | ({'le'} if end == '_bucket' else set())
    return found

SAMPLES, COMMON = samples(), {'instance', 'job'}

@pytest.mark.parametrize('where, query', [(r['alert'], r['expr']) for r in RULES] + QUERIES)
def test_queries_ask_for_what_the_server_measures(where, query):
    names = re.findall(r'(?:lorajax_|vllm:)\w+', query)
    assert set(names) <= set(SAMPLES) and (names or 'up{job="lorajax"}' in query)
    for name, matchers in re.findall(r'((?:lorajax_|vllm:)\w+)\{([^}]*)\}', query):
        assert set(re.findall(r'(\w+)=', matchers)) <= SAMPLES[name] | COMMON
    kept = {l for g in re.findall(r'by \(([^)]*)\)', query) for l in g.split(', ')}
    assert kept <= set().union(COMMON, *(SAMPLES[n] for n in names))

def test_the_queries_are_held_against_real_names():
    assert {'lorajax_swap_seconds_bucket', 'lorajax_fallbacks_total', 'lorajax_longest_wait_seconds'} <= set(SAMPLES)
    assert SAMPLES['lorajax_requests_total'] == {'model', 'status'}

def test_rules_are_complete():
    assert len({r['alert'] for r in RULES}) == len(RULES) >= 8
    for r in RULES:
        assert r['for'] and r['labels']['severity'] in ('warning', 'critical')
        assert r['annotations']['summary'] and r['annotations']['description']

def test_golden_signals_have_the_thresholds_of_the_server():
    limits = dict(SlowSwap=signals.SWAP_P99, LowPrefixHitRate=signals.HIT_RATE, SlowRouting=signals.ROUTE_P99)
    assert limits == dict(SlowSwap=.010, LowPrefixHitRate=.3, SlowRouting=.003)
    rules = {r['alert']: r['expr'] for r in RULES}
    titles = dict(SlowSwap='Swap, P99', LowPrefixHitRate='Prefix hit rate', SlowRouting='Routing, P99')
    for name, limit in limits.items():
        assert float(re.search(r'[<>] (0\.\d+)', rules[name])[1]) == limit
        [panel] = [p for p in PANELS if p['title'] == titles[name]]
        assert panel['fieldConfig']['defaults']['thresholds']['steps'][1]['value'] == limit

def test_the_dashboard_is_whole():
    assert len(PANELS) >= 12 and len({p['id'] for p in PANELS}) == len({p['title'] for p in PANELS}) == len(PANELS)
    taken = set()
    for p in PANELS:
        at = p['gridPos']
        cells = {(x, y) for x in range(at['x'], at['x'] + at['w']) for y in range(at['y'], at['y'] + at['h'])}
        assert not cells & taken and at['x'] + at['w'] <= 24
        taken |= cells
        assert len({t['refId'] for t in p['targets']}) == len(p['targets'])
        for t in [p, *p['targets']]: assert t['datasource'] == dict(type='prometheus', uid='${datasource}')
    used = set(re.findall(r'\$\{?(\w+)', json.dumps(DASHBOARD))) - {'__rate_interval', 'labels'}
    assert used == set(VARIABLES)

def test_compose_names_files_that_exist():
    for service in COMPOSE['services'].values():
        for v in service.get('volumes', []):
            source = v.split(':')[0]
            assert (DEPLOY / source).is_file() if source.startswith('.') else source in COMPOSE['volumes'], v
        assert 'image' in service or (DEPLOY / service['build']['context'] / service['build']['dockerfile']).is_file()

def test_compose_is_closed_and_pinned():
    for name, service in COMPOSE['services'].items():
        assert all(p.startswith('127.0.0.1:') for p in service.get('ports', [])), 'open to the network'
        assert 'no-new-privileges:true' in service['security_opt']
        if 'image' in service: assert re.search(r':v?\d+\.\d+', service['image']), f'{name} has no version'
        assert set(service.get('depends_on', [])) <= set(COMPOSE['services'])

def test_the_servers_settings_are_real():
    given = COMPOSE['services']['lorajax']['environment']
    assert given['LORAJAX_ADMIN_KEY'].startswith('${LORAJAX_ADMIN_KEY:?') # compose stops where it is empty
    made = settings.from_environment(given | container_environment())
    assert made.redis == 'redis://redis:6379' and made.state == '/var/lib/lorajax'

def test_prometheus_finds_the_server_and_the_rules():
    config = read('prometheus.yaml')
    mounted = [v.split(':')[1] for v in COMPOSE['services']['prometheus']['volumes']]
    assert [f'/etc/prometheus/{f}' for f in config['rule_files']] == [m for m in mounted if 'alerts' in m]
    [job] = config['scrape_configs']
    [found] = job['dns_sd_configs']
    assert job['job_name'] == 'lorajax' and found['names'] == ['lorajax'] and found['port'] == 8000

def test_grafana_is_given_its_source_and_its_dashboard():
    [source] = read('grafana-datasources.yaml')['datasources']
    assert source['url'] == 'http://prometheus:9090' and source['type'] == 'prometheus'
    [provider] = read('grafana-dashboards.yaml')['providers']
    places = [v.split(':')[1] for v in COMPOSE['services']['grafana']['volumes']]
    assert f"{provider['options']['path']}/dashboard.json" in places

def test_the_readme_has_every_setting():
    text = (ROOT / 'serving/README.md').read_text('utf-8')
    names = [f'LORAJAX_{f.name.upper()}' for f in dataclasses.fields(settings.Settings)]
    assert re.findall(r'^\| `(LORAJAX_\w+)` \|', text, re.M) == names

# ---- Kubernetes

KUBE = list(yaml.safe_load_all((DEPLOY / 'kuberay.yaml').read_text('utf-8')))
RAY = KUBE[0]['spec']
GROUPS = [RAY['rayClusterConfig']['headGroupSpec'], *RAY['rayClusterConfig']['workerGroupSpecs']]
PODS = [g['template'] for g in GROUPS]

def test_ray_serve_reads_its_part_and_finds_the_app():
    schema = pytest.importorskip('ray.serve.schema')
    replicas = pytest.importorskip('serving.ray')
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY['serveConfigV2']))
    [app] = config.applications
    assert app.import_path == 'serving.ray:app' and app.name == replicas.APP
    assert {d.name for d in app.deployments} == {replicas.INGRESS, replicas.ENGINE}
    assert KUBE[0]['apiVersion'] == 'ray.io/v1' and set(RAY) == {'serveConfigV2', 'rayClusterConfig'}

def test_the_cluster_has_the_ray_that_was_tested_and_gpus_for_its_engines():
    pin = re.search(r'^ray==(.*)$', (ROOT / 'constraints.txt').read_text(), re.M)[1]
    cluster = RAY['rayClusterConfig']
    [workers] = cluster['workerGroupSpecs']
    [engine] = [d for d in yaml.safe_load(RAY['serveConfigV2'])['applications'][0]['deployments'] if d['name'] == 'Engine']
    [container] = workers['template']['spec']['containers']
    assert cluster['rayVersion'] == pin
    assert int(container['resources']['limits']['nvidia.com/gpu']) == engine['ray_actor_options']['num_gpus']
    assert workers['maxReplicas'] == engine['autoscaling_config']['max_replicas']

def test_pods_are_given_real_settings_and_no_secret():
    for pod in PODS:
        [container] = pod['spec']['containers']
        values = {e['name']: e.get('value') for e in container['env']}
        assert values.pop('LORAJAX_ADMIN_KEY') is None and values['RAY_USAGE_STATS_ENABLED'] == '0'
        ours = {k: v for k,v in values.items() if k.startswith('LORAJAX_')}
        made = settings.from_environment(ours | container_environment())
        assert made.state in [m['mountPath'] for m in container['volumeMounts']]
        [redis] = [d for d in KUBE if d['kind'] == 'Service']
        assert made.redis == f"redis://{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}"

def test_kubernetes_schemas_accept_everything():
    validate = pytest.importorskip('kubernetes_validate').validate
    pods = [dict(apiVersion='v1', kind='Pod', metadata=dict(name='ray'), spec=p['spec']) for p in PODS]
    for document in KUBE[1:] + pods: validate(document, '1.33', strict=True)
    with pytest.raises(Exception): validate(pods[0] | dict(spec=pods[0]['spec'] | dict(container=[])), '1.33', strict=True)

# ---- the container

def instructions():
    "Of the Containerfile, with continued lines put together: (instruction, what follows)."
    text = re.sub(r'\\\n', ' ', (DEPLOY / 'Containerfile').read_text('utf-8'))
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith('#')]

def container_environment():
    words = [w.partition('=') for i,rest in instructions() if i == 'ENV' for w in rest.split()]
    return {k: v for k,_,v in words if k.startswith('LORAJAX_')}

def test_the_container_copies_what_exists_and_nothing_else_is_sent():
    lines = (DEPLOY / 'Containerfile.dockerignore').read_text().split()
    sent = {line[1:] for line in lines if line.startswith('!')}
    for i,rest in instructions():
        if i != 'COPY': continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists() and source.split('/')[0] in sent
    assert lines[0] == '*'

def test_the_container_is_not_root_and_stops_as_the_server_does():
    found = dict(instructions())
    assert found['FROM'].startswith('docker.io/library/python:3.13') and found['USER'] == '10001'
    assert found['STOPSIGNAL'] == 'SIGTERM' and '/health' in found['HEALTHCHECK']
    command = json.loads(found['CMD'])
    assert command[:2] == ['lorajax', 'serve']
    order = [i for i,_ in instructions()]
    assert order.index('USER') > max(n for n,i in enumerate(order) if i in ('RUN', 'COPY'))

def test_extras_of_the_container_are_those_of_the_package():
    import tomllib
    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    text = (DEPLOY / 'Containerfile').read_text()
    named = re.findall(r'EXTRAS=([\w,]+)', text + (DEPLOY / 'compose.yaml').read_text())
    assert {'cuda13'} <= {e for words in named for e in words.split(',')} <= set(extras)

# ---- the tools themselves, where they are installed

PATH = f'{Path(sys.executable).parent}:{os.environ["PATH"]}' # the environment's own tools too

def needs_tool(name): return pytest.mark.skipif(not shutil.which(name, path=PATH), reason=f'there is no {name} here')

def accepted(name, *arguments):
    done = subprocess.run([shutil.which(name, path=PATH), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

@needs_tool('promtool')
def test_promtool_accepts_rules_and_queries(tmp_path):
    accepted('promtool', 'check', 'rules', DEPLOY / 'alerts.yaml')
    def plain(q): return q.replace('$__rate_interval', '1m').replace('$instance', '.*')
    rules = [dict(record=f'panel:{i}', expr=plain(q)) for i,(_, q) in enumerate(QUERIES)]
    (tmp_path / 'queries.yaml').write_text(yaml.safe_dump(dict(groups=[dict(name='dashboard', rules=rules)])))
    accepted('promtool', 'check', 'rules', tmp_path / 'queries.yaml')

@needs_tool('promtool')
def test_alerts_are_raised_when_they_should_be(tmp_path):
    "Prometheus plays 30 minutes: swaps of 5 to 10 ms, then of up to 20 ms; one fallback in the 10th minute."
    def buckets(fast, slow): return [
        dict(series=f'lorajax_swap_seconds_bucket{{instance="a",le="{le}"}}', values=v)
        for le,v in {'0.01': fast, '0.02': slow, '+Inf': slow}.items()]
    series = [*buckets('0+60x14 840+30x16', '0+60x30'),
              dict(series='lorajax_fallbacks_total{instance="a",model="sql"}', values='_x9 1x21')]
    said = {r['alert']: r['annotations'] for r in RULES}
    summary = dict(SlowSwap='Swaps of adapters on a take 19.8ms at P99', Fallback='The base answers for sql on a')
    def at(minute, name, **labels): # labels where it should be raised
        text = said[name]['description'].replace('{{ $labels.reason }}', 'load')
        told = dict(summary=summary[name], description=text)
        labels |= dict(instance='a', severity='warning')
        found = [dict(exp_labels=labels, exp_annotations=told)] if len(labels) > 2 else []
        return dict(eval_time=f'{minute}m', alertname=name, exp_alerts=found)
    cases = [at(14, 'SlowSwap'), at(28, 'SlowSwap', alertname='SlowSwap'), at(8, 'Fallback'), at(20, 'Fallback'),
             at(11, 'Fallback', model='sql')]
    test = dict(interval='1m', input_series=series, alert_rule_test=cases)
    (tmp_path / 'test.yaml').write_text(yaml.safe_dump(dict(rule_files=[str(DEPLOY / 'alerts.yaml')], tests=[test])))
    accepted('promtool', 'test', 'rules', tmp_path / 'test.yaml')

@needs_tool('hadolint')
def test_hadolint_accepts_the_containerfile():
    accepted('hadolint', DEPLOY / 'Containerfile')
