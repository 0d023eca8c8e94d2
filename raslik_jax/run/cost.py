"""The rates of this machine's device, and --backbone.operands by them: the faster one here."""

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from raslik_jax.base import files, machine, settings
from raslik_jax.config import Config
from raslik_jax.evaluate.sentences import write
from raslik_jax.models import presets, products
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts, checking, memory
from raslik_jax.run.gpus import Device

_PLAIN, _NARROW = "float32", "bfloat16"
# Smaller models spend little of their time in products.
_LEAST_WIDTH = 256
# Less would be within what measuring it again may give.
_LEAST_GAIN = 1.2
_KEPT = "operands.json"


def measure(inputs: int, outputs: int, dtype: Any) -> Device:
    """Returns the default device; the product has a kernel of the model's width."""
    vector = jnp.ones(2**24 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    return Device(
        jax.devices()[0].device_kind,
        memory.device_bytes(),
        bytes_per_second=2.0 * vector.nbytes / products.shortest(jax.jit(lambda x: x + 1), vector),
        flops_per_second=products.measure(inputs=inputs, outputs=outputs, dtype=dtype),
    )


def settled(config: Config, workdir: pathlib.Path, *, is_here: bool = True) -> Config:
    """Returns the settings of a run with its operands, which all results of the model depend on.

    It prints a line if a new run gets bfloat16 by measurement, `is_here` on this machine.
    """
    found = processes.from_first(lambda: _settle(config, workdir, is_here))
    return settings.replaced(config, {"backbone.operands": found})


def _settle(config: Config, workdir: pathlib.Path, is_here: bool) -> str:
    """Returns the given operands, those of a begun run, or the faster ones for a new run."""
    dtype, operands = config.backbone.dtype, config.backbone.operands
    if operands != "auto":
        return operands
    with contextlib.suppress(ValueError):  # of something else, which is refused later
        begun = (artifacts.CONFIG.find(workdir) or {}).get("backbone", {})
        was = begun.get("dtype"), begun.get("checkpoint")
        if begun.get("operands", "auto") != "auto" and was == (dtype, config.backbone.checkpoint):
            return str(begun["operands"])
    if dtype != _PLAIN or not is_here or jax.default_backend() != "cpu":
        return dtype
    try:
        is_known = presets.preset_of(config.backbone.checkpoint) is not None  # no download
        found = checking.model_of(config)[1] if is_known else checking.shapes_of(config)
    except ValueError:  # the checkpoint is refused later
        return _PLAIN
    width, inner = found.text_part.hidden_size, found.text_part.intermediate_size
    if width < _LEAST_WIDTH or measured_gain(width, inner) <= _LEAST_GAIN:
        return _PLAIN
    print(write("faster_operands", _PLAIN), file=sys.stderr)
    return _NARROW


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
        products.measure(inputs=inputs, outputs=outputs, dtype=(_PLAIN, operands))
        for operands in (_PLAIN, _NARROW)
    )
    if place:
        with contextlib.suppress(OSError, ValueError):  # JAX too goes on without such a folder
            files.write_json(place, {**kept, name: narrow / plain})
    return narrow / plain
