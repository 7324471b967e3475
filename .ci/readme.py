"""Make README.md from nbs/index.ipynb: `readme.py` writes it, `readme.py --print` shows it."""
import sys
from pathlib import Path
import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]

def readme():
    nb = nbformat.read(ROOT / 'nbs/index.ipynb', as_version=4)
    nb.cells = [c for c in nb.cells if not c.source.startswith('#| hide')]
    nb.metadata['language_info'] = {'name': 'python'}   # nbdev_clean strips it; the code fences need it
    text, extra = MarkdownExporter().from_notebook_node(nb)
    assert not extra['outputs'], 'the index shows a picture; README.md has no place to keep it'
    text = text.replace("'../", "'")   # notebooks run in nbs/, a reader of README.md stands in the root
    head = '<!-- made from nbs/index.ipynb by .ci/readme.py; edit the notebook -->\n\n'
    return head + '\n'.join(line.rstrip() for line in text.strip().splitlines()) + '\n'

if __name__ == '__main__':
    if '--print' in sys.argv: print(readme(), end='')
    else: (ROOT / 'README.md').write_text(readme())
