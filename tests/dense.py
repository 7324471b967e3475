"""The dense reference: a Llama forward pass in float32 NumPy without cache, batch or slots.

Each adapted weight is `W + s·B·A`. It shares no code with lorajax beyond the names of tensors.
"""
import numpy as np

def merged(weights, modules):
    "Weights with the adapter's deltas added, the embedding's transposed; an adapted tied head gets its own weight."
    w = dict(weights)
    for path,p in modules.items():
        delta = np.float64(p.scale) * (p.b.astype(np.float64) @ p.a.astype(np.float64))
        if path == 'lm_head' and 'lm_head.weight' not in w: w['lm_head.weight'] = w['model.embed_tokens.weight']
        if path == 'model.embed_tokens':
            w.setdefault('lm_head.weight', w['model.embed_tokens.weight'])
            delta = delta.T
        w[f'{path}.weight'] = (w[f'{path}.weight'] + delta).astype(np.float32)
    return w

def _norm(x, w, eps): return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w

def _rotate(x, theta): # [S, H, C], plain rotary embedding
    C = x.shape[-1]
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, C, 2) / C)
    a, b = x[..., :C//2], x[..., C//2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

def logits(c, w, ids, before=None, start=0, routing=None): # [S] -> [S, V]
    "Logits at every position. Positions below `start` have the weights `before`; id -1 has the embedding `routing`."
    x = w['model.embed_tokens.weight'][list(ids)].astype(np.float64)
    if routing is not None: x[np.array(ids) == -1] = routing
    early = np.arange(len(ids))[:, None] < start
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for i in range(c.n_layers):
        L = f'model.layers.{i}.'
        def linear(name, x):
            by = lambda w: x @ w[f'{L}{name}.weight'].T.astype(np.float64)
            return np.where(early, by(before), by(w)) if start else by(w)
        h = _norm(x, w[f'{L}input_layernorm.weight'], c.rms_eps)
        q, k, v = (linear(f'self_attn.{m}_proj', h).reshape(len(ids), -1, c.head_dim) for m in 'qkv')
        q, k = _rotate(q, c.rope_theta), _rotate(k, c.rope_theta)
        heads = []
        for n in range(c.n_heads):
            g = n // (c.n_heads // c.n_kv_heads)
            s = np.where(causal, q[:, n] @ k[:, g].T / np.sqrt(c.head_dim), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, g])
        x = x + linear('self_attn.o_proj', np.concatenate(heads, -1))
        h = _norm(x, w[f'{L}post_attention_layernorm.weight'], c.rms_eps)
        gate, up = linear('mlp.gate_proj', h), linear('mlp.up_proj', h)
        x = x + linear('mlp.down_proj', gate / (1 + np.exp(-gate)) * up)
    return _norm(x, w['model.norm.weight'], c.rms_eps) @ w.get('lm_head.weight', w['model.embed_tokens.weight']).T

def greedy(c, w, ids, n, **kw): # -> n token ids; kw: as for `logits`
    "Greedy continuation, from scratch at every token."
    ids, out = list(ids), []
    for _ in range(n):
        out.append(int(logits(c, w, ids, **kw)[-1].argmax()))
        ids.append(out[-1])
    return out
