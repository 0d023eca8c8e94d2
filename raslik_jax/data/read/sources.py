"""Rows of files, folders, saved datasets and hub datasets with their places."""

import collections
import glob
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.data.read import columns, pieces, unpacking
from raslik_jax.data.words import by_word, load_words

_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^/]")
_SHARD = re.compile(r"(?P<split>.*?)[-_.]?(?P<number>\d+)[-_]?of[-_]?(?P<count>\d+)")
_KEYS = load_words("row_keys")
# Names of splits as people have them, in names of files and folders.
_SPLITS = by_word(_KEYS["splits"])
# Files that libraries write next to rows.
_NO_ROWS = frozenset(_KEYS["no_rows"])


class SourceFile(NamedTuple):
    """A file or a saved dataset and its path within its source ("" if it is all of it)."""

    path: pathlib.Path
    name: str = ""


class Place(NamedTuple):
    """The place of a row: the file within its source ("" for a single one) and line or number.

    `before` is the text in front of the number in an error.
    """

    file: str
    number: int
    before: str

    def __str__(self) -> str:
        return f"{self.before}{self.number}"


def placed_records(source: str | os.PathLike[str]) -> Iterator[tuple[Place, Any]]:
    """Yields the rows of a source with their places.

    A place counts from 1, blank lines too. Something that is no row is the ValueError that says so.
    Sources are as in `formats.read_examples`.
    """
    if str(source).startswith("hub:"):
        rows = enumerate(_hub_rows(str(source)), start=1)
        yield from ((Place("", n, f"{shown_source(source)}, row "), row) for n, row in rows)
        return
    for file in source_files(source):
        origin = shown_source(file.path)
        if file.path.is_dir():
            between, found = ", row ", _numbered(_saved_rows(file.path, origin))
        else:
            between, found = pieces.read_pieces(file.path, origin)
        before = origin + between
        for piece in found:
            if piece.place:
                yield Place(file.name, piece.place, before), piece.record


def shown_source(source: str | os.PathLike[str]) -> str:
    """Returns how messages name a source."""
    return shown(str(source), 160).strip("'\"")


def source_files(source: str | os.PathLike[str]) -> tuple[SourceFile, ...]:
    """Returns the files of a source in the order of their rows; none of a hub dataset.

    Commas, a pattern or a folder name several files. The split train of a folder is read. A folder
    of a saved dataset counts as one file. It refuses URLs, and folders without a clear choice of
    training files.
    """
    text = os.fspath(source)
    check_local(text)
    if text.startswith("hub:"):
        return ()
    if os.path.lexists(text):
        path = pathlib.Path(text)
        return _folder_files(path) if path.is_dir() else (SourceFile(path),)
    found: list[pathlib.Path] = []
    for part in filter(None, text.split(",")):
        found += _named_files(part, is_only=part == text)
    if len({*found}) < len(found):
        twice = next(str(path) for path in found if found.count(path) > 1)
        raise ValueError(f"a source must name each file once, got {shown(twice, 160)} twice")
    if found == [pathlib.Path(text)]:
        return (SourceFile(found[0]),)
    return _named_within(found, pathlib.Path(os.path.commonpath([p.parent for p in found])))


def check_local(source: str) -> None:
    """Refuses a URL: rows are read from this machine or from the hub."""
    if _URL.match(source):
        is_hub = "huggingface.co" in source or source.startswith("hf:")
        mend = "give hub:OWNER/NAME" if is_hub else "fetch it and give its path"
        got = shown(source, 120)
        raise ValueError(f"rows must be in local files, got the URL {got}: {mend}")


def _named_files(part: str, *, is_only: bool) -> list[pathlib.Path]:
    """Returns the files of one part of a list of names."""
    if part.startswith("hub:") or os.path.isdir(part):
        raise ValueError(f"a list of files must have files only, got {shown(part, 160)}: give one")
    if os.path.lexists(part) or not glob.has_magic(part):
        return [pathlib.Path(part)]
    found = [pathlib.Path(name) for name in glob.glob(part, recursive=True)]
    found = sorted((path for path in found if path.is_file()), key=_order)
    if not found:
        raise ValueError(f"a pattern must match a file, got {shown(part, 160)}: correct the path")
    _check_shards(found, shown(part, 120))
    return found


def _named_within(paths: Sequence[pathlib.Path], folder: pathlib.Path) -> tuple[SourceFile, ...]:
    files = tuple(SourceFile(path, os.path.relpath(path, folder)) for path in paths)
    unpacked = collections.defaultdict[str, list[str]](list)
    for file in files:
        unpacked[unpacking.without_packing(file.name)].append(str(file.path))
    if twice := [same for same in unpacked.values() if len(same) > 1]:
        raise ValueError(f"rows must be given once, got {some_of(twice[0], 2)}: leave one out")
    return files


# folders -----------------------------------------------------------------------------------------


