"""Instruction rows with stable ids: how they are read, written, numbered and kept apart.

What a row may hold. Text is Unicode text: a NUL character and half of a surrogate pair are refused,
as is a key that stands twice in a row, NaN and Infinity. A refusal names file and line.
"""

import gzip
import hashlib
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raslik_jax import files
from raslik_jax.messages import listed_problems, shown, some_of

# The key of a row that holds each field of an example, unless a field map names another.
FIELDS: Mapping[str, str] = {
    "instruction": "instruction",
    "input": "input",
    "output": "output",
    "id": "id",
    "is_target": "is_target",
    "source": "source",
}
# What a written row says of the example itself, so that no key of a user's row can take its place.
WRITTEN_KEYS = frozenset((*FIELDS, "score"))

QUERY_SETS = (
    "retrieval",
    "validation_target",
    "validation_normal",
    "test_target",
    "test_normal",
)

# Parts of a conversation that no template renders: left out, they would change what was asked.
_CHAT_KEYS = ("system", "history")
_MAX_DEPTH = 50
_NO_EXTRA: Mapping[str, Any] = MappingProxyType({})


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
    extra: Mapping[str, Any] = _NO_EXTRA


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
    copies: dict[str, int] = {}
    named = []
    for example in examples:
        name = content_id(example.instruction, example.input, example.output)
        copies[name] = copies.get(name, 0) + 1
        suffix = "" if copies[name] == 1 else f"-{copies[name]}"
        named.append(example._replace(example_id=name + suffix))
    return tuple(named)


