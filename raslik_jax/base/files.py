"""Small files: written whole or not at all, UTF-8, checked against a shape.

Every JSON file that a command reads goes through `read_json` with its required shape. The error for
a damaged or foreign file is one sentence with the file and the field.
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from raslik_jax.base.messages import shown, some_of

# A shape is a type (float takes integers too, `object` takes anything), `[shape]` for a list,
# `{str: shape}` for an object of any keys, or `{"key": shape, "key?": shape}` for an object with
# these keys (`?`: may be missing) and perhaps others; a tuple of shapes is one of them.
Shape = Any
AnyPath = str | os.PathLike[str]

# How gzip, Parquet, Zstandard, xz and bzip2 begin.
_PACKED = (b"\x1f\x8b", b"PAR1", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")
_AGAIN = "restore the file, or move it away and run its stage again"


# Folder of what an interrupted training goes on from: no part of a result.
RESUME = "resume"


def _quoted(path: AnyPath) -> str:
    return shown(str(path), 160)


@contextlib.contextmanager
def open_regular(path: AnyPath, *, mend: str = "correct the path") -> Iterator[io.BufferedReader]:
    """Yields a regular file, opened to read; refuses folders, devices and FIFOs."""
    try:
        # First look at the kind: opening a FIFO waits for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{_quoted(path)} must be a regular file: give the path of a file")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"no file {_quoted(path)}: {mend}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{_quoted(path)} cannot be read ({reason}): make it readable") from None


def read_bytes(path: AnyPath) -> bytes:
    """Returns the content of a regular file; refuses as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: AnyPath, *, mend: str = "correct the path") -> str:
    """Returns the text of a UTF-8 file, without a byte order mark; refuses others and no file."""
    with open_regular(path, mend=mend) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, raw.count(b"\n", 0, error.start) + 1, error) from None


def not_utf8(path: AnyPath, line: int, error: UnicodeDecodeError) -> ValueError:
    """Returns the error of a file that is not UTF-8, with the command that converts it."""
    byte = error.object[error.start]
    has_mark = line == 1 and error.start == 0 and byte in (0xFE, 0xFF)
    mend = f"convert it, as with iconv -f {'UTF-16' if has_mark else 'WINDOWS-1252'} -t UTF-8"
    mend += "" if has_mark else " for a text of Western Europe"
    if error.object.startswith(_PACKED):
        mend = "write its rows as JSONL"
    return ValueError(f"{_quoted(path)}:{line} must be UTF-8, got the byte 0x{byte:02x}: {mend}")


# JSON --------------------------------------------------------------------------------------------


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"the key {shown(next(n for n in names if names.count(n) > 1))} twice")
    return dict(pairs)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}, which JSON does not have")
    return value


# Refuses what JSON does not have, and a key twice.
JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)


def parse_json(text: str, origin: str, shape: Shape = object, *, mend: str = "") -> Any:
    """Returns the value of a JSON text; refuses duplicate keys, NaN, Infinity and another shape.

    `mend` says how to mend the file, here and below.
    """
    rest = f": {mend}" if mend else ""
    try:
        value = JSON.decode(text)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if is_deep else str(error)[:120]
        raise ValueError(f"{origin} must be JSON, got something else ({reason}){rest}") from None
    check_shape(value, shape, origin, mend=mend)
    return value


def read_json(path: AnyPath, shape: Shape = object, *, mend: str = _AGAIN) -> Any:
    """Returns the value of a UTF-8 JSON file that has this shape; refuses as `parse_json` does."""
    return parse_json(read_text(path, mend=mend), _quoted(path), shape, mend=mend)


