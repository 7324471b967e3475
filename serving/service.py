"""From a request's `model` to an answer: who answers, what happens when nobody can, and how adapters come and go."""
from __future__ import annotations
import asyncio, logging, math, time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
import jax
from lorajax.adapters import check_name
from lorajax.base import Base
from lorajax.core import Refused, Sampling, quoted
from lorajax.engine import Engine, Event, Stats, Stream, prompt_ids
from lorajax.peft import WEIGHTS_FILE
from lorajax.registry import Bounds, Current, Entry, Outcome, Part, Registry, Rollout, check_manifest, judge, read_manifest
from lorajax.router import RouteRequest
from lorajax.shared_state import SharedRouter
from .errors import ApiError
from .guards import Key
from .settings import Settings
from .signals import Alerts, Signals, golden, percentile

log = logging.getLogger('lorajax.serving')
AUTO = 'auto' # the model that means: let the router choose

@dataclass(frozen=True)
class Chosen:
    "Who answers a request."
    name: str # what the answer's `model` says
    version: str | None = None # None is the base
    layer: str | None = None # of the router
    why: str | None = None
    fallback: str | None = None # why the base answers in place of `asked`
    asked: str = '' # the adapter that was meant

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
    scores: list[float] = field(default_factory=list)

    def outcome(self) -> Outcome:
        quality = sum(self.scores) / len(self.scores) if self.scores else None
        return Outcome(self.requests, self.errors, percentile(self.seconds, .5), percentile(self.seconds, .99), quality, len(self.scores))

def inside(path:str, roots:tuple[Path, ...]) -> Path:
    "A directory below one of the roots, with links followed; one refusal for every other path, so that it tells nothing."
    try: real = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError): real = None
    if real is None and not Path(path).is_absolute():
        found = (r / path for r in roots)
        try: real = next((p.resolve(strict=True) for p in found if '\0' not in path and p.exists()), None)
        except (OSError, ValueError, RuntimeError): real = None
    if real is None or not real.is_dir() or not any(real.is_relative_to(r) and real != r for r in roots):
        raise ApiError(400, f'lora_path {quoted(path)} is no adapter directory below the configured roots', param='lora_path')
    return real

def failed(event:Event) -> ApiError|None:
    "The error that an answer ended with, if it did."
    if event.finish == 'deadline': return ApiError(408, 'the request was not answered in its time', 'deadline_exceeded')
    if event.finish == 'cancelled': return ApiError(503, 'the server is stopping; ask another', 'draining', headers={'retry-after': '1'})
    return ApiError(503, f'the answer broke off: {event.error}', 'generation_failed') if event.finish == 'error' else None

