"""What `raslik index` refuses and mends; what it does with a run's index is in query_test.py."""

import numpy as np
import pytest
from index_cases import fill, tree_bytes, unit_rows
from snapshots import refused

from raslik_jax.base.settings import SettingsError
from raslik_jax.cli import index
from raslik_jax.index.store import SketchStore


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "sign", "center": True},
        {"center": True, "verify": True},
        {"repair": True, "compact_to": "y"},
    ],
)
def test_flags_that_would_not_act_together_are_refused(given):
    with refused(SettingsError):
        index.Options(index="x", **given)


@pytest.mark.parametrize("chunks", [(), (1,)])
def test_a_damaged_center_is_not_called_mended(tmp_path, capsys, chunks):
    rows, norms = unit_rows(20, 64)
    path, ids = str(tmp_path / "fine"), [f"{n:02d}" for n in range(20)]
    store = SketchStore.create(path, identity={}, ids=ids, size=64, chunk_rows=8)
    fill(store, rows, norms)
    copy = tmp_path / "signs"
    make = index.Options(index=path, compact_to=str(copy), dtype="sign", center=True)
    assert index.run(make) == 0
    before = tree_bytes(copy)
    for name in ("center", *(f"rows/c/{chunk}/0" for chunk in chunks)):
        value = np.fromfile(copy / name, np.uint8)
        value[3] ^= 1
        value.tofile(copy / name)
    capsys.readouterr()
    assert index.run(index.Options(index=str(copy), repair=True)) == 1
    said = f"{len(chunks)} chunks dropped. The mean is still damaged: make this copy again with the"
    assert said in capsys.readouterr().out
    assert SketchStore.open(copy).missing_chunks() == chunks
    assert index.run(index.Options(index=str(copy), verify=True)) == 1
    assert index.run(make) == 0
    assert tree_bytes(copy) == before


def test_what_is_derived_from_the_manifest_is_mended(tmp_path, capsys):
    rows, norms = unit_rows(3, 64)
    store = SketchStore.create(tmp_path, identity={}, ids=["a", "b", "c"], size=64)
    fill(store, rows, norms)
    before = tree_bytes(tmp_path)
    (tmp_path / "zarr.json").write_text("{}")
    assert index.run(index.Options(index=str(tmp_path), repair=True)) == 0
    assert capsys.readouterr().out.endswith("\nmended\n")
    assert tree_bytes(tmp_path) == before
