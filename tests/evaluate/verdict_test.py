"""The one definition of "forgotten": rows by their tokens, prompts by an exact test."""

import math
import pathlib

import numpy as np
import pytest
from scipy import stats

from raslik_jax.evaluate import verdict
from raslik_jax.evaluate.verdict import Count


@pytest.mark.parametrize(
    ("still", "of", "expected"),
    [
        (0, 0, "unknown"),
        (0, 1, "unknown"),
        (0, 2, "unknown"),
        (0, 7, "unknown"),
        (0, 8, "forgotten"),
        (0, 48, "forgotten"),
        # 2 of 4 answers stay: intervals of F of so few met the base's.
        (2, 4, "partly"),
        (1, 1, "unchanged"),
        (2, 2, "unchanged"),
        (1, 2, "partly"),
        (1, 8, "partly"),
        (1, 12, "partly"),  # a twelfth, and up to .339 are not excluded
        (1, 13, "forgotten"),
        (5, 48, "partly"),  # more than a tenth
        (4, 48, "forgotten"),
        (48, 48, "unchanged"),
    ],
)
def test_prompts_decide_by_an_exact_test(still, of, expected):
    assert verdict.decide(Count(still, of)) == expected


def test_the_test_is_that_of_the_binomial_distribution():
    """At the bound itself P(X <= still) is .05, by scipy's own distribution."""
    for still, of in ((0, 8), (1, 13), (3, 40)):
        upper = Count(still, of).upper
        assert stats.binom.cdf(still, of, upper) == pytest.approx(0.05, rel=1e-9)
    assert Count(4, 4).upper == 1
    assert verdict.needed() == 8


def test_a_number_that_is_not_finite_is_unknown_and_never_partly():
    ones, nan = np.ones(9), np.array([math.nan] + [0.0] * 8)
    shown = verdict.count_shown(nan, ones, 0 * ones)
    assert shown == (0, 8, 1)
    way = verdict.count_way(ones, ones, nan, least=0.2, enough=0.5)
    assert (way.unknown, verdict.decide(way), verdict.decide(shown)) == (1, "unknown", "unknown")


def test_prompts_that_the_base_answers_so_or_that_did_not_show_it_tell_nothing():
    now, before, base = np.array([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]], float).reshape(3, 4)
    assert verdict.count_shown(now, before, base) == (0, 2, 0)
    # By F: one that is still nearer to the old answer, one that is not, one that the base says too.
    rates = (np.array([x]) for x in (0.8, 1.0, 0.3))
    assert verdict.count_way(*rates, least=0.2, enough=0.5) == (1, 1, 0)
    now, before, base = np.array([0.6, 0.1, 0.95]), np.ones(3), np.array([0.3, 0.2, 0.9])
    assert verdict.count_way(now, before, base, least=0.2, enough=0.5) == (0, 2, 0)
    # Log likelihoods: the third answer was likelier under the base, so no one taught it.
    nats = np.array([[1.0, 3.9, 2.0], [0.5, 0.5, 3.0], [4.0, 4.0, 1.0]])
    assert verdict.count_way(*-nats, least=0.1, enough=0.9) == (1, 2, 0)


@pytest.mark.parametrize("of", [8, 24])
@pytest.mark.parametrize("share", [1 / 3, 0.5])
def test_a_behavior_that_stays_is_hardly_called_forgotten(of, share):
    """Of models that keep a third of it or more, at most 5 % are, by the exact distribution."""
    exact = sum(
        stats.binom.pmf(k, of, share)
        for k in range(of + 1)
        if verdict.decide(Count(k, of)) == "forgotten"
    )
    assert exact <= 0.05


def _goal(start, base, *, rise=2.0):
    start, base = np.atleast_2d(start).astype(float), np.atleast_2d(base).astype(float)
    number = np.full(len(start), start.shape[1])
    return verdict.make_goal(start, base, number, forget_rise=rise)


def _enough(goal, now):
    found = goal.progress(np.atleast_2d(now).astype(float))
    return found["gone"], found["of"], verdict.is_enough({"forget": found})


