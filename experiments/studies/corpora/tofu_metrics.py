"""TOFU's own metrics: probability, ROUGE, truth ratio, forget quality, model utility.

Pure functions of likelihoods and texts on the host. A likelihood is the mean over an answer's
tokens in nats, so that exp(-nll) is TOFU's P(a|q)^(1/|a|).

Source: Maini et al. 2024, "TOFU: a task of fictitious unlearning for LLMs" (arXiv:2401.06121),
section 2.2, and the figures that its repository (locuslab/tofu at 8c49eee) computes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate import rates

# Sets in TOFU's order of distance from what is forgotten; the measures of each, from 0 to 1.
QUESTION_SETS = ("forget", "retain", "real_authors", "world_facts")
PARTS = ("probability", "rouge", "truth_ratio")
# The first set is the one to forget; model utility is over the others.
_FORGET_SET, *_UTILITY_SETS = QUESTION_SETS
# Sets whose answers no model was trained on: their probability is relative to the wrong answers.
_OPTION_SETS = QUESTION_SETS[2:]


class QuestionRecord(TypedDict):
    """One model's results for one question: nats a token of the answers, and its own answer."""

    id: str
    set_name: str
    answer_nll: float
    true_nll: float
    wrong_nll: list[float]
    answer: str
    output: str


def truth_ratios(
    true_nll_Q: Float[np.ndarray, " Q"],
    wrong_nll_Q: Sequence[Sequence[float]],
) -> Float[np.ndarray, " Q"]:
    """Returns the likelihood of wrong answers over the right one: R_truth of each question.

    R = (prod_i P(wrong_i)^(1/|wrong_i|))^(1/n) / P(true)^(1/|true|) with n wrong answers. Below 1
    the model knows the answer, and about 1 it cannot tell. The paper writes an arithmetic mean over
    the wrong answers. The code behind its figures takes the geometric one, as here, and so does
    every later table. The right answer is a paraphrase if there is one. R is at most e^700, where
    floats end.
    """
    if len(true_nll_Q) != len(wrong_nll_Q) or not all(map(len, wrong_nll_Q)):
        got = f"{sum(map(bool, map(len, wrong_nll_Q)))} of {len(true_nll_Q)} with one"
        raise ValueError(f"each question must have a wrong answer, got {got}: add one to each")
    log_wrong_Q = np.array([-np.mean(wrong) for wrong in wrong_nll_Q])
    return np.exp(np.clip(log_wrong_Q + true_nll_Q, -700.0, 700.0))


def truth_score(ratio_Q: Float[np.ndarray, " Q"], *, is_forgotten: bool) -> float:
    """Returns the mean of min(R, 1/R) for the set to forget, of max(0, 1 - R) for another."""
    score_Q = np.minimum(ratio_Q, 1 / ratio_Q) if is_forgotten else np.maximum(0.0, 1 - ratio_Q)
    return float(score_Q.mean())


def option_probability(
    answer_nll_Q: Float[np.ndarray, " Q"], wrong_nll_Q: Sequence[Sequence[float]]
) -> Float[np.ndarray, " Q"]:
    """Returns the probability of each right answer among its options, from 0 to 1.

    It is p / (p + sum of the wrong ones' p) with p = exp(-nats a token). It is for questions that
    the model was not trained on, whose answers are a word or a name.
    """
    # Relative to the right answer nothing can underflow to 0 / 0.
    return np.array(
        [
            1 / (1 + np.exp(np.clip(nll - np.asarray(wrong), None, 700.0)).sum())
            for nll, wrong in zip(answer_nll_Q, wrong_nll_Q, strict=True)
        ]
    )


def evaluate_set(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Returns PARTS of a set's `QuestionRecord`s: probability, ROUGE-L recall and truth ratio."""
    answer_nll_Q = np.array([record["answer_nll"] for record in records], np.float64)
    probability_Q = np.exp(-answer_nll_Q)
    if name in _OPTION_SETS:
        wrong_nll_Q = [record["wrong_nll"] for record in records]
        probability_Q = option_probability(answer_nll_Q, wrong_nll_Q)
    rouge_Q = [rates.rouge_l(record["output"], record["answer"]).recall for record in records]
    truth = truth_score(_truth_ratios_of(records), is_forgotten=name == _FORGET_SET)
    values = (float(probability_Q.mean()), float(np.mean(rouge_Q)), truth)
    return dict(zip(PARTS, values, strict=True))


def _truth_ratios_of(records: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, " Q"]:
    true_nll_Q = np.array([record["true_nll"] for record in records], np.float64)
    return truth_ratios(true_nll_Q, [record["wrong_nll"] for record in records])


def model_utility(sets: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the harmonic mean of nine numbers: three metrics of the three sets to keep.

    0 where one of them is 0; None where a set is missing: a mean over others would not compare.
    """
    if any(name not in sets for name in _UTILITY_SETS):
        return None
    values = np.array([sets[name][part] for name in _UTILITY_SETS for part in PARTS])
    return float(len(values) / (1 / values).sum()) if (values > 0).all() else 0.0


def forget_quality(
    ratio_Q: Float[np.ndarray, " ours"], retain_ratio_Q: Float[np.ndarray, " theirs"]
) -> float:
    """Returns how alike an unlearned model and a retain model are on the forget set.

    It is the p-value of the two-sided two-sample Kolmogorov-Smirnov test on their truth ratios over
    the questions of the forget set (exact for these sizes). It is high if nothing separates them.
    """
    # Imported late: scipy.stats takes a second that no other stage should pay.
    from scipy import stats

    return float(stats.ks_2samp(ratio_Q, retain_ratio_Q).pvalue)


def compare_truth(
    records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> tuple[float, int]:
    """Returns the forget quality of two models' `QuestionRecord`s, and the number of questions.

    The questions are those of the forget set. Without any the quality is 1.
    """
    ours, theirs = ([r for r in part if r["set_name"] == _FORGET_SET] for part in (records, others))
    if [record["id"] for record in ours] != [record["id"] for record in theirs]:
        raise ValueError(
            f"the retain model must have answered the same {len(ours)} questions: run it with "
            "the same --corpus.tofu.forget and --corpus.tofu.questions"
        )
    ratios = map(_truth_ratios_of, (ours, theirs))
    return (forget_quality(*ratios) if ours else 1.0), len(ours)


def evaluate_questions(
    records: Sequence[Mapping[str, Any]], retain_records: Sequence[Mapping[str, Any]] = ()
) -> dict[str, float | None]:
    """Returns TOFU's metrics of `QuestionRecord`s: "sets/retain/rouge", "model_utility" and so on.

    Without those of a retain model there is no "forget_quality".
    """
    own = {name: [r for r in records if r["set_name"] == name] for name in QUESTION_SETS}
    sets = {name: evaluate_set(part, name) for name, part in own.items() if part}
    found: dict[str, float | None] = {
        f"sets/{name}/{part}": value
        for name, found in sets.items()
        for part, value in found.items()
    }
    found["model_utility"] = model_utility(sets)
    if retain_records:
        found["forget_quality"], _ = compare_truth(records, retain_records)
    return found
