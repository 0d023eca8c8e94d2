"""Which rows a step is taken away from, and which scores are told beside it."""

import json
from types import SimpleNamespace

import numpy as np

from raslik_jax.config import Config
from raslik_jax.data.examples import make_example
from raslik_jax.run.stages import removal
from raslik_jax.settings import replaced


def _workspace(root, *, strategies=("raslik",), num_targets=(3, 2, 0, 4, 5, 1)):
    rows = [make_example("a", "", "b")._replace(example_id=f"r{n}") for n in range(6)]
    return SimpleNamespace(
        root=root,
        config=replaced(Config(), {"retrieve.strategies": strategies, "retrieve.step_rows": 2}),
        corpus=SimpleNamespace(train=rows),
        train_rows=None,
        cut=lambda *_: SimpleNamespace(num_targets_N=np.array(num_targets)),
        encode=lambda *_: None,
        retrieval_queries=lambda: rows[:1],
    )


def test_scores_are_told_where_the_run_has_made_them(tmp_path, monkeypatch):
    (tmp_path / "retrieve" / "influence").mkdir(parents=True)
    # Of an earlier run, on a corpus of another size.
    np.save(tmp_path / "retrieve/influence/influence.npy", np.zeros(9, np.float32))
    (tmp_path / "retrieve" / "bm25").mkdir()
    lines = "".join(f"{json.dumps({'id': name})}\n" for name in ("r4", "r1"))
    (tmp_path / "retrieve/bm25/forget.jsonl").write_text(lines)
    asked = []

    def compare(workspace, queries, forget, score_N):
        asked.append((forget, score_N if score_N is None else score_N.tolist()))
        return [removal.Removal(2, None, 0.25, 0.5)]

    monkeypatch.setattr(removal, "compare", compare)
    removal.make_removal(_workspace(tmp_path, strategies=("bm25",)), "bm25", tmp_path)
    (found,) = json.loads((tmp_path / "removal.json").read_text())
    assert found == {"rows": 2, "score": None, "predicted": 0.25, "measured": 0.5}
    np.save(tmp_path / "retrieve/influence/influence.npy", np.arange(6, dtype=np.float32))
    removal.make_removal(_workspace(tmp_path, strategies=("bm25", "raslik")), "bm25", tmp_path)
    assert asked == [([4, 1], None), ([4, 1], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]


def test_rows_without_an_answer_or_a_score_are_in_no_group(tmp_path, monkeypatch):
    drawn = []

    def changes(workspace, rows, groups, answers):
        drawn.extend(group.tolist() for group in groups)
        return [(0.0, 0.0)] * len(groups)

    monkeypatch.setattr(removal, "_changes", changes)
    score_N = np.float32([0.1, 0.2, 0.3, 0.4, -np.inf, 0.6])
    workspace = _workspace(tmp_path)
    found = removal.compare(workspace, (), [1, 2, 4, 5], score_N)
    assert drawn == [[1, 5], *[[0, 3]] * removal.DRAWS]  # 2 has no answer, 4 no score
    np.testing.assert_allclose([one.score for one in found], [0.4, *[0.25] * removal.DRAWS])
    # Of three rows to forget there are not as many others; of none there is nothing to do.
    assert removal.compare(workspace, (), [0, 1, 3], score_N, number=3) == []
    assert removal.compare(workspace, (), [2], score_N) == []
