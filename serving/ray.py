"""Replicas on Ray Serve. `lorajax serve --ray` and `serve run serving.ray:app` start them.

The ingress is the plain server with its keys, limits, router and audit log; its engines are replicas of another deployment.
If each replica were an ingress too, a proxy would choose one before anybody has read the request. Here a request's version
is known before its replica is chosen, for `auto` and in rollouts too, so Serve's multiplexing finds an engine that has it.
"""
from __future__ import annotations
import asyncio, logging, os, re, signal, socket, sys, time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
import jax, ray, uvicorn
from grpc.aio import AioRpcError
from litestar import Litestar
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from lorajax.base import Base
from lorajax.core import Refused
from lorajax.engine import Event, Stats
from lorajax.kv import Hits
from lorajax.registry import Registry
from .app import create_app, router_of, set_up_logs
from .command import family_of, taken, url_of
from .errors import ApiError
from .fleet import Fleet
from .replica import EngineFailed, EngineReplica, Piece, Report
from .service import SOON, Ask, Service, failed
from .settings import Settings, check, from_environment
from .signals import Signals

log = logging.getLogger('lorajax.serving')
APP, INGRESS, ENGINE = 'lorajax', 'Ingress', 'Engine' # as Serve calls them

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError, AioRpcError, EngineFailed) # a replica, with what it did
STOPPED = 'the replica that gave it has stopped; ask again'
MOST = 8 # times that a request is sent again, which may itself be what stops its replicas

class Remote:
    "The events of an answer that another process gives."
    def __init__(self, n:int, first:Piece, rest:DeploymentResponseGenerator):
        self.first, self.rest, self.left = first, rest, set(range(n)) # left: of the answers
        self.prompt, self.cached, self.seconds = range(first.tokens), first.cached, first.seconds

    def cancel(self):
        if self.left: self.rest.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        piece = self.first
        try:
            while True:
                for e in piece.events:
                    if e.finish: self.left.discard(e.index)
                    yield e
                if not self.left: return
                piece = await anext(self.rest)
        except GONE as e:
            log.warning('an answer broke off: %s', type(e).__name__)
            gone = sorted(self.left)
            self.left.clear()
            for i in gone: yield Event(i, finish='error', error=STOPPED)
        finally: self.cancel()

def total(reports:list[Report], ever:list[Report]) -> Stats: # ever: the last report of each that there was
    "The engines as one. What is counted since the start includes those that are gone."
    def summed(name, of): return sum(getattr(r.stats, name) for r in of)
    hits, pages = {}, Counter()
    for r in ever:
        for version, h in r.stats.hits.items(): hits[version] = hits.get(version, Hits()) + h
    for r in reports: pages.update(r.stats.pages)
    return Stats(**{k: summed(k, reports) for k in ('running', 'waiting')},
                 **{k: summed(k, ever) for k in ('steps', 'prompt_tokens', 'generated_tokens', 'preemptions', 'swaps')},
                 hits=hits, pages=pages, adapters={k: v for r in reports for k,v in r.stats.adapters.items()},
                 resident=tuple({v for r in reports for v in r.stats.resident}),
                 ran=tuple(sorted({x for r in reports for x in r.stats.ran})))

class Engines:
    "The engines of all replicas, for what a service asks of one."
    failed = None # Serve replaces those that fail

    def __init__(self, handle:DeploymentHandle, affinity:bool):
        self.handle, self.affinity, self.reports, self.ever, self.lost = handle, affinity, [], {}, set()

    async def start(self) -> Base: # without its weights
        facts = await self.handle.facts.remote()
        self.one = self.config = facts.config
        await self.report()
        return facts.base

    async def report(self) -> list[Report]: # those that are new
        "Asks all how they are. While a process hangs, all are taken to be as they were; Serve replaces it."
        try: found = await self.handle.broadcast('report').results_async(timeout_s=5., return_exceptions=True)
        except TimeoutError: return []
        except DeploymentUnavailableError: found = []
        self.reports = [r for r in found if isinstance(r, Report)]
        self.ever |= {r.replica: r for r in self.reports}
        self.config = replace(self.one, rows=self.one.rows * max(1, len(self.reports)))
        return self.reports

    def stats(self) -> Stats: return total(self.reports, list(self.ever.values()))

    async def ask(self, ask:Ask, version:str|None, limit:float) -> Remote: # limit: seconds
        "An answer's beginning. As long as nothing of it has come, it is asked for again when its replica goes."
        end, tries = time.monotonic() + limit, 0
        to = self.handle.options(method_name='answer', stream=True, multiplexed_model_id=self.affinity and version or '',
                                 request_serialization='pickle', response_serialization='pickle')
        while True:
            response = to.remote(ask, version, end - time.monotonic())
            try: first = await asyncio.wait_for(anext(response), end - time.monotonic())
            except GONE as e: tries = self._again(ask, e, tries)
            except DeploymentUnavailableError:
                raise ApiError(503, 'there is no engine: the server is stopping, or Ray Serve could not start one',
                               'engine_failed', headers=SOON) from None
            except TimeoutError:
                response.cancel()
                raise failed(Event(0, finish='deadline')) from None
            except asyncio.CancelledError:
                response.cancel()
                raise
            else: return self._begun(ask, version, first, response)
            await asyncio.sleep(min(.05 * 2 ** tries, 2.))

    def _again(self, ask, e, tries):
        if tries == MOST: raise failed(Event(0, finish='error', error=STOPPED)) from e
        log.warning('request %s is sent again: %s', ask.id, type(e).__name__)
        return tries + 1

    def _begun(self, ask, version, first, response):
        (self.lost.add if first.lost else self.lost.discard)(version)
        if first.refused: raise Refused(first.refused)
        return Remote(ask.sampling.n, first, response)

