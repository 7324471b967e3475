"Public traces, joined: arrivals and lengths of conversations, adapters of an image service, text made up in sessions."
import csv, gzip
from datetime import datetime
import numpy as np
from lorajax.traffic import popularity, visits

def conversations(data): # data: the folder of shared data -> seconds since the first, (tokens of prompt, of answer)
    path = data / 'trace_azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz'
    with gzip.open(path, 'rt') as f: rows = list(csv.DictReader(f))
    at = [datetime.fromisoformat(r['TIMESTAMP'][:26]) for r in rows]
    return [(t - at[0]).total_seconds() for t in at], [(int(r['ContextTokens']), int(r['GeneratedTokens'])) for r in rows]

def adapters(data, most):
    "The first adapter of each request that has one, in order, of the most popular; made-up ones where these are too few."
    with gzip.open(data / 'trace_alibaba_genai_lora/lora_sequence.csv.gz', 'rt') as f:
        used = [row['loras'].split(':')[0] for row in csv.DictReader(f) if row['loras']]
    with open(data / 'trace_alibaba_genai_lora/lora_popularity.csv') as f:
        rank = {row['lora']: int(row['rank']) for row in csv.DictReader(f)}
    if most > len(rank): # 874
        return [f'a{i}' for i in np.random.default_rng(1).choice(most, len(used), p=popularity(most))]
    return [f'a{rank[lora] - 1}' for lora in used if rank[lora] <= most]

def traffic(data, most=200, times=1, hours=1., **options): # times: that much faster, by laying hours over one another
    "The trace's hour, as often as needed to have so many times its rate."
    at, lengths = conversations(data)
    every = sorted((t + .37 * k) % at[-1] if k else t for k in range(times) for t in at)
    order = np.random.default_rng(0).permutation(len(every)) if times > 1 else range(len(every))
    names = adapters(data, most)
    keep = sum(t <= 3600 * hours for t in every)
    chosen = (names[i % len(names)] for i in range(keep))
    return list(visits(every[:keep], (lengths[i % len(at)] for i in order), chosen, **options))
