"""Limits of time and memory for code in downloaded files.

A regular expression, a chat template or a tokenizer of a downloaded model can run for hours or fill
the memory. `call` runs a function in a child process. The kernel stops the child at a limit, also
in C code and from any thread of the caller. The child stays for the next call.
"""

import contextlib
import functools
import importlib
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

SECONDS = 10.0
MOST_BYTES = 2**30
# Threads of linear algebra reserve memory, and the child computes none.
_ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
_PROGRAM = "from raslik_jax.base.bounded import serve; serve()"
_LOCK = threading.Lock()
_T = TypeVar("_T")


class OverLimit(ValueError):
    """Says that a call needs more time or memory than it may take."""


def call(
    function: Callable[..., _T],
    *arguments: Any,
    what: str,
    seconds: float = SECONDS,
    most_bytes: int = MOST_BYTES,
) -> _T:
    """Returns what a function returns, computed in the child process within limits.

    Calls of several threads take turns.

    Args:
      function: a function of a module; its arguments and result can be pickled.
      *arguments: arguments of the function.
      what: subject of the error's sentence, such as "the chat template".
      seconds: most processor time.
      most_bytes: most memory in addition to the child's memory before the call.

    Raises:
      OverLimit: if the function takes more time or memory, or ends the child.
      ValueError: if the function raises an error; the text is that of the error.
    """
    request = function.__module__, function.__qualname__, arguments, seconds, most_bytes
    with _LOCK:
        kind, answer = _ask(request)
    if kind == "result":
        found: _T = answer
        return found
    if kind == "error":
        raise ValueError(answer)
    reasons = {
        "time": f"takes more than {seconds:g} s",
        "memory": f"needs more than {most_bytes / 2**30:g} GiB of memory",
    }
    reason = reasons.get(kind, f"crashes the process that reads it ({answer})")
    raise OverLimit(f"{what} {reason}: correct it, or fetch the file again")


def match_all(
    pattern: str, texts: Sequence[str], is_whole: bool
) -> list[tuple[str | None, ...] | None]:
    """Returns match and groups of each text, None without a match; for `call`."""
    compiled = re.compile(pattern)
    match = compiled.fullmatch if is_whole else compiled.match
    return [found and (found[0], *found.groups()) for found in map(match, texts)]


@functools.cache
def _child(_owner: int) -> "subprocess.Popen[bytes]":
    """Returns the child of the process with this number, so that a fork gets a child of its own.

    The child ends with the process, because it reads the pipe of the process.
    """
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
    # -P: a module in the current directory takes the place of none.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
    )


def _ask(request: Any) -> tuple[str, Any]:
    """Returns the kind of the outcome and its value (see `_answer`), or how the child ended."""
    if _child(os.getpid()).poll() is not None:  # ended by someone else
        _child.cache_clear()
    child = _child(os.getpid())
    assert child.stdin is not None and child.stdout is not None
    is_kept = False
    try:
        pickle.dump(request, child.stdin)
        child.stdin.flush()
        kind, value = pickle.load(child.stdout)
        is_kept = kind != "memory"
        return kind, value
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        status = child.wait()
        if status == -signal.SIGPROF:
            return "time", None
        return "end", signal.Signals(-status).name if status < 0 else f"status {status}"
    finally:
        if not is_kept:  # at Ctrl-C it may be at work still
            _child.cache_clear()
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    stream.close()


# the child's side --------------------------------------------------------------------------------


def serve() -> None:
    """Answers requests on the standard input until it ends: the child's whole program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides at Ctrl-C
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # nothing that is printed disturbs the answers
        os.dup2(null, stream)
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(_answer(*pickle.load(requests)), answers)
            answers.flush()


def _answer(
    module: str, name: str, arguments: Sequence[Any], seconds: float, most_bytes: int
) -> tuple[str, Any]:
    """Returns the kind of the outcome, and a result or the text of an error."""
    try:
        function = getattr(home := importlib.import_module(module), name)
        importlib.import_module(getattr(home, "LOADED_FIRST", module))  # without a limit, as home
        with _limits(seconds, most_bytes):
            return "result", function(*arguments)
    except MemoryError:
        return "memory", None
    except BaseException as error:  # also a panic of Rust, which is no Exception
        return "error", str(error) or type(error).__name__


@contextlib.contextmanager
def _limits(seconds: float, most_bytes: int) -> Iterator[None]:
    """Ends this process after this processor time; memory beyond a size is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        with open("/proc/self/statm", "rb") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        most = size + most_bytes if before[0] < 0 else min(size + most_bytes, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which ends a process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
