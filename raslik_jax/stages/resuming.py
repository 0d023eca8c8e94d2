"""What an interrupted training left, to go on from: Orbax checkpoints inside a unit's folder."""

import pathlib
import shutil
from typing import Any, TypeVar

import jax
import numpy as np

_Tree = TypeVar("_Tree")
_FOLDER = "resume"


def _manager(folder: pathlib.Path) -> Any:
    """Returns the manager of a unit's checkpoints, which keeps the newest one."""
    # Imported here, because it takes a second and most runs finish without it.
    import orbax.checkpoint

    options = orbax.checkpoint.CheckpointManagerOptions(
        max_to_keep=1, create=True, enable_async_checkpointing=False
    )
    return orbax.checkpoint.CheckpointManager((folder / _FOLDER).absolute(), options=options)


def _numbered(tree: Any) -> dict[str, Any]:
    """Returns the leaves alone, by number: what is stored depends on no library's node types."""
    return {f"{number:05d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def save_progress(folder: pathlib.Path, step: int, progress: Any) -> None:
    """Writes a tree of arrays, whole or not at all, and removes the one before.

    Args:
      folder: of the unit.
      step: names the checkpoint; a later one has a larger number.
      progress: any tree; an array without elements is refused by Orbax.
    """
    import orbax.checkpoint

    with _manager(folder) as manager:
        manager.save(step, args=orbax.checkpoint.args.StandardSave(_numbered(progress)))


def saved_step(folder: pathlib.Path) -> int | None:
    """Returns the number of the newest whole checkpoint of a unit, None where there is none."""
    if not (folder / _FOLDER).is_dir():
        return None
    with _manager(folder) as manager:
        step = manager.latest_step()
    return None if step is None else int(step)


def load_progress(folder: pathlib.Path, step: int, like: _Tree) -> _Tree:
    """Returns a checkpoint's arrays, bit for bit, in the structure of `like`.

    Args:
      folder: of the unit.
      step: from `saved_step`.
      like: a tree of arrays of the same shapes and dtypes; NumPy arrays come back as such.
    """
    import orbax.checkpoint

    with _manager(folder) as manager:
        leaves = manager.restore(step, args=orbax.checkpoint.args.StandardRestore(_numbered(like)))
    restored = [leaves[name] for name in sorted(leaves)]
    wrong = [
        f"{np.shape(leaf)}, not {np.shape(wanted)}"
        for leaf, wanted in zip(restored, jax.tree.leaves(like), strict=True)
        if np.shape(leaf) != np.shape(wanted)
    ]
    if wrong:
        raise ValueError(
            f"{folder / _FOLDER} holds arrays of other shapes than this training ({wrong[0]}): "
            "delete the folder and run again"
        )
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def remove_progress(folder: pathlib.Path) -> None:
    """Removes the checkpoints of a unit that is finished."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)
