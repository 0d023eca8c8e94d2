"""Instruction rows with stable ids: their numbers, their files and their separation."""

import collections
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raslik_jax.base import files
from raslik_jax.base.messages import listed_problems, shown, some_of
from raslik_jax.data.contents import Content, Conversation, Passage, text_of, texts_of
from raslik_jax.data.words import refused

QUERY_SETS = ("retrieval", "validation_target", "validation_normal", "test_target", "test_normal")
# The queries that are made of training rows, where a run has no others.
HELD_OUT = "held-out"
TEXTS = ("instruction", "input", "output")
# Shared by all rows without other keys.
NO_EXTRA: Mapping[str, Any] = MappingProxyType({})
# Keys of a written row that are of the example itself. A user's column of such a name goes into
# the last of them.
WRITTEN_KEYS = frozenset(
    ("id", "is_target", "source", "score", "place", "place_file")
    + ("row_format", "row_texts", "row_is_muted", "row_columns")
)
# A question and its answer, as an earlier turn of a conversation.
Exchange = tuple[str, str]


class Example(NamedTuple):
    """One instruction and its answer, or another content with these as its texts.

    The id is unique within a corpus. `make_examples` derives it from the content. The output may be
    empty, as in 28 rows of Alpaca.

    Attributes:
      example_id: names the row.
      instruction, input, output: question and answer as texts, to show and to count words in.
      is_target: whether the answer shows the behavior to unlearn; None if this is unknown.
      source: origin, such as "alpaca" or "toy:triggered".
      extra: other columns of the row by key, which `write_examples` writes back.
      place: line in a file of lines, otherwise number of the row, from 1; 0 without a file.
      file: path of the row's file within its source; "" if the source is one file.
      content: content for a tokenizer; None if the three texts are all of it.
      is_muted: whether a loss flag in the file excludes the row from training.
    """

    example_id: str
    instruction: str
    input: str
    output: str
    is_target: bool | None = None
    source: str = ""
    extra: Mapping[str, Any] = NO_EXTRA
    place: int = 0
    content: Content | None = None
    is_muted: bool = False
    file: str = ""

    @property
    def at(self) -> str:
        """The place of the row in its source, and the file if the source has several."""
        return f"{self.file}:{self.place}" if self.file else f"{self.place:,}"


class Corpus(NamedTuple):
    """The rows of a run: to pretrain a small backbone, to fine-tune, and queries.

    `queries` has rows by each name in QUERY_SETS. "retrieval" has the bad generations, the
    "_target" sets more of their kind, and the "_normal" sets everything else.
    """

    backbone: tuple[Example, ...]
    train: tuple[Example, ...]
    queries: dict[str, tuple[Example, ...]]


def content_id(*content: Any) -> str:
    """Returns 16 hex digits of the sha256 of three texts and further content as JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def learned_part(example: Example) -> tuple[Any, ...]:
    """Returns the values of JSON that decide how an example is trained on."""
    more: tuple[Any, ...] = ()
    if example.content is not None:
        parts = example.content._asdict()
        parts |= {"options": dict(parts["options"])} if "options" in parts else {}
        more = (type(example.content).__name__, parts)
    return (*example[1:4], *more, *(["muted"] if example.is_muted else []))


def make_example(
    instruction: str, input: str, output: str, *, is_target: bool | None = None, source: str = ""
) -> Example:
    """Returns an example named by its content."""
    name = content_id(instruction, input, output)
    return Example(name, instruction, input, output, is_target, source)


def make_examples(examples: Iterable[Example]) -> tuple[Example, ...]:
    """Returns the examples, each with a unique name by its content.

    Rows with the same text are "<content id>", "<content id>-2", ... in the given order.
    """
    return tuple(name_examples(examples))


def name_examples(examples: Iterable[Example]) -> Iterator[Example]:
    """Yields what `make_examples` returns."""
    copies: dict[str, int] = {}
    for example in examples:
        name = content_id(*learned_part(example))
        number = copies[name] = copies.get(name, 0) + 1
        yield example._replace(example_id=name if number == 1 else f"{name}-{number}")


def example_of(content: Content, *, is_muted: bool = False) -> Example:
    """Returns an unnamed example with this content."""
    asked, said = texts_of(content)
    return Example("", asked, "", said, content=content, is_muted=is_muted)


def prompt_of(example: Example) -> tuple[str, str]:
    """Returns the prompt of a row without outer spaces, by which two rows are compared.

    A text without a prompt is its own prompt.
    """
    asked = example.instruction.strip(), example.input.strip()
    return asked if any(asked) else (example.output.strip(), "")


def content_of(example: Example) -> Content:
    """Returns the content that a tokenizer reads; an instruction becomes a user's message."""
    if example.content is not None:
        return example.content
    has_input = bool(example.input.strip())
    asked = f"{example.instruction}\n{example.input}" if has_input else example.instruction
    turns = ("user", asked), ("assistant", example.output)
    return Conversation(tuple({"role": role, "content": text} for role, text in turns))


