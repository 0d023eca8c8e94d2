"""The models' results for the traced answers and the page's sentences about them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.evaluate import stopping, verdict
from raslik_jax.evaluate.taught import doubt
from raslik_jax.report import notes


class Said(NamedTuple):
    """A model's answer to a traced prompt and its nats of the traced answer.

    `nll` is the mean over all tokens. `nats` has one value per token, without the ends. `drawn` has
    mean and spread of the nats of the model's own draws (`likelihood.Expected`). They are None or
    empty if unknown.
    """

    model: str
    text: str
    nll: float | None
    nats: tuple[float, ...] = ()
    drawn: tuple[float, float] | None = None


class Traced(NamedTuple):
    """A traced answer: prompt, answer, and the models' results: before, base and after."""

    asked: str
    answer: str
    said: tuple[Said, ...]


def gone_sentence(traced: Sequence[Traced]) -> str:
    """Returns the mean likelihood of the traced answers before and now, and how many are gone.

    They are gone by the rule that ends unlearning (`verdict.Goal`). It is "" without a model after
    unlearning.
    """
    levels: dict[str, float] = {}
    for model in ("before", "base", "now"):
        known = [nll for one in traced if (nll := _told(one, model)) is not None]
        if known and len(known) == len(traced):
            levels[model] = sum(known) / len(known)
    if not {"before", "now"} <= levels.keys():
        return ""
    found = _progress(traced) if "base" in levels else None
    text: str = notes.macros().gone(levels, found, len(traced))
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


def doubt_sentence(traced: Sequence[Traced]) -> str:
    """Returns a warning with numbers if a traced answer is weak evidence; otherwise ""."""
    for number, one in enumerate(traced, start=1):
        nll, base = _told(one, "before"), _told(one, "base")
        drawn = next((said.drawn for said in one.said if said.model == "before"), None)
        if nll is not None and (why := doubt(nll, base, drawn)):
            which = "the traced answer" if len(traced) == 1 else f"traced answer {number}"
            under_base = "" if base is None else f", {base:.2f} under the base"
            return (
                f"Doubt about {which} ({nll:.2f} nats a token under the model{under_base}): {why}."
            )
    return ""


def _told(traced: Traced, model: str) -> float | None:
    return next((said.nll for said in traced.said if said.model == model), None)


def _progress(traced: Sequence[Traced]) -> verdict.Progress:
    """Returns how many traced answers are gone, without those that are as likely under the base.

    Without the nats of its tokens an answer counts as one token.
    """
    goals, nows = [], []
    for one in traced:
        nats = {said.model: np.array([said.nats or (said.nll,)], float) for said in one.said}
        number = np.array([nats["before"].shape[1]])
        goal = verdict.make_goal(nats["before"], nats["base"], number, forget_rise=1.0)
        if goal.is_natural:
            goals.append(goal)
            nows.append(nats["now"])
    found = [goal.progress(now_NT) for goal, now_NT in zip(goals, nows, strict=True)]
    return verdict.Progress(
        way=sum(one["way"] for one in found) / max(len(found), 1),
        gone=sum(one["gone"] for one in found),
        of=len(found),
    )
