"""Perplexity of given answers: pure functions of likelihoods on the host.

Four sets, the same rows for every model of a run:

- "forget": training examples that are labeled targets; - "retain": training examples that are
labeled otherwise; forgotten rows without a label are left out; - "held-out": the normal queries of
the evaluation with their labeled answers; - "behavior": the given bad outputs: traced answers and
the labeled answers to target queries.

A perplexity that rises on "forget" alone is forgetting; one that rises everywhere is damage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from raslik_jax.data.examples import Example
from raslik_jax.data.ordering import shuffled
from raslik_jax.evaluate import rates

SETS = ("forget", "retain", "held-out", "behavior")
# A float ends a little above exp(709), and JSON knows no infinity.
_MOST_NATS = 700.0


class AnswerRecord(TypedDict):
    """The likelihood of one answer: its id, mean nats a token, tokens."""

    id: str
    nll: float
    tokens: int


def draw_sets(
    train: Sequence[Example],
    target_queries: Sequence[Example],
    normal_queries: Sequence[Example],
    traced: Sequence[Example],
    *,
    number: int,
    seed: int,
) -> dict[str, tuple[Example, ...]]:
    """Returns at most `number` rows of each of SETS with an answer in a seeded order.

    If no training example is labeled a target the target queries are the forget set.
    """
    targets = [row for row in train if row.is_target]
    others = [row for row in train if not row.is_target]
    pools = (targets or target_queries, others, normal_queries, (*traced, *target_queries))
    sets = {}
    for name, pool in zip(SETS, pools, strict=True):
        answered = [row for row in pool if row.output.strip()]
        sets[name] = tuple(shuffled(answered, seed=seed, label=f"{name} rows")[:number])
    return sets


def perplexity(
    records: Sequence[Mapping[str, Any]], *, seed: int, resamples: int
) -> rates.Interval | None:
    """Returns the perplexity of `AnswerRecord`s with its 95 % bootstrap interval over examples.

    It is exp(sum of nats / sum of tokens): a long answer weighs more than a short one. It is None
    if no answer has a token, and at most e^700, where floats end.
    """
    counted = [record for record in records if record["tokens"]]
    tokens_Q = np.array([record["tokens"] for record in counted], np.float64)
    nll_Q = np.array([record["nll"] for record in counted], np.float64)
    how = {"seed": seed, "resamples": resamples}
    found = rates.bootstrap_ratio(nll_Q * tokens_Q, tokens_Q, **how) if counted else None
    if found is None:
        return None
    mean, low, high = (
        float(np.exp(min(found[end], _MOST_NATS))) for end in ("mean", "low", "high")
    )
    return rates.Interval(mean=mean, low=low, high=high)
