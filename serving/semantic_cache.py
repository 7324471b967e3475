"""Answers kept for prompts that mean the same, within one version, one API key, one user and one set of rules."""
from __future__ import annotations
import asyncio, time
from collections import OrderedDict
from dataclasses import replace
import msgspec, numpy as np
from lorajax.encoders import StaticEncoder
from .schema import Answer, Note

class SemanticCache:
    "The latest answers by the embedding of their last message; everything else about the request must be equal."
    def __init__(self, threshold:float, ttl:float, most:int=10_000):
        self.threshold, self.ttl, self.most, self.encoder = threshold, ttl, most, StaticEncoder()
        self.kept: OrderedDict[tuple, list[tuple[float, np.ndarray, Answer]]] = OrderedDict() # what must be equal -> answers

    def _split(self, job, key): # what must be equal, and the text that need only be similar; None: not for caching
        s, prompt = job.sampling, job.asks[0].prompt
        if len(job.asks) > 1 or s.temperature > 0 or s.logprobs is not None or s.echo: return None
        if isinstance(prompt, str): before, text = (), prompt
        elif job.style.chat and prompt[-1]['role'] == 'user':
            before, text = tuple((m['role'], m['content']) for m in prompt[:-1]), prompt[-1]['content']
        else: return None
        return (key.name, job.user, job.chosen.name, job.chosen.version, job.style.prefix, before, replace(s, seed=None)), text

    async def _vector(self, text):
        v = await asyncio.to_thread(self.encoder.vector, text)
        norm = float(np.linalg.norm(v))
        return v / norm if norm else None

    async def find(self, job, key) -> Answer|None: # a copy with an id of its own
        if job.chosen.fallback or not (split := self._split(job, key)) or (v := await self._vector(split[1])) is None: return None
        fresh = [e for e in self.kept.get(split[0], ()) if e[0] > time.monotonic()]
        best = max(fresh, key=lambda e: float(e[1] @ v), default=None)
        if best is None or float(best[1] @ v) < self.threshold: return None
        self.kept.move_to_end(split[0])
        job.service.signals.cache_hits.labels(job.chosen.name).inc()
        note = Note(job.chosen.version, job.chosen.layer, job.chosen.why, None, True)
        return msgspec.structs.replace(best[2], id=job.id, created=job.created, lorajax=note)

    async def keep(self, job, key, answer:Answer):
        split = self._split(job, key)
        if not split or answer.lorajax.fallback: return
        if (v := await self._vector(split[1])) is None: return
        entries = self.kept.setdefault(split[0], [])
        entries[:] = [e for e in entries if e[0] > time.monotonic()][-99:] + [(time.monotonic() + self.ttl, v, answer)]
        self.kept.move_to_end(split[0])
        while len(self.kept) * 100 > self.most: self.kept.popitem(last=False)
