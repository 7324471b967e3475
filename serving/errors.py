"""Errors in OpenAI's shape, for every way in which a request can fail."""
from __future__ import annotations
import difflib, logging, re
import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from lorajax.core import Refused, quoted

log = logging.getLogger('lorajax.serving')

class ErrorDetail(msgspec.Struct):
    "What went wrong, as OpenAI's clients read it."
    message: str
    type: str
    param: str | None = None
    code: str | None = None

class ErrorBody(msgspec.Struct):
    error: ErrorDetail

class ApiError(Exception):
    "An answer other than the one asked for."
    def __init__(self, status:int, message:str, code:str|None=None, param:str|None=None, headers:dict|None=None):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers or {}

    @property
    def body(self) -> ErrorBody: return ErrorBody(ErrorDetail(self.message, kind_of(self.status), self.param, self.code))

KINDS = {401: 'authentication_error', 403: 'permission_error', 404: 'not_found_error', 429: 'rate_limit_error'}

def kind_of(status:int) -> str:
    return KINDS.get(status) or ('server_error' if status >= 500 else 'invalid_request_error')

SAID = { # by Litestar, in words of its own
    404: 'there is no such route; the API lies under /v1', 405: 'this route does not take that method',
    413: 'the body is too large'}

def from_http(e:HTTPException) -> ApiError:
    "An exception of the framework."
    extra = e.extra if isinstance(e.extra, list) else []
    told = '; '.join(str(x.get('message', '')) for x in extra if isinstance(x, dict))
    fields = [x.get('key') for x in extra if isinstance(x, dict)]
    message = SAID.get(e.status_code) or (f'{e.detail}: {told}' if told else e.detail)
    return ApiError(e.status_code, message, param=fields[0] if fields else None, headers=dict(e.headers or {}))

def answer(request:Request, e:Exception) -> Response:
    "The exception handler of the app."
    if isinstance(e, HTTPException): e = from_http(e)
    elif isinstance(e, Refused): e = ApiError(400, str(e).replace('max_new_tokens', 'max_tokens')) # as clients call it
    elif not isinstance(e, ApiError):
        log.exception('request failed', exc_info=e, extra=dict(path=request.scope['path']))
        e = ApiError(500, 'the server failed on this request; its log has the reason', code='internal_error')
    return Response(e.body, status_code=e.status, headers=e.headers, media_type='application/json')

def wrong_body(said:str, wanted:type) -> ApiError:
    "What msgspec says of a body, with the field at fault, and what a misspelt one may have meant."
    what, _, where = said.partition(' - at `$.')
    where = where.removesuffix('`')
    unknown = re.fullmatch('Object contains unknown field `(.*)`', what)
    if not unknown: return ApiError(400, f'{what} for {where}' if where else what, param=where or None)
    field = unknown[1]
    near = [] if where else difflib.get_close_matches(field, wanted.__struct_fields__, 1)
    remedy = f'did you mean {near[0]}?' if near else 'leave it out'
    return ApiError(400, f'{where or "the body"} has the unknown field {quoted(field)}; {remedy}', param=field[:120])

class StrictRequest(Request):
    "Reads a JSON body straight into the type of its route, without conversions such as of '7' to 7."
    async def json(self):
        data = self.route_handler.parsed_data_field
        try: return msgspec.json.decode(await self.body() or b'null', type=data.annotation if data else object)
        except msgspec.ValidationError as e: raise wrong_body(str(e), data.annotation) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            why = 'it is nested too deep' if isinstance(e, RecursionError) else e
            raise ApiError(400, f'the body is not readable as JSON: {why}') from None

def documented(*statuses:int) -> dict[int, ResponseSpec]:
    "The errors of a route, for its OpenAPI description."
    return {s: ResponseSpec(ErrorBody, description=kind_of(s), generate_examples=False) for s in statuses}
