"""Render all notebooks to _docs/*.html as a reader should see them: without hidden cells and directives, linked to one another."""
import re
from pathlib import Path
import nbformat
from nbconvert import HTMLExporter
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]

def readable(nb):
    nb.cells = [c for c in nb.cells if not re.match(r'#\| *(hide|default_exp)\b(?!_)', c.source)]
    for c in nb.cells: c.source = re.sub(r'^#\|.*\n', '', c.source, flags=re.M)
    return nb

def main():
    out, paths = ROOT / '_docs', sorted((ROOT / 'nbs').glob('[!_]*.ipynb'))
    out.mkdir(exist_ok=True)
    for path in track(paths, 'rendering'):
        nb = readable(nbformat.read(path, as_version=4))
        page, _ = HTMLExporter(embed_images=True).from_notebook_node(nb, resources={'metadata': {'name': path.stem}})
        (out / f'{path.stem}.html').write_text(re.sub(r'href="(?:nbs/)?([\w-]+)\.ipynb"', r'href="\1.html"', page))
    print(f'{len(paths)} pages; open {out.relative_to(ROOT)}/index.html')

if __name__ == '__main__': main()
