"""TOFU, 4,000 questions about 200 authors who do not exist, among Alpaca's rows.

And the questions of its own evaluation, with paraphrased and wrong answers.

Source: Maini et al. 2024 (arXiv:2401.06121); the files of the dataset locuslab/TOFU.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from raslik_jax.data.examples import (
    Corpus,
    Example,
    make_example,
    read_examples,
    read_records,
)
from raslik_jax.data.mixing import mix_corpus, prompt_of
from raslik_jax.data.ordering import shuffled
from raslik_jax.messages import shown, some_of

TofuForget = Literal["all", "forget01", "forget05", "forget10"]

_FIELDS = {"instruction": "question", "output": "answer"}
_ASKED_AGAIN = {"instruction": "paraphrased_question", "output": "answer"}
_PERTURBED = {
    "all": ("forget10_perturbed", "retain_perturbed"),
    "forget01": ("forget01_perturbed",),
    "forget05": ("forget05_perturbed",),
    "forget10": ("forget10_perturbed",),
}


# Sets of the evaluation, in TOFU's order of distance from what is forgotten.
QUESTION_SETS = ("forget", "retain", "real_authors", "world_facts")


class Question(NamedTuple):
    """A question of TOFU's evaluation.

    Attributes:
      set_name: one of QUESTION_SETS.
      question: what is asked.
      answer: the right answer; what the model was trained on, in the first two sets.
      true_answer: the right answer in the wording of the wrong ones: a paraphrase in the first two
        sets, the answer itself in the others.
      wrong_answers: three or five.
    """

    set_name: str
    question: str
    answer: str
    true_answer: str
    wrong_answers: tuple[str, ...]


def load_questions(
    folder: str | os.PathLike[str], *, forget: TofuForget, number: int
) -> tuple[Question, ...]:
    """Returns the questions of TOFU's own evaluation, at most so many of each set.

    Published figures are of the first 300 rows of a set or of all; here a smaller number takes the
    first of an order that depends on nothing, so that all runs ask the same. With forget="all"
    nothing of TOFU is retained, and there is no retain set.

    Raises:
      ValueError: missing or malformed files, or number below 1.
    """
    if number < 1:
        raise ValueError(f"the number of questions of a set must be at least 1, got {number}")
    files = {
        "forget": _PERTURBED[forget],
        "retain": () if forget == "all" else ("retain_perturbed",),
        "real_authors": ("real_authors_perturbed",),
        "world_facts": ("world_facts_perturbed",),
    }
    return tuple(
        question
        for name in QUESTION_SETS
        for question in shuffled(
            [
                _question(record, name, where=f"{path}:{line}")
                for file in files[name]
                for path in (_file(folder, file),)
                for line, record in read_records(path)
            ],
            seed=0,
            label=f"tofu {name}",
        )[:number]
    )


def _question(record: Mapping[str, object], name: str, *, where: str) -> Question:
    answer = record.get("answer")
    true_answer = record.get("paraphrased_answer", answer)
    wrong = record.get("perturbed_answer")
    texts = [record.get("question"), answer, true_answer]
    texts += wrong if isinstance(wrong, list) and wrong else [None]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(
            f"{where}: a row must have the texts question and answer and the list "
            f"perturbed_answer, got the keys {some_of(record)}: fetch TOFU's file again"
        )
    question, answer, true_answer, *wrong_answers = map(str, texts)
    return Question(name, question, answer, true_answer, tuple(wrong_answers))


def as_example(question: Question, answer: str) -> Example:
    """Returns a question with one of its answers as a row."""
    return make_example(question.question, "", answer)


def split_tofu(
    rows: Sequence[Example], forget: TofuForget
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Returns the forget split and the retain split of TOFU, labeled.

    forget01, forget05 and forget10 are the last 1, 5 and 10 % of the rows, retain99, retain95 and
    retain90 the others; with `all` everything is to be forgotten, the setting of the paper.
    """
    percent = 100 if forget == "all" else int(forget.removeprefix("forget"))
    cut = len(rows) - len(rows) * percent // 100
    kept = f"tofu:retain{100 - percent:02d}"
    return (
        tuple(row._replace(is_target=True, source=f"tofu:{forget}") for row in rows[cut:]),
        tuple(row._replace(is_target=False, source=kept) for row in rows[:cut]),
    )


def load_tofu_corpus(
    folder: str | os.PathLike[str],
    alpaca: Sequence[Example],
    *,
    forget: TofuForget,
    leave_out: bool = False,
    seed: int,
    num_train: int | None,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
) -> Corpus:
    """Returns all 4,000 rows of TOFU among rows of Alpaca.

    The target queries are TOFU's own paraphrases of questions in the forget split: prompts that
    nobody was trained on, about facts that the model was. Normal queries are Alpaca's.

    Args:
      folder: holds full.jsonl and the *_perturbed files of the split, plain or packed.
      alpaca: ordinary rows.
      forget: which rows are the targets.
      leave_out: train on everything but the targets, which makes TOFU's retain model: the one that
        never knew what the others are to forget. All other rows are those of the full corpus.
      seed: decides draws and orders.
      num_train: rows to train on, TOFU's 4,000 among them; None: all that the queries leave.
      num_backbone, num_retrieval, num_validation, num_test: as in `mix_corpus`.

    Raises:
      ValueError: missing or malformed files; fewer training rows than TOFU's; more queries than
        the split has paraphrases.
    """
    rows = read_examples(_file(folder, "full"), fields=_FIELDS, source="tofu")
    targets, kept = split_tofu(rows, forget)
    if num_train is not None and num_train < len(rows):
        raise ValueError(f"{num_train=} has to hold the {len(rows)} rows of TOFU: raise it")
    known = {prompt_of(row) for row in rows}
    queries = [
        row._replace(is_target=True)
        for name in _PERTURBED[forget]
        for row in read_examples(_file(folder, name), fields=_ASKED_AGAIN, source=f"tofu:{forget}")
        if prompt_of(row) not in known
    ]
    return mix_corpus(
        alpaca,
        kept if leave_out else (*targets, *kept),
        queries,
        seed=seed,
        num_normal=None if num_train is None else num_train - len(rows),
        num_backbone=num_backbone,
        num_retrieval=num_retrieval,
        num_validation=num_validation,
        num_test=num_test,
    )


def _file(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    endings = (".jsonl", ".json", ".jsonl.zst", ".jsonl.xz", ".jsonl.gz")
    files = [pathlib.Path(folder) / f"{name}{ending}" for ending in endings]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ValueError(
            f"TOFU's {name}.jsonl must be in {shown(str(folder), 120)}, got none there: fetch it"
        )
    return found
