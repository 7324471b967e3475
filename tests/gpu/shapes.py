"""The one table of shapes on which the kernels are tested, tuned and timed: LoRA products first, then attention.

Widths are those of SmolLM2-135M (576), Llama 3.2 1B (2048), Llama 3.1 8B (4096) and 70B (8192). Not every combination of
width, rank, tokens and adapters is here; each value of each is, and each meets both of the kernels' forms.
"""
from dataclasses import dataclass
from functools import cached_property
from itertools import product
import ml_dtypes, numpy as np
from lorajax.attention import SPLIT
from lorajax.core import ModelConfig
from lorajax.kernels import page_group
from paged import EVERYTHING

SMOLLM2 = ModelConfig(vocab_size=49152, width=576, mlp_width=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                      max_len=8192, tied=True)
QKV = {576: (576, 192, 192), 2048: (2048, 512, 512), 4096: (4096, 1024, 1024), 8192: (8192, 1024, 1024)}

@dataclass(frozen=True)
class Case:
    "One product: `rows` x `tokens` tokens of width `n_in`, adapters of these ranks, and who uses which."
    n_in: int
    outs: tuple[int, ...]
    ranks: tuple[int, ...] # of slots 1, 2, ...
    rows: int
    tokens: int = 1 # in a row; 1 is decoding
    use: str = 'each' # rows go through the slots; 'one': all use slot 1; 'base': every fourth none; 'none': none at all
    dtype: str = 'bfloat16'
    int8: int = 0 # every int8-th adapter is int8; 0: no adapter

    @property
    def path(self): return 'decode' if self.tokens == 1 else 'prefill'
    @property
    def name(self):
        eight, ranks = f' int8/{self.int8}' if self.int8 else '', f'{len(self.ranks)}x r{min(self.ranks)}-{max(self.ranks)}'
        return f'{self.n_in}-{"+".join(map(str, self.outs))} {self.rows}x{self.tokens} {ranks} {self.use} {self.dtype}{eight}'
    @property
    def tolerance(self): return {'bfloat16': 1e-2, 'float32': 1e-5}[self.dtype] # relative to the largest result

    @property
    def slots(self): # [rows] int32
        i, n = np.arange(self.rows), len(self.ranks)
        slots = dict(one=np.ones_like(i), none=np.zeros_like(i), each=1 + i % n, base=np.where(i % 4, 1 + i % n, 0))[self.use]
        return np.random.default_rng(1).permutation(slots).astype(np.int32)

    @property
    def number(self): return np.dtype(ml_dtypes.bfloat16 if self.dtype == 'bfloat16' else np.float32)

    @cached_property
    def adapters(self): # as `page_group` takes them
        rng = np.random.default_rng(0)
        def module(slot, rank, out):
            if self.int8 and slot % self.int8 == 0:
                a, b = (rng.integers(-127, 128, (rank, n), np.int8) for n in (self.n_in, out))
                return a, b, rng.random(rank, np.float32) * np.float32(1e-4 / self.n_in ** .5)
            a, b = (rng.standard_normal((rank, n), np.float32) for n in (self.n_in, out))
            return (a / np.float32(self.n_in ** .5)).astype(self.number), b.astype(self.number), np.ones(rank, np.float32)
        return [[module(slot, rank, out) for out in self.outs] for slot, rank in enumerate(self.ranks, 1)]

    @cached_property
    def x(self): # [rows, tokens, in]
        return np.random.default_rng(2).standard_normal((self.rows, self.tokens, self.n_in), np.float32).astype(self.number)

    @cached_property
    def group(self): return page_group(self.adapters, self.dtype)

    def expected(self) -> list[np.ndarray]: # m times [rows, tokens, out_m] float64
        "The terms, slot by slot, from the adapters' own matrices."
        ys = [np.zeros((self.rows, self.tokens, out)) for out in self.outs]
        for slot, modules in enumerate(self.adapters, 1):
            x = self.x[self.slots == slot].astype('f8')
            for y, (a, b, scale) in zip(ys, modules):
                if len(x): y[self.slots == slot] = x @ a.astype('f8').T * scale @ b.astype('f8')
        return ys

    def error(self, ys) -> float:
        "The largest difference to `expected`, relative to the largest number there; infinite if a shape is wrong."
        want = self.expected()
        if [y.shape for y in ys] != [z.shape for z in want]: return np.inf
        return max(np.abs(np.asarray(y, 'f8') - z).max() / max(np.abs(z).max(), 1e-30) for y,z in zip(ys, want))

