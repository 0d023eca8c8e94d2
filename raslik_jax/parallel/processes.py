"""Several processes as one job: the first one decides and writes, all compute.

Every process runs the same program and reaches the same calls in the same order. Arrays are global:
each process holds the shards of its own devices. The decisions of the first process go to the
others through the key-value store of JAX's coordination service. Without a job there is one
process, and every function here is a plain call.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from raslik_jax.base.lazy import jax
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, setting
from raslik_jax.parallel import local_gpus

_T = TypeVar("_T")
AUTO = "auto"  # for a coordinator that the launcher names
# The exit status of a process that sees the loss of another one (EX_UNAVAILABLE of sysexits.h).
LOST_PROCESS_STATUS = 69
# Errors of collectives and of the coordination service when a peer is gone.
_SIGNS_OF_LOSS = ("gloo", "closed by peer", "reset by peer", "unavailable", "deadline_exceeded")
# For how long a disk of the network may hide from others what the first process has written.
_VISIBLE_SECONDS = 90
# For how long processes wait for all to be there, and a failed one for others that fail alike.
_START_MS, _MEET_MS, _ALIKE_MS = 300_000, 3_600_000, 5_000
# Python sees Ctrl-C between two of these waits only.
_STEP_MS = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Settings):
    """The processes that run a command together; the options of a command begin with these."""

    coordinator: str = setting(
        "",
        "Address host:port of the first of several processes, equal in all of them. auto: from "
        "Slurm, Kubernetes or Open MPI.",
    )
    num_processes: int = setting(
        0,
        "With --coordinator: number of processes. Those of one machine share its GPUs evenly.",
        low=0,
    )
    process_id: int = setting(-1, "With --coordinator: number of this process, from 0.", low=-1)

    def problems(self) -> Iterator[str]:
        """Yields the missing and the superfluous settings of a job."""
        given = self.num_processes, self.process_id
        if self.coordinator in ("", "auto"):
            if given != (0, -1):
                need = "--coordinator=HOST:PORT" if not self.coordinator else "no process number"
                mend = "give all three" if not self.coordinator else "leave both out"
                yield f"--num_processes and --process_id need {need}, got {given}: {mend}"
        elif not self.coordinator.rpartition(":")[2].isdecimal() or ":" not in self.coordinator:
            must = "must be host:port or auto"
            yield f"--coordinator {must}, got {shown(self.coordinator)}: name the first process"
        elif self.num_processes < 1 or self.process_id < 0:
            yield "--coordinator needs --num_processes and --process_id: give all three"
        elif not 0 <= self.process_id < self.num_processes:
            must = f"must be 0 to --num_processes - 1, which is {self.num_processes - 1}"
            yield f"--process_id {must}, got {self.process_id}: give each process its own"


class FirstFailed(SystemExit):
    """Ends a process because the first process failed and printed the reason."""


def status_of(error: BaseException) -> int:
    """Returns the exit status that a shell sees after an uncaught error."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


