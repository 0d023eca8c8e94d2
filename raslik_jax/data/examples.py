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

QUERY_SETS = ("retrieval", "validation_target", "validation_normal", "test_target", "test_normal")
# The queries that are made of training rows, where a run has no others.
HELD_OUT = "held-out"
# What a written row says of the example itself, so that no key of a user's row can take its place.
WRITTEN_KEYS = frozenset(("id", "is_target", "source", "score", "place", "row_format", "row_texts"))
# Of a row of instruction, input and output; of others it is part of the instruction.
_BEFORE = ("system", "history")
TEXTS = ("instruction", "input", "output")


class Example(NamedTuple):
    """One instruction and its answer, or a row of another format with these as its texts.

    The id is unique within a corpus; `make_examples` derives it from the content. The output may be
    empty (28 rows of Alpaca are). `is_target` is True where the answer is of the kind to be
    unlearned, None where nobody knows; `source` is such as "alpaca" or "toy:triggered"; `extra`
    holds what else the row of a file has, by key, which `write_examples` writes back; `place` is
    its line in a file of lines, else its number among the rows, from 1; 0 for a row of no file.
    `format` is a name of `rows.FORMATS`, and `content` what the row has of that format's own fields
    beside the texts.
    """

    example_id: str
    instruction: str
    input: str
    output: str
    is_target: bool | None = None
    source: str = ""
    extra: Mapping[str, Any] = MappingProxyType({})
    place: int = 0
    format: str = "alpaca"
    content: Mapping[str, Any] = MappingProxyType({})


class Corpus(NamedTuple):
    """Everything a run reads: rows to pretrain a small backbone on, to fine-tune on, and queries.

    `queries` has rows by each name in QUERY_SETS; "retrieval" holds the bad generations, the
    "_target" sets more of their kind, the "_normal" sets everything else.
    """

    backbone: tuple[Example, ...]
    train: tuple[Example, ...]
    queries: dict[str, tuple[Example, ...]]


def content_id(instruction: str, input: str, output: str, *content: Any) -> str:
    """Returns 16 hex digits of the sha256 of the three texts, and further content, as JSON."""
    text = json.dumps([instruction, input, output, *content])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_of(example: Example) -> tuple[Any, ...]:
    """Returns what decides how an example is trained on: its texts, and its content if any."""
    more = ({"format": example.format, **example.content},) if example.content else ()
    return (*example[1:4], *more)


def make_example(
    instruction: str, input: str, output: str, *, is_target: bool | None = None, source: str = ""
) -> Example:
    """Returns an example named by its content."""
    name = content_id(instruction, input, output)
    return Example(name, instruction, input, output, is_target, source)


def make_examples(examples: Iterable[Example]) -> tuple[Example, ...]:
    """Returns the examples, each named by its content and each name unique.

    The first of several rows with the same text is "<content id>", the later ones are
    "<content id>-2", "<content id>-3" in the order given.
    """
    copies: collections.Counter[str] = collections.Counter()
    named = []
    for example in examples:
        name = content_id(*content_of(example))
        copies[name] += 1
        suffix = "" if copies[name] == 1 else f"-{copies[name]}"
        named.append(example._replace(example_id=name + suffix))
    return tuple(named)


def prompt_of(example: Example) -> tuple[str, str]:
    """Returns what decides whether two rows ask the same: their prompts without outer spaces.

    What stands before the instruction counts, as a system prompt does; a text without a prompt is
    one itself.
    """
    asked = example.instruction.strip(), example.input.strip()
    if not any(asked):
        return example.output.strip(), ""
    before = {name: example.content[name] for name in _BEFORE if name in example.content}
    return (f"{json.dumps(before)}\n{asked[0]}", asked[1]) if before else asked


def query_file(split: str, kind: str) -> str:
    """Returns where a run has the target or normal queries of a split, below its work directory.

    The split "held-out" is of training examples that its sets leave out.
    """
    is_made = split == HELD_OUT
    return f"retrieve/sizes/{kind}.jsonl" if is_made else f"corpus/{split}_{kind}.jsonl"


def write_examples(
    path: str | os.PathLike[str],
    examples: Sequence[Example],
    *,
    extra: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Writes the examples as JSONL: instruction, input, output, id and the extras.

    A row of another format has its own fields in place of the three texts, which follow as
    `row_texts`, and the format as `row_format`. The file appears whole or not at all.
    `extra` has further keys for each example, such as its
    score: finite numbers, text or booleans. Then comes the example's place in its own file, and
    last the other keys that it brought along. `formats.read_written` reads the file again.
    """
    lines = []
    extra = [{}] * len(examples) if extra is None else extra
    for example, more in zip(examples, extra, strict=True):
        name, *texts = example[:4]
        is_alpaca = example.format == "alpaca"
        record: dict[str, Any] = dict(zip(TEXTS, texts, strict=True)) if is_alpaca else {}
        record |= {**example.content, "id": name, **more}
        # Of a conversation that waits for an answer, or of ids, the fields do not say the texts.
        record |= {} if is_alpaca else {"row_format": example.format, "row_texts": texts}
        record |= {"place": example.place} if example.place else {}
        taken = WRITTEN_KEYS | record.keys()
        record |= {key: value for key, value in example.extra.items() if key not in taken}
        try:
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError as error:
            raise ValueError(
                f"extras of {shown(name)} must be finite numbers, text or booleans, got {error}"
            ) from error
    files.write_text(path, "".join(lines))


def drop_unanswered(queries: Sequence[Example]) -> tuple[tuple[Example, ...], str]:
    """Returns the queries with an answer to trace, at least one, and a sentence on the others."""
    kept = tuple(query for query in queries if query.output.strip())
    empty = [query.example_id for query in queries if not query.output.strip()]
    if not kept:
        raise ValueError(
            f"queries must have an answer to trace, got none: the model says nothing to "
            f"{some_of(query.instruction for query in queries)}: give an output"
        )
    line = f"{len(empty)} of {len(queries)} queries have an empty answer and are left out"
    return kept, f"{line}: {some_of(empty)}" if empty else ""


def check_corpus(corpus: Corpus, *, held_out: Sequence[str] = QUERY_SETS) -> Corpus:
    """Returns the corpus if its ids are unique and its query sets are held out.

    Held out means by prompt, see `prompt_of`: no prompt of a query set may occur in another query
    set, in the training rows or in the backbone's rows, whatever its answer there. Sets that are
    not in `held_out` have to be apart from each other only.
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
            other = trained_on.get(prompt) if name in held_out else None
            other = other or asked.setdefault(prompt, name)
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
