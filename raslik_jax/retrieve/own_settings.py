"""Settings of single retrieval strategies, each of one member of the family."""

import dataclasses
from typing import Literal

from raslik_jax.base.settings import Settings, setting

QueryText = Literal["prompt", "prompt_and_output"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bm25Settings(Settings):
    """Settings of BM25."""

    query_text: QueryText = setting(
        "prompt", "Text of a query; its output is that of --sketch.query_output."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(Bm25Settings):
    """Settings of EmbeddingSim."""

    checkpoint: str = setting(
        "BAAI/bge-base-en-v1.5",
        "BERT or RoBERTa encoder, a directory or hub name.",
        is_path=True,
        is_hub=True,
        auto="AutoModel",
    )
    pooling: Literal["", "cls", "mean"] = setting("", "Pooling, where the checkpoint does not say.")

    def problems(self) -> list[str]:
        return [] if self.checkpoint else ["--checkpoint must be given, got none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenSettings(Settings):
    """Sets that somebody chose, or edited."""

    forget_file: str = setting(
        "",
        "JSONL of the rows to forget, such as an edited forget.jsonl of a run or of raslik query: "
        "training rows by their id, or place, or text. All count alike, whatever weight they had.",
        is_path=True,
    )
    retain_file: str = setting(
        "",
        "JSONL of the rows to retain, likewise; empty: as many others at random.",
        is_path=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureSettings(Settings):
    """Settings of controlled randomization."""

    oracle_share: float = setting(0.5, "Share of the forget set from the oracle.", low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStageSettings(Settings):
    """Settings of finding by one gradient and choosing by another."""

    candidates: float = setting(
        4.0, "Rows found for each one that is chosen; 0: all are chosen from.", zero_or=1.0
    )
    collateral: float = setting(
        1.0, "Nats of a normal row that weigh as much as one of a query; 0: none.", low=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSettings(TwoStageSettings):
    """Settings of weights on rows."""

    ridge: float = setting(
        0.1,
        "Price of squared weights, in mean squares of what a row of weight 1 does: a larger one "
        "spreads the weights over more rows.",
        above=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoverageSettings(Settings):
    """Settings of covering all queries."""

    candidates: float = setting(4.0, "Rows found for each one that is chosen.", low=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSettings(Settings):
    """Settings of a retain set of two roles."""

    protect_share: float = setting(
        0.5,
        "Share of the retain set that is there to protect normal rows; the rest pulls against the "
        "queries, as the whole set does in the paper.",
        low=0,
        high=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSettings(MixedSettings):
    """Settings of a trial run."""

    rows: int = setting(64, "Rows of each set, those of both ends of the scores.", low=1)
    steps: int = setting(32, "Steps of the trial.", low=1)
    learning_rate: float = setting(5e-4, "Learning rate of its BASE_KLR.", above=0)