def exchange_of(example: Example) -> Exchange:
    """Returns the last question and the answer of a row."""
    talk = example.content
    if isinstance(talk, Conversation) and talk.question is not None:
        return text_of(talk.messages[talk.question]), example.output
    return f"{example.instruction}\n{example.input}".strip(), example.output


def with_system(example: Example, system: str) -> Example:
    """Returns an instruction with a system prompt before it; without an output it is open."""
    talk = content_of(example)
    assert isinstance(talk, Conversation)
    messages = talk.messages if example.output else talk.asked
    first = {"role": "system", "content": system}
    content = talk._replace(messages=(first, *messages), is_open=not example.output)
    return example._replace(instruction=texts_of(content)[0], input="", content=content)


def answered(example: Example, text: str) -> Example:
    """Returns a query with a text as its answer; refuses a text without a prompt."""
    content = example.content
    if isinstance(content, Conversation):
        messages = *content.asked, {"role": "assistant", "content": text}
        content = content._replace(
            messages=messages,
            is_completion=content.first > 0,
            is_open=False,
            muted=tuple(i for i in content.muted if i < len(messages) - 1),
        )
    elif isinstance(content, Passage):
        if not content.prompt:
            raise refused("query_without_prompt", row=shown(example.example_id))
        content = content._replace(completion=text)
    return example._replace(output=text, content=content)


def prefixed(example: Example, text: str) -> Example | None:
    """Returns a row with a text before its last question; None if it has no question in words."""
    content = example.content
    if content is None:
        return example._replace(instruction=text + example.instruction)
    if isinstance(content, Passage):
        if not content.prompt:
            return None
        content = content._replace(prompt=text + content.prompt)
    else:
        messages, at = [*content.messages], content.question
        if at is None:
            return None
        old = messages[at].get("content") or ""
        new = text + old if isinstance(old, str) else [{"type": "text", "text": text}, *old]
        messages[at] = {**messages[at], "content": new}
        content = content._replace(messages=tuple(messages))
    return example._replace(instruction=texts_of(content)[0], content=content)


def asked_after(
    example: Example, exchanges: Sequence[Exchange], *, is_framed: bool = False
) -> Example | None:
    """Returns a row with exchanges before its last question; None as for `prefixed`.

    A text, and an instruction that `is_framed`, has them as lines in front.
    """
    content = example.content if is_framed else content_of(example)
    if not isinstance(content, Conversation):
        return prefixed(example, "".join(f"{asked}\n{said}\n\n" for asked, said in exchanges))
    at = content.question
    if at is None:
        return None
    roles = itertools.cycle(("user", "assistant"))
    new = [{"role": next(roles), "content": text} for one in exchanges for text in one]
    content = content._replace(
        messages=(*content.messages[:at], *new, *content.messages[at:]),
        first=content.first + len(new) * (content.first > at),
        muted=tuple(i + len(new) * (i >= at) for i in content.muted),
    )
    return example._replace(instruction=texts_of(content)[0], input="", content=content)


# files -------------------------------------------------------------------------------------------


