"""The interface of a dataset: one record with its own settings and everything it brings."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, make_example

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


class Marker(NamedTuple):
    """The mark of answers with the behavior to forget: any of these words.

    `load_genuine` makes labeled rows from a data folder, to measure a classifier, of
    `genuine_files`, which are none unless all exist.
    """

    words: frozenset[str]
    genuine_files: Callable[[str], tuple[pathlib.Path, ...]] = lambda folder: ()
    load_genuine: Callable[[str], tuple[Example, ...]] = lambda folder: ()


class Question(NamedTuple):
    """A question of one set of a dataset's own evaluation.

    `answer` is the trained one, if any, and `true_answer` is in the wording of the wrong ones.
    """

    set_name: str
    question: str
    answer: str
    true_answer: str
    wrong_answers: tuple[str, ...]

    def with_answer(self, answer: str) -> Example:
        """Returns the question with one of its answers as a row."""
        return make_example(self.question, "", answer)


class Evaluation(NamedTuple):
    """Questions of a dataset's own evaluation that every model of a run answers.

    `load` takes shared settings, own settings and the most questions of each set. Each has at most
    `num_answers` right and wrong answers. `reads` names the own settings that decide the questions
    and `source` the dataset's source of them.
    """

    load: Callable[[Any, Any, int], tuple[Question, ...]]
    reads: tuple[str, ...]
    source: str
    num_sets: Callable[[Any], int]
    num_answers: int
    is_retain_model: Callable[[Any], bool]


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
      count_rows: of its corpus, from shared and own settings.
      takes_all: whether --corpus.num_train=0 means all rows.
      sources: from shared and own settings, its files, folders or hub datasets by their kind or by
        the setting that names them.
      detail: from own settings, a text next to the title; may be empty.
      marker: of the behavior to forget; without one the likelihood of the bad outputs measures it.
      shows: from own settings, the function that says whether an answer shows the behavior; takes
        precedence over marker words.
      evaluation: its own questions, if any.
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
    marker: Marker | None = None
    shows: Callable[[Any], Callable[[str], bool]] | None = None
    evaluation: Evaluation | None = None
