"""What Ray Serve costs: the same streamed and whole answers, 16 at a time, from the plain server and through one replica.

SmolLM2 in bfloat16 with the six example adapters in turn, 64 prompt tokens and 16 new ones, greedy, as in over_http.
"""
import tempfile
from pathlib import Path
import served
from over_http import ADAPTERS, SIZE, by_http
from quiet import ratio, take_turns

def ray(budget, options):
    "The two take turns; while one works, the other waits for requests."
    with tempfile.TemporaryDirectory() as tmp:
        def server(name, *flags): return served.ServerProcess(
            Path(tmp) / f'{name}.log', *flags, model='smollm2', adapters=ADAPTERS, state=f'{tmp}/{name}', **SIZE)
        with server('plain') as plain, server('ray', '--ray') as replica:
            things = {f'{name}, {how}': (lambda url=s.url, stream=how == 'streamed': by_http(url, stream))
                      for name, s in dict(plain=plain, Ray=replica).items() for how in ('streamed', 'whole')}
            for f in things.values(): f()
            runs = take_turns(things, budget)
    return [*(ratio('ray', f'Ray / plain server, {how}', runs[f'plain, {how}'], runs[f'Ray, {how}'], 'total', 'one replica')
              for how in ('streamed', 'whole')),
            ratio('ray', 'Ray / plain server, first token', runs['Ray, streamed'], runs['plain, streamed'], 'first',
                  'a time: more is slower')]
