"""What one small step away from a group of rows does to the loss of other answers.

Removing a group from training moves a model, to first order, along the gradient of the group's
loss (with the inverse Hessian before it, which is left out here). So such a step is a cheap answer
to "does removing them help?": the change that gradients predict stands beside the one that is
measured.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raslik_jax import meshes
from raslik_jax.axes import Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.loss import example_loss


@functools.cache
def loss_gradient(decoder: Decoder) -> Callable[[Tree, Tree, Batch], Tree]:
    """Returns the jitted function from (lora, base, batch) to the gradient of the summed losses.

    The loss of a row is the one that is trained: the mean nats of its target tokens.
    """

    def of_rows(lora: Tree, base: Tree, batch: Batch) -> Tree:
        def total(lora: Tree) -> Array:
            loss = functools.partial(
                example_loss, decoder, lora, base, num_targets=batch.num_targets
            )
            return jnp.sum(jax.vmap(loss)(batch.tokens_BL, batch.target_mask_BL))

        return jax.grad(total)(lora)

    @jax.jit
    def of_batch(lora: Tree, base: Tree, batch: Batch) -> Tree:
        return meshes.sum_rows(of_rows, lora, base, rows=batch, like=lora)

    return of_batch


def step_along(
    lora: Tree, gradient: Tree, toward: Tree, *, share: float
) -> tuple[Tree, Float[Array, ""]]:
    """Returns an adapter moved up the loss of some rows, and what that predicts of other rows.

    The step is share |lora| g / |g|, with g the gradient of the rows that it goes away from; none
    where g is zero. The prediction is <toward, step>, with `toward` the gradient of a loss of the
    other rows: the change of that loss to first order.
    """
    length = jnp.sqrt(_inner(gradient, gradient))
    factor = share * jnp.sqrt(_inner(lora, lora)) / jnp.where(length > 0, length, 1.0)
    moved = jax.tree.map(lambda leaf, along: leaf + factor * along, lora, gradient)
    return moved, factor * _inner(toward, gradient)


def _inner(one: Tree, other: Tree) -> Array:
    products = jax.tree.map(jnp.vdot, one, other)
    return sum(jax.tree.leaves(products), jnp.zeros(()))
