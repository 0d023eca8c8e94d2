"""The study: what is said of its stored runs, and its cells come out again."""

import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from support import shared_data

from experiments.studies.suite import choice
from raslik_jax.base.files import read_json
from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request
from raslik_jax.run.artifacts import read_metrics

pytestmark = pytest.mark.usefixtures("paper_corpora")
_REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
_STORED = _REPOSITORY / "experiments" / "studies" / "smollm2"
_SEEDS = ("seed-0", "seed-1")


@pytest.fixture(scope="module", params=_SEEDS)
def folder(request):
    """The stored runs of one training."""
    return _STORED / request.param


def _config(run):
    """The settings of a stored run, without those that have left the package since."""
    return config_from_json(_known(read_metrics(run)["settings"], to_json(Config())))


def _known(settings, like):
    """The settings that another tree of settings has too."""
    return {
        name: _known(value, like[name]) if isinstance(like[name], dict) else value
        for name, value in settings.items()
        if name in like
    }


@pytest.fixture(scope="module")
def corpus(folder, paper_corpora):
    """Its corpus, from its settings and seed."""
    config = _config(folder / "test")
    settings = dataclasses.replace(config.corpus, data_dir=str(shared_data()))
    return settings.load(seed=config.seed)


# Chosen at models that were judged damaged, which the rule skips since.
_DAMAGED_CHOICES = {
    "seed-0": {("oracle", "ga_gdr"), ("oracle", "ga_klr"), ("raslik", "ga_klr")},
    "seed-1": {("random", "ga_klr"), ("oracle", "ga_klr")},
}


def _candidates(metrics):
    """The models of a validation run, which has no likelihoods: `raslik choose` refuses it."""
    with pytest.raises(ValueError, match="perplexity_examples=0"):
        choice.candidates_of(metrics)
    return [
        choice.Candidate(
            *(entry["strategy"], entry["algorithm"]),
            metrics["settings"]["unlearn"][entry["algorithm"]]["learning_rate"],
            *(entry["epoch"], metrics["seed"]),
            *(entry["forget"]["mean"], entry["retain"]["mean"]),
            metrics["backbone"]["forget"]["mean"],
            is_damaged=entry["judgment"]["verdict"] == "damaged",
        )
        for entry in metrics["methods"]
    ]


def test_the_choice_follows_from_the_stored_validation_runs(folder):
    runs = map(read_metrics, sorted(folder.glob("validation-*")))
    candidates = [candidate for metrics in runs for candidate in _candidates(metrics)]
    made = choice.choose([candidate._replace(is_damaged=False) for candidate in candidates])
    stored = read_json(folder / "choice.json")["choices"]
    assert [found._asdict() | {"at_edge": [*found.at_edge]} for found in made] == [
        {"skipped": 0} | entry for entry in stored
    ]
    measured = {
        (entry["strategy"], entry["algorithm"]): entry["epoch"]
        for entry in read_metrics(folder / "test")["methods"]
    }
    assert measured == {(found.strategy, found.algorithm): found.epoch for found in made}
    damaged = {c[:4] for c in candidates if c.is_damaged}
    assert {found[:2] for found in made if found[:4] in damaged} == _DAMAGED_CHOICES[folder.name]


def test_validation_and_test_share_no_query_and_no_setting_differs(folder, corpus):
    validation = sorted(folder.glob("validation-*"))
    test, *others = (read_metrics(run)["settings"] for run in (folder / "test", *validation))
    for other in others:
        for part in ("seed", "corpus", "finetune", "sketch", "retrieve"):
            assert other[part] == test[part]
    splits = {read_metrics(run)["corpus"]["query_split"] for run in validation}
    assert splits == {"validation"}
    ids = {name: {row.example_id for row in rows} for name, rows in corpus.queries.items()}
    for kind in ("target", "normal"):
        assert not ids[f"validation_{kind}"] & ids[f"test_{kind}"]


def test_the_trainings_differ_in_their_seed_alone():
    first, second = (read_metrics(_STORED / seed / "test")["settings"] for seed in _SEEDS)
    assert (first.pop("seed"), second.pop("seed")) == (0, 1)
    assert first == second
    first, second = (
        read_metrics(_STORED / seed / "validation-3e-4")["settings"] for seed in _SEEDS
    )
    assert (first.pop("seed"), second.pop("seed")) == (0, 1)
    assert first == second


