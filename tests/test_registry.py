"Not notebook cells: random changes against a plain model, killed and competing processes, and everything that can be forged."
import json, random, shutil, signal, sqlite3, subprocess, sys, threading
from collections import Counter
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
import numpy as np, pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lorajax import registry as reg
from lorajax.core import Refused
from lorajax.registry import (DAY, MANIFEST_FILE, STAGES, Bounds, Entry, Manifest, Outcome, Part, Registry, Rollout, check_key,
                              check_manifest, excess, judge, manifest_of, new_key, read_key, read_manifest, side, signed, wilson,
                              write_manifest)

BASE, ADAPTER, NOON = 'b' * 64, 'a' * 64, '2026-11-30T12:00:00+00:00'
PLAIN = manifest_of('sql', BASE, ADAPTER, NOON)
ROLLOUT = Rollout('sql', 'v1', 'v2', 1, 0., 0.)

# ---- manifests

@pytest.fixture(scope='module')
def key(): return ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))

def test_the_signed_bytes_are_plain_json_and_the_key_is_that_of_rfc_8032():
    "The first key pair of RFC 8032, section 7.1."
    secret = bytes.fromhex('9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60')
    ours = signed(PLAIN, ed25519.Ed25519PrivateKey.from_private_bytes(secret))
    assert ours.key == 'd75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a'
    text = f'["lorajax manifest", 1, "sql", "{BASE}", "{ADAPTER}", "{NOON}", "{ours.key}"]'
    public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(ours.key))
    public.verify(bytes.fromhex(ours.signature), text.encode())
    check_manifest(ours, BASE, ADAPTER, [ours.key], required=True)

@pytest.mark.parametrize('field, value', dict(name='bash', base='c' * 64, adapter='c' * 64, created='2026-11-30T12:00:01+00:00',
                                              key='other', signature='0' * 128).items())
def test_a_manifest_with_any_field_changed_is_refused(key, field, value):
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    forged = replace(signed(PLAIN, key), **{field: other if value == 'other' else value})
    with pytest.raises(Refused, match='not what its signature says'): check_manifest(forged, forged.base, forged.adapter)

def test_a_forger_with_a_key_of_his_own_is_not_trusted(key):
    ours, forged = signed(PLAIN, key), signed(PLAIN, ed25519.Ed25519PrivateKey.generate())
    check_manifest(forged, BASE, ADAPTER)
    with pytest.raises(Refused, match=f'signed with key {forged.key[:16]}, which is not trusted'):
        check_manifest(forged, BASE, ADAPTER, [ours.key])

def test_what_a_manifest_must_say(key):
    ours = signed(PLAIN, key)
    for m in (PLAIN, ours):
        check_manifest(m, BASE, ADAPTER)
        why = 'made for base bbbbbbbbbbbbbbbb, and this is base 1111111111111111; after a change of base'
        with pytest.raises(Refused, match=why): check_manifest(m, '1' * 64, ADAPTER)
        with pytest.raises(Refused, match='is for adapter aaaaaaaaaaaaaaaa, and the files hold 2222222222222222'):
            check_manifest(m, BASE, '2' * 64)
    with pytest.raises(Refused, match="'sql' is not signed"): check_manifest(PLAIN, BASE, ADAPTER, [ours.key])
    check_manifest(None, BASE, ADAPTER)
    for facts in (dict(required=True), dict(trusted=[ours.key])):
        with pytest.raises(Refused, match='no lorajax.json, and one is required'): check_manifest(None, BASE, ADAPTER, **facts)

@pytest.mark.parametrize('change, why', [
    (dict(name='../x'), 'without dots or slashes'), (dict(name=None), 'adapter name None'), (dict(base='B' * 64), 'base='),
    (dict(base=7), 'base=7; it must be 64 hex digits'), (dict(adapter='a' * 63), 'adapter='), (dict(adapter=''), "adapter=''"),
    (dict(adapter='a' * 64 + '\n'), 'adapter='), (dict(created='2026-11-30'), 'no ISO time with a zone'),
    (dict(created=5), 'no ISO time'), (dict(created=[]), 'no ISO time'), (dict(key='a' * 64), 'needs both or none'),
    (dict(signature='a' * 128), 'needs both or none'), (dict(key=None), 'key=None'),
    (dict(extra=1), "'extra', which is unknown")])
