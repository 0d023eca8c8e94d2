"""The folder of an index.

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

# With locks, one stopped process would block all that write the same file, for ever.
_CONTEXT = ts.Context({"file_io_locking": {"mode": "none"}})
_UNFINISHED = ".__lock"  # how TensorStore's names of unfinished writes end


class Read(NamedTuple):
    """A file and its generation, which every write changes; value None if there is none."""

    value: bytes | None
    generation: bytes


class Place:
    """The files of a folder by name. A write that fails is an OSError."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.path.abspath(path)
        self.folder = Path(self.path)
        spec: Any = {"driver": "file", "path": f"{self.path}/"}
        self._kv = ts.KvStore.open(spec, context=_CONTEXT).result()

    def look(self, name: str) -> Read:
        """Returns a file with its generation."""
        found = self._kv.read(name).result()
        return Read(found.value if found.state == "value" else None, found.stamp.generation)

    def read(self, name: str) -> bytes | None:
        """Returns a file; None if there is none."""
        return self.look(name).value

    def names(self, folder: str = "") -> set[str]:
        """Returns the names of all files, or of those of one folder."""
        # "0" is the character after "/".
        within = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else None
        keys = self._kv.list(within).result()
        return {key.decode() for key in keys if not key.endswith(_UNFINISHED.encode())}

    def map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a file as an array, mapped into memory; refuses another size."""
        size, file = int(np.prod(shape)) * dtype.itemsize, self.folder / name
        actual = file.stat().st_size if file.exists() else None
        if actual != size:
            raise ValueError(f"it must have {size} bytes, it has {actual}")
        return np.memmap(file, dtype, mode="r", shape=shape)

    def write(self, name: str, value: bytes | None, *, if_equal: bytes | None = None) -> bytes:
        """Writes a file, or deletes it for None; its generation is empty if not `if_equal`."""
        with self._explained(name):
            return self._kv.write(name, value, if_equal=if_equal).result().generation

    def clear_unfinished(self) -> None:
        """Deletes the unfinished files of dead processes."""
        for folder, _, names in os.walk(self.folder):
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
