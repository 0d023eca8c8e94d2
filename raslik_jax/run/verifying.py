"""Whether all that a run has made is as it was made: units, an index, what its user was given."""

import pathlib

from raslik_jax.base.messages import shown
from raslik_jax.config import STAGES
from raslik_jax.run import manifests, written


def verify(root: pathlib.Path) -> list[str]:
    """Returns what is wrong in a work directory, a line each; reads every byte."""
    lost = manifests.lost_units(root, STAGES)
    if not (lost or manifests.finished_units(root)):
        raise ValueError(f"{shown(str(root), 200)} must hold results of a run: correct --workdir")
    own = [_describe_lost(root, name) for name in lost]
    return [*manifests.verify(root), *own, *written.verify(root)]


def _describe_lost(root: pathlib.Path, name: str) -> str:
    """Returns what is left of a unit whose manifest is missing, and what can be done."""
    line = f"{name}/{manifests.MANIFEST}: missing"
    if not manifests.has_index(root / name):
        mend = "restore it, or move the folder away and run again"
        return f"{line}; the files next to it cannot be checked: {mend}"
    from raslik_jax.index.store import SketchStore  # it takes TensorStore with it
    from raslik_jax.index.upkeep import verify as verify_index

    try:
        store = SketchStore.open(root / name / manifests.INDEX)
        damaged = {damage.chunk for damage in verify_index(store)} - {None}
    except ValueError as error:
        return f"{line}; {error}"
    whole = store.num_chunks - len({*store.missing_chunks(), *damaged})
    kept = f"{whole} of {store.num_chunks} chunks of its index are whole"
    return f"{line}; {kept}: `raslik run` with the same settings keeps them"
