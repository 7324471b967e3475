"""A decoder's logits for whole texts at once, without pages."""
import jax.numpy as jnp, numpy as np
from lorajax.model import Segment, WholeRows
from lorajax.working_set import working_set

def logits(base, rows, adapters=(), slots=None): # rows: token ids, of any lengths -> [S, V] of each row
    "Logits at every position of every row; row i has the adapter in `slots[i]`, 0 for none."
    longest = max(map(len, rows))
    tokens = np.array([[*r, *[0] * (longest - len(r))] for r in rows], np.int32)
    slots = jnp.array(slots if slots is not None else [0] * len(rows), jnp.int32)
    groups = working_set(list(adapters), base.config, base.dtype)
    positions = jnp.broadcast_to(jnp.arange(longest)[None], tokens.shape)
    (states,), _ = base.decoder([Segment(jnp.array(tokens), positions, slots)], WholeRows(), groups)
    score = lambda i, n: np.asarray(base.decoder.score(states[i, :n], jnp.repeat(slots[i:i+1], n), groups))
    return [score(i, len(r)) for i,r in enumerate(rows)]
