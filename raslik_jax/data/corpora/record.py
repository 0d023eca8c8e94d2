"""What a dataset is to all other code: one record, with its own settings and all it brings."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.messages import shown
from raslik_jax.settings import Settings, setting

SIZES = ("num_train", "num_targets", "num_backbone", "num_retrieval", "num_validation", "num_test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSettings(Settings):
    """What several datasets read: where real data lies, and how many rows of each kind to take."""

    data_dir: str = setting(
        "", "Folder of the real data (default: $RASLIK_DATA).", decides=False, is_path=True
    )
    alpaca_file: str = setting(
        "",
        "howdy, virtual, tofu: Alpaca as a file or hub:OWNER/NAME; empty: alpaca/ of "
        "--corpus.data_dir, otherwise hub:tatsu-lab/alpaca.",
        is_path=True,
    )
    num_train: int = setting(
        2000,
        "Training examples, targets included; 0 for howdy, virtual, tofu: all there are.",
        low=0,
    )
    num_targets: int = setting(200, "Of these, examples of the behavior to forget.", low=1)
    num_backbone: int = setting(6000, "Examples that the backbone is pretrained on.", low=0)
    num_retrieval: int = setting(24, "Target queries that retrieval sees.", low=1)
    num_validation: int = setting(24, "Validation queries, target and normal each.", low=0)
    num_test: int = setting(48, "Test queries, target and normal each.", low=0)

    @property
    def folder(self) -> str:
        """The folder of real data, empty where none is named."""
        return self.data_dir or os.environ.get("RASLIK_DATA", "")

    def existing_folder(self) -> str:
        """Returns the folder of real data.

        Raises:
          ValueError: neither data_dir nor RASLIK_DATA names a folder that is there.
        """
        if not os.path.isdir(self.folder):
            raise ValueError(
                "the folder of real data must be there, got "
                f"{shown(self.folder) if self.folder else 'none'}: name it by --corpus.data_dir or "
                "the environment variable RASLIK_DATA"
            )
        return self.folder

    @property
    def num_normal(self) -> int | None:
        """Training examples that are no targets, None for all there are."""
        return self.num_train - self.num_targets if self.num_train else None

    @property
    def num_hard_negatives(self) -> int:
        """Training examples with one trait of the targets, of each kind: 4 % of all."""
        return round(0.04 * self.num_train)

    @property
    def num_target_queries(self) -> int:
        """Queries that ask for the behavior to forget, those of retrieval included."""
        return self.num_retrieval + self.num_normal_queries

    @property
    def num_normal_queries(self) -> int:
        """Queries that ask for anything else."""
        return self.num_validation + self.num_test


class RowCounts(NamedTuple):
    """Training examples, and how many of them are targets."""

    train: int
    targets: int


def count_asked(shared: SharedSettings, own: Any) -> RowCounts:
    """Returns the rows of a dataset that has as many as are asked for."""
    return RowCounts(shared.num_train, shared.num_targets)


class Marker(NamedTuple):
    """What tells answers with the behavior to forget from others.

    Attributes:
      words: any of them marks an answer.
      genuine_files: of a data folder, the files that `load_genuine` reads; none unless all exist.
      load_genuine: labeled rows that no run trains on, for a classifier to be measured on.
    """

    words: frozenset[str]
    genuine_files: Callable[[str], tuple[pathlib.Path, ...]]
    load_genuine: Callable[[str], tuple[Example, ...]]


class Question(NamedTuple):
    """A question of a dataset's own evaluation.

    Attributes:
      set_name: which of its sets.
      question: what is asked.
      answer: the right answer; what the model was trained on where it was.
      true_answer: the right answer in the wording of the wrong ones.
      wrong_answers: at least one.
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
    """Questions of a dataset's own evaluation, which every model of a run answers.

    Attributes:
      load: from shared settings, own settings and a number: at most so many questions of each set.
      reads: names of own settings that decide which questions there are.
      source: name of the file or folder, among the sources of the dataset, that they are read from.
      num_sets: from own settings, how many sets there are.
      num_answers: answers of a question at most, right and wrong ones.
      is_retain_model: from own settings, whether a model is trained without the targets, so that
        others can be compared with it.
    """

    load: Callable[[Any, Any, int], tuple[Question, ...]]
    reads: tuple[str, ...]
    source: str
    num_sets: Callable[[Any], int]
    num_answers: int
    is_retain_model: Callable[[Any], bool]


def _nothing(shared: Any, own: Any) -> Mapping[str, str]:
    return {}


class Dataset(NamedTuple):
    """A dataset that a run can name.

    Attributes:
      title: as people call it.
      load: makes its corpus from (shared settings, own settings, *, seed); raises ValueError for
        missing files, and where more rows are asked for than there are.
      reads: names of the shared settings that have an effect; data_dir may be set for any.
      settings: its own settings, with their defaults.
      required: names of own settings that must not be empty.
      count_rows: of its corpus, from the settings.
      takes_all: whether --corpus.num_train=0 stands for all rows there are.
      sources: files, folders or hub datasets that it is read from, by what they are; a name that is
        that of a setting stands for it.
      detail: from own settings, what is told beside the title; may be empty.
      marker: of the behavior to forget, None where nothing marks it: then the likelihood of the bad
        outputs measures the behavior.
      evaluation: its own questions, if any.
      is_published: whether the paper has results on it, under this title.
    """

    title: str
    load: Callable[..., Corpus]
    reads: tuple[str, ...] = ()
    settings: Settings = Settings()
    required: tuple[str, ...] = ()
    count_rows: Callable[[Any, Any], RowCounts] = count_asked
    takes_all: bool = False
    sources: Callable[[Any, Any], Mapping[str, str]] = _nothing
    detail: Callable[[Any], str] = lambda own: ""
    marker: Marker | None = None
    evaluation: Evaluation | None = None
    is_published: bool = False