def test_a_manifest_file_with_a_bad_field_is_refused(tmp_path, change, why):
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(asdict(PLAIN) | change))
    with pytest.raises(Refused, match=why): read_manifest(tmp_path)

def test_a_manifest_file_that_is_none_is_refused(tmp_path):
    file = tmp_path / MANIFEST_FILE
    assert read_manifest(tmp_path) is None
    for field in ('name', 'base', 'adapter', 'created'):
        file.write_text(json.dumps({k: v for k,v in asdict(PLAIN).items() if k != field}))
        with pytest.raises(Refused, match=f"has no field '{field}'"): read_manifest(tmp_path)
    for text in ('', '[]', '{', '[' * 4000, '\0', 'null'):
        file.write_text(text)
        with pytest.raises(Refused, match='sign the adapter again'): read_manifest(tmp_path)
    file.write_text(json.dumps(asdict(PLAIN)) + ' ' * 4096)
    with pytest.raises(Refused, match='at most 4096 bytes'): read_manifest(tmp_path)
    file.unlink()
    file.symlink_to('nowhere') # a file that is meant to be there, and can't be read
    with pytest.raises(Refused, match='is no file'): read_manifest(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(Refused, match='is no file'): read_manifest(tmp_path)

def test_a_manifest_comes_back_as_it_was_written(tmp_path, key):
    for m in (PLAIN, signed(replace(PLAIN, name='模型'), key)):
        write_manifest(tmp_path, m)
        assert read_manifest(tmp_path) == m
    assert [p.name for p in tmp_path.iterdir()] == [MANIFEST_FILE]

def test_keys(tmp_path, key):
    file = tmp_path / 'key.pem'
    public = new_key(file)
    assert read_key(file).public_key().public_bytes_raw().hex() == check_key(public) and file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Refused, match='File exists'): new_key(file)
    with pytest.raises(Refused, match='No such file'): new_key(tmp_path / 'no' / 'key.pem')
    with pytest.raises(Refused, match='No such file'): read_key(tmp_path / 'none.pem')
    bad = tmp_path / 'bad.pem'
    pem = lambda k, how: k.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
    for content, why in ((b'', 'no private key in the open'), (b'\xff' * 99, 'no private key in the open'),
                         (pem(key, BestAvailableEncryption(b'secret')), 'no private key in the open'),
                         (pem(ec.generate_private_key(ec.SECP256R1()), NoEncryption()), 'another kind than ed25519')):
        bad.write_bytes(content)
        with pytest.raises(Refused, match=why): read_key(bad)
    for text in ('', public[1:], public.upper() + 'A', public + '\n', 'key.pem'):
        with pytest.raises(Refused, match='is no public key'): check_key(text)

@pytest.mark.skipif(not shutil.which('openssl'), reason='the openssl command is not here')
def test_a_key_that_openssl_made(tmp_path):
    subprocess.run(['openssl', 'genpkey', '-algorithm', 'ed25519', '-out', tmp_path / 'key.pem'], check=True)
    ours = signed(PLAIN, read_key(tmp_path / 'key.pem'))
    check_manifest(ours, BASE, ADAPTER, [ours.key])

def test_without_cryptography_unsigned_manifests_still_work(monkeypatch, key):
    ours = signed(PLAIN, key)
    for name in [m for m in sys.modules if m.split('.')[0] == 'cryptography']: monkeypatch.setitem(sys.modules, name, None)
    check_manifest(PLAIN, BASE, ADAPTER)
    for use in (lambda: check_manifest(ours, BASE, ADAPTER), lambda: read_key('key.pem'), lambda: new_key('key.pem')):
        with pytest.raises(Refused, match=r"pip install 'lorajax\[serve\]'"): use()

# ---- sides

@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.sampled_from(['v1', 'v2']), st.integers(0, 1000))
def test_a_user_who_is_once_on_the_new_side_stays_there(user, old, n):
    sides = [side(Rollout('sql', old, f'n{n}', stage, 0., 0.), user) for stage in STAGES]
    assert sides == sorted(sides, key=lambda v: v != old) and sides[-1] == f'n{n}'

