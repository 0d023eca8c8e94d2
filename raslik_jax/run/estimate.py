"""The duration of a whole run: the rest of it at the rates so far.

A unit of work takes

    programs that it compiles x seconds to compile one + operations x seconds for one operation.

The two parts are independent, because a program is compiled once. Programs and operations are
counted as in a dry run without tracing. Both rates are measured on the units that this run has
made. Before the first unit, a program takes the `COMPILE_SECONDS` of a dry run, and an operation
takes as long as in a matrix product on the device (on one core for few operations). Units that
cannot be counted yet are named and not estimated.
"""

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import monitoring

from raslik_jax.base.messages import some_of
from raslik_jax.config import Config
from raslik_jax.parallel import meshes, processes
from raslik_jax.run import cost, forecast
from raslik_jax.run.forecast import Step, format_seconds
from raslik_jax.run.programs import AbstractRun, Program
from raslik_jax.run.units import Around, Unit
from raslik_jax.run.workspace import Workspace

# The device is measured, which takes .2 s, where there are more operations than these. Fewer take
# a CPU seconds, at a rate that is assumed, and other devices no time.
_WORTH = 1e12
_ASSUMED_SECONDS = {"cpu": 1e-11}
# Programs of a training's probes: the likelihoods of the sets and of other rows, greedy answers.
_OF_PROBES = 3
# A line is printed before a unit where the last one is so old.
_SECONDS_BETWEEN = 15.0
# JAX's name for the seconds of compiling, or of reading a stored program.
_COMPILING = "/jax/core/compile/backend_compile_duration"


class Spent(NamedTuple):
    """A unit's seconds, and those of compiling."""

    step: Step
    seconds: float
    compiling: float = 0.0


class Left(NamedTuple):
    """The rest of a run: seconds, programs to compile, and the units that are not known yet."""

    seconds: float
    num_programs: int
    unknown: tuple[str, ...]
    is_most: bool


def compile_seconds(spent: Sequence[Spent]) -> float:
    """Returns the seconds that compiling one program took so far."""
    count = sum(one.step.num_programs for one in spent)
    return sum(one.compiling for one in spent) / count if count else forecast.COMPILE_SECONDS


def operation_seconds(spent: Sequence[Spent], step: Step) -> float | None:
    """Returns the seconds of an operation of a unit without compiling; None if none is measured.

    They come from units that call the same programs, otherwise from other units. Units with less
    than a tenth of the work do not count, because their other costs would be multiplied.
    """
    least = max(step.operations / 10, 1.0)
    counted = [one for one in spent if one.step.operations >= least]
    alike = [one for one in counted if one.step.programs == step.programs] or counted
    if not alike:
        return None
    computing = sum(max(one.seconds - one.compiling, 0.0) for one in alike)
    return computing / sum(one.step.operations for one in alike)


def find_left(
    steps: Sequence[Step], spent: Sequence[Spent], *, unmeasured: Callable[[float], float | None]
) -> Left:
    """Returns the rest of some units.

    `unmeasured` returns the seconds of an operation before any was measured, from the number of
    all operations; None if unknown.
    """
    known, unknown, seconds = list[Step](), list[str](), 0.0
    work = sum(step.operations for step in steps if step.is_known)
    for step in steps:
        rate = operation_seconds(spent, step) if step.operations else 0.0
        rate = unmeasured(work) if rate is None and step.is_known else rate
        if rate is None or not step.is_known:
            unknown.append(step.name)
            continue
        known.append(step)
        seconds += step.num_programs * compile_seconds(spent) + step.operations * rate
    return Left(
        seconds=seconds,
        num_programs=sum(step.num_programs for step in known),
        unknown=tuple(unknown),
        is_most=any(step.is_most for step in known),
    )


def describe(left: Left, elapsed: float) -> str:
    """Returns a line about a run's duration, `elapsed` seconds after its start."""
    unknown = some_of(left.unknown, 3, quoted=False)
    if not left.seconds and unknown:
        return f"whole run: not known yet ({unknown})"
    most = "at most " if left.is_most else ""
    line = f"whole run: {most}about {format_seconds(elapsed + left.seconds)}"
    line += f", {format_seconds(left.seconds)} left" if elapsed >= 1 else ""
    if left.num_programs:
        plural = "programs" if left.num_programs > 1 else "program"
        line += f", compiling {left.num_programs} {plural} included"
    return line + (f", without {unknown} (not known yet)" if unknown else "")


