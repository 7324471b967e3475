"""What a server does beside answering: gauges and alerts once a second, rollouts judged, and what the page shows."""
from __future__ import annotations
import asyncio, logging, time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
import jax
from lorajax.registry import Bounds, Rollout, judge
from .guards import Key
from .service import Arm, Service, public
from .signals import golden

log = logging.getLogger('lorajax.serving')
STARVED = 60. # seconds without a first token

def looked_up(service:Service) -> tuple[int, int]: # tokens found, tokens asked for, since the start
    hits = service.stats.hits.values()
    return sum(h.cached for h in hits), sum(h.tokens for h in hits)

def lately(service:Service) -> tuple[int, int]: # the same, of the last minutes
    service.lookups.append(looked_up(service))
    return tuple(now - then for now, then in zip(service.lookups[-1], service.lookups[0]))

async def tick(service:Service):
    "Changes of other processes, gauges, alerts."
    fleet, now = service.fleet, time.time()
    await fleet.keep_up()
    if service.engine.failed: return service.alerts.watch({'engine failed': service.engine.failed}, now)
    before, (service.stats, swaps) = service.stats, await service.measured()
    service.signals.preemptions.inc(service.stats.preemptions - before.preemptions)
    service.signals.swaps.inc(service.stats.swaps - before.swaps)
    for seconds in swaps: service.signals.saw('swap', seconds)
    waits = [time.monotonic() - l.since for l in service.live if l.first is None]
    set_gauges(service, max(waits, default=0.))
    bad = ', '.join(sorted(n for n,v in fleet.current.names.items() if v in fleet.broken))
    starved = max(waits, default=0.) > STARVED and f'a request has waited for {max(waits):.0f} s'
    service.alerts.watch(golden(service.signals, lately(service)) | {
        'fallback': bad and f'the base answers for {bad}', 'starvation': starved}, now)

def set_gauges(service:Service, longest:float): # longest: seconds that a request has waited
    s, g, current = service.stats, service.signals, service.fleet.current
    found, asked = looked_up(service)
    for gauge in (g.hit_rate, g.rollout, g.lora): gauge.clear() # names come and go
    g.longest_wait.set(longest)
    g.hit_rate.labels('all').set(found / asked if asked else 0)
    for name, version in {service.base.name: None, **current.names}.items():
        if hits := s.hits.get(version): g.hit_rate.labels(name).set(hits.rate)
    for tenant, n in s.pages.items(): g.pages.labels(tenant).set(n)
    g.adapters.labels('registered').set(len(current.names))
    g.adapters.labels('resident').set(len(s.resident))
    g.sequences.labels('running').set(s.running)
    g.sequences.labels('waiting').set(s.waiting)
    for name in current.names: g.rollout.labels(name).set(current.rollouts[name].stage if name in current.rollouts else 0)
    base, used = service.base.name, {late: {l.chosen.name for l in service.live if l.chosen.version and (l.first is None) == late}
                                     for late in (False, True)}
    g.lora.labels(str(service.engine.config.slots), *(','.join(sorted(used[late])) for late in (False, True))).set(time.time())
    g.kv_usage.labels(base).set(1 - s.pages['free'] / max(1, sum(s.pages.values())))
    g.running.labels(base).set(s.running)
    g.waiting.labels(base).set(s.waiting)

async def judge_rollouts(service:Service):
    "Every rollout by what was seen of its two versions."
    fleet = service.fleet
    under_way = set(fleet.current.rollouts.values())
    for key in [k for k in service.arms if k[0] not in under_way]: del service.arms[key] # a stage counts from nothing
    for name, r in list(fleet.current.rollouts.items()):
        old, new = (service.arms[r, v].outcome() for v in (r.old, r.new))
        verdict, reason = judge(r, old, new, time.time(), Bounds())
        if r.new in fleet.broken: verdict, reason = 'roll back', f'it cannot be served: {fleet.broken[r.new]}'
        if verdict == 'hold' or not await fleet.change(fleet.registry.step, r, verdict, reason, time.time()): continue
        log.warning('rollout of %s: %s (%s)', name, verdict, reason)

