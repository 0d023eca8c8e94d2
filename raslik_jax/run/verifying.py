"""Whether a run's results are unchanged: its units and the files for its user."""

import pathlib

from raslik_jax.base.messages import shown
from raslik_jax.config import STAGES
from raslik_jax.run import manifests, written


def verify(root: pathlib.Path) -> list[str]:
    """Returns the damage to a work directory, a line each; reads every byte."""
    lost = manifests.lost_units(root, STAGES)
    if not (lost or manifests.finished_units(root)):
        raise ValueError(f"{shown(str(root), 200)} must hold results of a run: correct --workdir")
    why = "missing, so the files next to it cannot be checked"
    mend = "restore it, or move the folder away and run again"
    own = [f"{name}/{manifests.MANIFEST}: {why}: {mend}" for name in lost]
    return [*manifests.verify(root), *own, *written.verify(root)]
