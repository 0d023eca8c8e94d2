"""Supervised training: of a small backbone from scratch, and of LoRA adapters."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from raslik_jax.axes import Tree
from raslik_jax.data.batches import Encoded, make_batch, plan_rows, training_batches
from raslik_jax.unlearning.objectives import TokenBatch

# loss(params, frozen, batch, *, num_targets, dropout_key) -> scalar
Loss = Callable[..., Array]


class TrainState(NamedTuple):
    """Parameters, optimizer state and the number of steps taken."""

    params: Tree
    opt_state: optax.OptState
    step: Array


class Fitted(NamedTuple):
    """Result of `fit`.

    Attributes:
      params: trained parameters.
      kept: parameters after the steps asked for in `keep_after`, in that order.
      losses: loss of every step, before its update, in nats a token.
    """

    params: Tree
    kept: tuple[Tree, ...]
    losses: Float[np.ndarray, " S"]


class DeviceBatch(NamedTuple):
    """A training batch and its static number of target rows."""

    batch: TokenBatch
    num_targets: int


def learning_rate(
    peak: float,
    num_steps: int,
    *,
    schedule: Literal["linear", "cosine", "constant"],
    warmup: float,
) -> optax.Schedule:
    """Returns a schedule: linear warm-up over a share of the steps, then decay to zero."""
    warmup_steps = max(1, round(warmup * num_steps)) if warmup else 0
    decay_steps = max(1, num_steps - warmup_steps)
    after = {
        "linear": optax.linear_schedule(peak, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[schedule]
    if not warmup_steps:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup_steps), after], [warmup_steps]
    )


def adamw(
    rate: optax.ScalarOrSchedule, *, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """Returns AdamW (0.9, 0.999, 1e-8) behind clipping by global norm."""
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.adamw(rate, weight_decay=weight_decay)
    )


def device_batch(encoded: Encoded, rows: np.ndarray) -> DeviceBatch:
    """Returns these examples of the corpus on the device; DUMMY_ROW has no targets."""
    plan = plan_rows(encoded, rows)
    batch = make_batch(encoded, plan)
    return DeviceBatch(
        batch=TokenBatch(jnp.asarray(batch.tokens_BL), jnp.asarray(batch.target_mask_BL)),
        num_targets=plan.num_targets,
    )


def epoch_batches(
    encoded: Encoded, *, batch_size: int, seed: int, num_epochs: int
) -> Iterator[DeviceBatch]:
    """Yields every example once an epoch, in an order that seed and epoch decide."""
    for epoch in range(num_epochs):
        for rows in training_batches(len(encoded.ids), batch_size, seed=seed, epoch=epoch):
            yield device_batch(encoded, rows)


def num_steps_of(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """Returns the optimizer steps of so many epochs; the last batch of each may be short."""
    return num_epochs * -(-num_examples // batch_size)


def fit(
    loss: Loss,
    params: Tree,
    frozen: Tree,
    batches: Iterable[DeviceBatch],
    *,
    tx: optax.GradientTransformation,
    dropout_key: jax.Array | None = None,
    keep_after: tuple[int, ...] = (),
) -> Fitted:
    """Returns parameters that fit the batches, one optimizer step a batch.

    Args:
      loss: loss(params, frozen, batch, *, num_targets, dropout_key), a scalar.
      params: what is trained.
      frozen: what the loss reads beside; an argument, so that no jit holds it as a constant.
      batches: the training data, in order; wrap it in a progress bar where one is wanted.
      tx: optimizer.
      dropout_key: key of the dropout; None turns it off.
      keep_after: numbers of steps after which a copy of the parameters is kept.

    Raises:
      ValueError: the loss is not finite; the step is named.
    """

    def step_fn(
        state: TrainState, frozen: Tree, batch: TokenBatch, *, num_targets: int
    ) -> tuple[TrainState, Array]:
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, state.step)
        value, grads = jax.value_and_grad(loss)(
            state.params, frozen, batch, num_targets=num_targets, dropout_key=key
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        return stepped, value

    step = jax.jit(step_fn, static_argnames="num_targets")
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32))
    losses: list[Array] = []
    kept: dict[int, Tree] = {}
    for device in batches:
        state, value = step(state, frozen, device.batch, num_targets=device.num_targets)
        losses.append(value)
        # Looking at each loss would stall the device; every 32nd is soon enough to stop.
        if len(losses) % 32 == 0:
            check_finite(value, what="training loss", step=len(losses))
        if len(losses) in keep_after:
            kept[len(losses)] = state.params
    if losses:
        check_finite(losses[-1], what="training loss", step=len(losses))
    return Fitted(
        params=state.params,
        kept=tuple(kept[step] for step in keep_after),
        losses=np.asarray([float(value) for value in losses], np.float64),
    )


def check_finite(value: Array, *, what: str, step: int) -> None:
    """Raises a ValueError where a loss is NaN or infinite."""
    if not np.isfinite(float(value)):
        raise ValueError(
            f"the {what} is {float(value)} at step {step}: lower the learning rate, "
            "or check the base weights for NaN"
        )
