"""Sketches of gradients: two families of random projection under one signature.

Each family maps a flat gradient of P floats to K floats and is linear: h(-g) == -h(g) bit for bit.
Integer hashes of (seed, coordinate) decide the projection. A seed therefore gives the same
projection on every backend and every version of jax. No family stores a matrix.

================ ===================================== ============================== ==========
family           coordinate j of the sketch            cost of one example            memory
================ ===================================== ============================== ==========
binned           signed sum of ceil(P / K) coordinates P additions                    4 P bytes
                 dealt by a permutation of all P
dense_rademacher K ** -0.5 times a signed sum of all   2 P K operations               none
                 P coordinates (the paper's text)
================ ===================================== ============================== ==========

E <h(u), h(v)> = <u, v> exactly, before any normalization. To first order the variance of both is
(1 - rho^2)^2 / K for unit vectors with inner product rho.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.sketch.families import PROJECTIONS, ProjectionSpec

# The number of the rules from (family, seed, P, K) to signs and bins, kept in every index: raise it
# with a change of a rule.
SKETCH_FORMAT = 1

jax.tree_util.register_static(ProjectionSpec)


class Projection(NamedTuple):
    """A random projection R^P -> R^K as a pytree: the spec is static and the table is data.

    The table is precomputed: int32 [ceil(P / K), K] for `binned` and () for the others.
    """

    spec: ProjectionSpec
    table: Any


def init_projection(
    seed: int, family: str, num_params: int, size: int, *, operand: str = "float32"
) -> Projection:
    """Returns the projection of a `ProjectionSpec` of these arguments.

    Example:
      projection = init_projection(0, "binned", num_params=196_608, size=65_536)
      sketch_K = project(projection, flatten_gradients(gradients))
    """
    spec = ProjectionSpec(
        family=family, num_params=num_params, size=size, seed=seed, operand=operand
    )
    return Projection(spec, PROJECTIONS[family].init(spec))


@functools.lru_cache(maxsize=8)
def projection_shapes(family: str, num_params: int, size: int) -> Projection:
    """Returns a projection with the shapes and dtypes of its arrays in their place."""
    return jax.eval_shape(lambda: init_projection(0, family, num_params, size))


def project(projection: Projection, gradient_P: Float[Array, " P"]) -> Float[Array, " K"]:
    """Returns the sketch of one flat gradient in float32; the caller vmaps.

    The gradient has the order of `flatten_gradients` and any float dtype; sums are float32. Under
    vmap the whole batch goes through one call of the family's kernel, at any depth of nesting.
    """
    if gradient_P.shape[0] != projection.spec.num_params:
        width = projection.spec.num_params
        raise ValueError(f"a gradient must have {width} coordinates, got {gradient_P.shape[0]}")
    return _batched_apply(projection.spec)(projection.table, gradient_P[None])[0]


@functools.lru_cache(maxsize=64)
def _batched_apply(spec: ProjectionSpec) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the family's function of gradients_BP that folds any vmap into its batch axis.

    vmap alone would read tables and make signs once per row and not once for all rows.
    """

    @jax.custom_batching.custom_vmap
    def apply(table: Any, gradients_BP: jax.Array) -> jax.Array:
        return PROJECTIONS[spec.family].apply(spec, table, gradients_BP)

    @apply.def_vmap
    def _fold(
        axis_size: int, in_batched: Any, table: Any, gradients_ABP: jax.Array
    ) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(in_batched[0])):
            raise ValueError("vmap over gradients, not over projections: their seeds are static")
        rows_BP = gradients_ABP.reshape(-1, gradients_ABP.shape[-1])
        return apply(table, rows_BP).reshape(axis_size, -1, spec.size), True

    return apply


class Segment(NamedTuple):
    """The place of one tensor in a flat gradient, row-major; its path is its keys joined by "/"."""

    path: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The flat coordinate after its last element."""
        return self.offset + math.prod(self.shape)


def gradient_manifest(tree: Tree) -> tuple[Segment, ...]:
    """Returns the segments of the flat gradient of a tree, sorted by path.

    The order belongs to the sketch: it does not depend on how jax orders leaves.
    """
    segments: list[Segment] = []
    for path, leaf in _sorted_leaves(tree):
        offset = segments[-1].end if segments else 0
        segments.append(Segment(path, tuple(leaf.shape), offset))
    return tuple(segments)


def count_params(tree: Tree) -> int:
    """Returns P, the number of floats in a tree of arrays or of ShapeDtypeStructs."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def flatten_gradients(tree: Tree) -> Float[Array, " P"]:
    """Returns the leaves of a tree as one float32 vector in the order of `gradient_manifest`."""
    return jnp.concatenate([leaf.astype(jnp.float32).ravel() for _, leaf in _sorted_leaves(tree)])


def _sorted_leaves(tree: Tree) -> list[tuple[str, Any]]:
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    if not leaves:
        raise ValueError("a tree of LoRA parameters must have arrays, got one without any")
    return sorted(leaves, key=lambda item: item[0])
