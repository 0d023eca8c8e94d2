"""When unlearning has done enough: what probes found, which step is kept, and why it ends there.

Pure functions of likelihoods. A level is the mean over a set's rows of their nats a token. Two sets
are to be forgotten: "forget", rows that are trained on, and "behavior", answers that show it and
that no step sees. In these two a token counts at most what the backbone gives it: one that is
broken, far less likely than any model has it, does not make up for others that are as likely as
before. "kept" are rows that no step sees and that have to stay likely; "retain" are rows that are
trained on, for information. The level of "kept" moves by `middle_mean` of its rows' changes: where
nobody labels rows, a few of them may show the behavior and have to lose.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.evaluate.judgment import LEAST_LEARNED

SETS = ("forget", "behavior", "retain", "kept")
FORGOTTEN = ("forget", "behavior")
# The share of the way at which it ends; measured in docs/studies/own_model.md.
ENOUGH = 0.4
# Probes in a row that have to find all forgotten, or others beyond the bound: one may be chance.
_PATIENCE = 2
RULE_TEXT = (
    "Forgotten: the rows to forget, and the answers that show the behavior, have gone "
    f"{ENOUGH:.0%} of the way from their likelihood before unlearning to that under the "
    "backbone, a token counting up to its own nats under the backbone; where the backbone finds "
    "them as likely, they have to lose forget_rise nats a token. A probe is within the bound if "
    "the rows to keep lost at most max_rise nats a token, in the mean of the middle half of them. "
    "Unlearning ends at the second probe in a row within the bound at which all is forgotten, at "
    "the second in a row beyond it, or where the training diverges; the step is kept that went "
    "furthest within the bound."
)

Levels = Mapping[str, float]
DONE: Literal["forgotten"] = "forgotten"
End = Literal["", "forgotten", "others lose too much", "diverged"]


class Probe(TypedDict):
    """What a probe found after a step: the level of each set, and answers by the prompt's id."""

    step: int
    levels: dict[str, float]
    answers: dict[str, str]


def middle_mean(change_N: Sequence[float]) -> float:
    """Returns the mean of the middle half of numbers; of less than four, of all."""
    ranked, outer = sorted(change_N), len(change_N) // 4
    middle = ranked[outer : len(ranked) - outer]
    return math.fsum(middle) / len(middle)


def mean_nats(
    nll_NT: Float[np.ndarray, "N T"],
    num_targets_N: Int[np.ndarray, " N"],
    *,
    most_NT: Float[np.ndarray, "N T"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Returns each row's mean nats a token, of zeros after its last one; each of them `most`."""
    counted_NT = nll_NT if most_NT is None else np.minimum(nll_NT, most_NT)
    return counted_NT.sum(axis=1) / num_targets_N


class Goal(NamedTuple):
    """Where a set was before unlearning, and where it counts as forgotten."""

    start: float
    end: float

    def share(self, level: float) -> float:
        """Returns how much of the way is done, from 0 to 1; beyond the end is not better."""
        return min(max((level - self.start) / (self.end - self.start), 0.0), 1.0)


def find_goals(
    start: Levels, backbone: Levels, *, forget_rise: float, counted: Levels | None = None
) -> tuple[dict[str, Goal], bool]:
    """Returns the goals of the sets to forget, and whether the backbone gives them.

    The way to a goal of the backbone begins at `counted`, the start with each token counted up to
    what the backbone gives it; without it, at the start.

    A set that the backbone finds hardly less likely (`judgment.LEAST_LEARNED`) says nothing of what
    was learned. Where all are so, because the backbone is the model itself (a merged checkpoint) or
    shows the behavior too, there is no natural end, and each set has to lose `forget_rise`.
    """
    sets = [name for name in FORGOTTEN if name in start]
    learned = [name for name in sets if backbone[name] - start[name] >= math.log(LEAST_LEARNED)]
    if learned:
        begun = start if counted is None else counted
        return {name: Goal(begun[name], backbone[name]) for name in learned}, True
    whole = forget_rise / ENOUGH  # of which ENOUGH is enough
    return {name: Goal(start[name], start[name] + whole) for name in sets}, False


def share_forgotten(levels: Levels, goals: Mapping[str, Goal]) -> float:
    """Returns the share of the way to the goals, of the set that is furthest from its own."""
    return min(goal.share(levels[name]) for name, goal in goals.items())


def percent(share: float) -> str:
    """Returns a share in whole percent, rounded down: less than `ENOUGH` never reads as enough."""
    return f"{math.floor(100 * share + 1e-9)}%"


def rise_of(levels: Levels, start: Levels) -> float:
    """Returns the nats a token that the rows to keep lost; retained ones where there are none."""
    name = "kept" if "kept" in start else "retain"
    return levels[name] - start[name] if name in start else 0.0


def choose_step(probes: Sequence[Probe], goals: Mapping[str, Goal], *, max_rise: float) -> int:
    """Returns the place of the probe to keep: the most forgotten one within the bound.

    The first of the probes is of the model before unlearning, which is within it. Ties go to the
    earlier probe: an older one is never chosen again later, so one stored model is enough.
    """
    start = probes[0]["levels"]
    within = [n for n, probe in enumerate(probes) if rise_of(probe["levels"], start) <= max_rise]
    return max(within, key=lambda n: (share_forgotten(probes[n]["levels"], goals), -n))


def find_end(probes: Sequence[Probe], goals: Mapping[str, Goal], *, max_rise: float) -> End:
    """Returns why unlearning ends at the last of the probes; "" where it goes on."""
    start, newest = probes[0]["levels"], [probe["levels"] for probe in probes[-_PATIENCE:]]
    is_beyond = [rise_of(levels, start) > max_rise for levels in newest]
    is_enough = [share_forgotten(levels, goals) >= ENOUGH for levels in newest]
    if all(is_enough) and not any(is_beyond):
        return DONE
    return "others lose too much" if all(is_beyond) else ""
