"""The numbers of trainings while they run: JSON lines, and programs that show them.

Each step is a line of `live/UNIT.jsonl` in the work directory. It has the step's number, the
seconds since the training began (or went on), and its numbers by name. They are no results: no
stage reads them. A failing program is left out and ends no training. To add one, add a record to
WRITERS. Its packages are imported when the first number is written.
"""

import contextlib
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from raslik_jax.base.messages import one_line
from raslik_jax.parallel import processes


class Place(NamedTuple):
    """The names of a training: its work directory, run, unit, and the settings of the run."""

    root: pathlib.Path
    run: str
    unit: str
    settings: Mapping[str, Any]


class Sink(Protocol):
    """The receiver of one training's numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def write_text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class Writer(NamedTuple):
    """A program that shows numbers: its title, its packages, and its start.

    `open` takes a place and the first step to come. A training that goes on after a checkpoint
    repeats the steps behind it.
    """

    title: str
    module: str
    open: Callable[[Place, int], Sink]


class _JsonLines:
    def __init__(self, place: Place, first: int):
        path = place.root / "live" / f"{place.unit}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(path) if line["step"] < first]
        self._begin = time.monotonic()
        self._file = open(path, "w", encoding="utf-8", newline="\n", buffering=1)
        self._file.writelines(json.dumps(line) + "\n" for line in kept)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        seconds = round(time.monotonic() - self._begin, 3)
        self._file.write(json.dumps({"step": step, "seconds": seconds, **values}) + "\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(step, numbers)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._write(step, {name: text})

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of an earlier file, without one that a killed process cut."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict) and "step" in value:
                    yield value


class _TensorBoard:
    def __init__(self, place: Place, first: int):
        folder = place.root / "live" / "tensorboard" / place.unit
        made = importlib.import_module("tensorboardX")
        self._writer = made.SummaryWriter(str(folder), purge_step=first, flush_secs=5)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class _Numbers:
    """A sink of numbers alone, of two functions."""

    def __init__(
        self, write: Callable[[int, Mapping[str, float]], Any], close: Callable[[], Any]
    ) -> None:
        self.write, self.close = write, close

    def write_text(self, step: int, name: str, text: str) -> None:
        """Leaves texts out."""


def _open_wandb(place: Place, first: int) -> Sink:
    wandb, folder = importlib.import_module("wandb"), place.root / "live"
    run = wandb.init(
        project=place.run,
        name=place.unit,
        dir=str(folder.absolute()),
        config=dict(place.settings),
        reinit="finish_previous",
    )
    return _Numbers(lambda step, numbers: run.log(dict(numbers), step=step), run.finish)


def _open_mlflow(place: Place, first: int) -> Sink:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(place.run)
    mlflow.start_run(run_name=place.unit)
    return _Numbers(
        lambda step, numbers: mlflow.log_metrics(dict(numbers), step=step), mlflow.end_run
    )


def _open_trackio(place: Place, first: int) -> Sink:
    trackio = importlib.import_module("trackio")
    trackio.init(project=place.run, name=place.unit, config=dict(place.settings), resume="allow")
    return _Numbers(lambda step, numbers: trackio.log(dict(numbers), step=step), trackio.finish)


JSON_LINES = Writer("JSON lines", "json", _JsonLines)
WRITERS: dict[str, Writer] = {
    "tensorboard": Writer("TensorBoard", "tensorboardX", _TensorBoard),
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

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hands on the numbers of a step."""
        self._open(step)
        self._each(lambda sink: sink.write(step, numbers))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Hands on a text to the sinks that show texts."""
        self._open(step)
        self._each(lambda sink: sink.write_text(step, name, text))

    def _open(self, step: int) -> None:
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            with _told(writer.title):
                self._sinks.append((writer.title, writer.open(self._place, step)))

    def _each(self, use: Callable[[Sink], None]) -> None:
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
    """Says of a sink that fails that the training goes on without it."""
    try:
        yield
    except Exception as error:  # of a foreign program: any
        reason = one_line(f"{type(error).__name__}: {error}", 120)
        print(f"note: {title} takes no more numbers ({reason})", file=sys.stderr)
