"""Progress of long work on stderr, with rate and time left."""

import sys
from collections.abc import Iterable
from typing import Any


class _Lines:
    """A stream in which each state of a bar is a line of its own, as logs want it."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            self._stream.write(text + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress(
    items: Iterable[Any] | None, what: str, *, total: int | None = None, unit: str = "step"
) -> Any:
    """Returns the items behind a progress bar; without items, a bar that is moved by its `update`.

    On a terminal the bar vanishes when the work is done. Elsewhere it is a line every 15 seconds,
    and work that takes less says nothing. `what` stands in front; empty, for silence.
    """
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=what,
        disable=not what,
        total=total,
        unit=unit,
        file=sys.stderr if is_terminal else _Lines(sys.stderr),
        leave=not is_terminal,
        mininterval=0.2 if is_terminal else 15.0,
        # Else tqdm's own watchdog repeats a line that has not changed.
        maxinterval=10.0 if is_terminal else 3600.0,
        delay=0.5 if is_terminal else 15.0,
        ncols=None if is_terminal else 80,
        dynamic_ncols=is_terminal,
    )
