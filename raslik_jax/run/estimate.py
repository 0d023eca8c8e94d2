"""How long a whole run will take: what is left of it, at the rates that it has shown so far.

A unit of work takes

  programs that it compiles x seconds to compile one + operations x seconds for one operation,

where the first is not stretched with the second: a program is compiled once. Programs and
operations are counted as a dry run counts them, without tracing any. Both rates are those of the
units that this run has made; before there are any, a program is taken to need `COMPILE_SECONDS` of
a dry run, and an operation what a matrix product on the device does; where there are few, what it
does on one core. What cannot be counted yet is named and not guessed.
"""

import collections
import contextlib
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
from raslik_jax.run import artifacts, cost, forecast, programs
from raslik_jax.run.ahead import WAITING
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
# JAX tells the spans of tracing, lowering and compiling, or of reading a kept program, by these.
_COMPILING = "/jax/core/compile/"


_Span = tuple[float, float]


class Part(NamedTuple):
    """What a unit will do.

    Attributes:
      name: of the unit.
      kind: the programs that it calls; units of one kind share a rate.
      operations: of its programs; none are known where it is not `is_known`.
      num_programs: that are compiled for it, and for no unit before it.
      is_most: it may end before.
    """

    name: str
    kind: tuple[str, ...] = ()
    operations: float = 0.0
    num_programs: int = 0
    is_known: bool = True
    is_most: bool = False


class Compiled(NamedTuple):
    """Seconds of compiling: those that a run waited, and all that its programs took."""

    waited: float
    whole: float


class Spent(NamedTuple):
    """What a part took, and its programs."""

    part: Part
    seconds: float
    compiled: Compiled


class Left(NamedTuple):
    """What is left of a run: seconds, programs to compile, and the units that are not known yet."""

    seconds: float
    num_programs: int
    unknown: tuple[str, ...]
    is_most: bool


def compile_seconds(spent: Sequence[Spent]) -> float:
    """Returns the seconds that compiling one program took so far."""
    count = sum(one.part.num_programs for one in spent)
    whole = sum(one.compiled.whole for one in spent)
    return whole / count if count else forecast.COMPILE_SECONDS


def operation_seconds(spent: Sequence[Spent], part: Part, unmeasured: float | None) -> float | None:
    """Returns the seconds of an operation of a part, without compiling.

    Those of units of its kind, else of others; of none that did less than a tenth of its work, as
    what a unit takes beside its operations would be stretched. Else they are the `unmeasured` ones,
    None where nobody knows.
    """
    least = max(part.operations / 10, 1.0)
    counted = [one for one in spent if one.part.operations >= least]
    alike = [one for one in counted if one.part.kind == part.kind] or counted
    if not alike:
        return unmeasured
    computing = sum(max(one.seconds - one.compiled.waited, 0.0) for one in alike)
    return computing / sum(one.part.operations for one in alike)


def find_left(
    parts: Sequence[Part],
    spent: Sequence[Spent],
    *,
    unmeasured: float | None,
    elapsed: float = 0.0,
    of_bar: float | None = None,
) -> Left:
    """Returns what is left of some parts, the first of which has been going on for `elapsed`.

    `of_bar` are the seconds left of the first by its own bar, where that has a rate already.
    `unmeasured` are the seconds of an operation before any was measured, None where nobody knows.
    """

    def seconds(part: Part) -> float | None:
        rate = operation_seconds(spent, part, unmeasured) if part.operations else 0.0
        if rate is None or not part.is_known:
            return None
        return part.num_programs * compile_seconds(spent) + part.operations * rate

    whole = seconds(parts[0])
    of_first = of_bar if of_bar is not None or whole is None else max(whole - elapsed, 0.0)
    of_parts = [of_first, *map(seconds, parts[1:])]
    known = [part for part, left in zip(parts, of_parts, strict=True) if left is not None]
    return Left(
        seconds=sum(left for left in of_parts if left is not None),
        num_programs=sum(part.num_programs for part in known if part.is_known),
        unknown=tuple(part.name for part in parts if part not in known),
        is_most=any(part.is_most for part in known),
    )


