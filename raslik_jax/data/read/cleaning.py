"""A user's training files without some of their rows, otherwise unchanged."""

import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator

from raslik_jax.base import files
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.read import pieces, sources
from raslik_jax.data.words import refused

# The file of a row within its source, "" for a single one, and the row's place in it.
AtFile = tuple[str, int]


def write_without(source: str, target: pathlib.Path, places: Collection[AtFile]) -> int:
    """Writes the training files without the rows at these places; returns how many are left.

    Each place is `Example.file` and `Example.place`. A text file keeps all characters of the other
    rows, and Parquet keeps its schema. A hub dataset or a saved dataset becomes JSONL. A packed
    file is written unpacked. Several files become a folder (see `cleaned_name`). It raises a
    ValueError if the source has no row at a place.
    """
    left, found = 0, set[AtFile]()
    with files.beside(target) as made:
        for name, path in (sources.source_files(source) or {"": pathlib.Path()}).items():

            def is_kept(place: int, name: str = name) -> bool:
                nonlocal left
                is_named = (name, place) in places
                found.update([(name, place)] if is_named else ())
                left += not is_named
                return not is_named

            part = made / pieces.without_packing(name) if name else made
            part.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_dir() and pieces.kind_of(path) == ".parquet":
                _write_parquet(path, part, is_kept)
                continue
            rows = _json_lines(source, is_kept)
            with open(part, "w", encoding="utf-8", newline="") as text:
                text.writelines(rows if path.is_dir() else _kept_text(path, is_kept))
        if missing := sorted({*places} - found):
            at = (f"{name}:{place}".lstrip(":") for name, place in missing)
            raise refused("file_changed", source=shown(source, 120), at=some_of(at, quoted=False))
        os.replace(made, target)
    return left


def is_folder(source: str) -> bool:
    """Returns whether a source without some of its rows is a folder: it has several files."""
    return any(sources.source_files(source))


def cleaned_name(source: str) -> str:
    """Returns the name of a source without some of its rows, with the ending of its form."""
    if source.startswith("hub:"):
        named = source.removeprefix("hub:").split("@")[0].split(":")[0]
        return f"cleaned_{pathlib.Path(named).name}.jsonl"
    path = pathlib.Path(source)
    if is_folder(source):
        first = next(iter(sources.source_files(source).values()))
        path = path if path.is_dir() else pathlib.Path(os.path.abspath(first)).parent
        return f"cleaned_{path.name or 'rows'}"
    name = f"{path.name}.jsonl" if path.is_dir() else pieces.without_packing(path.name)
    return f"cleaned_{name}"


def _json_lines(source: str, is_kept: Callable[[int], bool]) -> Iterator[str]:
    """Yields the rows that are kept of a dataset as lines of JSON."""
    for _, place, _, row in sources.placed_records(source):
        if isinstance(row, ValueError):
            raise row
        if is_kept(place):
            yield json.dumps(row) + "\n"


def _kept_text(path: pathlib.Path, is_kept: Callable[[int], bool]) -> Iterator[str]:
    """Yields the text of a file without that of the removed rows."""
    is_first = True
    for piece in pieces.read_pieces(path, sources.shown_source(path))[1]:
        if not piece.place:
            yield piece.text
        elif is_kept(piece.place):
            yield piece.text if is_first else piece.separator + piece.text
            is_first = False


def _write_parquet(
    path: pathlib.Path, target: pathlib.Path, is_kept: Callable[[int], bool]
) -> None:
    """Writes the kept rows of a Parquet file, a group of rows at a time."""
    with pieces.opened_parquet(path, sources.shown_source(path)) as table:
        from pyarrow import parquet  # it is there, the line above needs it too

        place, groups = 0, range(table.metadata.num_row_groups)
        how = table.metadata.row_group(0).column(0).compression if groups else "snappy"
        how = how.replace("UNCOMPRESSED", "none")
        with parquet.ParquetWriter(target, table.schema_arrow, compression=how) as writer:
            for group in groups:
                rows = table.read_row_group(group)
                chosen = [is_kept(place + number) for number in range(1, rows.num_rows + 1)]
                place += rows.num_rows
                writer.write_table(rows.filter(chosen) if chosen else rows)  # [] has no type