async def every(seconds:float, what:Callable, service:Service):
    while True:
        await asyncio.sleep(seconds)
        try: await what(service)
        except Exception: log.exception('%s failed and is tried again', what.__name__)

def on_compilation(call:Callable) -> Callable: # the listener
    "Calls whenever this process has compiled a program."
    def compiled(event, seconds, **_):
        if event == '/jax/core/compile/backend_compile_duration': call()
    jax.monitoring.register_event_duration_secs_listener(compiled)
    return compiled

@asynccontextmanager
async def serving(service:Service):
    "A service between its start and its end: adapters in the engine, watched, and drained before it closes."
    await service.fleet.start()
    listener = on_compilation(service.signals.recompilations.inc)
    tasks = [asyncio.create_task(every(1., tick, service)),
             asyncio.create_task(every(service.settings.judge_every, judge_rollouts, service))]
    try: yield
    finally:
        service.draining, end = True, time.monotonic() + 30
        for t in tasks: t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while service.live and time.monotonic() < end: await asyncio.sleep(.05)
        jax.monitoring.unregister_event_duration_listener(listener)
        if service.router: await service.router.close()
        await asyncio.to_thread(service.fleet.files.shutdown)
        service.alerts.close()

def state_of(service:Service, version:str) -> str:
    if version in service.fleet.broken: return 'broken'
    entry = service.fleet.entries.get(version)
    need = [p.version for p in entry.parts] if entry and entry.parts else [version]
    return 'resident' if all(v in service.stats.resident for v in need) else 'stored'

def adapter_rows(service:Service, key:Key) -> list[dict]:
    "Adapters and compositions, as far as this key may see them."
    fleet, rows = service.fleet, []
    named = {v: n for n,v in fleet.current.names.items()}
    for name in service.names(key):
        version = fleet.current.names[name]
        entry, hits = fleet.entries.get(version), service.stats.hits.get(version)
        if entry is None: continue # it was removed this moment
        def called(v): # a version whose name moved on goes by both
            part = fleet.entries.get(v)
            return named.get(v) or (f'{part.name} {v[:8]}' if part else v[:16])
        rows.append(dict(
            name=name, version=version, state=state_of(service, version), reason=public(fleet.broken.get(version, '')),
            source=Path(entry.source).name, parts={called(p.version): p.weight for p in entry.parts},
            requests=service.counted[name], hit_rate=hits and round(hits.rate, 4)))
    return rows

def rollout_row(service:Service, r:Rollout) -> dict:
    arm = service.arms.get((r, r.new), Arm())
    return dict(name=r.name, old=r.old, new=r.new, stage=r.stage, since=r.since, requests=arm.requests, errors=arm.errors)

def rollout_rows(service:Service, key:Key) -> list[dict]:
    return [rollout_row(service, r) for r in service.fleet.current.rollouts.values() if key.may_use(r.name)]

def status(service:Service, key:Key) -> dict:
    "Everything that the page shows."
    g, s, (found, asked) = service.signals, service.stats, looked_up(service)
    signals = dict(swap_p99_ms=g.milliseconds('swap', .99), route_p99_ms=g.milliseconds('route', .99),
                   prefix_hit_rate=round(found / asked, 4) if asked else None,
                   ttft_p50_ms=g.milliseconds('first', .5), tpot_p50_ms=g.milliseconds('token', .5))
    return dict(base=service.base.name, ready=service.ready, uptime_s=round(time.time() - service.created, 1), signals=signals,
                sequences=dict(running=s.running, waiting=s.waiting), pages=dict(s.pages),
                adapters=adapter_rows(service, key), rollouts=rollout_rows(service, key),
                alerts=[vars(a) for a in service.alerts.raised.values()], fallbacks=service.fallbacks)
