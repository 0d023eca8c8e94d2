"""When the rows of a cut are no find."""

import numpy as np
import pytest

from raslik_jax.evaluate.taught import taught_of
from raslik_jax.retrieve import finding
from raslik_jax.retrieve.selectors import Cut, find_cut

_SCORE_N = np.concatenate([np.linspace(0.5, 0.45, 5), np.linspace(0.02, -0.02, 95)])
_CUT = find_cut(_SCORE_N)


def _why(q, is_taught, refuted="", cut=_CUT):
    q_N = None if q is None else np.append(np.full(5, q), np.ones(95))
    return finding.why_none(cut, _SCORE_N, q_N, is_taught=is_taught, refuted=refuted)


@pytest.mark.parametrize(
    ("q", "is_taught", "refuted", "is_find"),
    [
        (0.01, False, "the base says it", False),  # whatever q says
        (None, False, "the base says it", False),
        (0.2, True, "", True),
        (0.3, True, "", False),
        (0.2, False, "", False),  # where likelihoods say nothing q alone decides
        (0.04, False, "", True),
        (None, False, "", True),  # nothing but the gap is known
        (np.nan, True, "", True),  # too few prompts to compare with
    ],
)
def test_base_and_chance_decide_whether_the_rows_are_a_find(q, is_taught, refuted, is_find):
    assert _CUT.num_forget == 5
    assert (_why(q, is_taught, refuted) == "") == is_find


_DRAWN = (0.5, 0.2)


@pytest.mark.parametrize(
    ("levels", "is_taught", "is_refuted"),
    [
        ([(0.3, 1.0, _DRAWN)], True, False),
        ([(0.3, 0.35, _DRAWN)], False, True),  # the base says it as readily
        ([(0.3, 0.35, _DRAWN), (0.3, 1.0, _DRAWN)], True, False),
        ([(2.0, 5.0, _DRAWN)], False, False),  # the model would hardly say it, the base less so
        ([(2.0, 2.0, _DRAWN)], False, True),
        ([(0.3, None, _DRAWN)], False, False),  # the base is not known
    ],
)
def test_likelihoods_say_whether_fine_tuning_taught_the_answers(levels, is_taught, is_refuted):
    found = taught_of(levels)
    assert (found.is_taught, bool(found.refuted)) == (is_taught, is_refuted)


def test_where_nothing_stands_out_there_is_no_find_whatever_the_base_says():
    none = Cut(0, 0.0, 0.6, 0.0, 0)
    said = [_why(None, is_taught, cut=none) for is_taught in (False, True)]
    assert all("0.5" in text and "0.6" in text for text in said)
    assert len(said[1]) > len(said[0])  # fine-tuning taught it: what may be the reason


def test_no_cosine_of_unrelated_rows_is_above_one():
    # The band of a few rows is as vague as their spread.
    assert "unrelated rows reach 1" in _why(None, False, cut=Cut(0, 0.0, 2.95, 0.0, 0))
