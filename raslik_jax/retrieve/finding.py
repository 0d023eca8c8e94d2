"""A trace that finds no row: why, and where a run keeps it.

A unit that leaves a finding ends its run: what comes after it has nothing to work on.
"""

import pathlib

import numpy as np
from jaxtyping import Float

from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.manifests import current_file
from raslik_jax.retrieve import chance
from raslik_jax.retrieve.selectors import Cut

# In the folder of the unit that ends the run.
FINDING = "finding.json"
# Units that may end a run.
_UNITS = ("retrieve/traced", "retrieve/sizes")
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
    """Returns why the rows of a cut are no find; "" where they are one.

    They are one unless likelihoods refute it, and where one of the rows has a small q. A q that is
    not known does not count.

    Args:
      score_N, q_N: of every row; None for q where scores were compared with no prompts.
      is_taught, refuted: of `report.traced.Taught`: what likelihoods say of fine-tuning.
    """
    if refuted:
        return f"nothing in the training file taught the answer: {refuted}"
    more = ""
    if is_taught:
        more = (
            "; fine-tuning made the answer likelier, which rows of another file or most rows of "
            "this one may have done: several answers of one kind tell more "
            "(docs/guides/own_model.md)"
        )
    if not cut.num_forget:
        highest = f"the highest score is {score_N.max():.3g}"
        return f"no row stands out: {highest}, unrelated rows reach {cut.edge:.3g}{more}"
    level = TAUGHT_LEVEL if is_taught else chance.LEVEL
    best = np.argsort(-score_N, kind="stable")[: cut.num_forget]
    if q_N is not None and not np.isnan(q_N[best]).all():
        if (lowest := float(np.nanmin(q_N[best]))) > level:
            rows = f"{cut.num_forget:,} row{'s' if cut.num_forget > 1 else ''}"
            return (
                f"no row is nearer to the answer than unrelated rows are by chance: of {rows} at "
                f"the top of the scores the lowest q is {lowest:.2g}, and {level:g} is needed{more}"
            )
    return ""


def write_finding(folder: pathlib.Path, text: str) -> None:
    """Writes a finding into the folder of a unit, which ends the run."""
    write_json(folder / FINDING, {"finding": text})


def finding_of(folder: pathlib.Path) -> str:
    """Returns the finding of a unit; "" where it has none."""
    path = folder / FINDING
    return str(read_json(path, {"finding": str})["finding"]) if path.is_file() else ""


def read_finding(root: pathlib.Path) -> str:
    """Returns the finding that a run ended with; "" where it went on."""
    paths = (current_file(root, f"{name}/{FINDING}") for name in _UNITS)
    return next((finding_of(path.parent) for path in paths if path), "")
