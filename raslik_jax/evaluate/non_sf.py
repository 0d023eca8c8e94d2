"""The ways to say whether an answer shows the behavior to forget, listed without jax."""

import dataclasses
from typing import NamedTuple

from raslik_jax.base.settings import Settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Settings):
    """Training of a classifier on the answers of the training examples."""

    checkpoint: str = setting(
        "FacebookAI/roberta-base",
        "RoBERTa or BERT checkpoint to start from, a directory or hub name; empty: a small BERT "
        "from scratch, which needs a learning rate near 1e-3.",
        is_path=True,
        is_hub=True,
        auto="AutoModel",
    )
    epochs: int = setting(3, "Passes over the answers.", low=1)
    learning_rate: float = setting(
        2e-5, "Learning rate of AdamW at the first step. It falls linearly to zero.", above=0
    )
    batch_size: int = setting(16, "Answers a step.", low=1)
    max_len: int = setting(256, "Most tokens of an answer. Longer ones are cut at the end.", low=8)
    held_out: float = setting(
        0.1, "Share of the answers of each class that measure its macro-F1.", above=0, below=1
    )
    examples: int = setting(
        0, "Most answers of each class, held-out ones included; 0: all.", zero_or=2
    )
    hidden_size: int = setting(64, "From scratch: embedding width.", low=1, multiple_of="num_heads")
    num_layers: int = setting(2, "From scratch: layers.", low=1)
    num_heads: int = setting(4, "From scratch: attention heads.", low=1)


class NonSfMeasure(NamedTuple):
    """A way to measure Non-SF: its title, its own settings and whether it is trained first."""

    title: str
    settings: Settings = Settings()
    is_trained: bool = False


NON_SF: dict[str, NonSfMeasure] = {
    "words": NonSfMeasure("Marker words"),
    "classifier": NonSfMeasure("Classifier", ClassifierSettings(), is_trained=True),
}
