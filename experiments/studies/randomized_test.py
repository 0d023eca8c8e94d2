"""Controlled randomization, and retain sets from all rows."""

import dataclasses

import numpy as np
import pytest

from experiments.studies.randomized import MEMBERS
from raslik_jax.data.examples import Example
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request

_ROWS = [Example(f"id{i:02d}", f"w{i}", "", "a", is_target=i < 6) for i in range(20)]
_IDS = [row.example_id for row in _ROWS]
_SIZES = {"num_forget": 6, "num_retain": 8}


def _score(name, *, num_forget=6, **own):
    record = (STRATEGIES | MEMBERS)[name]
    request = Request(
        examples=_ROWS,
        is_eligible_N=np.ones(20, bool),
        seed=0,
        num_forget=num_forget,
        num_retain=8,
        settings=dataclasses.replace(record.settings, **own),
        scores={"influence": np.linspace(1.0, -1.0, 20)},
    )
    return record.score(request)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_controlled_randomization_mixes_oracle_and_non_targets(share):
    best = select_by_count(*_score("oracle"), _IDS, **_SIZES)
    chosen = select_by_count(*_score("cr", oracle_share=share), _IDS, **_SIZES)
    from_oracle = round(share * 6)
    assert sum(i < 6 for i in chosen.forget) == from_oracle
    np.testing.assert_array_equal(chosen.forget[:from_oracle], best.forget[:from_oracle])
    np.testing.assert_array_equal(chosen.retain, best.retain)
    np.testing.assert_array_equal(_score("cr_50").forget_N, _score("cr").forget_N)


def test_a_share_above_the_targets_is_refused():
    with pytest.raises(ValueError, match="at most the 6 targets, got 7"):
        _score("cr", num_forget=7, oracle_share=1.0)


@pytest.mark.parametrize("name", ["random", "oracle", "raslik_f"])
def test_anywhere_retains_targets_too_and_forgets_the_same(name):
    plain, anywhere = _score(name), _score(f"{name}_anywhere")
    np.testing.assert_array_equal(anywhere.forget_N, plain.forget_N)
    np.testing.assert_array_equal(np.isinf(plain.retain_N), np.arange(20) < 6)
    np.testing.assert_array_equal(anywhere.retain_N[6:], plain.retain_N[6:])
    assert np.isfinite(anywhere.retain_N).all()
