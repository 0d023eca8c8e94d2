"""The behaviors of several queries, separated by their gradients. NumPy on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.index.combine import check_agreement

# Groups of queries whose mean cosine is below this are two behaviors (docs/notes/retrieve.md).
LEAST_ALIKE = 0.05
# Queries of a behavior that are named.
_NAMED = 12


class Behaviors(NamedTuple):
    """Queries by behavior as positions, and the largest mean cosine between two behaviors.

    `between` is 1 if there is one behavior.
    """

    groups: tuple[tuple[int, ...], ...]
    between: float


def split_queries(gram_QQ: Float[np.ndarray, "Q Q"], ids: Sequence[str]) -> Behaviors:
    """Returns the behaviors of queries from the (centered) cosines between them.

    Average linkage: the two groups with the largest mean cosine are joined while this cosine is at
    least `LEAST_ALIKE`. The queries of each behavior agree by the rule of `check_agreement`.
    Behaviors are in the order of their first queries.
    """
    count = len(gram_QQ)
    label_Q = np.zeros(count, int)
    if count > 1:
        from scipy.cluster import hierarchy  # takes a second to load
        from scipy.spatial.distance import squareform

        # Cosines of sketches can be a little above 1; a distance cannot be negative.
        distance_QQ = np.maximum(1 - (gram_QQ + gram_QQ.T) / 2, 0)
        np.fill_diagonal(distance_QQ, 0)
        tree = hierarchy.linkage(squareform(distance_QQ, checks=False), "average")
        label_Q = hierarchy.fcluster(tree, 1 - LEAST_ALIKE, "distance")
    members = [tuple(np.flatnonzero(label_Q == label).tolist()) for label in {*label_Q.tolist()}]
    groups = tuple(sorted(members))
    for group in groups:
        check_agreement(gram_QQ[np.ix_(group, group)], [ids[n] for n in group])
    pairs = [(a, b) for n, a in enumerate(groups) for b in groups[:n]]
    between = max((float(gram_QQ[np.ix_(a, b)].mean()) for a, b in pairs), default=1.0)
    return Behaviors(groups, between)


def sentence(found: Behaviors) -> str:
    """Returns a sentence on the queries of each behavior, counted from 1; "" for one behavior."""
    if len(found.groups) < 2:
        return ""
    total = sum(map(len, found.groups))
    named = "; ".join(f"behavior {n}: {_named(g)}" for n, g in enumerate(found.groups, start=1))
    return (
        f"The {total} queries show {len(found.groups)} behaviors ({named}). The mean cosine "
        f"between two of them is at most {found.between:.2f}, and queries below {LEAST_ALIKE:g} "
        "count as different. Scores with all queries together mix the behaviors: trace one "
        "behavior at a time."
    )


def _named(group: Sequence[int]) -> str:
    text = ", ".join(str(n + 1) for n in group[:_NAMED])
    left = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
    return f"{'query' if len(group) == 1 else 'queries'} {text}{left}"
