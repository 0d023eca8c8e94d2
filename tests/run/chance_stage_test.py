"""The scores of unrelated prompts, by the index of a run."""

import pathlib
import tempfile
from types import SimpleNamespace
from unittest import mock

import numpy as np
from absl.testing import parameterized

from raslik_jax.data.examples import Example
from raslik_jax.index.store import SketchStore
from raslik_jax.run.stages import scores


def _unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


class ChanceStageTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_a_prompt_has_no_part_in_the_mean_that_it_is_centered_by(self, center):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        ids = [f"row-{n}" for n in range(24)]
        rows_NK = _unit(0.1 + np.random.default_rng(0).normal(size=(24, 256))).astype(np.float32)
        store = SketchStore.create(folder / "index", identity={}, ids=ids, size=256)
        store.write_chunk(0, rows_NK, np.ones(24, np.float32))
        retrieve = SimpleNamespace(null_prompts=10, center=center)
        workspace = SimpleNamespace(
            config=SimpleNamespace(seed=0, retrieve=retrieve),
            # Each row has a copy under another id.
            corpus=SimpleNamespace(
                train=[Example(name, f"q{n // 2}", "", "a") for n, name in enumerate(ids)]
            ),
        )
        index = store, np.arange(24)
        with mock.patch.object(scores.sketch_lib, "open_index", lambda workspace: index):
            scores.make_null(workspace, folder)
        position_M, null_NM = (np.load(folder / f"{n}.npy") for n in ("positions", "scores"))
        self.assertEqual((position_M.shape, null_NM.dtype), ((10,), np.float32))

        def mean_of(left):
            return rows_NK[left].mean(axis=0) if center else 0

        for place, prompt in enumerate(position_M.tolist()):
            left, copy = np.delete(np.arange(24), prompt), prompt ^ 1
            self.assertTrue(np.isnan(null_NM[[prompt, copy], place]).all())
            null_NM[copy, place] = _unit(rows_NK[copy] - mean_of(left)) @ _unit(
                rows_NK[prompt] - mean_of(left)
            )
            mean_K = mean_of(left)
            expected_L = _unit(rows_NK[left] - mean_K) @ _unit(rows_NK[prompt] - mean_K)
            # The rows' distances from the mean are taken as equal; the mean is 1 / 23 off without.
            np.testing.assert_allclose(null_NM[left, place], expected_L, atol=0.01)
            self.assertAlmostEqual(null_NM[left, place].mean(), expected_L.mean(), delta=0.002)
