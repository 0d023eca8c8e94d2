"""The page's sentences about the traced answers, from the results of the models."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raslik_jax.evaluate import stopping, verdict
from raslik_jax.evaluate.taught import doubt
from raslik_jax.report import notes
from raslik_jax.run.artifacts import TracedAnswer

# The results for each traced answer by model: "before" and "now", and "base" if there is one.
Told = Mapping[str, Sequence[TracedAnswer]]


def gone_sentence(told: Told) -> str:
    """Returns the mean likelihood of the traced answers before and now, and how many are gone.

    They are gone by the rule that ends unlearning (`verdict.Goal`). It is "" without a model after
    unlearning.
    """
    if "now" not in told:
        return ""
    levels = {model: float(np.mean([row.nll for row in rows])) for model, rows in told.items()}
    found = _progress(told) if "base" in told else None
    text: str = notes.macros().gone(levels, found, len(told["before"]))
    return text


def ending_sentence(found: Mapping[str, Any]) -> str:
    """Returns a sentence if unlearning ended before enough was gone, with the reason; otherwise "".

    It also covers the case that no probe ended it, without --unlearn.probe.stop. `found` is the
    content of `artifacts.probes`.
    """
    if found.get("end", stopping.DONE) == stopping.DONE:
        return ""
    gone = next(probe["gone"] for probe in found["probes"] if probe["step"] == found["kept"])
    if verdict.is_enough(gone):  # and no second probe in a row
        return ""
    return (
        f"Not forgotten: unlearning ended because {stopping.SAID[found['end']]}. The model after "
        f"step {found['kept']} is kept ({verdict.describe_progress(gone)}). Expect the behavior "
        "in the same or in other words."
    )


def doubt_sentence(told: Told) -> str:
    """Returns a warning with numbers if a traced answer is weak evidence; otherwise ""."""
    bases: list[float | None] = [row.nll for row in told.get("base", ())]
    bases = bases or [None] * len(told["before"])
    for number, (row, base) in enumerate(zip(told["before"], bases, strict=True), start=1):
        if why := doubt(row.nll, base, row.drawn):
            which = "the traced answer" if len(bases) == 1 else f"traced answer {number}"
            under_base = "" if base is None else f", {base:.2f} under the base"
            level = f"{row.nll:.2f} nats a token under the model{under_base}"
            return f"Doubt about {which} ({level}): {why}."
    return ""


def _progress(told: Told) -> verdict.Progress:
    """Returns how many traced answers are gone, without those that are as likely under the base.

    Without the nats of its tokens an answer counts as one token.
    """
    found = []
    for rows in zip(*(told[model] for model in ("before", "base", "now")), strict=True):
        before, base, now = (np.array([row.nats or (row.nll,)], float) for row in rows)
        goal = verdict.make_goal(before, base, np.array([before.shape[1]]), forget_rise=1.0)
        if goal.is_natural:
            found.append(goal.progress(now))
    return verdict.Progress(
        way=sum(one["way"] for one in found) / max(len(found), 1),
        gone=sum(one["gone"] for one in found),
        of=len(found),
    )
