"""The duration of a whole run: the rest of it at the rates so far.

A unit of work takes

    programs that it compiles x seconds to compile one + operations x seconds for one operation.

The first part does not grow with the second: a program is compiled once. Programs and operations
are counted as in a dry run without tracing any. Both rates are those of the units that this run has
made. Before that a program takes the `COMPILE_SECONDS` of a dry run and an operation as long as in
a matrix product on the device (on one core for few operations). Units that cannot be counted yet
are named and not guessed.
"""

import collections
import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import monitoring

from raslik_jax.base.messages import some_of
from raslik_jax.base.progress import telling
from raslik_jax.config import Config
from raslik_jax.parallel import meshes, processes
from raslik_jax.run import cost, forecast
from raslik_jax.run.ahead import WAITING
from raslik_jax.run.forecast import Step, format_seconds
from raslik_jax.run.programs import AbstractRun, Program
from raslik_jax.run.units import Around, Unit
from raslik_jax.run.workspace import Workspace

# The device is measured, which takes .2 s, where there are more operations than these. Fewer take
# a CPU seconds, at a rate that is assumed, and other devices no time.
_WORTH = 1e12
_ASSUMED_RATE = {"cpu": 1e11}
# Programs of a training's probes: the likelihoods of the sets and of other rows, greedy answers.
_OF_PROBES = 3
# A line is printed before a unit where the last one is so old.
_SECONDS_BETWEEN = 15.0
# JAX's names for the spans of tracing, lowering and compiling, or of reading a stored program.
_COMPILING = "/jax/core/compile/"


class Spent(NamedTuple):
    """A unit's seconds, those that it waited for programs, and the seconds of these in all."""

    step: Step
    seconds: float
    waited: float = 0.0
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


def operation_seconds(spent: Sequence[Spent], step: Step, unmeasured: float | None) -> float | None:
    """Returns the seconds of an operation of a unit without compiling.

    They are those of units that call the same programs, else of others. Units with less than a
    tenth of its work do not count: their other costs would be multiplied. Without any they are the
    `unmeasured` ones, None if unknown.
    """
    least = max(step.operations / 10, 1.0)
    counted = [one for one in spent if one.step.operations >= least]
    alike = [one for one in counted if one.step.programs == step.programs] or counted
    if not alike:
        return unmeasured
    computing = sum(max(one.seconds - one.waited, 0.0) for one in alike)
    return computing / sum(one.step.operations for one in alike)


def find_left(
    steps: Sequence[Step],
    spent: Sequence[Spent],
    *,
    unmeasured: float | None,
    elapsed: float = 0.0,
    of_bar: float | None = None,
) -> Left:
    """Returns the rest of some units; the first has been running for `elapsed`.

    `of_bar` are the seconds left of the first by its own bar, if that has a rate already.
    `unmeasured` are the seconds of an operation before any was measured; None if unknown.
    """

    def seconds(step: Step) -> float | None:
        rate = operation_seconds(spent, step, unmeasured) if step.operations else 0.0
        if rate is None or not step.is_known:
            return None
        return step.num_programs * compile_seconds(spent) + step.operations * rate

    left = [*map(seconds, steps)]
    if of_bar is not None or left[0] is not None:
        left[0] = max((left[0] or 0.0) - elapsed, 0.0) if of_bar is None else of_bar
    known = [step for step, one in zip(steps, left, strict=True) if one is not None]
    return Left(
        seconds=sum(filter(None, left)),
        num_programs=sum(step.num_programs for step in known if step.is_known),
        unknown=tuple(step.name for step in steps if step not in known),
        is_most=any(step.is_most for step in known),
    )


def describe(left: Left, elapsed: float) -> str:
    """Returns a line about a run's duration, `elapsed` seconds after its start."""
    unknown = some_of(left.unknown, 3, quoted=False)
    if not left.seconds and unknown:
        return f"whole run: not known yet, because of {unknown}"
    most = "at most " if left.is_most else ""
    line = f"whole run: {most}about {format_seconds(elapsed + left.seconds)}"
    line += f", {format_seconds(left.seconds)} left" if elapsed >= 1 else ""
    if left.num_programs:
        plural = "programs" if left.num_programs > 1 else "program"
        line += f", compiling {left.num_programs} {plural} included"
    return line + (f"; not known yet, and not counted: {unknown}" if unknown else "")


