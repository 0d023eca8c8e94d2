"""The mesh that every stage runs on: its devices, and how arrays lie on them.

Examples are split over its axis `data`; every device computes the rows that it holds, and sums
travel once. JAX's own context holds the mesh (`jax.set_mesh`); where none is set it is one device,
and the same programs run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from raslik_jax.axes import Tree

DATA = "data"
_WHOLE, _ROWS = PartitionSpec(), PartitionSpec(DATA)
_KINDS = (AxisType.Auto,)  # the compiler lays out what is not split here
_ONE = AbstractMesh((1,), (DATA,), _KINDS)


def make_mesh(data: int = 0) -> Mesh:
    """Returns a mesh of so many devices; 0 for all. A ValueError where they do not divide all."""
    devices = jax.devices()
    data = data or len(devices)
    if len(devices) % data:
        kind = devices[0].platform.upper()
        raise ValueError(
            f"--mesh.data must divide the number of devices, which is {len(devices)} ({kind}), got "
            f"{data}: leave it out for all of them"
        )
    return mesh_of(devices[:data])


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of some devices, which need not be there."""
    return Mesh(np.array(devices), (DATA,), _KINDS)


@contextlib.contextmanager
def use(mesh: Mesh) -> Iterator[Mesh]:
    """Runs what is called inside on a mesh."""
    # Arrays of one device need no layout, and what has none is never compiled for two.
    with jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext():
        yield mesh


def current() -> AbstractMesh:
    """Returns the mesh of the context, also while a function is traced; else one device's."""
    found = jax.sharding.get_abstract_mesh()
    return found if DATA in found.axis_names else _ONE


def num_shards() -> int:
    """Returns the number of parts that a batch is split into."""
    return current().shape[DATA]


def round_up(rows: int, shards: int = 0) -> int:
    """Returns the rows of a batch that all devices have the same number of."""
    shards = shards or num_shards()
    return -(-rows // shards) * shards


def by_rows(function: Callable[..., Any], *whole: Any, rows: Any) -> Any:
    """Returns function(*whole, rows), each device making its own rows of the result.

    `rows` and the result are trees of arrays with a leading axis, a multiple of `num_shards`.
    Nothing is exchanged.
    """
    return _map_shards(function, _ROWS)(whole, rows)


def sum_rows(function: Callable[..., Any], *whole: Any, rows: Any) -> Any:
    """Returns the sum over all devices of function(*whole, their own rows), added up once."""

    def total(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, DATA), function(*arguments))

    return _map_shards(total, _WHOLE)(whole, rows)


def _map_shards(function: Callable[..., Any], out_specs: PartitionSpec) -> Any:
    # The checker of replication does not know the rules of kernels and custom gradients.
    mapped = jax.shard_map(
        lambda whole, rows: function(*whole, rows),
        mesh=current(),
        in_specs=(_WHOLE, _ROWS),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped)  # for callers that are not jitted


def are_all(is_so: jax.Array) -> jax.Array:
    """Returns whether something holds on all devices; for functions that `by_rows` calls."""
    return jax.lax.psum((~is_so).astype(np.int32), DATA) == 0


def replicate(tree: Tree) -> Tree:
    """Returns a tree of arrays whole on every device of the mesh, so that no call sends them."""
    if num_shards() == 1:
        return tree
    return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), _WHOLE))
