"""The numbers of trainings while they run: JSON lines, and programs that show them.

Each step is a line of `live/UNIT.jsonl` in the work directory. The line has the step's number, the
seconds since the training began or continued, and the step's numbers by name. The lines are no
results, and no stage reads them. If a program fails, it is left out and the training continues. To
add a program, add a record to WRITERS. Its packages are imported when the first number is written.
"""

import contextlib
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.messages import one_line
from raslik_jax.parallel import processes


class Place(NamedTuple):
    """The names of a training: its work directory, run, unit, and the settings of the run."""

    root: pathlib.Path
    run: str
    unit: str
    settings: Mapping[str, Any]


class Sink(NamedTuple):
    """The receiver of one training's values: takes those of a step, and ends."""

    write: Callable[[int, Mapping[str, Any]], object]
    close: Callable[[], object]


class Writer(NamedTuple):
    """A program that shows numbers: its title, its packages, and its start.

    `open` takes a place and the number of the next step. A training that continues from a
    checkpoint repeats the steps after it.
    """

    title: str
    module: str
    open: Callable[[Place, int], Sink]


def _open_lines(place: Place, first: int) -> Sink:
    path = place.root / "live" / f"{place.unit}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for line in _whole_lines(path) if line["step"] < first]
    begin = time.monotonic()
    file = open(path, "w", encoding="utf-8", newline="\n", buffering=1)
    file.writelines(json.dumps(line) + "\n" for line in kept)

    def write(step: int, values: Mapping[str, Any]) -> None:
        seconds = round(time.monotonic() - begin, 3)
        file.write(json.dumps({"step": step, "seconds": seconds, **values}) + "\n")

    return Sink(write, file.close)


def _whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of an earlier file, without one that a killed process cut."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict) and "step" in value:
                    yield value


def _open_tensorboard(place: Place, first: int) -> Sink:
    folder = place.root / "live" / "tensorboard" / place.unit
    made = importlib.import_module("tensorboardX")
    board = made.SummaryWriter(str(folder), purge_step=first, flush_secs=5)

    def write(step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            add = board.add_text if isinstance(value, str) else board.add_scalar
            add(name, value, step)

    return Sink(write, board.close)


def _of_numbers(log: Callable[..., object], close: Callable[[], object]) -> Sink:
    """Returns a sink that leaves texts out."""

    def write(step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if numbers:
            log(numbers, step=step)

    return Sink(write, close)


def _open_wandb(place: Place, first: int) -> Sink:
    wandb, folder = importlib.import_module("wandb"), place.root / "live"
    run = wandb.init(
        project=place.run,
        name=place.unit,
        dir=str(folder.absolute()),
        config=dict(place.settings),
        reinit="finish_previous",
    )
    return _of_numbers(run.log, run.finish)


def _open_mlflow(place: Place, first: int) -> Sink:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(place.run)
    mlflow.start_run(run_name=place.unit)
    return _of_numbers(mlflow.log_metrics, mlflow.end_run)


def _open_trackio(place: Place, first: int) -> Sink:
    trackio = importlib.import_module("trackio")
    trackio.init(project=place.run, name=place.unit, config=dict(place.settings), resume="allow")
    return _of_numbers(trackio.log, trackio.finish)


JSON_LINES = Writer("JSON lines", "json", _open_lines)
WRITERS: dict[str, Writer] = {
    "tensorboard": Writer("TensorBoard", "tensorboardX", _open_tensorboard),
    "wandb": Writer("Weights & Biases", "wandb", _open_wandb),
    "mlflow": Writer("MLflow", "mlflow", _open_mlflow),
    "trackio": Writer("Trackio", "trackio", _open_trackio),
}


class Live:
    """The sinks of one training: JSON lines and the writers that were named."""

    def __init__(self, place: Place, names: Sequence[str] = ()):
        self._place = place
        writers = [JSON_LINES, *(WRITERS[name] for name in names)]
        self._waiting = writers if processes.is_first() else []
        self._sinks: list[tuple[str, Sink]] = []

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: Any) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Hands on the numbers of a step, and texts to the programs that show these."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            with _told(writer.title):
                self._sinks.append((writer.title, writer.open(self._place, step)))
        self._each(lambda sink: sink.write(step, values))

    def _each(self, use: Callable[[Sink], object]) -> None:
        working = []
        for title, sink in self._sinks:
            with _told(title):
                use(sink)
                working.append((title, sink))
                continue
            # It may hold what the next training needs: a run of MLflow that is active.
            with contextlib.suppress(Exception):
                sink.close()
        self._sinks = working


@contextlib.contextmanager
def _told(title: str) -> Iterator[None]:
    """Prints that a sink failed and that the training continues without it."""
    try:
        yield
    except Exception as error:  # of a foreign program: any
        reason = one_line(f"{type(error).__name__}: {error}", 120)
        print(f"note: {title} fails ({reason}). Training goes on without it", file=sys.stderr)
