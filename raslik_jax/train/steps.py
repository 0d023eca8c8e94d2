"""Unlearning algorithms as (init, step) pairs around any Optax transformation."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.messages import listed_problems, shown
from raslik_jax.models.decoder import Decoder
from raslik_jax.train import objectives
from raslik_jax.train.accumulation import value_and_grad
from raslik_jax.train.objectives import BoundModel, TokenBatch


class State(NamedTuple):
    """What a step carries on.

    Attributes:
      params: what is trained: the adapter, or all weights (see `Options.whole`).
      opt_state: the optimizer's.
      step: steps taken.
    """

    params: Tree
    opt_state: optax.OptState
    step: Int[Array, ""]


class Info(NamedTuple):
    """What a step reports and nothing reads back.

    Attributes:
      loss: the minimized sum of both terms.
      forget_nll: mean negative log likelihood of the forget batch, nats a token.
      retain_term: mean negative log likelihood or KL of the retain batch; 0 without a retain term.
      grad_norm: global norm before clipping.
    """

    loss: Float[Array, ""]
    forget_nll: Float[Array, ""]
    retain_term: Float[Array, ""]
    grad_norm: Float[Array, ""]


class Frozen(NamedTuple):
    """What a step reads and never changes; an argument, so that no jit bakes it in as constants.

    Attributes:
      base: frozen weights, quantized or not.
      reference: adapter before unlearning, for the algorithms that compare with it; it runs on the
        same base, of which there is no second copy.
    """

    base: Tree
    reference: Tree


class Algorithm(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: init(params) -> State.
      step: step(state, frozen, forget, retain, *, forget_targets, retain_targets) ->
        (State, Info). The two keyword arguments, rows of the head for each batch, are static
        under jit. Dummy rows fill up the last batch of an epoch and count nowhere.
      reads_retain: whether there is a retain term; where not, `retain` may be None, and has to be
        the same thing at every step or the step compiles again.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[State, Info]]
    reads_retain: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that the algorithms share; each reads those that concern it.

    Attributes:
      forget_weight: factor of the forget term.
      retain_weight: factor of the retain term.
      mean: what the mean of GA's forget term and of every retain term is over.
      micro_batch: examples of each set held at a time, whose gradients are added up; 0 for all.
      kl_direction: `reverse` is KL(unlearned || reference), the paper's; `forward` the other.
      npo_beta: inverse temperature of NPO.
      simnpo_beta: inverse temperature of SimNPO.
      simnpo_delta: margin of SimNPO, nats a token.
      whole: functions of the model without an adapter. Where it is given, all weights are trained:
        the parameters are a base tree, in float32 so that small updates do not round away, and
        run in the dtypes of the frozen base. Otherwise they are the adapter.

    Raises:
      ValueError: a weight below 0, an inverse temperature that is not above 0, a number that is not
        finite, or an unknown mean or direction.
    """

    forget_weight: float = 1.0
    retain_weight: float = 1.0
    mean: objectives.Mean = "examples"
    micro_batch: int = 0
    kl_direction: objectives.Direction = "reverse"
    npo_beta: float = 0.1
    simnpo_beta: float = 4.5
    simnpo_delta: float = 0.0
    whole: Decoder | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a finite number of 0 or more, got {getattr(self, name)}"
            for name in ("forget_weight", "retain_weight", "micro_batch")
            if not 0 <= getattr(self, name) < math.inf
        ]
        problems += [
            f"{name} must be a finite number above 0, got {getattr(self, name)}"
            for name in ("npo_beta", "simnpo_beta")
            if not 0 < getattr(self, name) < math.inf
        ]
        if not math.isfinite(self.simnpo_delta):
            problems.append(f"simnpo_delta must be a finite number, got {self.simnpo_delta}")
        for name, choices in (("mean", objectives.Mean), ("kl_direction", objectives.Direction)):
            if getattr(self, name) not in get_args(choices):
                allowed = " or ".join(get_args(choices))
                problems.append(f"{name} must be {allowed}, got {shown(getattr(self, name))}")
        if problems:
            raise ValueError(listed_problems(problems))


_DEFAULT = Options()


class _ForgetTerm(NamedTuple):
    """What the forget set contributes.

    Attributes:
      of_example: (nll_B, reference_nll_B, batch) -> value_B to be minimized.
      mean: what the mean of the values is over.
      reads_reference: whether reference_nll_B is wanted; zeros come where not.
    """

    of_example: Callable[[Array, Array, TokenBatch], Array]
    mean: objectives.Mean
    reads_reference: bool


# (model, reference, retain, num_targets) -> value_B to be minimized
_RetainTerm = Callable[[BoundModel, BoundModel, TokenBatch, int], Array]


