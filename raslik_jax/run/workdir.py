"""Claims a work directory for one run: one configuration, one process at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from raslik_jax.base.messages import shown
from raslik_jax.config import Config, to_json
from raslik_jax.run import artifacts, written
from raslik_jax.run.manifests import finished_units, versions

# Files that a command writes there under its own name once config.json is there.
_OWN = ("run.flags", artifacts.VERSIONS.file, "scores.png", "scores.svg")


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
    written.check_outside(folder, flag)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{flag} must be a folder, {shown(str(folder), 200)} is a file")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:
        with open(path, "w", encoding="utf-8") as lock:
            is_ours = False
            with contextlib.suppress(OSError):  # held, or removed since it was opened
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        written.write_json(root, artifacts.CONFIG.place(root), to_json(config))
        written.write_json(root, artifacts.VERSIONS.place(root), versions())

    recorded = artifacts.CONFIG.place(root)
    with locked(root, "--workdir"):
        differing: list[str] = []
        mend = "choose another --workdir"
        old: dict[str, Any] = artifacts.CONFIG.read(root, mend) if recorded.is_file() else {}
        if old and "corpus" not in old:
            place = shown(str(recorded), 160)
            raise ValueError(f"{place} must be a folder of a run, it has other files: {mend}")
        foreign = [] if recorded.is_file() else [n for n in _OWN if os.path.lexists(root / n)]
        if foreign:
            place = shown(str(root / foreign[0]), 160)
            raise ValueError(f"{place} must be a folder of a run, it has no config.json: {mend}")
        if not update and recorded.is_file() and finished_units(root):
            differing = differing_fields(old, to_json(config))
        if differing:
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            place, got = shown(str(root), 100), "; ".join(differing[:5]) + more
            mend += ", or pass --update to make again the parts that differ"
            raise ValueError(f"{place} holds a run of another configuration ({got}): {mend}")
        yield record
