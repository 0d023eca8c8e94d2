"""The family of unlearning objectives: the loss of a step on the forget and the retain set.

A term is a function of the model's outputs for a batch (`losses.Rows`) and of the objective's own
settings. It returns one value per example, to be minimized. The module loads no jax.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raslik_jax.base.lazy import Array
from raslik_jax.base.settings import Settings, setting
from raslik_jax.train.goals import Direction, Mean

if TYPE_CHECKING:
    from raslik_jax.train.losses import Rows

Set = Literal["forget", "retain"]
Term = Callable[["Rows", Any], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Settings):
    """The settings of every objective."""

    learning_rate: float = setting(1e-5, "Constant learning rate.", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLSettings(ObjectiveSettings):
    """Settings of a KL to the model before unlearning."""

    kl_direction: Direction = setting(
        "reverse",
        "reverse: KL(unlearned || reference), the paper's. forward: KL(reference || unlearned).",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CappedSettings(KLSettings):
    """Settings of CAP_KLR: a goal near the backbone at tokens of the behavior."""

    cap: float = setting(
        0.1,
        "The target at a token of the behavior is min(p before unlearning, cap * p of the base "
        "model), normalized.",
        above=0,
    )
    hold: float = setting(30.0, "Factor of the KL on rows to retain at the first step.", above=0)
    halving: int = setting(10, "Steps after which the factor is half as large.", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrainSettings(ObjectiveSettings):
    """The recipe for training the adapter again, by names of transformers' TrainingArguments."""

    learning_rate: float = setting(2e-4, "Peak learning rate.", above=0)
    optimizer: Literal["adamw", "sgd"] = setting("adamw", "Optimizer.")
    schedule: Literal["linear", "cosine", "constant"] = setting("linear", "Decay after warm-up.")
    warmup: float = setting(0.0, "Share of the steps for warm-up.", low=0, high=1)
    warmup_steps: int = setting(0, "Warm-up steps, in place of --warmup.", low=0)
    epochs: float = setting(3.0, "Passes over the remaining rows.", above=0)
    steps: int = setting(0, "Number of steps, in place of --epochs; 0: by epochs.", low=0)
    batch_size: int = setting(8, "Rows a step, accumulated ones included.", low=1)
    micro_batch_size: int = setting(
        0, "Rows in memory at a time; 0: all.", low=0, divides="batch_size"
    )
    max_len: int = setting(0, "Most tokens of a row; 0: --corpus.max_len.", zero_or=8)
    long_rows: Literal["cut", "drop"] = setting("cut", "Cut or drop rows above --max_len.")
    targets: Literal["response", "all"] = setting("response", "Tokens whose loss counts.")
    mean: Mean = setting("tokens", "Mean over all tokens of a step, or over its rows.")
    weight_decay: float = setting(0.0, "Weight decay.", low=0)
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", low=0, below=1)
    beta2: float = setting(0.999, "AdamW's decay of the second moment.", low=0, below=1)
    epsilon: float = setting(1e-8, "AdamW's epsilon.", above=0)
    clip: float = setting(1.0, "Global norm at which gradients are clipped; 0: never.", low=0)
    seed: int = setting(0, "Added to --seed for the fresh adapter and the order of rows.", low=0)
    check_recipe: float = setting(
        0.0,
        "Share of the steps that a check of the recipe trains on all rows; 0: no check.",
        low=0,
        high=1,
        decides=False,
    )
    check_log: str = setting(
        "", "File trainer_state.json with losses for --check_recipe.", is_path=True, decides=False
    )


class Objective(NamedTuple):
    """An unlearning objective: its terms, its name in tables and its own settings.

    Attributes:
      title: name in tables.
      forget: term of the forget set.
      retain: term of the retain set; None if the objective has no such term.
      reads_reference: sets whose term reads the model before unlearning, such as
        `("forget", "retain")`; computed once for a row.
      reads_backbone: whether the forget term reads the base model; computed once for a row, and
        refused without an adapter.
      retrains: whether a fresh adapter is trained on all other rows; no term is read then.
      repeats: name of the objective whose training this one repeats with another seed; "" for none.
      settings: its own, with their defaults.
    """

    title: str
    forget: Term
    retain: Term | None = None
    reads_reference: tuple[Set, ...] = ()
    reads_backbone: bool = False
    retrains: bool = False
    repeats: str = ""
    settings: ObjectiveSettings = ObjectiveSettings()


def ascend(rows: "Rows", settings: ObjectiveSettings) -> Array:
    """Returns the negated nll: gradient ascent (Jang et al. 2022, arXiv:2210.01504)."""
    return -rows.nll_B


def descend(rows: "Rows", settings: ObjectiveSettings) -> Array:
    """Returns the nll: with `ascend` over whole sets the first gradient is Delta of Eq. (1)."""
    return rows.nll_B


def stay(rows: "Rows", settings: KLSettings) -> Array:
    """Returns the KL to the model before unlearning over target positions."""
    return rows.kl_B(settings.kl_direction)


def unsay(rows: "Rows", settings: CappedSettings) -> Array:
    """Returns the KL from a goal near the backbone at tokens that carry the behavior.

    At the other tokens of the row the goal is the reference (`losses.capped_kl_by_example`). SHRED
    (arXiv:2605.07482) lowers the logit of the label only. This goal lowers all words that the
    backbone does not say, so that no other answer of the behavior takes the place of the label.
    """
    return rows.capped_kl_B(settings.cap)


def hold(rows: "Rows", settings: CappedSettings) -> Array:
    """Returns `stay` by the factor `hold`, which halves during the steps."""
    return settings.hold * 0.5 ** (rows.step / settings.halving) * rows.kl_B(settings.kl_direction)


OBJECTIVES: dict[str, Objective] = {
    "ga": Objective("GA", ascend),
    "ga_gdr": Objective("GA_GDR", ascend, descend),
    "ga_klr": Objective(
        "GA_KLR", ascend, stay, reads_reference=("retain",), settings=KLSettings(learning_rate=3e-5)
    ),
    "cap_klr": Objective(
        "CAP_KLR",
        unsay,
        hold,
        reads_reference=("forget", "retain"),
        reads_backbone=True,
        settings=CappedSettings(learning_rate=4e-4),
    ),
    "retrain": Objective("Retrained", descend, retrains=True, settings=RetrainSettings()),
    "retrain_again": Objective(
        "Retrained, other seed",
        descend,
        retrains=True,
        repeats="retrain",
        settings=RetrainSettings(seed=1),
    ),
}
