"""Progress of long work on stderr with its rate and the time left."""

import functools
import sys
from collections.abc import Iterable
from typing import Any


class _Lines:
    """A stream that writes each state of a bar as a line of its own, for logs."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            self._stream.write(text + "\n")

    def flush(self) -> None:
        self._stream.flush()


@functools.cache
def _bar_class() -> Any:
    """Returns the kind of bar: a subclass of tqdm's, imported with the first bar."""
    from tqdm import tqdm

    class Bar(tqdm):
        """A bar whose rate leaves out the items that `leave_out` names.

        The first item of a shape compiles once. A rate that includes it would count the compilation
        again for every item left.
        """

        _left_out, _seconds_out = 0, 0.0

        def leave_out(self, seconds: float) -> None:
            """Leaves an item and the seconds that it took out of the rate."""
            self._left_out += 1
            self._seconds_out += seconds

        @property
        def format_dict(self) -> dict[str, Any]:
            found = super().format_dict
            count, seconds = self.n - self._left_out, found["elapsed"] - self._seconds_out
            if self._left_out:  # without a rate no time left is shown
                found["rate"] = count / seconds if count > 0 and seconds > 0 else None
            return found

    return Bar


def say(line: str) -> None:
    """Prints a line on stdout, above any bar that is on the terminal."""
    _bar_class().write(line, file=sys.stdout)


def progress(
    items: Iterable[Any] | None, what: str, *, total: int | None = None, unit: str = "step"
) -> Any:
    """Returns the items with a progress bar; without items a bar that `update` moves.

    On a terminal the bar vanishes at the end of the work. Elsewhere it is a line every 15 seconds,
    and short work prints nothing. `what` is the text in front of the bar. An empty text means
    silence. The items that `leave_out` gets do not count in the bar's rate.
    """
    is_terminal = sys.stderr.isatty()
    return _bar_class()(
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
        ncols=None if is_terminal else 100,
        dynamic_ncols=is_terminal,
    )
