"""What a small step away from rows does to the traced answers, and how it is told.

The first group is of the rows to forget; the others are draws of as many other rows. NumPy, on the
host.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from raslik_jax.files import read_json
from raslik_jax.manifests import current_file

# Nats a token, one in a hundred in likelihood, below which a change says nothing.
LEAST_CHANGE = 0.01


class Removal(NamedTuple):
    """What a step away from some rows does, in nats a token of the traced answers.

    `predicted` is the change to first order, by the gradients, `measured` that of the moved model.
    `score` is the mean score of the rows; None where the run has none.
    """

    rows: int
    score: float | None
    predicted: float
    measured: float


_SHAPE = {"rows": int, "score": (float, None), "predicted": float, "measured": float}


def read_removal(root: pathlib.Path, strategy: str) -> list[Removal]:
    """Returns what a run found of a strategy's rows to forget, the first, and of other rows."""
    path = current_file(root, f"retrieve/removal-{strategy}/removal.json")
    return [Removal(**row) for row in read_json(path, [_SHAPE])] if path else []


def helps(found: Sequence[Removal]) -> bool:
    """Says whether removing the rows to forget would help, by the step away from them.

    It does where the answers become less likely by `LEAST_CHANGE` or more, and less likely than
    after the same step away from any of the other draws: of three, chance alone would do so one
    time in four.
    """
    first, *others = found
    most = max((other.measured for other in others), default=0.0)
    return first.measured >= LEAST_CHANGE and first.measured > most


def removal_sentence(found: Sequence[Removal], named: str = "rows to forget") -> str:
    """Returns what a small step away from the first rows does to the traced answers.

    "" where none was taken, or there are no other rows to compare with.
    """
    if len(found) < 2:
        return ""
    first, *others = found
    text = f"One small step away from {first.rows:,} of the {named} makes the traced answers "
    text += f"{_change(first.measured)} ({first.predicted:+.3f} by the gradients alone"
    text += "" if first.score is None else f", mean score {first.score:.3f}"
    low, high = (pick(other.measured for other in others) for pick in (min, max))
    text += f"); the same step away from as many other rows, drawn {len(others)} times, changes "
    text += f"them by {low:+.3f} to {high:+.3f}. "
    return text + (
        "Removing them should help."
        if helps(found)
        else "That does not show that removing them would help."
    )


def _change(nats: float) -> str:
    return f"{abs(nats):.3f} nats a token {'less' if nats > 0 else 'more'} likely"