class Service:
    "An engine, the names of its adapters, and what is known of both."
    def __init__(self, settings:Settings, base:Base, engine:Engine, registry:Registry, router:SharedRouter|None, signals:Signals):
        self.settings, self.base, self.engine, self.registry, self.router = settings, base, engine, registry, router
        self.signals, self.alerts = signals, Alerts(signals, settings.webhook)
        self.current: Current = registry.current()
        self.loaded: dict[str, str] = {} # version -> its name in the engine
        self.broken: dict[str, str] = {} # version -> why it can't be served
        self.live: set[Live] = set()
        self.stats: Stats = engine.stats()
        self.arms: dict[tuple[str, str], Arm] = defaultdict(Arm) # (name, version), since the stage began
        self.changes, self.files = asyncio.Lock(), ThreadPoolExecutor(1, 'adapter-files')
        self.draining, self.ready_at, self.created = False, math.inf, int(time.time())
        self.answered: dict[str, Chosen] = {} # request id -> who answered, for feedback
        self.counted, self.fallbacks, self.tasks = Counter(), 0, []

    # Names and versions

    def names(self, key:Key) -> list[str]: return [n for n in self.current.names if key.may_use(n)]

    def choose(self, model:str, key:Key, user:str) -> Chosen:
        "The version that a name means for this user now."
        if model == self.base.name: return Chosen(model)
        version = self.current.version(model, user) if key.may_use(model) else None
        if version is None: raise self.unknown(model, key)
        why = self.broken.get(version) or (None if version in self.loaded else 'it is still being loaded')
        return Chosen(model, version) if not why else self.fall_back(Chosen(model, version), why)

    def unknown(self, model:str, key:Key) -> ApiError:
        words = [self.base.name, *([AUTO] if self.router else []), *self.names(key)]
        return ApiError(404, f'there is no model {quoted(model)}; there are {", ".join(words)}', 'model_not_found', 'model')

    def fall_back(self, chosen:Chosen, why:str) -> Chosen:
        "The base in place of an adapter; in strict mode an error."
        if self.settings.strict: raise ApiError(503, f'adapter {quoted(chosen.name)} cannot be served: {why}', 'adapter_unavailable', 'model')
        self.fallbacks += 1
        self.signals.fallbacks.labels(chosen.name, 'load').inc()
        log.warning('adapter %s cannot be served, the base answers: %s', chosen.name, why)
        return replace(chosen, name=self.base.name, version=None, fallback=why, asked=chosen.name)

    async def route(self, text:str, tokens:int, key:Key, user:str|None, session:str|None) -> Chosen:
        "The router's choice among what this key may use and what can be served."
        if self.router is None: raise self.unknown(AUTO, key)
        ready = {n: self.current.version(n, user or '') for n in self.names(key)}
        available = [n for n,v in ready.items() if v in self.loaded]
        resident = [n for n in available if ready[n] in self.stats.resident]
        own = lambda word: word and f'{key.name}/{word}' # one key's users are not another's
        start = time.perf_counter()
        routed = await self.router.route(RouteRequest(text, own(user), own(session or user), None, tokens), available, time.time(), resident)
        self.signals.saw('route', time.perf_counter() - start, routed.layer)
        chosen = Chosen(self.base.name) if routed.adapter is None else self.choose(routed.adapter, key, user or '')
        return replace(chosen, layer=routed.layer, why=routed.why)

    # Answers

    def check_room(self, n:int):
        if self.draining: raise ApiError(503, 'the server is draining; ask another', 'draining', headers={'retry-after': '1'})
        waiting = sum(l.n for l in self.live) + n - self.engine.config.rows
        if waiting > self.settings.queue:
            self.signals.rejected.labels('queue').inc()
            raise ApiError(429, f'{self.settings.queue} sequences are waiting already; try again', 'queue_full', headers={'retry-after': '1'})

    async def submit(self, prompt, chosen:Chosen, sampling:Sampling, id:str, timeout:float|None, priority:int) -> tuple[Stream, Chosen]:
        "A request at the engine, or at the base in place of an adapter that has just gone."
        limit = self.settings.timeout if timeout is None else min(timeout, self.settings.timeout)
        use = self.loaded.get(chosen.version)
        ask = lambda use: asyncio.to_thread(self.engine.submit, prompt, use, sampling, priority, limit, id)
        if self.engine.failed: raise ApiError(503, 'the engine has failed; the server must be restarted', 'engine_failed')
        if chosen.version and not use: chosen = self.fall_back(chosen, 'it was unloaded meanwhile')
        try: return await ask(use), chosen
        except Refused as e:
            if chosen.version is None or chosen.version in self.engine.store.folder.known: raise
            self.broken[chosen.version] = str(e)
        chosen = self.fall_back(chosen, self.broken[chosen.version])
        return await ask(None), chosen

    async def events(self, prompt, chosen:Chosen, sampling:Sampling, id:str, timeout:float|None=None, priority:int=0):
        "(stream, who answers, its events). The first event is awaited, so that an adapter which fails before it can be replaced."
        self.check_room(sampling.n)
        live = Live(chosen, sampling.n)
        self.live.add(live)
        try:
            stream, live.chosen = await self.submit(prompt, chosen, sampling, id, timeout, priority)
            events = aiter(stream)
            first = await anext(events)
            if first.finish == 'error' and live.chosen.version and not first.text:
                await events.aclose()
                if first.scored is None: self.broken[live.chosen.version] = first.error # it couldn't be read
                self.outcome(live.chosen, error=True)
                stream, live.chosen = await self.submit(prompt, self.fall_back(live.chosen, first.error), sampling, id, timeout, priority)
                events = aiter(stream)
                first = await anext(events)
            if error := failed(first): # before a byte was sent, it can still be told as a status
                await events.aclose()
                self.signals.requests.labels(live.chosen.name, first.finish).inc()
                raise error
        except BaseException:
            self.live.discard(live)
            raise
        self.answered[id] = live.chosen # the id of the answer, which `rate` is told
        if len(self.answered) > 10_000: self.answered.pop(next(iter(self.answered)))
        return stream, live.chosen, self._told(live, stream, first, events)

    async def _told(self, live:Live, stream:Stream, first:Event, events:AsyncIterator[Event]) -> AsyncIterator[Event]:
        "The events, measured; closing it cancels what is left."
        tokens, finish, model = 0, None, live.chosen.name
        try:
            live.first = time.monotonic()
            self.signals.saw('first', live.first - live.since, model)
            event = first
            while event:
                tokens += event.scored is not None
                finish = event.finish or finish
                yield event
                event = await anext(events, None)
        finally:
            self.live.discard(live)
            if finish is None: stream.cancel() # the reader went before the end
            end = time.monotonic()
            self.signals.seconds.labels(model).observe(end - live.since)
            per_token = (end - live.first) / (tokens - 1) if live.first and tokens > 1 else None
            if per_token is not None: self.signals.saw('token', per_token, model)
            self.signals.requests.labels(model, finish or 'cancelled').inc()
            self.signals.prompt_tokens.labels(model).inc(len(stream.prompt))
            self.signals.cached_tokens.labels(model).inc(min(stream.cached, len(stream.prompt)))
            self.signals.generated_tokens.labels(model).inc(tokens)
            self.counted[model] += 1
            if finish: self.outcome(live.chosen, finish == 'error', per_token)

    def outcome(self, chosen:Chosen, error:bool, per_token:float|None=None):
        "Notes how a version in a rollout did."
        name = chosen.asked or chosen.name
        rollout = self.current.rollouts.get(name)
        if not rollout or chosen.version not in (rollout.old, rollout.new): return
        arm = self.arms[name, chosen.version]
        arm.requests, arm.errors = arm.requests + 1, arm.errors + error
        if per_token is not None and len(arm.seconds) < 100_000: arm.seconds.append(per_token)

    def rate(self, id:str, score:float):
        "A user's opinion of an answer, from 0 to 1; the quality guard of rollouts."
        chosen = self.answered.get(id)
        if chosen is None: raise ApiError(404, f'there is no recent answer {quoted(id)}', 'unknown_request', 'request_id')
        if not 0 <= score <= 1: raise ApiError(400, f'score={score}; it must be a number from 0 to 1', param='score')
        if chosen.version: self.arms[chosen.asked or chosen.name, chosen.version].scores.append(score)

    # Changes

    async def in_thread(self, what:Callable, *args): return await asyncio.get_running_loop().run_in_executor(self.files, what, *args)

    def _read(self, name:str, folder:Path, dtype:str|None) -> tuple[str, object]: # in the thread for files
        "An adapter in the engine, checked against its manifest; its version and the manifest."
        check_name(name)
        if name in (self.base.name, AUTO, 'base'):
            raise Refused(f'an adapter cannot be called {quoted(name)}, which means something else; choose another name')
        adapter = self.base.load_adapter(folder, name)
        manifest, trusted = read_manifest(folder), [k for k in self.settings.trusted.split(',') if k]
        check_manifest(manifest, self.base.fingerprint, adapter.fingerprint, trusted)
        version = self.base.version(adapter, dtype)
        self.engine.load(adapter, version, dtype)
        return version, manifest

    async def load(self, name:str, path:str, dtype:str|None, actor:str, watch:float|None=None) -> tuple[str, bool]: # version; whether it serves
        "An adapter under a name: at once, or, with `watch`, beside the version that serves."
        folder = inside(path, self.settings.allowed_roots)
        async with self.changes:
            try: version, manifest = await self.in_thread(self._read, name, folder, dtype)
            except Refused as e:
                self.registry.note(actor, str(name)[:128], f'refused: {e}', time.time())
                raise ApiError(400, str(e).replace(f'{folder}/', ''), param='lora_path') from None
            self.loaded[version] = version
            self.broken.pop(version, None)
            now = time.time()
            serves = await self.in_thread(self.registry.add, Entry(name, version, str(folder), dtype or '', (), manifest, now), actor, now)
            try:
                if not serves and watch is not None: await self.in_thread(self.registry.start, name, version, actor, now, watch)
                elif not serves: await self.in_thread(lambda: self.registry.promote(name, version, actor=actor, now=now))
            finally: await self._follow()
        return version, serves or watch is None

    async def unload(self, name:str, actor:str):
        async with self.changes:
            if name not in self.current.names: raise ApiError(404, f'there is no adapter {quoted(name)} to unload', 'model_not_found', 'lora_name')
            await self.in_thread(self.registry.remove, name, actor, time.time())
            await self._follow()

    async def compose(self, name:str, weights:dict[str, float], actor:str) -> str:
        "A weighted sum of adapters under a name of its own."
        check_name(name)
        if name in (self.base.name, AUTO, 'base', *weights): raise ApiError(400, f'a composition cannot be called {quoted(name)}; choose another name', param='name')
        async with self.changes:
            parts = {n: self.current.names.get(n) for n in weights}
            missing = [n for n,v in parts.items() if v not in self.loaded]
            if missing: raise ApiError(404, f'there is no adapter {quoted(missing[0])} to compose', 'model_not_found', 'weights')
            total = Counter() # two names may mean one version
            for n, v in parts.items(): total[v] += weights[n]
            version, now = await self._composed(total), time.time()
            entry = Entry(name, version, parts=tuple(Part(*p) for p in total.items()), added=now)
            serves = await self.in_thread(self.registry.add, entry, actor, now)
            if not serves: await self.in_thread(lambda: self.registry.promote(name, version, actor=actor, now=now))
            await self._follow()
        return version

    async def _composed(self, weights:dict[str, float]) -> str: # version -> weight
        def make():
            version = self.engine.compose('composing', {self.loaded[v]: w for v,w in weights.items()})
            self.engine.call(lambda: self.engine.names.point(version, self.engine.names.point('composing', None)))
            return version
        version = await self.in_thread(make)
        self.loaded[version] = version
        return version

    async def change(self, what:Callable, *args, **kw):
        "A change of the registry, followed."
        async with self.changes:
            result = await self.in_thread(lambda: what(*args, **kw))
            await self._follow()
        return result

    async def follow(self):
        "Takes note of changes, perhaps of another process."
        async with self.changes: await self._follow()

    async def _follow(self):
        self.current = await self.in_thread(self.registry.current)
        c = self.current
        wanted = {*c.names.values(), *(r.new for r in c.rollouts.values()), *c.former.values()} - {None}
        for version in sorted(wanted - set(self.loaded) - set(self.broken), key=lambda v: bool(self._entry(v).parts)):
            try: await self._restore(self._entry(version))
            except (Refused, ApiError) as e:
                self.broken[version] = str(e)
                log.warning('version %s cannot be served: %s', version[:16], e)
        for version in set(self.loaded) - wanted:
            await self.in_thread(self.engine.unload, self.loaded.pop(version))
        for version in set(self.broken) - wanted: del self.broken[version]
        for key in [k for k in self.arms if k[0] not in c.rollouts]: del self.arms[key]

    def _entry(self, version) -> Entry: return self.registry.find(version)

    async def _restore(self, entry:Entry):
        "A version that the registry names, from the images of an earlier run or from its files."
        if entry.parts:
            missing = [p.version for p in entry.parts if p.version not in self.loaded]
            for v in missing: await self._restore(self._entry(v))
            await self._composed({p.version: p.weight for p in entry.parts}) # the engine keeps its parts from here on
            return
        if not await self.in_thread(self.engine.adopt, entry.version, entry.version):
            if not entry.source: raise Refused(f'the files of adapter {entry.name!r} are gone; load it again')
            version, _ = await self.in_thread(self._read, entry.name, inside(entry.source, self.settings.allowed_roots), entry.dtype or None)
            if version != entry.version:
                self.engine.unload(version)
                raise Refused(f'adapter {entry.name!r} is no longer what it was, or the base has changed; load it again')
        self.loaded[entry.version] = entry.version

    async def start(self):
        "Restores what an earlier run served, then loads what is new in the adapter directory."
        await self.follow()
        folder = Path(self.settings.adapters)
        found = sorted(p.parent for p in folder.glob(f'*/{WEIGHTS_FILE}')) if folder.is_dir() else []
        for path in found:
            if path.name in self.current.names: continue
            try: await self.load(path.name, str(path.resolve()), None, 'start')
            except (ApiError, Refused) as e: log.warning('adapter %s is left out: %s', path.name, e)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self.ready_at = time.time()
        self.tasks = [asyncio.create_task(self._every(1., self.tick)), asyncio.create_task(self._every(self.settings.judge_every, self.judge))]

    def _compiled(self, event, seconds, **kw):
        if event == '/jax/core/compile/backend_compile_duration': self.signals.recompilations.inc()

    async def close(self):
        self.draining = True
        for t in self.tasks: t.cancel()
        deadline = time.monotonic() + 30
        while self.live and time.monotonic() < deadline: await asyncio.sleep(.05)
        if self.router: await self.router.close()
        await asyncio.to_thread(self.engine.close)
        self.files.shutdown()
        self.alerts.close()
        self.registry.close()
        jax.monitoring.unregister_event_duration_listener(self._compiled)

    # Watching

    async def _every(self, seconds:float, what:Callable):
        while True:
            await asyncio.sleep(seconds)
            try: await what()
            except asyncio.CancelledError: raise
            except Exception: log.exception('%s failed and is tried again', what.__name__)

    async def tick(self):
        "Once a second: gauges, alerts, and changes of other processes."
        if await self.in_thread(self.registry.serial) != self.current.serial: await self.follow()
        if self.engine.failed: return self.alerts.watch({'engine failed': self.engine.failed}, time.time())
        before, self.stats = self.stats, await asyncio.to_thread(self.engine.stats)
        s, g = self.stats, self.signals
        named = {v: n for n,v in self.current.names.items()} | {None: self.base.name}
        for version, hits in s.hits.items():
            if version in named: g.hit_rate.labels(named[version]).set(hits.rate)
        cached, looked = sum(h.cached for h in s.hits.values()), sum(h.tokens for h in s.hits.values())
        g.hit_rate.labels('all').set(cached / looked if looked else 0)
        for tenant, n in s.pages.items(): g.pages.labels(tenant).set(n)
        for state, n in dict(registered=len(self.current.names), resident=len(s.resident)).items(): g.adapters.labels(state).set(n)
        for state, n in dict(running=s.running, waiting=s.waiting).items(): g.sequences.labels(state).set(n)
        g.preemptions.inc(s.preemptions - before.preemptions)
        g.swaps.inc(s.swaps - before.swaps)
        for seconds in self.engine.residents.swap_seconds(): g.saw('swap', seconds)
        for name in self.current.names: g.rollout.labels(name).set(getattr(self.current.rollouts.get(name), 'stage', 0))
        now = time.monotonic()
        waits = [now - l.since for l in self.live if l.first is None]
        g.longest_wait.set(max(waits, default=0.))
        self._gateways(s)
        bad = ', '.join(sorted(n for n,v in self.current.names.items() if v in self.broken))
        self.alerts.watch(golden(g, (cached, looked)) | {
            'fallback': bad and f'the base answers for {bad}', 'starvation': f'a request waits for {max(waits):.0f} s' if waits and max(waits) > 60 else None},
            time.time())

    def _gateways(self, s:Stats):
        running, waiting = ({l.chosen.name for l in self.live if (l.first is None) == late and l.chosen.version} for late in (False, True))
        self.signals.lora.clear()
        self.signals.lora.labels(str(self.engine.config.slots), ','.join(sorted(running)), ','.join(sorted(waiting))).set(time.time())
        all_pages = sum(s.pages.values())
        self.signals.kv_usage.labels(self.base.name).set(1 - s.pages['free'] / all_pages)
        self.signals.running.labels(self.base.name).set(s.running)
        self.signals.waiting.labels(self.base.name).set(s.waiting)

    async def judge(self):
        "Every rollout by what was seen of its two versions."
        for name, r in self.current.rollouts.items():
            old, new = (self.arms[name, v].outcome() for v in (r.old, r.new))
            if r.new in self.broken: verdict, reason = 'roll back', f'the new version cannot be served: {self.broken[r.new]}'
            else: verdict, reason = judge(r, old, new, time.time(), Bounds())
            if verdict == 'hold': continue
            if await self.change(self.registry.step, r, verdict, reason, time.time()):
                for v in (r.old, r.new): self.arms.pop((name, v), None)
                log.warning('rollout of %s: %s (%s)', name, verdict, reason)

    # What is shown

    def state_of(self, version:str) -> str:
        parts = self._entry(version).parts
        if version in self.broken: return 'broken'
        need = [p.version for p in parts] or [version]
        return 'resident' if all(v in self.stats.resident for v in need) else 'stored'

    def adapter_rows(self, key:Key) -> list[dict]:
        rows, named = [], {v: n for n,v in self.current.names.items()}
        for name in self.names(key):
            version = self.current.names[name]
            hits, entry = self.stats.hits.get(version), self._entry(version)
            rows.append(dict(name=name, version=version, state=self.state_of(version), reason=self.broken.get(version, ''),
                             source=Path(entry.source).name, parts={named.get(p.version, p.version[:16]): p.weight for p in entry.parts},
                             requests=self.counted[name], hit_rate=hits and round(hits.rate, 4)))
        return rows

    def status(self, key:Key) -> dict:
        g, s = self.signals, self.stats
        cached, looked = sum(h.cached for h in s.hits.values()), sum(h.tokens for h in s.hits.values())
        signals = dict(swap_p99_ms=g.milliseconds('swap', .99), route_p99_ms=g.milliseconds('route', .99),
                       prefix_hit_rate=round(cached / looked, 4) if looked else None,
                       ttft_p50_ms=g.milliseconds('first', .5), tpot_p50_ms=g.milliseconds('token', .5))
        def shown(r:Rollout):
            arm = self.arms.get((r.name, r.new), Arm())
            return dict(name=r.name, old=r.old, new=r.new, stage=r.stage, since=r.since, requests=arm.requests, errors=arm.errors)
        return dict(base=self.base.name, ready=self.ready, uptime_s=round(time.time() - self.created, 1), signals=signals,
                    sequences=dict(running=s.running, waiting=s.waiting), pages=dict(s.pages), adapters=self.adapter_rows(key),
                    rollouts=[shown(r) for r in self.current.rollouts.values() if key.may_use(r.name)],
                    alerts=[vars(a) for a in self.alerts.raised.values()], fallbacks=self.fallbacks)

    @property
    def ready(self) -> bool: return time.time() >= self.ready_at and not self.draining and not self.engine.failed
