"""Settings that all tests share: JAX on the CPU, strict promotion, and the data that lies beside the checkout."""
import os
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

import gc
from pathlib import Path
import jax, pytest

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_enable_compilation_cache', False) # the command line's own, which tests in this process would fill

SHARED = Path(__file__).resolve().parents[2] / 'shared'

def pytest_addoption(parser): parser.addoption('--slow', action='store_true', help='run the long variants too')

def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'): return
    for item in items:
        if 'slow' in item.keywords: item.add_marker(pytest.mark.skip(reason='long; run with --slow'))

@pytest.fixture(scope='session')
def shared_data() -> Path:
    "Real public adapters, configs and traces; a checkout without them skips the tests that read them."
    if not SHARED.is_dir(): pytest.skip('the shared data folder is not beside this checkout')
    return SHARED / 'data'

@pytest.fixture(autouse=True)
def few_mappings():
    "Each compiled program takes mappings of memory. Linux allows a process 65,530, and XLA crashes when there are no more."
    yield
    maps = Path('/proc/self/maps')
    if maps.exists() and maps.read_bytes().count(b'\n') > 12_000:
        jax.clear_caches()
        gc.collect()
