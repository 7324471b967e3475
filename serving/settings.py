"""What an operator may set: environment variables that begin with LORAJAX_, or flags of `lorajax serve` by the same names."""
from __future__ import annotations
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from lorajax.base import DTYPES
from lorajax.core import Refused, quoted
from lorajax.registry import check_key

LEVELS = ('debug', 'info', 'warning', 'error')

@dataclass(frozen=True)
class Settings:
    "Defaults serve SmolLM2 with the example adapters on this machine."
    model: str = 'smollm2' # the base: a directory, a .gguf file, or the word smollm2
    dtype: str = '' # of weights and activations; by default bfloat16, or what `lorajax convert` kept
    adapters: str = 'examples/adapters' # a directory of adapter directories, all loaded at start; also a root for loads
    roots: str = '' # further directories, with ':' between them, below which adapters may be loaded at run time
    state: str = '.lorajax' # a directory for the registry and the adapters' images; survives restarts
    router: str = '' # a directory that `lorajax route train` made; by default the examples' own, for the examples
    redis: str = '' # URL; shares routing memory and rate limits among processes
    rows: int = 8 # sequences that generate at the same time
    slots: int = 8 # different adapters among them
    max_rank: int = 64 # of an adapter
    outside: int = 0 # rank of an adapter on the embedding or on the head; 0 serves none of those
    max_len: int = 2048 # positions of a sequence
    tp: int = 1 # devices that share the base, each with a part of every layer
    hosts: bool = False # whether this process is one of several that share the base
    memory: int = 0 # bytes of the arena, on each device; 0 for the engine's default
    queue: int = 256 # sequences that may wait; more get 429
    timeout: float = 600. # seconds after which a request is given up, at most
    max_body: int = 2 << 20 # bytes of a request
    api_keys: str = '' # a JSON file; see the README. Without one, everybody may ask
    admin_key: str = '' # for changes; without one they are taken from this machine alone
    strict: bool = False # an adapter that can't be served is an error; otherwise the base answers and says so
    trusted: str = '' # public ed25519 keys, hex, with ',' between them; with any, adapters need a manifest signed by one
    watch: float = 86_400. # seconds that a rollout stays at each stage
    judge_every: float = 5. # seconds between judgements of rollouts
    cache: float = 0. # semantic cache: least similarity of prompts, such as 0.97; 0 for none
    cache_ttl: float = 3_600. # seconds that a cached answer stays
    webhook: str = '' # URL that is told of alerts
    log_level: str = 'info' # of the log on standard error
    log_prompts: bool = False # whether logs may hold prompts
    otel: bool = False # OpenTelemetry traces; the exporter is set by OTEL_ variables
    replicas: int = 1 # engines; with Ray
    most_replicas: int = 0 # engines that Ray may come to run while requests wait; 0 for no more than `replicas`

    @property
    def folders(self) -> list[Path]: return [Path(p) for p in (self.adapters, *self.roots.split(':')) if p]
    @property
    def allowed_roots(self) -> tuple[Path, ...]: return tuple(p.resolve() for p in self.folders)
    @property
    def trusted_keys(self) -> list[str]: return [k.strip() for k in self.trusted.split(',') if k.strip()]

def _read(name:str, kind:str, text:str):
    try:
        if kind == 'bool': return dict(zip(('1', 'true', 'yes', '0', 'false', 'no', ''), [True] * 3 + [False] * 4))[text.lower()]
        return dict(int=int, float=float, str=str)[kind](text)
    except (ValueError, KeyError): raise Refused(f'LORAJAX_{name.upper()}={quoted(text)}; it must be a {kind}') from None

def check(s:Settings):
    "Refuses values that no server could run with, before anything is loaded."
    limits = dict(rows=1, slots=1, max_rank=1, max_len=2, queue=0, outside=0, tp=1, memory=0, max_body=1, replicas=1,
                  most_replicas=0)
    for name, least in limits.items():
        if getattr(s, name) < least: raise Refused(f'{name}={getattr(s, name)}; it must be at least {least}')
    if not 0 <= s.cache <= 1: raise Refused(f'cache={s.cache}; it must be a similarity from 0 to 1, and 0 for none')
    if s.dtype and s.dtype not in DTYPES: raise Refused(f'dtype={quoted(s.dtype)}; choose one of {", ".join(DTYPES)}')
    if s.log_level.lower() not in LEVELS:
        raise Refused(f'log_level={quoted(s.log_level)}; choose one of {", ".join(LEVELS)}')
    for path in s.folders:
        if not path.is_dir(): raise Refused(f'there is no directory {path}; name one that holds adapters (--adapters)')
    for key in s.trusted_keys: check_key(key)

OTHERS = {'LORAJAX_BACKEND'} # the library's own

def from_environment(environment:Mapping[str, str]=os.environ) -> Settings:
    "The settings that variables give; one that begins with LORAJAX_ and isn't known is refused."
    known = {f'LORAJAX_{f.name.upper()}': f for f in fields(Settings)}
    if unknown := sorted(k for k in environment if k.startswith('LORAJAX_') and k not in known and k not in OTHERS):
        raise Refused(f'{unknown[0]} is no setting; the settings are {", ".join(known)}')
    return Settings(**{f.name: _read(f.name, f.type, environment[k]) for k,f in known.items() if k in environment})