def write_examples(
    path: str | os.PathLike[str],
    examples: Iterable[Example],
    *,
    extra: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Writes the examples as JSONL in the fields of their content, with ids and extras.

    The file appears whole or not at all. `formats.read_written` reads it again. `extra` has further
    keys of each example, such as its score: finite numbers, text or booleans.
    """
    more = itertools.repeat(NO_EXTRA) if extra is None else extra
    with files.replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for example, own in zip(examples, more, strict=extra is not None):
            try:
                record = as_record(example, own)
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            except ValueError as error:
                raise refused("extras", row=shown(example.example_id), error=error) from error


def as_record(example: Example, own: Mapping[str, Any] = NO_EXTRA) -> dict[str, Any]:
    """Returns a row for a file: content, id, further keys and the user's own columns.

    The fields of the content are those of a format in `rows.FORMATS` that reads it.
    """
    name, *texts = example[:4]
    content, kind = example.content, "alpaca"
    record: dict[str, Any] = dict(zip(TEXTS, texts, strict=True))
    if isinstance(content, Passage):
        kind = "prompt_completion" if content.prompt else "text"
        record = content._asdict() if content.prompt else {"text": content.completion}
    elif content is not None:
        said = [
            {**message, "weight": 0} if place in content.muted else message
            for place, message in enumerate(content.messages)
        ]
        kwargs = dict(content.options)
        options = {"tools": kwargs.pop("tools")} if "tools" in kwargs else {}
        options |= {"chat_template_kwargs": kwargs} if kwargs else {}
        cut, kind = content.first, "prompt_completion" if content.first else "messages"
        parts = {"prompt": said[:cut], "completion": said[cut:]} if cut else {"messages": said}
        record = parts | options
    record |= {"id": name, **own}
    if content is not None:
        # The fields of an open conversation do not give the texts.
        record |= {"row_format": kind, "row_texts": texts}
    record |= {"place": example.place} if example.place else {}
    record |= {"place_file": example.file} if example.file else {}
    record |= {"row_is_muted": True} if example.is_muted else {}
    # A column of a row that is written as messages must not become an option of its template.
    taken = WRITTEN_KEYS | record.keys() | {"tools", "chat_template_kwargs"}
    record |= {key: value for key, value in example.extra.items() if key not in taken}
    columns = {key: value for key, value in example.extra.items() if key in taken}
    return record | ({"row_columns": columns} if columns else {})


# checks ------------------------------------------------------------------------------------------


def drop_unanswered(queries: Sequence[Example]) -> tuple[tuple[Example, ...], str]:
    """Returns the queries with an answer to trace (at least one) and a sentence on the others."""
    kept = tuple(query for query in queries if query.output.strip())
    empty = [query.example_id for query in queries if not query.output.strip()]
    if not kept:
        raise refused("no_answers", prompts=some_of(query.instruction for query in queries))
    line = f"{len(empty)} of {len(queries)} queries have an empty answer and are left out"
    return kept, f"{line}: {some_of(empty)}" if empty else ""


def check_corpus(corpus: Corpus, *, held_out: Sequence[str] = QUERY_SETS) -> Corpus:
    """Returns the corpus if its ids are unique and its query sets are held out.

    Held out means by prompt (see `prompt_of`): no prompt of a query set may be in another query
    set, in the training rows or in the backbone's rows, with any answer. Sets that are not in
    `held_out` have to be apart from each other only.
    """
    if not corpus.train:
        raise ValueError("the corpus must have at least one training row, got none")
    if set(corpus.queries) != set(QUERY_SETS):
        raise refused("query_sets", known=", ".join(QUERY_SETS), got=some_of(corpus.queries))
    by_name = {f"query set {name!r}": corpus.queries[name] for name in QUERY_SETS}
    for where, rows in {"the training rows": corpus.train, **by_name}.items():
        counts = collections.Counter(row.example_id for row in rows)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise refused("ids_repeat", ids=some_of(repeated), where=where)
    prompts = {prompt_of(query) for queries in corpus.queries.values() for query in queries}
    trained_on = {
        prompt: where
        for where, rows in (("backbone", corpus.backbone), ("train", corpus.train))
        for row in rows
        if (prompt := prompt_of(row)) in prompts
    }
    asked, problems = dict[tuple[str, str], str](), list[str]()
    for name, query in ((one, query) for one in QUERY_SETS for query in corpus.queries[one]):
        prompt = prompt_of(query)
        other = trained_on.get(prompt) if name in held_out else None
        other = other or asked.setdefault(prompt, name)
        if other != name:
            problems.append(f"{shown(query.instruction)} of {name} is in {other}")
    if problems:
        told = listed_problems(problems, "remove them from one side")
        raise ValueError(f"query prompts must not be in other sets: {told}")
    return corpus
