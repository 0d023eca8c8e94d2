"""The index on disk: what is written is read, nothing is lost, what is foreign is refused."""

import errno
import itertools
import json
import os
import pathlib
import shutil
from unittest import mock

import numpy as np
import tensorstore as ts
from absl.testing import parameterized
from folders import FolderTest
from index_cases import fill, tree_bytes, unit_rows
from snapshots import refused

from raslik_jax.index import format as format_lib
from raslik_jax.index.store import SketchStore

IDENTITY = {"model": "tiny", "projection": {"family": "binned", "seed": 3}, "loss": "unshifted"}


class _FullStore:
    """A key-value store that reads, and answers every write to one folder with `full`."""

    def __init__(self, store, folder, full):
        self._store, self._folder, self._full = store, folder, full

    def __getattr__(self, name):
        return getattr(self._store, name)

    def write(self, name, *args, **kwargs):
        if name.startswith(f"{self._folder}/"):
            return self._full
        return self._store.write(name, *args, **kwargs)


def _damaged(path):
    """The files of an index that are refused when they are read."""
    try:
        store = SketchStore.open(path)
    except ValueError as error:  # manifest and ids are checked at opening
        return [name for name in ("manifest.json", "ids.json") if name in str(error)]
    found = []
    for chunk, name in itertools.product(range(store.num_chunks), store.manifest.arrays):
        try:
            store.read_array(name, chunk)
        except ValueError as error:
            files = (format_lib.record_file(chunk), store.manifest.chunk_file(name, chunk))
            found += [file for file in files if file in str(error)]
    return sorted({*found})


class StoreTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = str(self.folder)
        self.path = f"{self.root}/index"
        self.rows, self.norms = unit_rows(22, 24)
        self.ids = [f"id-{(7 * i) % 22:02d}" for i in range(22)]

    def create(self, path=None, *, ids=None, **options) -> SketchStore:
        options = {"identity": IDENTITY, "size": 24, "chunk_rows": 8} | options
        return SketchStore.create(path or self.path, ids=ids or self.ids, **options)

    def make(self, path=None, *, rows=None, norms=None, **options) -> SketchStore:
        store = self.create(path, **options)
        fill(store, self.rows if rows is None else rows, self.norms if norms is None else norms)
        store.finish()
        return store

    @parameterized.parameters("float32", "bfloat16")
    def test_reads_back_what_was_written(self, dtype):
        self.make(dtype=dtype)
        store = SketchStore.open(self.path)
        # A chunk is the file itself.
        self.assertIsInstance(store.read_array("rows", 0), np.memmap)
        self.assertEqual(store.ids, tuple(self.ids))
        self.assertEqual(_damaged(self.path), [])
        self.assertEqual(store.identity, IDENTITY)
        np.testing.assert_array_equal(store.column("norms"), self.norms)
        spans = [store.chunk_positions(chunk) for chunk in range(store.num_chunks)]
        self.assertEqual(spans, [slice(0, 8), slice(8, 16), slice(16, 22)])
        rows = store.rows(range(22))
        np.testing.assert_array_equal(store.rows([21, 0, 9]), rows[[21, 0, 9]])
        for positions in ([22], [-1], np.ones(22, np.bool_), np.array([0.5])):
            with self.assertRaisesRegex(ValueError, "positions must be integers from 0 to 21"):
                store.rows(positions)
        self.assertEmpty(store.rows([]))
        stored = self.rows.astype(format_lib.DTYPES[dtype])
        np.testing.assert_array_equal(rows, stored)
        np.testing.assert_allclose(store.mean_K, rows.astype("f8").mean(0), atol=1e-7)
        self.assertEqual(store.read_array("rows", 0).nbytes, 8 * 24 * stored.itemsize)

    def test_another_zarr_reader_sees_the_rows(self):
        self.make()
        kvstore = {"driver": "file", "path": f"{self.path}/rows/"}
        array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
        np.testing.assert_array_equal(array[:22].read().result(), self.rows)

    def test_order_of_work_and_interruptions_leave_no_trace(self):
        self.make()
        other = f"{self.root}/other"
        for chunk in (2, 0, 1):  # a new start for every chunk
            store = self.create(other)
            self.assertIn(chunk, store.missing_chunks())
            span = store.chunk_positions(chunk)
            store.write_chunk(chunk, self.rows[span], self.norms[span])
        store.finish()
        self.assertEqual(tree_bytes(self.path), tree_bytes(other))

    @parameterized.parameters(
        {"identity": IDENTITY | {"loss": "next_token"}},
        {"identity": IDENTITY | {"projection": {"family": "binned", "seed": 4}}},
        {"identity": IDENTITY | {"loss": "next_token", "model": "other"}},
        {"identity": IDENTITY | {"adapter": "x"}},
        {"size": 32},
        {"dtype": "bfloat16"},
        {"chunk_rows": 4},
        {"ids": ["a"]},
        {"ids": [f"id-{i:02d}" for i in range(22)]},  # in another order
    )
    def test_refuses_what_it_was_not_made_for(self, **options):
        self.make()
        with refused():
            self.make(**options)

    def change_manifest(self, **changes):
        manifest = pathlib.Path(self.path, "manifest.json")
        record = json.loads(manifest.read_bytes())
        del record["crc32"]
        manifest.write_bytes(format_lib.sealed(record | changes))

    @parameterized.parameters({"index_format": 99}, {"index_format": None}, {"num_rows": "x"})
    def test_refuses_another_format_and_a_manifest_of_another_shape(self, **changes):
        self.make()
        self.change_manifest(**changes)
        with refused():
            SketchStore.open(self.path)

    def test_a_manifest_that_is_no_file_is_refused_at_once(self):
        os.mkdir(self.path)
        os.mkfifo(f"{self.path}/manifest.json")
        with refused():
            SketchStore.open(self.path)

    def test_a_writer_of_older_settings_commits_nothing(self):
        """Its index was replaced under its hands: no row of it may be counted in the new one."""
        writer = self.create()
        writer.write_chunk(0, self.rows[:8], self.norms[:8])
        old = pathlib.Path(self.path, "commits/0.json").read_bytes()
        shutil.rmtree(self.path)
        new = self.create(identity=IDENTITY | {"loss": "next"})
        before = tree_bytes(self.path)
        with refused():
            writer.write_chunk(1, self.rows[8:16], self.norms[8:16])
        self.assertEqual(tree_bytes(self.path), before)
        # A record that is there all the same counts for nothing and is named.
        fill(new, self.rows, self.norms)
        for chunk in (0, 2):
            pathlib.Path(self.path, f"commits/{chunk}.json").write_bytes(old)
        store = SketchStore.open(self.path)
        self.assertEqual(store.missing_chunks(), (0, 2))
        with self.assertRaisesRegex(ValueError, "is of an index of other settings or rows"):
            store.read_array("rows", 0)
        shutil.rmtree(self.path)
        with refused():
            writer.write_chunk(1, self.rows[8:16], self.norms[8:16])

    @parameterized.parameters("zarr.json", "rows/zarr.json", "thesis.txt")
    def test_files_that_are_no_index_are_left_alone(self, name):
        file = pathlib.Path(self.path, name)
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        with refused():
            self.make()
        self.assertEqual(tree_bytes(self.path), {name: b"mine"})

    def test_what_a_killed_creation_left_is_taken_over(self):
        self.make()
        pristine = tree_bytes(self.path)
        shutil.rmtree(self.path)
        for name in ("ids.json", "zarr.json", "rows/zarr.json"):
            file = pathlib.Path(self.path, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pristine[name])
        self.make()
        self.assertEqual(tree_bytes(self.path), pristine)

    @parameterized.parameters(
        {"ids": ()},
        {"ids": ["a", "b", "a"]},
        {"dtype": "float16"},
        {"chunk_rows": 0},
    )
    def test_refuses_to_make(self, **options):
        options = {"identity": {}, "ids": ["a"], "size": 24} | options
        with refused():
            SketchStore.create(self.path, **options)

    @parameterized.named_parameters(
        ("shape", lambda r, n: (r[:, :5], n), "must have rows of shape"),
        ("not finite", lambda r, n: (np.where(r == r[0, 0], np.nan, r), n), "of length nan"),
        ("not a unit", lambda r, n: (r * 2, n), "8 are not"),
        ("infinite norm", lambda r, n: (r, np.where(n == n[0], np.inf, n)), "'id-00' .*norm inf"),
    )
    def test_refuses_bad_rows(self, change, message):
        store = self.create()
        with self.assertRaisesRegex(ValueError, message):
            store.write_chunk(0, *change(self.rows[:8], self.norms[:8]))
        self.assertEqual(store.missing_chunks(), (0, 1, 2))
        for work in (store.require_complete, store.finish):
            with self.assertRaisesRegex(ValueError, "lacks 3 of its 3 chunks"):
                work()

    def test_a_zero_gradient_is_a_zero_row(self):
        self.rows[4], self.norms[4] = 0, 0
        store = self.make()
        self.assertEqual((store.column("lengths")[4], store.column("norms")[4]), (0, 0))
        others = np.delete(self.rows.astype("f8"), 4, axis=0)
        np.testing.assert_allclose(store.mean_K, others.mean(0), atol=1e-7)
        none = {"rows": np.zeros_like(self.rows), "norms": np.zeros_like(self.norms)}
        store = self.make(f"{self.root}/zeros", **none)
        self.assertEqual(_damaged(store.path), [])
        np.testing.assert_array_equal(store.mean_K, np.zeros(24))

    @parameterized.parameters("float32", "bfloat16")
    def test_a_flipped_byte_in_any_file_is_found(self, dtype):
        self.make(dtype=dtype)
        random = np.random.default_rng(0)
        pristine = tree_bytes(self.path)
        for name, value in pristine.items():
            if name.endswith("zarr.json"):  # for other readers
                continue
            offsets = {0, len(value) - 1, *random.integers(len(value), size=6).tolist()}
            for offset in sorted(offsets):
                damaged = bytearray(value)
                damaged[offset] ^= 1 << int(random.integers(8))
                file = pathlib.Path(self.path, name)
                file.write_bytes(damaged)
                self.assertEqual(_damaged(self.path), [name], msg=f"{name=} {offset=}")
                file.write_bytes(value)
        self.assertEqual(_damaged(self.path), [])

    def test_lost_swapped_and_truncated_files_are_found(self):
        self.make()
        root = pathlib.Path(self.path)
        (root / "norms/c/1").unlink()
        shutil.copy(root / "rows/c/0/0", root / "rows/c/2/0")
        self.assertEqual(_damaged(self.path), ["norms/c/1", "rows/c/2/0"])
        (root / "rows/c/0/0").write_bytes(b"short")
        with refused():
            SketchStore.open(self.path).read_array("rows", 0)

    def test_rows_are_checked_when_they_are_read(self):
        self.make()
        root = pathlib.Path(self.path)
        rows, other = root / "rows/c/1/0", (root / "rows/c/0/0").read_bytes()
        value = rows.read_bytes()
        flipped = value[:40] + bytes([value[40] ^ 1]) + value[41:]
        for damaged in (flipped, other):  # a flipped bit, and the rows of another chunk
            rows.write_bytes(damaged)
            store = SketchStore.open(self.path)
            store.rows([0])
            with self.assertRaisesRegex(ValueError, "rows/c/1/0"):
                store.rows([9])
            with self.assertRaisesRegex(ValueError, "rows/c/1/0"):
                store.read_array("rows", 1)
        rows.write_bytes(value)
        for name in ("norms", "lengths"):
            first, second = root / name / "c/0", root / name / "c/1"
            first_value, second_value = first.read_bytes(), second.read_bytes()
            first.write_bytes(second_value)
            with self.assertRaisesRegex(ValueError, f"{name}/c/0 is damaged .its content"):
                SketchStore.open(self.path).column(name)
            first.write_bytes(first_value)
        sums = root / "sums/c/0/0"
        sums.write_bytes((root / "sums/c/1/0").read_bytes())
        with self.assertRaisesRegex(ValueError, "sums/c/0/0 is damaged"):
            SketchStore.open(self.path).mean_K  # noqa: B018

    def test_a_chunk_without_a_record_is_made_again(self):
        self.make()
        before = tree_bytes(self.path)
        file = pathlib.Path(self.path, "rows/c/1/0")
        file.write_bytes(file.read_bytes()[:-9] + b"overwrite")
        pathlib.Path(self.path, "commits/1.json").unlink()
        store = SketchStore.open(self.path)
        self.assertEqual(store.missing_chunks(), (1,))
        fill(store, self.rows, self.norms)
        store.finish()
        self.assertEqual(tree_bytes(self.path), before)

    @parameterized.parameters("rows", "norms", "sums", "commits")
    def test_a_full_disk_is_named_and_the_chunk_stays_missing(self, where):
        store = self.create()
        store.write_chunk(0, self.rows[:8], self.norms[:8])
        full = mock.Mock()  # TensorStore's own words
        full.result.side_effect = ValueError(
            "RESOURCE_EXHAUSTED: Error writing local file: No space left on device"
        )
        broken = _FullStore(store.place._kv, where, full)
        with mock.patch.object(store.place, "_kv", broken), refused(OSError) as caught:
            store.write_chunk(1, self.rows[8:16], self.norms[8:16])
        self.assertEqual(caught.value.errno, errno.ENOSPC)
        self.assertEqual(store.missing_chunks(), (1, 2))
        fill(store, self.rows, self.norms)  # goes on in the same process
        store.finish()
        self.make(f"{self.root}/other")
        self.assertEqual(tree_bytes(self.path), tree_bytes(f"{self.root}/other"))

    def test_finish_clears_what_killed_jobs_left(self):
        store = self.make()
        before = tree_bytes(self.path)
        for leftover in ("rows/c/1/0.__lock", "rows/c/0/0.__lock"):
            pathlib.Path(self.path, leftover).parent.mkdir(exist_ok=True)
            pathlib.Path(self.path, leftover).write_bytes(b"x")
        store.finish()
        self.assertEqual(tree_bytes(self.path), before)
