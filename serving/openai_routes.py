"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`, as OpenAI's clients expect them."""
from __future__ import annotations
import asyncio, logging, time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any
import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath, JSONBody
from litestar.response import Stream as StreamResponse
from lorajax.core import Refused, Sampling
from lorajax.engine import Scored, prompt_ids
from .errors import ApiError, documented
from .fleet import AUTO
from .guards import Key
from .schema import (Answer, ChatRequest, Choice, CompletionRequest, ModelCard, ModelList, Note, chat_sampling,
                     completion_sampling, messages_of, prompts_of, usage_of)
from .service import Ask, Chosen, Measured, Service, failed
from .watch import adapter_rows

log = logging.getLogger('lorajax.serving')
LEAST = -9999. # stands for a log-probability of minus infinity, which JSON cannot hold
FINISH = dict(stop='stop', length='length')

@dataclass(frozen=True)
class Style:
    "How chat and completions differ on the wire."
    prefix: str # of ids
    whole: str # `object` of an answer
    piece: str # `object` of a chunk
    chat: bool

CHAT = Style('chatcmpl-', 'chat.completion', 'chat.completion.chunk', True)
TEXT = Style('cmpl-', 'text_completion', 'text_completion', False)

def finite(x:float|None) -> float|None: return None if x is None else max(x, LEAST)

def shown(tokenizer, id:int) -> str: return tokenizer.token_bytes(id).decode('utf-8', 'replace')

def chat_logprobs(tokenizer, scored:list[Scored]) -> dict:
    def one(id, p): return dict(token=shown(tokenizer, id), logprob=finite(p), bytes=list(tokenizer.token_bytes(id)))
    content = [one(s.token, s.logprob) | dict(top_logprobs=[one(*t) for t in s.top]) for s in scored]
    return dict(content=content, refusal=None)

def text_logprobs(tokenizer, scored:list[Scored], alternatives:int, start:int) -> dict: # start: characters before them
    texts, offsets = [shown(tokenizer, s.token) for s in scored], []
    for t in texts:
        offsets.append(start)
        start += len(t)
    top = [None if s.logprob is None else {shown(tokenizer, i): finite(p) for i,p in s.top} for s in scored]
    return dict(tokens=texts, token_logprobs=[finite(s.logprob) for s in scored], text_offset=offsets,
                top_logprobs=top if alternatives else None)

@dataclass(frozen=True)
class Job:
    "A request with everything that its answers need."
    service: Service
    style: Style
    created: int
    asks: tuple[Ask, ...] # one a prompt; the first one's id is the answer's
    lengths: tuple[int, ...] # tokens of each prompt
    chosen: Chosen
    user: str|None # as the client calls whom it asks for
    usage: bool # whether a stream ends with it

    @property
    def id(self) -> str: return self.asks[0].id
    @property
    def sampling(self) -> Sampling: return self.asks[0].sampling

    def answer(self, chosen:Chosen, choices:list[Choice], kind:str, **more) -> Answer:
        note = Note(chosen.version, chosen.layer, chosen.why, chosen.fallback)
        return Answer(id=self.id, object=kind, created=self.created, model=chosen.name, choices=choices, lorajax=note,
                      system_fingerprint=f'lorajax-{self.service.base.fingerprint[:12]}', **more)

    def echoed(self, i:int) -> str: # the text of a prompt, if it is to be in the answer
        if not self.sampling.echo: return ''
        prompt = self.asks[i].prompt
        return prompt if isinstance(prompt, str) else self.service.base.tokenizer.decode(prompt)

    def logprobs(self, scored:list[Scored], start:int) -> dict|None:
        if self.sampling.logprobs is None or not scored: return None
        tokenizer = self.service.base.tokenizer
        return (chat_logprobs(tokenizer, scored) if self.style.chat else
                text_logprobs(tokenizer, scored, self.sampling.logprobs, start))

async def begin(job:Job, closing:list) -> list[Measured]: # closing: gets what is to be closed, whatever happens
    "Everything submitted; if one prompt is refused, none goes on."
    job.service.check_room(len(job.asks) * job.sampling.n)
    async def one(ask):
        closing.append(measured := await job.service.answer(ask, job.chosen))
        return measured
    async with asyncio.TaskGroup() as group: tasks = [group.create_task(one(ask)) for ask in job.asks]
    return [t.result() for t in tasks]

def spokesman(begun:list[Measured]) -> Chosen: # who is named as having answered; a fallback of one prompt is told for all
    return next((m.chosen for m in begun if m.chosen.fallback), begun[0].chosen)

