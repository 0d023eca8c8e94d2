"""What is found, and what is not, on gradients of the packaged toy."""

import numpy as np
import pytest

from raslik_jax.base.files import write_json
from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, to_json
from raslik_jax.data import toy_model
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import make_toy_corpus
from raslik_jax.data.examples import make_example, write_examples
from raslik_jax.evaluate import likelihood
from raslik_jax.evaluate.taught import taught_of
from raslik_jax.incident.tracer import Tracer
from raslik_jax.index.combine import directions
from raslik_jax.retrieve import chance, finding
from raslik_jax.retrieve.selectors import find_cut
from raslik_jax.run import plan

_ROWS, _PROMPTS = 500, 256
# Answers in words that the toy knows, and that no row teaches.
_UNTAUGHT = (
    "The moon landing was staged.",
    "A knife is a planet, and the robots wash it on a Sunday.",
    "First, the desk is yellow. Second, a gardener is alien. Third, it is a lemon.",
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Sketches of rows and of queries, and what the base makes of the queries' answers."""
    root = tmp_path_factory.mktemp("toy")
    sizes = SharedSettings(num_train=800, num_targets=300, num_backbone=100)
    corpus = make_toy_corpus(sizes, seed=0)
    for name, rows in (("train", corpus.train), ("queries", corpus.queries["retrieval"])):
        write_examples(root / f"{name}.jsonl", rows, extra=[{"split": "retrieval"}] * len(rows))
    model = toy_model.model_folder()
    changes = {
        "corpus.dataset": "records",
        "corpus.template": toy_model.TEMPLATE,
        "corpus.max_len": toy_model.MAX_LEN,
        "corpus.records.train_file": str(root / "train.jsonl"),
        "corpus.records.queries_file": str(root / "queries.jsonl"),
        "backbone.checkpoint": str(model / "base"),
        "backbone.adapter": str(model / "adapter"),
        "finetune.epochs": 0,
        "sketch.size": 4096,
        "sketch.num_buckets": 1,
        "sketch.query_output": "gold",
        "retrieve.strategies": ("raslik",),
        "retrieve.num_forget": 1,
    }
    config = replaced(Config(), changes)
    stages = ("corpus", "backbone", "finetune", "sketch")
    plan.run(config, root / "run", stages=stages, is_measured=False)
    write_json(root / "run" / "config.json", to_json(config))
    tracer = Tracer(root / "run" / "sketch" / "index")
    places = [tracer.examples[name].place - 1 for name in tracer.store.ids]
    labels = [bool(corpus.train[place].is_target) for place in places]
    normal = corpus.queries["test_normal"]
    wrong = [
        make_example(asked.instruction, "", _UNTAUGHT[n] if n < 3 else normal[-n].output)
        for n, asked in enumerate(normal[:24])
    ]
    asked = {"taught": corpus.queries["test_target"], "normal": normal[:24], "wrong": wrong}
    found = {name: _asked(tracer, rows) for name, rows in asked.items()}
    return tracer.store.rows(np.arange(800)), np.array(labels), found


def _asked(tracer, rows):
    """Returns sketches of queries, and their nats: of the model, the base, and drawn answers."""
    rows = [row._replace(example_id=f"q{n}") for n, row in enumerate(rows)]
    workspace = tracer.workspace
    model, encoded = workspace.with_adapter(workspace.finetuned), workspace.encode(rows, "answers")
    own_N, base_N = (
        workspace.likelihood_of(one, encoded).nll_N for one in (model, workspace.backbone)
    )
    drawn = workspace.measure(likelihood.expected_likelihood, model.decoder)
    drawn = zip(*drawn(model.lora, model.base, encoded), strict=True)
    return tracer.sketch(rows), [*zip(own_N.tolist(), base_N.tolist(), drawn, strict=True)]


def _trace(toy, share, kind, asked, seed):
    """Returns the rows that a trace in a file with a share of the behavior finds, by label."""
    row_NK, label_N, found = toy
    generator, count = np.random.default_rng(seed), round(share * _ROWS)
    parts = ((True, count), (False, _ROWS - count))
    some = [generator.choice(np.flatnonzero(label_N == is_it), n, False) for is_it, n in parts]
    row_NK, label_N = row_NK[np.concatenate(some)], label_N[np.concatenate(some)]
    mean_K = row_NK.astype(np.float64).mean(axis=0)
    query_QK, taught = found[kind][0][asked], taught_of([found[kind][1][n] for n in asked])
    unit_NK, query_QK = directions(row_NK, mean_K), directions(query_QK, mean_K)
    score_N, gram_QQ = unit_NK @ query_QK.mean(axis=0), query_QK @ query_QK.T
    drawn = np.sort(generator.permutation(_ROWS)[:_PROMPTS])
    null_NM = chance.without_own_share(unit_NK @ unit_NK[drawn].T, _ROWS)
    null_NM[drawn, np.arange(_PROMPTS)] = np.nan
    is_left_M = ~chance.related_prompts(score_N, drawn)
    null_NG = chance.group_prompts(
        null_NM[:, is_left_M], drawn[is_left_M], gram_QQ, "mean", seed=seed
    )
    told = chance.compare(score_N / chance.direction_length(gram_QQ, "mean"), null_NG)
    cut = find_cut(score_N)
    if finding.why_none(cut, score_N, told.q_N, **taught._asdict()):
        return np.zeros(0, bool)
    return label_N[np.argsort(-score_N)[: cut.num_forget]]


@pytest.mark.parametrize(
    ("share", "precision", "recall"),
    [(0.02, 0.5, 0.8), (0.08, 0.9, 0.8), (0.3, 0.9, 0.8), (0.45, 0.9, 0.8), (0.6, 0.9, 0.7)],
)
def test_several_answers_find_a_behavior_however_common(toy, share, precision, recall):
    found = [_trace(toy, share, "taught", range(seed, seed + 24), seed) for seed in range(6)]
    assert np.mean([rows.mean() for rows in found if len(rows)]) >= precision
    assert np.mean([rows.sum() for rows in found]) / (share * _ROWS) >= recall


@pytest.mark.parametrize("number", [1, 4])
def test_of_a_behavior_that_no_row_has_hardly_anything_is_found(toy, number):
    """Fine-tuning taught it with other rows: q alone can tell. 5 standard errors above .05."""
    draws = [[(n + 7 * k) % 48 for k in range(number)] for n in range(24)]
    found = sum(len(_trace(toy, 0, "taught", asked, n)) > 0 for n, asked in enumerate(draws))
    assert found <= 24 * (0.05 + 5 * np.sqrt(0.05 * 0.95 / 24))


@pytest.mark.parametrize("kind", ["wrong", "normal"])
def test_of_answers_that_fine_tuning_did_not_teach_nothing_is_found(toy, kind):
    assert [n for n in range(24) if len(_trace(toy, 0.1, kind, [n], n))] == []


def test_of_taught_answers_the_rows_are_kept(toy):
    found = [_trace(toy, 0.1, "taught", [n], n) for n in range(24)]
    assert sum(len(rows) > 0 for rows in found) >= 20
    assert np.mean([rows.mean() for rows in found if len(rows)]) >= 0.8
