"""Several processes that run one program: the first one decides and writes, all compute.

All come to the same calls in the same order. What the first has decided goes to the others over the
connections that also tell when one is lost (`distributed.job` opens them). Without a job there is
one process, and every function here is a plain call.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, setting

_T = TypeVar("_T")
# The exit status of a process whose job lost another one (EX_UNAVAILABLE of sysexits.h).
LOST_PROCESS_STATUS = 69
_FAREWELL = b"\n"
# For how long a disk of the network may hide from others what the first process has written.
_VISIBLE_SECONDS = 90
# For how long a process that fails waits to hear whether the first one fails alike.
_ALIKE_SECONDS = 10.0
# An idle connection is asked whether a machine is there: after seconds, how far apart, how often.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Settings):
    """The processes that go through a command together; a command's options begin with these."""

    coordinator: str = setting(
        "",
        "Of several processes: host:port of the first one, which all are given; auto: as Slurm, "
        "Kubernetes or Open MPI say, which have started them.",
    )
    num_processes: int = setting(
        0,
        "--coordinator: processes of the job; those of one machine divide its GPUs evenly.",
        low=0,
    )
    process_id: int = setting(-1, "--coordinator: number of this process, from 0.", low=-1)

    def problems(self) -> Iterator[str]:
        """Yields what is missing of a job, or too much."""
        given = self.num_processes, self.process_id
        if self.coordinator in ("", "auto"):
            if given != (0, -1):
                need = "--coordinator=HOST:PORT" if not self.coordinator else "no number of its own"
                mend = "give all three" if not self.coordinator else "leave both out"
                yield f"--num_processes and --process_id need {need}, got {given}: {mend}"
        elif not self.coordinator.rpartition(":")[2].isdecimal() or ":" not in self.coordinator:
            must = "must be host:port or auto"
            yield f"--coordinator {must}, got {shown(self.coordinator)}: name the first process"
        elif not 0 <= self.process_id < self.num_processes:
            must = f"must be 0 to --num_processes - 1, which is {self.num_processes - 1}"
            yield f"--process_id {must}, got {self.process_id}: give each process its own"


class FirstFailed(SystemExit):
    """Ends a process because the first one has failed, which says why."""


