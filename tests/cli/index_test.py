"""What `raslik index` refuses and mends; what it does with a run's index is in query_test.py."""

from index_cases import fill, tree_bytes, unit_rows

from raslik_jax.cli import index
from raslik_jax.index.store import SketchStore


def test_what_is_derived_from_the_manifest_is_mended(tmp_path, capsys):
    rows, norms = unit_rows(3, 64)
    store = SketchStore.create(tmp_path, identity={}, ids=["a", "b", "c"], size=64)
    fill(store, rows, norms)
    before = tree_bytes(tmp_path)
    (tmp_path / "zarr.json").write_text("{}")
    assert index.run(index.Options(index=str(tmp_path), repair=True)) == 0
    assert capsys.readouterr().out.endswith("\nmended\n")
    assert tree_bytes(tmp_path) == before
