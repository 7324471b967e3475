"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`, as OpenAI's clients expect them."""
from __future__ import annotations
import asyncio, secrets, time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any
import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath, JSONBody
from litestar.response import Stream as StreamResponse
from lorajax.core import Refused, Sampling, quoted
from lorajax.engine import Event, Scored, prompt_ids
from .errors import ApiError, documented
from .guards import Key
from .schema import (Answer, ChatRequest, Choice, CompletionRequest, ModelCard, ModelList, Note, Usage, chat_sampling, completion_sampling,
                     messages_of, prompts_of, usage_of)
from .semantic_cache import SemanticCache
from .service import AUTO, Chosen, Service, failed

LEAST = -9999. # stands for a log-probability of minus infinity, which JSON cannot hold
FINISH = {'stop': 'stop', 'length': 'length'}

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

class Tokens:
    "Tokens as the two APIs show them."
    def __init__(self, tokenizer): self.tokenizer = tokenizer

    def text(self, id:int) -> str: return self.tokenizer.token_bytes(id).decode('utf-8', 'replace')

    def chat(self, scored:list[Scored]) -> dict:
        def one(id, logprob): return dict(token=self.text(id), logprob=finite(logprob), bytes=list(self.tokenizer.token_bytes(id)))
        return dict(content=[one(s.token, s.logprob) | dict(top_logprobs=[one(*t) for t in s.top]) for s in scored], refusal=None)

    def completion(self, scored:list[Scored], alternatives:int, offset:int=0) -> dict:
        texts = [self.text(s.token) for s in scored]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        top = [None if s.logprob is None else {self.text(i): finite(p) for i,p in s.top} for s in scored]
        return dict(tokens=texts, token_logprobs=[finite(s.logprob) for s in scored], text_offset=offsets,
                    top_logprobs=top if alternatives else None)

def choice(style:Style, tokens:Tokens, sampling:Sampling, index:int, text:str, scored:list[Scored], finish:str|None, streamed:bool, first:bool) -> Choice:
    "One answer, or a piece of it."
    wants = sampling.logprobs is not None
    logprobs = None if not wants or not scored else tokens.chat(scored) if style.chat else tokens.completion(scored, sampling.logprobs)
    if not style.chat: return Choice(index=index, text=text, finish_reason=finish, logprobs=logprobs)
    if not streamed: return Choice(index=index, finish_reason=finish, logprobs=logprobs, message=dict(role='assistant', content=text, refusal=None))
    delta = (dict(role='assistant', content=text) if first else dict(content=text) if text or not finish else {})
    return Choice(index=index, finish_reason=finish, logprobs=logprobs, delta=delta)

@dataclass(frozen=True)
class Job:
    "A request with everything that its answers need."
    service: Service
    style: Style
    id: str
    created: int
    sampling: Sampling
    prompts: tuple # as the engine takes them
    lengths: tuple[int, ...] # tokens of each
    chosen: Chosen
    priority: int
    timeout: float|None
    usage: bool # whether a stream ends with it

    def answer(self, chosen:Chosen, choices:list[Choice], streamed:bool, **more) -> Answer:
        note = Note(chosen.version, chosen.layer, chosen.why, chosen.fallback)
        kind = self.style.piece if streamed else self.style.whole
        return Answer(id=self.id, object=kind, created=self.created, model=chosen.name, choices=choices, lorajax=note,
                      system_fingerprint=f'lorajax-{self.service.base.fingerprint[:12]}', **more)

    async def begin(self) -> list: # (stream, who answers, events) of each prompt
        "Everything submitted; if one prompt is refused, none goes on."
        begun = []
        try:
            for i, prompt in enumerate(self.prompts):
                chosen = begun[0][1] if begun else self.chosen
                begun.append(await self.service.events(prompt, chosen, self.sampling, f'{self.id}.{i}' if i else self.id, self.timeout, self.priority))
        except BaseException:
            for _, _, events in begun: await events.aclose()
            raise
        return begun

def echoed(job:Job, i:int) -> str:
    "The prompt's text, for `echo`."
    prompt = job.prompts[i]
    return prompt if isinstance(prompt, str) else job.service.base.tokenizer.decode(prompt)

