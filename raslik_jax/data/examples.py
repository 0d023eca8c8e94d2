"""Instruction rows with stable ids: how they are read, written, numbered and kept apart."""

import gzip
import hashlib
import json
import lzma
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ALPACA_FIELDS: Mapping[str, str] = {
    "instruction": "instruction",
    "input": "input",
    "output": "output",
}
# What write_examples writes: reading it back with these fields keeps the ids.
WRITTEN_FIELDS: Mapping[str, str] = {**ALPACA_FIELDS, "id": "id"}

QUERY_SETS = (
    "retrieval",
    "validation_target",
    "validation_normal",
    "test_target",
    "test_normal",
)

_REQUIRED_FIELDS = ("instruction", "output")
_KNOWN_FIELDS = ("instruction", "input", "output", "id", "is_target", "source")
_MAX_REPORTED_ROWS = 20


class Example(NamedTuple):
    """One instruction and its answer.

    Attributes:
      example_id: unique within a corpus; `make_examples` derives it from the text.
      instruction: what is asked.
      input: further text to work on; empty where there is none.
      output: the answer; may be empty (28 rows of Alpaca are).
      is_target: True where the answer is of the kind to be unlearned, None where nobody knows.
      source: where the row comes from, such as "alpaca" or "toy:triggered".
    """

    example_id: str
    instruction: str
    input: str
    output: str
    is_target: bool | None = None
    source: str = ""


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
      fields: which key of a row holds which field of an example; None means ALPACA_FIELDS.
        "instruction" and "output" have to be mapped, "input", "id", "is_target" and "source" may
        be. A row without its input key, or with null there, has an empty input. With "id" the ids
        are the file's own, otherwise they are made from the text.
      source: kept on every example that does not name its own.
      needs_output: False lets a row do without an output, which is then empty.
      check: raises ValueError for a row that the caller cannot use; it is reported like the others.

    Raises:
      ValueError: the file is missing, empty, cannot be unpacked or is not UTF-8; a field map that
        names an unknown field or leaves out a needed one; malformed rows, all of them at once, the
        first 20 with file and line.
    """
    path = pathlib.Path(path)
    _check_fields(ALPACA_FIELDS if fields is None else fields)
    text = _read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty: a JSON list or JSONL with at least one row is wanted")
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
    fields = ALPACA_FIELDS if fields is None else fields
    _check_fields(fields)
    found: list[Example] = []
    problems: list[str] = []
    for line, record in rows:
        try:
            if isinstance(record, ValueError):
                raise record
            row = _example_from_record(record, fields, source, needs_output)
            if check is not None:
                check(row)
            found.append(row)
        except ValueError as error:
            problems.append(f"{where}:{line}: {error}")
    if problems:
        shown = "; ".join(problems[:_MAX_REPORTED_ROWS])
        more = len(problems) - _MAX_REPORTED_ROWS
        raise ValueError(
            f"{len(problems)} malformed row(s) in {where}, mend or remove them: {shown}"
            + (f"; and {more} more" if more > 0 else "")
        )
    if not found:
        raise ValueError(f"{where} holds no rows: an empty list came, at least one row is wanted")
    if "id" not in fields:
        return make_examples(found)
    _check_unique_ids(found, where)
    return tuple(found)


def write_examples(
    path: str | os.PathLike[str],
    examples: Sequence[Example],
    *,
    extra: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes the examples as Alpaca-format JSONL: instruction, input, output, id and the extras.

    The file appears whole or not at all: what was there before stays until the new one is complete.

    Args:
      path: where to write; its folder has to exist.
      examples: rows in the order wanted.
      extra: for each example further keys, such as its score; finite numbers, text, booleans.

    Raises:
      ValueError: as many extras as examples are wanted; an extra hides a key of the format or is
        not a finite number.
    """
    if extra is not None and len(extra) != len(examples):
        raise ValueError(
            f"one extra per example is wanted, {len(extra)=} and {len(examples)=} came"
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
                f"extra keys {hidden} of {example.example_id} hide a field: rename them"
            )
        try:
            lines.append(json.dumps(record | more, ensure_ascii=False, allow_nan=False))
        except ValueError as error:
            raise ValueError(f"extras of {example.example_id} are refused: {error}") from error
    _replace_file(pathlib.Path(path), "".join(line + "\n" for line in lines))


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
        raise ValueError("the corpus has no training rows: at least one is wanted")
    if set(corpus.queries) != set(QUERY_SETS):
        raise ValueError(f"query sets {QUERY_SETS} are wanted, {tuple(corpus.queries)} came")
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
                problems.append(f"{example.instruction!r} of {name} is in {other}")
    if problems:
        raise ValueError(
            f"{len(problems)} query prompt(s) are not held out, remove them from one side: "
            + "; ".join(problems[:_MAX_REPORTED_ROWS])
        )
    return corpus


