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
        "training rows by their id, or place, or text.",
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
