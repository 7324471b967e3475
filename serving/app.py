"""The Litestar app. `lorajax serve` and `litestar --app serving.app:app run` start it."""
from __future__ import annotations
import fcntl, itertools, json, logging, re, secrets, sys, time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
import jax
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.middleware import ASGIMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from lorajax import __version__
from lorajax.base import Base, load_base
from lorajax.core import Refused, needs
from lorajax.engine import Config, Engine
from lorajax.follow import follow
from lorajax.hosts import leave_hosts
from lorajax.lifecycle import Follower, ModelFolder
from lorajax.registry import Registry
from lorajax.router import Router
from lorajax.shared_state import SharedMemory, SharedRouter
from . import admin_routes as admin, openai_routes as openai
from .errors import ApiError, StrictRequest, answer
from .fleet import Fleet
from .guards import Keys, Limits, read_keys
from .semantic_cache import SemanticCache
from .service import Service
from .settings import Settings, check, from_environment
from .signals import Signals
from .watch import serving

log = logging.getLogger('lorajax.serving')
HERE = Path(__file__).parent
OPEN = ('/', '/page.js', '/page.css', '/health', '/ready', '/metrics') # need no key, nor does the schema
QUIET = ('/health', '/ready', '/metrics') # asked every few seconds, and not logged
EXAMPLES = Path('examples')

class JsonLines(logging.Formatter):
    "One JSON object a line. Prompts are among its fields only if the settings say so; answers never."
    PLAIN = frozenset(vars(logging.makeLogRecord({})))
    def format(self, record):
        facts = dict(time=round(record.created, 3), level=record.levelname.lower(), message=record.getMessage())
        facts |= {k: v for k,v in vars(record).items() if k not in self.PLAIN and isinstance(v, str | int | float | None)}
        if record.exc_info: facts['error'] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False)

def set_up_logs(level:str): # one of `settings.LEVELS`
    handler, logger = logging.StreamHandler(sys.__stderr__), logging.getLogger('lorajax') # sys.stderr may be Ray Serve's own
    handler.setFormatter(JsonLines())
    logger.handlers[:], logger.propagate = [handler], False # or a handler of the root says it all again
    logger.setLevel(level.upper())

class Entrance(ASGIMiddleware):
    "Gives every request an id and a key, closes what it leaves open, and writes one line when it ends."
    async def handle(self, scope, receive, send, next_app):
        headers = {k.decode('latin-1'): v.decode('latin-1') for k,v in scope['headers']}
        app, path, given, start = scope['litestar_app'], scope['path'], headers.get('x-request-id', ''), time.perf_counter()
        id = given if re.fullmatch(r'[\w.-]{1,64}', given, re.ASCII) else secrets.token_hex(12)
        state = scope.setdefault('state', {})
        state |= dict(id=id, closing=[], status=500)
        async def send_with_id(message):
            if message['type'] == 'http.response.start':
                state['status'] = message['status']
                message['headers'] = [*message['headers'], (b'x-request-id', id.encode())]
            await send(message)
        try:
            if path not in OPEN and not path.startswith('/schema'):
                state['key'] = app.state.api_keys.of(headers.get('authorization'))
            await next_app(scope, receive, send_with_id)
        except ApiError as e: # of the key; others are answered further in
            await answer(request := Request(scope), e).to_asgi_response(None, request)(scope, receive, send_with_id)
        finally:
            for left in state['closing']: left.close()
            facts = dict(id=id, status=state['status'], seconds=round(time.perf_counter() - start, 4),
                         key=getattr(state.get('key'), 'name', None))
            if path not in QUIET: log.info('%s %s', scope['method'], path, extra=facts)

PAGE = {'content-security-policy': "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                                   "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        'x-content-type-options': 'nosniff', 'referrer-policy': 'no-referrer'}

def page(path:str, file:str, kind:str):
    @get(path, include_in_schema=False, media_type=kind, sync_to_thread=False)
    def handler() -> Response[str]: return Response((HERE / file).read_text('utf-8'), media_type=kind, headers=PAGE)
    return handler

HANDLERS = [
    openai.chat_completions, openai.completions, openai.models, openai.model, openai.embeddings, admin.load_adapter,
    admin.unload_adapter, admin.compose, admin.start_rollout, admin.promote, admin.roll_back, admin.drain, admin.feedback,
    admin.adapters, admin.rollouts, admin.audit, admin.status, admin.health, admin.ready, admin.metrics,
    page('/', 'page.html', 'text/html'), page('/page.js', 'page.js', 'text/javascript'), page('/page.css', 'page.css', 'text/css')]

