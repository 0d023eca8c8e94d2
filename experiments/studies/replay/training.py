"""The training of an adapter by a recipe, with a factor for the loss of each row."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Float

from experiments.studies.replay import effects
from raslik_jax.base.axes import Tree
from raslik_jax.data import batches
from raslik_jax.data.batches import Batch
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import encoding
from raslik_jax.models import decoder
from raslik_jax.parallel import meshes
from raslik_jax.run.stages import retrain
from raslik_jax.run.stages.finetune import count_steps
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop, losses
from raslik_jax.train.objectives import RetrainSettings

# The number under the root of Adam's second moment. Without one the derivative at 0 is infinite.
# So small a number changes no update.
UNDER_ROOT = 1e-30

Values = Callable[[Tree, Tree], Float[jax.Array, " Q"]]


class Training(NamedTuple):
    """A training whose rows have factors, and the losses of the queries.

    Attributes:
      rows: the encoded training rows with an answer.
      num_steps: the number of steps.
      start: the adapter before the first step.
      base: the frozen weights.
      in_order: from a number of steps taken to the batches that follow.
      algorithm: takes batches (Batch, factor_B).
      values: the mean loss of each query's answer, nats a token, of an adapter and the base.
    """

    rows: encoding.Encoded
    num_steps: int
    start: Tree
    base: Tree
    in_order: Callable[[int], Iterator[Batch]]
    algorithm: loop.Algorithm
    values: Values

    def effects(self, *, bar: str = "effects") -> tuple[Float[np.ndarray, "N Q"], loop.State]:
        """Returns the derivative of the values with respect to the factors, and the last state."""
        how: Any = {"num_steps": self.num_steps, "num_rows": len(self.rows.ids), "bar": bar}
        return effects.effects(
            self.algorithm, self.start, self.base, self.in_order, self.values, **how
        )

    def trainer(self) -> Callable[[Float[np.ndarray, " N"]], Float[np.ndarray, " Q"]]:
        """Returns a function from the factors of the rows to the values of such a training."""
        step = jax.jit(lambda state, *given: self.algorithm.step(state, *given)[0])
        ask = jax.jit(self.values)

        def train(factor_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " Q"]:
            state = self.algorithm.init(self.start)
            for _, batch in zip(range(self.num_steps), self.in_order(0), strict=False):
                factor_B = np.where(batch.row_B >= 0, factor_N[batch.row_B], 1.0)
                parts = meshes.place_rows((batch, factor_B.astype(np.float32)))
                state = step(state, self.base, parts)
            return np.asarray(ask(state.params, self.base))

        return train


def make_training(
    workspace: Workspace,
    settings: RetrainSettings,
    queries: Sequence[Example],
    *,
    under_root: float = UNDER_ROOT,
) -> Training:
    """Returns the training of a run's adapter on all rows by a recipe.

    Raises:
      ValueError: if the recipe has dropout, which this training has not.
    """
    if workspace.model.lora_config.dropout:
        raise ValueError("the adapter must have no dropout, it has one: replay another training")
    rows = retrain.encode_rows(workspace, settings)
    num_steps = count_steps(settings, len(rows.ids))
    # The attention by rows of a CPU has no second derivative under scan.
    model = decoder.bind(workspace.model.graphdef, attention="xla")
    encoded = workspace.encode(queries, "queries")
    (whole,) = batches.plan_one_shape(encoded, batch_tokens=1 << 16)
    query_batch = batches.make_batch(encoded, whole)

    def values(params: Tree, frozen: Tree) -> Float[jax.Array, " Q"]:
        bound = losses.BoundModel(model, params, frozen)
        return losses.nll_by_example(losses.Outputs(bound, query_batch))[: len(queries)]

    return Training(
        rows=rows,
        num_steps=num_steps,
        start=workspace.model.draw(settings.seed),
        base=workspace.model.base,
        in_order=functools.partial(
            batches.epoch_batches,
            rows,
            batch_size=settings.batch_size,
            seed=settings.seed,
            is_fixed=True,
        ),
        algorithm=effects.weighted(
            model, _optimizer(settings, num_steps, under_root), mean=settings.mean
        ),
        values=values,
    )


def _optimizer(
    settings: RetrainSettings, num_steps: int, under_root: float
) -> optax.GradientTransformation:
    """Returns the optimizer of a recipe, with a number under the root of AdamW."""
    decay = {"weight_decay": settings.weight_decay}
    rate = loop.make_schedule(
        settings.learning_rate,
        num_steps,
        kind=settings.schedule,
        warmup=settings.warmup,
        warmup_steps=settings.warmup_steps,
    )
    if settings.optimizer == "sgd":
        return loop.sgd(rate, **decay, clip=settings.clip)
    betas = settings.beta1, settings.beta2, settings.epsilon
    adam = optax.adamw(rate, *betas, eps_root=under_root, **decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adam) if settings.clip else adam
