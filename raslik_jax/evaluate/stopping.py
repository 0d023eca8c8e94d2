"""The end of unlearning: the results of probes, the kept step, and the reason for the end.

Pure functions. A level is the mean over a set's rows of their nats a token. Two sets have to be
forgotten: "forget" (trained rows) and "behavior" (answers that show it and that no step sees).
`verdict.Goal` counts their rows that are gone. "kept" are rows that no step sees and that have to
stay likely. "retain" are trained rows, for information. The level of "kept" changes by
`middle_mean`, because a few unlabeled rows may show the behavior and then become less likely.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from raslik_jax.evaluate import verdict

SETS = ("forget", "behavior", "retain", "kept")
FORGOTTEN = ("forget", "behavior")
# Probes in a row that have to find enough gone, or others beyond the bound: one may be chance.
_PATIENCE = 2
# So many probes have to bring another row that is gone, or this share of the way to the base model.
_NEWEST, _LEAST_WAY = 8, 0.05

Levels = Mapping[str, float]
DONE: Literal["forgotten"] = "forgotten"
End = Literal["", "forgotten", "others lose too much", "no progress", "diverged"]
# The words for an end. The verdict is for a model and not for its training.
SAID: dict[End, str] = {
    "forgotten": "enough is gone",
    "others lose too much": "the loss of other rows rose too far",
    "no progress": f"in {_NEWEST} probes no further row was gone and the others hardly moved",
    "diverged": "the training diverged",
    "": "its epochs ended",
}


class Probe(TypedDict):
    """The results of a probe after a step: levels, progress of the sets to forget, and answers.

    The keys of the answers are the ids of the prompts.
    """

    step: int
    levels: dict[str, float]
    gone: dict[str, verdict.Progress]
    answers: dict[str, str]


def middle_mean(change_N: Sequence[float]) -> float:
    """Returns the mean of the middle half of numbers, or of all if there are fewer than four."""
    ranked, outer = sorted(change_N), len(change_N) // 4
    middle = ranked[outer : len(ranked) - outer]
    return math.fsum(middle) / len(middle)


def rise_of(levels: Levels, start: Levels) -> float:
    """Returns the rise of the loss of the rows to keep; of the retained rows if there are none."""
    name = "kept" if "kept" in start else "retain"
    return levels[name] - start[name] if name in start else 0.0


def choose_step(probes: Sequence[Probe], *, max_rise: float) -> int:
    """Returns the place of the probe to keep: the best one within the bound.

    A probe at which enough is gone is better than any other. Otherwise the progress of the slowest
    set decides. The first probe is that of the model before unlearning. The earlier one of equal
    probes is kept. An older probe is never chosen later, so one stored model is enough.
    """
    start = probes[0]["levels"]

    def how_far(n: int) -> tuple[bool, float, int]:
        found = probes[n]["gone"]
        return verdict.is_enough(found), _slowest(found), -n

    within = [n for n, probe in enumerate(probes) if rise_of(probe["levels"], start) <= max_rise]
    return max(within, key=how_far)


def find_end(probes: Sequence[Probe], *, max_rise: float) -> End:
    """Returns why unlearning ends at the last of the probes; "" if it continues."""
    start, newest = probes[0]["levels"], probes[-_PATIENCE:]
    is_beyond = [rise_of(probe["levels"], start) > max_rise for probe in newest]
    if all(verdict.is_enough(probe["gone"]) for probe in newest) and not any(is_beyond):
        return DONE
    if all(is_beyond):
        return "others lose too much"
    if len(probes) <= _NEWEST:
        return ""
    now, then = (
        part[choose_step(part, max_rise=max_rise)]["gone"] for part in (probes, probes[:-_NEWEST])
    )
    more_rows = sum(one["gone"] for one in now.values()) > sum(one["gone"] for one in then.values())
    is_further = more_rows or _slowest(now) >= _slowest(then) + _LEAST_WAY
    return "" if is_further else "no progress"


def _slowest(progress: Mapping[str, verdict.Progress]) -> float:
    """Returns the way of the set that went the least."""
    return min(one["way"] for one in progress.values())
