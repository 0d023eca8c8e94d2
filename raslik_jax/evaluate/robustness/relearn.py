"""Relearning: how soon a few steps on a few rows restore the forgotten behavior.

The rows are forgotten ones, or the same number of unrelated ones. Training on forgotten rows
teaches the behavior to any model. It shows that the behavior was only hidden if the model learns it
in fewer steps than the base. The base takes the same steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from raslik_jax.base.settings import Settings, setting
from raslik_jax.evaluate.robustness.record import (
    AS_IT_IS,
    READING_COLUMNS,
    Compared,
    Cost,
    Found,
    RobustnessMeasure,
)
from raslik_jax.evaluate.sentences import write
from raslik_jax.evaluate.verdict import HALF, likelihood_way

KINDS = ("forgotten", "unrelated")
# The share of the way to the base below which it is back: half of the share at which it is gone.
BACK = HALF / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelearnSettings(Settings):
    """How the model is trained again."""

    rows: int = setting(
        8,
        "Forgotten rows to train on. As many unrelated rows are trained on for comparison.",
        low=1,
    )
    steps: int = setting(16, "Steps. Each takes all of these rows.", low=1)
    learning_rate: float = setting(
        1e-3, "Constant learning rate of AdamW, for a fresh adapter.", above=0
    )


def points_of(steps: int) -> tuple[int, ...]:
    """Returns the steps after which the model is read: powers of two and the last."""
    powers = (1 << power for power in range(steps.bit_length()))
    return tuple(sorted({*powers, steps}))


def measure(bench: Any, model: Any, settings: RelearnSettings) -> list[dict[str, Any]]:
    """Returns a model's readings before and during the steps on rows of each kind."""
    found: list[dict[str, Any]] = [
        {"condition": AS_IT_IS, "kind": "", "step": 0, "rows": 0, **bench.read(model)}
    ]
    for kind in KINDS:
        rows, readings = bench.relearn(
            model,
            kind,
            rows=settings.rows,
            points=points_of(settings.steps),
            learning_rate=settings.learning_rate,
        )
        for step, reading in readings.items():
            name = f"{kind} rows, step {step}"
            found.append({"condition": name, "kind": kind, "step": step, "rows": rows, **reading})
    return found


def curve(found: Found, kind: str) -> dict[int, Mapping[str, Any]]:
    """Returns the readings by step on rows of a kind from step 0 on."""
    return {entry["step"]: entry for entry in found if entry["kind"] in ("", kind)}


def passed(found: Found, kind: str, level: float) -> float | None:
    """Returns the steps after which target answers have these nats a token; None if never.

    Between two readings the nats are interpolated.
    """
    points = [(step, one["nats"]) for step, one in sorted(curve(found, kind).items())]
    if points[0][1] <= level:
        return 0.0
    for (step, nats), (later, fewer) in itertools.pairwise(points):
        if fewer <= level:
            return step + (later - step) * (nats - level) / (nats - fewer)
    return None


def compare(now: Found, base: Found, level: float) -> str:
    """Returns which model comes back sooner to a level on forgotten rows, from equal nats.

    An unlearned model may begin closer to the level than the base. So both counts of steps begin at
    the same nats: the lower start of the two. The steps before are assumed not to matter. It is ""
    if the readings do not decide. A difference below one step does not count.
    """
    begin = min(curve(model, KINDS[0])[0]["nats"] for model in (now, base))
    first, lasts = KINDS[0], [max(curve(model, KINDS[0])) for model in (now, base)]
    starts = [passed(model, first, begin) for model in (now, base)]
    ends = [passed(model, first, level) for model in (now, base)]
    if begin <= level or None in starts:
        return ""
    # One that never comes back needs more steps than were left to it.
    own, other = (
        (last if end is None else end) - (start or 0.0)
        for start, end, last in zip(starts, ends, lasts, strict=True)
    )
    is_sooner = ends[0] is not None and own <= other - 1
    if not is_sooner and (ends[1] is None or own < other - 1):
        return ""
    return write("sooner", begin, level, (own, other), [end is None for end in ends], is_sooner)


def tell(compared: Compared) -> str:
    """Returns which answers come back and when, and whether sooner than the base learns them.

    An answer is back if its likelihood is again close to that before unlearning: within `BACK` of
    the difference to the base.
    """
    now, base = compared["now"], compared.get("backbone")
    before, level, sooner = compared["finetuned"][0]["nats"], None, ""
    if base and likelihood_way(now[0]["nats"], before, base[0]["nats"]) is not None:
        level = before - math.log1p(BACK * math.expm1(before - base[0]["nats"]))
        sooner = compare(now, base, level)
    curves = {kind: [one and curve(one, kind) for one in (now, base)] for kind in KINDS}
    return write("relearn", curves, level, BACK, sooner)


RELEARN = RobustnessMeasure(
    title="Relearning",
    measure=measure,
    tell=tell,
    columns=READING_COLUMNS,
    note="Every model gets a fresh adapter, the same rows and the same start. A rise that the "
    "base shows too is learning and not remembering. The two models are compared from the "
    "step at which both have the same nats a token. Nats between two steps are interpolated.",
    cost=lambda own: Cost(
        1 + len(KINDS) * len(points_of(own.steps)), steps=len(KINDS) * own.steps, rows=own.rows
    ),
    settings=RelearnSettings(),
)