def read_json_lines(path: AnyPath, shape: Shape = object, *, mend: str = _AGAIN) -> list[Any]:
    """Returns the values of a file of one JSON value a line, each read as `read_json` does."""
    lines = read_text(path, mend=mend).split("\n")
    return [
        parse_json(line, f"{_quoted(path)}:{number}", shape, mend=mend)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def check_shape(value: Any, shape: Shape, origin: str, *, mend: str = "") -> None:
    """Raises a ValueError that names a field with a value of another shape."""
    for field, problem in _misfits(value, shape, ""):
        place, rest = f"{field} in {origin}" if field else origin, f": {mend}" if mend else ""
        raise ValueError(f"{place} {problem}{rest}")


def _misfits(value: Any, shape: Shape, field: str) -> Iterator[tuple[str, str]]:
    """Yields each field with a value of another shape, and the right shape."""
    kind = type(shape) if isinstance(shape, (list, dict)) else shape
    if isinstance(shape, tuple):
        is_right = any(not [*_misfits(value, one, "")] for one in shape)
    elif isinstance(value, bool) or kind is None:
        is_right = value is None if kind is None else kind in (bool, object)
    elif kind is float:
        is_right = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    else:
        is_right = isinstance(value, kind)
    if not is_right:
        yield field, f"must be {_name(shape)}, got {shown(value, 40)}"
        return
    items: Iterable[tuple[str, Any, Shape]] = ()
    prefix = f"{field}." if field else ""
    if isinstance(shape, list):
        items = [(f"{field}[{place}]", item, shape[0]) for place, item in enumerate(value)]
    elif isinstance(shape, dict) and str in shape:
        items = [
            (prefix + shown(k, 30).strip("'\""), item, shape[str]) for k, item in value.items()
        ]
    elif isinstance(shape, dict):
        missing = [key for key in shape if not key.endswith("?") and key not in value]
        if missing:
            yield field, f"must have {some_of(missing)}, got {some_of(value)}"
        named = ((key.removesuffix("?"), one) for key, one in shape.items())
        items = [(prefix + key, value[key], one) for key, one in named if key in value]
    for item in items:
        yield from _misfits(item[1], item[2], item[0])


_NAMES: dict[Any, str] = {
    **{str: "text", int: "an integer", float: "a number", bool: "true or false", None: "null"},
    **{list: "a list", dict: "an object"},
}


def _name(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_name, shape))
    return _NAMES[type(shape) if isinstance(shape, (list, dict)) else shape]


# writing -----------------------------------------------------------------------------------------


# On a shared disk two machines may have a process of the same id.
_HOST = socket.gethostname()
_OF_HERE = re.compile(rf"\..+\.{re.escape(_HOST)}\.(\d+)-\d+\.partial")
_OF_ANY = re.compile(r"\..+\.\d+-\d+\.partial")
_numbers = itertools.count()
_in_use: set[str] = set()


def is_temporary(path: AnyPath) -> bool:
    """Returns whether a path is temporary: at or below a name of `beside`."""
    return any(map(_OF_ANY.fullmatch, pathlib.PurePath(path).parts))


@contextlib.contextmanager
def beside(path: AnyPath) -> Iterator[pathlib.Path]:
    """Yields a hidden name next to a path and removes its file or folder at the end.

    At the start it removes such files of killed processes of this machine.
    """
    path = pathlib.Path(path)
    clear_left(path.parent, path.name)
    name = f".{path.name}.{_HOST}.{os.getpid()}-{next(_numbers)}.partial"
    temporary = path.with_name(name)
    _in_use.add(name)
    try:
        remove(temporary)
        yield temporary
    finally:
        remove(temporary)
        _in_use.discard(name)


def clear_left(folder: pathlib.Path, name: str = "", *, is_deep: bool = False) -> None:
    """Removes the files of dead processes of this machine that `beside` left in a folder.

    It looks for one name or for all. With `is_deep` it also looks below the folder.
    """
    # Not glob, which fails where another process removes a folder meanwhile.
    for parent, folders, names in os.walk(folder):
        for left in (*folders, *names):
            found = _OF_HERE.fullmatch(left)
            is_named = found and left.startswith(f".{name}") and left not in _in_use
            if found and is_named and _is_dead(int(found[1])):
                remove(os.path.join(parent, left))
        if not is_deep:
            break


def _is_dead(process_id: int) -> bool:
    if process_id == os.getpid():  # one before it had the same number
        return True
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # of another user
        return False
    return False


