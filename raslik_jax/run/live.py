"""The numbers of trainings while they run: JSON lines, and TensorBoard if asked.

Each step is a line of `live/UNIT.jsonl` in the work directory. The line has the step's number, the
seconds since the training began or continued, and the step's numbers by name. The lines are no
results, and no stage reads them. If a writer fails, it is left out and the training continues.
"""

import contextlib
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raslik_jax.base.messages import one_line
from raslik_jax.parallel import processes


@contextlib.contextmanager
def _lines(root: pathlib.Path, unit: str, first: int) -> Iterator[Any]:
    path = root / "live" / f"{unit}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for line in _whole_lines(path) if line["step"] < first]
    begin = time.monotonic()
    with open(path, "w", encoding="utf-8", newline="\n", buffering=1) as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)

        def write(step: int, values: Mapping[str, Any]) -> None:
            seconds = round(time.monotonic() - begin, 3)
            file.write(json.dumps({"step": step, "seconds": seconds, **values}) + "\n")

        yield write


def _whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of an earlier file, without one that a killed process cut."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict) and "step" in value:
                    yield value


@contextlib.contextmanager
def _tensorboard(root: pathlib.Path, unit: str, first: int) -> Iterator[Any]:
    folder = str(root / "live" / "tensorboard" / unit)
    made = importlib.import_module(WRITERS["tensorboard"])
    board = made.SummaryWriter(folder, purge_step=first, flush_secs=5)

    def write(step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            add = board.add_text if isinstance(value, str) else board.add_scalar
            add(name, value, step)

    with contextlib.closing(board):
        yield write


# The package of each program that may be asked for.
WRITERS = {"tensorboard": "tensorboardX"}
# A writer yields a function of a step and its values. It begins with a work directory, a unit, and
# the next step, because a training that continues from a checkpoint repeats the steps after it.
_OPEN: dict[str, Callable[..., Any]] = {"JSON lines": _lines, "tensorboard": _tensorboard}


class Live:
    """The writers of one training: JSON lines and those that were named."""

    def __init__(self, root: pathlib.Path, unit: str, names: Sequence[str] = ()):
        self._place = root, unit
        names = ["JSON lines", *names] if processes.is_first() else []
        self._writes: dict[str, Any] = dict.fromkeys(names)  # None before the first numbers
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: Any) -> None:
        with _told("a writer of the numbers"):
            self._held.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Hands on the numbers of a step, and texts; the writers begin with the first ones."""
        for name, write in [*self._writes.items()]:
            del self._writes[name]  # one that fails is left out
            with _told(name):
                write = write or self._held.enter_context(_OPEN[name](*self._place, step))
                write(step, values)
                self._writes[name] = write


@contextlib.contextmanager
def _told(title: str) -> Iterator[None]:
    """Prints that a writer failed and that the training continues without it."""
    try:
        yield
    except Exception as error:  # of a foreign program: any
        reason = one_line(f"{type(error).__name__}: {error}", 120)
        print(f"note: {title} fails ({reason}). Training goes on without it", file=sys.stderr)