def test_shares_and_independence_of_sides():
    "Binomial: 40,000 users at 1 % are 400, give or take 20; two rollouts share 1 % of 1 %, 4."
    users = [f'user-{i}' for i in range(40_000)]
    on = lambda r: {u for u in users if side(r, u) == r.new}
    for stage in (1, 10, 50):
        assert abs(len(on(replace(ROLLOUT, stage=stage))) - 400 * stage) < 4 * (400 * stage * (1 - stage / 100)) ** .5
    for other in (replace(ROLLOUT, new='v3'), replace(ROLLOUT, name='bash')): assert len(on(ROLLOUT) & on(other)) < 15
    assert side(ROLLOUT, '\ud800') in ('v1', 'v2') # half a surrogate pair, as JSON may bring it

def test_a_side_is_a_whole_number_of_ten_thousandths(monkeypatch):
    "Places 0 to 99 of 10,000 are 1 %."
    class Digest:
        def __init__(self, text, digest_size): self.place = int(json.loads(text)[2])
        def digest(self): return (7 * 10_000 + self.place).to_bytes(8)
    monkeypatch.setattr(reg.hashlib, 'blake2b', Digest)
    assert [side(ROLLOUT, u) for u in ('0', '99', '100', '9999')] == ['v2', 'v2', 'v1', 'v1']
    assert [side(replace(ROLLOUT, stage=50), u) for u in ('4999', '5000')] == ['v2', 'v1']

def test_sides_are_the_same_in_every_process_and_release():
    on = [u for u in range(2000) if side(ROLLOUT, str(u)) == 'v2']
    code = ('from lorajax.registry import *; r = Rollout("sql", "v1", "v2", 1, 0., 0.); '
            'print([u for u in range(2000) if side(r, str(u)) == "v2"])')
    there = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={'PYTHONHASHSEED': '7'}, check=True)
    assert json.loads(there.stdout) == on and on[:5] == [56, 107, 155, 185, 277]

# ---- judging

def test_intervals_against_published_ones():
    "Newcombe 1998: 56 of 70 against 48 of 80 gives 0.0524 to 0.3339 (method 10); Wilson for 81 of 263 gives 0.2553 to 0.3662."
    z = 1.959964
    assert np.allclose([excess(56, 70, 48, 80, z), -excess(48, 80, 56, 70, z)], [.0524, .3339], atol=5e-5)
    assert np.allclose(wilson(81, 263, z), [.2553, .3662], atol=5e-5)
    assert wilson(0, 91, 3.)[0] == pytest.approx(0, abs=1e-12) and wilson(0, 91, 3.)[1] == pytest.approx(.09) # 9 / (91 + 9)
    assert excess(9, 91, 0, 0, 3.) == pytest.approx(wilson(9, 91, 3.)[0])

GOOD = Outcome(10_000, 10, .1, 1., .9, 5000)
CASES = [ # old, new, hours into the stage, what is done; limits by hand from the formula with z = 3
    (GOOD, Outcome(5, 1), 30, 'hold'), (GOOD, Outcome(99, 99), 30, 'hold'), (Outcome(99), GOOD, 30, 'hold'),
    (GOOD, Outcome(100, 3), 30, 'advance'), # Wilson's lower end is 0.0063
    (GOOD, Outcome(100, 6), 1, 'roll back'), # 0.0198, so the difference is above 0.018
    (GOOD, Outcome(100, 100), 0, 'roll back'), (GOOD, Outcome(10_000, 100), 30, 'advance'), # 0.9 points more
    (GOOD, Outcome(10_000, 180), 0, 'roll back'), # 1.7 points more, give or take 0.4
    (Outcome(10_000, 3000), Outcome(10_000, 3000), 30, 'advance'), # everything fails, and not because of the new one
    (GOOD, Outcome(100, 0), 23.9, 'hold'), (GOOD, Outcome(100, 0), 24, 'advance'),
    (GOOD, Outcome(100, 0, .15), 24, 'advance'), (GOOD, Outcome(100, 0, .1501), 0, 'roll back'),
    (GOOD, Outcome(999, 0, .1, 9.), 24, 'advance'), (GOOD, Outcome(1000, 0, .1, 2.01), 0, 'roll back'),
    (GOOD, Outcome(1000, 0, .1, 2.), 24, 'advance'), (replace(GOOD, p50=None), Outcome(100, 0, 9.), 24, 'advance'),
    (GOOD, Outcome(500, 0, .1, 1., .1, 99), 24, 'advance'), # too few ratings
    (GOOD, Outcome(500, 0, .1, 1., .6, 200), 0, 'roll back'), (GOOD, Outcome(5000, 0, .1, 1., .87, 5000), 24, 'advance'),
    (GOOD, Outcome(5000, 0, .1, 1., .8, 5000), 0, 'roll back'), (GOOD, Outcome(5000, 0, .1, 1., 1., 5000), 24, 'advance')]