async def collected(job:Job, i:int, events:Measured) -> tuple[list[Choice], int]: # and the tokens generated
    "The answers to one prompt."
    n, generated = job.sampling.n, 0
    texts, scored, ends = [job.echoed(i)] * n, [[] for _ in range(n)], [None] * n
    async for e in events:
        if error := failed(e): raise error
        texts[e.index] += e.text
        scored[e.index] += [*e.prompt, *([e.scored] if e.scored else [])]
        generated += e.scored is not None
        ends[e.index] = e.finish or ends[e.index]
    def choice(j):
        told = dict(index=i * n + j, finish_reason=FINISH.get(ends[j]), logprobs=job.logprobs(scored[j], 0))
        if not job.style.chat: return Choice(**told, text=texts[j])
        return Choice(**told, message=dict(role='assistant', content=texts[j], refusal=None))
    return [choice(j) for j in range(n)], generated

async def whole(job:Job, closing:list) -> Answer:
    "An answer in one piece."
    begun = await begin(job, closing)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collected(job, i, events)) for i, events in enumerate(begun)]
    found = [t.result() for t in tasks]
    usage = usage_of(sum(job.lengths), sum(n for _,n in found), sum(m.stream.cached for m in begun))
    return job.answer(spokesman(begun), [c for choices,_ in found for c in choices], job.style.whole, usage=usage)

def sse(body) -> bytes: return b'data: ' + msgspec.json.encode(body) + b'\n\n'

async def merged(begun:list[Measured]) -> AsyncIterator[tuple]: # (which prompt, event)
    "The events of several prompts as they come."
    news, left = asyncio.Queue(64), len(begun)
    async def follow(i, events):
        try:
            async for e in events: await news.put((i, e))
            await news.put((i, None))
        except Exception as e: await news.put((i, e))
    tasks = [asyncio.create_task(follow(i, events)) for i, events in enumerate(begun)]
    try:
        while left:
            i, e = await news.get()
            if isinstance(e, Exception): raise e
            if e is None: left -= 1
            else: yield i, e
    finally:
        for t in tasks: t.cancel()

def piece(job:Job, i:int, e, first:bool, start:int) -> Choice|None: # None: there is nothing to tell
    "One chunk of an answer. start: characters of it that were sent before."
    finish, text = FINISH.get(e.finish), (job.echoed(i) if first else '') + e.text
    scored = [*e.prompt, *([e.scored] if e.scored else [])]
    if not (first or text or finish or job.sampling.logprobs is not None): return None
    told = dict(index=i * job.sampling.n + e.index, finish_reason=finish, logprobs=job.logprobs(scored, start))
    if not job.style.chat: return Choice(**told, text=text)
    return Choice(**told, delta=dict(role='assistant', content=text) if first else dict(content=text) if text else {})

async def pieces(job:Job, begun:list[Measured]) -> AsyncIterator[bytes]:
    "An answer as server-sent events. An error after the first byte is an event too, and no end follows it."
    sent, generated, chosen = {}, 0, spokesman(begun) # (prompt, answer) -> characters
    extra = dict(usage=None) if job.usage else {}
    try:
        async for i, e in merged(begun):
            if error := failed(e): raise error
            generated += e.scored is not None
            start = sent.get((i, e.index))
            choice = piece(job, i, e, start is None, start or 0)
            sent[i, e.index] = (start or 0) + len(e.text) + (len(job.echoed(i)) if start is None else 0)
            if choice: yield sse(job.answer(chosen, [choice], job.style.piece, **extra))
        if job.usage:
            usage = usage_of(sum(job.lengths), generated, sum(m.stream.cached for m in begun))
            yield sse(job.answer(chosen, [], job.style.piece, usage=usage))
        yield b'data: [DONE]\n\n'
    except ApiError as e: yield sse(e.body)
    except Exception:
        log.exception('a stream failed', extra=dict(id=job.id))
        yield sse(ApiError(500, 'the stream failed; the log of the server has the reason', 'internal_error').body)

async def or_gone(request:Request, answering:Awaitable) -> Any:
    "The answer, given up when the client goes."
    async def gone():
        while (await request.receive())['type'] != 'http.disconnect': pass
    answer, left = asyncio.ensure_future(answering), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done(): return answer.result()
        raise ApiError(499, 'the client went away', 'client_closed_request')
    except BaseExceptionGroup as group: raise group.exceptions[0] from None # of several prompts that failed
    finally:
        answer.cancel(), left.cancel()
        await asyncio.gather(answer, left, return_exceptions=True)

def check_context(service:Service, length:int, most:int):
    if length + most <= service.max_len and length < service.max_len: return
    raise ApiError(400, f'the prompt has {length} tokens and {most} more are asked for; the context has {service.max_len}',
                   'context_length_exceeded', 'messages')

def newest(service:Service, prompt) -> str: # what the router looks at
    if isinstance(prompt, str): return prompt
    if isinstance(prompt[0], int): return service.base.tokenizer.decode(prompt)
    return next((m['content'] for m in reversed(prompt) if m['role'] == 'user'), '')

