"""A replica on Ray Serve: an engine with all that the registry names, and what it says to the ingress. See ray.py."""
from __future__ import annotations
import asyncio, time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from ray import serve
from lorajax.base import Base
from lorajax.core import Refused
from lorajax.engine import Config, Engine, Event, Stats, Stream
from lorajax.registry import Manifest
from lorajax.split import Split
from .app import fleet_of, set_up_logs
from .fleet import Fleet
from .service import Ask, submitted
from .settings import Settings
from .watch import every, on_compilation

class EngineFailed(Exception): "An engine that Serve will replace."

@dataclass(frozen=True)
class Facts:
    "What an engine's service has to know of it."
    base: Base # without its weights
    config: Config

@dataclass(frozen=True)
class Piece:
    "What is new of an answer: of one in one piece all, else what has come since the last."
    events: tuple[Event, ...] = ()
    tokens: int = 0 # of the prompt
    cached: int = 0 # of these, found in the prefix cache
    seconds: float = 0. # between the first token and the last, of an answer in one piece
    refused: str = '' # why there is no answer
    lost: bool = False # whether for want of the adapter

@dataclass(frozen=True)
class Report:
    "A replica at one moment."
    replica: str
    stats: Stats
    swaps: tuple[float, ...] # seconds each, since the last report
    compiled: int # programs, since then

async def batches(stream:Stream) -> AsyncIterator[list[Event]]:
    "The events of a stream, in each list all that are there: an item costs Ray the same, whatever it holds."
    news, loop = asyncio.Queue(), asyncio.get_running_loop()
    left = stream.listen(lambda e: loop.call_soon_threadsafe(news.put_nowait, e))
    while left:
        events = [await news.get()]
        while not news.empty(): events.append(news.get_nowait())
        left -= sum(e.finish is not None for e in events)
        yield events

def room(engine:Engine) -> int:
    "Adapters that stay on the device: those that half of its pages hold, and no fewer than may run at the same time."
    largest = max((k.n_pages for k in engine.store.folder.known.values()), default=engine.residents.pages.capacity)
    return max(engine.config.slots, engine.residents.pages.capacity // 2 // largest)

class EngineReplica:
    "An engine with everything that the registry names."
    async def __init__(self, settings:Settings):
        set_up_logs(settings.log_level)
        self.stack, self.compiled = ExitStack(), 0
        self.fleet = await asyncio.to_thread(fleet_of, settings, lambda shapes: shapes, self.stack)
        self.engine, self.asking = self.fleet.engine, None
        self.stats = await asyncio.to_thread(self.engine.stats)
        await self.fleet.start()
        on_compilation(self._compiled)
        self.following = asyncio.create_task(every(1., Fleet.keep_up, self.fleet))
        @serve.multiplexed(max_num_models_per_replica=room(self.engine))
        async def hot(version): return version # the engine itself decides what is on the device
        self.hot = hot

    def facts(self) -> Facts: return Facts(replace(self.fleet.base, decoder=None, split=Split()), self.engine.config)

    async def report(self) -> Report:
        self.asking = self.asking or asyncio.create_task(asyncio.to_thread(self.engine.stats))
        if (await asyncio.wait({self.asking}, timeout=3.))[0]: # else it is as it was: a step or a load takes long
            asked, self.asking = self.asking, None
            self.stats = asked.result()
        compiled, self.compiled = self.compiled, 0
        me = serve.get_replica_context().replica_id.unique_id
        return Report(me, self.stats, tuple(self.engine.residents.swap_seconds()), compiled)

    def _compiled(self): self.compiled += 1

    def check_health(self):
        "Serve asks this, and replaces a replica that fails it."
        if self.engine.failed: raise EngineFailed(self.engine.failed)

    async def _submit(self, ask, version, limit) -> Stream:
        if id := serve.get_multiplexed_model_id(): await self.hot(id)
        if version and version not in self.fleet.loaded: await self.fleet.follow()
        return await submitted(self.engine, ask, version, limit)

    async def answer(self, ask:Ask, version:str|None, limit:float) -> AsyncIterator[Piece]:
        "An answer, as its tokens come or in one piece."
        try: stream = await self._submit(ask, version, limit)
        except Refused as e:
            self.check_health()
            yield Piece(refused=str(e), lost=version is not None and self.fleet.lost(version))
            return
        try:
            got, first = [], None
            async for events in batches(stream):
                first = first or time.monotonic()
                if any(e.finish == 'error' for e in events): self.check_health() # asked for again, if nothing came yet
                if ask.stream: yield Piece(tuple(events), len(stream.prompt), stream.cached)
                else: got += events
            if ask.stream: return
            self.check_health()
            yield Piece(tuple(got), len(stream.prompt), stream.cached, time.monotonic() - first)
        finally: stream.cancel()

    async def follow(self) -> dict[str, str]: # version -> why it can't be served
        "Takes note of what the registry has now."
        await self.fleet.follow()
        return self.fleet.broken

    async def read(self, name:str, folder:str, dtype:str|None) -> tuple[str, Manifest|None]:
        "Puts an adapter into this engine, before the registry has it."
        return await self.fleet.take(name, Path(folder), dtype)

    async def compose(self, weights:dict[str, float]) -> str: # version -> weight
        await self.fleet.follow()
        async with self.fleet.changes: return await self.fleet.in_thread(self.fleet._compose, weights)

    def __del__(self): self.stack.close() # after Serve has let the requests end
