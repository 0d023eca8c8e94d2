"""Rows chosen by what a step on them does: each function beside a slow version of itself."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments.studies.sets import strategies
from raslik_jax.data.examples import Example
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request, choose

_N, _FORGET, _RETAIN = 30, 5, 6
pytestmark = pytest.mark.usefixtures("members")
_IDS = [f"id{i:02d}" for i in range(_N)]


def _request(**changes):
    generator = np.random.default_rng(3)
    scores = {
        "influence": generator.normal(size=_N),
        "step_effects": generator.normal(size=(_N, 2)),
        "each_query": generator.normal(size=(_N, 4)),
        "damage": generator.normal(size=_N),
    }
    options = {"num_forget": _FORGET, "num_retain": _RETAIN, "scores": scores | changes}
    rows = [Example(name, "a", "", "b") for name in _IDS]
    eligible_N = np.ones(_N, bool)
    return Request(
        examples=rows,
        is_eligible_N=eligible_N,
        seed=0,
        queries=rows[:3],
        **options,
    )


def _sets(name, request, **own):
    record = STRATEGIES[name]
    settings = dataclasses.replace(record.settings, **own)
    scores = record.score(request._replace(settings=settings))
    sizes = {"num_forget": request.num_forget, "num_retain": request.num_retain}
    chosen = select_by_count(*scores, _IDS, **sizes)
    return [part.tolist() for part in chosen]


def _best(rows, value, count):
    """Rows of the largest values, by sorting."""
    return sorted(rows, key=lambda row: -value[row])[:count]


def test_the_lower_half_has_the_rows_up_to_the_median():
    score_N = np.array([3.0, -np.inf, 1.0, 2.0, 5.0, 4.0])
    assert strategies.lower_half(score_N).tolist() == [True, False, True, True, False, False]
    assert not strategies.lower_half(np.full(3, -np.inf)).any()


@pytest.mark.parametrize("times", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("collateral", [0.0, 0.7])
def test_two_stages_take_the_best_actions_of_the_rows_that_were_found(times, collateral):
    request = _request()
    influence = request.scores["influence"]
    act = [q - collateral * n for q, n in request.scores["step_effects"].tolist()]
    sizes = [int(np.ceil(times * size)) if times else _N for size in (_FORGET, _RETAIN)]
    found = _best(range(_N), influence, sizes[0])
    forget = _best(found, act, _FORGET)
    opposed = _best(range(_N), -influence, sizes[1])
    retain = _best([row for row in opposed if row not in forget], [-a for a in act], _RETAIN)
    own = {"candidates": times, "collateral": collateral}
    assert _sets("two_stage", request, **own) == [forget, retain]
    if not (times or collateral):
        assert _sets("action", request) == [forget, retain]


def test_all_queries_have_a_share_in_what_covers_them():
    request = _request()
    each, influence = request.scores["each_query"], request.scores["influence"]
    left, forget = _best(range(_N), influence, 15), []
    while len(forget) < _FORGET:

        def worth(row, taken=tuple(forget)):
            parts = [[max(each[one, q], 0.0) for one in (*taken, row)] for q in range(4)]
            return sum(np.sqrt(sum(part)) for part in parts)

        forget.append(max((row for row in left if row not in forget), key=worth))
    found, retain = _sets("coverage", request, candidates=3.0)
    assert found == forget
    assert retain == _best([r for r in range(_N) if r not in forget], -influence, _RETAIN)


def test_the_greedy_choice_is_near_the_best_of_all_choices():
    score_CQ = np.random.default_rng(0).normal(size=(9, 3))

    def worth(rows):
        return np.sqrt(np.maximum(score_CQ[list(rows)], 0).sum(axis=0)).sum()

    best = max(map(worth, itertools.combinations(range(9), 4)))
    assert worth(strategies.cover_queries(score_CQ, 4)) >= (1 - 1 / np.e) * best
    # A query that is served already counts for less: the second row is of the other one.
    assert strategies.cover_queries(np.array([[1.0, 0.0], [0.9, 0.0], [0.0, 0.5]]), 2).tolist() == [
        0,
        2,
    ]
    assert sorted(strategies.cover_queries(score_CQ, 20).tolist()) == list(range(9))


@pytest.mark.parametrize("name", ["mixed", "trial"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_retain_set_protects_the_normal_rows_of_most_damage(name, share):
    request = _request()
    influence = request.scores["influence"]
    damage = request.scores["damage"] if name == "trial" else request.scores["step_effects"][:, 0]
    forget = _best(range(_N), influence, _FORGET)
    normal = _best(range(_N), -influence, _N // 2)
    protect = _best(normal, damage, round(share * _RETAIN))
    others = [row for row in range(_N) if row not in (*forget, *protect)]
    retain = protect + _best(others, -influence, _RETAIN - len(protect))
    assert _sets(name, request, protect_share=share) == [forget, retain]
    if name == "mixed" and share == 1.0:
        assert _sets("protect", request) == [forget, retain]


def _retained(name, request, **own):
    record = STRATEGIES[name]
    settings = dataclasses.replace(record.settings, **own)
    return choose(record, request._replace(settings=settings))[1].retain.tolist()


def test_every_strategy_draws_the_rows_that_oppose_alike():
    drawn = [_request()._replace(retain_within=0.5, seed=seed) for seed in (0, 1)]
    lowest = _best(range(_N), -_request().scores["influence"], _N // 2)
    found = [_retained("raslik", request) for request in drawn]
    assert {*found[0]} < {*lowest} and {*found[0]} != {*lowest[:_RETAIN]} != {*found[1]}
    for request, expected in zip(drawn, found, strict=True):
        # The nearest to the other pole are what is chosen from, where as many are asked for.
        assert _retained("coverage", request, candidates=1.0) == expected
        assert {*_retained("two_stage", request, candidates=1.0)} == {*expected}
        for name in ("mixed", "trial"):
            assert _retained(name, request, protect_share=0.0) == expected
            half = _retained(name, request, protect_share=0.5)
            left = [row for row in expected if row not in half[:3]]
            assert half[3:] == left[:3]
    # Random retain sets stay as they are.
    for name in ("random", "raslik_f"):
        assert _retained(name, drawn[0]) == _retained(name, _request())


def test_more_rows_to_protect_than_are_normal_are_refused_in_one_sentence():
    record = STRATEGIES["protect"]
    with pytest.raises(ValueError, match="protect normal ones must be 0 to the 15 .* got 16"):
        record.score(_request()._replace(num_retain=16, settings=record.settings))