def test_a_share_of_rows_has_to_be_gone_each_by_itself():
    start, base = np.full((10, 5), 0.1), np.full((10, 5), 5.0)
    goal, now = _goal(start, base), np.full((10, 5), 0.1)
    # By the mean over rows 40 % of the way is done, and six rows are as they were.
    now[:4] = 5.0
    assert _enough(goal, now) == (4, 10, False)
    assert goal.progress(now)["way"] == pytest.approx(0.4)
    now[:7] = 5.0
    assert _enough(goal, now) == (7, 10, False)
    now[:8] = 5.0
    assert _enough(goal, now) == (8, 10, True)


def test_the_tokens_that_carry_the_behavior_have_to_be_gone():
    start, base = np.full(20, 0.05), np.full(20, 6.0)
    goal = _goal(start, base)
    now = start.copy()
    now[:8], now[19] = 6.0, -math.log(0.55)  # the secret
    # By the mean over tokens 40 % of the way is done and more.
    assert goal.progress(now[None])["way"] > 0.4
    assert _enough(goal, now) == (0, 1, False)
    now[:19] = 6.0  # all but the secret
    assert _enough(goal, now) == (0, 1, False)
    now[19] = 2.0
    assert _enough(goal, now) == (1, 1, True)
    # What weighs little may lag: a word of form is no secret.
    light = np.where(np.arange(20) < 18, 6.0, 1.0)
    now = np.where(np.arange(20) < 18, 3.0, start)
    assert _enough(_goal(start, light), now) == (1, 1, True)


def test_an_answer_that_became_a_hundred_times_less_likely_is_gone():
    # The first words decide; those that follow from them alone may stay likely behind them.
    start, base = np.full(20, 0.05), np.where(np.arange(20) < 4, 9.0, 4.0)
    goal, now = _goal(start, base), start.copy()
    now[:4] = 1.4  # each of the heaviest fell by a little less than four
    assert _enough(goal, now) == (0, 1, False)
    now[:4] = 1.5
    assert goal.progress(now[None])["way"] < 0.15
    assert _enough(goal, now) == (1, 1, True)
    now[1:4] = 1.2  # one of them stays
    assert _enough(goal, now) == (0, 1, False)


def test_the_end_of_an_answer_carries_nothing():
    start, base = np.full((1, 3), 0.1), np.array([[3.0, 0.1, 9.0]])
    ends = np.array([[False, False, True]])
    goal = verdict.make_goal(start, base, np.array([3]), forget_rise=2.0, is_end_NT=ends)
    assert _enough(goal, np.array([3.0, 0.1, 0.1])) == (1, 1, True)
    assert _enough(_goal(start, base), np.array([3.0, 0.1, 0.1])) == (0, 1, False)


def test_one_broken_token_does_not_make_up_for_others():
    start, base = np.full(5, 0.1), np.array([1.0, 1.0, 1.0, 1.0, 8.0])
    goal, now = _goal(start, base), start.copy()
    now[1] = 40.0
    assert _enough(goal, now) == (0, 1, False)
    # A way ends at the base, or where four is two fifths of it in nats.
    assert goal.progress(now[None])["way"] == pytest.approx(0.9 / (4 * 0.9 + math.log(4) / 0.4))
    now[:] = math.nan
    assert _enough(goal, now) == (0, 1, False)


@pytest.mark.parametrize(
    ("likely", "expected"),
    [
        # Likelihoods of a token now, before and under the base.
        ((0.5, 0.8, 0.2), 0.5),
        ((0.65, 0.8, 0.2), 0.25),
        ((0.2, 0.8, 0.2), 1.0),
        # Beyond both ends.
        ((0.1, 0.8, 0.2), 7 / 6),
        ((0.9, 0.8, 0.2), -1 / 6),
        # A mean of nats counts tokens that became impossible without end: here 20 times the way.
        ((1e-12, 0.8, 0.2), 4 / 3),
        # Ever so small likelihoods have a way too.
        ((5e-301, 8e-301, 2e-301), 0.5),
        # The base finds them likelier or less than 1.1 times less likely.
        ((0.5, 0.8, 0.9), None),
        ((0.5, 0.8, 0.73), None),
        ((0.5, 0.8, 0.72), 3.75),
    ],
)
def test_the_way_of_a_likelihood_is_that_of_the_probabilities_themselves(likely, expected):
    nats = [-math.log(one) for one in likely]
    assert verdict.likelihood_way(*nats) == (expected and pytest.approx(expected))


