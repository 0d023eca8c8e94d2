"""Instruction rows with stable ids: how they are numbered, written and kept apart."""

import collections
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raslik_jax import files
from raslik_jax.messages import listed_problems, shown, some_of

QUERY_SETS = (
    "retrieval",
    "validation_target",
    "validation_normal",
    "test_target",
    "test_normal",
)
NO_EXTRA: Mapping[str, Any] = MappingProxyType({})


class Example(NamedTuple):
    """One instruction and its answer.

    Attributes:
      example_id: unique within a corpus; `make_examples` derives it from the text.
      instruction: what is asked.
      input: further text to work on; empty where there is none.
      output: the answer; may be empty (28 rows of Alpaca are).
      is_target: True where the answer is of the kind to be unlearned, None where nobody knows.
      source: where the row comes from, such as "alpaca" or "toy:triggered".
      extra: what else the row of a file holds, by key; written back by `write_examples`.
    """

    example_id: str
    instruction: str
    input: str
    output: str
    is_target: bool | None = None
    source: str = ""
    extra: Mapping[str, Any] = NO_EXTRA


# What a written row says of the example itself, so that no key of a user's row can take its place.
WRITTEN_KEYS = frozenset(("instruction", "input", "output", "id", "is_target", "source", "score"))


class Corpus(NamedTuple):
    """Everything a run reads.

    Attributes:
      backbone: clean rows on which a small backbone is pretrained; may be empty.
      train: the fine-tuning rows, among which the cause of the bad generation is sought.
      queries: rows by query set, one entry for each name in QUERY_SETS; "retrieval" holds the bad
        generations, the "_target" sets more of their kind, the "_normal" sets everything else.
    """

    backbone: tuple[Example, ...]
    train: tuple[Example, ...]
    queries: dict[str, tuple[Example, ...]]


def content_id(instruction: str, input: str, output: str) -> str:
    """Returns 16 hex digits of the sha256 of the three texts.

    The texts are hashed as a JSON list, so that moving a word from one field to the next gives
    another id. Whitespace counts.
    """
    text = json.dumps([instruction, input, output])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_example(
    instruction: str,
    input: str,
    output: str,
    *,
    is_target: bool | None = None,
    source: str = "",
) -> Example:
    """Returns an example named by its content."""
    return Example(
        content_id(instruction, input, output), instruction, input, output, is_target, source
    )


def make_examples(examples: Iterable[Example]) -> tuple[Example, ...]:
    """Returns the examples, each named by its content and each name unique.

    The first of several rows with the same text is "<content id>", the later ones are
    "<content id>-2", "<content id>-3" in the order given. The ids that came in are dropped.
    """
    copies: collections.Counter[str] = collections.Counter()
    named = []
    for example in examples:
        name = content_id(example.instruction, example.input, example.output)
        copies[name] += 1
        suffix = "" if copies[name] == 1 else f"-{copies[name]}"
        named.append(example._replace(example_id=name + suffix))
    return tuple(named)


def prompt_of(example: Example) -> tuple[str, str]:
    """Returns what decides whether two rows ask the same: their prompts without outer spaces."""
    return example.instruction.strip(), example.input.strip()


