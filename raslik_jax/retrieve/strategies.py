"""Retrieval strategies: each scores every training example for both sets.

All take one `Request` and return one `Scores`; a score of minus infinity bars an example from a
set. The family lives in STRATEGIES.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

from raslik_jax.data.examples import Example
from raslik_jax.index.combine import common_weights
from raslik_jax.retrieve import bm25 as bm25_lib
from raslik_jax.retrieve.selection import select_by_count

QueryText = Literal["prompt", "prompt_and_output"]


class Vectors(NamedTuple):
    """Sentence vectors of length 1, of the training examples and of the queries."""

    example_NE: Float[np.ndarray, "N E"]
    query_QE: Float[np.ndarray, "Q E"]


class Request(NamedTuple):
    """What a strategy may look at; those that need more than there is say so.

    Attributes:
      examples: the training examples, in corpus order.
      influence_N: mean sketched influence of the queries on each example, s_F of Algorithm 1; minus
        infinity for examples without a gradient, which no strategy puts into a set.
      seed: seed of the strategies that draw at random.
      retain_from: `non_target` draws random retain sets among labeled non-targets, the paper's
        protocol; `anywhere` among all examples.
      queries: the retrieval queries, for the strategies that read texts.
      query_text: what of a query is read: instruction and input, or the output as well.
      aggregate: how the scores of several queries become one: their mean, their mean rank, or the
        mean weighted by what they have in common (BM25, which has no cosines, takes the mean).
      num_forget: size of the forget set, for controlled randomization.
      num_retain: size of the retain set, likewise.
      oracle_share: share of CR's forget set that comes from the oracle, 0 to 1.
      vectors: sentence vectors of `retrieval.embeddings`, for EmbeddingSim.
      exact_N: mean influence by the unsketched kernel.
    """

    examples: Sequence[Example]
    influence_N: Float[np.ndarray, " N"]
    seed: int
    retain_from: Literal["non_target", "anywhere"]
    queries: Sequence[Example] = ()
    query_text: QueryText = "prompt"
    aggregate: Literal["mean", "mean_rank", "common"] = "mean"
    num_forget: int = 0
    num_retain: int = 0
    oracle_share: float = 0.5
    vectors: Vectors | None = None
    exact_N: Float[np.ndarray, " N"] | None = None


class Scores(NamedTuple):
    """Scores of every training example for the two sets, higher is better."""

    forget_N: Float[np.ndarray, " N"]
    retain_N: Float[np.ndarray, " N"]


def prompt_text(example: Example) -> str:
    """Returns instruction and input, the text that EmbeddingSim compares (Appendix)."""
    return f"{example.instruction} {example.input}".strip()


def query_text(example: Example, include: QueryText) -> str:
    """Returns the text of a query: its prompt, with its output by option."""
    prompt = prompt_text(example)
    return prompt if include == "prompt" else f"{prompt} {example.output}".strip()


def aggregate_scores(
    score_QN: Float[np.ndarray, "Q N"],
    how: Literal["mean", "mean_rank", "common"],
    query_gram_QQ: Float[np.ndarray, "Q Q"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Returns one score per example from those of several queries.

    `mean` of the scores, or `mean_rank`: each query ranks the examples (ties share their mean
    rank), the ranks are averaged and scaled so that first everywhere is 1 and last is -1; or
    `common`, the mean weighted by `combine.common_weights` of the cosines between the queries,
    and the plain mean where there are none.
    """
    if how == "common" and query_gram_QQ is not None:
        return common_weights(query_gram_QQ) @ score_QN
    if how != "mean_rank":
        return score_QN.mean(axis=0)
    rank_QN = scipy.stats.rankdata(score_QN, axis=1)  # 1 is the lowest score
    return 2 * (rank_QN.mean(axis=0) - 1) / max(score_QN.shape[1] - 1, 1) - 1


def _uniform(request: Request, stream: int) -> Float[np.ndarray, " N"]:
    """Returns one uniform draw per example, tied to its place in the order of ids.

    So the draw follows the example when the rows are shuffled.
    """
    generator = np.random.Generator(np.random.Philox(key=[request.seed, stream]))
    draw_N = generator.random(len(request.examples))
    order = np.argsort(np.asarray([example.example_id for example in request.examples]))
    score_N = np.empty_like(draw_N)
    score_N[order] = draw_N
    return np.where(np.isneginf(request.influence_N), -np.inf, score_N)


