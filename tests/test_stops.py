"Not notebook cells: random texts, pieces and stops against the naive search, and a stop as long as a book."
import codecs, time
import pytest
from hypothesis import given, settings, strategies as st
from lorajax.base import byte_tokenizer
from lorajax.core import Refused, Sampling
from lorajax.stops import Answer, StopMatcher, fallbacks

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_ids[0]
ids = TOKENIZER.encode

def cut(text, stops, include=False): # the text; the stop that ended it
    "The definition: after each character, see whether a stop is complete."
    for end in range(1, len(text) + 1):
        whole = [s for s in stops if text[:end].endswith(s)]
        if whole: return text[:end if include else end - len(max(whole, key=len))], max(whole, key=len)
    return text, None

def streamed(stops, pieces, include=False): # every piece that comes out; the matcher
    m = StopMatcher(stops, include)
    return [*map(m.push, pieces), m.finish()], m

words = st.text('ab', min_size=1, max_size=5) | st.text('abé日\n:', min_size=1, max_size=4)

@settings(max_examples=400, deadline=None)
@given(st.lists(st.text('ab', max_size=4) | st.text('abé日\n:', max_size=4), max_size=12), st.lists(words, max_size=4),
       st.booleans())
def test_streaming_gives_what_the_whole_text_gives(pieces, stops, include):
    out, m = streamed(stops, pieces, include)
    text, found = cut(''.join(pieces), stops, include)
    assert ''.join(out) == text and m.found == found
    again, _ = streamed(stops, ''.join(pieces), include)
    assert ''.join(again) == text

@settings(max_examples=200, deadline=None)
@given(st.lists(st.text('ab', max_size=3), max_size=10), st.lists(words, min_size=1, max_size=4))
def test_no_more_waits_than_has_to(pieces, stops):
    m, seen = StopMatcher(stops), ''
    for piece in pieces:
        seen += piece
        m.push(piece)
        if m.found: return
        could_begin = [k for k in range(len(seen) + 1) if any(s[:len(seen) - k] == seen[k:] for s in stops)]
        assert m.held == seen[min(could_begin):]

@pytest.mark.parametrize('pieces, stops, text', [
    (['Hi', '\n', 'User', ':', ' no'], ['\nUser:'], 'Hi'), (['aaab'], ['aab'], 'a'), (list('aaab'), ['aab'], 'a'),
    (['a', 'aa', 'b'], ['aab'], 'a'), (['1', 'st', 'op', '!', '?'], ['1stop!?'], ''), ([], ['a'], ''),
    (['ok ', 's', 't', 'o', 'p'], ['stop'], 'ok '), (['xabcd'], ['abcd', 'bc'], 'xa'), (['xabd'], ['abcd', 'd'], 'xab'),
    (['User:'], [':', 'User:'], ''), (['ab'], ['abc'], 'ab'), (['日', '本', '語'], ['本語'], '日'),
    (['a\ufffdb'], ['\ufffd'], 'a'), (['', ''], ['a'], ''), (['abab', 'abc'], ['ababc'], 'ab')])
def test_B69_first_part_of_a_stop_string_reaches_the_client(pieces, stops, text):
    out, m = streamed(stops, pieces)
    assert ''.join(out) == text == cut(''.join(pieces), stops)[0]
    assert all(text.startswith(''.join(out[:i])) for i in range(len(out) + 1))

def test_after_a_stop_nothing_comes():
    m = StopMatcher(['b'])
    assert [m.push('ab'), m.push('c'), m.finish(), m.push('b')] == ['a', '', '', ''] and m.found == 'b'

def test_a_long_repetitive_stop_takes_linear_time():
    stop, text = 'a' * 20000 + 'b', 'a' * 60000
    start = time.process_time()
    out, m = streamed([stop] * 4, [text[i:i+5] for i in range(0, len(text), 5)])
    assert ''.join(out) == text and m.found is None and fallbacks(stop)[19999] == 19999
    assert time.process_time() - start < 5

# --- answers: tokens, characters, stops and ends together

def naive(tokens, s): # the whole text; how it ends; after how many tokens
    ends = {*s.stop_token_ids, *(() if s.ignore_eos else [END])}
    for n,t in enumerate(tokens, 1):
        last = t in ends or n == s.max_new_tokens
        data = b''.join(TOKENIZER.token_bytes(i) for i in tokens[:n] if i != END and (i != t or t not in ends))
        text, found = cut(codecs.getincrementaldecoder('utf-8')('replace').decode(data, last), s.stop, s.include_stop)
        if last or found: return text, 'stop' if found or t in ends else 'length', n

LETTERS = [*ids('ab'), *ids('é'), *ids('日'), END]

@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ids('ab')) | st.sampled_from(LETTERS), min_size=1, max_size=14),
       st.lists(st.text('abé日', min_size=1, max_size=3), max_size=3), st.booleans(), st.booleans(), st.integers(1, 14))
def test_an_answer_is_its_text_cut_where_it_ends(tokens, stops, include, ignore_eos, most):
    s = Sampling(most, stop=stops, include_stop=include, ignore_eos=ignore_eos,
                 stop_token_ids=ids('b') if most % 3 == 0 else [])
    answer, said, tokens = Answer(TOKENIZER, s), [], tokens + ids('a') * most
    while not said or said[-1][1] is None: said.append(answer.push(tokens[len(said)]))
    assert (''.join(t for t,_ in said), said[-1][1], len(said)) == naive(tokens, s)

def said(tokens, complete=False, **rules):
    answer = Answer(TOKENIZER, Sampling(**rules))
    return [answer.push(t, complete and i == len(tokens) - 1) for i,t in enumerate(tokens)]

def test_ends_of_every_kind():
    assert said([*ids('ab'), END]) == [('a', None), ('b', None), ('', 'stop')]
    assert said([*ids('ab'), END], ignore_eos=True, max_new_tokens=3)[-1] == ('', 'length')
    assert said([*ids('ab'), -1], stop='bc') == [('a', None), ('', None), ('b', 'error')]
    assert said(ids('ab'), stop_token_ids=ids('b'))[-1] == ('', 'stop')
    assert said(ids('{}'), complete=True) == [('{', None), ('}', 'stop')]
    assert said(ids('ab'), max_new_tokens=2)[-1] == ('b', 'length')
    assert said(ids('ab'), max_new_tokens=2, stop='b')[-1] == ('', 'stop')
    assert said(ids('é')[:1], max_new_tokens=1) == [('\ufffd', 'length')]
    assert said(ids('é')[:1], max_new_tokens=1, stop='\ufffd') == [('', 'stop')]
    assert said([*ids('xé')[:2], END]) == [('x', None), ('', None), ('\ufffd', 'stop')]
    assert said(ids('xaby'), stop='ab', include_stop=True)[:3] == [('x', None), ('', None), ('ab', 'stop')]

def test_an_answer_that_is_cut_short_gives_what_it_held():
    answer = Answer(TOKENIZER, Sampling(stop='bc'))
    assert [answer.push(t) for t in ids('ab')] == [('a', None), ('', None)]
    assert [answer.finish(), answer.finish()] == ['b', '']

def test_B71_stop_accepted_and_ignored():
    for given, kept in [('x', ('x',)), (['x'], ('x',)), (list('abcd'), tuple('abcd')), ([], ()), (None, ())]:
        assert Sampling(stop=given).stop == kept
    for bad in (list('abcde'), '', [''], 5, ['a', None], [1], {'a': 1}, b'x'):
        with pytest.raises(Refused, match=r'^stop=.*; it must be a string or a list of at most 4'): Sampling(stop=bad)
