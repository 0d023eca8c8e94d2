"""The mesh of every stage: its devices and the layout of arrays on them.

Examples are split over its axis `data`. Every device computes its own rows, and sums travel once.
JAX's own context holds the mesh (`jax.set_mesh`). Without one the mesh is one device, and the same
programs run.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from raslik_jax.base.axes import Tree

DATA = "data"
_WHOLE, _ROWS = PartitionSpec(), PartitionSpec(DATA)
_KINDS = (AxisType.Auto,)  # the compiler lays out what is not split here
# Major compute capability of the first GPUs that multiply bfloat16.
_KERNELS_FROM = 8
_ONE = AbstractMesh((1,), (DATA,), _KINDS)
_platform = contextvars.ContextVar("platform", default="")


def make_mesh(data: int = 0) -> Mesh:
    """Returns a mesh of `data` devices, 0 for all; a ValueError if it does not divide all."""
    devices = jax.devices()
    data = data or len(devices)
    if jax.process_count() > 1 and data != len(devices):
        raise ValueError(
            f"--mesh.data must be all {len(devices)} devices of a job of {jax.process_count()} "
            f"processes, got {data}: leave it out, or start fewer processes"
        )
    if len(devices) % data:
        kind = devices[0].platform.upper()
        raise ValueError(
            f"--mesh.data must divide the number of devices, which is {len(devices)} ({kind}), got "
            f"{data}: leave it out for all of them"
        )
    return mesh_of(devices[:data])


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of some devices, which need not exist on this machine."""
    return Mesh(np.array(devices), (DATA,), _KINDS)


@contextlib.contextmanager
def use(mesh: Mesh) -> Iterator[Mesh]:
    """A context: calls inside run on a mesh."""
    # Arrays of one device need no layout, and what has none is never compiled for two.
    with jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext():
        yield mesh


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """A context: calls inside run on the processor, for weights larger than a device."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        yield
        return
    with jax.set_mesh(mesh_of([device])), jax.default_device(device):
        yield


def current() -> AbstractMesh:
    """Returns the mesh of the context, also while a function is traced; else one device's."""
    found = jax.sharding.get_abstract_mesh()
    return found if DATA in found.axis_names else _ONE


def num_shards() -> int:
    """Returns the number of parts that a batch is split into."""
    return current().shape[DATA]


def device_memory() -> int:
    """Returns the bytes of memory of a device; 0 if unknown, as for a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def platform() -> str:
    """Returns the platform that a function is traced for: the default one unless given."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def traced_for(name: str) -> Iterator[None]:
    """A context: traces for devices of another platform; "" is the default one."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def runs_kernels() -> bool:
    """Says whether Triton's kernels may run here: not on NVIDIA GPUs before Ampere (8.0).

    Those GPUs do not multiply bfloat16. Without a GPU it is True: programs are then compiled for
    GPUs that can.
    """
    found = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    major = found.partition(".")[0]
    return not major.isdigit() or int(major) >= _KERNELS_FROM


def by_kernel(*arrays: jax.Array, kernel: Callable[..., Any], twin: Callable[..., Any]) -> Any:
    """Returns the result of a kernel for NVIDIA GPUs; elsewhere that of its twin by XLA."""
    if not runs_kernels():
        return twin(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=twin)


def round_up(rows: int, shards: int = 0) -> int:
    """Returns a number of rows, rounded up to equal shares of all devices."""
    shards = shards or num_shards()
    return -(-rows // shards) * shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
    """A leaf that is split over the mesh along an axis, counted from the end because of scans."""

    array: Any
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def spec(self) -> PartitionSpec:
        """The layout of the leaf on the mesh."""
        return PartitionSpec(*[None] * (self.array.ndim + self.axis), DATA)


def is_split(leaf: object) -> bool:
    """Says whether this is a split leaf. A walk over a tree stops at it."""
    return isinstance(leaf, Split)


def _map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    return jax.tree.map(function, tree, is_leaf=is_split)


def specs_of(tree: Tree) -> Tree:
    """Returns the layout of each leaf of a tree on the mesh."""
    return _map(lambda leaf: leaf.spec if is_split(leaf) else _WHOLE, tree)


def map_specs(function: Callable[[Any, PartitionSpec], Any], tree: Tree) -> Tree:
    """Returns the tree of a function's results for each array and its layout on the mesh."""

    def of_leaf(leaf: Any) -> Any:
        if is_split(leaf):
            return Split(function(leaf.array, leaf.spec), leaf.axis)
        return function(leaf, _WHOLE)

    return _map(of_leaf, tree)


def joined(tree: Tree) -> Tree:
    """Returns a tree in its form outside of programs, in any layout."""
    return _map(lambda leaf: leaf.array if is_split(leaf) else leaf, tree)


def gather(tree: Tree) -> Tree:
    """Returns the leaves of a tree whole; for functions that `by_rows` or `sum_rows` call."""

    def whole(leaf: Any) -> Any:
        if not is_split(leaf):
            return leaf
        axis = leaf.array.ndim + leaf.axis
        return jax.lax.all_gather(leaf.array, DATA, axis=axis, tiled=True)

    return _map(whole, tree)


def by_rows(function: Callable[..., Any], *whole: Any, rows: Any) -> Any:
    """Returns function(*whole, rows); each device computes its own rows of the result.

    `rows` and the result are trees of arrays with a leading axis, a multiple of `num_shards`.
    `gather` is the only exchange between devices.
    """
    return _map_shards(function, specs_of(whole), _ROWS)(whole, rows)


def sum_rows(function: Callable[..., Any], *whole: Any, rows: Any) -> Any:
    """Returns the sum over all devices of function(*whole, their own rows), added up once."""

    def total(*arguments: Any) -> Any:
        return jax.lax.psum(function(*arguments), DATA)

    return _map_shards(total, specs_of(whole), _WHOLE)(whole, rows)


def _map_shards(function: Callable[..., Any], whole_specs: Any, out_specs: Any) -> Any:
    # The checker of replication does not know the rules of kernels and custom gradients.
    mapped = jax.shard_map(
        lambda whole, rows: function(*whole, rows),
        mesh=current(),
        in_specs=(whole_specs, _ROWS),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped)  # for callers that are not jitted


def are_all(is_so: jax.Array) -> jax.Array:
    """Returns whether something holds on all devices; for functions that `by_rows` calls."""
    return jax.lax.psum((~is_so).astype(np.int32), DATA) == 0


def place(tree: Tree) -> Tree:
    """Returns a tree of arrays at their places on the mesh, so that no call sends them.

    An array that is not on the mesh yet is the same in every process. Each process takes its part.
    """
    if num_shards() == 1:
        return tree
    return map_specs(_put, tree)


def place_rows(tree: Any) -> Any:
    """Returns arrays with a leading axis of rows split over the mesh; every process has all rows.

    The rows are a multiple of `num_shards`.
    """
    return tree if num_shards() == 1 else jax.tree.map(lambda leaf: _put(leaf, _ROWS), tree)


def _put(leaf: Any, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        return jax.jit(lambda own: own, out_shardings=sharding)(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def fetch(leaf: Any) -> np.ndarray:
    """Returns the whole of an array in every process, from wherever its parts are."""
    if is_elsewhere(leaf):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def own_devices() -> list[jax.Device | None]:
    """Returns the devices of the mesh that are this process's; None for the default one."""
    if num_shards() == 1:
        return [None]
    return [*jax.sharding.get_mesh().local_devices]


def is_elsewhere(leaf: Any) -> bool:
    """Says whether other processes hold parts of an array that this one lacks."""
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    return not (is_here or leaf.is_fully_replicated)