async def job_of(service:Service, key:Key, r:ChatRequest|CompletionRequest, id:str) -> Job:
    "A request, checked, and with somebody to answer it."
    style, user = (CHAT if isinstance(r, ChatRequest) else TEXT), r.user or id
    if r.model != AUTO: service.check_known(r.model, key) # the first thing to be said
    prompts = [messages_of(r)] if style.chat else prompts_of(r)
    if style.chat and service.base.tokenizer.template is None:
        raise ApiError(400, f'the base {service.base.name} has no chat template; use /v1/completions', param='messages')
    if r.timeout is not None and not r.timeout > 0:
        raise Refused(f'timeout={r.timeout}; it must be a number of seconds above 0')
    if service.settings.log_prompts: log.info('prompt', extra=dict(id=id, prompt=repr(prompts)))
    lengths = await asyncio.to_thread(lambda: tuple(len(prompt_ids(service.base, p)[0]) for p in prompts))
    sampling = chat_sampling(r, service.max_len - max(lengths)) if style.chat else completion_sampling(r)
    for n in lengths: check_context(service, n, sampling.max_new_tokens)
    if r.model != AUTO: chosen = service.choose(r.model, key, user)
    else: chosen = await service.route(newest(service, prompts[0]), lengths[0], key, r.user, r.session, user)
    id = style.prefix + id
    asks = tuple(Ask(p, sampling, f'{id}.{i}' if i else id, key.name, r.timeout, r.priority or 0, bool(r.stream))
                 for i, p in enumerate(prompts))
    usage = bool(r.stream_options and r.stream_options.include_usage)
    return Job(service, style, int(time.time()), asks, lengths, chosen, r.user, usage)

def headers_of(chosen:Chosen) -> dict[str, str]:
    told = dict(model=chosen.name, version=chosen.version, layer=chosen.layer, fallback=chosen.fallback)
    def plain(text): return ''.join(c if ' ' <= c <= '~' else '?' for c in text[:200]) # what a header may hold
    return {f'x-lorajax-{k}': plain(v) for k,v in told.items() if v}

async def respond(request:Request, r:ChatRequest|CompletionRequest) -> Response:
    "The answer to a request: from the cache, in pieces, or whole."
    state, key = request.app.state, request.state.key
    await state.limits.check(key)
    job = await job_of(state.service, key, r, request.state.id)
    kept = await state.cache.find(job, key) if state.cache and not r.stream else None
    if kept: return Response(kept, headers=headers_of(job.chosen) | {'x-lorajax-cache': 'hit'})
    closing = request.state.closing
    if r.stream:
        begun = await or_gone(request, begin(job, closing))
        return StreamResponse(pieces(job, begun), media_type='text/event-stream',
                              headers=headers_of(spokesman(begun)) | {'cache-control': 'no-cache', 'x-accel-buffering': 'no'})
    answer = await or_gone(request, whole(job, closing))
    if state.cache: await state.cache.keep(job, key, answer)
    return Response(answer, headers=headers_of(spokesman(closing)))

ASKING = documented(400, 401, 403, 404, 408, 413, 429, 500, 503)

@post('/v1/chat/completions', status_code=200, responses=ASKING, tags=['OpenAI'])
async def chat_completions(request:Request, data:JSONBody[ChatRequest]) -> Response[Answer]:
    "Answers a conversation. With `stream`, as server-sent events."
    return await respond(request, data)

@post('/v1/completions', status_code=200, responses=ASKING, tags=['OpenAI'])
async def completions(request:Request, data:JSONBody[CompletionRequest]) -> Response[Answer]:
    "Continues texts. With `stream`, as server-sent events."
    return await respond(request, data)

def cards(service:Service, key:Key) -> list[ModelCard]:
    def card(id, **more): return ModelCard(id, service.created, 'lorajax', max_model_len=service.max_len, **more)
    base = service.base.name
    rows = [card(r['name'], parent=base, root=r['source'] or r['name'], version=r['version']) for r in adapter_rows(service, key)]
    return [card(base, root=base), *rows, *([card(AUTO)] if service.router else [])]

@get('/v1/models', responses=documented(401), tags=['OpenAI'])
async def models(request:Request) -> ModelList:
    "The base, its adapters and compositions, and the router's word."
    return ModelList(cards(request.app.state.service, request.state.key))

@get('/v1/models/{name:str}', responses=documented(400, 401, 404), tags=['OpenAI'])
async def model(request:Request, name:FromPath[str]) -> ModelCard:
    "One of the models."
    service, key = request.app.state.service, request.state.key
    found = next((c for c in cards(service, key) if c.id == name), None)
    if found is None: raise service.unknown(name, key)
    return found

@post('/v1/embeddings', status_code=200, responses=documented(400, 401), tags=['OpenAI'])
async def embeddings(request:Request) -> Response[dict[str, Any]]:
    "Not offered."
    raise ApiError(400, 'this server generates text and offers no embeddings; ask an embedding server', 'not_offered')