def _prompt(example: Example) -> tuple[str, str]:
    return example.instruction.strip(), example.input.strip()


def _check_fields(fields: Mapping[str, str]) -> None:
    unknown = sorted(set(fields) - set(_KNOWN_FIELDS))
    missing = [name for name in _REQUIRED_FIELDS if name not in fields]
    if unknown or missing:
        raise ValueError(
            f"a field map needs {_REQUIRED_FIELDS} and knows {_KNOWN_FIELDS}: {unknown=} {missing=}"
        )


def _check_unique_ids(examples: Sequence[Example], where: str) -> None:
    seen: set[str] = set()
    repeated: dict[str, None] = {}
    for example in examples:
        if example.example_id in seen:
            repeated[example.example_id] = None
        seen.add(example.example_id)
    if repeated:
        raise ValueError(f"ids have to be unique, {where} repeats {list(repeated)[:5]}")


def _read_text(path: pathlib.Path) -> str:
    if not path.is_file():
        raise ValueError(f"no file {path}: give the path of a JSON or JSONL file")
    raw = path.read_bytes()
    try:
        if path.suffix == ".xz":
            raw = lzma.decompress(raw)
        elif path.suffix == ".gz":
            raw = gzip.decompress(raw)
        elif path.suffix == ".zst":
            raw = _decompress_zstandard(raw, path)
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): fetch it again") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 ({error.reason}): save it as UTF-8") from error


def _decompress_zstandard(raw: bytes, path: pathlib.Path) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package zstandard: install raslik-jax[data] or unpack the file"
        ) from error
    try:
        # The stream reader, because a frame written by `zstd -c` does not state its size.
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
            text = reader.read()
    except zstandard.ZstdError as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): fetch it again") from error
    return text


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of a JSON list or JSONL file, unpacked as `read_examples` does.

    Raises:
      ValueError: the file is missing, cannot be unpacked, or has a record that is no JSON object.
    """
    for line, record in _records(_read_text(pathlib.Path(path))):
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{line}: a JSON object is wanted, came {record}: mend the row")
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
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            yield number, ValueError(f"not JSON ({error.msg} at column {error.colno})")


def _list_records(text: str) -> Iterator[tuple[int, Any]]:
    """Parses a JSON list row by row, so that every row knows its line."""
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    wants_row = text[position : position + 1] != "]"
    while wants_row:
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield error.lineno, ValueError(f"not JSON ({error.msg}), the rest is not read")
            return
        yield line, record
        position = _skip_space(text, position)
        wants_row = text[position : position + 1] == ","
        if wants_row:
            position = _skip_space(text, position + 1)
    line += text.count("\n", counted, position)
    if text[position : position + 1] != "]":
        yield line, ValueError("the list ends without ']', the rest is not read")
    elif text[position + 1 :].strip():
        yield line, ValueError("text follows the end of the list")


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r"):
        position += 1
    return position


def _example_from_record(
    record: Any, fields: Mapping[str, str], source: str, needs_output: bool
) -> Example:
    if not isinstance(record, dict):
        raise ValueError(f"an object is wanted, {type(record).__name__} came")
    defaults = {"input": "", "source": source} | ({} if needs_output else {"output": ""})
    texts: dict[str, str] = {}
    for name in ("instruction", "input", "output", "id", "source"):
        if name not in fields:
            continue
        key = fields[name]
        value = record.get(key)
        if value is None:
            value = defaults.get(name)
        if not isinstance(value, str):
            came = "nothing" if value is None else type(value).__name__
            raise ValueError(f"{key!r} has to be text, {came} came")
        if not value.strip() and name in ("instruction", "id"):
            raise ValueError(f"{key!r} is blank")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key!r} holds half a surrogate pair, which no text has") from None
        texts[name] = value
    is_target = record.get(fields["is_target"]) if "is_target" in fields else None
    if is_target is not None and not isinstance(is_target, bool):
        raise ValueError(
            f"{fields['is_target']!r} has to be true, false or null, {is_target!r} came"
        )
    instruction, input, output = texts["instruction"], texts.get("input", ""), texts["output"]
    name = texts.get("id") or content_id(instruction, input, output)
    return Example(name, instruction, input, output, is_target, texts.get("source", source))


def _replace_file(path: pathlib.Path, text: str) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} to: make it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
