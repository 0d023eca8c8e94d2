"""The plan and the cost of a run before there are weights or data.

A unit of work takes

    programs that it compiles x seconds to compile one + seconds for its operations on a device.

The two parts are independent, because a program is compiled once. Files and work on the host are
left out.
"""

import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.config import STAGES, Config
from raslik_jax.run import checking, plan
from raslik_jax.run.gpus import Device
from raslik_jax.run.programs import AbstractRun, Program, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.units import Plan, Unit
from raslik_jax.run.workspace import StoredCorpus, Workspace

# Seconds that a program takes to compile where none was compiled to know: of small models on a CPU.
COMPILE_SECONDS = 5.0


class Step(NamedTuple):
    """One unit of work of the run.

    Attributes:
      programs: names of the programs that it calls.
      num_programs: number of programs that are compiled for it and for no earlier unit.
      operations: multiplications and additions of matrix products.
      device_bytes: memory of the device; 0 for work on the host or without compiling.
    """

    name: str
    programs: tuple[str, ...] = ()
    num_programs: int = 0
    operations: float = 0.0
    bytes_moved: float = 0.0
    disk_bytes: float = 0.0
    device_bytes: float = 0.0
    is_done: bool = False

    @property
    def stage(self) -> str:
        """The stage that it belongs to."""
        return self.name.split("/")[0]

    def seconds(self, device: Device) -> float:
        """Returns the larger of the times of operations and of bytes, without compiling."""
        operations = self.operations / device.flops_per_second
        return max(operations, self.bytes_moved / device.bytes_per_second)


class Forecast(NamedTuple):
    """The plan and the cost of a run: sizes, units in order, and seconds to compile a program."""

    run: AbstractRun
    steps: tuple[Step, ...]
    compile_seconds: float

    @property
    def left(self) -> list[Step]:
        """The units that are still to run."""
        return [step for step in self.steps if not step.is_done]

    def seconds(self, steps: Sequence[Step], device: Device) -> float:
        """Returns the time of some units on a device, with compiling."""
        compiling = self.compile_seconds * sum(step.num_programs for step in steps)
        return compiling + sum(step.seconds(device) for step in steps)


def abstract_run(config: Config, root: pathlib.Path, **how: Any) -> AbstractRun:
    """Returns a run in the abstract, on the existing corpus or by the sizes in the settings.

    The corpus is that of a finished unit or of a user's own files. `how` is of `AbstractRun`.
    """
    if Plan(root, plan.plan_units(config, Workspace(root, config))[:1]).survey().done:
        how["known"] = StoredCorpus(root / "corpus")
    elif not config.corpus.record.reads:  # its files say how large it is, no settings
        how["known"] = config.corpus.load(seed=config.seed)
    return AbstractRun(root, config, checking.model_of(config)[1], **how)


def forecast(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    is_measured: bool = True,
    more: Sequence[Recipe] = (),
    compiles: bool = False,
    **how: Any,
) -> Forecast:
    """Returns the plan and the cost of a run by unit; needs no weights, no data, no network.

    An existing corpus in the work directory or in a user's own files is counted, and checked as far
    as that takes no tokens. Finished units are looked for in `workdir`. Nothing is written. With
    `compiles` the largest program of every kind that is still to run is compiled for the default
    device or for a mesh of others (`gpus`). This gives its memory and the seconds of compiling.
    `how` is of `AbstractRun`.
    """
    run = abstract_run(config, workdir, **how)
    if run.known:
        checking.check_corpus(config, run.known, None, stages=stages)
        is_measured = is_measured and checking.is_measurable(config, run.known)
    units = plan.plan_units(config, run, is_measured=is_measured, more=more)
    done = Plan(workdir, units).survey().done
    run.count_rows(has_sizes="retrieve/sizes" in done)
    units = tuple(unit for unit in units if unit.stage in stages)
    steps = count_steps(run, units, done=done)
    largest: dict[str, Program] = {}
    for unit in units if compiles else ():
        for program in () if unit.name in done else _work_of(run, unit).programs:
            other = largest.get(program.name, program)
            largest[program.name] = max(other, program, key=lambda one: one.largest.slots)
    made = {
        name: max(map(one.compile, dict.fromkeys(one.extremes)), key=lambda it: it.memory_bytes)
        for name, one in largest.items()
    }
    for place, step in enumerate(steps):
        held = (made[name].memory_bytes for name in step.programs if name in made)
        steps[place] = step._replace(device_bytes=max(held, default=0))
    seconds = [one.seconds for one in made.values()] or [COMPILE_SECONDS]
    return Forecast(run, tuple(steps), float(np.median(seconds)))


def count_steps(
    run: AbstractRun, units: Sequence[Unit], *, done: Collection[str] = ()
) -> list[Step]:
    """Returns the work of units in order."""
    compiled: set[Any] = set()
    steps = []
    for unit in units:
        work, is_done = _work_of(run, unit), unit.name in done
        own = {(one.name, shape) for one in work.programs for shape in one.shapes if not is_done}
        steps.append(
            Step(
                unit.name,
                programs=tuple(sorted({one.name for one in work.programs})),
                num_programs=len(own - compiled),
                operations=work.operations + sum(one.operations for one in work.programs),
                bytes_moved=work.bytes_moved + sum(one.bytes_moved for one in work.programs),
                disk_bytes=work.disk_bytes,
                is_done=is_done,
            )
        )
        compiled |= own
    return steps


def _work_of(run: AbstractRun, unit: Unit) -> Work:
    """Returns a unit's work with the programs that it calls at all; nothing for the host's."""
    work = unit.work(run) if unit.work else Work(0)
    return work._replace(programs=[program for program in work.programs if program.shapes])


def format_bytes(count: int | float) -> str:
    """Returns a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def format_seconds(seconds: float) -> str:
    """Returns a time with its unit."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
