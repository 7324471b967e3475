"""From a request's `model` to its answer: who answers, what happens when nobody can, and what is measured on the way."""
from __future__ import annotations
import asyncio, logging, re, time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from lorajax.base import Base
from lorajax.core import Refused, Sampling, quoted
from lorajax.engine import Engine, Event, Stats, Stream
from lorajax.registry import Outcome, Rollout
from lorajax.router import RouteRequest
from lorajax.shared_state import SharedRouter
from .errors import ApiError
from .fleet import AUTO, Fleet
from .guards import Key
from .settings import Settings
from .signals import Alerts, Signals, percentile

log = logging.getLogger('lorajax.serving')
RECENT = 10_000 # answers that can still be rated

@dataclass(frozen=True)
class Chosen:
    "Who answers a request."
    name: str # what the answer's `model` says
    version: str | None = None # None is the base
    layer: str | None = None # of the router
    why: str | None = None # the router's reason
    fallback: str | None = None # why the base answers in place of `asked`
    asked: str = '' # the adapter that was meant

@dataclass(frozen=True)
class Ask:
    "What the engine is asked."
    prompt: object # text, token ids or chat messages
    sampling: Sampling
    id: str # of the answer
    key: str = '' # name of the key that asks
    timeout: float | None = None # seconds
    priority: int = 0
    stream: bool = False # whether its tokens are wanted as they come

@dataclass(eq=False)
class Live:
    "A request that is being answered."
    chosen: Chosen
    n: int # answers
    since: float = field(default_factory=time.monotonic)
    first: float | None = None # when its first token came

@dataclass
class Arm:
    "What was seen of one version since its rollout's stage began."
    requests: int = 0
    errors: int = 0
    seconds: list[float] = field(default_factory=list) # per token
    scores: list[float] = field(default_factory=list) # from users, one for each answer at most

    def outcome(self) -> Outcome:
        quality = sum(self.scores) / len(self.scores) if self.scores else None
        p50, p99 = (percentile(self.seconds, q) for q in (.5, .99))
        return Outcome(self.requests, self.errors, p50, p99, quality, len(self.scores))

SOON = {'retry-after': '1'}

def public(why:str) -> str: return re.sub(r'/\S+', 'a file', why) # a reason without the server's paths

async def owned(submitting) -> Stream:
    "A stream from another thread; if nobody waits for it any more, it is cancelled as soon as it is there."
    task = asyncio.ensure_future(submitting)
    def drop(task):
        if not task.exception(): task.result().cancel()
    try: return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(drop)
        raise

def submitted(engine:Engine, ask:Ask, version:str|None, limit:float) -> Awaitable[Stream]: # limit: seconds
    "A request at an engine. Encoding its prompt may take a while."
    return owned(asyncio.to_thread(engine.submit, ask.prompt, version, ask.sampling, ask.priority, limit, ask.id))

def failed(event:Event) -> ApiError|None:
    "The error that an answer ended with, if it did."
    if event.finish == 'deadline': return ApiError(408, 'the request was not answered in its time', 'deadline_exceeded')
    if event.finish == 'cancelled': return ApiError(503, 'the server is stopping; ask another', 'draining', headers=SOON)
    if event.finish == 'error': return ApiError(503, f'the answer broke off: {event.error}', 'generation_failed')

class Measured:
    "The events of an answer, measured. Whoever has it closes it, at the end or to cancel what is left."
    def __init__(self, service:Service, live:Live, stream:Stream, first:Event, events:AsyncIterator[Event]):
        self.service, self.live, self.stream, self.first, self.events = service, live, stream, first, events
        self.tokens, self.finish, self.closed = 0, None, False
        live.first, self.last = service.began(stream), time.monotonic()
        service.signals.saw('first', live.first - live.since, live.chosen.name)

    @property
    def chosen(self) -> Chosen: return self.live.chosen

    def __aiter__(self): return self

    async def __anext__(self) -> Event:
        if self.first is None:
            self.first = await anext(self.events)
            self.last = time.monotonic()
        event, self.first = self.first, None
        self.tokens, self.finish = self.tokens + (event.scored is not None), event.finish or self.finish
        return event

    def close(self):
        if self.closed: return
        self.closed = True
        self.stream.cancel() # without effect on what has ended
        self.service.count(self.live, self.stream, self.tokens, self.finish, self.last)

