"""Rows of Parquet files and of the package datasets in JSON's types."""

import contextlib
import datetime
import decimal
import importlib
import io
import math
import pathlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from raslik_jax.base import files
from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.data.read.unpacking import check_head, is_packed, unpacked

_BATCH = 1024
# A row, or what is wrong with it.
Row = dict[str, Any] | ValueError


def read_batches(path: pathlib.Path, origin: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file and holds a batch at a time."""
    with opened_parquet(path, origin) as table:
        for batch in table.iter_batches(_BATCH):
            names, columns = batch.schema.names, []
            for name, column in zip(names, batch.columns, strict=True):
                try:
                    columns.append(column.to_pylist())
                except Exception as error:  # of Arrow
                    raise ValueError(
                        f"the column {shown(name)} of {origin} cannot be read "
                        f"({one_line(str(error), 100)}): leave it out"
                    ) from error
            for row in zip(*columns, strict=True):
                yield json_row(dict(zip(names, row, strict=True)))


@contextlib.contextmanager
def opened_parquet(path: pathlib.Path, origin: str) -> Iterator[Any]:
    """Yields a Parquet file whose errors name it; refuses two columns of one name."""
    parquet = import_package("pyarrow.parquet", origin)
    with contextlib.ExitStack() as held:
        if is_packed(path.name):
            file: Any = io.BytesIO(b"".join(unpacked(path)))
        else:
            file = held.enter_context(files.open_regular(path))
            check_head(path, file.peek(256)[:256].replace(b"\0", b""))
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
        except Exception as error:  # Arrow's errors are those of many classes
            raise _damaged(origin, error) from error
        if len({*names}) < len(names):
            raise ValueError(
                f"{origin} must have each column once, got {some_of(names)}: rename one"
            )
        try:
            yield table
        except (OSError, import_package("pyarrow", origin).ArrowException) as error:
            raise _damaged(origin, error) from error


def _damaged(origin: str, error: Exception) -> ValueError:
    reason = one_line(str(error), 100)
    return ValueError(f"{origin} must be a whole Parquet file ({reason}): fetch or write it again")


def import_package(name: str, origin: str) -> Any:
    """Returns a module of an optional package; if it is missing, says which to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{origin} needs the package {name.partition('.')[0]}: install raslik-jax[data] or "
            "give a JSON file"
        ) from error


# values ------------------------------------------------------------------------------------------


def json_row(row: Mapping[str, Any]) -> Row:
    """Returns a row in JSON's types, or the error that names the column of another value."""
    found = {}
    for name, value in row.items():
        try:
            found[name] = _as_json(value)
        except ValueError as error:
            return ValueError(f"the column {shown(name)} {error}")
    return found


def _as_json(value: Any) -> Any:
    """Returns a value in JSON's types: bytes as their text, NaN as null, a date in ISO's form."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"must have finite numbers, got {value}: write null in its place")
        return None if math.isnan(value) else value
    if isinstance(value, list):
        is_map = value and all(isinstance(one, tuple) and len(one) == 2 for one in value)
        return _as_json(dict(value)) if is_map else [_as_json(one) for one in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"must have text in UTF-8, got the bytes {shown(value, 40)}: leave it out or write "
                "it as text"
            ) from None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, decimal.Decimal) and value.is_finite():
        near = int(value) if value == value.to_integral_value() else float(value)
        return near if decimal.Decimal(str(near)) == value else str(value)
    got = type(value).__name__
    raise ValueError(f"must have text, numbers, dates, lists or structs, got {got}: leave it out")
