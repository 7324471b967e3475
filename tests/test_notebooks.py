"""Every notebook runs, in order and on the CPU; the generated package and README.md are what the notebooks say."""
import ast, os, shutil, subprocess, sys
from pathlib import Path
import nbformat, pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(p.name for p in (ROOT / 'nbs').glob('[!_]*.ipynb'))

def run(*command, cwd=ROOT):
    env = os.environ | {'JAX_PLATFORMS': 'cpu'}
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, env=env)

@pytest.mark.parametrize('name', NOTEBOOKS)
def test_notebook_runs(name):
    done = run(sys.executable, ROOT / '.ci/run_nbs.py', '--check', ROOT / 'nbs' / name)
    assert done.returncode == 0, done.stdout + done.stderr

def tree(folder):
    files = (p for p in folder.rglob('*') if p.is_file() and '__pycache__' not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

def test_package_and_clean_notebooks_are_in_sync(tmp_path):
    ignore = shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints', '_*.ipynb')
    for part in ('nbs', 'lorajax'): shutil.copytree(ROOT / part, tmp_path / part, ignore=ignore)
    shutil.copy(ROOT / 'settings.ini', tmp_path)
    before = tree(tmp_path)
    for p in (tmp_path / 'lorajax').glob('[!_]*.py'): p.unlink() # what no notebook makes any more must not survive
    tools = Path(sys.executable).parent
    for command in ('nbdev_export', 'nbdev_clean'):
        done = run(tools / command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    changed = sorted(k for k in before.keys() | tree(tmp_path).keys() if before.get(k) != tree(tmp_path).get(k))
    assert not changed, f'run nbdev_export and nbdev_clean: {changed}'

def test_readme_is_made_from_the_index():
    made = run(sys.executable, ROOT / '.ci/readme.py', '--print').stdout
    assert made == (ROOT / 'README.md').read_text(), 'run .ci/readme.py'

def test_notebooks_keep_outputs_and_stay_small():
    for name in NOTEBOOKS:
        cells = nbformat.read(ROOT / 'nbs' / name, as_version=4).cells
        code = [c for c in cells if c.cell_type == 'code' and not c.source.startswith('#|')]
        assert not code or any(c.outputs for c in code), f'{name} shows nothing; run make nbs'
        assert all(o.output_type != 'error' for c in code for o in c.outputs), name
        assert len(cells) <= 62 and (ROOT / 'nbs' / name).stat().st_size <= 150_000, name

def modules():
    "Module -> its place in reading order, from each notebook's default_exp."
    order = {}
    for i,name in enumerate(NOTEBOOKS):
        for cell in nbformat.read(ROOT / 'nbs' / name, as_version=4).cells:
            if '#| default_exp ' in cell.source: order[cell.source.split('#| default_exp ')[1].split()[0]] = i
    return order

def test_modules_import_only_from_lower_numbers():
    order = modules()
    files = {p.stem for p in (ROOT / 'lorajax').glob('[!_]*.py')}
    assert files == order.keys(), 'every module has a notebook and every notebook its module'
    for module,place in order.items():
        for node in ast.walk(ast.parse((ROOT / f'lorajax/{module}.py').read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                for name in [node.module] if node.module else [a.name for a in node.names if a.name != '__version__']:
                    assert order[name] < place, f'{module} imports {name}, which comes later'

def check_imports(names, banned):
    "A fresh process that imports `names` has imported none of `banned`."
    code = f'import sys, {", ".join(names)}; bad = {banned} & sys.modules.keys(); assert not bad, bad'
    done = run(sys.executable, '-c', code)
    assert done.returncode == 0, done.stderr

@pytest.mark.parametrize('module', ['core', 'adapters', 'lora_config', 'peft', 'pages', 'images', 'weights', 'hf',
                                    'gguf_files', 'text', 'tokenizer_files', 'kv', 'registry', 'router', 'encoders',
                                    'classifiers', 'router_model', 'evaluation', 'shared_state', 'lifecycle', 'route_cli',
                                    'plan', 'scheduler', 'cost', 'traffic', 'simulator',
                                    'affinity', 'policies', 'placement'])
def test_host_modules_never_import_jax_or_torch(module):
    check_imports([f'lorajax.{module}'], {'jax', 'torch', 'transformers', 'peft'})

def test_no_module_imports_torch():
    check_imports([f'lorajax.{m}' for m in modules()], {'torch', 'transformers', 'peft', 'sklearn'})