@pytest.mark.parametrize('old, new, hours, verdict', CASES)
def test_judge(old, new, hours, verdict):
    now = 1e9 + hours * 3600
    said, why = judge(replace(ROLLOUT, since=1e9), old, new, now)
    assert said == verdict and why
    assert judge(replace(ROLLOUT, since=1e9), old, new, now + 30 * DAY)[0] == ('advance' if hours == 23.9 else verdict)

def test_at_100_percent_the_old_side_may_be_silent():
    last = replace(ROLLOUT, stage=100)
    assert judge(last, Outcome(), Outcome(99), DAY)[0] == 'hold'
    assert judge(last, Outcome(), Outcome(1000, 5, 9., 9., .1, 500), DAY)[0] == 'advance'
    assert judge(last, Outcome(), Outcome(1000, 40), 0.)[0] == 'roll back'
    assert judge(last, GOOD, Outcome(1000, 0, 9.), 0.)[0] == 'roll back'
    assert judge(replace(last, stage=50), Outcome(), Outcome(1000, 40), DAY)[0] == 'hold'

def test_bounds_and_watch_are_the_callers():
    quick = replace(ROLLOUT, watch=60.)
    assert judge(quick, GOOD, Outcome(20, 1), 60., Bounds(least=20, errors=.5)) [0] == 'advance'
    assert judge(quick, GOOD, Outcome(20, 1, .11), 60., Bounds(least=20, p50=1.05))[0] == 'roll back'

@pytest.mark.parametrize('facts', [dict(errors=1), dict(requests=1, errors=2), dict(p50=nan), dict(p99=-1.), dict(rated=3),
                                   dict(quality=1.5, rated=1), dict(quality=-.1, rated=1), dict(errors=-1)])
def test_outcomes_that_cannot_be(facts):
    with pytest.raises(AssertionError, match='cannot be'): Outcome(**facts)

def test_looking_after_every_request_rarely_ends_a_good_rollout_and_soon_ends_a_bad_one():
    "400 rollouts at 1 %, up to 3,000 requests of the new version, looked at after each; both sides' rate is 1 % or one is 4 %."
    def ended(rate, rng=np.random.default_rng(0), looks=3000):
        new, old = np.cumsum(rng.random((400, looks)) < rate, 1), np.cumsum(rng.binomial(99, .01, (400, looks)), 1)
        n = np.arange(1, looks + 1)
        p1, p2, q1, q2 = new / n, old / (99 * n), 9 / n, 9 / (99 * n)
        low = (p1 + q1 / 2 - 3 * np.sqrt((p1 * (1 - p1) + q1 / 4) / n)) / (1 + q1)
        high = (p2 + q2 / 2 + 3 * np.sqrt((p2 * (1 - p2) + q2 / 4) / (99 * n))) / (1 + q2)
        bad = (p1 - p2 - np.hypot(p1 - low, high - p2) > .01) & (n >= 100)
        for i, j in ((0, 150), (7, 900), (9, 2999)): # the vectors are what `judge` says
            o = Outcome(int(99 * n[j]), int(old[i, j])), Outcome(int(n[j]), int(new[i, j]))
            assert (judge(ROLLOUT, *o, 0.)[0] == 'roll back') == bad[i, j]
        return sorted(bad.argmax(1)[bad.any(1)]) # after how many requests
    assert len(ended(.01)) <= 1
    after = ended(.04)
    assert len(after) == 400 and after[200] < 400

# ---- the registry against a plain model

names, versions, which = st.sampled_from(['sql', '模型']), st.sampled_from(['v1', 'v2', 'v3']), st.integers(0, 3)