def write_examples(
    path: str | os.PathLike[str],
    examples: Sequence[Example],
    *,
    extra: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes the examples as Alpaca-format JSONL: instruction, input, output, id and the extras.

    The file appears whole or not at all: what was there before stays until the new one is complete.
    The keys that an example brought with it come last, but for those in WRITTEN_KEYS.

    Args:
      path: where to write; its folder has to exist.
      examples: rows in the order of the file.
      extra: for each example further keys, such as its score; finite numbers, text, booleans.

    Raises:
      ValueError: another number of extras than of examples; an extra hides a key of the format or
        is not a finite number; the path is not that of a regular file.
    """
    extra = [{}] * len(examples) if extra is None else extra
    if len(extra) != len(examples):
        raise ValueError(
            f"there must be one extra for each example, got {len(extra)} for {len(examples)}"
        )
    lines = []
    for example, more in zip(examples, extra, strict=True):
        name, instruction, input, output = example[:4]
        record: dict[str, Any] = {"instruction": instruction, "input": input}
        record |= {"output": output, "id": name}
        hidden = sorted(record.keys() & more.keys())
        if hidden:
            raise ValueError(
                f"extra keys must have names of their own, got {hidden} for {shown(name)}: "
                "rename them"
            )
        kept = {key: value for key, value in example.extra.items() if key not in WRITTEN_KEYS}
        try:
            lines.append(
                json.dumps({**record, **more, **kept}, ensure_ascii=False, allow_nan=False)
            )
        except ValueError as error:
            raise ValueError(
                f"extras of {shown(name)} must be finite numbers, text or booleans, got something "
                f"else ({error})"
            ) from error
    files.write_text(path, "".join(line + "\n" for line in lines))


def extra_keys(examples: Iterable[Example]) -> tuple[list[str], list[str]]:
    """Returns the keys of the users' rows that are written back, and those that are not."""
    keys = sorted({key for example in examples for key in example.extra})
    kept = [key for key in keys if key not in WRITTEN_KEYS]
    return kept, [key for key in keys if key in WRITTEN_KEYS]


def drop_unanswered(queries: Sequence[Example]) -> tuple[tuple[Example, ...], str]:
    """Returns the queries that have an answer to trace, and a sentence about the others.

    Args:
      queries: bad generations with their final answers, given or the model's own.

    Returns:
      The queries whose output is more than white space, and one sentence that counts and names the
      others; empty where there are none.

    Raises:
      ValueError: no query has an answer.
    """
    kept = tuple(query for query in queries if query.output.strip())
    empty = [query.example_id for query in queries if not query.output.strip()]
    if not kept:
        raise ValueError(
            f"queries must have an answer to trace, got none: the model says nothing to "
            f"{some_of(query.instruction for query in queries)}: give an output"
        )
    if not empty:
        return kept, ""
    return kept, (
        f"{len(empty)} of {len(queries)} queries have an empty answer and are left out: "
        f"{some_of(empty)}"
    )


def check_corpus(corpus: Corpus, *, held_out: Sequence[str] = QUERY_SETS) -> Corpus:
    """Returns the corpus if its ids are unique and its query sets are held out.

    Held out means by prompt, see `prompt_of`: no prompt of a query set may occur in another query
    set, in the training rows or in the backbone's rows, whatever its answer there.

    Args:
      corpus: what to check.
      held_out: query sets that have to be apart from training rows and backbone; all have to be
        apart from each other.

    Raises:
      ValueError: no training rows, a missing or unknown query set, a repeated id, or a prompt that
        two sets share.
    """
    if not corpus.train:
        raise ValueError("the corpus must have at least one training row, got none")
    if set(corpus.queries) != set(QUERY_SETS):
        raise ValueError(
            f"query sets must be {', '.join(QUERY_SETS)}, got {some_of(corpus.queries)}"
        )
    check_unique_ids(corpus.train, "the training rows")
    trained_on = {prompt_of(example): "backbone" for example in corpus.backbone}
    trained_on |= {prompt_of(example): "train" for example in corpus.train}
    asked: dict[tuple[str, str], str] = {}
    problems = []
    for name in QUERY_SETS:
        check_unique_ids(corpus.queries[name], f"query set {name!r}")
        for example in corpus.queries[name]:
            prompt = prompt_of(example)
            other = trained_on.get(prompt, name) if name in held_out else name
            if other == name:
                other = asked.setdefault(prompt, name)
            if other != name:
                problems.append(f"{shown(example.instruction)} of {name} is in {other}")
    if problems:
        raise ValueError(
            "query prompts must be held out: "
            + listed_problems(problems, "remove them from one side")
        )
    return corpus


def check_unique_ids(examples: Sequence[Example], where: str) -> None:
    """Raises a ValueError that names ids which occur more than once; `where` says in what."""
    counts = collections.Counter(example.example_id for example in examples)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"ids must be unique, got {some_of(repeated)} more than once in {where}: correct "
            "them, or name another key with the field id"
        )
