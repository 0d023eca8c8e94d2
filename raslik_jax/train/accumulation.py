"""Gradients of a batch, taken over micro-batches one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from raslik_jax.axes import Tree

# objective(params, part) -> (value, aux); both are sums over the rows of the part.
Objective = Callable[[Tree, Any], tuple[jax.Array, Any]]


def value_and_grad(
    objective: Objective, params: Tree, batch: Any, *, micro_batch: int
) -> tuple[tuple[jax.Array, Any], Tree]:
    """Returns ((value, aux), gradient) of a batch, as jax.value_and_grad of the whole gives them.

    Parts are added up, not averaged: the objective has to divide by what it takes the mean over,
    found on the whole batch. Averaging the parts' own means would weigh a short part's tokens more.

    Args:
      objective: objective(params, part) -> (value, aux), sums over the rows of the part.
      params: what the gradient is taken of.
      batch: a tree of arrays with one leading axis of B rows.
      micro_batch: rows held at a time, a divisor of B; 0 for all.

    Raises:
      ValueError: micro_batch does not divide the rows, or the arrays differ in rows.
    """
    differentiate = jax.value_and_grad(objective, has_aux=True)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if not micro_batch or sizes == {micro_batch}:
        return differentiate(params, batch)
    if len(sizes) != 1 or min(sizes) % micro_batch:
        raise ValueError(
            f"batches of one size that {micro_batch=} divides are wanted, {sorted(sizes)} rows came"
        )
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, micro_batch, *leaf.shape[1:]), batch)

    def add_part(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, part)), None

    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda leaf: leaf[0], parts))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(add_part, start, parts)
    return total
