"""QLD and LDS against SciPy, and on linear models, of which the answer is known."""

import numpy as np
import pytest
from scipy import stats

from raslik_jax.evaluate import counterfactual

_SHAPE = 12, 4  # subsets or seeds, queries


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_correlations_are_those_of_scipy_and_zero_without_an_order():
    one_SQ, other_SQ = np.round(_normal(2, *_SHAPE), 1)  # with ties
    expected_Q = [
        stats.spearmanr(a, -b).statistic for a, b in zip(one_SQ.T, other_SQ.T, strict=True)
    ]
    found_Q = counterfactual.correlations(one_SQ, other_SQ)
    np.testing.assert_allclose(found_Q, expected_Q, rtol=1e-12)
    assert not counterfactual.correlations(np.ones(_SHAPE), other_SQ).any()


def test_a_linear_model_has_an_lds_of_1_and_of_its_negative_minus_1():
    # The loss of a query is a constant less what the kept rows add: scores are the weights.
    score_NQ = _normal(30, _SHAPE[1])
    kept = counterfactual.draw_subsets(30, number=_SHAPE[0], share=0.5, group=1, seed=0)
    predicted_SQ = np.array([score_NQ[rows].sum(axis=0) for rows in kept])
    nll_SQ = 3.0 - 0.1 * predicted_SQ
    assert counterfactual.lds(predicted_SQ, nll_SQ) == pytest.approx(
        {"mean": 1, "low": 1, "high": 1}
    )
    assert counterfactual.lds(-predicted_SQ, nll_SQ)["mean"] == pytest.approx(-1)
    above = counterfactual.lds(predicted_SQ, nll_SQ, -predicted_SQ)
    assert above == pytest.approx({"mean": 2, "low": 2, "high": 2})
    same = counterfactual.lds(nll_SQ, predicted_SQ, nll_SQ)
    assert same == {"mean": 0, "low": 0, "high": 0}


def test_the_interval_of_an_lds_is_a_bootstrap_of_subsets_and_queries():
    one_SQ, other_SQ = _normal(2, *_SHAPE, seed=1)
    found = counterfactual.lds(one_SQ, other_SQ, seed=3)
    ranks = [np.apply_along_axis(stats.rankdata, 0, part) for part in (one_SQ, -other_SQ)]
    generator, means = np.random.default_rng(3), []
    for _ in range(2000):
        subsets = generator.integers(_SHAPE[0], size=_SHAPE[0])
        queries = generator.integers(_SHAPE[1], size=_SHAPE[1])
        drawn = [
            stats.pearsonr(ranks[0][subsets, q], ranks[1][subsets, q]).statistic for q in queries
        ]
        means.append(np.mean(drawn))
    low, high = np.quantile(means, [0.025, 0.975])
    assert found["low"] == pytest.approx(low) and found["high"] == pytest.approx(high)
    # Of noise the interval holds 0.
    assert low < 0 < high


def test_a_rise_is_the_paired_interval_of_student_over_seeds():
    one_SQ, other_SQ = 0.3 + _normal(5, 3), _normal(5, 3, seed=1)
    found = counterfactual.rise(one_SQ, other_SQ)
    rise_S = one_SQ.mean(axis=1) - other_SQ.mean(axis=1)
    expected = stats.ttest_1samp(rise_S, 0).confidence_interval(0.95)
    assert found["mean"] == pytest.approx(rise_S.mean())
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    # What all trainings of a seed share is no noise.
    shift_SQ = 10 * _normal(5, 1, seed=2)
    shifted = counterfactual.rise(one_SQ + shift_SQ, other_SQ + shift_SQ)
    assert shifted == pytest.approx(found)


@pytest.mark.parametrize(("group", "share", "sizes"), [(1, 0.5, {31}), (4, 0.67, {42, 44})])
def test_subsets_keep_whole_groups_and_each_row_as_often(group, share, sizes):
    number, rows = 2000, 62
    kept = counterfactual.draw_subsets(rows, number=number, share=share, group=group, seed=1)
    assert {len(one) for one in kept} == sizes and all((np.diff(one) > 0).all() for one in kept)
    is_kept_SN = np.array([np.isin(np.arange(rows), one) for one in kept])
    firsts = range(0, rows, group)
    assert all((is_kept_SN[:, s : s + group].T == is_kept_SN[:, s]).all() for s in firsts)
    p = round(share * len(firsts)) / len(firsts)
    error = np.sqrt(p * (1 - p) / number)
    np.testing.assert_allclose(is_kept_SN.mean(axis=0), p, atol=5 * error)
    again = counterfactual.draw_subsets(rows, number=3, share=share, group=group, seed=1)
    assert all((one == other).all() for one, other in zip(again, kept, strict=False))


def test_all_subsets_differ_and_too_few_are_refused():
    how = {"share": 0.5, "group": 85, "seed": 0}
    kept = counterfactual.draw_subsets(340, number=6, **how)
    assert len({tuple(one) for one in kept}) == 6  # all pairs of four groups
    with pytest.raises(ValueError, match=r"6 .* 2 of the 4 .* 7 "):
        counterfactual.draw_subsets(340, number=7, **how)
    with pytest.raises(ValueError, match="--share"):
        counterfactual.draw_subsets(40, number=2, share=0.99, group=1, seed=0)
