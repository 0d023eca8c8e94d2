"""How every command of experiments/ begins and ends."""

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags

from raslik_jax.messages import shown


def start(main: Callable[[], int | None], *, when_stopped: str = "stopped") -> NoReturn:
    """Reads the flags, runs a command and exits with its status.

    The status is what main returns, 0 for None; 1 for a ValueError or OSError, which is said in one
    sentence on stderr (or raised where RASLIK_TRACEBACK is set); 2 for an argument that is no flag;
    130 when somebody stops it.

    Args:
      main: the command; it reads its own flags.
      when_stopped: said on stderr at Ctrl-C.
    """
    app.run(functools.partial(_run, main, when_stopped))


def _run(main: Callable[[], int | None], when_stopped: str, argv: Sequence[str]) -> int:
    if len(argv) > 1:
        print(f"error: flags alone are wanted, got {argv[1:]}: write --name=value", file=sys.stderr)
        return 2
    try:
        _check_finite()
        return main() or 0
    except (ValueError, OSError) as error:
        if os.environ.get("RASLIK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(when_stopped, file=sys.stderr)
        return 130


def _check_finite() -> None:
    """Refuses NaN and infinity in every flag that is a number."""
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} must be a finite number, got {value}")


def numbers(name: str, values: Sequence[str], *, low: int | float, kind: type = int) -> list[Any]:
    """Returns the numbers of a list flag, each once.

    Raises:
      ValueError: none, one that is no number, below `low`, not finite, or named twice.
    """
    try:
        found = [kind(value) for value in values]
        is_right = all(math.isfinite(number) and number >= low for number in found)
    except ValueError:
        found, is_right = [], False
    if not found or not is_right or len(set(found)) < len(found):
        raise ValueError(
            f"--{name} must be a list of different numbers of at least {low}, got "
            f"{shown(','.join(values))}"
        )
    return found
