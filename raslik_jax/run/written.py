"""The claim of a work directory, and the files that commands write there next to a run's results.

The content of such a file is recorded before it is in its place, so a stopped command continues
when it is started again. A file that the user has changed since is never replaced.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from raslik_jax.base import files
from raslik_jax.base.messages import shown
from raslik_jax.config import STAGES, Config, to_json
from raslik_jax.run import artifacts, manifests
from raslik_jax.run.manifests import MANIFEST

RECORD = "written.json"
# Folders of a work directory that commands write themselves.
_RESERVED = (*STAGES, "validate", "rows", "given")
# Files that a command writes there under its own name once config.json is there.
_OWN = ("run.flags", artifacts.VERSIONS.file, "scores.png", "scores.svg")
# The hash of each file of a place, and "" for each folder below. A file is the one named "".
Content = Mapping[str, str]
_ABSENT: Content = {}


def check_folder(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Refuses a folder with other files than those that a run has written there."""
    files.clear_left(folder.absolute().parent, folder.name)
    if not (folder.is_dir() and not folder.samefile(os.curdir) and _is_own(root, folder)):
        files.check_new_folder(folder)


def check_file(root: pathlib.Path, path: pathlib.Path, name: str) -> None:
    """Refuses, by the flag's name, an existing file that a run has not written in this form."""
    files.clear_left(path.absolute().parent, path.name)
    if not (path.is_file() and _is_own(root, path)):
        files.check_new(path, name)


def check_outside(
    place: str | os.PathLike[str], name: str, root: pathlib.Path | None = None
) -> None:
    """Refuses, by the flag's name, a place among the results of a run, or a URL.

    A result with foreign files cannot be made again. `root` is a work directory that may have
    written a folder elsewhere.
    """
    if "://" in os.fspath(place):
        got = shown(os.fspath(place), 120)
        raise ValueError(f"{name} must be a path of this machine, got {got}: give a local path")
    path = pathlib.Path(place).resolve()
    held = [(root / one).resolve() for one in places_of(root)] if root else []
    for folder in path.parents:
        inner, kind = path.relative_to(folder).parts[0], _kind(folder)
        is_taken = kind == "run" and (inner in _RESERVED or inner[0] == ".")
        if is_taken or kind == "result" or folder in held:
            must = f"must be outside of the folders of a run, got {shown(str(path), 140)}"
            raise ValueError(f"{name} {must}: choose a place outside of {shown(str(folder), 140)}")


def _kind(folder: pathlib.Path) -> Literal["result", "run", ""]:
    """Returns whether a folder is a unit's or an index, or the work directory of a run."""
    with contextlib.suppress(ValueError):
        found = files.read_json(folder / MANIFEST, dict).keys()
        if "index_format" in found or found >= {"key", "outputs"}:
            return "result"
    with contextlib.suppress(ValueError):
        return "run" if artifacts.CONFIG.read(folder) else ""
    return ""