EVERY_RANK = (1, 8, 16, 48, 64, 128, 512)
SMALL = [ # in `make test` too
    Case(80, (96, 40), (3, 20, 12), 7, use='base', int8=2),
    Case(80, (96, 40), (3, 20, 12), 2, 21, int8=2),
    Case(80, (96, 40), (3, 20, 12), 5, use='base', dtype='float32', int8=2),
    Case(80, (96, 40), (3, 20, 12), 3, 11, use='base', dtype='float32', int8=2),
]
TABLE = SMALL + [
    Case(576, QKV[576], (16,), 1),
    Case(576, QKV[576], EVERY_RANK, 8, use='base', int8=2),
    Case(576, QKV[576], EVERY_RANK, 8, dtype='float32', int8=3),
    Case(576, (1536, 1536), (8,) * 64, 64),
    Case(1536, (576,), (16, 64), 256, use='base'),
    Case(576, QKV[576], (48,), 1, 512, use='one'),
    Case(576, (1536, 1536), EVERY_RANK, 7, 9, int8=2),
    Case(576, QKV[576], (16, 8), 3, 17, use='base', dtype='float32'),
    Case(576, (49152,), (8, 16), 2),
    Case(2048, QKV[2048], (16, 64, 8), 16, use='base', int8=3),
    Case(2048, QKV[2048], (128, 1, 48), 4, 100, use='base'),
    Case(4096, QKV[4096], (64, 16), 64, use='one', int8=2),
    Case(4096, QKV[4096], (16, 128), 2, 64, int8=2),
    Case(4096, QKV[4096], (16, 72), 2, 64),
    Case(8192, QKV[8192], (512,), 1),
    Case(8192, QKV[8192], (1, 16), 2, 16),
    Case(8192, QKV[8192], (8,), 1, 64),
    Case(8192, (8192,), (48,), 8, use='none'),
]

# What is timed: q, k and v of Llama 3.1 8B, rank 16, bfloat16

RANK, CACHE = 16, 256 << 20 # rank of every adapter; bytes that no GPU's cache holds

@dataclass(frozen=True)
class Load:
    "A product: so many tokens, in rows of `tokens`, over so many adapters, in a scan over as many layers as no cache holds."
    rows: int
    tokens: int
    adapters: int
    n_in: int = 4096
    outs: tuple[int, ...] = QKV[4096]
    most_layers: int = 256

    @property
    def path(self): return 'decode' if self.tokens == 1 else 'prefill'
    @property
    def T(self): return self.rows * self.tokens
    @property
    def adapter_bytes(self): return RANK * sum(self.n_in + out for out in self.outs) * 2
    @property
    def layers(self): return int(np.clip(CACHE // (self.adapter_bytes * self.adapters), 1, self.most_layers))
    @property
    def base_layers(self): return int(np.clip(CACHE // (self.n_in * sum(self.outs) * 2), 1, self.most_layers))
    @property
    def trips(self): return max(self.layers, min(64, self.most_layers)) # of the scan: a call's own cost must not show
    @property
    def used(self): return min(self.rows, self.adapters)
    @property
    def floor_bytes(self): # the adapters in use, activations in, float32 terms out
        return self.used * self.adapter_bytes + self.T * (self.n_in * 2 + sum(self.outs) * 4)

LOADS = [Load(rows, 1, n) for rows,n in product((256, 64, 8, 1), (256, 64, 8, 1)) if n <= rows]
LOADS += [Load(rows, T // rows, n) for T,n in product((4096, 512), (1, 8, 64, 256)) for rows in [max(n, T // 512)]]

# Attention of one query a row: heads, heads of keys and values, channels, positions in a page, window

ATTENTION = [(9, 3, 64, 22, EVERYTHING), (4, 1, 48, 200, 70), (8, 8, 16, 16, 300), (20, 1, 32, 8, 1), (6, 2, 128, 2, SPLIT)]
LENGTHS = [2 * SPLIT + 190, 1, 0, SPLIT, SPLIT + 1, 90] # at, under and over the borders of pages, trips and splits; an absent row

@dataclass(frozen=True)
class AttentionLoad:
    "Attention that is timed: rows of so many positions, heads as in Llama 3.1 8B."
    rows: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    channels: int = 128
    block: int = 16
    trips: int = 64

    @property
    def layer_bytes(self): return self.rows * self.length * 2 * self.kv_heads * self.channels * 2
    @property
    def layers(self): return int(np.clip(CACHE // self.layer_bytes, 1, self.trips))
    @property
    def floor_bytes(self): # keys and values, queries in, float32 out
        return self.layer_bytes + self.rows * self.heads * self.channels * (2 + 4)

ATTENTION_LOADS = [AttentionLoad(rows, length) for rows,length in [(64, 1024), (8, 1024), (256, 1024), (8, 8192), (64, 8192)]]
