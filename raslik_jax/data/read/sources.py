"""Rows of files, folders, saved datasets and hub datasets with their places."""

import collections
import glob
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.data.read import pieces
from raslik_jax.data.words import by_word, load_words, refused

# A longer one leaves no room in a message for what to do.
_LONGEST_SOURCE = 100
_HUB_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^/]")
_SHARD = re.compile(
    r"(?P<split>.*?)[-_.]?(?P<number>\d+)[-_]?of[-_]?(?P<count>\d+)(-[0-9a-f]{16})?"
)
_KEYS = load_words("row_keys")
# Names of splits as people have them, in names of files and folders.
_SPLITS = by_word(_KEYS["splits"])
# Files that libraries write next to rows.
_NO_ROWS = frozenset(_KEYS["no_rows"])


# Files and saved datasets by their paths within their source; the only one of a source is "".
Files = dict[str, pathlib.Path]


def placed_records(source: str | os.PathLike[str]) -> Iterator[tuple[str, int, str, Any]]:
    """Yields file, place, a text of both for messages, and record of each row of a source.

    A place counts from 1 and counts blank lines. If a record is no row, it is the ValueError.
    Sources are as in `formats.read_examples`.
    """
    files = source_files(source)
    for name, path in files.items() or [("", pathlib.Path(source))]:
        origin, between = shown_source(path if files else source), ", row "
        if files and not path.is_dir():
            between, found = pieces.read_pieces(path, origin)
        else:
            rows = _saved_rows(path, origin) if files else _hub_rows(str(source))
            found = (pieces.Piece(n, pieces.json_row(row)) for n, row in enumerate(rows, start=1))
        for piece in found:
            if piece.place:
                yield name, piece.place, f"{origin}{between}{piece.place}", piece.record


def shown_source(source: str | os.PathLike[str]) -> str:
    """Returns how messages name a source: a long one by its end."""
    text = shown(str(source), 10_000).strip("'\"")
    return text if len(text) <= _LONGEST_SOURCE else "..." + text[3 - _LONGEST_SOURCE :]


def source_files(source: str | os.PathLike[str]) -> Files:
    """Returns the files of a source in the order of their rows; none of a hub dataset.

    Commas, a pattern or a folder name several files. The split train of a folder is read. A folder
    of a saved dataset counts as one file. It refuses URLs, and folders without a clear choice of
    training files.
    """
    text = os.fspath(source)
    if text.startswith("hub:"):
        return {}
    if _URL.match(text):
        is_hub = "huggingface.co" in text or text.startswith("hf:")
        mend = "give hub:OWNER/NAME" if is_hub else "fetch it and give its path"
        raise refused("source_url", got=shown(text, 120), mend=mend)
    path = pathlib.Path(text)
    if os.path.lexists(text):
        return _folder_files(path) if path.is_dir() else {"": path}
    found = [path for part in text.split(",") if part for path in _named_files(part)]
    if len({*found}) < len(found):
        twice = next(str(path) for path in found if found.count(path) > 1)
        raise ValueError(f"a source must name each file once, got {shown(twice, 160)} twice")
    if found == [path]:
        return {"": path}
    return _named_within(found, pathlib.Path(os.path.commonpath([p.parent for p in found])))


def content_files(source: str) -> Files:
    """Returns all files that decide the rows of a source, by their names in the order of the rows.

    A single file or saved dataset has the name "". A missing file is left out. So is a hub dataset
    without a local folder.
    """
    files = source_files(source) or {"": pathlib.Path(source.removeprefix("hub:"))}
    numbered = enumerate(files.items())
    return {f"{n}/{name}" if name else "": path for n, (name, path) in numbered if path.exists()}


def _named_files(part: str) -> list[pathlib.Path]:
    """Returns the files of one part of a list of names."""
    if part.startswith("hub:") or os.path.isdir(part):
        raise ValueError(f"a list of files must hold only files, got {shown(part, 160)}: give one")
    if os.path.lexists(part) or not glob.has_magic(part):
        return [pathlib.Path(part)]
    found = [pathlib.Path(name) for name in glob.glob(part, recursive=True)]
    found = sorted((path for path in found if path.is_file()), key=_order)
    if not found:
        raise ValueError(f"a pattern must match a file, got {shown(part, 160)}: correct the path")
    _check_shards(found, shown(part, 120))
    return found


def _named_within(paths: Iterable[pathlib.Path], folder: pathlib.Path) -> Files:
    files = {os.path.relpath(path, folder): path for path in paths}
    unpacked = collections.defaultdict[str, list[pathlib.Path]](list)
    for name, path in files.items():
        unpacked[pieces.without_packing(name)].append(path)
    if twice := [same for same in unpacked.values() if len(same) > 1]:
        raise ValueError(f"rows must be given once, got {some_of(twice[0], 2)}: leave one out")
    return files


# folders -----------------------------------------------------------------------------------------


