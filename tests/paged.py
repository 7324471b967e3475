"""The oracle of paged attention: rows in pages full of NaN, and softmax in float64 NumPy, one query after another."""
import jax.numpy as jnp, ml_dtypes, numpy as np
from lorajax.attention import PagedKV

DTYPES = {'float32': (np.float32, np.uint32), 'bfloat16': (ml_dtypes.bfloat16, np.uint16)}
EVERYTHING = 1 << 20 # a window that hides nothing

def attend_numpy(q, k, v, positions, window): # [S, H, C], [N, K, C], [N, K, C], [S] -> [S, H, C]
    "One row in float64, one query and head after another; zeros where a position is -1."
    out = np.zeros(q.shape)
    for s, p in enumerate(positions):
        if p < 0: continue
        past = slice(max(0, p - window + 1), p + 1)
        for h in range(q.shape[1]):
            keys, values = (m[past, h * k.shape[1] // q.shape[1]].astype(np.float64) for m in (k, v))
            e = keys @ q[s, h].astype(np.float64) / np.sqrt(q.shape[2])
            e = np.exp(e - e.max())
            out[s, h] = e / e.sum() @ values
    return out

class Pages:
    "Rows in shuffled pages of a buffer that is NaN in every bit pattern which isn't a row's own."
    def __init__(self, lengths, block, K, C, L=3, layer=1, dtype='float32', room=2, seed=0):
        number, word = DTYPES[dtype]
        self.rng, self.lengths, self.layer = np.random.default_rng(seed), lengths, layer
        blocks = [-(-n // block) for n in lengths]
        ids = self.rng.permutation(sum(blocks)) + 1
        self.tables = np.zeros((len(lengths), max(blocks) + room), np.int32) # what isn't a row's points at page 0
        buffer = np.full((len(ids) + 1, L, 2, block, K * C), np.nan, number)
        self.k, self.v = ([self.rng.normal(size=(n, K, C)).astype(number) for n in lengths] for _ in 'kv')
        at = 0
        for b, n in enumerate(blocks):
            self.tables[b, :n] = ids[at:at + n]
            at += n
            for p in range(lengths[b]):
                for part, m in enumerate((self.k, self.v)):
                    buffer[self.tables[b, p // block], layer, part, p % block] = m[b][p].reshape(-1)
        self.number, self.buffer = number, buffer
        words = jnp.asarray(buffer.reshape(len(buffer), -1).view(word))
        self.kv = PagedKV(words, jnp.int32(layer), jnp.asarray(self.tables), block, K, C)

    def queries(self, S, H): return self.rng.normal(size=(len(self.lengths), S, H, self.kv.channels)).astype(self.number)

    def wanted(self, q, positions, window):
        rows = zip(q, self.k, self.v, np.asarray(positions))
        return np.stack([attend_numpy(*row, window) for row in rows])

def close(got, wanted, dtype):
    assert got.dtype == np.float32 and np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-2 if dtype == 'bfloat16' else 3e-6)
