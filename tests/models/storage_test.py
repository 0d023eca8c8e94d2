"""Tensors of files that several processes share: what stands for them, and what each reads."""

import hashlib
import zlib
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors.numpy
from folders import FolderTest

from raslik_jax.models import storage
from raslik_jax.parallel import processes

_TENSORS = {
    "c": np.arange(15, dtype=np.float32).reshape(5, 3),
    "a": np.arange(8, dtype=np.float16).reshape(4, 2),
    "b": np.array(2.5, np.float32),
}


class FiniteTest(FolderTest):
    @mock.patch.object(storage, "_CACHED_VALUES", 4)
    def test_every_value_counts_in_any_layout(self):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for place in ((0, 0), (2, 1), (4, 2)):
                tensor = np.ones((5, 3), dtype)
                self.assertTrue(storage.is_finite(tensor.T))
                tensor[place] = np.inf
                for layout in (tensor, tensor.T, tensor[:, place[1]], tensor[place]):
                    self.assertFalse(storage.is_finite(np.asarray(layout)))


class SharedTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "model.safetensors"
        safetensors.numpy.save_file(_TENSORS, self.path)
        self.enterContext(mock.patch.object(storage, "_BLOCK_VALUES", 7))  # blocks of 2 and 3 rows

    def shared(self, told=None):
        """What each of two processes makes of the files, and the checksums that it tells."""
        found = []
        for number in range(2):
            tells = mock.Mock(side_effect=lambda own: own if told is None else sum(told))
            with (
                mock.patch.object(processes, "count", lambda: 2),
                mock.patch.object(processes, "number", lambda number=number: number),
                mock.patch.object(processes, "sum_processes", tells),
            ):
                tensors = storage.Tensors([self.path])
                found.append((tensors.identity(_TENSORS, is_shared=True), tells.call_args[0][0]))
        return found

    def test_the_identity_is_of_all_bytes_and_the_same_however_they_are_read(self):
        lines = "".join(
            f"{key} {value.dtype.name} {value.shape} {zlib.crc32(value.tobytes()):08x}\n"
            for key, value in sorted(_TENSORS.items())
        )
        expected = hashlib.sha256(lines.encode()).hexdigest()[:32]
        tensors = storage.Tensors([self.path])
        for key in _TENSORS:
            np.testing.assert_array_equal(tensors.read(key), _TENSORS[key])
        self.assertEqual(tensors.identity(_TENSORS), expected)
        self.assertEqual(storage.Tensors([self.path]).identity(_TENSORS), expected)
        (_, first), (_, second) = self.shared()
        # a and b are of the first process, c of the other: none is read by both, none by nobody.
        self.assertEqual([list(told != 0) for told in (first, second)], [[1, 1, 0], [0, 0, 1]])
        for identity, _ in self.shared([first, second]):
            self.assertEqual(identity, expected)

    def test_damage_is_named_by_all_processes_whichever_has_read_it(self):
        storage.write_tensors(self.path, _TENSORS)
        crcs = [zlib.crc32(_TENSORS[key].tobytes()) for key in sorted(_TENSORS)]
        self.shared([np.array(crcs, np.uint32)])
        crcs[1] ^= 1
        with self.assertRaisesRegex(ValueError, "is damaged: b is not what was written"):
            self.shared([np.array(crcs, np.uint32)])

    def test_parts_are_those_of_the_whole(self):
        tensors = storage.Tensors([self.path])
        part = tensors.read_part("c", (slice(1, 3), slice(0, 2)))
        np.testing.assert_array_equal(part, _TENSORS["c"][1:3, :2])

    def test_equal_tensors_are_found_block_by_block(self):
        changed = _TENSORS["c"].copy()
        changed[4, 2] += 1
        content = _TENSORS | {"same": _TENSORS["c"], "changed": changed}
        safetensors.numpy.save_file(content, self.path)
        tensors = storage.Tensors([self.path])
        self.assertTrue(tensors.is_same("c", "same"))
        self.assertFalse(tensors.is_same("c", "changed"))
        self.assertFalse(tensors.is_same("c", "a"))

    def test_processes_that_find_other_weights_are_refused(self):
        told = []
        with mock.patch.object(
            processes, "from_first", lambda make: told.append(make()) or told[0]
        ):
            storage.Tensors([self.path]).check_shared()
            storage.Tensors([self.path]).check_shared()
            other = {**_TENSORS, "c": _TENSORS["c"] + 1}
            safetensors.numpy.save_file(other, self.path)
            with self.assertRaisesRegex(
                ValueError, "must hold the same weights for all processes, .*: give all of them one"
            ):
                storage.Tensors([self.path]).check_shared()
