"""Supervised training: of a small backbone from scratch, and of LoRA adapters."""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from raslik_jax.axes import Tree
from raslik_jax.data.batches import (
    BatchPlan,
    Encoded,
    make_batch,
    plan_rows,
    round_up,
    training_batches,
)
from raslik_jax.messages import shown
from raslik_jax.train.accumulation import value_and_grad
from raslik_jax.train.objectives import Mean, TokenBatch, row_weights, weighted_mean

# losses(params, frozen, batch, *, num_targets, dropout_keys) -> the loss of each example
Losses = Callable[..., Float[Array, " B"]]


class TrainState(NamedTuple):
    """Parameters, optimizer state and the number of steps taken."""

    params: Tree
    opt_state: optax.OptState
    step: Array


class Progress(NamedTuple):
    """How far `fit` has come, and all it needs to go on from there.

    Attributes:
      state: parameters, optimizer state and number of steps.
      kept: parameters after those steps of `keep_after` that are behind, in that order.
      losses: loss of every step so far, before its update, in nats a token.
    """

    state: TrainState
    kept: tuple[Tree, ...]
    losses: Float[np.ndarray, " _S"]


def _check_range(is_inside: bool, name: str, allowed: str, value: object) -> None:
    if not is_inside:
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}: correct it")


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
    """Returns a schedule: linear warm-up over a share of the steps, then decay to zero.

    Args:
      peak: learning rate after the warm-up, 0 or more.
      num_steps: steps in all, 1 or more.
      schedule: the decay.
      warmup: share of the steps spent warming up, 0 to 1.

    Raises:
      ValueError: a value is out of its range or not finite.
    """
    _check_range(peak >= 0 and math.isfinite(peak), "the learning rate", "0 or more", peak)
    _check_range(num_steps >= 1, "num_steps", "1 or more", num_steps)
    _check_range(0 <= warmup <= 1, "warmup", "a share of the steps, 0 to 1", warmup)
    warmup_steps = max(1, round(warmup * num_steps)) if warmup else 0
    decay_steps = max(1, num_steps - warmup_steps)
    decays = {
        "linear": optax.linear_schedule(peak, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps),
        "constant": optax.constant_schedule(peak),
    }
    _check_range(schedule in decays, "schedule", f"one of {', '.join(decays)}", schedule)
    after = decays[schedule]
    if not warmup_steps:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup_steps), after], [warmup_steps]
    )


def adamw(
    rate: optax.ScalarOrSchedule, *, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """Returns AdamW (0.9, 0.999, 1e-8) behind clipping by global norm.

    Args:
      rate: learning rate, 0 or more, or a schedule.
      weight_decay: decoupled, 0 or more.
      clip: largest norm, more than 0: a negative one turns gradients around.

    Raises:
      ValueError: a value is out of its range or not finite.
    """
    if isinstance(rate, (int, float)):
        _check_range(rate >= 0 and math.isfinite(rate), "the learning rate", "0 or more", rate)
    is_decay = weight_decay >= 0 and math.isfinite(weight_decay)
    _check_range(is_decay, "weight_decay", "0 or more", weight_decay)
    _check_range(clip > 0 and math.isfinite(clip), "clip", "more than 0", clip)
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.adamw(rate, weight_decay=weight_decay)
    )


def device_batch(
    encoded: Encoded, rows: np.ndarray, shape: tuple[int, int] | None = None
) -> DeviceBatch:
    """Returns these examples of the corpus on the device; DUMMY_ROW has no targets.

    Args:
      encoded: the corpus.
      rows: corpus positions.
      shape: tokens and targets that every batch has room for (`fixed_shape`); None takes the next
        rung of the ladder of `plan_rows`.
    """
    plan = plan_rows(encoded, rows) if shape is None else BatchPlan(rows, *shape)
    batch = make_batch(encoded, plan)
    return DeviceBatch(
        batch=TokenBatch(jnp.asarray(batch.tokens_BL), jnp.asarray(batch.target_mask_BL)),
        num_targets=plan.num_targets,
    )


def fixed_shape(encoded: Encoded, *, max_len: int) -> tuple[int, int]:
    """Returns tokens and targets that any batch of the corpus has room for, multiples of 8."""
    length = int(round_up(np.array([max_len]), 8)[0])
    return length, int(round_up(encoded.num_targets_N.max(keepdims=True), 8)[0])


def epoch_batches(
    encoded: Encoded,
    *,
    batch_size: int,
    seed: int,
    num_epochs: int,
    start: int = 0,
    shape: tuple[int, int] | None = None,
) -> Iterator[DeviceBatch]:
    """Yields every example once an epoch, in an order that seed and epoch decide.

    Args:
      encoded: the corpus.
      batch_size: examples of a batch.
      seed: of the run.
      num_epochs: passes over the corpus.
      start: batches to leave out at the beginning: those that were done before.
      shape: as in `device_batch`.
    """
    number = 0
    for epoch in range(num_epochs):
        for rows in training_batches(len(encoded.ids), batch_size, seed=seed, epoch=epoch):
            if number >= start:
                yield device_batch(encoded, rows, shape)
            number += 1


def num_steps_of(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """Returns the optimizer steps of so many epochs; the last batch of each may be short.

    Raises:
      ValueError: batch_size or num_epochs is below 1.
    """
    for name, value in (("batch_size", batch_size), ("num_epochs", num_epochs)):
        _check_range(value >= 1, name, "1 or more", value)
    return num_epochs * -(-num_examples // batch_size)


def start_fit(params: Tree, tx: optax.GradientTransformation) -> Progress:
    """Returns the progress of a training that has done nothing yet."""
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32))
    return Progress(state, (), np.zeros(0, np.float64))


