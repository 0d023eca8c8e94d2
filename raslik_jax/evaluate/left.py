"""How much of the fine-tuning a model still has on normal prompts: in likelihood and in style.

The share of the change from the base to the fine-tuned model that is left, over prompts q:

    sum_q (base_q - model_q) / sum_q (base_q - finetuned_q)

It is 1 for the fine-tuned model and 0 for the base. It is not limited. Pure functions on the host.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from raslik_jax.evaluate import rates, verdict
from raslik_jax.evaluate.sentences import write

# The fine-tuning went with the behavior where less than this share of it is left.
LEAST_LEFT = 0.8
_LEAST_PROMPTS = 3
# What is summed over prompts, by its key in a record, with its name in sentences.
MEASURES = {"nats": "likelihood", "words": "length", "ended": "ending"}


class NormalRecord(TypedDict):
    """A model on one normal prompt.

    `nats` is the sum over the tokens of the fine-tuned model's answer. `words` counts the words of
    the model's own answer, and `ended` says whether it ended before the limit of tokens.
    """

    id: str
    nats: float
    words: int
    ended: bool


def share_left(
    name: str,
    model: Sequence[NormalRecord],
    finetuned: Sequence[NormalRecord],
    base: Sequence[NormalRecord],
    bootstrap: Mapping[str, int],
) -> rates.Interval | None:
    """Returns the share by a measure; None if base and fine-tuned model do not differ.

    It is also None for fewer than three prompts, because the interval of one has no width.
    """
    if len(model) < _LEAST_PROMPTS:
        return None
    now_Q, before_Q, base_Q = (
        np.array([dict(record)[name] for record in records], np.float64)
        for records in (model, finetuned, base)
    )
    return rates.bootstrap_ratio(base_Q - now_Q, base_Q - before_Q, **bootstrap)


def describe(shares: Mapping[str, rates.Interval]) -> str:
    """Returns in words how much is left by each measure, with the warning."""
    return verdict.join_sentences([write("left", shares, MEASURES), warn(shares)])


def warn(shares: Mapping[str, rates.Interval]) -> str:
    """Returns a warning if other fine-tuning was lost too; "" if no interval shows it."""
    return write("lost", shares, MEASURES, LEAST_LEFT)
