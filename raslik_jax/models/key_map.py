"""The map between tensors of a Hugging Face file and leaves of our trees, in both directions.

Loading, saving and adapters all read an architecture's `key_map`, which pairs our modules with
Hugging Face's. Every tensor is used once and every leaf is filled once. Otherwise `check_fit` names
every misfit.
"""

import itertools
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from raslik_jax.base import files
from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import MAX_MESSAGE, some_of
from raslik_jax.data.words import refused
from raslik_jax.models import products, quantize, sharding, storage
from raslik_jax.parallel import processes

# Our leaf -> the Hugging Face parameter, and whether it is stored transposed ([out, in]).
_PARAMETERS = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "offset": ("weight", False),
    "bias": ("bias", False),
    "a": ("lora_A.weight", True),
    "b": ("lora_B.weight", True),
}


# Rows of a stored tensor that are transposed together. Whole tensors take four times as long:
# neighbors in a column are in other lines of the processor's cache.
_STRIP = 8
# malloc gives arrays of this size back when they are freed. Each thread keeps smaller ones.
_FREED_BYTES = 1 << 25


class Slot(NamedTuple):
    """One tensor of a file: `path` is our leaf and `layer` its row there, None if not stacked."""

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    is_transposed: bool


def flatten(tree: Tree) -> dict[tuple[str, ...], Any]:
    """Returns the leaves of nested dicts by path; a quantized kernel is one leaf."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=quantize.is_quantized)
    return {tuple(key.key for key in path): leaf for path, leaf in pairs}


def plan(key_map: Mapping[str, str], shapes: Tree, *, prefix: str = "") -> dict[str, Slot]:
    """Returns the Hugging Face key of every tensor of a tree by leaf and layer."""
    slots: dict[str, Slot] = {}
    for path, leaf in flatten(shapes).items():
        parameter, is_transposed = _PARAMETERS[path[-1]]
        is_stacked = path[0] == "layers"
        module = prefix + (f"{key_map['layers']}." if is_stacked else "")
        module += key_map["/".join(path[:-1])]
        shape = tuple(leaf.shape[1:] if is_stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if is_stacked else (None,):
            key = f"{module.format(layer=layer)}.{parameter}"
            slots[key] = Slot(path, layer, shape[::-1] if is_transposed else shape, is_transposed)
    return slots


def check_fit(
    slots: Mapping[str, Slot],
    tensors: storage.Tensors,
    what: str,
    inert: str,
    *,
    mend: str = "fetch it again",
) -> None:
    """Raises one ValueError that names every tensor that is missing, unexpected or ill-shaped.

    Tensors whose keys match the pattern `inert` are left out.
    """
    headers = {
        key: tensors.header(key)
        for key in tensors.files
        if key in slots or not re.fullmatch(inert, key)
    }
    integers = [
        f"{tensors.label(key)} is {dtype}"
        for key, (_, dtype) in headers.items()
        if key in slots and dtype not in storage.FLOATS.values()
    ]
    expected = {key: slot.shape for key, slot in slots.items()}
    given = {key: shape for key, (shape, _) in headers.items()}
    more = {"no floating point weights": integers}
    _refuse_misfit(what, expected, given, tensors.label, more, mend)


def check_tree(tree: Tree, shapes: Tree, what: str) -> None:
    """Raises a ValueError unless the tree has exactly these leaves and shapes, none quantized."""
    leaves = {"/".join(path): leaf for path, leaf in flatten(tree).items()}
    packed = [name for name, leaf in leaves.items() if quantize.is_quantized(leaf)]
    given = {name: quantize.kernel_shape(leaf) for name, leaf in leaves.items()}
    expected = {"/".join(path): leaf.shape for path, leaf in flatten(shapes).items()}
    _refuse_misfit(what, expected, given, str, {"quantized": packed}, "match the two")


def _refuse_misfit(
    what: str,
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    label: Callable[[str], str],
    problems: Mapping[str, Sequence[str]],
    mend: str,
) -> None:
    """Raises a ValueError with the differences in name or shape and with further problems."""
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": sorted(label(name) for name in given if name not in expected),
        "of another shape": [
            f"{label(name)} is {list(shape)}, not {list(expected[name])}"
            for name, shape in given.items()
            if shape != expected.get(name, shape)
        ],
        **problems,
    }

    def sentence(most: int) -> str:
        found = [
            f"{title} {some_of(names, most, quoted=False)}"
            for title, names in problems.items()
            if names
        ]
        return f"the weights do not fit {what}: {'; '.join(found)}: {mend}"

    if any(problems.values()):  # names are long: as many of each kind as there is room for
        texts = [sentence(3), sentence(2), sentence(1)]
        raise ValueError(next((text for text in texts if len(text) <= MAX_MESSAGE), texts[-1]))


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array that JAX takes over on a CPU without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def fill(
    shapes: Tree,
    slots: Mapping[str, Slot],
    tensors: storage.Tensors,
    pack: Callable[[Any], Any] | None = None,
    *,
    num_parts: int = 1,
) -> Tree:
    """Returns the tree with every leaf read from its tensors in the dtype of its shape.

    Args:
      shapes: Abstract leaves.
      slots: From `plan`, all of them in `tensors`.
      tensors: The open files.
      pack: Function that quantizes the linear kernels, one layer at a time. On a stack of layers it
        must treat each layer in the same way.
      num_parts: Number of parts into which large leaves are split over the devices.

    Raises:
      ValueError: Tensors with NaN or infinity, or with values beyond the range of the dtype.
    """
    broken: list[str] = []

    def read(entries: Any, shape: Any) -> Any:
        path = tuple(entry.key for entry in entries)
        quantized = pack if path[0] == "layers" and path[-1] == "kernel" else None
        template = jax.eval_shape(quantized, shape) if quantized else shape
        # A process reads its own part of each tensor of a split leaf. It reads all of a packed
        # leaf, whose scales are of many values, and keeps its own part of the result.
        held = sharding.held(entries, template, num_parts)
        buffers = jax.tree.map(
            lambda leaf, part: _aligned_empty(part.shape(leaf.shape), leaf.dtype), template, held
        )
        kept = jax.tree.leaves(held, is_leaf=lambda part: isinstance(part, sharding.Held))
        read_as, kept = (sharding.Held(), kept) if quantized else (kept[0], [sharding.Held()])

        def read_tensor(key: str) -> bool:
            """Fills the row of a tensor; returns whether its values are finite."""
            slot = slots[key]
            tensor = _read(tensors, key, slot, read_as)
            parts = jax.tree.leaves(quantized(tensor) if quantized else tensor)
            row: Any = ... if slot.layer is None else slot.layer
            is_sound = storage.is_finite(tensor)
            for buffer, part, own in zip(jax.tree.leaves(buffers), parts, kept, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    part = own.of(np.asarray(part))
                    if quantized:
                        buffer[row] = part
                    else:
                        _copy(products.stored(part, buffer.dtype), buffer[row])
                if np.issubdtype(buffer.dtype, np.floating) and buffer.dtype != tensor.dtype:
                    is_sound = is_sound and storage.is_finite(buffer[row])
            return is_sound

        own_keys = [key for key, slot in slots.items() if slot.path == path]
        size = sum(buffer.nbytes for buffer in jax.tree.leaves(buffers)) // max(len(own_keys), 1)
        # A program that quantizes has a whole layer in memory.
        if quantized or size < _FREED_BYTES:
            sound = [*map(read_tensor, own_keys)]
        else:
            with ThreadPoolExecutor(storage.THREADS) as pool:
                sound = [*pool.map(read_tensor, own_keys)]
        broken.extend(itertools.compress(own_keys, np.logical_not(sound)))
        return sharding.place(entries, buffers, num_parts, template)

    tree = jax.tree_util.tree_map_with_path(read, shapes)
    if num_parts > 1:  # each process has seen its own parts
        is_broken = np.array([key in broken for key in slots], np.uint32)
        broken = list(itertools.compress(slots, processes.sum_processes(is_broken)))
    if broken:
        folder = next(iter(tensors.files.values())).parent
        labels = some_of([*map(tensors.label, broken)], 1, quoted=False)
        raise refused("weights_finite", folder=folder, names=labels)
    return tree


def _read(
    tensors: storage.Tensors, key: str, slot: Slot, own: sharding.Held
) -> Shaped[np.ndarray, "..."]:
    """Returns a tensor in our leaf's layout, or the part of it that a process holds."""
    index = own.cut(len(slot.shape))
    if not index:
        tensor = tensors.read(key)
    else:
        tensor = tensors.read_part(key, index[::-1] if slot.is_transposed else index)
    return tensor.T if slot.is_transposed else tensor


