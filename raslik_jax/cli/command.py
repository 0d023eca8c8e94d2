"""How every command begins and ends."""

import contextlib
import ctypes
import dataclasses
import gc
import io
import os
import pathlib
import platform
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from absl import app, flags, logging

from raslik_jax.base import machine
from raslik_jax.base.files import sentence_of
from raslik_jax.base.messages import bounded, printable, shown
from raslik_jax.base.settings import FROM_STUDIES, Leaf, Settings
from raslik_jax.cli import setting_flags
from raslik_jax.incident.making import require as require
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.run import gpus

_KEEP = flags.DEFINE_boolean(
    "keep_compiled",
    True,
    "Keep compiled programs on disk for later commands: in JAX_COMPILATION_CACHE_DIR, or up to 4 "
    "GB in ~/.cache/raslik_jax.",
)
# In the text of an error of a device without room.
_FULL = "RESOURCE_EXHAUSTED"
# Those defined here are listed as flags of the command that asks for them.
flags.disclaim_key_flags()


def start(
    main: Callable[..., int | None],
    options: Settings | None = None,
    *,
    when_stopped: str = "stopped",
) -> NoReturn:
    """Reads the flags, runs a command and exits with its status.

    The status is main's result, 0 for None. It is 1 for a ValueError or OSError, which is one
    sentence on stderr (or raised if RASLIK_TRACEBACK is set). It is 2 for an argument that is no
    flag. It is 130 at Ctrl-C or SIGTERM, when `when_stopped` is printed. A second signal ends the
    process at once. Help has status 0. Output is UTF-8 with control characters escaped.

    Each of the options becomes a flag. Without any, main reads its own flags.
    """
    # Tracing makes objects by the million and few cycles: these are looked for more rarely.
    gc.set_threshold(70_000, 10, 10)
    if options is not None:
        setting_flags.define(options)

    def run() -> int | None:
        logging.set_verbosity(logging.WARNING)
        keep_compiled(_KEEP.value)
        reserve_memory()
        keep_heap()
        if options is None:
            return main()
        with _job_of(options):
            return main(setting_flags.read(options))

    def run_whole(argv: Sequence[str]) -> int:
        _watch_signals(when_stopped)
        return _leave(_run(run, when_stopped, argv))

    app.run(run_whole, flags_parser=_parse)


def of_job(
    options: type[Settings], call: Callable[..., Any], flags_of: Sequence[Leaf]
) -> tuple[Callable[..., Settings], Callable[[Settings], None]]:
    """Returns options with those of a job, and a command that prints what a function returns.

    The function gets the options and, as `settings`, the flags of `flags_of` that the user gives.
    """

    def run(options: Settings) -> None:
        print(call(options, settings=setting_flags.given(flags_of)))

    how: Any = {"frozen": True, "kw_only": True, "bases": (options, JobConfig)}
    return dataclasses.make_dataclass(options.__name__, (), **how), run


# The arguments that ask for the help of a command or of the program.
HELP = ("--help", "-h", "-help", "--helpshort")


def _parse(argv: Sequence[str]) -> list[str]:
    """Returns the arguments that are no flags; exits for help and for an unknown flag."""
    try:
        for text in argv:
            if text != text.encode(errors="replace").decode():
                must = f"arguments must be UTF-8 text, got {shown(text, 60)}"
                raise ValueError(f"{must}: use a terminal with a UTF-8 locale")
        arguments, asked = setting_flags.expand(argv[1:], flags.FLAGS)
        if asked:
            app.usage(shorthelp=asked in HELP, writeto_stdout=True)
            sys.exit(0)
        return flags.FLAGS([argv[0], *arguments])
    except (flags.Error, ValueError, OSError) as error:
        name = error.flagname if isinstance(error, flags.UnrecognizedFlagError) else ""
        more = f" Correct it, or {FROM_STUDIES}." if name.count(".") > 1 else ""
        print(f"error: {bounded(str(error))}{more}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def _job_of(options: Settings) -> Iterator[None]:
    """Joins the job that the flags name, if any; the first of several processes prints.

    Errors of other flags are found inside, so that they too are printed once.
    """
    given = setting_flags.read(JobConfig()) if isinstance(options, JobConfig) else JobConfig()
    if not given.coordinator:
        yield
        return
    numbers: dict[str, Any] = {}
    if given.num_processes:
        numbers = {"num_processes": given.num_processes, "process_id": given.process_id}
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.job(given.coordinator, **numbers))
        if not processes.is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        yield


