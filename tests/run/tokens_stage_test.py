"""The comparison of a wished answer with the bad one, without a model."""

import types

import numpy as np
import pytest

from raslik_jax.data.examples import make_example
from raslik_jax.run import artifacts
from raslik_jax.run.stages import tokens

_ROWS = [make_example(f"q{n}", "", "a") for n in range(3)]


@pytest.mark.parametrize("is_one", [True, False])
def test_a_wished_answer_is_compared_with_the_first_bad_one(tmp_path, monkeypatch, is_one):
    score_N, bad_N, other_N = np.array([[0.5, 0.4, 0.1], [0.2, 0.4, 0.0], [-1, -1, 0.9]])
    found = (artifacts.INFLUENCE, bad_N if is_one else (bad_N + other_N) / 2)
    more = () if is_one else ((artifacts.EACH_INFLUENCE, np.stack([bad_N, other_N], axis=1)),)
    for one, content in (found, *more):
        one.place(tmp_path).parent.mkdir(parents=True, exist_ok=True)
        one.write(one.place(tmp_path).parent, content)
    retrieve = types.SimpleNamespace(wished="good", center=True)
    workspace = types.SimpleNamespace(
        root=tmp_path,
        corpus=types.SimpleNamespace(train=_ROWS),
        config=types.SimpleNamespace(retrieve=retrieve),
        retrieval_queries=lambda: _ROWS[:1],
    )
    monkeypatch.setattr(tokens.sketch_lib, "open_index", lambda _: (None, np.arange(3)))
    monkeypatch.setattr(tokens.sketch_lib, "sketch_of_run", lambda _: None)
    monkeypatch.setattr(tokens.sketch_lib, "sketch_queries", lambda *_: None)
    monkeypatch.setattr(tokens.search, "score_store", lambda *_, **__: score_N)
    tokens.make_wished(workspace, tmp_path)
    favored = artifacts.WISHED.read_in(tmp_path)
    expected = {
        row.example_id: pair
        for row, pair in zip(_ROWS, [(0.5, 0.2), (0.4, 0.4), (0.1, 0.0)], strict=True)
    }
    assert {one["id"]: (one["score"], one["bad"]) for one in favored} == expected
    assert favored[0]["id"] == _ROWS[0].example_id