def count_left(run: AbstractRun, units: Sequence[Unit]) -> list[Step]:
    """Returns the work of units in order; the sets that the first one reads exist."""
    config = run.config
    # These say how many rows a set has.
    names = {f"retrieve/{name}" for name in ("sizes", *config.retrieve.strategies)}
    sets = names & {unit.name for unit in units}
    # Of those that probe: training again does not.
    training = [unit.name for unit in units if "unlearn.probe.steps" in unit.settings]
    steps = []
    counted = forecast.count_steps(run, units, Program.rule)
    for unit, step in zip(units, counted, strict=True):
        reads = any(f"{path}/".startswith(f"{name}/") for name in sets for path in unit.reads)
        is_probed = unit.name in training[:1]
        steps.append(
            step._replace(
                num_programs=step.num_programs + _OF_PROBES * is_probed,
                is_known=step.is_known and not (step.programs and reads),
                is_most=unit.name in training and config.unlearn.probe.stop != "never",
            )
        )
    return steps


class Watch:
    """Follows a run unit by unit and reports its duration; `around` of `run_units`."""

    def __init__(
        self,
        count: Callable[[Sequence[Unit]], Sequence[Step]],
        *,
        compiling: Callable[[], float],
        unmeasured: Callable[[float], float | None],
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ):
        self._count, self._compiling, self._clock, self._say = count, compiling, clock, say
        self._unmeasured = unmeasured
        self._spent: list[Spent] = []
        self._start, self._said = clock(), -math.inf

    @contextlib.contextmanager
    def __call__(self, units: Sequence[Unit]) -> Iterator[None]:
        """Counts the rest, reports it and notes the time of the first unit."""
        steps, elapsed = self._count(units), self._clock() - self._start
        if elapsed - self._said >= _SECONDS_BETWEEN:
            self._said = elapsed
            left = find_left(steps, self._spent, unmeasured=self._unmeasured)
            self._say(f"    {describe(left, elapsed)}")
        begin, compiled = self._clock(), self._compiling()
        yield
        seconds = self._clock() - begin
        self._spent.append(Spent(steps[0], seconds, self._compiling() - compiled))


@contextlib.contextmanager
def watching(config: Config, root: pathlib.Path) -> Iterator[Around]:
    """Yields the watch of a run: the first process counts and prints while others wait."""
    if not processes.is_first():

        def wait(units: Sequence[Unit]) -> contextlib.AbstractContextManager[None]:
            processes.alone(lambda: None)
            return contextlib.nullcontext()

        yield wait
        return

    @functools.cache
    def run() -> AbstractRun:
        workspace = Workspace(root, config)
        return forecast.abstract_run(config, workspace, rows=workspace.train_rows)

    def count_alone(units: Sequence[Unit]) -> Sequence[Step]:
        """Returns the work of units with the sizes of the sets, if these exist."""
        try:
            run().count_rows()
            return count_left(run(), units)
        except (ValueError, OSError):  # of a model whose shapes are not known, say
            return [Step(unit.name, unit.stage, is_known=False) for unit in units]

    def count(units: Sequence[Unit]) -> Sequence[Step]:
        return processes.alone(lambda: count_alone(units)) or ()

    @functools.cache
    def measured() -> float | None:
        """Returns the seconds of an operation of a matrix product on the devices of the run."""
        if processes.count() > 1:  # what runs on the devices runs in all processes
            return None
        inputs, outputs = run().widest_kernel
        dtype = config.backbone.dtypes
        rate = cost.measure_product(inputs=inputs, outputs=outputs, dtype=dtype)
        return 1 / (rate * meshes.num_shards())

    def unmeasured(operations: float) -> float | None:
        return measured() if operations > _WORTH else _ASSUMED_SECONDS.get(meshes.platform(), 0.0)

    compiled: list[float] = []

    def add(event: str, duration_secs: float, **others: Any) -> None:
        if event == _COMPILING:
            compiled.append(duration_secs)

    monitoring.register_event_duration_secs_listener(add)
    try:
        yield Watch(count, compiling=lambda: sum(compiled), unmeasured=unmeasured)
    finally:
        monitoring.unregister_event_duration_listener(add)