@contextlib.contextmanager
def replacing(root: pathlib.Path, place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path for a file or a folder, which goes to its place after success.

    Args:
      root: the work directory, which records it.
      place: the place, which `check_folder` or `check_file` has checked. It is checked again at the
        end.

    Raises:
      ValueError: if another file or folder is there meanwhile.
      OSError: if the place cannot be written, for example a mounted disk.
    """
    place = pathlib.Path(os.path.abspath(place))
    with contextlib.ExitStack() as held:
        with files.writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            # On the same disk as the place, so that a rename takes it there.
            scratch = held.enter_context(files.beside(place))
            scratch.mkdir()
        made = scratch / place.name
        yield made
        # Hours may have passed.
        if made.is_dir():
            check_folder(root, place)
        else:
            check_file(root, place, "the command")
        content = content_of(made)
        note(root, place, content)
        with files.writing(place):
            parts = [made, *(made.rglob("*") if made.is_dir() else ())]
            files.sync(*(part for part in parts if part.is_file()))
            if place.is_dir():
                os.replace(place, scratch / "replaced")
            os.replace(made, place)
            files.sync(place.parent)
        note(root, place, content)


def write_bytes(root: pathlib.Path, path: pathlib.Path, content: bytes) -> None:
    """Writes and records a file of the work directory in any case."""
    found = {"": hashlib.sha256(content).hexdigest()}
    note(root, path, found)
    files.write_bytes(path, content)
    note(root, path, found)


def write_json(root: pathlib.Path, path: pathlib.Path, value: Any) -> None:
    """Writes and records a JSON file of the work directory in any case."""
    write_bytes(root, path, files.json_text(path, value).encode())


def note(root: pathlib.Path, place: pathlib.Path, content: Content) -> None:
    """Records the content for a place, before and after it is written.

    Before it is written, the earlier recorded content and an absent place are valid too. If the
    work directory cannot be written, nothing is recorded.
    """
    if not os.access(root, os.W_OK):
        return
    with _locked(root):
        recorded, name = places_of(root), _name(root, place)
        versions = recorded.get(name, [])
        there = content_of(place) if os.path.lexists(place) else _ABSENT
        kept = [there] if there != content and there in (*versions, _ABSENT) else []
        files.write_json(root / RECORD, recorded | {name: [*kept, content]})


def forget(root: pathlib.Path, path: pathlib.Path) -> None:
    """Removes a file of the work directory and its record."""
    with _locked(root):
        recorded = places_of(root)
        if recorded.pop(_name(root, path), None):
            files.write_json(root / RECORD, recorded)
        path.unlink(missing_ok=True)


def restorer(root: pathlib.Path, path: pathlib.Path) -> Callable[[], None]:
    """Returns a function that restores a small file and its record to their current content."""
    found = {p: files.read_bytes(p) if p.exists() else None for p in (path, root / RECORD)}

    def restore() -> None:
        for place, content in found.items():
            if content is None:
                place.unlink(missing_ok=True)
            else:
                files.write_bytes(place, content)

    return restore


def verify(root: pathlib.Path) -> list[str]:
    """Returns the damage to the written places, a line each; reads every byte."""
    found = []
    for name, versions in places_of(root).items():
        place = root / name
        if not os.path.lexists(place):
            found += [] if _ABSENT in versions else [f"{name}: missing"]
        elif (there := content_of(place)) not in versions:
            # Those of an earlier version that is there were not replaced.
            differing = min((_differing(there, one) for one in versions), key=len)
            found += [f"{f'{name}/{file}'.rstrip('/')}: {why}" for file, why in differing.items()]
    return found


def verify_run(root: pathlib.Path) -> list[str]:
    """Returns the damage to a work directory with its units, a line each; reads every byte."""
    lost = manifests.lost_units(root, STAGES)
    if not (lost or manifests.finished_units(root)):
        raise ValueError(f"{shown(str(root), 200)} must hold results of a run: correct --workdir")
    why = "missing, so the files next to it cannot be checked"
    mend = "restore it, or move the folder away and run again"
    own = [f"{name}/{MANIFEST}: {why}: {mend}" for name in lost]
    return [*manifests.verify(root), *own, *verify(root)]


def _differing(there: Content, recorded: Content) -> dict[str, str]:
    """Returns the files that differ from their record, and how."""
    why = {file: "missing or damaged" for file in recorded if there.get(file) != recorded[file]}
    return why | dict.fromkeys(there.keys() - recorded.keys(), "not written by the run")


def content_of(place: pathlib.Path) -> dict[str, str]:
    """Returns the content of a file or of all files of a folder, hidden ones too."""
    if place.is_symlink():
        return {"": "a link"}
    if not place.is_dir():
        return {"": files.hash_file(place)}
    parts = {str(part.relative_to(place)): part for part in sorted(place.rglob("*"))}
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda p: files.hash_file(p) if p.is_file() else "", parts.values())
        return dict(zip(parts, hashes, strict=True))


def _is_own(root: pathlib.Path, place: pathlib.Path) -> bool:
    return content_of(place) in places_of(root).get(_name(root, place), ())


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[None]:
    """Holds the record against other commands on the same work directory."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> None:
    """Locks a file; raises BlockingIOError if another holds it. Some disks have no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise


def places_of(root: pathlib.Path) -> dict[str, list[dict[str, str]]]:
    """Returns the recorded content of each place."""
    path, mend = root / RECORD, "move it away. The files that it lists are then never replaced"
    return files.read_json(path, {str: [{str: str}]}, mend=mend) if path.exists() else {}


def _name(root: pathlib.Path, place: pathlib.Path) -> str:
    """Returns a place relative to the work directory if it is below that: a run may be moved."""
    root, place = root.resolve(), place.resolve()
    return str(place.relative_to(root) if place.is_relative_to(root) else place)


def differing_fields(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns one `field: old -> new` line per value that differs between two nested configs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted(old.keys() | new.keys())
            for line in differing_fields(old.get(name), new.get(name), f"{prefix}{name}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def locked(folder: pathlib.Path, flag: str) -> Iterator[None]:
    """Locks a folder that a flag named against other processes.

    A missing folder is made. It is removed again if it stays empty.
    """
    check_outside(folder, flag)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{flag} must be a folder, {shown(str(folder), 200)} is a file")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:
        with open(path, "w", encoding="utf-8") as lock:
            is_ours = False
            # Held, or removed since it was opened.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                _lock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(lock.fileno()).st_ino == path.stat().st_ino
            if not is_ours:
                name = shown(str(folder), 160)
                raise ValueError(f"{flag}={name} is in use by another process: wait for it")
            yield
    finally:
        if made and [path.name for path in folder.iterdir()] == [".lock"]:
            path.unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()


@contextlib.contextmanager
def open_workdir(
    root: pathlib.Path, config: Config, *, update: bool
) -> Iterator[Callable[[], None]]:
    """Claims a work directory for one run and changes nothing until the run is recorded.

    It yields a function that records config and versions; call it when the first unit runs. Without
    `update` a directory of another configuration is refused. A config.json of another program, such
    as a checkpoint's, is refused too. So is a directory without config.json that has a file that a
    run would replace.
    """

    def record() -> None:
        write_json(root, artifacts.CONFIG.place(root), to_json(config))
        write_json(root, artifacts.VERSIONS.place(root), manifests.versions())

    recorded = artifacts.CONFIG.place(root)
    with locked(root, "--workdir"):
        mend = "choose another --workdir"
        old: dict[str, Any] = artifacts.CONFIG.read(root, mend) if recorded.is_file() else {}
        foreign = [] if recorded.is_file() else [n for n in _OWN if os.path.lexists(root / n)]
        if foreign:
            place = shown(str(root / foreign[0]), 160)
            raise ValueError(f"{place} must be a folder of a run, it has no config.json: {mend}")
        is_bound = recorded.is_file() and not update and bool(manifests.finished_units(root))
        if differing := differing_fields(old, to_json(config)) if is_bound else []:
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            place, got = shown(str(root), 100), "; ".join(differing[:5]) + more
            mend += ", or pass --update to make again the parts that differ"
            raise ValueError(f"{place} holds a run of another configuration ({got}): {mend}")
        yield record