def _folder_files(folder: pathlib.Path) -> tuple[SourceFile, ...]:
    """Returns the files of the split train in a folder, or the folder of a saved dataset."""
    if (folder / "dataset_dict.json").is_file():
        folder = folder / "train"
    if (folder / "state.json").is_file():
        return (SourceFile(folder),)
    name = shown(str(folder), 120)
    splits = dict[str, list[pathlib.Path]]()
    for path in sorted(_files_below(folder), key=_order):
        splits.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    found = [
        split for split in splits if split == "train" or split.startswith(("train_", "train-"))
    ]
    found = found or ([""] if [*splits] == [""] else [])
    if len(found) != 1:
        got = some_of(found or splits) if splits else "no file of rows"
        raise ValueError(
            f"{name} must have rows of one split train in JSON, JSONL, CSV or Parquet, got {got}: "
            "name the files, with commas or by a pattern such as FOLDER/train-*.parquet"
        )
    paths = splits[found[0]]
    for what, parts in (
        ("folder", [str(path.parent.relative_to(folder)) for path in paths]),
        ("form", [unpacking.kind_of(path) for path in paths]),
    ):
        if len({*parts}) > 1:
            got = some_of(dict.fromkeys(parts))
            raise ValueError(
                f"{name} must have its training rows in one {what}, got {got}: name the files, "
                "with commas or by a pattern such as FOLDER/data/*.parquet"
            )
    _check_shards(paths, name)
    return _named_within(paths, folder)


def _files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files below a folder with rows by their endings, without hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in names:
            if name[0] not in "._" and name not in _NO_ROWS:
                path = pathlib.Path(parent, name)
                # A link to nothing is an error when it is read.
                is_there = path.is_file() or not path.exists()
                if is_there and unpacking.kind_of(path) in pieces.ENDINGS:
                    yield path


def _split_of(path: pathlib.PurePath) -> str:
    """Returns the split of a file in a folder by its name or a folder's, or ""."""
    stem = _stem(path)
    shard = _SHARD.fullmatch(stem)
    for name in (shard["split"] if shard else stem, *reversed(path.parent.parts)):
        words = re.split(r"[^a-z]+", name.lower())
        if splits := {_SPLITS[word] for word in words if word in _SPLITS}:
            # Of train_sft and train_gen each is a split of its own.
            is_own = shard and name == shard["split"] and splits == {"train"}
            return name if is_own else " and ".join(sorted(splits))
    return ""


def _stem(path: pathlib.PurePath) -> str:
    return pathlib.PurePath(unpacking.without_packing(path.name)).stem


def _order(path: pathlib.PurePath) -> list[tuple[int, int, str]]:
    """Returns the key by which files are in the order of the numbers in their names."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(p), p) if p.isdigit() else (0, 0, p) for p in parts]


def _check_shards(paths: Sequence[pathlib.Path], where: str) -> None:
    """Refuses numbered files if one of them is missing: 3 of 4."""
    found = dict[tuple[str, str], dict[int, tuple[re.Match[str], str]]]()
    for path in paths:
        if shard := _SHARD.fullmatch(_stem(path)):
            group = found.setdefault((str(path.parent), shard["split"]), {})
            known = next(iter(group.values()), (shard, ""))[0]["count"]
            if known != shard["count"]:
                got = f"of {known} and of {shard['count']}"
                raise ValueError(
                    f"{where} must have the files of one set, got {got}: remove those of the other"
                )
            group[int(shard["number"])] = shard, path.name
    for shards in found.values():
        first, name = next(iter(shards.values()))
        start = 0 if 0 in shards or int(first["count"]) not in shards else 1
        count, (begin, end) = int(first["count"]), first.span("number")
        lacking = (n for n in range(start, start + count) if n not in shards)
        missing = [
            f"{name[:begin]}{n:0{end - begin}}{name[end:]}" for n in itertools.islice(lacking, 3)
        ]
        if missing:
            raise ValueError(
                f"{where} must have all of {count} files, got {len(shards)} without "
                f"{some_of(missing)}: fetch it, or name the files with commas"
            )


# datasets ----------------------------------------------------------------------------------------


def _numbered(rows: Iterator[Mapping[str, Any]]) -> Iterator[pieces.Piece]:
    return (pieces.Piece(n, columns.json_row(row)) for n, row in enumerate(rows, start=1))


def _saved_rows(path: pathlib.Path, origin: str) -> Iterator[Mapping[str, Any]]:
    """Returns the rows of a folder that `save_to_disk` of datasets wrote."""
    datasets = columns.import_package("datasets", origin)
    try:
        return iter(datasets.load_from_disk(str(path)))
    except Exception as error:
        raise ValueError(
            f"{origin} cannot be read ({one_line(str(error), 100)}): save it again"
        ) from error


def _hub_rows(source: str) -> Iterator[Any]:
    asked = _HUB_SOURCE.fullmatch(source)
    if not asked:
        raise ValueError(
            "a hub dataset must be like hub:OWNER/NAME[:CONFIG][@SPLIT], got "
            f"{shown(source)}: correct it"
        )
    datasets = columns.import_package("datasets", shown(source))
    name, config, split = asked.groups()
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # a missing dataset or network shows in a dozen classes
        raise ValueError(
            f"the dataset {shown(source)} cannot be read ({one_line(str(error), 100)}): check "
            "name, config, split and network, or give a local file"
        ) from error
    return map(columns.json_row, rows)


def content_files(source: str) -> dict[str, pathlib.Path]:
    """Returns all files that decide the rows of a source, by their names in the order of the rows.

    A single file or saved dataset has the name "". A file that is missing is left out, and a hub
    dataset unless its folder is here.
    """
    files = source_files(source) or (SourceFile(pathlib.Path(source.removeprefix("hub:"))),)
    names = {f"{n}/{file.name}" if file.name else "": file.path for n, file in enumerate(files)}
    return {name: path for name, path in names.items() if path.exists()}
