"""Unlearning algorithms as (init, step) pairs around any Optax transformation."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.models.decoder import Decoder
from raslik_jax.unlearning.objectives import TokenBatch, kl_from_reference, nll


class State(NamedTuple):
    """What a step carries on: the adapter, the optimizer's state, the steps taken."""

    lora: Tree
    opt_state: optax.OptState
    step: Int[Array, ""]


class Info(NamedTuple):
    """What a step reports and nothing reads back.

    Attributes:
      loss: the minimised sum of both terms.
      forget_nll: mean negative log likelihood of the forget batch, nats a token.
      retain_term: mean negative log likelihood (GA_GDR) or KL (GA_KLR) of the retain batch.
      grad_norm: global norm before clipping.
    """

    loss: Float[Array, ""]
    forget_nll: Float[Array, ""]
    retain_term: Float[Array, ""]
    grad_norm: Float[Array, ""]


class Frozen(NamedTuple):
    """What a step reads and never changes; an argument, so that no jit bakes it in as constants.

    Attributes:
      base: frozen weights.
      reference: adapter before unlearning; GA_KLR alone reads it.
    """

    base: Tree
    reference: Tree


class Algorithm(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: init(lora) -> State.
      step: step(state, frozen, forget, retain, *, forget_targets, retain_targets) ->
        (State, Info). The two keyword arguments, rows of the head for each batch, are static
        under jit.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[State, Info]]


# retain_term(lora, frozen, retain, num_targets)
RetainTerm = Callable[[Tree, Frozen, TokenBatch, int], Array]


def _gradient_ascent(
    decoder: Decoder,
    tx: optax.GradientTransformation,
    retain_term: RetainTerm,
    *,
    forget_weight: float,
    retain_weight: float,
) -> Algorithm:
    """Returns the algorithm that ascends the forget loss while descending a retain term."""

    def init(lora: Tree) -> State:
        return State(lora=lora, opt_state=tx.init(lora), step=jnp.zeros((), jnp.int32))

    def step(
        state: State,
        frozen: Frozen,
        forget: TokenBatch,
        retain: TokenBatch,
        *,
        forget_targets: int,
        retain_targets: int,
    ) -> tuple[State, Info]:
        def objective(lora: Tree) -> tuple[Array, tuple[Array, Array]]:
            forget_nll = nll(decoder, lora, frozen.base, forget, num_targets=forget_targets)
            kept = retain_term(lora, frozen, retain, retain_targets)
            return retain_weight * kept - forget_weight * forget_nll, (forget_nll, kept)

        (loss, (forget_nll, kept)), grads = jax.value_and_grad(objective, has_aux=True)(state.lora)
        updates, opt_state = tx.update(grads, state.opt_state, state.lora)
        info = Info(
            loss=loss,
            forget_nll=forget_nll,
            retain_term=kept,
            grad_norm=optax.tree.norm(grads),
        )
        lora = optax.apply_updates(state.lora, updates)
        return State(lora=lora, opt_state=opt_state, step=state.step + 1), info

    return Algorithm(init=init, step=step)


def ga_gdr(
    decoder: Decoder,
    tx: optax.GradientTransformation,
    *,
    forget_weight: float = 1.0,
    retain_weight: float = 1.0,
) -> Algorithm:
    """Returns gradient ascent on the forget set with gradient descent on the retain set.

    Minimises -L_forget + L_retain. Over whole sets its first gradient is (mean over R) - (mean
    over F) of g_x, the paper's Delta of Eq. (1).
    """

    def retain_nll(lora: Tree, frozen: Frozen, retain: TokenBatch, num_targets: int) -> Array:
        return nll(decoder, lora, frozen.base, retain, num_targets=num_targets)

    return _gradient_ascent(
        decoder, tx, retain_nll, forget_weight=forget_weight, retain_weight=retain_weight
    )


def ga_klr(
    decoder: Decoder,
    tx: optax.GradientTransformation,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    forget_weight: float = 1.0,
    retain_weight: float = 1.0,
) -> Algorithm:
    """Returns gradient ascent on the forget set with a KL to the reference on the retain set.

    The KL is a true one over target positions: value and gradient are zero at the reference,
    whatever is added to a row of logits.
    """

    def retain_kl(lora: Tree, frozen: Frozen, retain: TokenBatch, num_targets: int) -> Array:
        return kl_from_reference(
            decoder,
            lora,
            frozen.reference,
            frozen.base,
            retain,
            num_targets=num_targets,
            direction=direction,
        )

    return _gradient_ascent(
        decoder, tx, retain_kl, forget_weight=forget_weight, retain_weight=retain_weight
    )
