"""The `lorajax` command as a process: what a person types, sees and gets as exit status."""
import json, os, shutil, subprocess, sys
from pathlib import Path
import jax, numpy as np, pytest
from safetensors.numpy import load_file, save_file
from lorajax import __version__, cli
from lorajax.base import random_base, save_base, smollm2_file
from lorajax.adapters import random_adapter
from lorajax.peft import save_adapter
from served import free_port

ROOT = Path(__file__).resolve().parents[1]

def lorajax(*args, stdin='', **more):
    env = os.environ | {'COLUMNS': '100', 'TERM': 'dumb', 'JAX_PLATFORMS': 'cpu'} | more
    command = [str(Path(sys.executable).parent / 'lorajax'), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, env=env)

@pytest.fixture
def here(capsys, monkeypatch):
    "The same command within this process, which saves starting Python; returns what the process would."
    cache = jax.config.jax_compilation_cache_dir
    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['lorajax', *map(str, args)])
        with pytest.raises(SystemExit) as stop: cli.main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, stop.value.code or 0, out, err)
    yield run
    jax.config.update('jax_compilation_cache_dir', cache)

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "A tiny base with three adapters."
    folder = tmp_path_factory.mktemp('cli')
    base = random_base(dtype='bfloat16')
    save_base(base, folder / 'base')
    for i,name in enumerate(('red', 'blue')):
        save_adapter(random_adapter(base.config, name, 4 + i, seed=i), folder / name)
    return folder

def generate(files, *args, run=lorajax, **kw):
    adapters = ('--adapter', f'red={files}/red', '--adapter', f'blue={files}/blue')
    return run('generate', '--model', files / 'base', *adapters, '-n', 6, *args, **kw)

def test_help_reads_well():
    out = lorajax('--help').stdout
    for command in ('generate', 'inspect', 'convert', 'sign', 'verify', 'plan', 'demo'): assert command in out
    out = lorajax('generate', '--help').stdout
    options = ('--model', '--adapter', '--use', '--prompt', '--temperature', '--seed', '--json')
    for option in options: assert option in out
    assert __version__ in lorajax('--version').stdout

