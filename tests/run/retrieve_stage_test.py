"""The retrieve stage: every strategy and rule of selection on a run in miniature."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from support import shared_data

from raslik_jax.base.settings import replaced
from raslik_jax.config import Config, RetrieveConfig, SketchConfig
from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.retrieve.strategies import GivenSettings
from raslik_jax.run import artifacts
from raslik_jax.run.stages import generate, retrieve, scores, sketch
from raslik_jax.run.workspace import Workspace

_STRATEGIES = "random,bm25,embedding,oracle,cr,cr_25,raslik_f,raslik,exact"


def _run(workdir, stages, *arguments, start=("experiments/run.py",)):
    flags = (f"--workdir={workdir}", f"--stages={stages}", "--update", *arguments)
    return tiny.run_script(*start, *tiny.FLAGS, "--sketch.size=4096", *flags)


def _sets(workdir, strategy):
    found = []
    for kind in ("forget", "retain"):
        lines = (workdir / "retrieve" / strategy / f"{kind}.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    return found


def _made_sets(folder, influence_N, rows, strategy="raslik", **settings):
    """The summary and sets of a strategy for made-up scores, without a run."""
    config = Config(retrieve=RetrieveConfig(**settings), sketch=SketchConfig(query_output="gold"))
    workspace = Workspace(folder, config)
    workspace.corpus = Corpus(backbone=(), train=tuple(rows), queries={"retrieval": (rows[0],)})
    for name in ("influence", "sizes", strategy):
        (folder / "retrieve" / name).mkdir(parents=True)
    np.save(folder / "retrieve" / "influence" / "influence.npy", influence_N)
    # Words are tokens, and those of a prompt do not count.
    workspace.train_rows = SimpleNamespace(lengths_N=np.zeros(len(rows)))
    workspace.cut = lambda encoded, what: SimpleNamespace(
        num_targets_N=np.array([len(row.output.split()) for row in rows])
    )
    retrieve.make_sizes(workspace, folder / "retrieve" / "sizes")
    retrieve.make_sets(workspace, strategy, folder / "retrieve" / strategy)
    summary = json.loads((folder / "retrieve" / strategy / "summary.json").read_text())
    return summary, _sets(folder, strategy)


def test_rows_without_a_gradient_are_in_no_set_and_named(tmp_path):
    rows = [Example(f"id{i}", "a", "", str(i), is_target=i < 3) for i in range(10)]
    # Two without an answer: a target, which counts for no size, and another.
    rows = [row._replace(output="") if i in (1, 8) else row for i, row in enumerate(rows)]
    influence_N = np.linspace(0.9, 0.1, 10)  # uncentered: all rows agree, and none is below 0
    influence_N[[1, 8]] = -np.inf
    summary, sets = _made_sets(tmp_path, influence_N, rows, num_retain=3)
    assert [row["id"] for row in sets[0]] == ["id0", "id2"]  # of three targets one is barred
    assert [row["id"] for row in sets[1]] == ["id9", "id7", "id6"]


def test_a_corpus_of_targets_only_has_sets_and_no_ranking_measures(tmp_path):
    rows = [Example(f"id{i}", "a", "", str(i), is_target=True) for i in range(6)]
    summary, sets = _made_sets(tmp_path, np.linspace(1, -1, 6), rows, num_forget=2)
    assert summary["precision"] == 1.0
    assert not {"auroc", "auprc"} & summary.keys()
    assert list(map(len, sets)) == [2, 2]


def test_rows_that_are_held_out_leave_their_places_in_the_retain_set(tmp_path):
    rows = [Example(f"id{i:02d}", f"q{i}", "", str(i)) for i in range(30)]
    _, sets = _made_sets(
        tmp_path, np.linspace(1, -1, 30), rows, num_forget=10, num_retain=10, held_out=0.2
    )
    assert list(map(len, sets)) == [8, 10]


def test_rows_that_are_held_out_have_their_places_in_the_ranking(tmp_path):
    rows = [Example(f"id{i:02d}", f"q{i}", "", str(i), is_target=i < 20) for i in range(40)]
    summary, sets = _made_sets(
        tmp_path, np.linspace(1, -1, 40), rows, num_forget=20, num_retain=10, held_out=0.2
    )
    assert len(sets[0]) == 10
    assert (summary["auroc"], summary["auprc"]) == (1.0, 1.0)


def test_rows_of_files_that_are_in_no_set_are_told(tmp_path, capsys):
    rows = [Example(f"id{i:02d}", f"q{i}", "", "" if i == 3 else str(i)) for i in range(30)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"id": "id{i:02d}"}}\n' for i in range(10)))
    given = {"given": GivenSettings(forget_file=str(path))}
    own = {"strategies": ("given",), "members": given, "held_out": 0.2}
    influence_N = np.linspace(1, -1, 30)
    influence_N[4] = -np.inf  # without a gradient
    summary, sets = _made_sets(tmp_path, influence_N, rows, "given", **own)
    assert summary["named"] == [
        f"id{i:02d}" for i in range(10)
    ]  # retraining leaves all of them out
    known = {row.example_id: max(score, 0) for row, score in zip(rows, influence_N, strict=True)}
    assert {row["id"]: row["score"] for row in sets[0]} == {
        row["id"]: known[row["id"]] for row in sets[0]
    }
    left = [f"id{i:02d}" for i in range(10) if f"id{i:02d}" not in {row["id"] for row in sets[0]}]
    assert len(left) == 2 and "id03" in left  # one of nine is held out
    assert (
        "2 of 10 rows of --retrieve.given.forget_file are in no set, because they are held out or "
        f"have no token of an answer: {left[0]!r}, {left[1]!r}\n"
    ) in capsys.readouterr().out


def test_held_out_rows_of_a_file_are_not_taken_off_the_number_that_is_found(tmp_path):
    rows = [Example(f"id{i:02d}", f"q{i}", "", str(i)) for i in range(40)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"id": "id{i:02d}"}}\n' for i in range(20, 40)))
    given = {"given": GivenSettings(forget_file=str(path))}
    own = {"strategies": ("raslik", "given"), "members": given, "num_forget": 8, "held_out": 0.5}
    _, sets = _made_sets(tmp_path, np.linspace(1, -1, 40), rows, **own)
    assert [row["id"] for row in sets[0]] == [f"id{i:02d}" for i in range(8)]


def test_a_row_that_stands_out_alone_has_another_to_retain(tmp_path):
    rows = [Example(f"id{i:02d}", f"q{i}", "", str(i)) for i in range(11)]
    # The only row that pulls the other way is held out: its place is another's.
    _, sets = _made_sets(tmp_path, np.linspace(1, -1, 11), rows, num_forget=1, held_out=0.9)
    assert list(map(len, sets)) == [1, 1]


def test_the_number_that_is_found_is_written_and_taken(tmp_path, monkeypatch):
    index = SimpleNamespace(num_rows=40), np.arange(40), None
    monkeypatch.setattr(retrieve.sketch_lib, "ask_index", lambda workspace: index)
    monkeypatch.setattr(retrieve.noise, "edge_sigma", lambda *asked: 0.0)
    rows = [Example(f"id{i:02d}", f"q{i}", "", str(i)) for i in range(40)]
    influence_N = np.r_[[0.9, 0.88, 0.86], np.random.default_rng(0).normal(0, 0.05, 37)]
    _, sets = _made_sets(tmp_path, influence_N, rows, select="gap", num_retain=5)
    assert list(map(len, sets)) == [3, 5]
    cut = json.loads((tmp_path / "retrieve" / "sizes" / "cut.json").read_text())
    assert cut["num_forget"] == 3 and 0 < cut["edge"] < 0.5


def test_an_answer_that_the_model_cannot_have_given_is_a_finding_where_none_is_named(
    tmp_path, monkeypatch
):
    told = {"id": "q", "traced": "zq zq " * 200, "output": "an answer"}

    def write_traced(workspace, variant, folder):
        (folder / "finetuned.jsonl").write_text(json.dumps(told | {"nll": nll, "nats": [nll]}))

    monkeypatch.setattr(scores.generate, "write_traced", write_traced)
    shapes = SimpleNamespace(decoder=SimpleNamespace(config=SimpleNamespace(vocab_size=1000)))
    nll = 6.9  # tokens at random take log 1000 = 6.908
    named = replaced(Config(), {"retrieve.strategies": ("raslik",), "retrieve.num_forget": 3})
    found = replaced(named, {"retrieve.select": "gap", "retrieve.num_forget": 0})
    scores.make_traced(SimpleNamespace(model=shapes, config=found), tmp_path)
    nll = 7.2
    scores.make_traced(SimpleNamespace(model=shapes, config=named), tmp_path)
    place = tmp_path / artifacts.TRACED_FINDING.file
    assert not place.exists()
    scores.make_traced(SimpleNamespace(model=shapes, config=found), tmp_path)
    text = artifacts.TRACED_FINDING.read_in(tmp_path)
    assert "7.2" in text and "6.9" in text and len(text) <= 300


def test_a_traced_prompt_without_room_for_its_answer_is_refused(tmp_path):
    encoded = Encoded(("q",), (np.zeros(3, np.int32),), np.array([3]), 0)
    workspace = SimpleNamespace(
        config=SimpleNamespace(corpus=SimpleNamespace(max_len=3)),
        retrieval_queries=lambda: (),
        encode=lambda rows, what: encoded,
    )
    with pytest.raises(ValueError, match="traced prompts must have room for their answers in max_"):
        generate.write_traced(workspace, None, tmp_path)


@pytest.mark.heavy
def test_every_strategy_and_ranks_as_scores(tmp_path):
    bge = shared_data() / "models" / "bge-small-en-v1.5"
    first = "corpus,backbone,finetune,references,sketch,retrieve"
    done = _run(
        tmp_path,
        first,
        f"--retrieve.strategies={_STRATEGIES}",
        f"--retrieve.embedding.checkpoint={bge}",
        start=("experiments/studies/raslik.py", "run"),
    )
    assert done.returncode == 0, done.stderr
    for strategy in _STRATEGIES.split(","):
        forget, retain = _sets(tmp_path, strategy)
        assert (len(forget), len(retain)) == (12, 12), strategy
        assert not {row["id"] for row in forget} & {row["id"] for row in retain}
        targets = sum(row["is_target"] for row in forget)
        assert targets == {"oracle": 12, "cr": 6, "cr_25": 3}.get(strategy, targets)
    assert _sets(tmp_path, "cr")[1] == _sets(tmp_path, "oracle")[1]
    # As many coordinates as parameters: the sketch is the gradient, and so are its scores.
    influence_N, exact_N = (
        np.load(tmp_path / "retrieve" / name / "influence.npy")
        for name in ("influence", "exact_kernel")
    )
    np.testing.assert_allclose(influence_N, exact_N, atol=1e-6)
    # With each of the three queries, too, for the page of all rows.
    each_NQ = np.load(tmp_path / "retrieve" / "influence" / "each.npy")
    assert each_NQ.shape == (120, 3)
    np.testing.assert_allclose(each_NQ.mean(axis=1), influence_N, atol=1e-6)

    options = "--retrieve.aggregate=common", "--retrieve.num_forget=7"
    done = _run(tmp_path, "retrieve", "--retrieve.strategies=random,raslik", *options)
    assert done.returncode == 0, done.stderr
    for name in ("random", "raslik"):
        assert tuple(map(len, _sets(tmp_path, name))) == (7, 7)


@pytest.mark.parametrize("rows, count", [(1, 1), (9, 3)])
def test_a_few_queries_of_several_lengths_are_sketched_by_one_program(
    tmp_path, monkeypatch, rows, count
):
    """In another trace of a run a program would be compiled for each length otherwise."""
    shapes = set()

    def sketched(batch):
        shapes.add((batch.tokens_BL.shape, batch.num_targets))
        return SimpleNamespace(unit_BK=np.zeros((len(batch.tokens_BL), 2), np.float32))

    monkeypatch.setattr(sketch, "sketch_of_run", lambda workspace: sketched)
    for length in (12, 30, 60):
        tokens = (np.arange(length, dtype=np.int32),) * rows
        ids = tuple(f"q{row}" for row in range(rows))
        encoded = Encoded(ids, tokens, np.full(rows, 4), pad_id=0)
        workspace: Any = SimpleNamespace(
            config=Config(),
            shapes=MODEL_PRESETS["pythia-14m"],
            retrieval_queries=lambda: (make_example("", "", ""),) * rows,
            encode=lambda rows, what, targets, encoded=encoded: encoded,
        )
        sketch.make_query_sketches(workspace, tmp_path)
    assert len(shapes) == count
