"""Files are read and written whole and checked."""

import errno
import json
import math
import os

import numpy as np
import pytest
from folders import FolderTest

from raslik_jax.base import files, messages

SHAPE = {"key": str, "outputs": {str: int}, "rates?": [float], "seed": (int, None)}


class TestRead:
    @pytest.mark.parametrize(
        "text, expected",
        [
            ("{", "must be JSON"),
            ("[" * 100_000, "nested too deeply"),
            ('{"a": 1, "a": 2}', "'a' twice"),
            ('{"a": NaN}', "NaN"),
            ("[]", r"must be an object, got \[\]"),
            ('{"key": "a"}', "must have 'outputs', 'seed', got 'key'"),
            ('{"key": 1, "outputs": {}, "seed": 1}', "key in .* must be text, got 1"),
            ('{"key": "a", "outputs": {"x": "y"}, "seed": 1}', "outputs.x in .* an integer"),
            ('{"key": "a", "outputs": {}, "seed": true}', "seed in .* an integer or null"),
            ('{"key": "a", "outputs": {}, "seed": 1, "rates": [1, "x"]}', r"rates\[1\] in"),
        ],
    )
    def test_what_has_another_shape_is_refused_by_file_and_field(self, tmp_path, text, expected):
        path = tmp_path / "manifest.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=expected) as refused:
            files.read_json(path, SHAPE, mend="run again")
        assert "manifest.json" in str(refused.value)
        assert str(refused.value).endswith(": run again")
        assert len(str(refused.value)) < 2 * messages.MAX_MESSAGE

    def test_a_value_of_the_shape_is_returned(self, tmp_path):
        value = {"key": "a", "outputs": {"x": 1}, "seed": None, "rates": [1, 2.5], "more": [{}]}
        files.write_json(tmp_path / "a.json", value)
        assert files.read_json(tmp_path / "a.json", SHAPE) == value

    def test_what_is_no_regular_file_is_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", tmp_path, tmp_path / "none", "/dev/zero"):
            for read in (files.read_text, files.hash_file):
                with pytest.raises(ValueError):
                    read(path)

    def test_text_that_is_not_utf8_names_its_line(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"good\nb\xe4d\n")
        with pytest.raises(ValueError, match=r"a\.txt':2 must be UTF-8, got the byte 0xe4"):
            files.read_text(tmp_path / "a.txt")


class TestWrite:
    def test_a_link_a_device_and_a_fifo_are_not_replaced(self, tmp_path):
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "link").symlink_to(tmp_path / "precious")
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "link", tmp_path / "fifo", "/dev/null"):
            with pytest.raises(ValueError, match="must be a regular file"):
                files.write_text(path, "new")
        assert (tmp_path / "precious").read_text() == "mine"
        assert (tmp_path / "link").is_symlink()

    def test_what_is_there_is_no_new_file(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for path in (tmp_path, tmp_path / "link", "/dev/null"):
            with pytest.raises(ValueError, match="--to must name a new file"):
                files.check_new(path, "--to")
        with pytest.raises(ValueError, match="--to must be in a folder"):
            files.check_new(tmp_path / "nowhere" / "x", "--to")
        files.check_new(tmp_path / "x", "--to")

    def test_a_number_that_is_not_finite_is_named_and_nothing_is_written(self, tmp_path):
        path = tmp_path / "metrics.json"
        path.write_text("{}")
        with pytest.raises(ValueError, match=r"metrics.json' must hold finite numbers"):
            files.write_json(path, {"rows": [{"loss": math.nan}]})
        assert json.loads(path.read_text()) == {}
        assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


class ArraysTest(FolderTest):
    def test_only_whole_arrays_of_numbers_are_read(self):
        folder = self.folder
        path = folder / "a.npy"
        np.save(path, np.ones((2, 3), np.float32))
        whole = path.read_bytes()
        self.assertEqual(files.read_array(path, (2, None)).shape, (2, 3))
        for shape in ((None,), (3, 3), (2, 3, 1)):
            with self.assertRaisesRegex(ValueError, r"a.npy' must be .* numbers, got shape .2, 3"):
                files.read_array(path, shape)
        pickled = folder / "p.npy"
        np.save(pickled, np.array([{}]), allow_pickle=True)
        for raw in (b"", whole[:60], whole[:-1], whole[:10] + b"(" * 9 + whole[19:], b"PK\3\4"):
            path.write_bytes(raw)
            with self.assertRaisesRegex(ValueError, "a.npy' must be a whole .npy file of numbers"):
                files.read_array(path)
        with self.assertRaisesRegex(ValueError, "of numbers: restore the file"):
            files.read_array(pickled)
        with self.assertRaisesRegex(ValueError, "no file .*b.npy': restore"):
            files.read_array(folder / "b.npy")


def test_a_full_disk_is_said_with_the_file(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match=r"table\.txt' cannot be written \(No space"):
        with files.replacing(tmp_path / "table.txt"):
            raise full
    assert [*tmp_path.iterdir()] == []
    assert files.sentence_of(FileNotFoundError(2, os.strerror(2), "a/b")).startswith("'a/b' cannot")
    own = OSError(errno.ENOSPC, "the index is full: free some space")
    assert files.sentence_of(own) == "the index is full: free some space"
