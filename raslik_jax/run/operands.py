"""Decides --backbone.operands: the given value, that of an existing run, or the faster one here."""

import json
import os
import pathlib
import sys

import jax

from raslik_jax.base import files, machine, settings
from raslik_jax.config import Config
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts, checking, cost

_PLAIN, _NARROW = "float32", "bfloat16"
# Smaller models spend little of their time in products.
_LEAST_WIDTH = 256
# Less would be within what measuring it again may give.
_LEAST_GAIN = 1.2
_KEPT = "operands.json"


def settled(config: Config, workdir: pathlib.Path) -> Config:
    """Returns the settings of a run with its operands, which all results of the model depend on.

    It prints a line if a new run gets bfloat16 by measurement.
    """
    found = processes.from_first(lambda: _settle(config, workdir))
    return settings.replaced(config, {"backbone.operands": found})


def _settle(config: Config, workdir: pathlib.Path) -> str:
    if config.backbone.operands != "auto":
        return config.backbone.operands
    if begun := _begun(workdir):
        return begun
    fastest = _fastest(config)
    if fastest == _NARROW and config.backbone.dtype == _PLAIN:
        print(
            "matrix products with the base take bfloat16 inputs and float32 sums, which is faster "
            f"on this machine (--backbone.operands={_PLAIN} turns it off)",
            file=sys.stderr,
        )
    return fastest


def _begun(workdir: pathlib.Path) -> str:
    """Returns the operands of a work directory's run; "" without a run."""
    try:
        recorded = artifacts.CONFIG.find(workdir) or {}
    except ValueError:  # of something else, which is refused later
        return ""
    begun = recorded.get("backbone", {}).get("operands", "")
    return "" if begun == "auto" else str(begun)


def _fastest(config: Config) -> str:
    """Returns the operands of a new run."""
    if config.backbone.dtype != _PLAIN:
        return config.backbone.dtype
    if config.unlearn.parameters == "all" or jax.default_backend() != "cpu":
        return _PLAIN
    try:
        shapes = checking.shapes_of(config).text_part
    except ValueError:  # the checkpoint is refused later
        return _PLAIN
    if shapes.hidden_size < _LEAST_WIDTH:
        return _PLAIN
    gain = measured_gain(shapes.hidden_size, shapes.intermediate_size)
    return _NARROW if gain > _LEAST_GAIN else _PLAIN


def measured_gain(inputs: int, outputs: int) -> float:
    """Returns the speedup of a product of this width by bfloat16 operands.

    It is measured once per kind of machine and stored in the folder of compiled programs.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    place = pathlib.Path(folder) / _KEPT if folder else None
    name = f"{machine.kind()} jax {jax.__version__} {inputs}x{outputs}"
    try:
        kept = json.loads(place.read_text(encoding="utf-8")) if place else {}
        if name in kept:
            return float(kept[name])
    except (OSError, ValueError, TypeError):  # none yet, or damaged
        kept = {}
    plain, narrow = (
        cost.measure_product(inputs=inputs, outputs=outputs, dtype=(_PLAIN, operands))
        for operands in (_PLAIN, _NARROW)
    )
    if place:
        files.write_json(place, {**kept, name: narrow / plain})
    return narrow / plain
