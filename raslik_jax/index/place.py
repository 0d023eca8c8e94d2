"""The place of an index: a local folder, or a `gs://` or `s3://` prefix, by the same calls.

Every write goes to a temporary name and is then fsynced and renamed. So a file is complete or
missing. No lock is held, so a stopped process does not block others.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from raslik_jax.base.messages import one_line, shown

# With locks, one stopped process would block all that write the same file, for ever.
_CONTEXT = ts.Context({"file_io_locking": {"mode": "none"}})
# Others have no writes; a server that does not answer is waited for.
_SCHEMES = ("", "gs", "s3", "file", "memory")
# A mistyped name or a missing network would be waited for in silence, for many minutes.
_HASTY = ts.Context({f"{name}_request_retries": {"max_retries": 3} for name in ("gcs", "s3")})
_UNFINISHED = ".__lock"  # how TensorStore's names of unfinished writes end


class Read(NamedTuple):
    """A file and its generation, which every write changes; value None if there is none."""

    value: bytes | None
    generation: bytes


class Place:
    """Files by name, in a folder (`local`) or below a prefix. A write that fails is an OSError."""

    def __init__(self, path: str | os.PathLike):
        text = os.fspath(path)
        scheme = text.partition("://")[0] if "://" in text else ""
        if scheme not in _SCHEMES:
            must = f"must be a folder or begin with {' or '.join(f'{s}://' for s in _SCHEMES[1:3])}"
            raise ValueError(f"an index {must}, got {shown(text, 120)}: correct the path")
        is_remote = bool(scheme)
        self.path = text.rstrip("/") if is_remote else os.path.abspath(text)
        self.local = None if is_remote else Path(self.path)
        spec: Any = f"{self.path}/" if is_remote else {"driver": "file", "path": f"{self.path}/"}
        self._spec = spec
        if scheme in _SCHEMES[1:3]:
            try:
                ts.KvStore.open(spec, context=_HASTY).result().read("zarr.json").result()
            except (ValueError, OSError, RuntimeError) as error:
                why = f"got no answer from {shown(text, 120)} ({one_line(str(error), 100)})"
                mend = "correct the path, the network or the credentials"
                raise ValueError(f"an index must be readable, {why}: {mend}") from error
        self._kv = ts.KvStore.open(spec, context=_CONTEXT).result()

    def look(self, name: str) -> Read:
        """Returns a file with its generation."""
        found = self._kv.read(name).result()
        return Read(found.value if found.state == "value" else None, found.stamp.generation)

    def read(self, name: str) -> bytes | None:
        """Returns a file; None if there is none."""
        return self.look(name).value

    def read_many(self, names: list[str]) -> list[bytes | None]:
        """Returns several files that are read at the same time."""
        found = [read.result() for read in [self._kv.read(name) for name in names]]
        return [read.value if read.state == "value" else None for read in found]

    def names(self, folder: str = "") -> set[str]:
        """Returns the names of all files, or of those of one folder."""
        # "0" is the character after "/".
        within = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else None
        keys = self._kv.list(within).result()
        return {key.decode() for key in keys if not key.endswith(_UNFINISHED.encode())}

    def map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a file as an array, mapped into memory if local; refuses another size."""
        size = int(np.prod(shape)) * dtype.itemsize
        if self.local is not None:
            file = self.local / name
            actual = file.stat().st_size if file.exists() else None
            if actual == size:
                return np.memmap(file, dtype, mode="r", shape=shape)
        else:
            value = self.read(name)
            actual = None if value is None else len(value)
            if value is not None and actual == size:
                return np.frombuffer(value, dtype).reshape(shape)
        raise ValueError(f"it must have {size} bytes, it has {actual}")

    def write(self, name: str, value: bytes | None, *, if_equal: bytes | None = None) -> bytes:
        """Writes a file, or deletes it for None; its generation is empty if not `if_equal`."""
        with self._explained(name):
            return self._kv.write(name, value, if_equal=if_equal).result().generation

    def clear_unfinished(self) -> None:
        """Deletes the unfinished files of dead processes."""
        for folder, _, names in os.walk(self.local) if self.local else ():
            for name in names:
                if name.endswith(_UNFINISHED):
                    Path(folder, name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turns a failed write into an OSError that says what happened and what to do."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:
            full = "No space left" in str(error) or "quota" in str(error).lower()
            advice = "free some space" if full else "remove the cause"
            raise OSError(
                errno.ENOSPC if full else errno.EIO,
                f"{'No space left' if full else 'Failed'} writing {name} of the index "
                f"{self.path}: what was committed is safe; {advice} and start again ({error})",
            ) from None
