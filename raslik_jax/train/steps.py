"""Steps of unlearning and of supervised training around any Optax transformation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder
from raslik_jax.parallel import meshes
from raslik_jax.train import loop, losses
from raslik_jax.train.goals import Mean
from raslik_jax.train.losses import BoundModel, Outputs, Rows
from raslik_jax.train.objectives import Objective, ObjectiveSettings


class Info(NamedTuple):
    """The report of a step of unlearning: the minimized loss and parts of it.

    `forget_nll` is the mean of the forget batch in nats a token. `retain_term` is 0 without one.
    `grad_norm` is the global norm before clipping.
    """

    loss: Float[Array, ""]
    forget_nll: Float[Array, ""]
    retain_term: Float[Array, ""]
    grad_norm: Float[Array, ""]


class Frozen(NamedTuple):
    """The constants of a step of unlearning: base weights and the adapter before unlearning."""

    base: Tree
    reference: Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that all objectives share: factors of the terms and the kind of means.

    `micro_batch` is the examples of each set held at a time; 0 for all. `end_ids` end an answer.
    """

    forget_weight: float = 1.0
    retain_weight: float = 1.0
    mean: Mean = "examples"
    micro_batch: int = 0
    end_ids: tuple[int, ...] = ()


def _rows(
    models: Mapping[str, BoundModel], batch: Batch, step: Array, end_ids: tuple[int, ...] = ()
) -> Rows:
    """Returns the outputs of the model, the reference and the backbone that are not known yet."""
    known = batch.known or {}
    outputs = {n: Outputs(one, batch, known_BTE=known.get(n)) for n, one in models.items()}
    return Rows(**outputs, batch=batch, end_ids=end_ids, step=step)


@functools.cache
def find_states(decoder: Decoder) -> Callable[[Tree, Tree, Batch], Array]:
    """Returns the jitted function from `(lora, base, batch)` to its states in `Batch.known`."""

    def of_rows(lora: Tree, base: Tree, batch: Batch) -> Array:
        return Outputs(BoundModel(decoder, lora, base), batch).targets.hidden_TE

    return jax.jit(lambda lora, base, batch: meshes.by_rows(of_rows, lora, base, rows=batch))


def unlearning(
    objective: Objective,
    decoder: Decoder,
    tx: optax.GradientTransformation,
    options: Options,
    settings: ObjectiveSettings | None = None,
) -> loop.Algorithm:
    """Returns the algorithm that minimizes an objective's forget term and retain term.

    A batch of a step is (forget, retain). Without a retain term `retain` must be None, because its
    shapes compile the step again. `settings` are the objective's own; None: its defaults.
    """
    own = objective.settings if settings is None else settings

    def prepare(frozen: Frozen, batch: tuple[Batch, Batch | None], step: Array) -> Any:
        if objective.retrains:
            raise ValueError(f"{objective.title} trains without rows: use steps.supervised")
        if objective.retain is not None and batch[1] is None:
            raise ValueError(f"{objective.title} must have rows to retain, got None: give a batch")
        # The means are over the whole batch, so what they divide by is found before it is cut up.
        forget_total, retain_total = (
            None if one is None else jnp.sum(losses.row_weights(one, options.mean)) for one in batch
        )

        def of_part(params: Tree, frozen: Frozen, part: Any) -> tuple[Array, Any]:
            forget, retain = part
            none = jax.tree.map(jnp.zeros_like, frozen.reference)  # an adapter of zeros
            adapters = {"model": params, "reference": frozen.reference, "backbone": none}
            models = {n: BoundModel(decoder, lora, frozen.base) for n, lora in adapters.items()}
            rows = _rows(models, forget, step, options.end_ids)
            mean = functools.partial(losses.weighted_mean, mean=options.mean)
            forget_nll = mean(rows.nll_B, forget, total=forget_total)
            pushed = mean(objective.forget(rows, own), forget, total=forget_total)
            loss, kept = options.forget_weight * pushed, jnp.zeros(())
            if retain is not None and objective.retain is not None:
                kept_B = objective.retain(_rows(models, retain, step), own)
                kept = mean(kept_B, retain, total=retain_total)
                loss = options.retain_weight * kept + loss
            return loss, (forget_nll, kept)

        return of_part, batch

    return loop.make_algorithm(
        prepare,
        tx,
        micro_batch=options.micro_batch,
        report=lambda loss, aux, grads: Info(loss, aux[0], aux[1], optax.tree.norm(grads)),
        fields=Info._fields,
    )


def supervised(
    decoder: Decoder,
    tx: optax.GradientTransformation,
    *,
    whole: bool = False,
    mean: Mean = "examples",
    micro_batch: int = 0,
    dropout_key: jax.Array | None = None,
) -> loop.Algorithm:
    """Returns the algorithm that minimizes the negative log likelihood of a batch.

    With `whole` all weights are trained. Otherwise the adapter is trained on a frozen base. One
    dropout key is for the whole training; None turns dropout off.
    """

    def prepare(frozen: Tree, batch: Batch, step: Array) -> Any:
        keys = None
        if dropout_key is not None:
            # A key for each example of the whole batch: micro-batches drop the same entries.
            keys = jax.random.split(jax.random.fold_in(dropout_key, step), batch.tokens_BL.shape[0])
        total = jnp.sum(losses.row_weights(batch, mean))

        def of_part(params: Tree, frozen: Tree, part: Any) -> tuple[Array, None]:
            batch, keys = part
            lora, base = ({}, params) if whole else (params, frozen)
            nll_B = losses.nll_by_example(Outputs(BoundModel(decoder, lora, base), batch, keys))
            return losses.weighted_mean(nll_B, batch, mean=mean, total=total), None

        return of_part, (batch, keys)

    return loop.make_algorithm(prepare, tx, micro_batch=micro_batch)