def field_keys(fields: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the key of every field under a field map, which renames keys and keeps the rest.

    A key that the map gives to one field is no longer that of another: with input=output there has
    to be another key for the output.

    Raises:
      ValueError: the map names an unknown field, or leaves no key to instruction or output.
    """
    given = dict(fields or {})
    unknown = [name for name in given if name not in FIELDS]
    if unknown:
        raise ValueError(
            f"a field map must name fields of {', '.join(FIELDS)}, got {some_of(unknown)}"
        )
    taken = set(given.values())
    keys = {name: key for name, key in FIELDS.items() if name not in given and key not in taken}
    for name in ("instruction", "output"):
        if name not in keys | given:
            raise ValueError(
                f"a field map must leave a key to {name!r}, got its own for another field: "
                f"name the key of {name!r} too"
            )
    return keys | given


def read_examples(
    path: str | os.PathLike[str],
    *,
    fields: Mapping[str, str] | None = None,
    source: str = "",
    needs_output: bool = True,
    check: Callable[[Example], None] | None = None,
) -> tuple[Example, ...]:
    """Returns the rows of a JSON list or a JSONL file as examples.

    A file whose first character is "[" is one JSON list of objects, any other has one object per
    line; blank lines are skipped. The endings .xz, .gz and .zst are unpacked on the way.

    Args:
      path: the file.
      fields: which key of a row holds which field of an example, where it is not that of FIELDS.
        Every row has an instruction and an output. Without its input key, or with null there, a
        row has an empty input; without an id it is named by its text. All other keys are kept as
        the example's `extra`.
      source: kept on every example that does not name its own.
      needs_output: False is for queries: a row may do without an output, which is then empty.
      check: raises ValueError for a row that the caller cannot use; it is reported like the others.

    Raises:
      ValueError: the file is missing, no regular file, empty, cannot be unpacked or is not UTF-8; a
        field map as `field_keys` refuses it, or with a key that no row has; malformed rows, the
        first few with file and line.
    """
    field_keys(fields)
    text = _read_text(path)
    if not text.strip():
        raise ValueError(f"{shown(str(path), 160)} must hold at least one row, got an empty file")
    return examples_from_rows(
        _records(text),
        where=str(path),
        fields=fields,
        source=source,
        needs_output=needs_output,
        check=check,
    )


def examples_from_rows(
    rows: Iterable[tuple[int, Any]],
    *,
    where: str,
    fields: Mapping[str, str] | None = None,
    source: str = "",
    needs_output: bool = True,
    check: Callable[[Example], None] | None = None,
) -> tuple[Example, ...]:
    """Returns numbered records as examples, as `read_examples` does those of a file.

    Args:
      rows: (line or row number, record) pairs; a ValueError in place of a record is reported.
      where: names the file or dataset in errors.
      fields, source, needs_output, check: as in `read_examples`.

    Raises:
      ValueError: as `read_examples`.
    """
    keys = field_keys(fields)
    origin = shown(where, 120).strip("'\"")
    found: list[Example] = []
    problems: list[str] = []
    unseen = set((fields or {}).values()) if needs_output else set()
    for line, record in rows:
        try:
            if isinstance(record, ValueError):
                raise record
            row = _example_from_record(record, keys, source, needs_output)
            if check is not None:
                check(row)
        except ValueError as error:
            problems.append(f"{origin}:{line}: {error}")
            continue
        unseen.difference_update(record)
        found.append(row)
    if problems:
        raise ValueError(listed_problems(problems, "correct or remove these rows"))
    if not found:
        raise ValueError(f"{origin} must hold at least one row, got an empty list")
    if unseen:
        raise ValueError(
            f"--corpus.fields must name keys that rows have, got {some_of(sorted(unseen))}, which "
            f"no row of {origin} has: correct the key"
        )
    unnamed = iter(make_examples(row for row in found if not row.example_id))
    found = [row if row.example_id else next(unnamed) for row in found]
    _check_unique_ids(found, origin)
    return tuple(found)


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
      examples: rows in the order wanted.
      extra: for each example further keys, such as its score; finite numbers, text, booleans.

    Raises:
      ValueError: another number of extras than of examples; an extra hides a key of the format or
        is not a finite number; the path is not that of a regular file.
    """
    if extra is not None and len(extra) != len(examples):
        raise ValueError(
            f"there must be one extra for each example, got {len(extra)} for {len(examples)}"
        )
    lines = []
    for position, example in enumerate(examples):
        record = {
            "instruction": example.instruction,
            "input": example.input,
            "output": example.output,
            "id": example.example_id,
        }
        more = {} if extra is None else dict(extra[position])
        hidden = sorted(record.keys() & more.keys())
        if hidden:
            raise ValueError(
                f"extra keys must have names of their own, got {hidden} for "
                f"{shown(example.example_id)}: rename them"
            )
        record |= more
        kept = {key: value for key, value in example.extra.items() if key not in WRITTEN_KEYS}
        try:
            lines.append(json.dumps(record | kept, ensure_ascii=False, allow_nan=False))
        except ValueError as error:
            raise ValueError(
                f"extras of {shown(example.example_id)} must be finite numbers, text or "
                f"booleans, got something else ({error})"
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

    Held out means by prompt, that is instruction and input without surrounding whitespace: no
    prompt of a query set may occur in another query set, in the training rows or in the backbone's
    rows, whatever its answer there.

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
    _check_unique_ids(corpus.train, "the training rows")
    trained_on = {_prompt(example): "backbone" for example in corpus.backbone}
    trained_on |= {_prompt(example): "train" for example in corpus.train}
    asked: dict[tuple[str, str], str] = {}
    problems = []
    for name in QUERY_SETS:
        _check_unique_ids(corpus.queries[name], f"query set {name!r}")
        for example in corpus.queries[name]:
            prompt = _prompt(example)
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


def _prompt(example: Example) -> tuple[str, str]:
    return example.instruction.strip(), example.input.strip()


def _check_unique_ids(examples: Sequence[Example], where: str) -> None:
    seen: set[str] = set()
    repeated: dict[str, None] = {}
    for example in examples:
        if example.example_id in seen:
            repeated[example.example_id] = None
        seen.add(example.example_id)
    if repeated:
        raise ValueError(
            f"ids must be unique, got {some_of(repeated)} more than once in {where}: correct "
            "them, or name another key with --corpus.fields=id=KEY"
        )


# Reading files ----------------------------------------------------------------------------------


def _read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file, unpacked as its ending says."""
    path = pathlib.Path(path)
    raw = files.read_bytes(path)
    unpack = {".xz": _unpack_xz, ".gz": gzip.decompress, ".zst": _unpack_zstandard}.get(path.suffix)
    if unpack is not None:
        try:
            raw = unpack(raw)
        # zstandard's own errors are caught where the package is known to be there.
        except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
            raise ValueError(
                f"{shown(str(path), 160)} cannot be unpacked ({shown(str(error))}): fetch it again"
            ) from None
    return files.decode_text(raw, path)


def _unpack_xz(raw: bytes) -> bytes:
    """Returns all streams of a file; `lzma.decompress` would drop a damaged second one."""
    parts = []
    while raw:
        stream = lzma.LZMADecompressor()
        parts.append(stream.decompress(raw))
        if not stream.eof:
            raise EOFError("it ends too early")
        raw = stream.unused_data.lstrip(b"\0")  # streams are padded
    return b"".join(parts)


def _unpack_zstandard(raw: bytes) -> bytes:
    """Returns all frames of a file; a stream reader would take a cut one for whole."""
    try:
        import zstandard
    except ImportError:
        raise OSError("the package zstandard is missing: install raslik-jax[data]") from None
    parts = []
    while raw:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(raw))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        if not frame.eof:
            raise EOFError("it ends too early")
        raw = frame.unused_data
    return b"".join(parts)


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of a JSON list or JSONL file, unpacked as `read_examples` does.

    Raises:
      ValueError: the file is missing, cannot be unpacked, or has a record that is no JSON object.
    """
    origin = shown(str(path), 160).strip("'\"")
    for line, record in _records(_read_text(path)):
        if isinstance(record, ValueError):
            raise ValueError(f"{origin}:{line}: {record}: correct the row")
        if not isinstance(record, dict):
            raise ValueError(
                f"{origin}:{line}: a row must be an object, got {shown(record)}: correct the row"
            )
        yield line, record


def _records(text: str) -> Iterator[tuple[int, Any]]:
    """Yields (line number, parsed record), or a ValueError where a record cannot be parsed."""
    if text.lstrip().startswith("["):
        yield from _list_records(text)
        return
    # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record, end = files.decode_json(line, _skip_space(line, 0))
        except ValueError as error:
            yield number, ValueError(f"a row must be JSON, got something else ({error})")
            continue
        if line[end:].strip():
            record = ValueError(f"a row must be one object, got more text at column {end + 1}")
        yield number, record


def _list_records(text: str) -> Iterator[tuple[int, Any]]:
    """Parses a JSON list row by row, so that every row knows its line."""
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    wants_row = text[position : position + 1] != "]"
    while wants_row:
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = files.decode_json(text, position)
        except ValueError as error:
            yield line, ValueError(f"a row must be JSON, got something else ({error})")
            return
        yield line, record
        position = _skip_space(text, position)
        wants_row = text[position : position + 1] == ","
        if wants_row:
            position = _skip_space(text, position + 1)
    line += text.count("\n", counted, position)
    if text[position : position + 1] != "]":
        yield line, ValueError("the list must end with ']' or go on with ',', got neither")
    elif text[position + 1 :].strip():
        yield line, ValueError("the file must end with the list, got more text")


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r"):
        position += 1
    return position


def _example_from_record(
    record: Any, keys: Mapping[str, str], source: str, needs_output: bool
) -> Example:
    """Returns the example of a row, its id empty where the row has none."""
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, got {shown(record, 40)}")
    defaults = {"input": "", "id": "", "source": source} | ({} if needs_output else {"output": ""})
    texts: dict[str, str] = {}
    for name in ("instruction", "input", "output", "id", "source"):
        key = keys.get(name)
        value = record.get(key) if key is not None else None
        if value is None:
            value = defaults.get(name)
        elif name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ValueError(f"{key!r} must be text, got {_short(value)}")
        if name == "instruction" and not value.strip():
            raise ValueError(f"{key!r} must hold text, got {_short(value)}")
        texts[name] = value
    is_target = record.get(keys["is_target"]) if "is_target" in keys else None
    if is_target is not None and not isinstance(is_target, bool):
        raise ValueError(
            f"{keys['is_target']!r} must be true, false or null, got {_short(is_target)}"
        )
    taken = set(keys.values())
    for key in _CHAT_KEYS:
        if key not in taken and not _is_empty(record.get(key)):
            raise ValueError(
                f"{key!r} must be empty, got {_short(record[key])}: no template renders it, put "
                "it into the instruction"
            )
    extra = {
        key: value
        for key, value in record.items()
        if key not in taken and key not in _CHAT_KEYS and value is not None
    }
    _check_text((*texts.values(), extra))
    return Example(
        texts["id"].strip(),
        texts["instruction"],
        texts["input"],
        texts["output"],
        is_target,
        texts["source"],
        extra or _NO_EXTRA,
    )


def _short(value: Any) -> str:
    return "nothing" if value is None else shown(value, 40)


def _is_empty(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else value is None or value == []


def _check_text(value: Any, depth: int = 0) -> None:
    """Raises a ValueError where a text, however deep, is none that UTF-8 and C can hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a row must not be nested deeper than {_MAX_DEPTH} levels, got more")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a text must have no NUL character, got one")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("a text must have whole characters, got half a pair") from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key, depth + 1)
            _check_text(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_text(item, depth + 1)
