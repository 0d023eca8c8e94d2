"""Compiles the steps of real models for GPUs that need not be there, and checks what they take.

  make gpu-check                                   every model and step
  PYTHONPATH=.venv-gpu python experiments/gpu/check.py --models=olmo2-7b --steps=sketch_binned

Prints the memory that XLA gives every step. Exits with 1 where a step takes more memory than
`stated.json` says, keeps what it should not, or has lost a kernel. `--state` writes that file.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.gpu import rules
from experiments.gpu.steps import MODELS, STEPS, compile_step, steps_of
from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.report import tables
from raslik_jax.run import gpus

_FILE = pathlib.Path(__file__).with_name("stated.json")
# The GPU of stated.json.
_STATED = next(iter(gpus.GPUS))
# A step may take so much more memory than stated: XLA's own choices vary by that much.
_SLACK = 1.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is compiled, and for what."""

    gpu: str = setting(_STATED, "GPU to compile for.", choices=tuple(gpus.GPUS))
    models: tuple[str, ...] = setting(tuple(MODELS)[1:], "Models.", choices=tuple(MODELS))
    steps: tuple[str, ...] = setting(tuple(STEPS), "Steps of the model to compile.", choices=STEPS)
    state: bool = setting(
        False,
        "Write the memory of these steps into stated.json as their limits. Entries of other "
        "versions of XLA are removed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state and self.gpu != _STATED:
            raise ValueError(
                f"--state must compile for the GPU that stated.json is of, {_STATED}, got "
                f"--gpu={self.gpu}: leave out one of the two"
            )


def versions() -> dict[str, str]:
    """Returns the versions of what compiles."""
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    return {name: importlib.metadata.version(name) for name in names}


def read_stated() -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """Returns the versions and the records of `stated.json`, by "model step"."""
    stored = json.loads(_FILE.read_text())
    return stored["versions"], stored["steps"]


def write_stated(records: dict[str, dict[str, float]]) -> None:
    """Writes `stated.json`, as of these versions, in the order of models and steps."""
    keys = [f"{model} {name}" for model in MODELS for name in STEPS]
    lines = [f"  {json.dumps(key)}: {json.dumps(records[key])}" for key in keys if key in records]
    head = f' "versions": {json.dumps(versions())},\n "steps": {{\n'
    files.write_text(_FILE, "{\n" + head + ",\n".join(lines) + "\n }\n}\n")


def excess_of(found: dict[str, float], stated: dict[str, float]) -> list[str]:
    """Returns where a step takes more memory than was stated."""
    if found["gib"] <= _SLACK * stated["gib"]:
        return []
    return [f"must take {stated['gib']:.4g} GiB, takes {found['gib']:.4g}"]


def run(options: Options) -> int:
    """Compiles, prints and checks; returns 1 where a step is not as it must be."""
    gpus.prepare()
    of_versions, stated = read_stated()
    is_same = versions()["jax"] == of_versions["jax"]  # its XLA; the assembler changes no bytes
    if not is_same:
        stated = {}
    rows: list[Any] = []
    wrong: list[str] = []
    unstated, start = 0, time.monotonic()
    for model in options.models:
        rows.append(model)
        for name in (name for name in steps_of(model) if name in options.steps):
            key, compiled = f"{model} {name}", compile_step(model, name, options.gpu)
            found = compiled.record()
            problems = rules.problems_of(
                STEPS[name], MODELS[model], compiled, gpus.GPUS[options.gpu]
            )
            if options.state:
                stated[key] = found
                write_stated(stated)
            elif key in stated:
                problems += excess_of(found, stated[key])
            else:
                unstated += 1
            rows.append((name, f"{found['gib']:.1f}", f"{compiled.seconds:.0f}"))
            wrong += [f"{key} {problem}" for problem in problems]
    heads = ("GiB", "s to compile")
    columns = (tables.Column("Step"), *(tables.Column(head, "right") for head in heads))
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    notes: tuple[str, ...] = (f"{told}; {time.monotonic() - start:.0f} s.",)
    if unstated:
        compared = f"{unstated} steps are not compared with stated.json, of {of_versions}"
        notes += (f"{compared}: look at them, then give --state.",)
    print(tables.render_terminal(tables.Table(columns, tuple(rows), notes)))
    print("\n".join(wrong) or "all steps are within their bounds")
    return int(bool(wrong))


if __name__ == "__main__":
    command.start(run, Options())