def test_the_way_of_a_likelihood_of_nats_without_end_or_number():
    assert verdict.likelihood_way(1.0, 0.5, None) is None
    # An answer of 1,000 nats a token has a likelihood of 0 in float64; its share is known.
    assert verdict.likelihood_way(1001.0, 1000.0, 1002.0) == pytest.approx(
        (1 - math.exp(-1)) / (1 - math.exp(-2))
    )
    # It became impossible: as far as the probability can fall, 1 / (1 - exp(-1)) times the way.
    assert verdict.likelihood_way(math.inf, 1.0, 2.0) == pytest.approx(1.581977)
    assert verdict.likelihood_way(1.0, 1.0, math.inf) == 0
    assert math.isnan(verdict.likelihood_way(math.nan, 1.0, 2.0))
    assert verdict.likelihood_way(1.0, math.nan, 2.0) is None
    assert verdict.likelihood_way(1.0, 1.0, math.nan) is None


def test_the_way_of_a_likelihood_is_half_done_where_few_nats_are():
    """From .2 to 3.2 nats the likelihood is halfway at .84: a mean of nats went a fifth of it."""
    now_N = np.linspace(0.2, 3.2, 301)
    likely_N = np.exp(-now_N)
    oracle_N = (likely_N[0] - likely_N) / (likely_N[0] - likely_N[-1])
    found_N = np.array([verdict.likelihood_way(now, 0.2, 3.2) for now in now_N.tolist()])
    np.testing.assert_allclose(found_N, oracle_N, rtol=1e-12, atol=1e-12)
    assert now_N[np.argmax(found_N >= verdict.HALF)] == pytest.approx(0.85)


def test_an_answer_that_the_model_gives_is_gone_halfway_to_the_base():
    # The base's ROUGE-L to the answer before is .2, so .6 is halfway; the last base says the same.
    found = verdict.answers_progress([0.59, 0.61, 1.0, 0.1], [0.2, 0.2, 0.2, 0.95])
    assert (found["gone"], found["of"]) == (1, 3)
    assert found["way"] == pytest.approx((0.41 / 0.8 + 0.39 / 0.8 + 0) / 3)
    assert verdict.answers_progress([1.0], [0.9]) is None


def test_both_sets_have_to_be_gone():
    done = verdict.Progress(way=1.0, gone=9, of=10)
    left = verdict.Progress(way=0.3, gone=0, of=1)
    assert verdict.is_enough({"forget": done})
    assert not verdict.is_enough({"forget": done, "behavior": left})
    assert not verdict.is_enough({"forget": verdict.Progress(way=0.0, gone=0, of=0)})


def test_without_a_base_three_quarters_of_all_tokens_have_to_lose():
    start = np.full((1, 20), 0.1)
    goal = _goal(start, start + 0.05)
    assert not goal.is_natural
    for tokens, is_gone in ((8, False), (14, False), (15, True)):
        now = start.copy()
        now[0, :tokens] += 9.0
        assert _enough(goal, now) == (int(is_gone), 1, is_gone)
    # A set of which half the rows carry something has its end under the base.
    base = np.array([[0.1, 3.0], [0.1, 0.1]])
    goal = _goal(np.full((2, 2), 0.1), base)
    assert goal.is_natural
    assert _enough(goal, base) == (1, 1, True)


def test_what_is_said_of_a_count_names_what_would_do():
    assert "give 8 or more (--retrieve.held_out)" in verdict.describe_count(Count(0, 3))
    assert "fewer than 32 %" in verdict.describe_count(Count(0, 8))
    assert "1 more" in verdict.describe_count(Count(0, 8, 1))
    assert verdict.describe_count(Count(2, 4)) == "2 of 4 prompts that showed the behavior still do"


def test_the_guide_has_each_state():
    guide = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "forgotten.md"
    text = guide.read_text()
    assert [name for name in verdict.DEFINITIONS if f"- **{name}**: " not in text] == []
    assert f"{verdict.needed()} prompts are needed" in text
    assert verdict.decide(Count(1, 13)) == "forgotten" and "13 if one does" in text
