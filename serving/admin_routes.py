"""Adapters at run time, compositions, rollouts, and what an operator looks at. Changes need an administrator."""
from __future__ import annotations
import time
from typing import Annotated, Any
from litestar import Request, Response, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from .errors import ApiError, documented
from .fleet import Fleet, unknown_adapter
from .guards import check_change
from .service import Service
from .watch import adapter_rows, rollout_rows, status as status_of

class LoadAdapter(Struct, forbid_unknown_fields=True):
    "vLLM's body, with `dtype` beside it."
    lora_name: str
    lora_path: str # a directory below the configured roots, or relative to one
    base_model_name: str | None = None # refused unless it is this base
    load_inplace: bool | None = None # a name that is taken always moves to the new version
    dtype: str | None = None # 'int8' keeps it in half the bytes

class UnloadAdapter(Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None # vLLM's number, without effect here

class Composition(Struct, forbid_unknown_fields=True):
    name: str
    weights: Annotated[dict[str, float], Meta(min_length=1)] # adapter -> weight; negative ones subtract

class StartRollout(Struct, forbid_unknown_fields=True):
    name: str # an adapter that serves
    lora_path: str # its new version
    watch_seconds: Annotated[float, Meta(ge=0)] | None = None # at each stage
    dtype: str | None = None

class Reason(Struct, forbid_unknown_fields=True):
    reason: str = ''

class Feedback(Struct, forbid_unknown_fields=True):
    request_id: str # the `id` of an answer
    score: Annotated[float, Meta(ge=0, le=1)] # 0 bad to 1 good

class Done(Struct):
    "What a change led to."
    message: str
    name: str = ''
    version: str = ''
    serves: bool = True # whether requests get this version now; False while its rollout watches

class Noted(Struct):
    message: str

def administrator(request:Request) -> str: # who, for the audit log
    key = request.state.key
    check_change(request.app.state.api_keys, key, request.client and request.client.host, request.headers)
    return key.name

CHANGE = dict(responses=documented(400, 401, 403, 404, 413, 500), status_code=200, tags=['Adapters'],
              dependencies={'actor': Provide(administrator, sync_to_thread=False)})
def service(request:Request) -> Service: return request.app.state.service

@post('/v1/load_lora_adapter', **CHANGE)
async def load_adapter(request:Request, data:JSONBody[LoadAdapter], actor:NamedDependency[str]) -> Done:
    "Makes an adapter available, or a new version of one: old requests finish on the old version."
    base = service(request).base.name
    if data.base_model_name not in (None, base):
        raise ApiError(400, f'this server serves the base {base}', param='base_model_name')
    version, _ = await service(request).fleet.load(data.lora_name, data.lora_path, data.dtype, actor)
    return Done(f"Success: LoRA adapter '{data.lora_name}' added successfully.", data.lora_name, version)

@post('/v1/unload_lora_adapter', **CHANGE)
async def unload_adapter(request:Request, data:JSONBody[UnloadAdapter], actor:NamedDependency[str]) -> Done:
    "Takes a name away; its memory goes with its last request."
    await service(request).fleet.unload(data.lora_name, actor)
    return Done(f"Success: LoRA adapter '{data.lora_name}' removed successfully.", data.lora_name, serves=False)

@post('/v1/lorajax/compositions', **CHANGE)
async def compose(request:Request, data:JSONBody[Composition], actor:NamedDependency[str]) -> Done:
    "Makes a weighted sum of adapters available, without new pages."
    version = await service(request).fleet.compose(data.name, data.weights, actor)
    return Done(f'{data.name} is a sum of {len(data.weights)} adapters', data.name, version)

@post('/v1/lorajax/rollouts', **CHANGE)
async def start_rollout(request:Request, data:JSONBody[StartRollout], actor:NamedDependency[str]) -> Done:
    "Gives a new version to 1 % of users, and to more as long as it does no worse."
    s = service(request)
    if data.name not in s.fleet.current.names: raise unknown_adapter(data.name, 'name')
    watch = s.settings.watch if data.watch_seconds is None else data.watch_seconds
    version, serves = await s.fleet.load(data.name, data.lora_path, data.dtype, actor, watch)
    return Done(f'{data.name} serves it already' if serves else f'{data.name} is at 1 %', data.name, version, serves)

def fleet_with(request:Request, name:str) -> Fleet:
    fleet = service(request).fleet
    if name not in fleet.current.names: raise unknown_adapter(name, 'name')
    return fleet

@post('/v1/lorajax/rollouts/{name:str}/promote', **CHANGE)
async def promote(request:Request, name:FromPath[str], actor:NamedDependency[str]) -> Done:
    "Ends a rollout with the new version for all."
    fleet = fleet_with(request, name)
    version = await fleet.change(fleet.registry.promote, name, actor=actor, now=time.time())
    return Done(f'{name} serves its new version', name, version)

@post('/v1/lorajax/rollouts/{name:str}/roll_back', **CHANGE)
async def roll_back(request:Request, name:FromPath[str], data:JSONBody[Reason], actor:NamedDependency[str]) -> Done:
    "Ends a rollout with the old version for all; without one, goes back to the version before."
    fleet = fleet_with(request, name)
    version = await fleet.change(fleet.registry.roll_back, name, actor, time.time(), data.reason)
    return Done(f'{name} serves its former version', name, version)

@post('/v1/lorajax/drain', **CHANGE)
async def drain(request:Request, actor:NamedDependency[str]) -> Noted:
    "Takes no new requests; those that run go on. `/ready` says no from here on."
    service(request).draining = True
    return Noted('the server is draining')

@post('/v1/lorajax/feedback', status_code=200, responses=documented(400, 401, 404, 413), tags=['Adapters'])
async def feedback(request:Request, data:JSONBody[Feedback]) -> Noted:
    "A user's opinion of an answer, the quality guard of rollouts."
    service(request).rate(data.request_id, data.score, request.state.key)
    return Noted('noted')

@get('/v1/lorajax/adapters', responses=documented(401), tags=['Adapters'])
async def adapters(request:Request) -> list[dict[str, Any]]:
    "Adapters with version, residency and use."
    return adapter_rows(service(request), request.state.key)

@get('/v1/lorajax/rollouts', responses=documented(401), tags=['Adapters'])
async def rollouts(request:Request) -> list[dict[str, Any]]:
    "Rollouts that are under way."
    return rollout_rows(service(request), request.state.key)

@get('/v1/lorajax/audit', responses=documented(400, 401, 403), dependencies=CHANGE['dependencies'], tags=['Adapters'])
async def audit(request:Request, actor:NamedDependency[str],
                limit:Annotated[int, QueryParameter(ge=1, le=10_000)]=100) -> list[dict[str, Any]]:
    "Who changed what, the newest first."
    fleet = service(request).fleet
    return [vars(a) for a in await fleet.in_thread(fleet.registry.audit, limit)]

@get('/v1/lorajax/status', responses=documented(401), tags=['Operation'])
async def status(request:Request) -> dict[str, Any]:
    "What the page shows."
    return status_of(service(request), request.state.key)

@get('/health', tags=['Operation'])
async def health() -> dict[str, str]:
    "Whether the process lives."
    return {'status': 'ok'}

@get('/ready', responses=documented(503), tags=['Operation'])
async def ready(request:Request) -> dict[str, str]:
    "Whether to send requests here."
    s = service(request)
    why = 'the engine has failed' if s.engine.failed else 'the server is draining' if s.draining else 'no engine answers'
    if not s.ready: raise ApiError(503, why, 'not_ready')
    return {'status': 'ready'}

@get('/metrics', tags=['Operation'])
async def metrics(request:Request) -> Response[bytes]:
    "For Prometheus."
    return Response(generate_latest(service(request).signals.registry), media_type=CONTENT_TYPE_LATEST)
