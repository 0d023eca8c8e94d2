"""On how many devices the stages of a run fit: they are compiled for more until all do.

The number of devices decides no result, so a run may go on on more of them where a stage needs it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raslik_jax.models.sharding import LayoutError
from raslik_jax.report.tables import Cell, Column, Table
from raslik_jax.run.forecast import Forecast, format_bytes

# A machine has no more devices that are linked as closely.
_MOST = 8


class Trial(NamedTuple):
    """What stages take on so many devices with a layout of `--mesh.base`."""

    devices: int
    layout: str
    forecast: Forecast

    @property
    def taken(self) -> dict[str, float]:
        """Bytes of a device by stage, of those that compute there."""
        found: dict[str, float] = {}
        for step in self.forecast.steps:
            if step.device_bytes:
                found[step.stage] = max(step.device_bytes, found.get(step.stage, 0.0))
        return found

    def beyond(self, memory_bytes: int) -> tuple[str, ...]:
        """Returns the stages that take more than a device has."""
        return tuple(stage for stage, taken in self.taken.items() if taken > memory_bytes)

    @property
    def is_split(self) -> bool:
        """Whether the weights are split over the devices."""
        return bool(self.forecast.run.layout)

    @property
    def flags(self) -> str:
        """The flags that run it so."""
        split = " --mesh.base=sharded" if self.is_split else ""
        return f"--mesh.data={self.devices}{split}"


def find(
    first: Trial,
    forecast_on: Callable[[int, str, Sequence[str]], Forecast],
    *,
    memory_bytes: int,
    most: int = _MOST,
) -> list[Trial]:
    """Returns the trials until all stages fit one way, or no more devices can share the work.

    Each is of the stages that do not fit as it is with fewer devices. `forecast_on` takes a number
    of devices, a layout and stages; `auto` is also tried with split weights, where they can be.
    `most` devices may share a batch.
    """
    trials = [first]
    ways = _ways(first, min(_MOST, most)) if first.beyond(memory_bytes) else ()
    for devices, layout in ways:
        is_split_by_itself = any(t.is_split and t.layout != layout for t in trials)
        if layout == "sharded" and is_split_by_itself:
            continue
        stages = _left(trials, layout, memory_bytes)
        try:
            forecast = forecast_on(devices, layout, stages)
        except LayoutError:  # a kernel that so many devices do not divide
            if layout == first.layout:
                raise
            continue
        trials.append(Trial(devices, layout, forecast))
        if not _left(trials, layout, memory_bytes):
            break
    return trials


def _ways(first: Trial, most: int) -> Iterator[tuple[int, str]]:
    if first.layout == "auto" and 1 < first.devices <= most:
        yield first.devices, "sharded"
    devices = 2 * first.devices
    while devices <= most:
        yield devices, first.layout
        if first.layout == "auto":
            yield devices, "sharded"
        devices *= 2


def _taken(trials: Sequence[Trial], layout: str) -> dict[str, float]:
    """Returns the bytes of a device by stage with a layout, by the last trial that compiled it.

    What fits the first way also fits with more devices or split weights, which take no more.
    """
    found = dict(trials[0].taken)
    for trial in trials[1:]:
        if trial.layout == layout:
            found |= trial.taken
    return found


def _left(trials: Sequence[Trial], layout: str, memory_bytes: int) -> tuple[str, ...]:
    """Returns the stages that do not fit with a layout so far."""
    return tuple(s for s, taken in _taken(trials, layout).items() if taken > memory_bytes)


def to_table(trials: Sequence[Trial], memory_bytes: int) -> Table:
    """Returns the memory of a device by stage and number of devices; what is too much is marked.

    A stage that fits is not compiled again for more devices with the layout by which it does.
    """
    heads = [
        f"{t.devices} device{'s' * (t.devices > 1)}{', weights split' * t.is_split}" for t in trials
    ]
    rows: list[tuple[str | Cell, ...]] = []
    for stage in trials[0].taken:
        cells: list[Cell] = []
        for trial in trials:
            taken = trial.taken.get(stage)
            text = "fits" if taken is None else format_bytes(taken)
            is_beyond = taken is not None and taken > memory_bytes
            cells.append(Cell(f"{text}, too much" if is_beyond else text))
        rows.append((stage, *cells))
    columns = (Column("Stage"), *(Column(head, "right") for head in heads))
    return Table(columns, tuple(rows), title="Memory of a device")


def describe(trials: Sequence[Trial], memory_bytes: int, title: str) -> str:
    """Returns on how many devices all stages fit, in a sentence, and by which flags."""
    of_device = f"{title} of {format_bytes(memory_bytes)}"
    last = trials[-1]
    taken_by, left = _taken(trials, last.layout), _left(trials, last.layout, memory_bytes)
    if left:
        taken = ", ".join(f"{stage} ({format_bytes(taken_by[stage])})" for stage in left)
        return f"Does not fit on {last.devices} x {of_device}: {taken}."
    most = format_bytes(max(taken_by.values(), default=0.0))
    if len(trials) == 1:
        return f"All stages fit on {last.devices} x {of_device}: at most {most}."
    hard = ", ".join(trials[0].beyond(memory_bytes))
    return (
        f"Does not fit on {trials[0].devices} x {of_device}: {hard}. "
        f"Fits on {last.devices} with {last.flags}: at most {most}."
    )
