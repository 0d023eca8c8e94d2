"""Does a recipe reproduce an adapter: two trainings compared, and the bound for both.

The recipe is confirmed if the losses differ by at most `BOUND` of the loss that the training
removed. Two trainings by the same recipe draw other weights and another order of the rows, so most
answers have other words. The answers only have to be closer to those of the adapter than the base's
answers are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.data.words import refused
from raslik_jax.evaluate import rates
from raslik_jax.evaluate.sentences import write

# Largest difference of two losses, as a share of what the training gained.
BOUND = 0.1
# Windows of a logged curve that say anything.
_LEAST = 2
# A number of steps is a multiple of another one if it is so near, as a share.
_NEAR = 0.05


class Loss(NamedTuple):
    """Losses in nats a token: of the given adapter, of the new adapter, and at the start.

    Attributes:
      end: loss at the end of the training, if it is not `given`.
    """

    given: float
    own: float
    start: float
    end: float | None = None

    @property
    def off(self) -> float:
        """How far the new loss is above the given one, over the loss that training removed."""
        gained = self.start - (self.given if self.end is None else self.end)
        return (self.own - self.given) / gained if gained > 0 else float("inf")


class Answers(NamedTuple):
    """Answers to a number of prompts: equal ones, and ROUGE-L to the given adapter's answers.

    `base` is the ROUGE-L of the model without an adapter.
    """

    prompts: int
    equal: int
    own: float
    base: float


def compare_curves(log: Sequence[Any], losses: Sequence[float]) -> Loss | None:
    """Returns the mean loss of a trainer's log and of our steps, over the steps that both have.

    An entry of the log is the mean over the steps since the previous entry, as transformers writes
    it. The start is the first entry and the end is the lowest one. None if fewer than two entries
    can be compared.

    Args:
      log: `log_history` of trainer_state.json.
      losses: losses of our steps, from the first one on.
    """
    entries = [(0, 0.0)]
    for entry in log:
        if isinstance(entry, dict) and {"step", "loss"} <= {*entry}:
            entries.append((int(entry["step"]), float(entry["loss"])))
    given_S = np.repeat([loss for _, loss in entries[1:]], np.diff([step for step, _ in entries]))
    ends = [step for step, _ in entries[1:] if step <= len(losses)]
    if len(ends) < _LEAST:
        return None
    given, own = (float(np.mean(part[: ends[-1]])) for part in (given_S, losses))
    return Loss(given, own, start=float(given_S[0]), end=float(given_S.min()))


def compare_answers(given: Sequence[str], own: Sequence[str], base: Sequence[str]) -> Answers:
    """Returns how similar the answers of two adapters are, and those of the base."""
    alike = (
        float(np.mean([rates.likeness(*pair) for pair in zip(said, given, strict=True)]))
        for said in (own, base)
    )
    same = sum(a.strip() == b.strip() for a, b in zip(given, own, strict=True))
    return Answers(len(given), same, *alike)


def check_devices(
    recipe: Mapping[str, Any], num_rows: int, steps: int, epochs: float = 0.0
) -> tuple[str, ...]:
    """Refuses a batch without the number of devices, by the steps that the trainer took.

    Most trainers write the rows of one device. All devices took one step together. `epochs` are
    those that the trainer counted in these steps; 0: those of the recipe, unless steps end it. It
    returns a phrase if the steps differ by more than one an epoch and 1 %, as after packing.
    """
    size, planned = (recipe.get(name) or 0 for name in ("batch_size", "epochs"))
    epochs = epochs or (0 if recipe.get("steps") else planned)
    taken = math.ceil(num_rows / size) * epochs if size else 0
    devices = round(taken / steps)
    if devices > 1 and abs(taken / steps / devices - 1) < _NEAR:
        got = f"{num_rows:,} rows in batches of {size} take {taken:,.0f} steps"
        raise refused("recipe_devices", got=got, steps=steps, size=size * devices)
    if not taken or abs(taken - steps) <= max(1.0, epochs, 0.01 * taken):
        return ()
    by_rows = f"{taken:,.0f} by {num_rows:,} rows in batches of {size}"
    return (f"the number of steps is {by_rows}, {steps:,} in the trainer's state",)


def _parts(found: Mapping[str, Any]) -> tuple[Loss | None, Loss | None, Answers | None]:
    """Returns the losses on the rows, the curves and the answers of a stored check."""
    kinds = {"loss": Loss, "curve": Loss, "answers": Answers}
    loss, curve, answers = (
        kind(*found[name]) if found.get(name) else None for name, kind in kinds.items()
    )
    return loss, curve, answers


def is_confirmed(found: Mapping[str, Any]) -> bool:
    """Returns whether all comparisons confirm that the recipe reproduces the adapter."""
    loss, curve, answers = _parts(found)
    losses = [one for one in (loss, curve) if one]
    is_alike = answers is None or answers.own > answers.base or answers.equal == answers.prompts
    return bool(losses) and all(abs(one.off) <= BOUND for one in losses) and is_alike


def describe(found: Mapping[str, Any]) -> str:
    """Returns whether the recipe reproduces the adapter, by which numbers, and what to check."""
    parts = loss, curve, answers = _parts(found)
    offs = [one.off for one in (loss, curve) if one]
    off = next((share for share in offs if abs(share) > BOUND), 0.0)
    shares = [share for share in offs if math.isfinite(share)]
    confirmed = is_confirmed(found)
    return write("recipe", found, *parts, confirmed, off, shares, bound=BOUND, least=_LEAST)
