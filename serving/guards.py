"""Who may do what: API keys, the adapters and the rate of each, and changes for administrators alone."""
from __future__ import annotations
import hashlib, ipaddress, time
from collections import OrderedDict
from pathlib import Path
from urllib.parse import urlsplit
import msgspec
from lorajax.core import Refused, needs, quoted
from .errors import ApiError

class Key(msgspec.Struct, forbid_unknown_fields=True):
    "Somebody who may ask."
    key: str
    name: str # in logs, never the key itself
    adapters: list[str] | None = None # that it may use, beside the base; None for all
    per_minute: int | None = None # requests; None for no limit
    admin: bool = False # whether it may change adapters

    def may_use(self, name:str) -> bool: return self.adapters is None or name in self.adapters

class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]

ANYBODY = Key('', 'anonymous')

def hashed(key:str) -> bytes: return hashlib.sha256(key.encode('utf-8', 'replace')).digest()

def read_keys(path:str) -> list[Key]:
    try: keys = msgspec.json.decode(Path(path).read_bytes(), type=KeyFile).keys
    except (OSError, msgspec.MsgspecError) as e:
        raise Refused(f'{path} holds no API keys ({e}); write {{"keys": [{{"key": "...", "name": "..."}}]}}') from None
    if not keys: raise Refused(f'{path} has no key; write one, or leave the setting out to serve everybody')
    for k in keys:
        if k.name in ('admin', ANYBODY.name) or '/' in k.name:
            raise Refused(f'{path} has a key named {quoted(k.name)}, which means something else; choose another name')
    if any(len(k.key) < 16 for k in keys): raise Refused(f'{path} has a key of fewer than 16 characters; make it longer')
    for field in ('key', 'name'):
        if len({getattr(k, field) for k in keys}) < len(keys): raise Refused(f'{path} has two keys with one {field}')
    return keys

class Keys:
    "The keys of a server; looked up by their hash, so that time tells nothing about them."
    def __init__(self, keys:list[Key], admin_key:str):
        self.open, self.has_admin = not keys, bool(admin_key) or any(k.admin for k in keys)
        known = [*keys, *([Key(admin_key, 'admin', admin=True)] if admin_key else [])]
        self.by_hash = {hashed(k.key): k for k in known}

    def of(self, authorization:str|None) -> Key: # the header
        kind, _, token = (authorization or '').partition(' ')
        found = self.by_hash.get(hashed(token.strip())) if kind.lower() == 'bearer' and token.strip() else None
        if found: return found
        if self.open: return ANYBODY # clients send some key even where none is needed
        raise ApiError(401, 'this server needs an API key: Authorization: Bearer KEY', 'invalid_api_key',
                       headers={'www-authenticate': 'Bearer'})

def is_local(host:str|None) -> bool:
    try: return ipaddress.ip_address(host or '').is_loopback
    except ValueError: return False

def check_change(keys:Keys, key:Key, host:str|None, headers):
    "Refuses whoever may not change adapters. A web page of another origin may not either, whatever machine shows it."
    origin = headers.get('origin')
    if origin and urlsplit(origin).netloc != headers.get('host'):
        raise ApiError(403, f'the page {quoted(origin)} may not change adapters')
    called = urlsplit(f'//{headers.get("host", "")}').hostname # another name may be a page's trick to get here
    passed_on = any(h in headers for h in ('forwarded', 'x-forwarded-for'))
    direct = is_local(host) and (called == 'localhost' or is_local(called)) and not passed_on
    if key.admin or (not keys.has_admin and direct): return
    why = 'needs an admin key' if keys.has_admin else 'is taken from this machine alone, unless LORAJAX_ADMIN_KEY is set'
    raise ApiError(403, f'a change of adapters {why}')

class Limits:
    "Requests of each key in the current minute; in Redis, where there is one, so that all processes count together."
    def __init__(self, url:str=''):
        limit = dict(socket_timeout=.05, socket_connect_timeout=.05) # seconds
        self.redis = needs('redis.asyncio', 'serve').Redis.from_url(url, **limit) if url else None
        self.here: OrderedDict[str, int] = OrderedDict()

    def _count_here(self, slot):
        self.here[slot] = self.here.get(slot, 0) + 1
        while len(self.here) > 10_000: self.here.popitem(last=False)
        return self.here[slot]

    async def _count(self, slot):
        if self.redis is None: return self._count_here(slot)
        try:
            async with self.redis.pipeline(transaction=False) as p:
                return (await p.incr(slot).expire(slot, 120).execute())[0]
        except Exception: return self._count_here(slot) # Redis is away: each process counts for itself

    async def check(self, key:Key):
        if key.per_minute is None: return
        now = time.time()
        if await self._count(f'lorajax:rate:{key.name}:{int(now // 60)}') > key.per_minute:
            raise ApiError(429, f'{key.name} may send {key.per_minute} requests a minute', 'rate_limit_exceeded',
                           headers={'retry-after': str(60 - int(now % 60))})

    async def close(self):
        if self.redis: await self.redis.aclose()