class Compiling:
    """The seconds in which programs were traced and compiled; nested spans count once.

    A run waits for compilations of the thread that made this. Compilations of another thread count
    only while it waits for them, which `ahead` reports.
    """

    def __init__(self) -> None:
        self._spans: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
        self._thread = threading.get_ident()

    def since(self, start: float) -> tuple[float, float]:
        """Returns the seconds that a run waited since a time of time.time, and all of them."""
        seconds = collections.defaultdict(float)
        for thread, spans in self._spans.items():
            seconds[thread] = sum(end - begin for begin, end in spans if begin >= start)
        waits = seconds.pop(WAITING, 0.0)
        return seconds[self._thread] + waits, sum(seconds.values())

    def add(self, event: str, start_time: float, end_time: float, **others: Any) -> None:
        """Takes a span that has just ended."""
        if event.startswith(_COMPILING):
            spans = self._spans[event if event == WAITING else threading.get_ident()]
            while spans and spans[-1][0] >= start_time:
                spans.pop()
            spans.append((start_time, end_time))


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
        compiling: Callable[[float], tuple[float, float]],
        unmeasured: Callable[[], float | None],
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ):
        self._count, self._compiling, self._clock, self._say = count, compiling, clock, say
        self._unmeasured: Callable[[], float | None] | None = unmeasured
        rate = _ASSUMED_RATE.get(meshes.platform())
        self._per_operation: float | None = 1 / rate if rate else 0.0
        self._steps: Sequence[Step] = ()
        self._spent: list[Spent] = []
        self._start = self._begin = clock()
        self._said = -_SECONDS_BETWEEN

    def left(self, of_bar: float | None = None) -> Left:
        """Returns what is left of the unit that is made and of those after it."""
        return find_left(
            self._steps,
            self._spent,
            unmeasured=self._per_operation,
            elapsed=self._clock() - self._begin,
            of_bar=of_bar,
        )

    def beside_bar(self, done: int, total: int, begin: float) -> str:
        """Returns the text next to the bar of the first unit; "" if its rate is unknown."""
        seconds = self._clock() - begin - self._compiling(begin)[0]
        if done < 1 or seconds <= 0:
            return ""
        left = self.left((total - done) * seconds / done)
        return f"run {'< ' if left.is_most else ''}{format_seconds(left.seconds)} left"

    @contextlib.contextmanager
    def __call__(self, units: Sequence[Unit]) -> Iterator[None]:
        """Counts the rest, reports it and notes the time of the first unit."""
        self._steps = self._count(units)
        work = sum(step.operations for step in self._steps if step.is_known)
        if self._unmeasured and work > _WORTH:
            self._per_operation, self._unmeasured = self._unmeasured(), None
        self._begin = self._clock()
        if self._begin - self._start - self._said >= _SECONDS_BETWEEN:
            self._said = self._begin - self._start
            self._say(f"    {describe(self.left(), self._said)}")
        with telling(self.beside_bar):
            yield
        took = self._clock() - self._begin
        self._spent.append(Spent(self._steps[0], took, *self._compiling(self._begin)))


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

    def per_operation() -> float | None:
        """Returns the seconds of an operation of a matrix product on the devices of the run."""
        if processes.count() > 1:  # what runs on the devices runs in all processes
            return None
        inputs, outputs = run().widest_kernel
        dtype = config.backbone.dtypes
        rate = cost.measure_product(inputs=inputs, outputs=outputs, dtype=dtype)
        return 1 / (rate * meshes.num_shards())

    compiling = Compiling()
    monitoring.register_event_time_span_listener(compiling.add)
    try:
        yield Watch(count, compiling=compiling.since, unmeasured=per_operation)
    finally:
        monitoring.unregister_event_time_span_listener(compiling.add)
