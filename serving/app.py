"""The Litestar app. `litestar --app serving.app:app run` and `lorajax serve` start it."""
from __future__ import annotations
import json, logging, re, secrets, sys, time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.middleware import ASGIMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from lorajax import __version__
from lorajax.base import load_base
from lorajax.core import Refused, needs
from lorajax.engine import Config, Engine
from lorajax.lifecycle import Follower, ModelFolder
from lorajax.registry import Registry
from lorajax.router import Router
from lorajax.shared_state import SharedMemory, SharedRouter
from . import admin_routes, openai_routes
from .errors import ApiError, StrictRequest, answer
from .guards import Keys, Limits, read_keys
from .semantic_cache import SemanticCache
from .service import Service
from .settings import Settings, from_environment
from .signals import Signals

log = logging.getLogger('lorajax.serving')
HERE = Path(__file__).parent
OPEN = ('/', '/page.js', '/page.css', '/health', '/ready', '/metrics', '/schema') # need no key
EXAMPLES = Path('examples/adapters')

class JsonLines(logging.Formatter):
    "One JSON object a line. Prompts and answers are never among its fields."
    PLAIN = frozenset(vars(logging.makeLogRecord({})))
    def format(self, record):
        facts = dict(time=round(record.created, 3), level=record.levelname.lower(), message=record.getMessage())
        facts |= {k: v for k,v in vars(record).items() if k not in self.PLAIN and isinstance(v, (str, int, float, bool, type(None)))}
        if record.exc_info: facts['error'] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False)

class Entrance(ASGIMiddleware):
    "Gives every request an id and a key, and writes one line when it ends."
    async def handle(self, scope, receive, send, next_app):
        headers = {k.decode('latin-1'): v.decode('latin-1') for k,v in scope['headers']}
        given, start, status = headers.get('x-request-id', ''), time.perf_counter(), 500
        id = given if re.fullmatch(r'[\w.-]{1,64}', given, re.ASCII) else secrets.token_hex(12)
        state, path = scope.setdefault('state', {}), scope['path']
        state['id'] = id
        async def send_with_id(message):
            nonlocal status
            if message['type'] == 'http.response.start':
                status = message['status']
                message['headers'] = [*message['headers'], (b'x-request-id', id.encode())]
            await send(message)
        try:
            app = scope['litestar_app']
            if path not in OPEN and not path.startswith('/schema'): state['key'] = app.state.api_keys.of(headers.get('authorization'))
            await next_app(scope, receive, send_with_id)
        except ApiError as e: await answer(Request(scope), e).to_asgi_response(app, Request(scope))(scope, receive, send_with_id)
        finally:
            if path not in ('/health', '/ready', '/metrics'):
                log.info('%s %s', scope['method'], path, extra=dict(
                    id=id, status=status, seconds=round(time.perf_counter() - start, 4), key=getattr(state.get('key'), 'name', None)))

PAGE = {'content-security-policy': "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
                                   "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        'x-content-type-options': 'nosniff', 'referrer-policy': 'no-referrer'}

def page(path:str, file:str, kind:str):
    @get(path, include_in_schema=False, media_type=kind, sync_to_thread=False)
    def handler() -> Response[str]: return Response((HERE / file).read_text('utf-8'), media_type=kind, headers=PAGE)
    return handler

def router_of(settings:Settings) -> SharedRouter|None:
    "The router that answers `auto`."
    folder = settings.router or (str(EXAMPLES.parent / 'router') if Path(settings.adapters) == EXAMPLES else '')
    if not folder or not (settings.router or Path(folder).is_dir()): return None
    shared = SharedMemory(settings.redis) if settings.redis else None
    return SharedRouter(Router(ModelFolder(folder).current()), shared)

def engine_of(settings:Settings, progress:Callable) -> Engine:
    base = load_base(settings.model, settings.dtype or None)
    config = Config(rows=settings.rows, slots=settings.slots, max_rank=settings.max_rank, outside=settings.outside, max_len=settings.max_len,
                    memory=settings.memory or None, folder=Path(settings.state) / 'images')
    return Engine(base, config, progress)

def create_app(settings:Settings|None=None, progress:Callable=lambda shapes: shapes) -> Litestar:
    "An app that makes its engine when it starts and closes it when it stops."
    settings = settings or from_environment()
    keys = Keys(read_keys(settings.api_keys) if settings.api_keys else [], settings.admin_key)

    @asynccontextmanager
    async def lifespan(app:Litestar):
        Path(settings.state).mkdir(parents=True, exist_ok=True)
        engine, signals = engine_of(settings, progress), Signals()
        registry = Registry(Path(settings.state) / 'registry.sqlite')
        app.state.service = service = Service(settings, engine.base, engine, registry, router_of(settings), signals)
        app.state.limits = Limits(settings.redis)
        app.state.cache = SemanticCache(settings.cache, settings.cache_ttl) if settings.cache else None
        try:
            await service.start()
            log.info('ready: %s with %d adapters', engine.base.name, len(service.current.names))
            yield
        finally:
            await service.close()
            await app.state.limits.close()

    handlers = [getattr(m, n) for m, names in (
        (openai_routes, 'chat_completions completions models model embeddings'),
        (admin_routes, 'load_adapter unload_adapter compose start_rollout promote roll_back drain feedback adapters rollouts audit status '
                       'health ready metrics')) for n in names.split()]
    handlers += [page('/', 'page.html', 'text/html'), page('/page.js', 'page.js', 'text/javascript'), page('/page.css', 'page.css', 'text/css')]
    plugins = []
    if settings.otel:
        otel = needs('litestar.plugins.opentelemetry', 'otel')
        plugins.append(otel.OpenTelemetryPlugin(otel.OpenTelemetryConfig()))
    return Litestar(
        handlers, request_class=StrictRequest, lifespan=[lifespan], middleware=[Entrance()], exception_handlers={Exception: answer}, plugins=plugins,
        request_max_body_size=settings.max_body, state=State(dict(api_keys=keys)), logging_config=None,
        openapi_config=OpenAPIConfig('lorajax', __version__, description='Multi-LoRA serving with the API of OpenAI.',
                                     render_plugins=[JsonRenderPlugin()]))

def set_up_logs(level:str='info'):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger('lorajax').handlers[:] = [handler]
    logging.getLogger('lorajax').setLevel(level.upper())

def __getattr__(name): # `app` is made when it is asked for, not when a test imports the module
    if name != 'app': raise AttributeError(name)
    set_up_logs()
    return create_app()
