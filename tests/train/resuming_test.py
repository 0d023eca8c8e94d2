"""Checkpoints of an interrupted training: damage is told in a sentence and never used."""

import contextlib
import io
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from folders import FolderTest

from raslik_jax.train import resuming


def _tree(step):
    return {"weights": jnp.arange(6.0) + step, "losses": np.arange(step) / 7}, jnp.int32(step)


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]


class ResumingTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.saved = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        for step in (3, 6, 9):
            resuming.save_progress(cls.saved, step, _tree(step))

    def setUp(self):
        super().setUp()
        shutil.copytree(self.saved, self.folder, dirs_exist_ok=True)

    def load(self, like=_tree):
        """Returns what is loaded and what is said."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            return resuming.load_progress(self.folder, like), said.getvalue()

    def check(self, loaded, step):
        self.assertEqual(loaded[0], step)
        for leaf, expected in zip(
            jax.tree.leaves(loaded[1]), jax.tree.leaves(_tree(step)), strict=True
        ):
            self.assertEqual(leaf.dtype, expected.dtype)
            np.testing.assert_array_equal(leaf, expected)

    def test_the_newest_comes_back_to_the_bit_and_two_are_kept(self):
        loaded, said = self.load()
        self.check(loaded, 9)
        self.assertEqual(said, "")
        self.assertEqual(sorted(p.name for p in (self.folder / "resume").iterdir()), ["6", "9"])

    def test_any_damaged_file_leads_back_to_the_checkpoint_before(self):
        newest = self.folder / "resume" / "9"
        names = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
        cases = [(name, _flip) for name in names] + [(names[0], _half), (names[0], None)]
        for name, damage in cases:
            content = (newest / name).read_bytes()
            (newest / name).unlink()
            if damage is not None:
                (newest / name).write_bytes(damage(content))
            with self.subTest(file=str(name), damage=damage):
                loaded, said = self.load()
                self.check(loaded, 6)
                self.assertRegex(said, r"^note: the checkpoint '.*/resume/9' is damaged \(.*\n$")
                self.assertFalse(newest.exists())
            shutil.copytree(self.saved / "resume" / "9", newest)

    def test_without_an_undamaged_checkpoint_training_starts_again(self):
        for path in (self.folder / "resume").glob("*/seal.json"):
            path.write_text("[]")
        loaded, said = self.load()
        self.assertIsNone(loaded)
        self.assertEqual(said.count("note:"), 2)
        resuming.save_progress(self.folder, 3, _tree(3))
        self.check(self.load()[0], 3)

    def test_arrays_of_other_shapes_are_not_taken(self):
        with self.assertRaisesRegex(ValueError, "same training, .*shapes.*: remove it, or give"):
            self.load(lambda step: _tree(step - 1))
        self.check(self.load()[0], 9)  # it is not removed

    def test_what_killed_saves_left_is_removed(self):
        place = self.folder / "resume"
        (place / ".epoch-1.partial-123").mkdir()
        (place / ".epoch-1.partial-123" / "weights").write_text("half")
        self.check(self.load()[0], 9)
        resuming.save_progress(self.folder, 12, _tree(12))
        self.assertEqual(sorted(p.name for p in (self.folder / "resume").iterdir()), ["12", "9"])

    def test_a_disk_without_space_is_one_sentence(self):
        shutil.rmtree(self.folder / "resume")
        (self.folder / "resume").write_text("no folder can be made here")
        with self.assertRaisesRegex(OSError, "resume/3.* cannot be written .*: free space"):
            resuming.save_progress(self.folder, 3, _tree(3))
