"""The layout of frozen weights on a mesh: whole on every device, or split by layer.

As in FSDP (Zhao et al. 2023, arXiv:2304.11277) every device holds a part of each large leaf. It
gathers the whole of a layer only while it runs it, forward and again backward.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from raslik_jax.base.axes import Tree
from raslik_jax.models import quantize
from raslik_jax.parallel import meshes, processes
from raslik_jax.parallel.meshes import Split, is_split

# The axes that may be split, from the end, by the name of a leaf and in the order of trial. Arrays
# below a quantized kernel have its name. Other leaves are small and whole.
RULES: dict[str, tuple[int, ...]] = {"kernel": (-2, -1), "embedding": (-1, -2)}
# Share of a device's memory that a whole model may take: the step needs the other half.
_MOST = 0.5


def axis_of(path: tuple[Any, ...], shape: tuple[int, ...], parts: int) -> int | None:
    """Returns the axis along which a leaf is split into this many parts; None for a whole leaf."""
    names = [getattr(entry, "key", "") for entry in path]
    own = len(shape) - (names[0] == "layers")  # the stack of layers is no axis of a leaf
    for name in RULES.keys() & set(names):
        for axis in RULES[name]:
            if -axis <= own and shape[axis] % parts == 0:
                return axis
    return None


def split(base: Tree, parts: int) -> Tree:
    """Returns base weights or their shapes, marked as split where the rules split them."""

    return jax.tree_util.tree_map_with_path(lambda path, leaf: _mark(path, leaf, parts), base)


def _mark(path: tuple[Any, ...], leaf: Any, parts: int) -> Any:
    axis = axis_of(path, leaf.shape, parts) if parts > 1 else None
    return leaf if axis is None else Split(leaf, axis)


class LayoutError(ValueError):
    """A base does not fit on the devices in the requested layout."""


def check(base: Tree, parts: int) -> None:
    """Refuses parts into which a kernel or an embedding cannot be split; takes shapes."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(base):
        is_large = path[-1].key in RULES
        if is_large and axis_of(path, leaf.shape, parts) is None:
            raise LayoutError(
                f"--mesh.base=sharded must split {'/'.join(entry.key for entry in path)} of "
                f"{leaf.shape[-2]:,} x {leaf.shape[-1]:,} into {parts} equal parts along an axis: "
                "set another --mesh.data, or --mesh.base=replicated"
            )


def choose_parts(kind: str, base: Tree, *, devices: int, memory: int) -> int:
    """Returns the number of parts of a split base by --mesh.base; 1 for none.

    `auto` splits a base, given by its shapes, that takes more than half of a device's `memory`; 0
    for unknown.
    """
    if kind == "sharded":
        check(base, devices)
    is_large = 0 < memory * _MOST < quantize.num_bytes(base)
    return devices if kind == "sharded" or (kind == "auto" and is_large) else 1


def lay_out(
    kind: str, plain: Tree, format: str, *, double_quant: bool, devices: int, memory: int
) -> tuple[int, Tree]:
    """Returns the number of parts of a base, and its shapes with the split leaves marked.

    The number is that of `choose_parts` for the plain base. The shapes are those of the base in its
    `format`. It raises a LayoutError if a device cannot hold its part.
    """
    parts = choose_parts(kind, plain, devices=devices, memory=memory)
    held = split(quantize.shapes_of(plain, format, double_quant=double_quant), parts)
    share = quantize.num_bytes(held) - bytes_elsewhere(held, parts)
    if 0 < memory < share:
        raise LayoutError(
            "the weights that a device holds must take less than its memory, which is "
            f"{memory / 1e9:.3g} GB, got {share / 1e9:.3g} GB on each of {devices}: use more "
            "devices with --mesh.base=sharded, or set --backbone.format=int8 or nf4"
        )
    return parts, held


def bytes_elsewhere(tree: Tree, parts: int) -> float:
    """Returns the bytes of a tree's split leaves that other devices hold."""
    leaves = filter(is_split, jax.tree.leaves(tree, is_leaf=is_split))
    return quantize.num_bytes([*leaves]) * (1 - 1 / parts)


def describe(base: Tree, parts: int) -> str:
    """Returns the layout of split weights on the devices in a line; takes marked shapes."""
    leaves = jax.tree.leaves(base, is_leaf=is_split)
    count, num_bytes = sum(map(is_split, leaves)), quantize.num_bytes(base)
    share = num_bytes - bytes_elsewhere(base, parts)
    return (
        f"{count} of {len(leaves)} tensors are split over {parts} devices and gathered a layer at "
        f"a time: {share / 1e9:.3g} GB on each, of {num_bytes / 1e9:.3g} GB"
    )


def row_of(base: Tree, parts: int) -> dict[str, str]:
    """Returns the row of a table that `describe` makes; none for whole weights."""
    return {"Split over the mesh": describe(base, parts)} if parts > 1 else {}


class Held(NamedTuple):
    """The part of an array that this process's devices hold, along an axis counted from the end.

    Without an axis it is all of the array.
    """

    axis: int | None = None
    start: int = 0
    stop: int = 0

    def cut(self, ndim: int) -> tuple[slice, ...]:
        """Returns the slices of the part in an array or in one layer of it; () for all of it."""
        if self.axis is None:
            return ()
        cuts = [slice(None)] * ndim
        cuts[self.axis] = slice(self.start, self.stop)
        return tuple(cuts)

    def of(self, array: Any) -> Any:
        """Returns the part of the array, or of one layer of it."""
        return array[self.cut(array.ndim)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part of an array of this shape."""
        place = len(shape) + (self.axis or 0)
        size = self.stop - self.start
        return shape if self.axis is None else (*shape[:place], size, *shape[place + 1 :])


def held(path: tuple[Any, ...], leaf: Tree, parts: int) -> Tree:
    """Returns the `Held` of each array of a leaf, which is given by shapes."""

    def of_array(own: tuple[Any, ...], array: Any) -> Held:
        marked = _mark((*path, *own), array, parts)
        if not is_split(marked) or processes.count() == 1:
            return Held()
        layout = NamedSharding(jax.sharding.get_mesh(), marked.spec)
        indices = layout.addressable_devices_indices_map(array.shape).values()
        ends = [
            index[marked.axis].indices(array.shape[marked.axis])[:2] for index in indices if index
        ]
        start, stop = min(ends)[0], max(ends)[1]
        is_run = sum(end - begin for begin, end in ends) == stop - start
        return Held(marked.axis, start, stop) if is_run else Held()

    return jax.tree_util.tree_map_with_path(of_array, leaf)


def place(path: tuple[Any, ...], leaf: Tree, parts: int, like: Tree) -> Tree:
    """Returns a leaf of the host on the devices; quantizing may have made several arrays of it.

    `like` has the whole shapes. A process may have only its own part of a split array.
    """

    def marked_array(own: tuple[Any, ...], whole: Any, array: Any) -> Any:
        marked = _mark((*path, *own), whole, parts)
        if array.shape != whole.shape:
            layout = NamedSharding(jax.sharding.get_mesh(), marked.spec)
            array = jax.make_array_from_process_local_data(layout, array, whole.shape)
        return Split(array, marked.axis) if is_split(marked) else array

    marked = jax.tree_util.tree_map_with_path(marked_array, like, leaf)
    return meshes.place(marked) if meshes.num_shards() > 1 else jax.device_put(marked)
