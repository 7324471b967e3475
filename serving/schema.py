"""Bodies of OpenAI's API as msgspec types, and what a request means as `Sampling`. Unknown fields are refused by name."""
from __future__ import annotations
from typing import Annotated, Any, Literal
from msgspec import UNSET, Meta, Struct, UnsetType
from lorajax.core import Refused, ResponseFormat, Sampling, quoted

Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
MAX_PROMPTS = 64 # in one completions request

class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None # pads the chunks of OpenAI's own service; without effect here

class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    "What chat and completions have in common. Fields after `user` are extensions, named as vLLM names them."
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None # sticky in rollouts and routing
    session: str | None = None # of a conversation, for routing; by default the user's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = None # lower goes first
    timeout: float | None = None # seconds until the request is given up
    # Known to OpenAI, without effect here: nothing is stored, and prefixes are cached by content.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

class ChatRequest(Asked):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Served with these values only; another would change the answer.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None

class CompletionRequest(Asked):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

def given(**fields): return {k: v for k,v in fields.items() if v is not None}

def stop_texts(stop) -> tuple[str, ...]: return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

def biases(bias) -> dict[int, float]:
    if bad := [k for k in bias or () if not k.isdecimal() or len(k) > 10]:
        raise Refused(f'logit_bias has the key {quoted(bad[0])}; keys are token ids')
    return {int(k): v for k,v in (bias or {}).items()}

def format_of(given:dict|None) -> ResponseFormat|None:
    "OpenAI's `response_format`."
    if given is None or given == {'type': 'text'}: return None
    kind, inner = given.get('type'), given.get('json_schema')
    if kind == 'json_object' and given.keys() == {'type'}: return ResponseFormat('json_object')
    if kind == 'regex' and given.keys() == {'type', 'pattern'}: return ResponseFormat('regex', given['pattern'])
    if kind == 'json_schema' and given.keys() == {'type', 'json_schema'} and isinstance(inner, dict):
        if unknown := inner.keys() - {'name', 'description', 'schema', 'strict'}:
            raise Refused(f'response_format has the field {quoted(sorted(unknown)[0])} in json_schema, which is not known')
        return ResponseFormat('json_schema', inner.get('schema', {}))
    raise Refused(f'response_format={quoted(given)}; it must be {{"type": "text"}}, {{"type": "json_object"}}, '
                  '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "regex", "pattern": ...}')

def common(r:Asked) -> dict:
    "The fields of `Sampling` that both kinds of requests give. OpenAI's default temperature is 1."
    if r.stream_options is not None and not r.stream:
        raise Refused('stream_options is only for stream=true; leave it out')
    chosen = given(top_p=r.top_p, n=r.n, seed=r.seed, presence_penalty=r.presence_penalty, min_p=r.min_p,
                   frequency_penalty=r.frequency_penalty, top_k=r.top_k, repetition_penalty=r.repetition_penalty,
                   stop_token_ids=r.stop_token_ids, include_stop=r.include_stop_str_in_output, ignore_eos=r.ignore_eos)
    if r.top_k == -1: chosen['top_k'] = 0 # vLLM's word for all
    return chosen | dict(temperature=1. if r.temperature is None else r.temperature, stop=stop_texts(r.stop),
                         logit_bias=biases(r.logit_bias), response_format=format_of(r.response_format))

ONLY = dict(tools=([],), tool_choice=('none', 'auto'), parallel_tool_calls=(True, False), functions=([],),
            function_call=('none', 'auto'), modalities=(['text'],), verbosity=('medium',))
NOT_SERVED = ('audio', 'prediction', 'web_search_options', 'reasoning_effort', *ONLY)

def refuse_unserved(r:ChatRequest):
    for name in NOT_SERVED:
        value = getattr(r, name)
        if value is not None and value not in ONLY.get(name, ()):
            raise Refused(f'{name}={quoted(value)} is not served here; leave it out')