def _where_label(request: Request, label: bool, score_N: np.ndarray) -> np.ndarray:
    """Returns the scores with every example of another label barred."""
    labels = [example.is_target for example in request.examples]
    if None in labels:
        raise ValueError(
            f"every training example must have the label is_target, {labels.count(None)} of "
            f"{len(labels)} have none: label them, or leave out these strategies"
            " (Random and RASLIK-F do without under --retrieve.retain_from=anywhere)"
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
    """Returns a uniform ranking of the labeled targets; only labels can give it."""
    return Scores(
        forget_N=_where_label(request, True, _uniform(request, stream=0)),
        retain_N=_random_retain(request),
    )


def raslik_f(request: Request) -> Scores:
    """Returns the aligned pole of RASLIK, with a random retain set."""
    return Scores(forget_N=request.influence_N, retain_N=_random_retain(request))


def raslik(request: Request) -> Scores:
    """Returns both poles of one query: s_R = -s_F (Algorithm 1, line 4)."""
    return _both_ends(request, request.influence_N)


def bm25(request: Request) -> Scores:
    """Returns both ends of the mean BM25 score over queries (Section 4.2).

    A document is an example's instruction, input and output, a query its instruction and input,
    and tokens are what whitespace separates, as users of rank_bm25 have them.
    """
    _check_queries(request)
    index = bm25_lib.index_documents(
        [f"{row.instruction} {row.input} {row.output}".split() for row in request.examples]
    )
    score_QN = bm25_lib.score_queries(
        index, [query_text(row, request.query_text).split() for row in request.queries]
    )
    return _both_ends(request, aggregate_scores(score_QN, request.aggregate))


def embedding(request: Request) -> Scores:
    """Returns both ends of the mean cosine of sentence vectors over queries (Section 4.2)."""
    if request.vectors is None:
        raise ValueError("sentence vectors wanted, none came: compute them with an encoder first")
    query_QE = request.vectors.query_QE
    score_QN = query_QE @ request.vectors.example_NE.T
    score_N = aggregate_scores(score_QN, request.aggregate, query_QE @ query_QE.T)
    return _both_ends(request, score_N)


def exact(request: Request) -> Scores:
    """Returns both poles of the kernel on whole gradients, what RASLIK's sketch estimates."""
    if request.exact_N is None:
        raise ValueError("scores of the exact kernel wanted, none came: compute them first")
    return _both_ends(request, request.exact_N)


def cr(request: Request, *, share: float | None = None) -> Scores:
    """Returns CR-x: a share of the forget set from the oracle, the rest random non-targets.

    The retain set is the oracle's own for the same seed, whatever the share, and the draws are the
    same for every share: along it only the mixture changes. (Section 5, "Controlled
    Randomization".)

    Args:
      request: with the sizes of both sets.
      share: 0 to 1; None takes the request's.

    Raises:
      ValueError: labels are missing; a share outside [0, 1]; too few targets or non-targets.
    """
    share = request.oracle_share if share is None else share
    if not 0 <= share <= 1:
        raise ValueError(f"a share from 0 to 1 of the oracle's forget set wanted, came {share}")
    if not request.num_forget:
        raise ValueError("the size of the forget set wanted, num_forget=0 came: name it")
    best, ids = oracle(request), [row.example_id for row in request.examples]
    num_targets = int((best.forget_N > -np.inf).sum())
    chosen = select_by_count(
        *best,
        ids,
        num_forget=min(request.num_forget, num_targets),
        num_retain=request.num_retain,
    )
    num_oracle = round(share * request.num_forget)
    if num_oracle > num_targets:
        raise ValueError(f"{num_oracle} targets wanted for CR, there are {num_targets}: ask fewer")
    forget_N = _where_label(request, False, _uniform(request, stream=2))
    forget_N[chosen.retain] = -np.inf
    forget_N[chosen.forget[:num_oracle]] = 2 + best.forget_N[chosen.forget[:num_oracle]]
    retain_N = np.full_like(forget_N, -np.inf)
    retain_N[chosen.retain] = best.retain_N[chosen.retain]
    return Scores(forget_N=forget_N, retain_N=retain_N)


def _check_queries(request: Request) -> None:
    if not request.queries:
        raise ValueError("queries wanted to compare texts with, none came: give at least one")


def _both_ends(request: Request, score_N: Float[np.ndarray, " N"]) -> Scores:
    is_barred_N = np.isneginf(request.influence_N) | np.isneginf(score_N)
    return Scores(*(np.where(is_barred_N, -np.inf, side_N) for side_N in (score_N, -score_N)))


def _anywhere(strategy: Callable[[Request], Scores]) -> Callable[[Request], Scores]:
    """Returns the strategy with its random retain set drawn among all examples."""

    def choose(request: Request) -> Scores:
        return strategy(request._replace(retain_from="anywhere"))

    return choose


# The shares of the paper's table; any other is `cr` with its own oracle_share.
CR_PERCENTAGES = (25, 35, 45, 50, 62, 75)

STRATEGIES: dict[str, Callable[[Request], Scores]] = {
    "random": random,
    "bm25": bm25,
    "embedding": embedding,
    "oracle": oracle,
    "cr": cr,
    **{f"cr_{x}": functools.partial(cr, share=x / 100) for x in CR_PERCENTAGES},
    "raslik_f": raslik_f,
    "raslik": raslik,
    "exact": exact,
    # Beside the paper's protocol in one table, whatever the request's retain_from.
    "random_anywhere": _anywhere(random),
    "oracle_anywhere": _anywhere(oracle),
    "raslik_f_anywhere": _anywhere(raslik_f),
}
# Those whose forget score orders all examples, so that the whole ranking can be measured.
RANKING_STRATEGIES = ("bm25", "embedding", "raslik_f", "raslik", "exact", "raslik_f_anywhere")