def router_of(settings:Settings, stack:ExitStack) -> SharedRouter|None:
    "The router that answers `auto`; its model is that of its folder, whoever retrains it."
    folder = settings.router
    if not folder and Path(settings.adapters) == EXAMPLES / 'adapters' and (EXAMPLES / 'router').is_dir():
        folder = EXAMPLES / 'router'
    if not folder: return None
    follower = Follower(router := Router(), ModelFolder(folder))
    stack.callback(follower.close)
    shared = SharedMemory(settings.redis) if settings.redis else None
    if shared: shared.announce(router.model.version)
    return SharedRouter(router, shared, announced=follower.announced)

def images_of(settings:Settings, base:Base, stack:ExitStack) -> Path:
    "A directory for images that no other process uses: processes share the registry, and each has its own engine."
    for i in itertools.count():
        divided = f'-tp{base.split.n}' if base.split.n > 1 else ''
        folder = Path(settings.state) / f'images-{base.fingerprint[:12]}-{base.dtype}{divided}-{i}'
        folder.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(open(folder / '.lock', 'w'))
        try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError: continue
        for unfinished in folder.glob('.*.*'): unfinished.unlink() # of a process that was killed
        return folder

def config_of(settings:Settings, folder:Path|None=None) -> Config:
    return Config(rows=settings.rows, slots=settings.slots, max_rank=settings.max_rank, outside=settings.outside,
                  max_len=settings.max_len, memory=settings.memory or None, folder=folder)

def base_of(settings:Settings) -> Base: return load_base(settings.model, settings.dtype or None, mesh=settings.tp)

def follow_first(settings:Settings, progress:Callable):
    "What a host other than the first does, until the first one stops."
    check(replace(settings, adapters='', roots='')) # which the first has
    follow(base_of(settings), config_of(settings), progress)

def fleet_of(settings:Settings, progress:Callable, stack:ExitStack) -> Fleet:
    "An engine of this process, and a registry that others may share."
    base = base_of(settings)
    engine = stack.enter_context(Engine(base, config_of(settings, images_of(settings, base, stack)), progress))
    return Fleet(settings, base, engine, stack.enter_context(Registry(Path(settings.state) / 'registry.sqlite')))

@asynccontextmanager
async def alone(settings:Settings, progress:Callable) -> AsyncIterator[Service]:
    "A service with an engine of its own."
    with ExitStack() as stack:
        if settings.hosts: stack.callback(leave_hosts)
        fleet = fleet_of(settings, progress, stack)
        yield Service(settings, fleet.base, fleet.engine, fleet, router_of(settings, stack), Signals())

def create_app(
    settings:Settings|None=None, # None: those of the environment
    progress:Callable=lambda shapes: shapes, # wraps the iteration over the programs to compile
    made:Callable[[Settings, Callable], AbstractAsyncContextManager[Service]]=alone,
    within:Sequence[Callable[[Litestar], AbstractAsyncContextManager]]=(), # entered when it is ready, left before it stops
) -> Litestar:
    "An app that makes its service when it starts and closes it when it stops."
    check(settings := settings or from_environment())
    if made is alone and max(settings.replicas, settings.most_replicas) > 1:
        raise Refused(f'replicas={settings.replicas}, most_replicas={settings.most_replicas}; more than one are started by '
                      '`lorajax serve --ray`')
    if settings.hosts and jax.process_count() == 1:
        raise Refused('hosts=1, and this process is the only one; several are started by `lorajax serve --hosts`')
    keys = Keys(read_keys(settings.api_keys) if settings.api_keys else [], settings.admin_key)

    @asynccontextmanager
    async def lifespan(app:Litestar):
        async with AsyncExitStack() as stack:
            try:
                app.state.service = service = await stack.enter_async_context(made(settings, progress))
                app.state.limits = Limits(settings.redis)
                stack.push_async_callback(app.state.limits.close)
                app.state.cache = SemanticCache(settings.cache, settings.cache_ttl) if settings.cache else None
                await stack.enter_async_context(serving(service))
            except Refused as e:
                app.state.refused = str(e) # for whoever started the app
                raise
            log.info('ready: %s with %d adapters', service.base.name, len(service.fleet.current.names))
            yield

    plugins = []
    if settings.otel:
        needs('opentelemetry.instrumentation.asgi', 'otel')
        otel = needs('litestar.plugins.opentelemetry', 'otel')
        plugins = [otel.OpenTelemetryPlugin(otel.OpenTelemetryConfig())]
    schema = OpenAPIConfig('lorajax', __version__, description='Multi-LoRA serving with the API of OpenAI.',
                           render_plugins=[JsonRenderPlugin()])
    return Litestar(HANDLERS, request_class=StrictRequest, lifespan=[lifespan, *within], middleware=[Entrance()], plugins=plugins,
                    exception_handlers={Exception: answer}, request_max_body_size=settings.max_body, logging_config=None,
                    state=State(dict(api_keys=keys)), openapi_config=schema)

def __getattr__(name): # `app` is made when it is asked for, not when a test imports the module
    if name != 'app': raise AttributeError(name)
    check(settings := from_environment())
    set_up_logs(settings.log_level)
    return create_app(settings)