async def whole(job:Job) -> Answer:
    "An answer in one piece."
    begun, tokens = await job.begin(), Tokens(job.service.base.tokenizer)
    async def collect(i, events):
        texts, scored, ends = ['' for _ in range(job.sampling.n)], [[] for _ in range(job.sampling.n)], [None] * job.sampling.n
        try:
            async for e in events:
                if error := failed(e): raise error
                texts[e.index] += e.text
                if e.prompt: scored[e.index] += e.prompt
                if e.scored: scored[e.index].append(e.scored)
                ends[e.index] = e.finish or ends[e.index]
        finally: await events.aclose()
        return texts, scored, ends
    try: found = await asyncio.gather(*[collect(i, events) for i, (_, _, events) in enumerate(begun)])
    except BaseException:
        for _, _, events in begun: await events.aclose()
        raise
    choices, generated = [], 0
    for i, (texts, scored, ends) in enumerate(found):
        for j in range(job.sampling.n):
            text = (echoed(job, i) if job.sampling.echo else '') + texts[j]
            told = len([s for s in scored[j]]) - (job.lengths[i] if job.sampling.echo and job.sampling.logprobs is not None and j == 0 else 0)
            generated += max(told, 0)
            choices.append(choice(job.style, tokens, job.sampling, i * job.sampling.n + j, text, scored[j], FINISH.get(ends[j]), False, True))
    usage = usage_of(sum(job.lengths), generated, sum(s.cached for s,_,_ in begun))
    return job.answer(begun[0][1], choices, False, usage=usage)

def sse(body) -> bytes: return b'data: ' + msgspec.json.encode(body) + b'\n\n'

async def pieces(job:Job, begun:list) -> AsyncIterator[bytes]:
    "An answer as server-sent events. An error after the first byte is an event too, and no end follows it."
    tokens, n, chosen = Tokens(job.service.base.tokenizer), job.sampling.n, begun[0][1]
    news, told, generated = asyncio.Queue(64), set(), 0
    async def follow(i, events):
        try:
            async for e in events: await news.put((i, e))
            await news.put((i, None))
        except Exception as e: await news.put((i, e))
        finally: await events.aclose()
    tasks = [asyncio.create_task(follow(i, events)) for i, (_, _, events) in enumerate(begun)]
    extra = dict(usage=None) if job.usage else {}
    try:
        left = len(begun)
        while left:
            i, e = await news.get()
            if e is None: left -= 1; continue
            error = e if isinstance(e, ApiError) else ApiError(500, 'the stream failed', 'internal_error') if isinstance(e, Exception) else failed(e)
            if error: yield sse(error.body); return
            index, first = i * n + e.index, (i, e.index) not in told
            told.add((i, e.index))
            generated += e.scored is not None
            finish, text = FINISH.get(e.finish), (echoed(job, i) if first and job.sampling.echo else '') + e.text
            if not (first or text or finish or job.sampling.logprobs is not None): continue
            scored = [*e.prompt, *([e.scored] if e.scored else [])]
            yield sse(job.answer(chosen, [choice(job.style, tokens, job.sampling, index, text, scored, finish, True, first)], True, **extra))
        if job.usage:
            usage = usage_of(sum(job.lengths), generated, sum(s.cached for s,_,_ in begun))
            yield sse(job.answer(chosen, [], True, usage=usage))
        yield b'data: [DONE]\n\n'
    finally:
        for t in tasks: t.cancel()
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True)) # each closes its events, and so cancels the rest

async def or_gone(request:Request, answering) -> Any:
    "The answer, given up when the client goes."
    async def gone():
        while (await request.receive())['type'] != 'http.disconnect': pass
    answer, left = asyncio.ensure_future(answering), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done(): return answer.result()
        raise ApiError(499, 'the client went away', 'client_closed_request')
    finally:
        answer.cancel(), left.cancel()
        await asyncio.gather(answer, left, return_exceptions=True)

def check_context(service:Service, length:int, most:int):
    limit = service.engine.scheduler.limits.max_len
    if length + most > limit or length >= limit:
        raise ApiError(400, f'the prompt has {length} tokens and {most} more are asked for; the context has {limit}', 'context_length_exceeded', 'messages')

