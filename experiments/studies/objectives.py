"""Objectives of unlearning that lost: NPO, NPO_GDR, NPO_KLR, SimNPO and BASE_KLR.

CAP_KLR leaves more of the other answers as they were (docs/studies/precise.md), and with ascent
RASLIK's sets forget no better by NPO than by GA (docs/studies/sets.md).
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from raslik_jax.base.settings import setting
from raslik_jax.train import losses
from raslik_jax.train.objectives import (
    OBJECTIVES,
    KLSettings,
    Objective,
    ObjectiveSettings,
    descend,
    stay,
)
from raslik_jax.train.losses import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class NPOSettings(ObjectiveSettings):
    """Settings of negative preference optimization."""

    beta: float = setting(0.1, "Inverse temperature; near 0 it becomes gradient ascent.", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NPOKLSettings(NPOSettings, KLSettings):
    """Settings of negative preference optimization with a KL."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimNPOSettings(ObjectiveSettings):
    """Settings of SimNPO."""

    beta: float = setting(4.5, "Inverse temperature.", above=0)
    delta: float = setting(0.0, "Margin of the mean token loss, in nats.", low=0)
    forget_weight: float = setting(
        0.125,
        "Published factor of the forget term, times that of all objectives.",
        above=0,
    )


def return_to_backbone(rows: Rows, settings: KLSettings) -> Float[Array, " B"]:
    """Returns KL(backbone || model) over target positions; `kl_direction` is the retain term's.

    It is bounded and zero at the backbone. The gradient with respect to a token's logits is p -
    p_backbone. A negated nll has no bound. The other direction of the KL has almost no gradient if
    the model is sure.
    """
    return losses.kl_by_example(rows.model, rows.backbone, direction="forward")


def prefer_not(rows: Rows, settings: NPOSettings) -> Float[Array, " B"]:
    """Returns the loss of negative preference optimization of each example.

    -(2 / beta) log sigmoid(beta (s - s_ref)) with s the *summed* token negative log likelihood, so
    that (pi / pi_ref)^beta of the paper is exp(-beta (s - s_ref)). At the reference it is
    (2 / beta) log 2 and its gradient is that of -s; as beta goes to 0 it becomes gradient ascent.
    Zhang et al. 2024 (arXiv:2404.05868). The published loss is a mean over sequences, which is
    --unlearn.mean=examples; that of SimNPO as well.
    """
    excess_B = rows.nll_B - losses.nll_by_example(rows.reference)
    excess_B = losses.row_weights(rows.batch, "tokens") * excess_B
    return 2.0 / settings.beta * jax.nn.softplus(-settings.beta * excess_B)


def prefer_not_by_mean(rows: Rows, settings: SimNPOSettings) -> Float[Array, " B"]:
    """Returns the loss of SimNPO of each example, which needs no reference.

    -(2 / beta) log sigmoid(beta (s / n - delta)) with s / n the *mean* token negative log
    likelihood. An already forgotten example of any length changes nothing. Fan et al. 2024
    (arXiv:2410.07163), with the margin inside the bracket as in open-unlearning.
    """
    loss_B = jax.nn.softplus(-settings.beta * (rows.nll_B - settings.delta))
    return settings.forget_weight * (2.0 / settings.beta * loss_B)


MEMBERS = {
    "base_klr": Objective(
        "BASE_KLR",
        return_to_backbone,
        stay,
        reads_reference=("retain",),
        reads_backbone=True,
        settings=KLSettings(learning_rate=5e-4),
    ),
    "npo": Objective("NPO", prefer_not, reads_reference=("forget",), settings=NPOSettings()),
    "npo_gdr": Objective(
        "NPO_GDR", prefer_not, descend, reads_reference=("forget",), settings=NPOSettings()
    ),
    "npo_klr": Objective(
        "NPO_KLR",
        prefer_not,
        stay,
        reads_reference=("forget", "retain"),
        settings=NPOKLSettings(learning_rate=3e-5),
    ),
    "simnpo": Objective("SimNPO", prefer_not_by_mean, descend, settings=SimNPOSettings()),
}


def register() -> None:
    """Adds the objectives to the package's family."""
    OBJECTIVES.update(MEMBERS)
