"""Several processes as one job: start, global arrays, and a clear end when one is lost.

Every process runs the same program; arrays are global, each process holds the shards of its own
devices, and jit does the rest. Sketching needs none of this (see `raslik_jax.index.claims`).
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

# The exit status of a process whose job lost another one (EX_UNAVAILABLE of sysexits.h).
LOST_PROCESS_STATUS = 69
# What collectives and the coordination service say when a peer is gone.
_SIGNS_OF_LOSS = ("gloo", "closed by peer", "reset by peer", "unavailable", "deadline_exceeded")
_FAREWELL = b"."


@contextlib.contextmanager
def job(
    coordinator: str,
    *,
    num_processes: int,
    process_id: int,
    num_cpu_devices: int | None = None,
    lost_after_s: int = 100,
) -> Iterator[None]:
    """Joins this process to a job, and ends it with one sentence when the job loses another.

    To be entered before anything else of JAX. A dead process's connections close at once, and each
    process watches one to process 0, so all end within a moment; a lost machine or network JAX
    notices when heartbeats stay out. A process that raises ends the others when it exits.

    Args:
      coordinator: host:port of process 0.
      num_processes, process_id: of the job, and this one's number from 0.
      num_cpu_devices: run on so many CPU devices, for trying things out without accelerators.
      lost_after_s: seconds without a heartbeat after which JAX counts a process as lost.

    Example:
      with distributed.job("host0:1234", num_processes=2, process_id=rank):
        mesh = distributed.data_mesh()
    """
    if num_cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    jax.distributed.initialize(
        coordinator,
        num_processes=num_processes,
        process_id=process_id,
        heartbeat_timeout_seconds=lost_after_s,
    )
    connections = _connect(coordinator, num_processes=num_processes, process_id=process_id)
    failed = threading.Event()
    for connection in connections:
        threading.Thread(target=_watch, args=(connection, failed), daemon=True).start()
    try:
        yield
    except BaseException as error:
        is_loss = any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)
        if is_loss and num_processes > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            _end(str(error).splitlines()[0][:200])
        # This process's own failure. The others end when it exits, and no earlier: JAX aborts a
        # process that misses its coordinator, and the error has to be seen first.
        failed.set()
        atexit.register(_leave, _status_of(error))
        raise
    for connection in connections:
        connection.sendall(_FAREWELL)
    jax.distributed.shutdown()


def _connect(coordinator: str, *, num_processes: int, process_id: int) -> list[socket.socket]:
    """Connections between process 0 and all others; the port travels as a JAX array."""
    if process_id:
        port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
        return [socket.create_connection((coordinator.rsplit(":", 1)[0], port))]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1]))
        return [server.accept()[0] for _ in range(num_processes - 1)]


def _watch(connection: socket.socket, failed: threading.Event) -> None:
    try:
        last_word = connection.recv(1)
    except OSError:
        last_word = b""
    if last_word != _FAREWELL and not failed.is_set():
        _end("its connection closed")


def _status_of(error: BaseException) -> int:
    """Returns the exit status that a shell sees of an error nobody catches."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


def _end(reason: str) -> NoReturn:
    print(
        f"error: process {jax.process_index()} of {jax.process_count()} lost another process of "
        f"its job and ends; what was stored is whole, start all processes again ({reason})",
        file=sys.stderr,
        flush=True,
    )
    os._exit(LOST_PROCESS_STATUS)  # as in _leave, but the main thread may hold the output


def _leave(status: int) -> NoReturn:
    """Ends a failed process at its exit, its connections with it, and so the others."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not sys.exit: the shutdown of jax.distributed would wait for a lost process.
        os._exit(status)


def data_mesh() -> Mesh:
    """Returns all devices of all processes in one axis, `data`."""
    # Auto: the compiler lays out what a model computes, and models say nothing of sharding.
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))


def shard_leading(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: Any,
    rows: Callable[[slice], Shaped[np.ndarray, "..."]],
) -> jax.Array:
    """Returns a global array whose leading axis, a multiple of the devices, is split over them.

    `rows` makes some of its rows; it is called for this process's rows only.
    """
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        start, stop, _ = (index or (slice(None),))[0].indices(shape[0])
        return np.asarray(rows(slice(start, stop)), dtype)

    return jax.make_array_from_callback(shape, sharding, part)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Returns a tree of arrays, the same in every process, as global arrays on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def everywhere(leaf: Any) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index or ()])

    return jax.tree.map(everywhere, tree)
