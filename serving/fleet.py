"""The adapters of a server: what the registry names, what the engine has of it, and how both change together."""
from __future__ import annotations
import asyncio, logging, time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lorajax.adapters import check_name
from lorajax.base import Base
from lorajax.core import Refused, quoted
from lorajax.engine import Engine
from lorajax.peft import WEIGHTS_FILE
from lorajax.registry import Current, Entry, Manifest, Part, Registry, check_manifest, read_manifest
from .errors import ApiError
from .settings import Settings

log = logging.getLogger('lorajax.serving')
AUTO = 'auto' # the model that means: let the router choose

def inside(path:str, roots:tuple[Path, ...]) -> Path:
    "A directory below one of the roots, with links followed. One refusal for every other path, so that it tells nothing."
    tried = [Path(path)] if Path(path).is_absolute() else [r / path for r in roots]
    for p in tried:
        try: real = p.resolve(strict=True)
        except (OSError, ValueError, RuntimeError): continue # missing, a NUL byte, a loop of links
        if real.is_dir() and any(real.is_relative_to(r) and real != r for r in roots): return real
    raise ApiError(400, f'lora_path {quoted(path)} is no adapter directory below the configured roots', param='lora_path')

def unknown_adapter(name:str, param:str) -> ApiError:
    return ApiError(404, f'there is no adapter {quoted(name)}', 'model_not_found', param)

