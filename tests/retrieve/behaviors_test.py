"""Queries of several behaviors are told apart, as by joining the most alike groups one by one."""

import itertools

import numpy as np
import pytest
from index_cases import unit
from snapshots import said

from raslik_jax.retrieve import behaviors


def _joined(gram_QQ):
    """Returns the groups of average linkage by trying all pairs of groups, again and again."""
    groups = [[n] for n in range(len(gram_QQ))]

    def alike(pair):
        return np.mean([gram_QQ[a, b] for a in pair[0] for b in pair[1]])

    while len(groups) > 1:
        best = max(itertools.combinations(groups, 2), key=alike)
        if alike(best) < 0.05:
            break
        groups = [group for group in groups if group not in best] + [sorted(best[0] + best[1])]
    return sorted(map(tuple, groups))


def _ids(gram_QQ):
    return [f"q{n}" for n in range(len(gram_QQ))]


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_those_of_joining_the_most_alike_ones(seed):
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(3, 12))
    rows = unit(centers[generator.integers(3, size=9)] + generator.normal(size=(9, 12)))
    gram_QQ = rows @ rows.T
    found = behaviors.split_queries(gram_QQ, _ids(gram_QQ))
    assert list(found.groups) == _joined(gram_QQ)
    means = [gram_QQ[np.ix_(a, b)].mean() for a, b in itertools.combinations(found.groups, 2)]
    assert found.between == pytest.approx(max(means, default=1.0))
    assert found.between < 0.05 or len(found.groups) == 1


def test_two_behaviors_are_named_and_one_is_not():
    rows = unit(np.array([[1, 0, 0.1], [0, 1, 0], [1, 0.05, 0], [-0.1, 1, 0.2], [1, 0, 0]]))
    gram_QQ = rows @ rows.T
    found = behaviors.split_queries(gram_QQ, _ids(gram_QQ))
    assert found.groups == ((0, 2, 4), (1, 3))
    said(behaviors.sentence(found))
    for size in (1, 3):
        one = behaviors.split_queries(np.ones((size, size)), _ids(range(size)))
        assert one == behaviors.Behaviors((tuple(range(size)),), 1.0)
        assert behaviors.sentence(one) == ""


def test_many_queries_are_counted():
    found = behaviors.Behaviors((tuple(range(20)), (20,)), -0.2)
    said(behaviors.sentence(found))
