"""What the models make of the traced answers, and what a page says of it: a function each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.evaluate import stopping
from raslik_jax.evaluate.judgment import LEAST_LEARNED

# Spreads above what answers that a model draws itself cost, from which it would hardly say one: of
# 288 drawn answers none is there (docs/notes/report.md).
HARDLY = 4.0
_WHY = {
    "others lose too much": "other rows lost too much",
    "diverged": "the training diverged",
    "": "its epochs were over",
}


class Said(NamedTuple):
    """What a model says to a traced prompt, and its nats of the traced answer.

    `nll` is their mean, `nats` each token's; `drawn` mean and spread of what answers that the model
    draws itself cost there. None and empty where they are not known.
    """

    model: str
    text: str
    nll: float | None
    nats: tuple[float, ...] = ()
    drawn: tuple[float, float] | None = None


class Traced(NamedTuple):
    """A traced answer: prompt, answer, and what the models make of it: before, base and after."""

    asked: str
    answer: str
    said: tuple[Said, ...]


def forgotten_sentence(traced: Sequence[Traced], *, is_all: bool = True) -> str:
    """Returns how likely the traced answers were and are, in the mean, and what the rule says.

    Forgotten: far enough on the way from the likelihood before unlearning to that under the base,
    by the rule that ends unlearning (`stopping.ENOUGH`). Without `is_all` the rule found other
    answers or rows that are not, and these alone do not count. "" without a model after unlearning.
    """
    levels: dict[str, float] = {}
    for model in ("before", "base", "now"):
        known = [nll for one in traced if (nll := _told(one, model)) is not None]
        if known and len(known) == len(traced):
            levels[model] = sum(known) / len(known)
    if not {"before", "now"} <= levels.keys():
        return ""
    many = len(traced) > 1
    before, now = (f"{levels[name]:.2f}" for name in ("before", "now"))
    subject = f"the {len(traced)} answers" if many else "the answer"
    text = f"{subject[:1].upper()}{subject[1:]} cost the model {before} nats a token before "
    text += f"unlearning, {now} after"
    if "base" not in levels:
        return f"{text}; what it was before fine-tuning is not known."
    way, base = levels["base"] - levels["before"], levels["base"]
    if way < math.log(LEAST_LEARNED):
        return f"{text}; the base finds {'them' if many else 'it'} about as likely ({base:.2f})."
    share, they = _way_to_base(traced), "they" if many else "it"
    went = f"{they} went {stopping.percent(share)} of the way to the base ({base:.2f})"
    if share >= stopping.ENOUGH and not is_all:
        return f"{text}: {went}, which alone is not enough."
    if share >= stopping.ENOUGH:
        return f"{text}: {went}, and {stopping.ENOUGH:.0%} counts as forgotten."
    return f"{text}: {went}, which is not forgotten, as that takes {stopping.ENOUGH:.0%}."


def ending_sentence(probes: Sequence[Mapping[str, Any]], strategy: str, algorithm: str) -> str:
    """Returns that unlearning ended before all was forgotten, and why; "" where it did not.

    Also where no probe ended it: without --unlearn.probe.stop nothing was to end it in time. The
    probes are those of `Metrics`.
    """
    for one in probes:
        is_it = (one["strategy"], one["algorithm"]) == (strategy, algorithm)
        if not is_it or one.get("end", stopping.DONE) == stopping.DONE:
            continue
        goals = {name: stopping.Goal(**goal) for name, goal in one["goals"].items()}
        kept = next(probe for probe in one["probes"] if probe["step"] == one["kept"])
        share = stopping.share_forgotten(kept["levels"], goals)
        if share >= stopping.ENOUGH:  # and no second probe in a row
            continue
        went = f"{stopping.percent(share)} of the way to the base where {stopping.ENOUGH:.0%} is "
        went += "enough"
        if any(goal.end != one["backbone"][name] for name, goal in goals.items()):
            # The base says nothing of where to end: each set has to lose as much.
            way = max(goal.end - goal.start for goal in goals.values())
            went = f"{share * way:.2f} nats a token less likely where {stopping.ENOUGH * way:.2f} "
            went += "are enough"
        return (
            f"Not forgotten: unlearning ended because {_WHY[one['end']]}, and the model after "
            f"step {one['kept']} is kept, {went}. Expect the behavior in the same or in other "
            "words."
        )
    return ""


def doubt(nll: float, base: float | None, drawn: tuple[float, float] | None = None) -> str:
    """Returns why a traced answer is no good evidence, "" where it is.

    From its nats a token under the model and the base: the model would hardly say it (`HARDLY`
    spreads above the mean of what it draws itself), or fine-tuning made it no likelier by the
    factor of the judgment (1.1 a token).
    """
    if drawn and nll > drawn[0] + HARDLY * drawn[1]:
        own = f"answers that it draws itself cost {drawn[0]:.2f} +- {drawn[1]:.2f} there"
        return f"it would hardly say so, {own} (check prompt, template, adapter)"
    if base is not None and base - nll < math.log(LEAST_LEARNED):
        return "the base says it as readily: fine-tuning need not have taught it"
    return ""


def doubt_sentence(traced: Sequence[Traced]) -> str:
    """Returns a warning where a traced answer is no good evidence, with its numbers; else ""."""
    for number, one in enumerate(traced, start=1):
        nll, base = _told(one, "before"), _told(one, "base")
        drawn = next((said.drawn for said in one.said if said.model == "before"), None)
        if nll is not None and (why := doubt(nll, base, drawn)):
            which = "the traced answer" if len(traced) == 1 else f"traced answer {number}"
            under_base = "" if base is None else f", {base:.2f} under the base"
            return f"Of {which} ({nll:.2f} nats a token under the model{under_base}): {why}."
    return ""


def _told(traced: Traced, model: str) -> float | None:
    return next((said.nll for said in traced.said if said.model == model), None)


def _way_to_base(traced: Sequence[Traced]) -> float:
    """Returns the share of the way to the base that unlearning went, as its probes count it.

    A token counts up to its nats under the base, so that one that is broken does not make up for
    others that are as likely as before; see `evaluate.stopping`.
    """
    nats = {
        m: [np.array(s.nats) for one in traced for s in one.said if s.model == m]
        for m in ("before", "base", "now")
    }

    def level(model: str) -> float:
        pairs = zip(nats[model], nats["base"], strict=True)
        return float(np.mean([np.minimum(own, most).mean() for own, most in pairs]))

    return stopping.Goal(level("before"), level("base")).share(level("now"))
