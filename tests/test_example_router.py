"Not notebook cells: the router that answers `auto` beside the example adapters, on prompts that it wasn't trained on."
import json, subprocess, sys
from pathlib import Path
import pytest
from lorajax.evaluation import evaluate
from lorajax.lifecycle import ModelFolder
from lorajax.router import OUT_OF_SCOPE, Router, RouteRequest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'examples/router'
ADAPTERS = sorted(p.parent.name for p in (ROOT / 'examples/adapters').glob('*/card.json'))

OURS = { # written for this test; 'base' is for what belongs to no adapter
    'bard': ['Write a line for Hamlet.', 'Write a line for Lady Macbeth.', 'Write a line for Second Murderer.',
             'Write a line for Prospero.', 'Write a line for the Fool.'],
    'bash': ['Find all python files that were changed today', 'Count the lines of every log file under /var/log',
             'Delete empty directories below the current one', 'Print the second column of data.txt',
             'Archive the folder src as a tar.gz file'],
    'chinese': ['Translate into Chinese: The train leaves at noon.', 'How do you say "thank you very much" in Chinese?',
                'Please put this into Chinese: My sister lives in London.', 'Say "where is the station" in Chinese.',
                'What is "good luck" in Chinese?'],
    'maths': ['Anna has 12 apples and gives a third of them to Ben. How many apples does she have left?',
              'A book costs $14 and a pen costs $3. How much do two books and five pens cost?',
              'Tom runs 4 miles every day for 3 weeks. How many miles does he run in total?',
              'There are 30 students in a class and 40% of them are boys. How many girls are there?',
              'Maria earns $15 an hour and works 8 hours a day. How much does she earn in 5 days?'],
    'slots': ['I would like a table for four tomorrow at 7 pm', 'Book a table for two on Friday for Miller',
              'Can I reserve a table for 6 people at 8:30?', 'My name is Alice Brown and we are five people',
              'a table for 3 at 12:15 please'],
    'sql': ['Who teaches EECS 281 next semester ?', 'Is MATH 217 offered in the winter ?',
            'How many credits is BIOLOGY 172 ?', 'What are the prerequisites for EECS 492 ?',
            'Which classes satisfy the ULCS requirement ?'],
    'base': ['What is the capital of Norway?', 'Explain how photosynthesis works.', 'Hello, how are you today?',
             'Why is the sky blue?', 'Tell me a story about a dragon.', 'How do I become more patient?',
             'Translate into Spanish: The train leaves at noon.', 'What is the weather like in Paris?']}

@pytest.fixture(scope='module')
def model(): return ModelFolder(FOLDER).current()

@pytest.fixture(scope='module')
def training(shared_data):
    sys.path.insert(0, str(ROOT / 'tests/bench'))
    try: import train_router
    finally: sys.path.pop(0)
    return train_router

def chosen(model, texts):
    router = Router(model)
    return [router.route(RouteRequest(t), ADAPTERS, now=0).name for t in texts]

def test_its_labels_are_the_example_adapters(model): assert sorted(model.labels) == sorted([*ADAPTERS, OUT_OF_SCOPE])

@pytest.mark.parametrize('name', OURS)
def test_four_of_five_prompts_go_where_they_belong(model, name):
    went = chosen(model, OURS[name])
    assert went.count(name) >= .8 * len(went), dict(zip(OURS[name], went))

def test_held_out_prompts_of_the_data_go_where_they_belong(model, training):
    texts, names = training.chosen('test', training.HELD_OUT, training.HELD_OUT)
    went = chosen(model, texts)
    wanted = ['base' if n == OUT_OF_SCOPE else n for n in names]
    right = {name: sum(w == n == name for w,n in zip(went, wanted)) / wanted.count(name) for name in set(wanted)}
    assert min(right.values()) >= .8, right
    report = evaluate(model, texts, names)
    assert report.ndcg >= .98 and report.accuracy >= .96 and report.calibration <= .1

def test_no_held_out_prompt_was_trained_on(training):
    learnt = {t.lower() for t in training.chosen('train', training.EACH, training.GENERAL)[0]}
    asked, names = training.chosen('test', training.HELD_OUT, training.HELD_OUT)
    again = [n for t,n in zip(asked, names) if t.lower() in learnt]
    assert set(again) <= {'bard'}, again # "Write a line for NAME.", and the parts of a play are few

def test_it_runs_without_what_trained_it():
    "A process in which scikit-learn, PyTorch, onnxruntime and sentence-transformers can't be imported."
    code = '''if True:
        import json, sys
        for name in ('sklearn', 'torch', 'onnxruntime', 'sentence_transformers', 'model2vec'): sys.modules[name] = None
        from lorajax.lifecycle import ModelFolder
        model = ModelFolder(sys.argv[1]).current()
        print(json.dumps([s.ranked()[0][0] for s in model.scores(sys.argv[2:])]))'''
    asked = OURS['bash'][0], OURS['sql'][0]
    done = subprocess.run([sys.executable, '-c', code, FOLDER, *asked], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ['bash', 'sql']

def test_it_is_small(): assert sum(p.stat().st_size for p in FOLDER.rglob('*') if p.is_file()) < 1_000_000
