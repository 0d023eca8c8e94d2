"""How every command of experiments/ begins and ends."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app


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
        return main() or 0
    except (ValueError, OSError) as error:
        if os.environ.get("RASLIK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(when_stopped, file=sys.stderr)
        return 130