class RemoteFleet(Fleet):
    "The adapters of all replicas: each follows the registry, and this one tells them when there is something to follow."
    engine: Engines
    broken_there: dict[str, str] = {} # version -> why none of them can serve it

    async def start(self):
        self.loop = asyncio.get_running_loop()
        await self.follow()

    def lost(self, version:str) -> bool: return version in self.engine.lost

    def _call(self, method, *args): # on the thread for files
        async def call(): return await self.engine.handle.options(method_name=method).remote(*args)
        try: return asyncio.run_coroutine_threadsafe(call(), self.loop).result()
        except RayTaskError as e:
            raise e.cause if isinstance(e.cause, Refused) else e
        except (*GONE, DeploymentUnavailableError) as e:
            raise ApiError(503, 'the replica that was to do this has stopped; ask again', 'engine_failed', headers=SOON) from e

    def _read(self, name:str, folder:Path, dtype:str|None): return self._call('read', name, str(folder), dtype)
    def _compose(self, weights:dict[str, float]) -> str:
        version = self._call('compose', weights)
        self.loaded.add(version)
        self.broken.pop(version, None)
        return version

    async def _follow(self):
        told = await self.engine.handle.broadcast('follow').results_async(return_exceptions=True)
        told = [d for d in told if isinstance(d, dict)]
        self.broken_there = {k: v for d in told for k,v in d.items() if all(k in other for other in told)}
        await super()._follow()

    def _restore(self, version:str):
        if why := self.broken_there.get(version): raise Refused(why)
        self.loaded.add(version)

    def _drop(self, version:str): self.engine.lost.discard(version)

class RemoteService(Service):
    "A service whose engines are elsewhere."
    engine: Engines

    @property
    def ready(self) -> bool: return not self.draining and bool(self.engine.reports)

    def submit(self, ask:Ask, version:str|None, limit:float): return self.engine.ask(ask, version, limit)
    def began(self, stream:Remote) -> float: return time.monotonic() - stream.seconds
    async def measured(self) -> tuple[Stats, list[float]]:
        new = await self.engine.report()
        self.signals.recompilations.inc(sum(r.compiled for r in new))
        return self.engine.stats(), [seconds for r in new for seconds in r.swaps]

@asynccontextmanager
async def elsewhere(settings:Settings, progress:Callable, handle:DeploymentHandle, affinity:bool) -> AsyncIterator[Service]:
    "A service before the engines of a deployment."
    engines = Engines(handle, affinity)
    base = await engines.start()
    with ExitStack() as stack:
        registry = stack.enter_context(Registry(Path(settings.state) / 'registry.sqlite'))
        yield RemoteService(settings, base, engines, RemoteFleet(settings, base, engines, registry),
                            router_of(settings, stack), Signals())

def bound(host:str, port:int) -> socket.socket:
    s = socket.socket(family_of(host))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1) # an ingress that died has left connections there
    if s.family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1) # as uvicorn by itself
    try: s.bind((host, port))
    except OSError as e:
        s.close()
        raise taken(host, port, e) from None
    return s

@asynccontextmanager
async def listening(app:Litestar, at:tuple[str, int], own:socket.socket) -> AsyncIterator[asyncio.Task]: # own: `bound` there
    "An app, begun before, answers at an address of its own; at the end what runs may end."
    server = uvicorn.Server(uvicorn.Config(app, lifespan='off', log_config=None, access_log=False, server_header=False,
                                           timeout_graceful_shutdown=30))
    try: own.listen(2048)
    except OSError as e: # another program came while the engines were loaded
        app.state.refused = str(refused := taken(*at, e))
        raise refused from None
    task = asyncio.create_task(server.serve([own]))
    try: yield task
    finally:
        server.should_exit = True
        await task

@serve.ingress()
class Ingress:
    "The app, in Serve's hands."
    def __init__(self, settings:Settings, handle:DeploymentHandle, affinity:bool, at:tuple[str, int]|None):
        jax.config.update('jax_platforms', 'cpu') # devices are for engines
        set_up_logs(settings.log_level)
        self.settings, self.made = settings, partial(elsewhere, handle=handle, affinity=affinity)
        self.at, self.socket, self.listening = at, bound(*at) if at else None, None

    def __serve_build_asgi_app__(self):
        app = create_app(self.settings, made=self.made, within=[self._listens] if self.at else [])
        if not self.at and os.environ.get('RAY_SERVE_ENABLE_HA_PROXY') == '1':
            app.state.api_keys.has_admin = True # behind it all seem local
        return app

    @asynccontextmanager
    async def _listens(self, app:Litestar):
        async with listening(app, self.at, self.socket) as self.listening: yield

    async def _run_asgi_lifespan_startup(self): # Serve's own; what it raises has no reason in it
        try: await super()._run_asgi_lifespan_startup()
        except RuntimeError:
            if refused := self.app.state.get('refused'): raise Refused(refused) from None
            raise

    def check_health(self):
        if self.listening and self.listening.done(): raise RuntimeError('the ingress no longer listens')