def _run(main: Callable[[], int | None], when_stopped: str, argv: Sequence[str]) -> int:
    if len(argv) > 1:
        print(f"error: {setting_flags.no_flags(argv[1:])}", file=sys.stderr)
        return 2
    # Texts of data are printed whole on any terminal, whatever the locale.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # In a pipe or a log a line is there when it is said, too.
            how: Any = {"errors": "backslashreplace", "line_buffering": True}
            stream.reconfigure(encoding="utf-8", **how)
    try:
        with contextlib.redirect_stdout(_Printable(sys.stdout)):
            return main() or 0
    except (ValueError, OSError) as error:
        if os.environ.get("RASLIK_TRACEBACK"):
            raise
        with contextlib.suppress(BrokenPipeError):
            print(f"error: {bounded(sentence_of(error))}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        said = str(error).removeprefix(_FULL).strip(": ")
        if isinstance(error, MemoryError) or _FULL in str(error):
            what, mend = "the memory is too small", "lower the batch sizes, or use a larger device"
        elif said.startswith("Unable to initialize backend"):
            what, mend = "JAX must find its devices", "correct JAX_PLATFORMS, or the installation"
        else:
            raise
        if os.environ.get("RASLIK_TRACEBACK"):
            raise
        what += f" ({bounded(said)})" if said else ""
        print(f"error: {what}: {mend}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):  # of `2>&1 | head`
            print(when_stopped, file=sys.stderr)
        return STOPPED


def _leave(status: int) -> int:
    """Returns the status 0, and ends the process here with any other.

    A thread of XLA may still compile. Python waits only for its own threads. XLA's threads end in a
    segmentation fault when the objects that they use are destroyed.
    """
    if status:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a pipe that is closed
                stream.flush()
        os._exit(status)
    return status


# The status of a command that Ctrl-C or SIGTERM stopped.
STOPPED = 130
# The closing text of commands whose work is kept.
GOES_ON = "stopped: start the same command again to go on from here"


def _watch_signals(when_stopped: str) -> None:
    """Makes Ctrl-C and SIGTERM a KeyboardInterrupt; a second one ends the process at once.

    Python's own handlers wait until XLA has compiled. This thread does not wait. Results are
    written whole or not at all, so it may end the process at any moment.
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    source, target = os.pipe()
    os.set_blocking(target, False)
    is_first = [True]

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        if is_first:
            is_first.clear()
            if frame and frame.f_code.co_name == "_xla_gc_callback":
                # Python ignores what is raised there: it ends at once, as at a second signal.
                os.kill(os.getpid(), number)
            else:
                raise KeyboardInterrupt

    def next_number() -> int:
        while (number := os.read(source, 1)[0]) not in numbers:
            pass
        return number

    def end_at_second() -> None:
        number = next_number()
        # A call that blocks does not see a signal that came just before it, or to another thread.
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        next_number()  # its own
        next_number()
        os.write(2, f"{when_stopped}\n".encode())
        os._exit(STOPPED)

    for number in numbers:
        signal.signal(number, interrupt)
    signal.set_wakeup_fd(target, warn_on_full_buffer=False)
    threading.Thread(target=end_at_second, daemon=True).start()


# Faster compilations take about as long to read. JAX drops the program unused for longest.
_CACHE = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": 4 * 10**9,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.1,
}


# Of glibc's malloc.h, and what they are set to: bytes that are kept, and counts.
_KEPT_HEAP = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_MMAP_MAX": (-4, 0), "M_ARENA_MAX": (-8, 1)}


def keep_heap() -> None:
    """Lets glibc keep up to 2 GB of freed memory, unless the environment sets its malloc.

    A CPU's programs allocate their buffers at every call, 1 GB for a step of unlearning a model of
    135M weights. Otherwise the kernel would clear the same pages each time, which takes a tenth of
    the training.
    """
    names = ("MALLOC_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] == "glibc" and not any(one.startswith(names) for one in os.environ):
        mallopt = ctypes.CDLL(None).mallopt
        for number, value in _KEPT_HEAP.values():
            mallopt(number, value)


def reserve_memory() -> None:
    """Sets in the environment, before jax is imported, the share of a GPU's memory to reserve."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is older
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = str(gpus.SHARE)


def keep_compiled(is_kept: bool) -> None:
    """Sets the folder of compiled programs, in the environment and in jax if that is imported.

    The user's settings of JAX's own variables stay. Each kind of machine has a folder of its own:
    JAX's key does not know the processor that a program was compiled for.
    """
    if not is_kept:
        _set_of_jax("JAX_ENABLE_COMPILATION_CACHE", False)
        return
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(parent) / "raslik_jax" / f"compiled-{machine.kind()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written: every start compiles
        return
    if os.access(folder, os.W_OK):
        _set_of_jax("JAX_COMPILATION_CACHE_DIR", str(folder))
        for name, value in _CACHE.items():
            if name not in os.environ:
                _set_of_jax(name, value)


def _set_of_jax(name: str, value: bool | float | str) -> None:
    """Sets a variable of JAX, which reads the environment when it is imported and not later.

    A program that adds members of its own may have imported it before the command starts.
    """
    os.environ[name] = str(value).lower() if isinstance(value, bool) else str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name.lower(), value)


class _Printable(io.TextIOBase):
    """A stream on which control characters of texts are shown and not obeyed."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(printable(text))
        except BrokenPipeError:  # of `| head`: it ends as by Ctrl-C
            raise KeyboardInterrupt from None

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
