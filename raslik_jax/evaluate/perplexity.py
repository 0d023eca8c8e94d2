"""Perplexity of answers that somebody else wrote: pure functions of likelihoods, on the host.

Four sets, the same rows for every model of a run:

- "forget": training examples that are labeled targets, what the model is to find unlikely;
- "retain": training examples that are not, what it is to go on finding likely;
- "held-out": the normal queries of the evaluation with their labeled answers, which nobody was
  trained on;
- "behavior": the bad outputs, as far as they are given: what retrieval traces, and the labeled
  answers to the target queries of the evaluation.

A perplexity that rises on "forget" alone is forgetting; one that rises everywhere is damage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

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


class PerplexitySets(NamedTuple):
    """The rows that perplexity is measured on, in order of SETS; a set may be empty."""

    forget: tuple[Example, ...]
    retain: tuple[Example, ...]
    held_out: tuple[Example, ...]
    behavior: tuple[Example, ...]


def draw_sets(
    train: Sequence[Example],
    target_queries: Sequence[Example],
    normal_queries: Sequence[Example],
    traced: Sequence[Example],
    *,
    number: int,
    seed: int,
) -> PerplexitySets:
    """Returns rows of the four sets that have an answer, without regard to any strategy.

    Args:
      train: the training examples.
      target_queries: of the evaluation, with labeled answers; they are the forget set where no
        training example is labeled a target.
      normal_queries: likewise.
      traced: the queries of retrieval with the outputs that are traced.
      number: rows of each set at most.
      seed: of the draw.
    """
    targets = [row for row in train if row.is_target]
    others = [row for row in train if not row.is_target]
    pools = (targets or target_queries, others, normal_queries, (*traced, *target_queries))

    def draw(name: str, pool: Sequence[Example]) -> tuple[Example, ...]:
        answered = [row for row in pool if row.output.strip()]
        return tuple(shuffled(answered, seed=seed, label=f"{name} rows")[:number])

    return PerplexitySets(*map(draw, SETS, pools))


def perplexity(
    records: Sequence[Mapping[str, Any]], *, seed: int, resamples: int
) -> rates.Interval | None:
    """Returns the perplexity of a set with its 95 % bootstrap interval over examples.

    exp(sum of nats / sum of tokens): the mean is over tokens, as perplexity is defined, so a long
    answer weighs more than a short one.

    Args:
      records: an AnswerRecord of each answer; one without a token is left out.
      seed: of the bootstrap.
      resamples: draws of the bootstrap.

    Returns:
      None where no answer has a token. Beyond e^700, where floats end, e^700.
    """
    counted = [record for record in records if record["tokens"]]
    if not counted:
        return None
    tokens_Q = np.array([record["tokens"] for record in counted], np.float64)
    nll_Q = np.array([record["nll"] for record in counted], np.float64)
    found = rates.bootstrap(nll_Q * tokens_Q, tokens_Q, seed=seed, resamples=resamples)
    return rates.Interval(*(float(np.exp(min(value, _MOST_NATS))) for value in found))
