"""Claims a work directory for one run: one configuration, one process at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from raslik_jax.config import Config, to_json
from raslik_jax.files import read_json, write_json
from raslik_jax.manifests import finished_units, versions
from raslik_jax.messages import shown


def differing_fields(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns one `field: old -> new` line per value that two nested configs do not share."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted(old.keys() | new.keys())
            for line in differing_fields(old.get(name), new.get(name), f"{prefix}{name}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def open_workdir(
    root: pathlib.Path, config: Config, *, update: bool
) -> Iterator[Callable[[], None]]:
    """Claims a work directory for one run.

    Args:
      root: work directory, made where it is missing; left as it was if the run is refused before
        it records anything.
      config: settings of the run.
      update: take over a directory of another configuration; what changed is made again.

    Yields:
      A function that records the run's config and versions, to be called when the first unit runs.

    Raises:
      ValueError: the directory belongs to another configuration, is in use, or is a file.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"--workdir must be a folder, {shown(str(root), 200)} is a file")
    made = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)

    def record() -> None:
        write_json(root / "config.json", to_json(config))
        write_json(root / "versions.json", versions())

    try:
        with open(root / ".lock", "w", encoding="utf-8") as lock:
            _lock(lock, root)
            _check_config(root, config, update=update)
            yield record
    finally:
        # Nothing was recorded: nothing stays.
        if made and [path.name for path in root.iterdir()] == [".lock"]:
            (root / ".lock").unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _lock(lock: Any, root: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.fstat(lock.fileno()).st_ino == (root / ".lock").stat().st_ino
    except OSError:
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{shown(str(root), 160)} is in use by another run: wait for it, or choose another "
            "--workdir"
        )


def _check_config(root: pathlib.Path, config: Config, *, update: bool) -> None:
    """Raises a ValueError where a work directory holds results of another configuration."""
    recorded = root / "config.json"
    if update or not recorded.is_file() or not finished_units(root):
        return
    differing = differing_fields(read_json(recorded, dict), to_json(config))
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(
            f"{shown(str(root), 100)} holds a run of another configuration "
            f"({'; '.join(differing[:5])}{more}): choose another --workdir, or pass --update to "
            "make again only what changed"
        )
