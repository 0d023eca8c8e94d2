"""TOFU: 4,000 questions about 200 fictitious authors among Alpaca's rows.

It also has the questions of its own evaluation with paraphrased and wrong answers.

Source: Maini et al. 2024 (arXiv:2401.06121); the files of the dataset locuslab/TOFU.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from experiments.studies.corpora.mixing import (
    NUM_ANSWERED,
    alpaca_source,
    count_normal,
    find_files,
    load_alpaca,
    mix_corpus,
)
from experiments.studies.corpora.tofu_metrics import QUESTION_SETS
from raslik_jax.base.messages import some_of
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora import record
from raslik_jax.data.examples import Corpus, Example, make_example, prompt_of
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.read.formats import read_examples

_FIELDS = {"instruction": "question", "output": "answer"}
_NUM_ROWS = 4000
_ENDINGS = (".jsonl", ".json", ".jsonl.zst", ".jsonl.xz", ".jsonl.gz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TofuSettings(Settings):
    """Which part of TOFU is to be forgotten."""

    forget: Literal["all", "forget01", "forget05", "forget10"] = setting(
        "all", "Rows to forget. They decide the number of targets."
    )
    train: Literal["full", "retain"] = setting(
        "full",
        "full: train on all of TOFU. retain: train without the rows to forget, which gives the "
        "retain model for forget quality (see retain_run).",
    )
    questions: int = setting(
        100, "Questions of each set of TOFU's own evaluation; 0: none.", low=0, decides=False
    )
    retain_run: str = setting(
        "",
        "Forget quality: work directory of the same run with --corpus.tofu.train=retain.",
        is_path=True,
        decides=False,
    )

    @property
    def percent(self) -> int:
        """Share of the rows to forget."""
        return 100 if self.forget == "all" else int(self.forget.removeprefix("forget"))

    @property
    def perturbed(self) -> tuple[str, ...]:
        """Files of the rows to forget with paraphrases and wrong answers."""
        if self.forget == "all":
            return "tofu/forget10_perturbed", "tofu/retain_perturbed"
        return (f"tofu/{self.forget}_perturbed",)


class Question(NamedTuple):
    """A question of one set of TOFU's own evaluation.

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


def split_tofu(
    rows: Sequence[Example], own: TofuSettings
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Returns the forget split and the retain split of TOFU, labeled.

    forget01, forget05 and forget10 are the last 1, 5 and 10 % of the rows. retain99, retain95 and
    retain90 are the others. With `all` everything is to be forgotten, as in the paper.
    """
    cut = len(rows) - len(rows) * own.percent // 100
    kept = f"tofu:retain{100 - own.percent:02d}"
    forget = (row._replace(is_target=True, source=f"tofu:{own.forget}") for row in rows[cut:])
    return tuple(forget), tuple(row._replace(is_target=False, source=kept) for row in rows[:cut])


def load_tofu(shared: record.SharedSettings, own: TofuSettings, *, seed: int) -> Corpus:
    """Returns all 4,000 rows of TOFU among Alpaca's rows, or without those to forget.

    The target queries are TOFU's own paraphrases of questions in the forget split: new prompts
    about trained facts. Normal queries are the ordinary rows'. A retain model never saw the rows to
    forget. It is trained on the other rows of the full corpus.
    """
    (full,) = find_files(shared, "tofu/full", endings=_ENDINGS)
    rows = read_examples(full, fields=_FIELDS, name="tofu")
    targets, kept = split_tofu(rows, own)
    if shared.num_train and shared.num_train < len(rows):
        raise ValueError(
            f"--corpus.num_train must be 0 or at least the {len(rows)} rows of TOFU, got "
            f"{shared.num_train}: raise it"
        )
    known = {prompt_of(row) for row in rows}
    again = {"instruction": "paraphrased_question", "output": "answer"}
    queries = [
        row._replace(is_target=True)
        for path in find_files(shared, *own.perturbed, endings=_ENDINGS)
        for row in read_examples(path, fields=again, name=f"tofu:{own.forget}")
        if prompt_of(row) not in known
    ]
    trained = kept if own.train == "retain" else (*targets, *kept)
    alpaca = load_alpaca(shared)
    return mix_corpus(shared, alpaca, trained, queries, seed=seed, num_mixed=len(rows))


def load_questions(
    shared: record.SharedSettings, own: TofuSettings, number: int
) -> tuple[Question, ...]:
    """Returns the questions of TOFU's own evaluation, at most so many of each set.

    Published figures are of the first 300 rows of a set or of all. Here a smaller number takes the
    first of one fixed order, so that all runs ask the same. If everything is to be forgotten there
    is no retain set.
    """
    names: dict[str, tuple[str, ...]]
    names = {name: (f"tofu/{name}_perturbed",) for name in QUESTION_SETS}
    names |= {"forget": own.perturbed} | ({"retain": ()} if own.forget == "all" else {})
    questions: list[Question] = []
    for name, files in names.items():
        found = [
            _question(row, name)
            for path in find_files(shared, *files, endings=_ENDINGS)
            for row in read_examples(path, fields=_FIELDS, check=_question)
        ]
        questions += shuffled(found, seed=0, label=f"tofu {name}")[:number]
    return tuple(questions)


def _question(row: Example, name: str = "") -> Question:
    """Returns a row's question; its true answer is a paraphrase in the sets of TOFU's authors."""
    wrong, true = row.extra.get("perturbed_answer"), row.extra.get("paraphrased_answer", row.output)
    texts: list[Any] = [row.output, true, *(wrong if isinstance(wrong, list) and wrong else [None])]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(
            "a row must have an answer and a list perturbed_answer, got the keys "
            f"{some_of(row.extra)}: fetch TOFU's file again"
        )
    return Question(name, row.instruction, row.output, true, tuple(texts[2:]))


def _count(shared: record.SharedSettings, own: TofuSettings) -> record.RowCounts:
    everything = _NUM_ROWS + NUM_ANSWERED - count_normal(shared)
    return record.RowCounts(shared.num_train or everything, _NUM_ROWS * own.percent // 100)


DATASET = record.Dataset(
    title="TOFU",
    load=load_tofu,
    reads=("alpaca_file", *(name for name in record.SIZES if name != "num_targets")),
    settings=TofuSettings(),
    count_rows=_count,
    takes_all=True,
    sources=lambda shared, own: {
        **alpaca_source(shared),
        "tofu": shared.folder and os.path.join(shared.folder, "tofu"),
    },
    detail=lambda own: own.forget,
)