class Model(RuleBasedStateMachine):
    "A dict says what the registry must hold. An entry of the model: (name, version) -> [waits, versions of its parts]."
    @initialize(folder=st.uuids())
    def start_up(self, folder):
        self.file = Path(self.folder) / f'{folder}.db'
        self.file.unlink(missing_ok=True)
        self.registry, self.other = Registry(self.file), Registry(self.file)
        self.names, self.rollouts, self.entries, self.lines, self.now = {}, {}, {}, 0, 0.
        for name, version in (('sql', 'v1'), ('sql', 'v2'), ('模型', 'v1')): self.add(name, version)

    def teardown(self):
        if hasattr(self, 'registry'): self.registry.close(), self.other.close()

    def check(self, allowed, change):
        "Runs a change that is allowed or refused, and forgets in the model what nothing leads to."
        self.now += 1
        self.registry, self.other = self.other, self.registry
        if not allowed:
            with pytest.raises(Refused): change(self.registry)
            return False
        change(self.registry)
        self.lines += 1
        return True

    def forget(self):
        used = {(n, v) for n,pair in self.names.items() for v in pair} | {(n, r.new) for n,r in self.rollouts.items()}
        while True:
            parts = {p for _,ps in self.entries.values() for p in ps}
            gone = [k for k,(waits, _) in self.entries.items() if not waits and k not in used and k[1] not in parts]
            if not gone: return
            for k in gone: del self.entries[k]

    def added(self, name, version, parts):
        serving = self.names.setdefault(name, (version, None))[0]
        r = self.rollouts.get(name)
        used = version in self.names[name] or r is not None and r.new == version
        self.entries[name, version] = [not used, parts]
        assert self.registry.entry(name, version).added <= self.now
        return serving == version

    @rule(name=names, version=versions)
    def add(self, name, version):
        said = []
        self.check(True, lambda r: said.append(r.add(Entry(name, version, f'/{self.now}'), 'ann', self.now)))
        assert said == [self.added(name, version, ())]

    @rule(name=names, parts=st.sets(versions, min_size=1, max_size=2))
    def compose(self, name, parts):
        version = '+'.join(sorted(parts))
        known = {v for _,v in self.entries}
        entry = Entry(name, f'sum {version}', parts=tuple(Part(p, -.5) for p in sorted(parts)))
        if self.check(parts <= known, lambda r: r.add(entry, 'ann', self.now)):
            self.added(name, entry.version, tuple(sorted(parts)))

    def one_of(self, name, i): # a version that the name has, mostly
        return ['v9', *sorted(v for n,v in self.entries if n == name)][-i:][0]

    @rule(name=names, i=which, watch=st.sampled_from([60., DAY]))
    def start(self, name, i, watch):
        version, serving = self.one_of(name, i), self.names.get(name, (None,))[0]
        allowed = serving and name not in self.rollouts and serving != version and (name, version) in self.entries
        if self.check(allowed, lambda r: r.start(name, version, 'ann', self.now, watch)):
            self.rollouts[name] = Rollout(name, serving, version, 1, self.now, self.now, watch)
            self.entries[name, version][0] = False

    def move(self, name, version):
        serving, former = self.names[name]
        self.names[name] = (version, former if version == serving else serving)
        self.rollouts.pop(name, None)
        self.entries[name, version][0] = False
        self.forget()

    @precondition(lambda self: self.rollouts)
    @rule(i=which, verdict=st.sampled_from(['hold', 'advance', 'advance', 'roll back']), stale=st.booleans())
    def step(self, i, verdict, stale):
        name, r = sorted(self.rollouts.items())[i % len(self.rollouts)]
        self.now += 1
        done = self.other.step(replace(r, since=r.since - 1) if stale else r, verdict, 'why', self.now)
        assert done == (verdict != 'hold' and not stale)
        if not done: return
        self.lines += 1
        if verdict == 'roll back': del self.rollouts[name]
        elif r.stage == 100: return self.move(name, r.new)
        else: self.rollouts[name] = replace(r, stage=dict(zip(STAGES, STAGES[1:]))[r.stage], since=self.now)
        self.forget()

    @rule(name=names, i=which | st.none())
    def promote(self, name, i):
        version = None if i is None else self.one_of(name, i)
        target = version or getattr(self.rollouts.get(name), 'new', None)
        allowed = name in self.names and (name, target) in self.entries
        if self.check(allowed, lambda r: r.promote(name, version, actor='ann', now=self.now)): self.move(name, target)

    @rule(name=names)
    def roll_back(self, name):
        _, former = self.names.get(name, (None, None))
        if self.check(name in self.rollouts or former, lambda r: r.roll_back(name, 'ann', self.now)):
            if not self.rollouts.pop(name, None): self.names[name] = (former, None)
            self.forget()

    @rule(name=names)
    def remove(self, name):
        if self.check(name in self.names, lambda r: r.remove(name, 'ann', self.now)):
            del self.names[name]
            self.rollouts.pop(name, None)
            for k in self.entries:
                if k[0] == name: self.entries[k][0] = False
            self.forget()

    @rule()
    def restart(self):
        self.registry.close()
        self.registry = Registry(self.file)

    @invariant()
    def same(self):
        if not hasattr(self, 'registry'): return
        now = self.other.current()
        assert (now.names, now.rollouts, now.serial) == ({n: v for n,(v, _) in self.names.items()}, self.rollouts, self.lines)
        assert now.former == {n: f for n,(_, f) in self.names.items() if f}
        assert {(e.name, e.version): tuple(p.version for p in e.parts) for e in self.registry.entries()} == {
            k: parts for k,(_, parts) in self.entries.items()}
        assert [a.serial for a in self.other.audit(10**6)] == list(range(self.lines, 0, -1))