def remove(path: AnyPath) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        pathlib.Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[pathlib.Path]:
    """Yields a path next to the target that replaces the target completely or not at all.

    After a crash the old file or the new one is there. Links, devices and FIFOs are never replaced.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"the folder {_quoted(path.parent)} must exist: make it first")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{_quoted(path)} must be a regular file or new: give another path")
    with writing(path), beside(path) as temporary:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


def check_new(path: AnyPath, name: str) -> None:
    """Raises a ValueError with the flag's name if a new file would replace something."""
    path = pathlib.Path(path)
    if os.path.lexists(path):
        raise ValueError(f"{name} must name a new file, {_quoted(path)} exists: give another path")
    if not path.parent.is_dir():
        raise ValueError(f"{name} must be in a folder, got no {_quoted(path.parent)}: make it")


def check_new_folder(folder: AnyPath) -> None:
    """Raises a ValueError if a folder is not empty or if the path is a link or a file.

    The current directory is refused too: another folder takes its place and relative paths end.
    """
    folder = pathlib.Path(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{_quoted(folder)} must be a new or empty directory: choose another")
    if folder.exists() and os.path.samefile(folder, os.curdir):
        must = "must not be the directory that the command is started in"
        raise ValueError(f"{_quoted(folder)} {must}: choose another")


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Gives errors of the system the sentence of `unwritten`."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error) from error


def unwritten(path: AnyPath, error: OSError) -> OSError:
    """Returns the error of a place that cannot be written, with the reason and what to do.

    An error that already is a sentence is returned unchanged.
    """
    if not _is_of_system(error):
        return error
    mend = "free space, or choose another place"
    return OSError(f"{_quoted(path)} cannot be written ({error.strerror}): {mend}")


def _is_of_system(error: OSError) -> bool:
    return error.errno is not None and error.strerror == os.strerror(error.errno)


def sentence_of(error: ValueError | OSError) -> str:
    """Returns the text of an error as a sentence, also for errors of the system."""
    if not isinstance(error, OSError):
        return str(error)
    if not _is_of_system(error):
        return error.strerror or str(error)
    place = _quoted(error.filename) if error.filename else "a file"
    mend = "correct the path or its permissions, or free space"
    return f"{place} cannot be used ({error.strerror}): {mend}"


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Writes a file whole or not at all; refuses as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: AnyPath, text: str) -> None:
    """Writes a UTF-8 file whole or not at all; refuses as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: AnyPath, value: Any) -> None:
    """Writes a JSON file whole or not at all; a NaN or infinity is a ValueError."""
    write_text(path, json_text(path, value))


def json_text(path: AnyPath, value: Any) -> str:
    """Returns the text of a JSON file; a NaN or infinity is a ValueError that names the path."""
    try:
        return json.dumps(value, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{_quoted(path)} must hold finite numbers: {error}") from error


def sync(*paths: AnyPath) -> None:
    """Makes files and the names in folders durable: a rename survives a crash only after this."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# arrays, hashes ----------------------------------------------------------------------------------


def read_array(path: AnyPath, shape: Sequence[int | None] | None = None) -> np.ndarray:
    """Returns the array of a whole .npy file of numbers, which never runs code; refuses others.

    An axis of `shape` that is None may have any length.
    """
    with open_regular(path, mend=_AGAIN) as file:
        try:
            array = np.load(file, allow_pickle=False)
        except Exception:  # a damaged header ends in any error of Python's own parser
            array = None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ValueError(f"{_quoted(path)} must be a whole .npy file of numbers: {_AGAIN}")
    expected = array.shape if shape is None else shape
    if array.ndim != len(expected) or any(
        n not in (None, size) for size, n in zip(array.shape, expected, strict=True)
    ):
        text = " x ".join("any" if size is None else str(size) for size in expected)
        must = f"must be {text} numbers, got shape {array.shape}"
        raise ValueError(f"{_quoted(path)} {must}: {_AGAIN}")
    return array


def hash_file(path: AnyPath) -> str:
    """Returns the SHA-256 of a regular file as 64 hex digits; refuses as `open_regular` does."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
