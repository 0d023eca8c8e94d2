"""Checkpoints of an interrupted training, by Orbax inside a unit's folder.

`resume/STEP/state` is an Orbax checkpoint. `resume/STEP/seal.json` has the SHA-256 of each of its
files. Orbax reads a flipped byte silently and reports other damage by tracebacks of its threads.
This module opens no checkpoint whose seal does not fit.
"""

import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from raslik_jax.base.files import RESUME, hash_file, read_json, sync, write_json
from raslik_jax.base.messages import one_line, shown
from raslik_jax.data.words import refused
from raslik_jax.parallel import processes

_Tree = TypeVar("_Tree")
_SEAL = "seal.json"
# A damaged checkpoint costs the work since the one before it, not all of it.
_KEPT = 2


def _numbered(tree: Any) -> dict[str, Any]:
    """Returns the leaves by number, so that the file does not depend on a library's node types."""
    return {f"{number:05d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def _file_hashes(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files}


def _saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the numbers of a unit's checkpoints; the newest first."""
    names = (path.name for path in (folder / RESUME).glob("*/"))
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def save_progress(folder: pathlib.Path, step: int, progress: Any) -> None:
    """Writes a tree of nonempty arrays as a unit's checkpoint and keeps the one before."""
    # Imported here, because it takes a second and most runs finish without it.
    import orbax.checkpoint

    place = folder / RESUME / str(step)

    def begin() -> str:
        """Makes the folder that all processes write their parts to."""
        for killed in place.parent.glob(".*.partial-*"):
            shutil.rmtree(killed)
        partial = place.with_name(f".{step}.partial-{os.getpid()}")
        partial.mkdir(parents=True)
        return str(partial.resolve())

    def seal(partial: pathlib.Path) -> None:
        write_json(partial / _SEAL, _file_hashes(partial / "state"))
        partial.rename(place)
        sync(place.parent)
        for old in _saved_steps(folder)[_KEPT:]:
            shutil.rmtree(folder / RESUME / str(old))

    try:
        partial = pathlib.Path(processes.from_first(begin))
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "state", _numbered(progress))
        processes.alone(lambda: seal(partial))
    except (OSError, ValueError, RuntimeError) as error:
        what = f"the checkpoint {shown(str(place), 160)} cannot be written"
        raise OSError(f"{what} ({one_line(str(error), 80)}): free space, then run again") from error


def load_progress(folder: pathlib.Path, like: Callable[[int], _Tree]) -> tuple[int, _Tree] | None:
    """Returns the newest undamaged checkpoint of a unit, its number and its arrays bit for bit.

    Damaged checkpoints are named on stderr and removed. Returns None if no other is left. `like` is
    a function from the number of a checkpoint to arrays of its shapes and dtypes. NumPy arrays come
    back as NumPy arrays. Raises a ValueError if a whole checkpoint does not fit.
    """
    while step := processes.from_first(lambda: next(iter(_saved_steps(folder)), 0)):
        place = folder / RESUME / str(step)
        why = processes.from_first(functools.partial(_damage, place))
        if why:
            what = f"note: the checkpoint {shown(str(place), 160)} is damaged ({one_line(why, 80)})"
            print(f"{what}. Training goes on from an earlier one, if there is one", file=sys.stderr)
            processes.alone(functools.partial(shutil.rmtree, place))
            continue
        try:
            return step, _read(place, like(step))
        except ValueError as error:
            why = one_line(str(error), 80)
            raise refused("resume_other", place=shown(str(place), 160), why=why) from error
    return None


def _damage(place: pathlib.Path) -> str:
    """Returns why a checkpoint is not read; empty if it is whole."""
    try:
        if read_json(place / _SEAL, {str: str}) != _file_hashes(place / "state"):
            return "its files differ from their checksums"
    except ValueError as error:
        return str(error)
    return ""


def _read(place: pathlib.Path, like: _Tree) -> _Tree:
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.restore(place.resolve() / "state", _numbered(like))
    restored = [leaves[name] for name in sorted(leaves)]
    if [np.shape(leaf) for leaf in restored] != [np.shape(leaf) for leaf in jax.tree.leaves(like)]:
        raise ValueError("its arrays have other shapes than this training")
    return jax.tree.unflatten(jax.tree.structure(like), restored)
