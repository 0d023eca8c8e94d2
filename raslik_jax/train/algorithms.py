"""What settings, help texts and reports know of the unlearning algorithms, without jax."""

import dataclasses
from typing import Literal, NamedTuple

from raslik_jax.settings import Settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(Settings):
    """What every algorithm can be told."""

    learning_rate: float = setting(1e-5, "Constant learning rate.", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLSettings(AlgorithmSettings):
    """Settings of a KL to the model before unlearning."""

    kl_direction: Literal["reverse", "forward"] = setting(
        "reverse", "reverse: KL(unlearned || reference), the paper's. forward: the other way round."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NPOSettings(AlgorithmSettings):
    """Settings of negative preference optimization."""

    beta: float = setting(0.1, "Inverse temperature; toward 0 it becomes GA.", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NPOKLSettings(NPOSettings, KLSettings):
    """Settings of negative preference optimization with a KL."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimNPOSettings(AlgorithmSettings):
    """Settings of SimNPO."""

    beta: float = setting(4.5, "Inverse temperature.", above=0)
    delta: float = setting(0.0, "Margin that the mean token loss is held against.", low=0)
    forget_weight: float = setting(0.125, "In the place of --unlearn.forget_weight.", above=0)


class Algorithm(NamedTuple):
    """An unlearning algorithm: its title and its own settings, with their defaults."""

    title: str
    settings: AlgorithmSettings = AlgorithmSettings()


ALGORITHMS: dict[str, Algorithm] = {
    "ga": Algorithm("GA"),
    "ga_gdr": Algorithm("GA_GDR"),
    "ga_klr": Algorithm("GA_KLR", KLSettings(learning_rate=3e-5)),
    "npo": Algorithm("NPO", NPOSettings()),
    "npo_gdr": Algorithm("NPO_GDR", NPOSettings()),
    "npo_klr": Algorithm("NPO_KLR", NPOKLSettings(learning_rate=3e-5)),
    "simnpo": Algorithm("SimNPO", SimNPOSettings()),
}
