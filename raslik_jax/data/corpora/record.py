"""The interface of a dataset: one record with all facts about it and its own settings."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import QUERY_SETS, Corpus

SIZES = ("num_train", "num_targets", "num_backbone", "num_retrieval", "num_validation", "num_test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSettings(Settings):
    """The settings of several datasets: the folder of real data and numbers of rows."""

    data_dir: str = setting(
        "", "Folder of the real data (default: $RASLIK_DATA).", decides=False, is_path=True
    )
    alpaca_file: str = setting(
        "",
        "Rows of Alpaca for the corpora of the paper, a file or hub:OWNER/NAME; empty: alpaca/ of "
        "--corpus.data_dir, or else hub:tatsu-lab/alpaca.",
        is_rows=True,
    )
    num_train: int = setting(
        2000,
        "Training examples, targets included; 0 for the corpora of the paper: all.",
        low=0,
    )
    num_targets: int = setting(
        200, "Targets among --num_train: examples of the behavior to forget.", low=1
    )
    num_backbone: int = setting(4000, "Examples for pretraining the base model.", low=0)
    num_retrieval: int = setting(24, "Target queries for retrieval.", low=1)
    num_validation: int = setting(24, "Validation queries of each kind, target and normal.", low=0)
    num_test: int = setting(48, "Test queries of each kind, target and normal.", low=0)

    @property
    def folder(self) -> str:
        """The folder of real data; empty if none is named."""
        return self.data_dir or os.environ.get("RASLIK_DATA", "")

    @property
    def num_hard_negatives(self) -> int:
        """Training examples of each kind with one trait of the targets: 4 % of all."""
        return round(0.04 * self.num_train)


class RowCounts(NamedTuple):
    """The numbers of training examples and of targets among them."""

    train: int
    targets: int


class Dataset(NamedTuple):
    """A dataset that a run can name.

    Attributes:
      title: the common name.
      load: makes its corpus from (shared settings, own settings, *, seed); raises ValueError if
        files or rows are missing.
      reads: names of the shared settings that have an effect; data_dir may be set for any.
      settings: its own settings with their defaults.
      required: names of own settings that must not be empty.
      held_out: query sets whose prompts are in neither the training rows nor the backbone's.
      count_rows: function from shared and own settings to the counts of its corpus.
      takes_all: whether --corpus.num_train=0 means all rows.
      sources: function from shared and own settings to its files, folders or hub datasets, by their
        kind or by the setting that names them.
      detail: function from own settings to a text next to the title; may be empty.
      words: words that mark answers with the behavior; without them the likelihood of the bad
        outputs measures it.
      shows: function from own settings to a function that decides whether an answer shows the
        behavior; it takes precedence over marker words.
    """

    title: str
    load: Callable[..., Corpus]
    reads: tuple[str, ...] = ()
    settings: Settings = Settings()
    required: tuple[str, ...] = ()
    held_out: tuple[str, ...] = QUERY_SETS
    count_rows: Callable[[Any, Any], RowCounts] = lambda shared, own: RowCounts(
        shared.num_train, shared.num_targets
    )
    takes_all: bool = False
    sources: Callable[[Any, Any], Mapping[str, str]] = lambda shared, own: {}
    detail: Callable[[Any], str] = lambda own: ""
    words: frozenset[str] = frozenset()
    shows: Callable[[Any], Callable[[str], bool]] | None = None