def test_any_changes_leave_what_a_plain_model_says(tmp_path):
    Model.folder = tmp_path
    Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None,
                                       suppress_health_check=list(HealthCheck))
    Model.TestCase('runTest').runTest()

# ---- what it holds

def test_an_entry_comes_back_as_it_was(key):
    with Registry() as r:
        whole = Entry('模型', 'v1', '/da ta/«x»', 'int8', manifest=signed(PLAIN, key))
        sums = Entry('mix', 'v3', parts=(Part('v1', -.1), Part('v2', 1 / 3)))
        assert r.add(whole, 'ann', 5.) and r.add(Entry('sql', 'v2', '/y'), 'ann', 6.) and r.add(sums, 'ann', 7.)
        assert r.entry('模型') == replace(whole, added=5.) and r.find('v3') == r.entry('mix') == replace(sums, added=7.)
        r.add(replace(whole, source='/new', manifest=None), 'ann', 9.)
        assert r.entry('模型', 'v1') == replace(whole, source='/new', manifest=None, added=5.) and r.find('v9') is None
        r.remove('模型', 'ann', 10.)
        assert [e.name for e in r.entries()] == ['mix', 'sql', '模型'] # the sum needs it
        r.remove('mix', 'ann', 11.)
        assert [e.name for e in r.entries()] == ['sql']

def test_a_version_never_changes():
    with Registry() as r:
        r.add(Entry('sql', 'v1', '/x'), 'ann', 0.)
        with pytest.raises(AssertionError, match='a version never changes'): r.add(Entry('sql', 'v1', '/x', 'int8'), 'ann', 0.)
        assert r.serial() == 1 and r.entry('sql').dtype == ''

def test_a_version_that_is_added_again_at_every_restart_is_forgotten_like_any_other():
    with Registry() as r:
        for v in ('v1', 'v2', 'v3'):
            r.add(Entry('sql', v, '/x'), 'ann', 0.)
            r.promote('sql', v, actor='ann', now=0.)
            r.add(Entry('sql', v, '/y'), 'server', 0.)
        assert [e.version for e in r.entries()] == ['v2', 'v3']

def test_a_composition_has_one_spelling():
    with Registry() as r:
        for v in 'ab': r.add(Entry(v, v, '/x'), 'ann', 0.)
        parts = Part('b', 3.), Part('a', .5)
        for given in (parts, parts[::-1]): r.add(Entry('mix', 'm', parts=given), 'ann', 0.)
        assert r.entry('mix').parts == (Part('a', .5), Part('b', 3.))
        r.add(Entry('mix', 'm', parts=(Part('m', 1.),)), 'ann', 0.) # the sum of itself, once
        r.add(Entry('more', 'n', parts=(Part('m', 2.), Part('a', -1.))), 'ann', 0.)
        for name in ('mix', 'a', 'b'): r.remove(name, 'ann', 0.)
        assert r.entry('more').parts == (Part('a', 0.), Part('b', 6.)) and [e.version for e in r.entries()] == ['a', 'b', 'n']

