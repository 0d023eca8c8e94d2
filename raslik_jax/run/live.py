"""The numbers of trainings while they run, as JSON lines.

Each step is a line of `live/UNIT.jsonl` in the work directory. The line has the step's number, the
seconds since the training began or continued, and the step's numbers by name. The lines are no
results, and no stage reads them. If they cannot be written, the training continues without them.
"""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from raslik_jax.base.messages import one_line
from raslik_jax.parallel import processes


class Live:
    """The JSON lines of one training."""

    def __init__(self, root: pathlib.Path, unit: str):
        self._path = root / "live" / f"{unit}.jsonl"
        self._is_kept = processes.is_first()
        self._file: TextIO | None = None  # before the first numbers
        self._begin = time.monotonic()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file:
            self._file.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers of a step, and texts."""
        if not self._is_kept:
            return
        try:
            self._file = self._file or self._open(step)
            seconds = round(time.monotonic() - self._begin, 3)
            self._file.write(json.dumps({"step": step, "seconds": seconds, **values}) + "\n")
        except OSError as error:
            self._is_kept = False
            reason = one_line(f"{type(error).__name__}: {error}", 120)
            print(f"note: {self._path.name} is not written ({reason})", file=sys.stderr)

    def _open(self, first: int) -> TextIO:
        """Opens the file at a step: a training that continues repeats the steps after it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(self._path) if line["step"] < first]
        file = open(self._path, "w", encoding="utf-8", newline="\n", buffering=1)
        file.writelines(json.dumps(line) + "\n" for line in kept)
        self._begin = time.monotonic()
        return file


def _whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of an earlier file, without one that a killed process cut."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict) and "step" in value:
                    yield value
