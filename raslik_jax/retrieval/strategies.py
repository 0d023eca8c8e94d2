"""Retrieval strategies: each scores every training example for both sets.

All take one `Request` and return one `Scores`; a score of minus infinity bars an example from a
set. The family lives in STRATEGIES.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.data.examples import Example


class Request(NamedTuple):
    """What a strategy may look at.

    Attributes:
      examples: the training examples, in corpus order.
      influence_N: mean sketched influence of the queries on each example, s_F of Algorithm 1.
      seed: seed of the strategies that draw at random.
      retain_from: `non_target` draws random retain sets among labelled non-targets, the paper's
        protocol; `anywhere` among all examples.
    """

    examples: Sequence[Example]
    influence_N: Float[np.ndarray, " N"]
    seed: int
    retain_from: Literal["non_target", "anywhere"]


class Scores(NamedTuple):
    """Scores of every training example for the two sets, higher is better."""

    forget_N: Float[np.ndarray, " N"]
    retain_N: Float[np.ndarray, " N"]


def _uniform(request: Request, stream: int) -> Float[np.ndarray, " N"]:
    """Returns one uniform draw per example, tied to its place in the order of ids.

    So the draw follows the example when the rows are shuffled.
    """
    generator = np.random.Generator(np.random.Philox(key=[request.seed, stream]))
    draw_N = generator.random(len(request.examples))
    order = np.argsort(np.asarray([example.example_id for example in request.examples]))
    score_N = np.empty_like(draw_N)
    score_N[order] = draw_N
    return score_N


def _where_label(request: Request, label: bool, score_N: np.ndarray) -> np.ndarray:
    """Returns the scores with every example of another label barred."""
    labels = [example.is_target for example in request.examples]
    if None in labels:
        raise ValueError(
            f"a label is_target wanted for every training example, "
            f"{labels.count(None)} of {len(labels)} have none: "
            "label them, or leave out the oracle and set retain_from=anywhere"
        )
    return np.where(np.asarray(labels) == label, score_N, -np.inf)


def _random_retain(request: Request) -> np.ndarray:
    score_N = _uniform(request, stream=1)
    if request.retain_from == "anywhere":
        return score_N
    return _where_label(request, False, score_N)


def random(request: Request) -> Scores:
    """Returns a uniform ranking of all examples, the baseline of Section 4.2."""
    return Scores(forget_N=_uniform(request, stream=0), retain_N=_random_retain(request))


def oracle(request: Request) -> Scores:
    """Returns a uniform ranking of the labelled targets; only labels can give it."""
    return Scores(
        forget_N=_where_label(request, True, _uniform(request, stream=0)),
        retain_N=_random_retain(request),
    )


def raslik_f(request: Request) -> Scores:
    """Returns the aligned pole of RASLIK, with a random retain set."""
    return Scores(forget_N=request.influence_N, retain_N=_random_retain(request))


def raslik(request: Request) -> Scores:
    """Returns both poles of one query: s_R = -s_F (Algorithm 1, line 4)."""
    return Scores(forget_N=request.influence_N, retain_N=-request.influence_N)


STRATEGIES: dict[str, Callable[[Request], Scores]] = {
    "random": random,
    "oracle": oracle,
    "raslik_f": raslik_f,
    "raslik": raslik,
}
