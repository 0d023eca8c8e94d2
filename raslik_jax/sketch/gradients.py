"""Per-example gradients, sketched inside the jit that makes them."""

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raslik_jax.base import machine
from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import chosen
from raslik_jax.parallel import meshes
from raslik_jax.sketch.projections import Projection, flatten_gradients, project

# loss(params, frozen, *example): trees of arrays, such as tokens_L and target_mask_L.
ExampleLoss = Callable[..., Array]
Normalize = Literal["vector", "per_tensor"]


class Sketches(NamedTuple):
    """Sketched gradients of a batch with unit length (zero gradients: zeros) and their norms."""

    unit_BK: Float[Array, "B K"]
    norm_B: Float[Array, " B"]


def flat_gradient(
    loss: ExampleLoss,
    params: Tree,
    frozen: Tree,
    *example: Tree,
    normalize: Normalize,
) -> Float[Array, " P"]:
    """Returns the loss gradient of one example as one flat float32 vector.

    `vector` gives the paper's cosine of whole gradients. `per_tensor` first scales every tensor to
    unit length as RapidIn does (see `map_tensors`).
    """

    grads = jax.grad(loss)(params, frozen, *example)
    per_tensor = chosen("normalize", normalize, {"vector": False, "per_tensor": True})
    return flatten_gradients(map_tensors(_unit, grads) if per_tensor else grads)


def map_tensors(function: Callable[[Array, tuple[int, ...]], Array], tree: Tree) -> Tree:
    """Returns function(leaf, axes of one tensor) of every leaf.

    A tensor is a leaf or one layer of a leaf below the key `layers`. The first axis of such a leaf
    is of layers. A list of layers has a leaf for each.
    """

    def of_leaf(path: Any, leaf: Array) -> Array:
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        pairs = itertools.pairwise(keys)
        is_stacked = any(key == "layers" and not below.isdecimal() for key, below in pairs)
        return function(leaf, tuple(range(is_stacked, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def _unit(array: Array, axis: int | tuple[int, ...]) -> Array:
    array = array.astype(jnp.float32)  # squares of float16 leave its range
    norm = jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=True))
    return array / jnp.where(norm > 0, norm, 1.0)


def sketch_gradients(
    loss: ExampleLoss,
    projection: Projection,
    params: Tree,
    frozen: Tree,
    *batch: Tree,
    normalize: Normalize = "vector",
    micro_tokens: int | None = None,
) -> Sketches:
    """Returns the unit sketches h(g_x) of a batch of examples (Algorithm 1, line 2).

    The loss is any differentiable function `loss(params, frozen, example)`. The three are trees of
    arrays of any model. An example may also be several arguments.

    Call it inside jit. Only the trained leaves get a gradient per example by vmap. The frozen
    leaves are unbatched, so XLA sees the matmuls of ordinary training. The function makes no weight
    gradient of the base and never returns the [B, P] array.

    Args:
      loss: loss(params, frozen, *example) of one example, a scalar.
      params: the trained parameters, such as an adapter.
      frozen: the frozen parameters, which get no gradient; an empty tree for none.
      batch: trees of arrays that share a leading axis of examples, such as tokens_BL, padded on the
        right, and target_mask_BL, True if the loss of a token counts.
      normalize: see `flat_gradient`.
      micro_tokens: tokens held at a time; see `in_micro_batches`.
    """

    def sketch(*example: Tree) -> Array:
        return project(
            projection, flat_gradient(loss, params, frozen, *example, normalize=normalize)
        )

    sketch_BK = in_micro_batches(jax.vmap(sketch), *batch, micro_tokens=micro_tokens)
    norm_B = jnp.linalg.norm(sketch_BK, axis=-1)
    return Sketches(sketch_BK / jnp.where(norm_B > 0, norm_B, 1.0)[:, None], norm_B)


def in_micro_batches(
    map_rows: Callable[..., Array], *batch: Tree, micro_tokens: int | None
) -> Float[Array, "B M"]:
    """Returns map_rows of a batch in parts of at most micro_tokens or one row; None for all.

    The second axis of the batch's first array is the tokens of a row. Without one it is 1.
    """
    arrays = jax.tree.leaves(batch)
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) != 1 or () in sizes:
        got = ", ".join(str(tuple(array.shape)) for array in arrays[:8]) or "none"
        raise ValueError(f"the arrays of a batch must share a leading axis of examples, got {got}")
    size, length = len(arrays[0]), (*arrays[0].shape[1:], 1)[0]
    rows = micro_rows(size, length, micro_tokens)
    if rows == size:
        return map_rows(*batch)
    steps = -(-size // rows)

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, steps * rows - size), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(steps, rows, *array.shape[1:])

    mapped_SRM = jax.lax.map(lambda part: map_rows(*part), jax.tree.map(cut, batch))
    return mapped_SRM.reshape(steps * rows, -1)[:size]


def micro_rows(batch: int, length: int, micro_tokens: int | None) -> int:
    """Returns the rows of a part of a batch: equal parts, the last one filled up."""
    if micro_tokens is None:
        return batch
    if micro_tokens < 1:
        raise ValueError(f"a micro-batch needs at least one token, got {micro_tokens=}")
    return -(-batch // -(-batch // max(micro_tokens // length, 1)))


def micro_tokens_of(hidden_size: int) -> int | None:
    """Returns the tokens whose gradients a model of this width takes at a time; None for all.

    In a narrow model the activations of one layer for a whole batch do not fit a CPU's caches, so
    every pass waits for memory. A wider model keeps most activations for the backward pass (0.7 MB
    per token of SmolLM2-135M), and the heap does not keep so much between the steps. The figures
    are measured.
    """
    if meshes.platform() != "cpu" or meshes.num_shards() > 1:
        return None
    return (1600 if hidden_size < 512 else 800) * machine.usable_cpus()
