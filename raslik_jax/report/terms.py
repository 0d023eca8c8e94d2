"""The exact definitions that the page shows for its words and numbers on a click or a tap."""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from raslik_jax.evaluate import verdict
from raslik_jax.report import tables

_STATE = {name: f"{name.capitalize()}: {text}." for name, text in verdict.DEFINITIONS.items()}
_WAY = (
    "The share of the change that went back, from the model before unlearning (0 %) to the base "
    "(100 %). A token that carries the behavior is gone at "
    f"{verdict.ENOUGH:.0%}."
)
_PROMPTS = (
    "Prompts of rows that show the behavior and that no step of unlearning used. A prompt counts "
    "if the model before unlearning shows the behavior and the base does not. Words, a judge or a "
    f"classifier decide. Without them F must go {verdict.HALF:.0%} of the way to the base's."
)
# By the words that occur on the page. Sentences and headings of tables are searched for them.
TERMS: dict[str, str] = {
    "is gone from": _STATE["forgotten"],
    "is partly gone": _STATE["partly"],
    "is still there": _STATE["unchanged"],
    "damaged the model": _STATE["damaged"],
    "is not known": _STATE["unknown"],
    "held-out prompts": _PROMPTS,
    "prompts that showed the behavior": _PROMPTS,
    "other answers": "Answers to prompts without the behavior. An answer is unchanged if it equals "
    "the answer before unlearning, word for word.",
    "training rows": "Rows whose score stands out from those of unrelated rows. Rows that were "
    "kept out for measuring are included.",
    "stand out": "The scores are above the band that unrelated rows reach. The band is estimated "
    "from the low scores.",
    "score": "The cosine of two gradients after the mean gradient is subtracted, from -1 to 1. One "
    "is of the row and one of the answer. For several answers it is the mean of their cosines.",
    "±": "The standard deviation of the error of the score, because gradients are compressed.",
    "unrelated prompts": "Prompts of other training rows. The run scores the same row for them.",
    "p": "(1 + the number of unrelated prompts that score the row as high) / (1 + their number).",
    "q": "p, corrected for the number of rows. At most about one in twenty of the rows with q of "
    "at most .05 is there by chance.",
    "nearly the same": "Rows whose gradients have a cosine of .9 or more with that of this row.",
    "F": "Forget rate: mean ROUGE-L F1 of the answers to target queries with the answers before "
    "unlearning. Lower is better, down to the F of the base.",
    "R": "Retain rate: mean ROUGE-L F1 of the answers to normal queries with the answers before "
    "unlearning. Higher is better.",
    "Non-SF": "The share of answers that do not show the behavior, or their mean probability by a "
    "classifier.",
    "wording": "Mean ROUGE-L F1 with the answers before unlearning.",
    "ROUGE-L": "F1 of the longest common subsequence of words of two answers. 1 is equal.",
    "perplexity": "exp of the mean negative log-likelihood per token.",
    "answers before unlearning": "The answers of the fine-tuned model.",
    "nats a token": "Mean negative log-likelihood per token, with the natural logarithm. 0.1 more "
    "is 1.1 times the perplexity.",
    "of the way": _WAY,
    "mean length in words": "The mean number of words of the answers to normal queries.",
    "KL": "Kullback-Leibler divergence per token between two models over the same answers, in "
    "nats. 0 means that the models are equal there.",
    "noise floor": "The KL between two retrained models that differ only in the seed.",
    "Same answers": "The share of answers that equal those of the retrained model.",
    "Distance": "Euclidean distance to R = 1 and F = 0.",
    "D_mah": "Mahalanobis distance to R = 1 and F = 0 over the compared methods.",
    "Pareto": "Yes: no other method is better in R or F and at least as good in the other.",
    "AUC": "The chance that a forgotten row looks more trained on than a held-out one. .5 is a "
    "guess.",
    "Precision": "The share of the forget set that is labeled a target.",
    "Base rate": "The share of labeled targets among all rows.",
    "AUROC": "The chance that a target has a higher score than another row.",
    "AUPRC": "The mean precision over all cuts of the ranking at a target.",
    "QLD": "The rise of the loss of the traced answers after retraining without the top rows, "
    "minus the rise without as many random rows.",
    "LDS": "Spearman's correlation between the sum of the scores and the likelihood of the answer, "
    "over retrainings on random subsets.",
    "greedy": "The answer of the most likely token at each step.",
}
_KEYS = list(TERMS)
_CASELESS = {name.lower(): name for name in TERMS if " " in name or name in ("score", "perplexity")}
_FIND = re.compile(
    r"(?<![\w.-])(?:"
    + "|".join(
        f"(?i:{re.escape(name)})" if name.lower() in _CASELESS else re.escape(name)
        for name in sorted(TERMS, key=len, reverse=True)
    )
    + r")(?![\w-])"
)


def defined(text: str, done: Iterable[str] = ()) -> Markup:
    """Returns a sentence, escaped, in which each term is a button for its definition.

    Args:
      text: a sentence of the program, not of data.
      done: terms that stay words. A term is a button only where it occurs first.
    """
    seen = set(done)

    def button(found: re.Match[str]) -> str:
        name = _CASELESS.get(found[0].lower(), found[0])
        if name in seen:
            return str(escape(found[0]))
        seen.add(name)
        return (
            f'<button type="button" class="term" popovertarget="term-{_KEYS.index(name)}">'
            f"{escape(found[0])}</button>"
        )

    parts, end = [], 0
    shown = tables.visible(str(text))
    for found in _FIND.finditer(shown):
        parts += [str(escape(shown[end : found.start()])), button(found)]
        end = found.end()
    return Markup("".join([*parts, str(escape(shown[end:]))]))


def used(contents: Iterable[str]) -> Sequence[tuple[str, str, str]]:
    """Returns anchor, term and definition of each term that has a button in these contents."""
    found = {int(n) for text in contents for n in re.findall(r'popovertarget="term-(\d+)"', text)}
    return [(f"term-{n}", _KEYS[n], TERMS[_KEYS[n]]) for n in sorted(found)]