@pytest.mark.parametrize('what, why', [
    (lambda r: r.start('no', 'v1', 'ann', 0.), "no adapter 'no'"), (lambda r: r.remove('no', 'ann', 0.), "no adapter 'no'"),
    (lambda r: r.entry('no'), "no adapter 'no'"), (lambda r: r.entry('sql', 'v7'), "'sql' has no version 'v7'"),
    (lambda r: r.start('sql', 'v1', 'ann', 0.), "'sql' serves v1 already"),
    (lambda r: r.start('sql', 'v7', 'ann', 0.), "no version 'v7'"),
    (lambda r: r.promote('sql', actor='ann', now=0.), 'no rollout; say which'),
    (lambda r: r.roll_back('sql', 'ann', 0.), 'no former version'),
    (lambda r: r.add(Entry('mix', 'm', parts=(Part('v7', 1.),)), 'ann', 0.), "'mix' needs version v7, which the registry lacks"),
    (lambda r: r.start('on', 'b2', 'ann', 0.), "'on' has a rollout at 1 %"), (lambda r: Entry('a/b', 'v', '/x'), 'dots or slashes'),
    (lambda r: Entry('a', 'v', '/\udcff'), 'not UTF-8'), (lambda r: r.remove('\ud800', 'ann', 0.), 'cannot be written as UTF-8'),
    *((lambda r, x=x: r.start('sql', 'v1', 'ann', 0., x), 'watch=.*seconds, from 0') for x in (nan, -1., float('inf')))])
def test_a_refusal_says_why_and_changes_nothing(what, why):
    with Registry() as r:
        for name, version in (('sql', 'v1'), ('on', 'b1'), ('on', 'b2')): r.add(Entry(name, version, '/x'), 'ann', 0.)
        r.start('on', 'b2', 'ann', 0.)
        before = r.current(), r.entries(), r.audit()
        with pytest.raises(Refused, match=why): what(r)
        assert (r.current(), r.entries(), r.audit()) == before

def test_current_says_who_answers():
    with Registry() as r:
        r.add(Entry('sql', 'v1', '/x'), 'ann', 0.)
        assert r.current().version('sql', 'zoe') == 'v1' and r.current().version('no') is None
        r.add(Entry('sql', 'v2', '/x'), 'ann', 0.)
        r.start('sql', 'v2', 'ann', 0.)
        answers = Counter(r.current().version('sql', str(u)) for u in range(10_000))
        assert answers == {'v1': 9897, 'v2': 103}
        assert r.promote('sql', actor='ann', now=1.) == 'v2' and r.current().version('sql', 'zoe') == 'v2'
        assert r.roll_back('sql', 'ann', 2.) == 'v1'

def test_the_log_takes_any_text_and_only_grows():
    with Registry() as r:
        r.note('an\ud800n', 'no such name', 'x' * 10_000 + '\0', 1.)
        r.add(Entry('sql', 'v1', '/x'), "'; DROP TABLE audit; --", 2.)
        last, first = r.audit()
        assert (last.serial, last.action, last.actor) == (2, 'add', "'; DROP TABLE audit; --")
        assert first.actor == 'an?n' and len(first.detail) == 2000 and r.audit(1) == [last] and r.audit(name='sql') == [last]
        for change in ("UPDATE audit SET actor = 'bob'", 'DELETE FROM audit'):
            with pytest.raises(sqlite3.IntegrityError, match='only grows'): r._file.db.execute(change)

# ---- files and processes

def test_files_that_are_no_registry(tmp_path):
    def refused(why):
        before = file.read_bytes()
        with pytest.raises(Refused, match=why): Registry(file)
        assert file.read_bytes() == before
    with pytest.raises(Refused, match='unable to open'): Registry(tmp_path / 'no' / 'registry.db')
    file = tmp_path / 'x.db'
    file.write_bytes(b'not a database' * 999)
    refused('file is not a database')
    file = tmp_path / 'newer.db'
    Registry(file).close()
    with sqlite3.connect(file) as db: db.execute('PRAGMA user_version = 2')
    db.close()
    with pytest.raises(Refused, match=r'schema 2, not 1'): Registry(file)

def test_a_file_that_another_process_holds_is_refused_in_time_and_can_be_read(tmp_path):
    with Registry(tmp_path / 'r.db', wait=.05) as r:
        r.add(Entry('sql', 'v1', '/x'), 'ann', 0.)
        busy = sqlite3.connect(tmp_path / 'r.db', isolation_level=None)
        busy.execute('BEGIN IMMEDIATE')
        with pytest.raises(Refused, match='database is locked.*nothing was changed'): r.remove('sql', 'ann', 1.)
        assert r.current().names == {'sql': 'v1'} and r.serial() == 1
        busy.execute('ROLLBACK')
        busy.close()
        r.remove('sql', 'ann', 1.)