QUIET = dict(enable_access_log=False) # the app has its own

def ingress(
    settings:Settings,
    engines, # of this application, or a handle to another's
    affinity:bool=True, # False: any engine, whatever it has
    at:tuple[str, int]|None=None, # host and port where it listens itself; None: it has Serve's proxies before it
) -> serve.Application:
    "The app before its engines."
    options = dict(max_ongoing_requests=10_000, ray_actor_options=dict(num_cpus=0), logging_config=QUIET,
                   graceful_shutdown_timeout_s=40., graceful_shutdown_wait_loop_s=.1) # the app lets requests end
    return serve.deployment(Ingress, name=INGRESS).options(**options).bind(settings, engines, affinity, at)

def application(
    settings:Settings,
    at:tuple[str, int]|None=None, # as for `ingress`
) -> serve.Application:
    "Ingress and engines."
    check(settings)
    if settings.hosts: raise Refused('hosts=1; a replica is one process')
    gpus = settings.tp if ray.is_initialized() and ray.cluster_resources().get('GPU') else 0
    scale = dict(num_replicas=settings.replicas)
    if settings.most_replicas > settings.replicas:
        scale = dict(autoscaling_config=dict(min_replicas=settings.replicas, max_replicas=settings.most_replicas,
                                             target_ongoing_requests=settings.rows))
    options = dict(max_ongoing_requests=4 * settings.rows, ray_actor_options=dict(num_cpus=1, num_gpus=gpus),
                   logging_config=QUIET, health_check_period_s=1., graceful_shutdown_timeout_s=30.,
                   max_constructor_retry_count=max(3, settings.replicas)) # of all together; longer and longer waits between
    return ingress(settings, serve.deployment(EngineReplica, name=ENGINE).options(**scale, **options).bind(settings), at=at)

def start_ray(settings:Settings) -> bool: # whether it was started for this
    "The cluster at RAY_ADDRESS, or one of this machine's own, without dashboard."
    programs = jax.config.jax_compilation_cache_dir
    if programs: os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', programs) # for replicas too
    if ray.is_initialized() or os.environ.get('RAY_ADDRESS'):
        ray.init(ignore_reinit_error=True)
        return False
    cpus = max(os.cpu_count() or 1, settings.replicas, settings.most_replicas)
    ray.init('local', num_cpus=cpus, include_dashboard=False, object_store_memory=128 << 20)
    return True

def why(said:str) -> str: # said: by Serve
    "Why it hasn't started: in the sentence with which an engine or the ingress refused to, if one did."
    app = serve.status().applications.get(APP)
    refused = re.search(r'Refused: (.+)', '\n'.join(d.message for d in app.deployments.values()) if app else '')
    return refused[1] if refused else f'Ray Serve could not start the server ({said})'

def check_gpus(settings:Settings, there:int): # of this machine; none: engines run on its CPUs
    needed = settings.tp * max(settings.replicas, settings.most_replicas)
    if 0 < there < needed:
        raise Refused(f'the replicas need {needed} GPUs, and this machine has {there}; lower --replicas, --most-replicas or --tp')

def run(settings:Settings, host:str, port:int):
    "Serves until it is told to stop."
    where = dict(state=settings.state, adapters=settings.adapters) # for processes that are started elsewhere
    settings = replace(settings, **{name: str(Path(path).absolute()) for name,path in where.items() if path})
    own = start_ray(settings)
    if own:
        check_gpus(settings, int(ray.cluster_resources().get('GPU', 0)))
        logging.getLogger('ray.serve').setLevel(logging.WARNING) # it would name an address where nobody listens
    signal.signal(signal.SIGTERM, signal.default_int_handler) # as Ctrl-C
    try:
        # On one machine the ingress listens itself: a proxy would only handle every token once more.
        serve.start(**dict(proxy_location='Disabled') if own else dict(http_options=dict(host=host, port=port)))
        serve.run(application(settings, (host, port) if own else None), name=APP, route_prefix='/')
        print(f'lorajax: {url_of(host, port)} answers, with {settings.replicas} replicas (Ctrl-C stops)', file=sys.stderr)
        while True: time.sleep(3600)
    except KeyboardInterrupt: pass
    except RuntimeError as e: raise Refused(why(str(e).splitlines()[0])) from None
    finally:
        serve.delete(APP) # what runs may end; a shutdown closes its connections
        if own: serve.shutdown() # others may have applications on a cluster that was there
        ray.shutdown()

def __getattr__(name): # `app` is made when it is asked for
    if name != 'app': raise AttributeError(name)
    return application(from_environment())
