"""The forget-retain frontier: a pure function on the host.

A method is a point (R, F): retain rate up, forget rate down.
"""

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.data.words import refused

Flags = Bool[np.ndarray, " M"]


def pareto_mask(
    retain_M: Float[np.ndarray, " methods"],
    forget_M: Float[np.ndarray, " others"],
    is_eligible_M: Flags | bool = True,
) -> Flags:
    """Returns which eligible methods no other eligible method dominates.

    The textbook rule: one method dominates another if its R is not lower, its F is not higher, and
    one of the two is better. The paper's sentence asks for both to be better. On its own tables the
    two rules differ only for ties of rates after rounding.

    Raises:
      ValueError: rates that are not finite or not paired.
    """
    bad = int((~np.isfinite(retain_M)).sum() + (~np.isfinite(forget_M)).sum())
    if len(retain_M) != len(forget_M) or not len(retain_M) or bad:
        raise refused("rates_paired", retain=len(retain_M), forget=len(forget_M), bad=bad)
    # How much better the method of the column is than that of the row.
    retain_gain_MM, forget_drop_MM = retain_M - retain_M[:, None], forget_M[:, None] - forget_M
    not_worse_MM = (retain_gain_MM >= 0) & (forget_drop_MM >= 0)
    better_MM = (retain_gain_MM > 0) | (forget_drop_MM > 0)
    return np.asarray(is_eligible_M & ~np.any(not_worse_MM & better_MM & is_eligible_M, axis=1))