def test_threads_share_a_registry():
    with Registry() as r:
        def work(name):
            for i in range(30):
                r.add(Entry(name, f'{name}{i}', '/x'), name, i)
                r.promote(name, f'{name}{i}', actor=name, now=i)
                assert r.current().names[name] == f'{name}{i}'
        threads = [threading.Thread(target=work, args=(n,)) for n in 'abcdef']
        for t in threads: t.start()
        for t in threads: t.join()
        assert r.serial() == 6 * 60 and r.current().names == {n: f'{n}29' for n in 'abcdef'} and len(r.entries()) == 12

CHANGES = '''
import sys
from lorajax.registry import *
def changes(registry, n, done=lambda serial: None):
    "The nth change depends on n alone."
    names = 'red', 'blue'
    for i in range(n):
        name, k = names[i // 7 % 2], i // 14
        if i % 7 == 0: registry.add(Entry(name, f'{name}{k}', f'/{k}'), 'ann', i)
        elif i % 7 == 1: registry.promote(name, f'{name}{k}', actor='ann', now=i)
        elif i % 7 == 2: registry.add(Entry(name, f'{name}{k}b', f'/{k}b'), 'ann', i)
        elif i % 7 == 3: registry.start(name, f'{name}{k}b', 'ann', i)
        elif i % 7 in (4, 5): registry.step(registry.current().rollouts[name], 'advance', 'why', i)
        else: registry.roll_back(name, 'ann', i)
        done(i + 1)
'''
exec(CHANGES)

def test_a_killed_process_leaves_whole_changes(tmp_path):
    code = CHANGES + 'changes(Registry(sys.argv[1]), 10**6, lambda n: print(n, flush=True))'
    chance = random.Random(0)
    for trial in range(6):
        file = tmp_path / f'{trial}.db'
        process = subprocess.Popen([sys.executable, '-c', code, file], stdout=subprocess.PIPE, text=True)
        for _ in range(chance.randrange(1, 200)): process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().splitlines(True) if line.endswith('\n')]
        process.wait()
        process.stdout.close()
        with Registry(file) as left, Registry() as right:
            assert left.serial() >= max(told, default=1)
            changes(right, left.serial()) # a change is one line of the log
            assert (left.current(), left.entries(), left.audit(10**6)) == (right.current(), right.entries(), right.audit(10**6))
            checks = [left._file.db.execute(f'PRAGMA {what}').fetchall() for what in ('integrity_check', 'foreign_key_check')]
            assert checks == [[('ok',)], []]

def test_processes_that_start_at_once_share_a_file_and_step_once(tmp_path):
    "Each advances whatever rollout it sees; four steps lead through the stages, and each is done by one process."
    code = '''if True:
        import sys
        from lorajax.registry import *
        r, done = Registry(sys.argv[1], wait=30.), 0
        for i in range(20): r.add(Entry(sys.argv[2], f'{sys.argv[2]}{i}', '/x'), sys.argv[2], i)
        for version in ('v1', 'v2'): r.add(Entry('sql', version, '/x'), 'ann', 0.)
        try: r.start('sql', 'v2', 'ann', 0.)
        except Refused: pass
        while rollout := r.current().rollouts.get('sql'): done += r.step(rollout, 'advance', 'why', rollout.since + 1)
        print(done)'''
    code = code.replace('import sys\n', 'import sys\n        from lorajax.core import Refused\n', 1)
    file = tmp_path / 'r.db'
    everyone = [subprocess.Popen([sys.executable, '-c', code, file, n], stdout=subprocess.PIPE, text=True) for n in 'abc']
    done = [p.communicate(timeout=60)[0] for p in everyone]
    assert [p.returncode for p in everyone] == [0, 0, 0] and sum(map(int, done)) == 4
    with Registry(file) as r:
        assert r.current().names == dict(a='a0', b='b0', c='c0', sql='v2') and r.current().former == {'sql': 'v1'}
        assert Counter(a.action for a in r.audit(1000)) == dict(add=66, start=1, advance=3, promote=1)

def test_another_process_is_seen_by_its_serial_number(tmp_path):
    with Registry(tmp_path / 'r.db') as ours:
        before = ours.serial()
        code = 'from lorajax.registry import *; import sys; Registry(sys.argv[1]).add(Entry("sql", "v1", "/x"), "ann", 0.)'
        subprocess.run([sys.executable, '-c', code, tmp_path / 'r.db'], check=True)
        assert (before, ours.serial(), ours.current().names) == (0, 1, {'sql': 'v1'})