def status_of(error: BaseException) -> int:
    """Returns the exit status that a shell sees of an error nobody catches."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


class Job:
    """This process's place in a job, and its connections: of the first to all others, else one.

    `apart` gives the context in which the first process computes without the others.
    """

    def __init__(
        self,
        number: int = 0,
        count: int = 1,
        connections: Collection[socket.socket] = (),
        apart: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.number, self.count, self.apart = number, count, apart
        self.is_apart = False
        self._connections, self._messages = connections, queue.SimpleQueue[Any]()
        self._has_failed, self._first_failed = threading.Event(), threading.Event()
        self._failure: dict[str, Any] = {}  # the first one's, as `tell_failure` tells it
        self._watchers = [
            threading.Thread(target=self._watch, args=(connection,), daemon=True)
            for connection in connections
        ]
        for connection, watcher in zip(connections, self._watchers, strict=True):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name) and connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            watcher.start()

    def _watch(self, connection: socket.socket) -> None:
        """Takes messages until the farewell; where a connection ends without one, so do we."""
        line = b""
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                if line == _FAREWELL:
                    return
                message = json.loads(line)
                self._messages.put(message)
                if "failed" in message:
                    self._failure = message
                    self._first_failed.set()
        if self._failure and not self._has_failed.is_set():  # the first one has said why
            os._exit(self._failure["status"])
        elif not self._has_failed.is_set():
            self.end("its connection closed")

    def tell(self, message: Any) -> None:
        """Sends a message: the first process to all others, another to the first."""
        line = json.dumps(message).encode() + b"\n"
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the watcher sees that it is lost
                connection.sendall(line)

    def hear(self) -> Any:
        """Returns the next message of the first process."""
        message = self._messages.get()
        if "failed" in message:
            raise FirstFailed(message["status"])
        return message["value"]

    def meet(self) -> None:
        """Waits until all processes have come here."""
        if self.number:
            self.tell({})
            self.hear()
        else:
            for _ in range(self.count - 1):
                self._messages.get()
            self.tell({"value": None})

    def leave(self) -> None:
        """Says farewell: this process has come to its end."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(_FAREWELL)

    def tell_failure(self, error: BaseException) -> None:
        """Tells the others that the first process fails, which says why."""
        self.tell({"failed": repr(error), "status": status_of(error)})

    def fail(self, error: BaseException) -> bool:
        """Notes that this process fails by itself, so that it does not say that one is lost.

        Returns whether the first process fails alike: it alone says why, and has done so by then.
        """
        self._has_failed.set()
        if not self.number:
            self.tell_failure(error)
            return False
        if not isinstance(error, FirstFailed):
            self._first_failed.wait(_ALIKE_SECONDS)
            if self._failure.get("failed") != repr(error):
                return False
        for watcher in self._watchers:  # until the first one has ended
            watcher.join(60)
        return True

    def end(self, reason: str) -> NoReturn:
        """Ends this process, whatever it does, because another one is lost."""
        print(
            f"error: process {self.number} of {self.count} lost another process of its job and "
            f"ends; what was stored is whole, start all processes again ({reason})",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(LOST_PROCESS_STATUS)  # the main thread may hold the output


_ALONE = Job()
_job = _ALONE


def join(job: Job | None) -> None:
    """Makes this process one of a job; None: it stands alone again."""
    global _job
    _job = job or _ALONE


def count() -> int:
    """Returns the number of processes that compute together."""
    return 1 if _job.is_apart else _job.count


def number() -> int:
    """Returns the number of this process, from 0."""
    return _job.number


def is_first() -> bool:
    """Says whether this process decides and writes."""
    return _job.number == 0


def from_first(make: Callable[[], _T]) -> _T:
    """Returns in every process what the first one makes, a JSON value; an error of it ends all."""
    if count() == 1:
        return make()
    if not is_first():
        found: _T = _job.hear()
        return found
    try:
        value = make()
    except Exception as error:
        _job.tell_failure(error)
        raise
    _job.tell({"value": value})
    return value


def alone(make: Callable[[], _T]) -> _T | None:
    """Returns what the first process makes while the others wait, to whom it is None.

    What it computes there is computed on its own device.
    """
    if count() == 1:
        return make()
    made: list[_T] = []

    def apart() -> None:
        with _job.apart():
            _job.is_apart = True
            try:
                made.append(make())
            finally:
                _job.is_apart = False

    from_first(apart)
    return made[0] if made else None


def when_visible(read: Callable[[], _T]) -> _T:
    """Returns what is read of files of the first process, as soon as they are to be seen.

    A disk of the network may show them a moment later than made: until then an error of reading is
    no error of the others.
    """
    until = time.monotonic() + _VISIBLE_SECONDS
    while number() and time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            return read()
        time.sleep(0.1)
    return read()


def each_from_first(items: Iterable[_T]) -> Iterator[_T]:
    """Yields in every process the items of the first one, which alone goes through them."""
    own, no_more = iter(items), {"end": True}
    while (found := from_first(lambda: _next(own))) != no_more:
        yield found["item"]


def _next(items: Iterator[_T]) -> dict[str, Any]:
    for item in items:
        return {"item": item}
    return {"end": True}


@contextlib.contextmanager
def own_folder(folder: pathlib.Path, *, shared: Collection[str]) -> Iterator[pathlib.Path]:
    """Yields the folder that this process writes a result to: the first the one that is kept.

    The others write to a copy that is thrown away, so that all run the same program. Large files of
    weights are not copied; what is `shared` is that of the first process.
    """
    if is_first():
        _job.meet()
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="raslik-", ignore_cleanup_errors=True) as parent:
        copy, ignored = pathlib.Path(parent, folder.name), (*shared, "*.safetensors", ".*")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*ignored))
        for name in shared:
            (copy / name).symlink_to(folder.absolute() / name)
        _job.meet()  # the first one changes the folder from here on
        yield copy