def _folder_files(folder: pathlib.Path) -> Files:
    """Returns the files of the split train in a folder, or the folder of a saved dataset."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train").is_dir():
            names = sorted(path.name for path in folder.glob("*/"))
            raise refused("folder_saved", folder=shown(str(folder), 120), got=some_of(names))
        folder = folder / "train"
    if (folder / "state.json").is_file():
        return {"": folder}
    name = shown(str(folder), 120)
    splits = collections.defaultdict[str, list[pathlib.Path]](list)
    for path in sorted(_files_below(folder), key=_order):
        splits[_split_of(path.relative_to(folder))].append(path)
    found = [one for one in splits if one == "train" or one.startswith(("train_", "train-"))]
    found = found or ([""] if [*splits] == [""] else [])
    if len(found) != 1:
        got = some_of(found or splits) if splits else "no file of rows"
        raise refused("folder_split", folder=name, got=got)
    paths = splits[found[0]]
    for what, parts in (
        ("folder", {str(path.parent.relative_to(folder)): 0 for path in paths}),
        ("form", {pieces.kind_of(path): 0 for path in paths}),
    ):
        if len(parts) > 1:
            raise refused("folder_one", folder=name, what=what, got=some_of(parts))
    _check_shards(paths, name)
    return _named_within(paths, folder)


def _files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files below a folder with rows by their endings, without hidden ones."""
    for path in folder.rglob("*"):
        is_hidden = any(part[0] in "._" for part in path.relative_to(folder).parts)
        # A link to nothing is an error when it is read.
        is_file = path.name not in _NO_ROWS and (path.is_file() or not path.exists())
        if is_file and not is_hidden and pieces.kind_of(path) in pieces.ENDINGS:
            yield path


def _split_of(path: pathlib.PurePath) -> str:
    """Returns the split of a file in a folder by its name or a folder's, or ""."""
    shard = _SHARD.fullmatch(_stem(path))
    for name in (shard["split"] if shard else _stem(path), *reversed(path.parent.parts)):
        words = re.split(r"[^a-z]+", name.lower())
        if splits := {_SPLITS[word] for word in words if word in _SPLITS}:
            # Of train_sft and train_gen each is a split of its own.
            is_own = shard and name == shard["split"] and splits == {"train"}
            return name if is_own else " and ".join(sorted(splits))
    return ""


def _stem(path: pathlib.PurePath) -> str:
    return pathlib.PurePath(pieces.without_packing(path.name)).stem


def _order(path: pathlib.PurePath) -> list[tuple[int, int, str]]:
    """Returns the key by which files are in the order of the numbers in their names."""
    return [(1, int(p), p) if p.isdigit() else (0, 0, p) for p in re.split(r"(\d+)", str(path))]


def _check_shards(paths: Sequence[pathlib.Path], where: str) -> None:
    """Refuses numbered files if one of them is missing: 3 of 4."""
    groups = collections.defaultdict[tuple[str, str], list[tuple[re.Match[str], str]]](list)
    for path in paths:
        if shard := _SHARD.fullmatch(_stem(path)):
            groups[str(path.parent), shard["split"]].append((shard, path.name))
    for shards in groups.values():
        counts = [*dict.fromkeys(shard["count"] for shard, _ in shards)]
        if len(counts) > 1:
            raise refused("shards_mixed", where=where, first=counts[0], second=counts[1])
        first, name = shards[0]
        name = re.sub(r"-[0-9a-f]{16}(?=\.)", "-*", name)  # of its content
        known, count = {int(shard["number"]) for shard, _ in shards}, int(counts[0])
        start, (begin, end) = int(0 not in known and count in known), first.span("number")
        lacking = (n for n in range(start, start + count) if n not in known)
        missing = [
            f"{name[:begin]}{n:0{end - begin}}{name[end:]}" for n in itertools.islice(lacking, 3)
        ]
        if missing:
            numbers = {"count": count, "known": len(known), "missing": some_of(missing)}
            raise refused("shards_missing", where=where, **numbers)


# datasets ----------------------------------------------------------------------------------------


def _saved_rows(path: pathlib.Path, origin: str) -> Iterator[Mapping[str, Any]]:
    """Returns the rows of a folder that `save_to_disk` of datasets wrote."""
    datasets = pieces.import_package("datasets", origin)
    try:
        yield from datasets.load_from_disk(str(path))
    except Exception as error:
        raise refused("saved_unread", origin=origin, error=one_line(str(error), 100)) from error


def _hub_rows(source: str) -> Iterator[Mapping[str, Any]]:
    asked = _HUB_SOURCE.fullmatch(source)
    if not asked:
        raise refused("hub_name", got=shown(source))
    datasets = pieces.import_package("datasets", shown(source))
    name, config, split = asked.groups()
    try:
        yield from datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # a missing dataset or network shows in a dozen classes
        raise refused("hub_unread", source=shown(source), error=shown(str(error), 100)) from error
