"""Compiles the steps of real models for GPUs that need not be there, and holds them to bounds.

  make gpu-check                                   every model and step
  PYTHONPATH=.venv-gpu python experiments/gpu/check.py --models=olmo2-7b --steps=sketch_binned

Prints the memory that XLA gives every step, and a roofline of its compiled text: operations and
bytes, the least time at the GPUs' rates, the share of that time which the step's matrix products
alone would take, and what takes longest. Exits with 1 where a step takes more memory or time than
`stated.json` says, keeps what it should not, or has lost a kernel. `--state` writes that file, and
the page of docs/ that shows it.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any, Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.gpu import page, records, rules
from experiments.gpu.steps import MODELS, STEPS, compile_step, steps_of
from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.report import tables
from raslik_jax.run import gpus

# The GPU of stated.json, which the page holds against the rates of the others too.
_STATED = next(iter(gpus.GPUS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is compiled, and for what."""

    gpu: str = setting(_STATED, "GPU to compile for.", choices=tuple(gpus.GPUS))
    models: tuple[str, ...] = setting(tuple(MODELS)[1:], "Models.", choices=tuple(MODELS))
    steps: tuple[str, ...] = setting(tuple(STEPS), "Steps, of those of a model.", choices=STEPS)
    items: bool = setting(True, "List what takes longest in each step.")
    texts: str = setting("", "Folder for the texts of the compiled programs.")
    state: Literal["no", "missing", "all"] = setting(
        "no",
        "Write what steps take into stated.json, as what they may, and the page of docs/: of those "
        "that it has not (so it goes on where it was stopped), or of all.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state != "no" and self.gpu != _STATED:
            raise ValueError(
                f"--state={self.state} must compile for the GPU that stated.json is of, {_STATED}, "
                f"got --gpu={self.gpu}: leave out one of the two"
            )


def _compare(
    key: str, found: records.Record, stated: dict[str, records.Record], *, is_same: bool
) -> list[str]:
    """Returns how a step is worse than stated, which says nothing of other versions of XLA."""
    return [*records.excess_of(found, stated[key])] if is_same and key in stated else []


def run(options: Options) -> int:
    """Compiles, prints and checks; returns 1 where a step is not as it must be."""
    gpus.prepare()
    of_versions, stated = records.read()
    versions = records.versions()
    is_same = versions["jax"] == of_versions["jax"]  # its XLA; the assembler changes no bytes
    if options.state == "missing" and not is_same:
        raise ValueError(
            f"--state=missing must have the jax of stated.json, {of_versions['jax']}, got "
            f"{versions['jax']}: give --state=all"
        )
    if options.state == "all":
        # What is stated again goes first, and all of another XLA: a stop leaves gaps, which
        # `missing` fills, and no old number under the new versions.
        steps = {f"{m} {name}" for m in options.models for name in options.steps}
        stated = {key: found for key, found in stated.items() if is_same and key not in steps}
        records.write(stated)
    rows: list[Any] = []
    wrong: list[str] = []
    unstated, start = 0, time.monotonic()
    for model in options.models:
        rows.append(model)
        for name in (name for name in steps_of(model) if name in options.steps):
            key = f"{model} {name}"
            if options.state == "missing" and key in stated:
                continue
            compiled = compile_step(model, name, options.gpu)
            if options.texts:
                folder = pathlib.Path(options.texts)
                folder.mkdir(parents=True, exist_ok=True)
                files.write_text(folder / f"{model}-{name}.hlo", compiled.text)
            found = records.record_of(model, name, compiled)
            step, of_model = STEPS[name], MODELS[model]
            problems = rules.problems_of(step, of_model, compiled, gpus.GPUS[options.gpu])
            if options.state != "no":
                stated[key] = found
                records.write(stated)
            else:
                problems += _compare(key, found, stated, is_same=is_same)
                unstated += not is_same or key not in stated
            rows.append(_row(name, found, options.gpu, compiled.seconds))
            if options.items:
                _print_items(key, found)
            wrong += [f"{key} {problem}" for problem in problems]
    if options.state != "no":
        files.write_text(page.PAGE, page.render(*records.read()))
    print(tables.render_terminal(_table(rows, unstated, time.monotonic() - start)))
    print("\n".join(wrong) or "all steps are within their bounds")
    return int(bool(wrong))


def _row(name: str, found: records.Record, gpu: str, seconds: float) -> tuple[str, ...]:
    sizes = (f"{found.gib:.1f}", f"{found.tera:.2f}", f"{found.gb:.1f}")
    return name, *sizes, f"{found.ms[gpu]:.2f}", f"{found.useful(gpu):.0%}", f"{seconds:.0f}"


def _print_items(key: str, found: records.Record) -> None:
    """Prints what takes longest in a step."""
    lines = [f"  {ms:8.2f} ms {made} {of}" for ms, made, of in found.items]
    print("\n".join([key, *lines]), file=sys.stderr)


def _table(rows: list[Any], unstated: int, seconds: float) -> tables.Table:
    heads = ("GiB", "T operations", "GB moved", "ms at best", "useful", "s to compile")
    columns = (tables.Column("Step"), *(tables.Column(head, "right") for head in heads))
    versions = ", ".join(f"{name} {version}" for name, version in records.versions().items())
    notes: tuple[str, ...] = (
        f"{versions}; {seconds:.0f} s.",
        "At best: every instruction takes the longer of its products and its bytes. Useful: the "
        "share of that time that the products of its jaxpr take, a second pass included.",
    )
    if unstated:
        compared = f"{unstated} steps are not compared with stated.json, of {records.read()[0]}"
        notes += (f"{compared}: look at them, then give --state=all.",)
    return tables.Table(columns, tuple(rows), notes)


if __name__ == "__main__":
    command.start(run, Options())
