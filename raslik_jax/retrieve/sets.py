"""From scores to forget and retain sets, by the settings of a run."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.config import RetrieveConfig
from raslik_jax.data.examples import Example
from raslik_jax.index.combine import opposite
from raslik_jax.retrieve.selectors import Selection, select_by_count, select_by_threshold


def count_targets(rows: Sequence[Example], is_eligible_N: Bool[np.ndarray, " N"]) -> int:
    """Returns how many labeled targets can be in a set."""
    return sum(bool(row.is_target and ok) for row, ok in zip(rows, is_eligible_N, strict=True))


def set_sizes(
    settings: RetrieveConfig, *, num_targets: int, num_eligible: int
) -> tuple[int, int] | None:
    """Returns the sizes of both sets where the rule needs no scores for them, otherwise None.

    A num_forget of 0 stands for the labeled targets that can be chosen, a num_retain of 0 for
    num_forget; shares are of the examples that can be chosen.
    """
    if settings.select == "count":
        num_forget = settings.num_forget or num_targets
        if not num_forget:
            raise ValueError(
                "--retrieve.num_forget must be given where no training example is a labeled target"
            )
        return num_forget, settings.num_retain or num_forget
    if settings.select != "quantile":
        return None
    shares = {"forget": settings.forget_share, "retain": settings.retain_share}
    # The small addend turns .29 * 100 = 28.999999999999996 into 29.
    num_forget, num_retain = (int(share * num_eligible + 1e-9) for share in shares.values())
    for (name, share), count in zip(shares.items(), (num_forget, num_retain), strict=True):
        if not count:
            raise ValueError(
                f"--retrieve.{name}_share must be one example or more, got {share} of "
                f"{num_eligible} that can be chosen: raise it"
            )
    return num_forget, num_retain


def select_sets(
    score_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    settings: RetrieveConfig,
    *,
    num_targets: int,
    sigma: float = 0.0,
) -> Selection:
    """Returns the sets that the settings choose (--retrieve.select and the options of its rule).

    A score s_F of minus infinity bars an example from both; ties go by id. `sigma` is that of
    `noise.margin_sigma`, for the rule that needs it.
    """
    poles = score_N, opposite(score_N)
    eligible = int((score_N > -np.inf).sum())
    sizes = set_sizes(settings, num_targets=num_targets, num_eligible=eligible)
    if sizes:
        return select_by_count(*poles, ids, num_forget=sizes[0], num_retain=sizes[1])
    return select_by_threshold(
        *poles,
        ids,
        forget_threshold=settings.forget_threshold,
        retain_threshold=settings.retain_threshold,
        margin=settings.margin_z * sigma if settings.select == "margin" else 0.0,
    )
