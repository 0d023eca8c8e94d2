"""What a command wrote for its user beside a run's results: its own to write again.

The content is recorded before it is in its place, so that wherever the command was stopped, the
same one goes on; what somebody has changed since is theirs, and never replaced.
"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from raslik_jax import files
from raslik_jax.manifests import content_hash

_RECORD = "written.json"


def check_folder(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Refuses a folder that holds something else than what a run has written there."""
    if not (folder.is_dir() and _is_own(root, folder)):
        files.check_new_folder(folder)


def check_file(root: pathlib.Path, path: pathlib.Path, name: str) -> None:
    """Refuses, by the flag's name, a file that is there and is not as a run has written it."""
    if not (path.is_file() and _is_own(root, path)):
        files.check_new(path, name)


@contextlib.contextmanager
def replacing(root: pathlib.Path, place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path for a file or a folder, which goes to its place when all went well.

    Args:
      root: the work directory, which records it.
      place: checked before, by `check_folder` or `check_file`, and here again at the end.

    Raises:
      ValueError: something else has come to lie there meanwhile.
      OSError: the place cannot be written, such as a disk that is mounted there.
    """
    place = pathlib.Path(os.path.abspath(place))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk as the place, so that a rename takes it there.
        held = tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.")
    except OSError as error:
        raise files.unwritten(place, error) from error
    with held as scratch:
        made = pathlib.Path(scratch) / place.name
        yield made
        # Hours may have passed.
        if made.is_dir():
            check_folder(root, place)
        else:
            check_file(root, place, "the command")
        recorded, name = _read(root), _name(root, place)
        contents = dict.fromkeys([*recorded.get(name, ()), _content(made)])
        files.write_json(root / _RECORD, recorded | {name: [*contents]})
        try:
            if place.is_dir():
                os.replace(place, pathlib.Path(scratch) / "replaced")
            os.replace(made, place)
            files.sync(place.parent)
        except OSError as error:
            raise files.unwritten(place, error) from error


def _is_own(root: pathlib.Path, place: pathlib.Path) -> bool:
    contents = _read(root).get(_name(root, place), ())
    return bool(contents) and not place.is_symlink() and _content(place) in contents


def _read(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns what was written to each place, by content."""
    path, mend = root / _RECORD, "delete it: what it lists then counts as yours"
    return files.read_json(path, {str: [str]}, mend=mend) if path.exists() else {}


def _name(root: pathlib.Path, place: pathlib.Path) -> str:
    """Returns a place, from the work directory where it lies below it: a run may be moved."""
    root, place = root.resolve(), place.resolve()
    return str(place.relative_to(root) if place.is_relative_to(root) else place)


def _content(place: pathlib.Path) -> str:
    """Returns the hash of a file, or of all that a folder has, hidden files too."""
    if not place.is_dir():
        return files.hash_file(place)
    parts = {str(part.relative_to(place)): part for part in place.rglob("*")}
    return content_hash({n: files.hash_file(p) if p.is_file() else "" for n, p in parts.items()})