def _algorithm(
    decoder: Decoder,
    tx: optax.GradientTransformation,
    options: Options,
    forget_term: _ForgetTerm,
    retain_term: _RetainTerm | None,
) -> Algorithm:
    """Returns the algorithm that minimizes a forget term and a retain term."""

    def model_of(params: Tree, frozen: Frozen) -> BoundModel:
        if options.whole is None:
            return BoundModel(decoder, params, frozen.base)
        cast = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, frozen.base)
        return BoundModel(options.whole, {}, cast)

    def init(params: Tree) -> State:
        return State(params=params, opt_state=tx.init(params), step=jnp.zeros((), jnp.int32))

    def step(
        state: State,
        frozen: Frozen,
        forget: TokenBatch,
        retain: TokenBatch | None,
        *,
        forget_targets: int,
        retain_targets: int,
    ) -> tuple[State, Info]:
        reference = BoundModel(decoder, frozen.reference, frozen.base)
        # The means are over the whole batch, so what they divide by is found before it is cut up.
        nll_total = jnp.sum(objectives.row_weights(forget, options.mean))
        forget_total = jnp.sum(objectives.row_weights(forget, forget_term.mean))

        def objective(
            params: Tree, part: tuple[TokenBatch, TokenBatch | None]
        ) -> tuple[Array, tuple[Array, Array]]:
            forget, retain = part
            model = model_of(params, frozen)
            nll_B = objectives.nll_by_example(*model, forget, num_targets=forget_targets)
            reference_B = jnp.zeros_like(nll_B)
            if forget_term.reads_reference:
                reference_B = objectives.nll_by_example(
                    *reference, forget, num_targets=forget_targets
                )
            forget_nll = objectives.weighted_mean(nll_B, forget, mean=options.mean, total=nll_total)
            forgotten = objectives.weighted_mean(
                forget_term.of_example(nll_B, reference_B, forget),
                forget,
                mean=forget_term.mean,
                total=forget_total,
            )
            loss = options.forget_weight * forgotten
            kept = jnp.zeros(())
            if retain_term is not None and retain is not None:
                kept = objectives.weighted_mean(
                    retain_term(model, reference, retain, retain_targets),
                    retain,
                    mean=options.mean,
                    total=retain_total,
                )
                loss = options.retain_weight * kept + loss
            return loss, (forget_nll, kept)

        if retain_term is None:
            retain = None
        elif retain is not None:
            retain_total = jnp.sum(objectives.row_weights(retain, options.mean))
        (loss, (forget_nll, kept)), grads = value_and_grad(
            objective, state.params, (forget, retain), micro_batch=options.micro_batch
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        info = Info(
            loss=loss,
            forget_nll=forget_nll,
            retain_term=kept,
            grad_norm=optax.tree.norm(grads),
        )
        params = optax.apply_updates(state.params, updates)
        return State(params=params, opt_state=opt_state, step=state.step + 1), info

    return Algorithm(init=init, step=step, reads_retain=retain_term is not None)


def _ascent(options: Options) -> _ForgetTerm:
    return _ForgetTerm(lambda nll_B, _, __: -nll_B, options.mean, reads_reference=False)


def _npo(options: Options) -> _ForgetTerm:
    def of_example(nll_B: Array, reference_nll_B: Array, batch: TokenBatch) -> Array:
        return objectives.npo_by_example(nll_B, reference_nll_B, batch, beta=options.npo_beta)

    # The published loss is a mean over sequences, whatever the other means are over.
    return _ForgetTerm(of_example, "examples", reads_reference=True)


def _retain_nll(
    model: BoundModel, reference: BoundModel, retain: TokenBatch, num_targets: int
) -> Array:
    del reference
    return objectives.nll_by_example(*model, retain, num_targets=num_targets)


def _retain_kl(options: Options) -> _RetainTerm:
    def of_example(
        model: BoundModel, reference: BoundModel, retain: TokenBatch, num_targets: int
    ) -> Array:
        return objectives.kl_by_example(
            model, reference, retain, num_targets=num_targets, direction=options.kl_direction
        )

    return of_example


def ga(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns gradient ascent on the forget set, and nothing that holds the rest.

    Minimizes -L_forget. Source: Jang et al. 2022 (arXiv:2210.01504).
    """
    return _algorithm(decoder, tx, options, _ascent(options), None)


def ga_gdr(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns gradient ascent on the forget set with gradient descent on the retain set.

    Minimizes -L_forget + L_retain. Over whole sets its first gradient is (mean over R) - (mean
    over F) of g_x, the paper's Delta of Eq. (1).
    """
    return _algorithm(decoder, tx, options, _ascent(options), _retain_nll)


def ga_klr(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns gradient ascent on the forget set with a KL to the reference on the retain set.

    The KL is a true one over target positions: value and gradient are zero at the reference,
    whatever is added to a row of logits.
    """
    return _algorithm(decoder, tx, options, _ascent(options), _retain_kl(options))


def npo(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns negative preference optimization on the forget set alone.

    Source: Zhang et al. 2024 (arXiv:2404.05868); the loss is `objectives.npo_by_example`.
    """
    return _algorithm(decoder, tx, options, _npo(options), None)


def npo_gdr(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns NPO on the forget set with gradient descent on the retain set."""
    return _algorithm(decoder, tx, options, _npo(options), _retain_nll)


def npo_klr(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns NPO on the forget set with a KL to the reference on the retain set."""
    return _algorithm(decoder, tx, options, _npo(options), _retain_kl(options))


def simnpo(
    decoder: Decoder, tx: optax.GradientTransformation, options: Options = _DEFAULT
) -> Algorithm:
    """Returns SimNPO on the forget set with gradient descent on the retain set.

    Source: Fan et al. 2024 (arXiv:2410.07163); the loss is `objectives.simnpo_by_example`. The
    published weight of its forget term is 0.125, against 1 for the retain term.
    """

    def of_example(nll_B: Array, reference_nll_B: Array, batch: TokenBatch) -> Array:
        del reference_nll_B, batch
        return objectives.simnpo_by_example(
            nll_B, beta=options.simnpo_beta, delta=options.simnpo_delta
        )

    term = _ForgetTerm(of_example, "examples", reads_reference=False)
    return _algorithm(decoder, tx, options, term, _retain_nll)


# By the names of --unlearn.algorithms.
ALGORITHMS: dict[str, Callable[[Decoder, optax.GradientTransformation, Options], Algorithm]] = {
    "ga": ga,
    "ga_gdr": ga_gdr,
    "ga_klr": ga_klr,
    "npo": npo,
    "npo_gdr": npo_gdr,
    "npo_klr": npo_klr,
    "simnpo": simnpo,
}