async def job_of(service:Service, key:Key, r:ChatRequest|CompletionRequest, id:str) -> Job:
    "A request, checked and with somebody to answer it."
    style = CHAT if isinstance(r, ChatRequest) else TEXT
    if r.model != AUTO: service.choose(r.model, key, r.user or id) # an unknown model is the first thing to be said
    prompts = [messages_of(r)] if style.chat else prompts_of(r)
    if style.chat and service.base.tokenizer.template is None:
        raise ApiError(400, f'the base {service.base.name} has no chat template; use /v1/completions', param='messages')
    ids = await asyncio.to_thread(lambda: [prompt_ids(service.base, p)[0] for p in prompts])
    lengths, limit = tuple(map(len, ids)), service.engine.scheduler.limits.max_len
    sampling = chat_sampling(r, limit - max(lengths)) if style.chat else completion_sampling(r)
    for n in lengths: check_context(service, n, sampling.max_new_tokens)
    if r.model == AUTO:
        newest = next((m['content'] for m in reversed(prompts[0]) if m['role'] == 'user'), '') if style.chat else prompts[0]
        text = newest if isinstance(newest, str) else service.base.tokenizer.decode(newest)
        chosen = await service.route(text, lengths[0], key, r.user, r.session)
    else: chosen = service.choose(r.model, key, r.user or id)
    if r.timeout is not None and not r.timeout > 0: raise Refused(f'timeout={r.timeout}; it must be a number of seconds above 0')
    return Job(service, style, style.prefix + id, int(time.time()), sampling, tuple(prompts), lengths, chosen, r.priority or 0, r.timeout,
               bool(r.stream_options and r.stream_options.include_usage))

def headers_of(job:Job, chosen:Chosen) -> dict[str, str]:
    told = dict(model=chosen.name, version=chosen.version, layer=chosen.layer)
    said = {f'x-lorajax-{k}': v for k,v in told.items() if v}
    if chosen.fallback: said['x-lorajax-fallback'] = chosen.fallback.encode('ascii', 'replace').decode().replace('\n', ' ')[:200]
    return said

async def respond(request:Request, r:ChatRequest|CompletionRequest) -> Response:
    "The answer to a request: from the cache, in pieces, or whole."
    service, key, cache = request.app.state.service, request.state.key, request.app.state.cache
    await request.app.state.limits.check(key)
    job = await job_of(service, key, r, request.state.id)
    kept = await cache.find(job, key) if cache and not r.stream else None
    if kept: return Response(kept, headers=headers_of(job, job.chosen) | {'x-lorajax-cache': 'hit'})
    if not r.stream:
        answer = await or_gone(request, whole(job))
        if cache: await cache.keep(job, key, answer)
        chosen = replace(job.chosen, name=answer.model, version=answer.lorajax.version, fallback=answer.lorajax.fallback)
        return Response(answer, headers=headers_of(job, chosen))
    begun = await or_gone(request, job.begin())
    return StreamResponse(pieces(job, begun), media_type='text/event-stream',
                          headers=headers_of(job, begun[0][1]) | {'cache-control': 'no-cache', 'x-accel-buffering': 'no'})

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
    most = service.engine.scheduler.limits.max_len
    base = ModelCard(service.base.name, service.created, 'lorajax', root=service.base.name, max_model_len=most)
    rows = [ModelCard(r['name'], service.created, 'lorajax', parent=service.base.name, root=r['source'] or r['name'], version=r['version'], max_model_len=most)
            for r in service.adapter_rows(key)]
    return [base, *rows, *([ModelCard(AUTO, service.created, 'lorajax', max_model_len=most)] if service.router else [])]

@get('/v1/models', responses=documented(401), tags=['OpenAI'])
async def models(request:Request) -> ModelList:
    "The base, its adapters and compositions, and the router's word."
    return ModelList(cards(request.app.state.service, request.state.key))

@get('/v1/models/{name:str}', responses=documented(400, 401, 404), tags=['OpenAI'])
async def model(request:Request, name:FromPath[str]) -> ModelCard:
    "One of the models."
    service, key = request.app.state.service, request.state.key
    for card in cards(service, key):
        if card.id == name: return card
    raise service.unknown(name, key)

@post('/v1/embeddings', status_code=200, responses=documented(400, 401), tags=['OpenAI'])
async def embeddings(request:Request) -> Response[dict[str, Any]]:
    "Not offered."
    raise ApiError(400, 'this server generates text and offers no embeddings; ask an embedding server', 'not_offered')