def training_step(
    losses: Losses,
    tx: optax.GradientTransformation,
    *,
    mean: Mean,
    micro_batch: int,
    dropout_key: jax.Array | None,
) -> Callable[..., tuple[TrainState, Array]]:
    """Returns the jitted step of `fit`: step(state, frozen, batch, *, num_targets); see there."""

    def step_fn(
        state: TrainState, frozen: Tree, batch: TokenBatch, *, num_targets: int
    ) -> tuple[TrainState, Array]:
        keys = None
        if dropout_key is not None:
            # One key per example of the whole batch, so that micro-batches drop the same entries.
            keys = jax.random.split(
                jax.random.fold_in(dropout_key, state.step), batch.tokens_BL.shape[0]
            )
        total = jnp.sum(row_weights(batch, mean))

        def objective(params: Tree, part: tuple[TokenBatch, Array | None]) -> tuple[Array, None]:
            batch, keys = part
            loss_B = losses(params, frozen, batch, num_targets=num_targets, dropout_keys=keys)
            return weighted_mean(loss_B, batch, mean=mean, total=total), None

        (value, _), grads = value_and_grad(
            objective, state.params, (batch, keys), micro_batch=micro_batch
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        return stepped, value

    return jax.jit(step_fn, static_argnames="num_targets")


def fit(
    losses: Losses,
    progress: Progress,
    frozen: Tree,
    batches: Iterator[DeviceBatch],
    *,
    tx: optax.GradientTransformation,
    mean: Mean = "examples",
    micro_batch: int = 0,
    dropout_key: jax.Array | None = None,
    keep_after: tuple[int, ...] = (),
    save_every: int = 0,
    save: Callable[[Progress], None] | None = None,
    name: str = "training",
    rate_flag: str = "the learning rate",
) -> Progress:
    """Returns parameters that fit the batches, one optimizer step a batch.

    Args:
      losses: losses(params, frozen, batch, *, num_targets, dropout_keys), one of each example.
      progress: where to begin: `start_fit`, or what `save` was given in an interrupted run.
      frozen: what the loss reads beside; an argument, so that no jit holds it as a constant.
      batches: the training data from there on, in order; wrap it in a progress bar where one is
        wanted.
      tx: optimizer.
      mean: what the loss of a step is the mean over.
      micro_batch: examples held at a time; 0 for all. A step is the same up to rounding.
      dropout_key: key of the dropout, the same for the whole training; None turns it off.
      keep_after: numbers of steps after which a copy of the parameters is kept.
      save_every: steps between two calls of `save`; 0 for none.
      save: takes the progress, to go on from in another process with the same bits; never one
        that has diverged.
      name: what is trained, for errors.
      rate_flag: what to lower where it diverges.

    Raises:
      ValueError: a loss or a weight is not finite; the step is named.
    """

    step = training_step(losses, tx, mean=mean, micro_batch=micro_batch, dropout_key=dropout_key)
    state, kept = progress.state, list(progress.kept)
    losses_so_far, values = progress.losses, list[Array]()

    def so_far() -> Progress:
        """Returns the progress with the losses since the last look, all of it finite."""
        nonlocal losses_so_far
        found = np.asarray([float(value) for value in values], np.float64)
        values.clear()
        check_finite(found, what=name, step=len(losses_so_far) + 1, rate_flag=rate_flag)
        losses_so_far = np.concatenate([losses_so_far, found])
        return Progress(state, tuple(kept), losses_so_far)

    for number, device in enumerate(batches, start=len(losses_so_far) + 1):
        state, value = step(state, frozen, device.batch, num_targets=device.num_targets)
        values.append(value)
        if number in keep_after:
            kept.append(state.params)
        saves_now = bool(save_every) and number % save_every == 0
        # Looking at each loss would stall the device; every 32nd is soon enough to stop.
        if len(values) == 32 or saves_now:
            at = so_far()
            if save is not None and saves_now:
                check_weights(at.state.params, what=name, step=number, rate_flag=rate_flag)
                save(at)
    done = so_far()
    # A state that was kept and is not finite leaves nothing finite behind it.
    check_weights(done.state.params, what=name, step=len(done.losses), rate_flag=rate_flag)
    return done


def check_finite(
    losses: Float[np.ndarray, " _S"],
    *,
    what: str,
    step: int,
    rate_flag: str = "the learning rate",
    quantity: str = "loss",
) -> None:
    """Raises a ValueError where a loss is NaN or infinite.

    Args:
      losses: of one or more steps.
      what: what is trained.
      step: number of the first of them.
      rate_flag: what to lower.
      quantity: what is looked at, where it is not the loss.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise ValueError(
            f"{what} diverged: the {quantity} at step {step + int(bad[0])} is {losses[bad[0]]}; "
            f"lower {rate_flag}, or check the weights that it starts from for NaN"
        )


def check_weights(
    params: Tree, *, what: str, step: int, rate_flag: str = "the learning rate"
) -> None:
    """Raises a ValueError where a weight is NaN or infinite; arguments as in `check_finite`.

    The last step's loss is that of the weights before it, so finite losses do not say it.
    """
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"{what} diverged: weights are NaN or infinite after step {step}; "
            f"lower {rate_flag}, or check the weights that it starts from for NaN"
        )