class Fleet:
    "Names move, versions don't. In the engine an adapter is called by its version, so that both of a rollout are there."
    def __init__(self, settings:Settings, base:Base, engine:Engine, registry:Registry):
        self.settings, self.base, self.engine, self.registry = settings, base, engine, registry
        self.current: Current = registry.current()
        self.loaded: set[str] = set() # versions that the engine has
        self.broken: dict[str, str] = {} # version -> why it can't be served
        self.entries: dict[str, Entry] = {} # version -> what the registry knows of it, so that nobody else asks the database
        self.changes, self.files = asyncio.Lock(), ThreadPoolExecutor(1, 'adapter-files')

    def check_free(self, name:str, param:str, *others:str):
        "Refuses a name that means something else here, or that no adapter can have."
        try: check_name(name)
        except Refused as e: raise ApiError(400, str(e), param=param) from None
        if name in (self.base.name, AUTO, 'base', *others):
            raise ApiError(400, f'the name {quoted(name)} means something else; choose another', param=param)

    async def in_thread(self, what:Callable, *args, **kw):
        "Files and the registry's database may be slow: they have a thread of their own."
        return await asyncio.get_running_loop().run_in_executor(self.files, lambda: what(*args, **kw))

    def lost(self, version:str) -> bool:
        "Whether the engine no longer has a version, or a part of it."
        parts, stored = self.engine.residents.recipe(version), self.engine.store.folder.known
        return version not in self.engine.names.known or any(part not in stored for part,_ in parts)

    def _read(self, name:str, folder:Path, dtype:str|None) -> tuple[str, Manifest|None]: # on the thread for files
        "Puts an adapter into the engine, once its manifest was checked. Its version, and the manifest."
        adapter = self.base.load_adapter(folder, name)
        manifest = read_manifest(folder)
        self._check_manifest(manifest, adapter.fingerprint)
        version = self.base.version(adapter, dtype)
        self.engine.load(adapter, version, dtype)
        return version, manifest

    def _check_manifest(self, manifest:Manifest|None, fingerprint:str):
        check_manifest(manifest, self.base.fingerprint, fingerprint, self.settings.trusted_keys)

    async def take(self, name:str, folder:Path, dtype:str|None) -> tuple[str, Manifest|None]: # its version, and the manifest
        "Puts an adapter into the engine; unless the registry comes to name it, it goes with the next change."
        async with self.changes: return await self._take(name, folder, dtype)

    async def _take(self, name, folder, dtype): # with the lock held
        version, manifest = await self.in_thread(self._read, name, folder, dtype)
        self.loaded.add(version)
        self.broken.pop(version, None)
        return version, manifest

    async def load(self,
        name:str,
        path:str, # below a root
        dtype:str|None, # 'int8', or None for the base's
        actor:str, # for the audit log
        watch:float|None=None, # seconds at each stage of a rollout; None: the name moves at once
    ) -> tuple[str, bool]: # the version, and whether it serves
        "An adapter under a name, perhaps beside the version that serves."
        self.check_free(name, 'lora_name')
        folder = inside(path, self.settings.allowed_roots)
        async with self.changes:
            try: version, manifest = await self._take(name, folder, dtype)
            except Refused as e:
                await self.in_thread(self.registry.note, actor, name, f'refused: {e}', time.time())
                raise ApiError(400, str(e).replace(f'{folder}/', ''), param='lora_path') from None
            now = time.time()
            try:
                entry = Entry(name, version, str(folder), dtype or '', (), manifest, now)
                serves = await self.in_thread(self.registry.add, entry, actor, now)
                if not serves and watch is not None:
                    await self.in_thread(self.registry.start, name, version, actor, now, watch)
                elif not serves: await self.in_thread(self.registry.promote, name, version, actor=actor, now=now)
            finally: await self._follow() # which drops what no name came to need
        return version, serves or watch is None

    async def unload(self, name:str, actor:str):
        async with self.changes:
            if name not in self.current.names: raise unknown_adapter(name, 'lora_name')
            await self.in_thread(self.registry.remove, name, actor, time.time())
            await self._follow()

    async def compose(self, name:str, weights:dict[str, float], actor:str) -> str: # its version
        "A weighted sum of adapters under a name of its own."
        self.check_free(name, 'name', *weights)
        async with self.changes:
            total = Counter() # by version, since two names may mean one
            for n, weight in weights.items():
                if self.current.names.get(n) not in self.loaded: raise unknown_adapter(n, 'weights')
                total[self.current.names[n]] += weight
            version, now = await self.in_thread(self._compose, total), time.time()
            entry = Entry(name, version, parts=tuple(Part(*p) for p in total.items()), added=now)
            try:
                if not await self.in_thread(self.registry.add, entry, actor, now):
                    await self.in_thread(self.registry.promote, name, version, actor=actor, now=now)
            finally: await self._follow()
        return version

    def _compose(self, weights:dict[str, float]) -> str: # version -> weight
        names, version = self.engine.names, self.engine.compose('composing', weights)
        def rename(): # the same sum may have been there before, and is then kept twice
            if names.point(version, names.point('composing', None)): names.release(version)
        self.engine.call(rename)
        self.loaded.add(version)
        self.broken.pop(version, None)
        return version

    async def change(self, what:Callable, *args, **kw):
        "A change of the registry, followed."
        async with self.changes:
            result = await self.in_thread(what, *args, **kw)
            await self._follow()
        return result

    async def follow(self):
        "Takes note of changes, perhaps of another process."
        async with self.changes: await self._follow()

    async def keep_up(self):
        "Follows, if there is anything new."
        if await self.in_thread(self.registry.serial) != self.current.serial: await self.follow()

    async def _follow(self): # with the lock held
        c = await self.in_thread(self.registry.current)
        self.entries = {e.version: e for e in await self.in_thread(self.registry.entries)} # after it: all that it names, or newer
        self.current = c
        wanted = {*c.names.values(), *(r.new for r in c.rollouts.values()), *c.former.values()} - {None}
        for version in wanted - self.loaded - self.broken.keys():
            try: await self.in_thread(self._restore, version)
            except (Refused, ApiError) as e:
                self.broken[version] = str(e)
                log.warning('version %s cannot be served: %s', version[:16], e)
        for version in self.loaded - wanted:
            self.loaded.discard(version)
            await self.in_thread(self._drop, version)
        for version in self.broken.keys() - wanted: del self.broken[version]

    def _restore(self, version:str):
        "A version that the registry names: from the image of an earlier run, from its files, or from its parts."
        if version in self.loaded: return
        entry = self.registry.find(version)
        if entry is None: raise Refused(f'version {version[:16]} was removed meanwhile')
        if entry.parts:
            for part in entry.parts: self._restore(part.version)
            self._compose({p.version: p.weight for p in entry.parts}) # from here on the engine keeps the parts
        elif not self._adopt(entry):
            folder = inside(entry.source, self.settings.allowed_roots)
            found, _ = self._read(entry.name, folder, entry.dtype or None)
            if found != version:
                if found not in self.loaded: self.engine.unload(found)
                raise Refused(f'adapter {entry.name!r} is no longer what it was, or the base has changed; load it again')
        self.loaded.add(version)

    def _drop(self, version:str): self.engine.unload(version)

    def _adopt(self, entry:Entry) -> bool: # whether there is an image of it, vouched for as its files would have to be
        self._check_manifest(entry.manifest, entry.manifest.adapter if entry.manifest else '')
        return self.engine.adopt(entry.version, entry.version)

    async def start(self):
        "What an earlier run served, then what is new in the directory of adapters."
        await self.follow()
        self.engine.call(self._tidy)
        folder = Path(self.settings.adapters)
        for path in sorted(p.parent for p in folder.glob(f'*/{WEIGHTS_FILE}')):
            if path.name in self.current.names: continue
            last = await self.in_thread(self.registry.audit, 1, path.name)
            if last and last[0].action == 'remove':
                log.info('adapter %s was unloaded, and stays so until it is loaded again', path.name)
                continue
            try: await self.load(path.name, str(path.resolve()), None, 'start')
            except (ApiError, Refused) as e: log.warning('adapter %s is left out: %s', path.name, e)

    def _tidy(self): # on the engine's thread
        "Images that a killed process left and that no name needs."
        kept = self.engine.names.kept
        for version in [v for v in list(self.engine.store.folder.known) if not kept[v]]:
            try: self.engine.store.remove(version)
            except Refused as e: log.warning('%s', e) # it only takes room
