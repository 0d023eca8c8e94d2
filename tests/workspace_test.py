"""What stages leave for each other is checked where it is read, and errors name the file."""

import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from raslik_jax.config import Config
from raslik_jax.stages import exact_gradients
from raslik_jax.stages.workspace import Workspace


class AnswersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.workspace = Workspace(self.root, Config())

    def test_answers_come_back_by_id(self):
        (self.root / "a.jsonl").write_text(
            '{"id": "1", "output": "one"}\n{"id": "2", "output": ""}\n'
        )
        self.assertEqual(self.workspace.answers("a.jsonl"), {"1": "one", "2": ""})

    @parameterized.parameters(
        (b'{"id": "1", "output": "on', r"a.jsonl':1 must be JSON"),
        (b'{"id": "1", "output": "one"}\n{"id": "2"}\n', r"a.jsonl':2 must have 'output'"),
        (b'{"id": 1, "output": "one"}', r"id in .*a.jsonl':1 must be text, got 1"),
        (b"[]", r"a.jsonl':1 must be an object"),
        (b"\xff\xfe", r"a.jsonl':1 must be UTF-8"),
        (None, r"no file .*a.jsonl'"),
    )
    def test_damaged_answers_are_named_by_file_and_line(self, content, message):
        if content is not None:
            (self.root / "a.jsonl").write_bytes(content)
        with self.assertRaisesRegex(ValueError, message):
            self.workspace.answers("a.jsonl")

    def test_a_query_without_an_answer_is_named(self):
        (self.root / "a.jsonl").write_text('{"id": "1", "output": "one"}\n')
        with self.assertRaisesRegex(ValueError, "a.jsonl' has no answer to the query 'q7': delete"):
            self.workspace.answers("a.jsonl")["q7"]


class StoredArraysTest(absltest.TestCase):
    def test_arrays_that_are_damaged_or_of_another_key_are_made_again(self):
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "grams.npz"
        self.assertEqual(exact_gradients._read_arrays(path, "k"), {})
        np.savez(path, key=np.array("k"), a=np.arange(500))
        np.testing.assert_array_equal(exact_gradients._read_arrays(path, "k")["a"], np.arange(500))
        self.assertEqual(exact_gradients._read_arrays(path, "other"), {})
        whole = path.read_bytes()
        for place in range(0, len(whole), 97):
            flipped = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
            for damaged in (whole[:place], flipped):
                path.write_bytes(damaged)
                found = exact_gradients._read_arrays(path, "k")
                if found:  # a byte that no reader looks at
                    np.testing.assert_array_equal(found["a"], np.arange(500))


if __name__ == "__main__":
    absltest.main()