class Job:
    """This process's place in a job, and JAX's client of its coordination service."""

    def __init__(self, number: int = 0, count: int = 1, client: Any = None):
        self.number, self.count, self._client = number, count, client
        self.is_apart = False
        # The number of messages and meetings, the same in all processes.
        self._told, self._met = itertools.count(), itertools.count()

    def tell(self, message: Any) -> None:
        """Sends a message of the first process to all others."""
        self._client.key_value_set(f"raslik/told/{next(self._told)}", json.dumps(message))

    def hear(self) -> Any:
        """Returns the next message of the first process; raises FirstFailed if it has failed."""
        message = self._get(f"raslik/told/{next(self._told)}")
        if "failed" in message:
            raise FirstFailed(message["failed"])
        return message["value"]

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order."""
        self._client.key_value_set(f"raslik/{name}/{self.number}", json.dumps(value))
        names = [f"raslik/{name}/{number}" for number in range(self.count)]
        return [self._get(name, _START_MS) for name in names]

    def meet(self) -> None:
        """Waits until all processes have called it."""
        if self.count > 1:
            self._client.wait_at_barrier(f"raslik/met/{next(self._met)}", _MEET_MS)

    def _get(self, name: str, most_ms: float = float("inf")) -> Any:
        until = time.monotonic() + most_ms / 1000
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(name, _STEP_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > until:
                    raise

    def fail(self, error: BaseException) -> tuple[bool, bool]:
        """Returns whether all processes fail, and whether the first one prints the reason."""
        is_said = isinstance(error, FirstFailed)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self.number:
                self._client.key_value_set("raslik/failed", json.dumps(repr(error)))
            elif not is_said:
                is_said = self._get("raslik/failed", _ALIKE_MS) == repr(error)
            self._client.wait_at_barrier("raslik/failed", _ALIKE_MS)
            return True, is_said
        return False, is_said

    def end(self, reason: str) -> NoReturn:
        """Ends this process because another one is lost."""
        print(
            f"error: process {self.number} of {self.count} lost another process of its job and "
            f"ends. The stored results are whole: start all processes again ({reason})",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(LOST_PROCESS_STATUS)  # the shutdown of JAX would wait for the lost process


_ALONE = Job()
_job = _ALONE


def join(job: Job | None) -> None:
    """Makes this process a member of a job; None: it is alone again."""
    global _job
    _job = job or _ALONE


@contextlib.contextmanager
def job(
    coordinator: str,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_s: int = 10,
) -> Iterator[None]:
    """Joins this process to a job, and ends it when the job loses another process.

    Enter it before any other call of JAX. If a process is lost, a collective of another process may
    fail. The other process then ends with one sentence and status 69. JAX aborts the others with
    its own message: at once if process 0 is lost, otherwise when heartbeats are missing. A process
    that raises an error ends the others when it exits. If all processes raise the same error, only
    the first one prints it. The others end with the same status.

    Args:
      coordinator: host:port of process 0; "auto" asks Slurm, Kubernetes or Open MPI, if one of them
        started the processes.
      num_processes, process_id: number of the job's processes, and the number of this one, from 0.
      heartbeat_s: seconds without a heartbeat after which JAX counts a process as lost.

    Example:
      with processes.job("host0:1234", num_processes=2, process_id=rank):
        mesh = meshes.make_mesh()
    """
    is_auto = coordinator == AUTO
    try:
        jax.distributed.initialize(
            None if is_auto else coordinator,
            num_processes=num_processes,
            process_id=process_id,
            heartbeat_timeout_seconds=heartbeat_s,
        )
        state: Any = jax._src.distributed.global_state  # of jax's own surface nothing gives these
        own = Job(state.process_id, state.num_processes, state.client)
        seen = own.gather("gpus", _look())
    except (ValueError, RuntimeError) as error:
        mend = "check that all processes are started with the same --coordinator"
        if is_auto:
            mend = "start them by srun, mpirun or a Job of Kubernetes, or give --coordinator"
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f"the processes of the job must find each other ({reason}): {mend}") from (
            error
        )
    join(own)
    try:
        _take_gpus(own, [local_gpus.Seen(name, tuple(gpus)) for name, gpus in seen])
        jax.devices()  # opens those of all processes: each waits here for the others
        yield
    except BaseException as error:
        is_loss = any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)
        if is_loss and own.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            own.end(str(error).splitlines()[0][:200])
        do_all_fail, is_said = own.fail(error)
        if do_all_fail:
            jax.distributed.shutdown()
        else:
            # The others end when this process exits. The error has to be seen first.
            atexit.register(_leave, status_of(error))
        if is_said:
            raise FirstFailed(status_of(error)) from error
        raise
    finally:
        join(None)
    jax.distributed.shutdown()


def _look() -> local_gpus.Seen:
    """Returns the GPUs that this process may open; JAX has opened none yet."""
    own, platforms = local_gpus.look(), getattr(jax.config, "jax_platforms", None) or "cuda"
    if "JAX_LOCAL_DEVICE_IDS" in os.environ or not {"cuda", "gpu"} & {*platforms.split(",")}:
        own = own._replace(gpus=())  # divided already, or not to be opened
    return own


def _take_gpus(own: Job, seen: Sequence[local_gpus.Seen]) -> None:
    """Divides the GPUs of each machine; all processes raise a ValueError if that is impossible.

    It replaces JAX's rule for launchers: one GPU per process, by the process's number on the
    machine.
    """
    taken = local_gpus.divide(seen)
    if seen[own.number].gpus:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, taken[own.number])))


def _leave(status: int) -> NoReturn:
    """Ends a failed process at its exit, which ends the others."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # the shutdown of JAX would wait for the others


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
    """Returns in every process a JSON value that the first one makes; an error there ends all."""
    if count() == 1:
        return make()
    if not is_first():
        found: _T = _job.hear()
        return found
    try:
        value = make()
    except Exception as error:
        _job.tell({"failed": status_of(error)})
        raise
    _job.tell({"value": value})
    return value


def alone(make: Callable[[], _T]) -> _T | None:
    """Returns the result of the first process while the others wait; they get None.

    It computes on its own device.
    """
    if count() == 1:
        return make()
    made: list[_T] = []

    def apart() -> None:
        from raslik_jax.parallel import meshes  # it takes jax with it

        with jax.set_mesh(meshes.mesh_of(jax.local_devices()[:1])):
            _job.is_apart = True
            try:
                made.append(make())
            finally:
                _job.is_apart = False

    from_first(apart)
    return made[0] if made else None


def sum_processes(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the values of all processes; a process without one has 0."""
    if count() == 1:
        return values
    from jax.experimental import multihost_utils  # it takes jax with it

    return np.asarray(multihost_utils.process_allgather(values)).sum(axis=0, dtype=values.dtype)


def when_visible(read: Callable[[], _T]) -> _T:
    """Returns the content of the first process's files as soon as it is visible.

    A network disk may show new files a moment later. Until then it tries to read again.
    """
    until = time.monotonic() + _VISIBLE_SECONDS
    while number() and time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            return read()
        time.sleep(0.1)
    return read()


@contextlib.contextmanager
def own_folder(folder: pathlib.Path, *, shared: Collection[str]) -> Iterator[pathlib.Path]:
    """Yields the folder to which this process writes a result; only the first one's is kept.

    The others write to a copy that is deleted, so that all run the same program. Large files of
    weights are not copied. Parts that are `shared` are those of the first process.
    """
    if is_first():
        _job.meet()
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="raslik-", ignore_cleanup_errors=True) as parent:
        copy, ignored = pathlib.Path(parent, folder.name), (*shared, "*.safetensors", ".*")
        how: Any = {"ignore": shutil.ignore_patterns(*ignored), "dirs_exist_ok": True}
        when_visible(lambda: shutil.copytree(folder, copy, **how))
        for name in shared:
            (copy / name).symlink_to(folder.absolute() / name)
        _job.meet()  # the first one changes the folder from here on
        yield copy
