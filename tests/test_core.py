"Not notebook cells: tables of values and files that are all wrong in their own way."
import json
import jax.numpy as jnp, numpy as np, pytest
from lorajax.core import Refused, Sampling, choices, quoted, read_json, read_text
from lorajax.sampler import sample, sampling_rows

BAD = dict(
    max_new_tokens=[0, -1, 2.5, 2., True, '8', None, 2**31, np.int64(8)],
    top_k=[-1, 1.5, True, '5', None, 99999999999, 2**31],
    seed=[-1, 2**63, 1., True, '7', 10**5000], ignore_eos=['no', 1, None],
    temperature=[-1, -.1, float('nan'), float('inf'), 1e-50, 1e-7, 1e40, 10**400, '1', True, None, 1j, [1.]],
    top_p=[0, 0., -1, 1.01, float('nan'), '1', True, None], min_p=[-.1, 1.1, float('nan'), True, None],
    repetition_penalty=[0, 1e-3, 101, float('inf'), -1, None], presence_penalty=[2.1, -2.1, float('nan'), '0', True],
    frequency_penalty=[-3, 10**400, None], n=[0, 129, 1.5, True], logprobs=[-1, 21, 1.5, True], echo=[1, None],
    include_stop=['', 0], stop=['', [''], list('abcde'), 5, ['a', None], b'x', {'a': 1}],
    stop_token_ids=[[-1], ['a'], 3, [True], [2**31]], response_format=['json_object', {}, 1],
    logit_bias=['x', 3, {'a': 1}, {3: 101}, {3: float('nan')}, {3: True}, {-1: 1}, {i: 0 for i in range(301)}])

@pytest.mark.parametrize('field, value', [(field, value) for field,values in BAD.items() for value in values],
                         ids=lambda x: quoted(x)[:30])
def test_sampling_is_refused_by_name(field, value):
    with pytest.raises(Refused, match=rf'^{field}=.*; it must be ') as e: Sampling(**{field: value})
    assert '\n' not in str(e.value) and len(str(e.value)) < 250

def test_what_sampling_takes_the_device_can_hold():
    rules = [Sampling(), Sampling(2**31 - 1, 1e-6, 2**31 - 1, 5e-324, 2**63 - 1), Sampling(1, 1e6, 1, 1, 0),
             Sampling(temperature=1), Sampling(temperature=np.float64(1e-6), top_k=3)]
    rules = [choices(s)[0] for s in rules]
    rows, logits = sampling_rows(rules), np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32) * 30
    assert rows.top_k.tolist() == [0, 2**31 - 1, 1, 0, 3] and rows.seed[1].tolist() == [2**31 - 1, 2**32 - 1]
    drawn, best = sample(jnp.array(logits), rows, jnp.zeros(5, jnp.int32)).token.tolist(), logits.argmax(1).tolist()
    assert [drawn[i] for i in (0, 1, 2, 4)] == [best[i] for i in (0, 1, 2, 4)] and 0 <= drawn[3] < 40

def test_forms_of_the_same_thing_are_one():
    one = Sampling(stop='x', logit_bias={7: 1, 3: -2.5}, stop_token_ids=[5])
    assert one == Sampling(stop=['x'], logit_bias=[[3, -2.5], [7, 1]], stop_token_ids=(5,))
    assert one.logit_bias == ((3, -2.5), (7, 1)) and Sampling(stop=list('abcd')).stop == tuple('abcd')
    assert Sampling(stop=None, logit_bias=None, stop_token_ids=None) == Sampling(stop=[], logit_bias={}) == Sampling()
    assert Sampling(max_new_tokens=0, echo=True).max_new_tokens == 0
    with pytest.raises(Refused, match='logit_bias names a token id twice'): Sampling(logit_bias=[(1, 2), (1, 3)])

@pytest.mark.parametrize('content, said', [
    (None, 'no such file'), ('dir', 'Is a directory'), (b'\xff\xfe', 'not readable as text'),
    (b'', 'not readable as JSON'), (b'{', 'not readable as JSON'), (b'[' * 100_000, 'not readable as JSON'),
    (b'{"a":' * 100_000, 'not readable as JSON'), (b'1' * 5000, 'not readable as JSON'),
    (b'[1]', 'holds a list'), (b'null', 'holds a NoneType'), (b'\xef\xbb\xbf{}', 'BOM')])
def test_json_that_cannot_be_read(tmp_path, content, said):
    file = tmp_path / 'x.json'
    if content == 'dir': file.mkdir()
    elif content is not None: file.write_bytes(content)
    with pytest.raises(Refused, match=f'x.json.*{said}.*; bake it again$') as e: read_json(file, 'bake it again')
    assert '\n' not in str(e.value) and str(e.value).count(str(tmp_path)) == 1

def test_paths_that_are_no_files(tmp_path):
    (tmp_path / 'file').write_text('{}')
    for path in (tmp_path / 'file/x.json', tmp_path / 'a\0b', tmp_path / ('x' * 300)):
        with pytest.raises(Refused, match='; fetch it$'): read_text(path, 'fetch it')
    (tmp_path / 'ok.json').write_text(json.dumps({'é': [1]}, ensure_ascii=False), 'utf-8')
    assert read_json(tmp_path / 'ok.json', '') == {'é': [1]} and read_text(tmp_path / 'file', '') == '{}'

def test_what_cannot_be_printed_can_be_quoted():
    nested = []
    for _ in range(100_000): nested = [nested]
    assert quoted(nested) == 'list' and quoted(10**5000) == 'int'
