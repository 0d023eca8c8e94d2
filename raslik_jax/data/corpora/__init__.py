"""The corpora that a run can name. Each is made from the run's settings."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from raslik_jax.base.files import read_text
from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.settings import FROM_STUDIES, Settings, Stage, replaced, setting
from raslik_jax.data.corpora import records, toy
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.examples import Corpus, check_corpus
from raslik_jax.data.read.sources import content_files
from raslik_jax.data.tokens.prompts import TEMPLATES, check_template

# Rows that a run can take.
_MOST = 10_000_000
DATASETS: dict[str, Dataset] = {
    "toy": toy.DATASET,
    "records": records.DATASET,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(SharedSettings, Stage):
    """The rows that train the model and the questions that it is asked."""

    dataset: str = setting(
        "toy",
        "toy: rows that the program makes. records: your own rows, from "
        "--corpus.records.train_file and --corpus.records.queries_file.",
        family=DATASETS,
    )
    template: str = setting(
        "auto",
        "How rows become prompts. auto: alpaca for training rows of instructions, chat for "
        "conversations and for instructions with a system prompt or a history, plain for "
        "texts. alpaca, alpaca_newline, brief: instruction and input in a frame. plain: unchanged. "
        "chat: the tokenizer's chat template. A path: a file of a Jinja chat template. Rows of "
        "text are always unchanged.",
        is_path=True,
        names=TEMPLATES,
    )
    max_len: int = setting(512, "Most tokens of an example. Longer ones are cut at the end.", low=8)
    vocab_size: int = setting(
        2048, "Entries of the tokenizer, if the run trains one (BPE).", low=300, high=10**6
    )

    @property
    def record(self) -> Dataset:
        """The record of the dataset."""
        return DATASETS[self.dataset]

    @property
    def own(self) -> Settings:
        """The dataset's own settings."""
        return self[self.dataset]

    def problems(self) -> list[str]:
        record, name = self.record, f"--dataset={self.dataset}"
        template = check_template(self.template)
        found = [f"--template must be {template}"] if template else []
        unread = {"alpaca_file", *SIZES} - {*record.reads}
        found += [
            f"--{field.name} has no effect with {name}: leave it out"
            for field in dataclasses.fields(SharedSettings)
            if field.name in unread and getattr(self, field.name) != field.default
        ]
        found += [
            f"--{size} must be at most {_MOST:,}, got {number:,}"
            for size in SIZES
            if (number := getattr(self, size)) > _MOST
        ]
        found += [
            f"{name} needs --{self.dataset}.{field}: give it"
            for field in record.required
            if not getattr(self.own, field)
        ]
        if "num_train" in record.reads and not (self.num_train or record.takes_all):
            found.append(f"--num_train must be at least 1 with {name}, got 0")
        if "num_targets" in record.reads and 0 < self.num_train < self.num_targets:
            must = f"must be at most --num_train={self.num_train}, got {self.num_targets}"
            found.append(f"--num_targets {must}")
        return found

    def load(self, *, seed: int) -> Corpus:
        """Returns the training examples and queries; refuses queries that are not held out."""
        corpus = self.record.load(self, self.own, seed=seed)
        return check_corpus(corpus, held_out=self.record.held_out)

    def count(self) -> RowCounts:
        """Returns how many training examples and targets there will be."""
        return self.record.count_rows(self, self.own)

    def source_files(self) -> dict[str, pathlib.Path]:
        """Returns the files and folders of the corpus's sources by their kind.

        A dataset of the hub and a missing file are left out. A source of several files has an entry
        NAME/NUMBER/FILE for each.
        """
        fields = (field for part in (self, self.own) for field in dataclasses.fields(part))
        of_rows = {field.name for field in fields if field.metadata.get("is_rows")}
        found: dict[str, pathlib.Path] = {}
        for name, source in self.record.sources(self, self.own).items():
            if source and name in of_rows:
                parts = content_files(source).items()
                found |= {f"{name}/{part}".rstrip("/"): path for part, path in parts}
            elif source and os.path.exists(source):
                found[name] = pathlib.Path(source)
        return found


def describe(settings: Mapping[str, Any]) -> str:
    """Returns the name of the dataset in a corpus's stored settings, with its part of it."""
    name = settings["dataset"]
    record = DATASETS[name]
    detail = record.detail(replaced(record.settings, settings.get(name, {})))
    return f"{name} ({detail})" if detail else name


def describe_unregistered(settings: Iterable[Mapping[str, Any]]) -> str:
    """Returns a sentence about corpora whose dataset is not registered; "" without one."""
    known = {*DATASETS, ""}
    names = some_of(sorted({one.get("dataset", "") for one in settings} - known))
    lost = "so its marker words are unknown"
    return f"the dataset {names} is not registered, {lost}: {FROM_STUDIES}" if names else ""


def marker_words(dataset: str, path: str) -> frozenset[str]:
    """Returns the marks of the behavior to forget: a file's lines or the dataset's words.

    A line may be a phrase of several words. White space within it counts as one.
    """
    if not path:
        return DATASETS[dataset].words if dataset in DATASETS else frozenset()
    lines = (" ".join(line.split()) for line in read_text(path).lower().splitlines())
    words = frozenset(line for line in lines if line)
    if not words:
        raise ValueError(f"{shown(path, 200)} must have marker words, got none: write one a line")
    return words