def _copy(source: Shaped[np.ndarray, "..."], target: Shaped[np.ndarray, "..."]) -> None:
    """Copies an array into another of its dtype; a transposed matrix is copied in strips."""
    if source.ndim != 2 or source.strides[0] >= source.strides[1]:
        target[...] = source
        return
    # Integers are copied without Python's lock, so that threads can do it.
    bits = np.dtype(f"u{target.itemsize}")
    source, target = source.view(bits), target.view(bits)
    for start in range(0, source.shape[1], _STRIP):
        strip = slice(start, start + _STRIP)
        target[:, strip] = source[:, strip]


def tensors_of(tree: Tree, slots: Mapping[str, Slot]) -> dict[str, np.ndarray]:
    """Returns the tensors of these slots in the layout of a file."""
    leaves = flatten(tree)
    paths = dict.fromkeys(slot.path for slot in slots.values())
    arrays = {path: np.asarray(leaves[path]) for path in paths}

    def tensor(slot: Slot) -> np.ndarray:
        row = arrays[slot.path][... if slot.layer is None else slot.layer]
        if not slot.is_transposed:
            return np.ascontiguousarray(row)
        turned = np.empty(row.shape[::-1], row.dtype)
        _copy(row.T, turned)
        return turned

    with ThreadPoolExecutor(storage.THREADS) as pool:
        return dict(zip(slots, pool.map(tensor, slots.values()), strict=True))


def write_weights(
    folder: pathlib.Path, slots: Mapping[str, Slot], tree: Tree, shard_bytes: int
) -> None:
    """Writes the tensors with one shard in memory at a time."""
    leaves = flatten(tree)
    sizes = {
        key: math.prod(slot.shape) * leaves[slot.path].dtype.itemsize for key, slot in slots.items()
    }
    shards: list[list[str]] = [[]]
    for key, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(key)
    if len(shards) == 1:
        names = [storage.WEIGHTS]
    else:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        count = sum(math.prod(slot.shape) for slot in slots.values())
        sums = {"total_parameters": count, "total_size": sum(sizes.values())}
        index = {"metadata": sums, "weight_map": where}
        files.write_json(folder / storage.INDEX, index)
    for name, keys in zip(names, shards, strict=True):
        storage.write_tensors(folder / name, tensors_of(tree, {key: slots[key] for key in keys}))
