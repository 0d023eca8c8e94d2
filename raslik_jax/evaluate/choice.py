"""Reads the file of --unlearn.choice: a learning rate and an epoch for each method."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from raslik_jax.base.files import check_shape
from raslik_jax.base.messages import shown
from raslik_jax.data.words import refused

_SHAPE = {"strategy": str, "algorithm": str, "learning_rate": float, "epoch": int}


class Choice(NamedTuple):
    """The point at which one strategy is measured under one algorithm. Epochs count from 1."""

    learning_rate: float
    epoch: int


def from_json(value: Mapping[str, Any], *, origin: str) -> dict[tuple[str, str], Choice]:
    """Returns the choices by (strategy, algorithm) of a file, whose name is `origin`."""
    check_shape(value, {"choices": [_SHAPE]}, origin)
    choices: dict[tuple[str, str], Choice] = {}
    for entry in value["choices"]:
        method = entry["strategy"], entry["algorithm"]
        found, name = Choice(entry["learning_rate"], entry["epoch"]), shown(" with ".join(method))
        if not 0 < found.learning_rate < math.inf or found.epoch < 1:
            raise refused("choice_range", name=name, origin=origin, **found._asdict())
        if method in choices:
            raise ValueError(f"{name} must have one choice in {origin}: make the file again")
        choices[method] = found
    return choices