def chat_sampling(r:ChatRequest, room:int) -> Sampling: # room: tokens that the context has left after the prompt
    refuse_unserved(r)
    if r.max_tokens is not None and r.max_completion_tokens is not None and r.max_tokens != r.max_completion_tokens:
        raise Refused('max_tokens and max_completion_tokens differ; give one of them')
    if r.top_logprobs is not None and not r.logprobs: raise Refused('top_logprobs needs logprobs=true')
    most = r.max_tokens if r.max_completion_tokens is None else r.max_completion_tokens
    return Sampling(max_new_tokens=max(room, 1) if most is None else most,
                    logprobs=(r.top_logprobs or 0) if r.logprobs else None, **common(r))

def completion_sampling(r:CompletionRequest) -> Sampling:
    if r.suffix: raise Refused('suffix is not served here; leave it out')
    if r.best_of is not None and r.best_of != (r.n or 1): raise Refused('best_of is served only when it equals n; leave it out')
    if r.logprobs is not None and not 0 <= r.logprobs <= 5: raise Refused(f'logprobs={r.logprobs}; it must be from 0 to 5')
    return Sampling(max_new_tokens=16 if r.max_tokens is None else r.max_tokens, echo=bool(r.echo),
                    logprobs=r.logprobs, **common(r))

ROLES = dict(system='system', developer='system', user='user', assistant='assistant')

def text_of(content) -> str:
    "A message's content: a string, or parts of text."
    if isinstance(content, str): return content
    parts = content if isinstance(content, list) else [None]
    if all(isinstance(p, dict) and p.get('type') == 'text' and isinstance(p.get('text'), str) for p in parts):
        return ''.join(p['text'] for p in parts)
    raise Refused('a message must have text content: a string, or a list of {"type": "text", "text": ...}')

def messages_of(r:ChatRequest) -> list[dict]:
    "Chat messages as the template takes them."
    for m in r.messages:
        if not isinstance(m.get('role'), str) or m['role'] not in ROLES:
            raise Refused(f'a message has role {quoted(m.get("role"))}; it must be {", ".join(ROLES)}')
        if unknown := {k for k,v in m.items() if v is not None} - {'role', 'content', 'name'}:
            raise Refused(f'a message has the field {quoted(sorted(unknown)[0])}, which is not served here; leave it out')
    return [dict(role=ROLES[m['role']], content=text_of(m.get('content'))) for m in r.messages]

def prompts_of(r:CompletionRequest) -> list:
    "The prompts of a completions request: texts or lists of token ids."
    p = r.prompt
    if isinstance(p, str) or p and all(type(x) is int for x in p): return [p]
    def ids(x): return isinstance(x, list) and x and all(type(t) is int for t in x)
    if p and (all(isinstance(x, str) for x in p) or all(map(ids, p))):
        if len(p) <= MAX_PROMPTS: return p
        raise Refused(f'there are {len(p)} prompts; send at most {MAX_PROMPTS} in one request')
    raise Refused('prompt must be a string, a list of strings, a list of token ids, or a list of such lists, and not empty')

class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

def usage_of(prompt:int, completion:int, cached:int) -> Usage:
    return Usage(prompt, completion, prompt + completion, dict(cached_tokens=cached))

class Note(Struct, omit_defaults=True):
    "What lorajax did beside answering."
    version: str | None = None # identity of base and adapter that answered
    layer: str | None = None # of the router, when the model was 'auto'
    why: str | None = None # the router's reason
    fallback: str | None = None # why the base answered in place of the adapter
    cached: bool = False # the answer was kept from an earlier, similar prompt

class Choice(Struct, kw_only=True):
    index: int
    finish_reason: str | None
    message: dict[str, Any] | UnsetType = UNSET # chat
    delta: dict[str, Any] | UnsetType = UNSET # chat, streamed
    text: str | UnsetType = UNSET # completions
    logprobs: Any = None

class Answer(Struct, kw_only=True):
    "A chat completion, a completion, or a chunk of either."
    id: str
    object: Literal['chat.completion', 'chat.completion.chunk', 'text_completion']
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    lorajax: Note | UnsetType = UNSET

class ModelCard(Struct):
    "A base, an adapter or a composition, or the router's word."
    id: str
    created: int
    owned_by: str
    object: str = 'model'
    parent: str | None = None
    root: str | None = None
    version: str | None = None
    max_model_len: int | None = None

class ModelList(Struct):
    data: list[ModelCard]
    object: str = 'list'
