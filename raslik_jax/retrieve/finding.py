"""A trace that finds no row: why."""

import numpy as np
from jaxtyping import Float

from raslik_jax.retrieve import chance
from raslik_jax.retrieve.selectors import FEWEST_IN_TWO, Cut

# The q that one row of the cut has to reach, where likelihoods show that fine-tuning taught the
# answer; else `chance.LEVEL`.
TAUGHT_LEVEL = 0.25


def why_none(
    cut: Cut,
    score_N: Float[np.ndarray, " N"],
    q_N: Float[np.ndarray, " N"] | None,
    *,
    is_taught: bool,
    refuted: str,
) -> str:
    """Returns why the rows of a cut did not teach the answer; "" if they may have.

    They may have taught it if one of the rows has a small q and likelihoods do not refute it. An
    unknown q does not count against a row.

    Args:
      score_N, q_N: values of every row; q is None if the scores were compared with no prompts.
      is_taught, refuted: fields of `evaluate.taught.Taught`, the evidence of the likelihoods.
    """
    if refuted:
        return f"nothing in the training file taught the answer: {refuted}"
    more = ""
    if is_taught:
        more = (
            ". Fine-tuning made the answer likelier, perhaps by rows of another file or by most "
            "rows of this one: trace several answers of one kind (docs/guides/own_model.md)"
        )
    if not cut.num_forget:
        if len(score_N) < FEWEST_IN_TWO:
            more += (
                f". Of fewer than {FEWEST_IN_TWO} rows only a distant group stands out: give "
                "--retrieve.num_forget to take the rows of the highest scores"
            )
        highest = f"the highest score is {score_N.max():.3g}"
        return f"no row stands out: {highest}, unrelated rows reach {min(cut.edge, 1):.3g}{more}"
    level = TAUGHT_LEVEL if is_taught else chance.LEVEL
    best = np.argsort(-score_N, kind="stable")[: cut.num_forget]
    if q_N is not None and not np.isnan(q_N[best]).all():
        if (lowest := float(np.nanmin(q_N[best]))) > level:
            rows = f"{cut.num_forget:,} row{'s' if cut.num_forget > 1 else ''}"
            return (
                "no row is nearer to the answer than unrelated rows are by chance: the lowest q "
                f"of {rows} at the top is {lowest:.3g}, and at most {level:g} is needed{more}"
            )
    return ""
