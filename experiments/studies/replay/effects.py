"""The exact first-order effect of every row of a training on what the trained model does.

A training is a chain of steps, theta_{t+1} = step(theta_t, w), where w has a factor for the loss of
each row, 1 in the training itself. `effects` differentiates a value of the last parameters with
respect to w: it goes through the steps backward, and takes one vector-Jacobian product of each.
This is the metagradient of MAGIC (Ilyas and Engstrom 2025, arXiv:2504.16430; Engstrom et al. 2025,
arXiv:2503.13751), for an adapter on a frozen base.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from raslik_jax.base.axes import Tree
from raslik_jax.base.progress import progress
from raslik_jax.data.batches import DUMMY_ROW, Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.parallel import meshes
from raslik_jax.train import loop, losses
from raslik_jax.train.goals import Mean
from raslik_jax.train.loop import Algorithm, State


def weighted(decoder: Decoder, tx: optax.GradientTransformation, *, mean: Mean) -> Algorithm:
    """Returns supervised training of an adapter whose batches are (Batch, factor_B).

    The loss of each row has a factor, and the mean divides by all rows as with factors of 1.
    """

    def prepare(frozen: Tree, batch: Any, step: jax.Array) -> Any:
        total = jnp.sum(losses.row_weights(batch[0], mean))

        def of_part(params: Tree, frozen: Tree, part: Any) -> tuple[jax.Array, None]:
            rows, factor_B = part
            model = losses.Outputs(losses.BoundModel(decoder, params, frozen), rows)
            nll_B = factor_B * losses.nll_by_example(model)
            return losses.weighted_mean(nll_B, rows, mean=mean, total=total), None

        return of_part, batch

    return loop.make_algorithm(prepare, tx)


def effects(
    algorithm: Algorithm,
    params: Tree,
    frozen: Tree,
    batches: Callable[[int], Iterator[Batch]],
    values: Callable[[Tree, Tree], Float[jax.Array, " Q"]],
    *,
    num_steps: int,
    num_rows: int,
    bar: str = "",
) -> tuple[Float[np.ndarray, "N Q"], State]:
    """Returns d values / d w, [N, Q], and the state after the training.

    A row that the training took k times has the sum over them. Removing row n changes the values by
    about minus its entry, while all other rows keep their places in the batches.

    About 2 sqrt(num_steps) states are held in memory: the training is run twice, the second time
    in segments that go backward.

    Args:
      algorithm: takes batches (Batch, factor_B), as `weighted` does.
      params: where the training starts.
      batches: from a number of steps taken to the batches that follow, as for `loop.fit`.
      values: the values of trained parameters, with the frozen ones; must be differentiable.
      num_rows: N, the number of rows that `Batch.row_B` counts.
      bar: text before the progress bar; empty for silence.
    """
    frozen, state = meshes.place((frozen, algorithm.init(params)))
    step = jax.jit(functools.partial(_step, algorithm))
    pull = jax.jit(functools.partial(_pull, algorithm))
    length = max(1, math.isqrt(num_steps))
    starts = [*range(0, num_steps, length)]
    kept: dict[int, State] = {}
    total = 2 * num_steps + num_steps - starts[-1]
    with progress(None, bar, total=total, unit="step") as counter:
        for number, batch in zip(range(num_steps), batches(0), strict=False):
            if number in starts:
                kept[number] = state
            state = step(state, frozen, _whole(batch))
            counter.update(1)
        last, adjoint_Q = state, jax.jit(functools.partial(_start, values))(state, frozen)
        found_NQ: Float[np.ndarray, "N Q"] | None = None
        for start in reversed(starts):
            end = min(start + length, num_steps)
            segment, state = [], kept.pop(start)
            for number, batch in zip(range(start, end), batches(start), strict=False):
                segment.append((state, _whole(batch)))
                if number < end - 1:
                    state = step(state, frozen, segment[-1][1])
            for state, batch in reversed(segment):
                adjoint_Q, effect_QB = pull(adjoint_Q, state, frozen, batch)
                effect_QB = np.asarray(meshes.fetch(effect_QB), np.float64)
                if found_NQ is None:
                    found_NQ = np.zeros((num_rows, len(effect_QB)))
                row_B = np.asarray(meshes.fetch(batch[0].row_B))
                real_B = row_B != DUMMY_ROW
                np.add.at(found_NQ, row_B[real_B], effect_QB[:, real_B].T)
                counter.update(1)
    assert found_NQ is not None
    return found_NQ, last


def _whole(batch: Batch) -> tuple[Batch, Any]:
    """Returns a batch on the mesh with factor 1 for each row."""
    ones_B = np.ones(len(batch.row_B), np.float32)
    return meshes.place_rows((batch, ones_B))


def _step(algorithm: Algorithm, state: State, frozen: Tree, batch: Any) -> State:
    return algorithm.step(state, frozen, batch)[0]


def _floats(tree: Tree) -> list[jax.Array]:
    """Returns the leaves that have a derivative: an optimizer also counts its steps."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _with_floats(tree: Tree, floats: list[jax.Array]) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    new = iter(floats)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    mixed = [next(new) if one else leaf for one, leaf in zip(is_float, leaves, strict=True)]
    return jax.tree.unflatten(structure, mixed)


def _start(
    values: Callable[[Tree, Tree], Float[jax.Array, " Q"]], state: State, frozen: Tree
) -> list[Float[jax.Array, "Q ..."]]:
    """Returns the derivative of each value with respect to the last state."""
    value_Q, pull = jax.vjp(
        lambda floats: values(_with_floats(state, floats).params, frozen), _floats(state)
    )
    return jax.lax.map(lambda row_Q: pull(row_Q)[0], jnp.eye(len(value_Q), dtype=value_Q.dtype))


def _pull(
    algorithm: Algorithm,
    adjoint_Q: list[Float[jax.Array, "Q ..."]],
    state: State,
    frozen: Tree,
    batch: tuple[Batch, Float[jax.Array, " B"]],
) -> tuple[list[Float[jax.Array, "Q ..."]], Float[jax.Array, "Q B"]]:
    """Returns the derivatives with respect to the state before a step and to its factors."""

    def forward(floats: list[jax.Array], factor_B: Float[jax.Array, " B"]) -> list[jax.Array]:
        before = _with_floats(state, floats)
        return _floats(_step(algorithm, before, frozen, (batch[0], factor_B)))

    _, pull = jax.vjp(forward, _floats(state), batch[1])
    return jax.lax.map(pull, adjoint_Q)  # one after the other, in the memory of one
