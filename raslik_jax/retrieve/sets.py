"""From the settings of a run to forget and retain sets: of its strategies, and of a trace."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.config import RetrieveConfig
from raslik_jax.data.examples import Example
from raslik_jax.index import quantize, search
from raslik_jax.index.combine import Aggregate, directions
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import noise
from raslik_jax.retrieve.selectors import SELECTORS, Selection, share_count
from raslik_jax.sketch import projections
from raslik_jax.sketch.families import PROJECTIONS

# Rows nearest to the thresholds whose noise stands for all.
_PILOT_ROWS = 64


class QueryScores(NamedTuple):
    """What queries of one behavior say of every row of an index.

    Attributes:
      forget_N: s_F in the order of the index's ids; minus infinity for rows that can be in no set.
      retain_N: s_R = -s_F, likewise.
      queries: their directions, centered as the scores are.
    """

    forget_N: Float[np.ndarray, " N"]
    retain_N: Float[np.ndarray, " N"]
    queries: search.Queries


def score_queries(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    ids: Sequence[str],
    *,
    center: bool,
    aggregate: Aggregate,
) -> QueryScores:
    """Returns the influence of several queries of one behavior on every row of an index.

    Raises:
      ValueError: the queries point apart; see `scores.score_store`.
    """
    queries = search.queries_of_store(store, query_QK, center=center, ids=ids)
    noise.check_agreement(queries.gram_QQ, ids)
    return QueryScores(*search.score_rows(store, queries, aggregate=aggregate), queries)


def row_sigma(
    store: SketchStore,
    positions: Int[np.ndarray, " M"],
    score_M: Float[np.ndarray, " M"],
    queries: search.Queries,
) -> Float[np.ndarray, " M"]:
    """Returns the standard deviation of rows' mean scores: of the sketch and of the dtype."""
    if store.dtype == "sign":  # an upper bound that has the sketch's share in it
        return quantize.sign_error(score_M, width=quantize.rotated_size(store.size))
    spec = projections.ProjectionSpec(**store.identity["projection"])
    p = PROJECTIONS[spec.family].collision(spec.num_params, spec.size)
    rho_MQ = directions(store.rows(positions), queries.mean_K) @ queries.direction_QK.T
    sigma_M = noise.score_sigma(queries.gram_QQ, rho_MQ, p)
    if store.dtype == "int8":
        sigma_M = np.hypot(sigma_M, quantize.int8_error(store.scales[positions]))
    return sigma_M


def margin_sigma(
    store: SketchStore,
    queries: search.Queries,
    forget_N: Float[np.ndarray, " N"],
    settings: RetrieveConfig,
) -> float:
    """Returns the one sigma_k of --retrieve.select=margin: of the rows near the thresholds.

    Args:
      store: the index.
      queries: centered as the scores are.
      forget_N: s_F in the order of the index's ids.
      settings: the thresholds.
    """
    distance_N = np.minimum(
        np.abs(forget_N - settings.forget_threshold), np.abs(forget_N + settings.retain_threshold)
    )
    nearest = np.sort(np.argsort(distance_N, kind="stable")[:_PILOT_ROWS])
    nearest = nearest[np.isfinite(distance_N[nearest])]
    sigma_M = row_sigma(store, nearest, forget_N[nearest], queries)
    return float(np.sqrt(np.mean(sigma_M**2)))


def count_targets(rows: Sequence[Example], is_eligible_N: Bool[np.ndarray, " N"]) -> int:
    """Returns how many labeled targets can be in a set."""
    return sum(bool(row.is_target and ok) for row, ok in zip(rows, is_eligible_N, strict=True))


def set_sizes(
    settings: RetrieveConfig, *, num_targets: int, num_eligible: int
) -> tuple[int, int] | None:
    """Returns the sizes of both sets where the rule needs no scores for them, otherwise None.

    Args:
      settings: the rule and its options; num_forget of 0 stands for the number of targets,
        num_retain of 0 for num_forget.
      num_targets: labeled targets that can be chosen.
      num_eligible: examples that can be chosen.

    Raises:
      ValueError: num_forget is 0 and there are no targets; a share is no example.
    """
    if settings.select == "count":
        num_forget = settings.num_forget or num_targets
        if not num_forget:
            raise ValueError(
                "--retrieve.num_forget must be given where no training example is a labeled target"
            )
        return num_forget, settings.num_retain or num_forget
    if settings.select == "quantile":
        return (
            share_count("forget", settings.forget_share, num_eligible),
            share_count("retain", settings.retain_share, num_eligible),
        )
    return None


def select_sets(
    forget_N: Float[np.ndarray, " N"],
    retain_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    settings: RetrieveConfig,
    *,
    num_targets: int,
    sigma: float = 0.0,
) -> Selection:
    """Returns the sets that the settings choose (--retrieve.select and the options of its rule).

    Args:
      forget_N: s_F; minus infinity bars an example.
      retain_N: s_R, likewise.
      ids: example ids, the tie-breaker.
      settings: the rule and its options.
      num_targets: labeled targets that can be chosen.
      sigma: of `margin_sigma`, for the rule that needs it.

    Raises:
      ValueError: see the rules.
    """
    eligible = int((forget_N > -np.inf).sum())
    sizes = set_sizes(settings, num_targets=num_targets, num_eligible=eligible)
    if sizes:
        options: dict[str, float] = dict(zip(("num_forget", "num_retain"), sizes, strict=True))
        return SELECTORS["count"](forget_N, retain_N, ids, **options)
    options = {
        "forget_threshold": settings.forget_threshold,
        "retain_threshold": settings.retain_threshold,
    }
    if settings.select == "margin":
        options |= {"z": settings.margin_z, "sigma": sigma}
    return SELECTORS[settings.select](forget_N, retain_N, ids, **options)
