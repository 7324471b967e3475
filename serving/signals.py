"""What is measured, for Prometheus, for alerts, and for the page: the field's golden signals and what explains them."""
from __future__ import annotations
import json, logging, urllib.request
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

log = logging.getLogger('lorajax.serving')

SWAP_P99, HIT_RATE, ROUTE_P99 = .010, .3, .003 # the golden signals' thresholds: seconds, share, seconds
FAST = (.0001, .0002, .0005, .001, .002, .003, .005, .01, .02, .05, .1, .5, 1)
TOKEN = (.002, .005, .01, .02, .03, .05, .075, .1, .2, .5, 1)
ANSWER = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 60, 120, 300)

def percentile(values:Iterable[float], q:float) -> float|None:
    values = sorted(values)
    return values[min(int(q * len(values)), len(values) - 1)] if values else None

class Signals:
    "The metrics of one server."
    def __init__(self):
        self.registry = r = CollectorRegistry()
        def make(kind, name, text, *labels, **kw): return kind(f'lorajax_{name}', text, labels, registry=r, **kw)
        self.requests = make(Counter, 'requests', 'Requests that ended', 'model', 'status')
        self.seconds = make(Histogram, 'request_seconds', 'From arrival to the last token', 'model', buckets=ANSWER)
        self.first = make(Histogram, 'time_to_first_token_seconds', 'From arrival to the first token', 'model', buckets=ANSWER)
        self.token = make(Histogram, 'time_per_output_token_seconds', 'Mean after the first one', 'model', buckets=TOKEN)
        self.route = make(Histogram, 'route_seconds', 'The choice of an adapter', 'layer', buckets=FAST)
        self.swap = make(Histogram, 'swap_seconds', 'A copy of an adapter to the device', buckets=FAST)
        self.prompt_tokens = make(Counter, 'prompt_tokens', 'Tokens of prompts', 'model')
        self.generated_tokens = make(Counter, 'generated_tokens', 'Tokens generated', 'model')
        self.cached_tokens = make(Counter, 'cached_prompt_tokens', 'Tokens of prompts found in the prefix cache', 'model')
        self.hit_rate = make(Gauge, 'prefix_hit_rate', "Share of prompt tokens in the prefix cache; 'all' for the total", 'model')
        self.pages = make(Gauge, 'pages', 'Pages of the arena', 'tenant')
        self.adapters = make(Gauge, 'adapters', 'Adapters', 'state')
        self.sequences = make(Gauge, 'sequences', 'Sequences', 'state')
        self.longest_wait = make(Gauge, 'longest_wait_seconds', 'Of the requests that have no token yet')
        self.fallbacks = make(Counter, 'fallbacks', 'Answers of the base in place of an adapter', 'model')
        self.recompilations = make(Counter, 'recompilations', 'XLA compilations after the server was ready')
        self.preemptions = make(Counter, 'preemptions', 'Sequences that lost their pages')
        self.swaps = make(Counter, 'swaps', 'Copies of adapters to the device')
        self.rejected = make(Counter, 'rejected', 'Requests that were turned away', 'reason')
        self.rollout = make(Gauge, 'rollout_percent', 'Share of users on the new version', 'model')
        self.alert = make(Gauge, 'alert', '1 while the alert is raised', 'alert')
        self.cache_hits = make(Counter, 'semantic_cache_hits', 'Answers kept from an earlier prompt', 'model')
        # As vLLM names them, for gateways that send requests to where their adapter is.
        self.lora = Gauge('vllm:lora_requests_info', 'Adapters of running and waiting requests; the value is the time',
                          ('max_lora', 'running_lora_adapters', 'waiting_lora_adapters'), registry=r)
        self.running = Gauge('vllm:num_requests_running', 'Requests that have tokens', ('model_name',), registry=r)
        self.waiting = Gauge('vllm:num_requests_waiting', 'Requests that have none yet', ('model_name',), registry=r)
        self.kv_usage = Gauge('vllm:kv_cache_usage_perc', 'Share of pages in use', ('model_name',), registry=r)
        self.recent = {k: deque(maxlen=1000) for k in ('swap', 'route', 'first', 'token')} # seconds, for P50 and P99

    def saw(self, what:str, seconds:float, label:str|None=None):
        "One measurement of 'swap', 'route', 'first' or 'token'."
        self.recent[what].append(seconds)
        metric = getattr(self, what)
        (metric if label is None else metric.labels(label)).observe(seconds)

    def milliseconds(self, what:str, q:float) -> float|None:
        value = percentile(self.recent[what], q)
        return None if value is None else round(1000 * value, 3)

@dataclass(frozen=True)
class Alert:
    "Something that an operator should look at."
    name: str
    detail: str
    since: float # seconds since 1970

class Alerts:
    "Raised while their cause lasts; each is logged, and told to a webhook, when it is raised and when it ends."
    def __init__(self, signals:Signals, webhook:str=''):
        self.signals, self.webhook, self.raised = signals, webhook, {}
        self.teller = ThreadPoolExecutor(1, 'alerts') if webhook else None

    def watch(self, found:dict[str, str|None], now:float): # name -> what is wrong, None if nothing is
        for name, detail in found.items():
            before = self.raised.get(name)
            if detail and not before: self._tell('raised', Alert(name, detail, now))
            if detail: self.raised[name] = Alert(name, detail, before.since if before else now)
            elif before: self._tell('ended', self.raised.pop(name))
            self.signals.alert.labels(name).set(bool(detail))

    def _tell(self, what, alert):
        log.warning('alert %s: %s (%s)', what, alert.name, alert.detail, extra=dict(alert=alert.name, state=what))
        if self.teller: self.teller.submit(self._post, dict(state=what, alert=alert.name, detail=alert.detail, since=alert.since))

    def _post(self, body):
        request = urllib.request.Request(self.webhook, json.dumps(body).encode(), {'content-type': 'application/json'})
        try: urllib.request.urlopen(request, timeout=5).close()
        except OSError as e: log.warning('the webhook cannot be told of an alert: %s', e)

    def close(self):
        if self.teller: self.teller.shutdown(cancel_futures=True)

def golden(signals:Signals, hits:tuple[int, int]) -> dict[str, str|None]: # (tokens found, tokens looked up) lately
    "The three golden signals, judged when there is enough to judge by."
    def over(what, limit):
        value = percentile(signals.recent[what], .99)
        if value is None or len(signals.recent[what]) < 20 or value <= limit: return None
        return f'P99 is {1000 * value:.1f} ms, and the limit is {1000 * limit:.0f} ms'
    found, asked = hits
    low = asked >= 10_000 and found / asked < HIT_RATE
    return {'slow swap': over('swap', SWAP_P99), 'slow route': over('route', ROUTE_P99),
            'low prefix hit rate': f'{found / asked:.2f}, and the limit is {HIT_RATE}' if low else None}
