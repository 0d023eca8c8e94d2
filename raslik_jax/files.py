"""Small files in and out: whole or not at all, UTF-8, checked against a shape.

Every JSON file that a command reads goes through `read_json`, with the shape that it must have, so
that a damaged or foreign file is one sentence that names the file and the field.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raslik_jax.messages import shown, some_of

# A shape is a type (float takes integers too, `object` takes anything), `[shape]` for a list,
# `{str: shape}` for an object of any keys, or `{"key": shape, "key?": shape}` for an object with
# these keys (`?`: may be missing) and perhaps others; a tuple of shapes is one of them.
Shape = Any


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """Yields a regular file, opened to read.

    Raises:
      ValueError: the file is missing, unreadable, or no regular file (a folder, a device, a FIFO).
    """
    origin = shown(str(path), 160)
    try:
        # Asked first: to open a FIFO is to wait for whoever writes to it.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{origin} must be a regular file: give the path of a file")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"no file {origin}: correct the path") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{origin} cannot be read ({reason})") from None


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a regular file; refuses as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file, whatever the locale.

    Raises:
      ValueError: as `read_bytes`; the file is not UTF-8.
    """
    return decode_text(read_bytes(path), path)


def decode_text(raw: bytes, path: str | os.PathLike[str]) -> str:
    """Returns the text of a file's bytes, less a byte order mark.

    Raises:
      ValueError: they are not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{shown(str(path), 200)}:{line} must be UTF-8, got the byte "
            f"0x{raw[error.start]:02x}: save it as UTF-8"
        ) from None


def parse_json(text: str, origin: str) -> Any:
    """Returns the value of a JSON text; refuses duplicate keys, NaN and Infinity.

    Raises:
      ValueError: it is none; `origin` names where it came from.
    """
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        value, end = decode_json(text, start)
        if text[end:].strip(" \t\r\n"):
            raise ValueError(f"text behind its end, {_place(text, end)}")
    except ValueError as error:
        raise ValueError(f"{origin} must be JSON, got something else ({error})") from None
    return value


def decode_json(text: str, position: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at a position, and the position behind it.

    Raises:
      ValueError: there is none, or one that `parse_json` refuses; the reason alone.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, {_place(text, error.pos)}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # of the two hooks, or an integer of thousands of digits
        reason = str(error) if "digits" not in str(error) else "an integer of too many digits"
    raise ValueError(reason[:120])


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"column {column}" if line == 1 else f"line {line}, column {column}"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(n for n in names if names.count(n) > 1))} twice")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the number {name}, which JSON does not have")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ValueError(f"the number {digits[:20]}, which is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float
)


def read_json(path: str | os.PathLike[str], shape: Shape = object, *, mend: str = "") -> Any:
    """Returns the value of a JSON file that has this shape.

    Args:
      path: a UTF-8 file.
      shape: what the value must be, see `Shape`.
      mend: what to do about a damaged or missing file, said after the colon.

    Raises:
      ValueError: the file is missing, no JSON, or of another shape, naming file and field.
    """
    origin = shown(str(path), 160)
    mend = mend or "restore the file, or delete it and run the stage that makes it again"
    if not os.path.lexists(path):
        raise ValueError(f"no file {origin}: {mend}")
    text = read_text(path)
    try:
        value = parse_json(text, origin)
        check_shape(value, shape, origin)
    except ValueError as error:
        raise ValueError(f"{error}: {mend}") from None
    return value


def read_json_lines(
    path: str | os.PathLike[str], shape: Shape = object, *, mend: str = ""
) -> list[Any]:
    """Returns the values of a file of one JSON value per line; blank lines are left out.

    Args and errors as `read_json`; the line is named.
    """
    origin = shown(str(path), 160)
    mend = mend or "restore the file, or delete it and run the stage that makes it again"
    if not os.path.lexists(path):
        raise ValueError(f"no file {origin}: {mend}")
    values = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                value = parse_json(line, f"{origin}:{number}")
                check_shape(value, shape, f"{origin}:{number}")
            except ValueError as error:
                raise ValueError(f"{error}: {mend}") from None
            values.append(value)
    return values


def check_shape(value: Any, shape: Shape, origin: str, field: str = "") -> None:
    """Raises a ValueError that names the field where a value has another shape."""
    place = f"{field} in {origin}" if field else origin
    if isinstance(shape, tuple):
        if not any(_has_shape(value, one) for one in shape):
            raise ValueError(f"{place} must be {_name(shape)}, got {shown(value, 40)}")
    elif isinstance(shape, list):
        _check_type(value, list, place)
        for position, item in enumerate(value):
            check_shape(item, shape[0], origin, f"{field}[{position}]")
    elif isinstance(shape, dict):
        _check_type(value, dict, place)
        prefix = f"{field}." if field else ""
        if str in shape:
            for key, item in value.items():
                check_shape(item, shape[str], origin, prefix + shown(key, 30).strip("'\""))
            return
        missing = [key for key in shape if not key.endswith("?") and key not in value]
        if missing:
            raise ValueError(f"{place} must have {some_of(missing)}, got {some_of(value)}")
        for key, item in shape.items():
            name = key.removesuffix("?")
            if name in value:
                check_shape(value[name], item, origin, prefix + name)
    else:
        _check_type(value, shape, place)


def _has_shape(value: Any, shape: Shape) -> bool:
    try:
        check_shape(value, shape, "")
    except ValueError:
        return False
    return True


def _check_type(value: Any, kind: type | None, place: str) -> None:
    if kind is None:
        is_right = value is None
    elif kind is float:
        is_right = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_right = is_right and abs(value) <= sys.float_info.max
    elif kind is int:
        is_right = isinstance(value, int) and not isinstance(value, bool)
    else:
        is_right = isinstance(value, kind)
    if not is_right:
        raise ValueError(f"{place} must be {_name(kind)}, got {shown(value, 40)}")


def _name(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_name, shape))
    if isinstance(shape, list):
        return "a list"
    if isinstance(shape, dict) or shape is dict:
        return "an object"
    names: dict[Any, str] = {
        str: "text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        None: "null",
    }
    return names.get(shape, "something else")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a path beside the target; what is written there replaces the target, or nothing does.

    The file reaches the disk before it takes its name, so that a crash leaves the old file or the
    new one.

    Raises:
      ValueError: the folder is missing, or the target is there and no regular file: links,
        devices and FIFOs are never replaced.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"no folder {shown(str(path.parent), 200)}: make it first")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(
            f"{shown(str(path), 200)} is no regular file and is not replaced: give another path"
        )
    # On a shared disk two machines may have a process of the same id.
    own = f"{socket.gethostname()}.{os.getpid()}"
    temporary = path.with_name(f".{path.name}.{own}.partial")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_new(path: str | os.PathLike[str], name: str) -> None:
    """Raises a ValueError where a file could not be made without replacing something.

    Args:
      path: where a file of the user's is to go.
      name: of the flag or argument that gave the path.
    """
    path = pathlib.Path(path)
    if os.path.lexists(path):
        raise ValueError(
            f"{name} must name a new file, {shown(str(path), 160)} is there already: give another "
            "path, or delete it"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"{name} must lie in a folder that is there, {shown(str(path.parent), 160)} is none: "
            "make it first"
        )


def check_new_folder(folder: str | os.PathLike[str]) -> None:
    """Raises a ValueError where a folder holds something, or the path is a link or a file."""
    folder = pathlib.Path(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(
            f"{shown(str(folder), 160)} must be a new or empty directory, got one that holds "
            "something, a link or a file: choose another"
        )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 file whole or not at all; refuses as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON file whole or not at all; a NaN or infinity is a ValueError."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"{shown(str(path), 160)} must hold finite numbers, got {list(_not_finite(value))[:5]}"
        ) from error
    write_text(path, text + "\n")


def _not_finite(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, f"{field}.{key}" if field else str(key))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _not_finite(item, f"{field}[{position}]")
    elif isinstance(value, float) and value - value != 0:
        yield f"{field}={value}"


def read_array(
    path: str | os.PathLike[str], shape: Sequence[int | None] | None = None, *, mend: str = ""
) -> np.ndarray:
    """Returns the array of an .npy file, which never runs code.

    Args:
      path: the file.
      shape: that the array must have, None where any length will do; None for any shape.
      mend: what to do about a damaged or missing file, said after the colon.

    Raises:
      ValueError: the file is missing, no regular file, truncated, no array of numbers, or has
        another shape.
    """
    origin = shown(str(path), 160)
    mend = mend or "delete it and run the stage that makes it again"
    if not os.path.lexists(path):
        raise ValueError(f"no file {origin}: {mend}")
    with open_regular(path) as file:
        try:
            array = np.load(file, allow_pickle=False)
        except Exception:  # a damaged header ends in any error of Python's own parser
            array = None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ValueError(f"{origin} must be a whole .npy file of numbers, got another: {mend}")
    if shape is not None:
        sizes = zip(array.shape, shape, strict=False)
        if array.ndim != len(shape) or any(n not in (None, size) for size, n in sizes):
            expected = " x ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"{origin} must be {expected} numbers, got shape {array.shape}: {mend}"
            )
    return array


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable: a rename survives a crash only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a regular file's bytes, as 64 hex digits.

    Raises:
      ValueError: the file is missing, unreadable or no regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
