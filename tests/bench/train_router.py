"""Train the router over the six example adapters, and say how it does on prompts that it hasn't seen.

    train_router.py [OUT]     writes examples/router, or another directory

The prompts are those of the adapters' own data, and general ones that the base should answer; the data lies beside the
repository and is not part of it. What is stored is 128 small numbers of each prompt, and no text.
"""
import csv, gzip, json, random, shutil, sys, time
from pathlib import Path
from train import ROOT, TASKS, pairs
from lorajax.encoders import StaticEncoder
from lorajax.evaluation import evaluate
from lorajax.lifecycle import ModelFolder
from lorajax.router import OUT_OF_SCOPE
from lorajax.router_model import encoded, fit_model

DATA, OUT = ROOT.parent / 'shared/data', ROOT / 'examples/router'
EACH, GENERAL, HELD_OUT = 900, 1000, 150 # prompts of an adapter and of none to train on; of each to test on

# A bare sentence doesn't say that it wants to be translated; the other wordings are for testing.
CHINESE = dict(train=('Translate into {1}: {0}', 'How do you say "{0}" in {1}?', 'What is "{0}" in {1}?',
                      'Please put this into {1}: {0}', '{0} Say that in {1}.'),
               test=('Translate this to {1}: {0}', 'Can you translate "{0}" to {1}?', 'In {1}: {0}'))
OTHERS = 'Spanish', 'French', 'German', 'Japanese', 'Latin'
OURS = ('restaurant_reservation', 'accept_reservations', 'confirm_reservation', 'cancel_reservation', 'how_busy',
        'calculator', 'translate') # CLINC150's intents that an adapter should answer

def sentences(split): return [p['input'].strip() for p in pairs('chinese', split)]

def worded(texts, split, into='Chinese'):
    return [CHINESE[split][i % len(CHINESE[split])].format(t, into) for i,t in enumerate(texts)]

def prompts(name, split):
    "Different prompts of an adapter's task; a bare '13' or 'yes please' says nothing without its conversation."
    if name == 'chinese': return worded(sentences(split), split)
    asked = [p['input'].strip() for p in pairs(name, split) if p['output'] != '{}'] # with something to put into slots
    return [p for p in dict.fromkeys(asked) if len(p.split()) >= 3]

def general(split):
    "Prompts that belong to no adapter: what CLINC150's users ask, MT-bench's, plain sentences and other translations."
    with gzip.open(DATA / 'intent_clinc150/clinc150.csv.gz', 'rt') as f:
        asked = [r['text'] for r in csv.DictReader(f) if r['split'] == split and r['intent'] not in OURS]
    with open(DATA / 'prompts/mt_bench_question.jsonl') as f: questions = list(map(json.loads, f))
    chat = [q['turns'][0] for q in questions if q['category'] not in ('math', 'coding')]
    chat = [t for i,t in enumerate(chat) if (i % 4 == 3) == (split == 'test')]
    plain = sentences(split)[::40]
    other = [t for i,into in enumerate(OTHERS) for t in worded(plain[i::15], split, into)]
    return dict(asked=asked, chat=chat, plain=plain, other=other)

def chosen(split, each, n_general):
    "Texts and the adapter of each, drawn with a fixed seed."
    def some(texts, n): return random.Random(0).sample(texts, min(n, len(texts)))
    found = [(t, name) for name in TASKS for t in some(prompts(name, split), each)]
    none = general(split)
    shares = dict(chat=1., plain=.2, other=.1) # of the general prompts, if there are as many
    few = [t for kind,share in shares.items() for t in some(none[kind], int(share * n_general))]
    found += [(t, OUT_OF_SCOPE) for t in few + some(none['asked'], n_general - len(few))]
    return [t for t,_ in found], [n for _,n in found]

def stored(model, rows, out):
    "Make the model the directory's only one."
    for old in Path(out).glob('*'):
        if old.is_dir(): shutil.rmtree(old)
        elif old.suffix != '.md': old.unlink()
    ModelFolder(out).promote(model, rows, time.time())

def decided(scores): # as the router does without a conversation
    sure = scores.readable and scores.confidence.max() >= scores.threshold
    return scores.labels[scores.p.argmax()] if sure else OUT_OF_SCOPE

def main(out=OUT):
    texts, names = chosen('train', EACH, GENERAL)
    encoder = StaticEncoder()
    rows = encoded(texts, names, encoder)
    model = fit_model(rows, encoder)
    stored(model, rows, out)
    texts, names = chosen('test', HELD_OUT, HELD_OUT)
    print(f'{model.version}: {len(rows)} prompts, threshold {model.threshold:.2f}')
    print(evaluate(model, texts, names))
    went = [decided(s) for s in model.scores(texts)]
    for name in dict.fromkeys(names):
        own = [w for w,n in zip(went, names) if n == name]
        right, base = (sum(w == which for w in own) / len(own) for which in (name, OUT_OF_SCOPE))
        print(f'{name:8} {len(own):3} prompts, {right:.2f} right, {base:.2f} answered by the base')

if __name__ == '__main__': main(*sys.argv[1:])