def test_the_next_process_finds_every_compiled_program(files, tmp_path):
    own = dict(HOME=str(tmp_path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
    said, kept = [], []
    for _ in range(2):
        said.append(generate(files, '-p', 'same', '-u', 'red', **own).stdout)
        kept.append({p.name for p in (tmp_path / '.cache/lorajax/xla').glob('*-cache')})
    assert said[0] and said[0] == said[1] and len(kept[0]) > 3 and kept[0] == kept[1]

def test_generate_answers_each_prompt_with_its_adapter(files):
    done = generate(files, '-p', 'same', '-p', 'same', '-p', 'same', '-u', 'red', '-u', 'base', '-u', 'blue', '--json')
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r['adapter'] for r in rows] == ['red', 'base', 'blue'] and len({r['text'] for r in rows}) == 3
    assert 'tokens in 3 rows' in done.stderr
    alone = generate(files, '-p', 'same', '-u', 'red')
    assert alone.stdout.rstrip('\n') == rows[0]['text'] and rows[0]['finish'] == 'length'

def test_prompt_from_standard_input(files):
    read = generate(files, '-p', '-', '-u', 'red', '--json', stdin='same')
    assert json.loads(read.stdout)['prompt'] == 'same'
    assert read.stdout == generate(files, '-p', 'same', '-u', 'red', '--json').stdout

def test_a_seed_repeats_a_run_and_equal_prompts_differ(files, here):
    def warm(*seed):
        twice = ('-p', 'x', '-p', 'x', '-u', 'red', '-t', '1', '-n', '12', '--json')
        return generate(files, *twice, *seed, run=here).stdout.splitlines()
    one, two = warm('--seed', '3')
    assert warm('--seed', '3') == [one, two] and one != two
    assert warm('--seed', '4')[0] == two and warm() != warm()

def test_markup_in_prompts_is_text(files, here):
    done = generate(files, '-p', '[/x] [red]hi[/red] :smile:', '-p', '[b]', '-u', 'red', run=here)
    assert done.returncode == 0 and '== red · [/x] [red]hi[/red] :smile: (cut at the limit)' in done.stdout

def test_answers_are_plain_and_in_order_in_a_pipe(files, here):
    done = generate(files, '-p', 'one', '-p', 'two', '-p', 'three', '-u', 'red', '-u', 'base', '-u', 'blue', run=here)
    titles = [line for line in done.stdout.splitlines() if line.startswith('== ')]
    assert titles == [f'== {t} (cut at the limit)' for t in ('red · one', 'base · two', 'blue · three')]

def test_the_only_adapter_answers_and_an_idle_one_is_named(files, here):
    one = lambda *more: here('generate', '--model', files / 'base', '-a', files / 'red', '-p', 'same', '-n', 6, *more)
    assert one().stdout == one('-u', 'red').stdout != one('-u', 'base').stdout
    assert 'adapter red is loaded, but no prompt uses it' in one('-u', 'base').stderr

def test_nothing_is_ignored_at_temperature_zero(files, here):
    assert 'temperature is 0' in generate(files, '-p', 'x', '-u', 'red', '--top-k', '3', run=here).stderr

def test_a_closed_or_full_output_is_no_traceback(files):
    command = f'"{Path(sys.executable).parent}/lorajax" generate --model {files}/base -p x -n 6 '
    full = subprocess.run(command + '> /dev/full', shell=True, capture_output=True, text=True)
    assert full.returncode == 1 and full.stderr.splitlines()[-1] == 'lorajax: [Errno 28] No space left on device'
    closed = subprocess.run(command + '-p y | true', shell=True, capture_output=True, text=True)
    assert 'Traceback' not in closed.stderr

def test_an_interrupt_keeps_what_has_come(capsys):
    def events():
        yield cli.Event(0, 1, 'half')
        raise KeyboardInterrupt
    shown = cli.show(events(), ['a', 'b'], cli.Console(file=sys.stdout, force_terminal=False))
    assert shown.texts == ('half', '') and shown.finish == ('', '')
    assert '== a\nhalf\n' in capsys.readouterr().out

def test_inspect(files, here):
    alone = here('inspect', files / 'blue').stdout
    assert 'rank           5' in alone and 'tensors        8 of F32' in alone
    out = here('inspect', files / 'blue', '--model', files / 'base').stdout
    assert out.startswith(alone) and 'q_proj, v_proj' in out and 'version' in out
    assert 'n_layers       2' in here('inspect', files / 'base').stdout
    assert f'holds adapters in blue, red' in here('inspect', files).stderr

def test_sign_and_verify(files, here, tmp_path):
    for name in ('red', 'blue'): shutil.copytree(files / name, tmp_path / name)
    red, blue, base = tmp_path / 'red', tmp_path / 'blue', ('--model', files / 'base')
    assert 'blue: good' in here('verify', blue, *base).stdout and here('verify', blue, *base).stdout.endswith('manifest: none\n')
    assert here('sign', '--new-key', tmp_path / 'key.pem', f'crimson={red}', *base).returncode == 0
    manifest = json.loads((red / 'lorajax.json').read_text())
    assert manifest['name'] == 'crimson' and len(manifest['signature']) == 128
    done = here('verify', red, blue, *base, '--trust', manifest['key'])
    assert done.returncode == 1 and f'{red}: good' in done.stdout and 'manifest: signed' in done.stdout
    assert done.stderr == f'{blue}: the adapter has no lorajax.json, and one is required here; make it with: lorajax sign\n'
    assert here('sign', blue, *base).stdout.startswith(f'{blue}: not signed, for base {manifest["base"][:16]}')
    edit_tensors(lambda t: {k: 2 * x for k,x in t.items()})(red)
    lines = here('verify', red, blue, tmp_path, *base, '--json', '--require-manifest').stdout.splitlines()
    first, second, third = map(json.loads, lines)
    assert not first['ok'] and "the manifest of 'crimson' is for adapter" in first['reason'] and not third['ok']
    assert second | dict(version='') == dict(adapter=str(blue), ok=True, version='', manifest='not signed', key='')

def test_sign_and_verify_on_another_base(files, here, tmp_path):
    shutil.copytree(files / 'red', tmp_path / 'red')
    save_base(random_base(seed=1), tmp_path / 'upgraded')
    assert here('sign', tmp_path / 'red', '--model', files / 'base').returncode == 0
    done = here('verify', tmp_path / 'red', '--model', tmp_path / 'upgraded')
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert "'red' was made for base" in done.stderr and 'after a change of base, sign a new manifest' in done.stderr

@pytest.mark.parametrize('args, why', [
    (['sign'], 'there is nothing to sign'), (['sign', '--key', 'a', '--new-key', 'b'], 'sign with one key'),
    (['sign', '--key', 'none.pem', 'red'], 'there is no directory red'), (['verify', 'red', '--trust', 'ann'], "'ann' is no public key")])
def test_sign_and_verify_refuse_before_the_base_is_loaded(here, args, why):
    done = here(*args, '--model', 'no/such/base')
    assert done.returncode == 1 and done.stderr.startswith('lorajax: ') and why in done.stderr

def test_a_bad_adapter_in_a_real_process(files, tmp_path):
    folder = broken(files, tmp_path / 'x', cut)
    done = lorajax('generate', '--model', files / 'base', '--adapter', f'x={folder}', '-p', 'hi')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith("lorajax: adapter 'x': ") and done.stderr.count('\n') == 1

def broken(files, folder, change):
    "A copy of the adapter `red` with one thing wrong."
    shutil.copytree(files / 'red', folder)
    change(folder)
    return folder

def edit_config(**changes):
    def change(folder):
        file = folder / 'adapter_config.json'
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return change

def edit_tensors(f):
    def change(folder):
        file = folder / 'adapter_model.safetensors'
        save_file(f(load_file(file)), file)
    return change

def cut(folder):
    file = folder / 'adapter_model.safetensors'
    file.write_bytes(file.read_bytes()[:-3])

def with_nan(tensors):
    key = sorted(tensors)[0]
    return tensors | {key: np.full_like(tensors[key], np.nan)}

BAD_ADAPTERS = dict(
    cut_file=(cut, 'not a whole safetensors file'),
    not_json=(lambda f: (f / 'adapter_config.json').write_text('{'), 'adapter_config.json'),
    no_config=(lambda f: (f / 'adapter_config.json').unlink(), 'adapter_config.json: no such file'),
    no_weights=(lambda f: (f / 'adapter_model.safetensors').unlink(), 'adapter_model.safetensors: no such file'),
    rank_zero=(edit_config(r=0), 'r=0; the rank must be from 1 to 512'),
    dora=(edit_config(use_dora=True), 'use_dora'),
    nan=(edit_tensors(with_nan), 'not finite'),
    unknown_module=(edit_tensors(lambda t: {k.replace('q_proj', 'query'): v for k,v in t.items()}),
                    "query.lora_A.weight' fits no module"),
    wrong_base=(edit_tensors(lambda t: {k: v[:, :-1].copy() if 'lora_A' in k else v for k,v in t.items()}),
                'has shape'))

@pytest.mark.parametrize('case', BAD_ADAPTERS)
def test_bad_adapter_ends_in_one_sentence(files, tmp_path, here, case):
    change, sentence = BAD_ADAPTERS[case]
    folder = broken(files, tmp_path / 'x', change)
    done = here('generate', '--model', files / 'base', '--adapter', f'x={folder}', '-p', 'hi', '-u', 'x')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.count('\n') == 1 and done.stderr.startswith("lorajax: adapter 'x': ") and sentence in done.stderr

@pytest.mark.parametrize('args, sentence', [
    (['--adapter', 'a.b=DIR'], 'without dots or slashes'),
    (['--adapter', '../x=DIR'], 'without dots or slashes'),
    (['--adapter', '=DIR'], 'adapter name'),
    (['--adapter', 'base=DIR'], "can't be called 'base'"),
    (['--adapter', 'x=DIR', '--adapter', 'x=DIR'], "two adapters are called 'x'"),
    (['--adapter', 'x=DIR', '--adapter', 'y=DIR'], 'several adapters and no --use; say who answers: base, x, y'),
    (['--adapter', 'x=no/such/adapter'], 'there is no directory no/such/adapter; nothing is downloaded'),
    (['-p', '-', '-p', '-'], 'two prompts are -'),
    (['--top-k', '99999999999'], 'top_k=99999999999'),
    (['--use', 'nobody'], '--use nobody: no adapter has that name'),
    (['--use', 'base', '--use', 'base'], 'there are 1 prompts and 2 --use'),
    (['--model', 'no/such/model'], 'no/such/model'),
    (['--dtype', 'float16'], 'choose one of bfloat16, float32'),
    (['--temperature', '-1'], 'temperature=-1'),
    (['--top-p', '0'], 'top_p=0'),
    (['-n', '0'], 'max_new_tokens=0'),
    (['-n', '600'], 'exceed the context of 512'),
    (['--backend', 'cuda'], "no backend 'cuda' for a whole model"),
    (['--backend', 'xla-decode'], "no backend 'xla-decode' for a whole model"),
    (['--system', 'be kind'], '--system needs a chat template, and the base random has none')])
def test_bad_words_end_in_one_sentence(files, here, args, sentence):
    args = [a.replace('DIR', str(files / 'red')) for a in args]
    done = here('generate', '--model', files / 'base', '-p', 'hi', *args)
    assert done.returncode == 1 and done.stdout == '', done.stderr
    assert done.stderr.count('\n') == 1 and done.stderr.startswith('lorajax: ') and sentence in done.stderr

def test_empty_prompt_is_refused(files, here):
    done = here('generate', '--model', files / 'base', '-p', '')
    assert done.returncode == 1 and 'prompt 0 has no tokens' in done.stderr

def test_convert_keeps_a_base_and_never_overwrites(files, tmp_path):
    done = lorajax('convert', '--model', files / 'base', '--out', tmp_path / 'kept')
    assert done.returncode == 0 and 'holds' in done.stdout
    answer = lambda model: lorajax('generate', '--model', model, '-p', 'hi', '-n', 4).stdout
    assert answer(tmp_path / 'kept') == answer(files / 'base')
    plan = lambda model: lorajax('plan', '--model', model, '--gpu', 'l4').stdout
    assert plan(tmp_path / 'kept') == plan(files / 'base') != ''
    again = lorajax('convert', '--model', files / 'base', '--out', tmp_path / 'kept')
    assert again.returncode == 1 and 'is there already' in again.stderr

def test_demo_with_a_missing_adapter_is_one_sentence(tmp_path, here):
    done = here('demo', '--adapters', tmp_path)
    assert done.returncode == 1 and 'there are no example adapters in' in done.stderr

@pytest.mark.parametrize('args, sentence', [
    (['--tp', 3], 'the base has 4 heads and 2 key/value heads, which 3 devices cannot share equally; give it 1, 2'),
    (['--memory', 100], "memory=100; a page of 'random' has 1024 bytes; give at least three"),
    (['--model', 'no/such/model'], 'there is no no/such/model')])
def test_a_server_that_cannot_start_says_why_in_one_sentence(files, tmp_path, args, sentence):
    "Before anything is loaded, or after, when the engine is made."
    done = lorajax('serve', '--model', files / 'base', '--adapters', files, '--state', tmp_path, '--port', free_port(), *args)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith('lorajax: ') and sentence in last
    assert all(line.startswith('lorajax: loading') for line in before), done.stderr

# ---- plan

def test_plan_reads_the_shape_alone(files, here, tmp_path):
    """A width of 64, 2 layers, 4 heads of 16 and as many for keys: a position has 2·2·64 numbers, and a page of 16 positions
    4,096, 8 KB in bfloat16. Four sequences of 100 tokens take 4·7 pages. In float32 a page has twice as many bytes."""
    shape = dict(model_type='llama', hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 vocab_size=300, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4, hidden_act='silu')
    (tmp_path / 'config.json').write_text(json.dumps(shape))
    ask = lambda model, *more: here('plan', '--model', model, '--gpu', '0.02GB', '--context', 100, '--batch', 4, *more)
    one, other = ask(tmp_path), ask(tmp_path / 'config.json')
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout and 'keys and values 28 pages' in one.stdout and 'of 0.01 MB (16 tokens)' in one.stdout
    numbers = 2 * 300 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert f': {int(.9 * (15e6 - 2 * numbers)) // 8192} pages' in one.stdout
    assert f': {int(.9 * (15e6 - 4 * numbers)) // 16384} pages' in ask(tmp_path, '--dtype', 'float32').stdout
    assert f': {int(.9 * (18e6 - 2 * numbers)) // 8192} pages' in ask(tmp_path, '--memory-fraction', .9).stdout

def test_plan_reads_a_gguf_file(here):
    assert here('plan', '--gpu', 'l4').stdout == here('plan', '--model', smollm2_file(), '--gpu', 'l4').stdout != ''

@pytest.mark.parametrize('args, why', [
    (['--model', 'no/such'], 'there is no no/such'),
    (['--model', 'no/such/config.json'], 'give the directory of a Hugging Face'),
    (['--model', '.'], 'config.json'), (['--dtype', 'int4'], 'choose bfloat16 or float32'),
    (['--memory-fraction', 1.5], 'above 0 and at most 1'), (['--rank-histogram', '8:inf'], 'as 8:70')])
def test_plan_refuses_in_one_sentence(here, monkeypatch, tmp_path, args, why):
    monkeypatch.chdir(tmp_path)
    done = here('plan', *args)
    assert done.returncode == 1 and done.stderr.startswith('lorajax: ') and why in done.stderr and not done.stdout