class Service:
    "An engine, its fleet, a router, and what is known of the requests that run."
    def __init__(self, settings:Settings, base:Base, engine:Engine, fleet:Fleet, router:SharedRouter|None, signals:Signals):
        self.settings, self.base, self.engine, self.router, self.signals = settings, base, engine, router, signals
        self.fleet, self.alerts = fleet, Alerts(signals, settings.webhook)
        self.stats: Stats = engine.stats() # of the last second
        self.live: set[Live] = set()
        self.arms: dict[tuple[Rollout, str], Arm] = defaultdict(Arm) # (a rollout in its stage, version)
        self.answered: dict[str, tuple[str, Chosen]] = {} # id of an answer -> whose key asked, who gave it
        self.counted, self.fallbacks = Counter(), 0
        self.lookups: deque[tuple[int, int]] = deque(maxlen=300) # one a second: tokens found in the prefix cache, asked for
        self.draining, self.created = False, int(time.time())

    @property
    def ready(self) -> bool: return not self.draining and not self.engine.failed

    @property
    def max_len(self) -> int: return min(self.engine.config.max_len, self.base.config.max_len) # positions of a sequence

    # What a service whose engines are elsewhere does in another way: see ray.py.

    def submit(self, ask:Ask, version:str|None, limit:float) -> Awaitable[Stream]: # limit: seconds
        return submitted(self.engine, ask, version, limit)
    def began(self, stream:Stream) -> float: # by the monotonic clock
        "When the first token came of a stream that gives it now."
        return time.monotonic()

    async def measured(self) -> tuple[Stats, list[float]]: # and the seconds of each swap since the last time
        return await asyncio.to_thread(self.engine.stats), self.engine.residents.swap_seconds()

    def names(self, key:Key) -> list[str]: return [n for n in self.fleet.current.names if key.may_use(n)]

    def check_known(self, model:str, key:Key):
        if model not in (self.base.name, *self.names(key)): raise self.unknown(model, key)

    def choose(self, model:str, key:Key, user:str) -> Chosen:
        "The version that a name means for this user now."
        if model == self.base.name: return Chosen(model)
        self.check_known(model, key)
        version = self.fleet.current.version(model, user)
        why = self.fleet.broken.get(version) or (None if version in self.fleet.loaded else 'it is still being loaded')
        return self.fall_back(Chosen(model, version), why) if why else Chosen(model, version)

    def unknown(self, model:str, key:Key) -> ApiError:
        words = [self.base.name, *([AUTO] if self.router else []), *self.names(key)]
        return ApiError(404, f'there is no model {quoted(model)}; there are {", ".join(words)}', 'model_not_found', 'model')

    def fall_back(self, chosen:Chosen, why:str) -> Chosen:
        "The base in place of an adapter; in strict mode an error."
        if self.settings.strict:
            raise ApiError(503, f'adapter {quoted(chosen.name)} cannot be served: {public(why)}', 'adapter_unavailable', 'model')
        self.fallbacks += 1
        self.signals.fallbacks.labels(chosen.name).inc()
        log.warning('adapter %s cannot be served, the base answers: %s', chosen.name, why)
        return replace(chosen, name=self.base.name, version=None, fallback=public(why), asked=chosen.name)

    async def route(self, text:str, tokens:int, key:Key, user:str|None, session:str|None, side:str) -> Chosen:
        "The router's choice among what this key may use and what can be served. side: as whom rollouts see the request."
        if self.router is None: raise self.unknown(AUTO, key)
        meant = {n: self.fleet.current.version(n, side) for n in self.names(key)}
        available = [n for n,v in meant.items() if v in self.fleet.loaded and v not in self.fleet.broken]
        resident = [n for n in available if meant[n] in self.stats.resident]
        own = lambda word: word and f'{key.name}/{word}' # one key's users are not another's
        request, start = RouteRequest(text, own(user), own(session or user), None, tokens), time.perf_counter()
        routed = await self.router.route(request, available, time.time(), resident)
        self.signals.saw('route', time.perf_counter() - start, routed.layer)
        chosen = Chosen(self.base.name) if routed.adapter is None else self.choose(routed.adapter, key, side)
        return replace(chosen, layer=routed.layer, why=routed.why)

    def check_room(self, n:int): # sequences of a request
        if self.draining: raise ApiError(503, 'the server is draining; ask another', 'draining', headers=SOON)
        self.check_engine()
        most = self.engine.config.rows + self.settings.queue
        if n > most: raise ApiError(400, f'the request asks for {n} answers; at most {most} can wait here', param='n')
        if sum(l.n for l in self.live) + n - self.engine.config.rows > self.settings.queue:
            self.signals.rejected.labels('queue').inc()
            raise ApiError(429, f'{self.settings.queue} sequences are waiting already; try again', 'queue_full', headers=SOON)

    def check_engine(self):
        if self.engine.failed: raise ApiError(503, 'the engine has failed; restart the server', 'engine_failed')

    async def _submit(self, ask:Ask, chosen:Chosen) -> tuple[Stream, Chosen]:
        "A request at the engine; at the base, if its adapter has just gone."
        limit = self.settings.timeout if ask.timeout is None else min(ask.timeout, self.settings.timeout)
        if chosen.version and chosen.version not in self.fleet.loaded:
            chosen = self.fall_back(chosen, 'it was unloaded meanwhile')
        try: return await self.submit(ask, chosen.version, limit), chosen
        except Refused as e:
            self.check_engine()
            if chosen.version is None or not self.fleet.lost(chosen.version): raise
            if chosen.version in self.fleet.loaded: self.fleet.broken[chosen.version] = str(e)
            chosen = self.fall_back(chosen, self.fleet.broken.get(chosen.version, 'it was unloaded meanwhile'))
        return await self.submit(ask, None, limit), chosen

    async def answer(self, ask:Ask, chosen:Chosen) -> Measured:
        "The events of an answer. The first is awaited, so that an adapter which fails before it can be replaced."
        live = Live(chosen, ask.sampling.n)
        self.live.add(live)
        try:
            stream, live.chosen = await self._submit(ask, chosen)
            first = await anext(events := aiter(stream))
            if first.finish == 'error': self.check_engine()
            if first.finish == 'error' and live.chosen.version and not first.text:
                await events.aclose()
                if first.scored is None: self.fleet.broken[live.chosen.version] = first.error # it couldn't be read
                self.note(live.chosen, error=True)
                stream, live.chosen = await self._submit(ask, self.fall_back(live.chosen, first.error))
                first = await anext(events := aiter(stream))
            if error := failed(first): # before a byte was sent, it can still be told as a status
                await events.aclose()
                self.signals.requests.labels(live.chosen.name, first.finish).inc()
                raise error
        except BaseException:
            self.live.discard(live)
            raise
        self.answered[ask.id] = ask.key, live.chosen
        if len(self.answered) > RECENT: self.answered.pop(next(iter(self.answered)))
        return Measured(self, live, stream, first, events)

    def count(self, live:Live, stream:Stream, tokens:int, finish:str|None, last:float): # last: when the last token came
        "Notes that an answer has ended."
        s, model = self.signals, live.chosen.name
        self.live.discard(live)
        per_token = live.n * (last - live.first) / (tokens - live.n) if tokens > live.n else None # of one answer
        if per_token is not None: s.saw('token', per_token, model)
        s.seconds.labels(model).observe(last - live.since)
        s.requests.labels(model, finish or 'cancelled').inc()
        s.prompt_tokens.labels(model).inc(len(stream.prompt))
        s.cached_tokens.labels(model).inc(min(stream.cached, len(stream.prompt)))
        s.generated_tokens.labels(model).inc(tokens)
        self.counted[model] += 1
        if finish: self.note(live.chosen, finish == 'error', per_token)

    def note(self, chosen:Chosen, error:bool, per_token:float|None=None):
        "How a version in a rollout did."
        rollout = self.fleet.current.rollouts.get(chosen.name)
        if not rollout or chosen.version not in (rollout.old, rollout.new): return
        arm = self.arms[rollout, chosen.version]
        arm.requests, arm.errors = arm.requests + 1, arm.errors + error
        if per_token is not None and len(arm.seconds) < 100_000: arm.seconds.append(per_token)

    def rate(self, id:str, score:float, key:Key): # of an answer; 0 to 1
        "A user's opinion, which guards the quality of rollouts. An answer is rated once, by who asked for it."
        asked, chosen = self.answered.get(id, ('', None))
        if chosen is None or asked != key.name:
            raise ApiError(404, f'there is no recent answer {quoted(id)} to rate, or it was rated', 'unknown_request', 'request_id')
        del self.answered[id]
        rollout = self.fleet.current.rollouts.get(chosen.name)
        if rollout and chosen.version in (rollout.old, rollout.new): self.arms[rollout, chosen.version].scores.append(score)