@pytest.mark.parametrize("strategy", ["random", "random_anywhere", "bm25", "oracle"])
def test_sets_that_need_no_model_come_out_again(folder, corpus, strategy):
    config = _config(folder / "test")
    settings, train = config.retrieve, corpus.train
    counts = {"num_forget": settings.num_forget, "num_retain": settings.num_retain}
    scores = STRATEGIES[strategy].score(
        Request(
            examples=train,
            is_eligible_N=np.ones(len(train), bool),
            settings=settings[strategy],
            seed=config.seed,
            queries=corpus.queries["retrieval"],
            **counts,
        )
    )
    chosen = select_by_count(*scores, [row.example_id for row in train], **counts)
    stored = read_json(folder / "sets.json")[strategy]
    for name in ("forget", "retain"):
        assert [train[i].example_id for i in getattr(chosen, name)] == stored[name]


# Words of an average answer: of all targets; of what raslik, bm25, oracle forget; of what raslik,
# random, bm25 retain. Genuine rows among what raslik, bm25, oracle forget.
_SAID = {
    "seed-0": (25, (32, 25, 26), (8, 18, 11), (0, 3, 4)),
    "seed-1": (24, (27, 23, 22), (9, 22, 13), (0, 1, 6)),
}


def test_what_is_said_of_the_sets_is_so(folder, corpus):
    rows = {row.example_id: row for row in corpus.train}
    sets = read_json(folder / "sets.json")

    def words(ids):
        return round(np.mean([len(rows[i].output.split()) for i in ids]))

    def genuine(strategy):
        return sum(rows[i].source == "howdy" for i in sets[strategy]["forget"])

    assert _SAID[folder.name] == (
        words([row.example_id for row in corpus.train if row.is_target]),
        tuple(words(sets[name]["forget"]) for name in ("raslik", "bm25", "oracle")),
        tuple(words(sets[name]["retain"]) for name in ("raslik", "random", "bm25")),
        tuple(genuine(name) for name in ("raslik", "bm25", "oracle")),
    )
    assert sets["raslik"]["forget"] == sets["raslik_f"]["forget"]


def test_the_smallest_cell_comes_out_again(tmp_path):
    data = shared_data()
    source = data / "models" / "smollm2-135m-instruct"
    (weights,) = source.glob("*.gguf")
    command = [sys.executable, data / "tools" / "gguf_to_hf.py", weights, source]
    tokenizer = data / "tokenizers" / "smollm2" / "tokenizer.json"
    command += [tmp_path / "smollm2", "--dtype", "float32", "--tokenizer", tokenizer]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(
        [
            sys.executable,
            str(_REPOSITORY / "experiments" / "run.py"),
            "--flagfile=experiments/flags/study_smallest.flags",
            f"--backbone.checkpoint={tmp_path / 'smollm2'}",
            f"--corpus.data_dir={data}",
            f"--workdir={tmp_path / 'run'}",
            "--backbone.operands=float32",  # as in the stored cell
            "--retrieve.strategies=raslik",  # one stands for the others: they share all their code
        ],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = read_metrics(tmp_path / "run")
    stored = read_metrics(_STORED / "smallest")
    for strategy in made["retrieval"]:
        entry = stored["retrieval"][strategy]
        for part in ("forget", "retain"):
            targets = entry["selection"][part]["targets"]
            assert made["retrieval"][strategy]["selection"][part]["targets"] == targets
    # Another processor rounds otherwise; an answer may then turn at a token that was nearly a tie.
    for name in ("finetuned", "backbone"):
        _assert_near(made[name], stored[name])
    expected = [entry for entry in stored["methods"] if entry["strategy"] == "raslik"]
    for ours, theirs in zip(made["methods"], expected, strict=True):
        assert [ours[key] for key in _NAMES] == [theirs[key] for key in _NAMES]
        _assert_near(ours, theirs)


_NAMES = ("strategy", "algorithm", "epoch")


def _assert_near(made, stored):
    for name in ("forget", "retain"):
        assert made[name]["mean"] == pytest.approx(stored[name]["mean"], abs=0.05), name
    for kind, entry in stored["perplexity"].items():
        assert made["perplexity"][kind]["mean"] == pytest.approx(entry["mean"], rel=1e-3), kind
