"""Several processes as one job: start, global arrays, and a clear end when one is lost.

Every process runs the same program; arrays are global, each process holds the shards of its own
devices, and jit does the rest. Sketching needs none of this (see `raslik_jax.index.claims`).
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from raslik_jax.base.messages import shown
from raslik_jax.parallel import local_gpus, meshes, processes
from raslik_jax.parallel.processes import LOST_PROCESS_STATUS as LOST_PROCESS_STATUS

# What collectives and the coordination service say when a peer is gone.
_SIGNS_OF_LOSS = ("gloo", "closed by peer", "reset by peer", "unavailable", "deadline_exceeded")
# For how long processes wait for the first one, and for its name to be known.
_START_SECONDS, _NAME_SECONDS = 300, 60
# For how long one that was told of a loss by a collective waits for its own connections to tell.
_WATCH_SECONDS = 5
AUTO = "auto"  # for a coordinator that the launcher names


@contextlib.contextmanager
def job(
    coordinator: str,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
    num_cpu_devices: int | None = None,
    lost_after_s: int = 100,
) -> Iterator[None]:
    """Joins this process to a job, and ends it with one sentence when the job loses another.

    To be entered before anything else of JAX. A dead process's connections close at once, and each
    process watches one to process 0, so all end within a moment; a lost machine or network is
    noticed within half a minute. A process that raises ends the others when it exits; an error that
    the first process raises alike is left to it: the others end in silence, with its status.

    Args:
      coordinator: host:port of process 0; "auto" where Slurm, Kubernetes or Open MPI has started
        the processes, which JAX then asks.
      num_processes, process_id: of the job, and this one's number from 0.
      num_cpu_devices: run on so many CPU devices, for trying things out without accelerators.
      lost_after_s: seconds without a heartbeat after which JAX counts a process as lost.

    Example:
      with distributed.job("host0:1234", num_processes=2, process_id=rank):
        mesh = meshes.make_mesh()
    """
    if num_cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    is_auto = coordinator == AUTO
    if process_id and not is_auto:
        _await(coordinator)
    try:
        jax.distributed.initialize(
            None if is_auto else coordinator,
            num_processes=num_processes,
            process_id=process_id,
            heartbeat_timeout_seconds=lost_after_s,
        )
        seen = _look()
    except (ValueError, RuntimeError) as error:
        mend = "check that all processes are started with the same --coordinator"
        if is_auto:
            mend = "start them by srun, mpirun or a Job of Kubernetes, or give --coordinator"
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f"the processes of the job must find each other ({reason}): {mend}") from (
            error
        )
    _take_gpus(seen)
    if is_auto:  # what the launcher said; JAX keeps it to itself
        coordinator = str(jax._src.distributed.global_state.coordinator_address)
    own = processes.Job(
        jax.process_index(),
        jax.process_count(),
        _connect(coordinator, num_processes=jax.process_count(), process_id=jax.process_index()),
        apart=lambda: jax.set_mesh(meshes.mesh_of(jax.local_devices()[:1])),
    )
    processes.join(own)
    try:
        yield
    except BaseException as error:
        is_loss = any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)
        if is_loss and own.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            # Whoever watches the connections knows whether the first one has said why, and ends us.
            time.sleep(_WATCH_SECONDS)
            own.end(str(error).splitlines()[0][:200])
        # This process's own failure. The others end when it exits, and no earlier: JAX aborts a
        # process that misses its coordinator, and the error has to be seen first.
        is_said, status = own.fail(error), processes.status_of(error)
        atexit.register(_leave, status)
        if is_said:
            raise processes.FirstFailed(status) from error
        raise
    finally:
        processes.join(None)
    own.leave()
    jax.distributed.shutdown()


def _look() -> list[local_gpus.Seen]:
    """Returns the GPUs that each process may open; JAX has opened none yet."""
    own, platforms = local_gpus.look(), getattr(jax.config, "jax_platforms", None) or "cuda"
    if "JAX_LOCAL_DEVICE_IDS" in os.environ or not {"cuda", "gpu"} & {*platforms.split(",")}:
        own = own._replace(gpus=())  # divided already, or not to be opened
    state: Any = jax._src.distributed.global_state  # of jax's own surface nothing tells before
    state.client.key_value_set(f"raslik/gpus/{state.process_id}", json.dumps(own))
    names = [f"raslik/gpus/{number}" for number in range(state.num_processes)]
    values = [state.client.blocking_key_value_get(name, _START_SECONDS * 1000) for name in names]
    return [local_gpus.Seen(name, tuple(gpus)) for name, gpus in map(json.loads, values)]


def _take_gpus(seen: Sequence[local_gpus.Seen]) -> None:
    """Divides the GPUs of each machine; a ValueError, of the first process, where that cannot be.

    It replaces what JAX takes of a launcher: one for each process, by its number there.
    """
    number = jax._src.distributed.global_state.process_id
    try:
        taken = local_gpus.divide(seen)
    except ValueError as error:
        if number:  # all find it
            raise processes.FirstFailed(1) from error
        raise
    if seen[number].gpus:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, taken[number])))


def _await(coordinator: str) -> None:
    """Waits until the first process answers; a ValueError where it does not, as JAX would abort."""
    host, _, port = coordinator.rpartition(":")
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            return
        except (OSError, OverflowError) as error:
            # The name of a pod may be known only once it runs.
            most = _NAME_SECONDS if isinstance(error, socket.gaierror) else _START_SECONDS
            if time.monotonic() - begun > most or isinstance(error, OverflowError):
                raise ValueError(
                    f"--coordinator must be where process 0 listens, got no answer from "
                    f"{shown(coordinator, 80)} ({error}): start it, or correct the address"
                ) from error
            time.sleep(0.2)


def _connect(coordinator: str, *, num_processes: int, process_id: int) -> list[socket.socket]:
    """Connections between process 0 and all others; the port travels as a JAX array."""
    if process_id:
        port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
        return [socket.create_connection((coordinator.rpartition(":")[0].strip("[]"), port))]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1]))
        return [server.accept()[0] for _ in range(num_processes - 1)]


def _leave(status: int) -> NoReturn:
    """Ends a failed process at its exit, its connections with it, and so the others."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not sys.exit: the shutdown of jax.distributed would wait for a lost process.
        os._exit(status)


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