def describe(left: Left, elapsed: float) -> str:
    """Returns a line of what a run takes, `elapsed` seconds after it began."""
    unknown = some_of(left.unknown, 3, quoted=False)
    if not left.seconds and unknown:
        return f"whole run: not known yet, because of {unknown}"
    most = "at most " if left.is_most else ""
    line = f"whole run: {most}about {_rounded(elapsed + left.seconds)}"
    line += f", {_rounded(left.seconds)} left" if elapsed >= 1 else ""
    if left.num_programs:
        plural = "programs" if left.num_programs > 1 else "program"
        line += f", compiling {left.num_programs} {plural} included"
    return line + (f"; not known yet, and not counted: {unknown}" if unknown else "")


def _rounded(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


class Compiling:
    """The seconds in which programs were traced and compiled; what lies in another counts once.

    A run waits for what the thread compiles that made this. What another thread compiles takes it
    no time but where it waits for that, which `ahead` tells.
    """

    def __init__(self) -> None:
        self._spans: dict[int, list[_Span]] = collections.defaultdict(list)  # by thread
        self._waits: list[_Span] = []
        self._thread = threading.get_ident()

    def since(self, start: float) -> Compiled:
        """Returns the seconds that were spent so since a time of time.time."""

        def seconds(spans: Sequence[_Span]) -> float:
            return sum(end - begin for begin, end in spans if begin >= start)

        waited = seconds(self._spans[self._thread]) + seconds(self._waits)
        return Compiled(waited, sum(map(seconds, [*self._spans.values()])))

    def add(self, event: str, start_time: float, end_time: float, **others: Any) -> None:
        """Takes a span that has just ended."""
        if event == WAITING:
            self._waits.append((start_time, end_time))
        elif event.startswith(_COMPILING):
            spans = self._spans[threading.get_ident()]
            while spans and spans[-1][0] >= start_time:
                spans.pop()
            spans.append((start_time, end_time))


def count_parts(run: programs.AbstractRun, units: Sequence[Unit]) -> tuple[Part, ...]:
    """Returns what units will do, in order; of the first the sets are made that it reads."""
    sets = {unit.name for unit in units if unit.name in _sets_of(run.config)}
    is_stopped = run.config.unlearn.probe.stop != "never"
    compiled: set[Any] = set()
    parts = []
    for unit in units:
        make = getattr(unit.run, "func", unit.run)
        if make not in forecast.WORK:
            parts.append(Part(unit.name, is_known=False))
            continue
        called = forecast.work_of(run, unit).programs
        own: set[Any] = {(make, one.name, shape) for one in called for shape in one.shapes}
        if unit.stage == "unlearn" and run.config.unlearn.probe.steps:
            own |= {("probes", number) for number in range(_OF_PROBES)}
        reads = {path for name in sets for path in unit.reads if f"{path}/".startswith(f"{name}/")}
        parts.append(
            Part(
                unit.name,
                kind=tuple(sorted({one.name for one in called})),
                operations=sum(one.rule() for one in called),
                num_programs=len(own - compiled),
                is_known=not (called and reads),
                is_most=is_stopped and unit.stage == "unlearn",
            )
        )
        compiled |= own
    return tuple(parts)


def _sets_of(config: Config) -> set[str]:
    """Returns the units that say how many rows a set has."""
    return {f"retrieve/{name}" for name in ("sizes", *config.retrieve.strategies)}


class Watch:
    """Follows a run unit by unit, and says how long all of it takes; `around` of `run_units`."""

    def __init__(
        self,
        count: Callable[[Sequence[Unit]], Sequence[Part]],
        *,
        compiling: Callable[[float], Compiled],
        unmeasured: Callable[[], float | None],
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ):
        self._count, self._compiling, self._clock, self._say = count, compiling, clock, say
        self._unmeasured: Callable[[], float | None] | None = unmeasured
        rate = _ASSUMED_RATE.get(meshes.platform())
        self._per_operation: float | None = 1 / rate if rate else 0.0
        self._parts: Sequence[Part] = ()
        self._spent: list[Spent] = []
        self._start = self._begin = clock()
        self._said = -_SECONDS_BETWEEN

    def left(self, of_bar: float | None = None) -> Left:
        """Returns what is left of the unit that is made and of those after it."""
        return find_left(
            self._parts,
            self._spent,
            unmeasured=self._per_operation,
            elapsed=self._clock() - self._begin,
            of_bar=of_bar,
        )

    def beside_bar(self, done: int, total: int, begin: float) -> str:
        """Returns what stands beside the bar of the first unit, "" where its rate is unknown."""
        seconds = self._clock() - begin - self._compiling(begin).waited
        if done < 1 or seconds <= 0:
            return ""
        left = self.left((total - done) * seconds / done)
        return f"run {'< ' if left.is_most else ''}{_rounded(left.seconds)} left"

    @contextlib.contextmanager
    def __call__(self, units: Sequence[Unit]) -> Iterator[None]:
        """Counts what is left, says it, and notes what the first unit takes."""
        self._parts = self._count(units)
        work = sum(part.operations for part in self._parts if part.is_known)
        if self._unmeasured and work > _WORTH:
            self._per_operation, self._unmeasured = self._unmeasured(), None
        self._begin = self._clock()
        if self._begin - self._start - self._said >= _SECONDS_BETWEEN:
            self._said = self._begin - self._start
            self._say(f"    {describe(self.left(), self._said)}")
        with telling(self.beside_bar):
            yield
        took = self._clock() - self._begin, self._compiling(self._begin)
        self._spent.append(Spent(self._parts[0], *took))


@contextlib.contextmanager
def watching(config: Config, root: pathlib.Path) -> Iterator[Around]:
    """Yields what follows a run: the first process counts and speaks, others wait as it counts."""
    if not processes.is_first():

        def wait(units: Sequence[Unit]) -> contextlib.AbstractContextManager[None]:
            processes.alone(lambda: None)
            return contextlib.nullcontext()

        yield wait
        return
    made: list[programs.AbstractRun] = []

    def run_of() -> programs.AbstractRun:
        """Returns the run in the abstract, with the sizes of its sets where they are there."""
        if not made:
            workspace = Workspace(root, config)
            made.append(programs.AbstractRun(config, workspace, rows=workspace.train_rows))
        (run,) = made
        if sizes := artifacts.SIZES.find(root):
            forget, retain = sizes["num_forget"], sizes["num_retain"]
            run.sizes = run.sizes._replace(forget=forget, retain=retain)
        return run

    def count_alone(units: Sequence[Unit]) -> Sequence[Part]:
        try:
            return count_parts(run_of(), units)
        except (ValueError, OSError):  # of a model whose shapes are not known, say
            return tuple(Part(unit.name, is_known=False) for unit in units)

    def count(units: Sequence[Unit]) -> Sequence[Part]:
        return processes.alone(lambda: count_alone(units)) or ()

    def per_operation() -> float | None:
        """Returns the seconds of an operation of a matrix product on the devices of the run."""
        if processes.count() > 1:  # what runs on the devices runs in all processes
            return None
        inputs, outputs = run_of().widest_kernel
        dtype = config.backbone.dtype
        rate = cost.measure_product(inputs=inputs, outputs=outputs, dtype=dtype)
        return 1 / (rate * meshes.num_shards())

    compiling = Compiling()
    monitoring.register_event_time_span_listener(compiling.add)
    try:
        yield Watch(count, compiling=compiling.since, unmeasured=per_operation)
    finally:
        monitoring.unregister_event_time_span_listener(compiling.add)
