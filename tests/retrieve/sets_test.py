"""The rule that a run's settings name chooses the sets."""

import numpy as np
from absl.testing import absltest, parameterized

from raslik_jax.config import RetrieveConfig
from raslik_jax.retrieve import sets


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, (3, 3)),
        ({"num_forget": 2}, (2, 2)),
        ({"num_forget": 2, "num_retain": 4}, (2, 4)),
        ({"select": "quantile", "forget_share": 0.2, "retain_share": 0.5}, (2, 5)),
        ({"select": "threshold", "forget_threshold": 0.5, "retain_threshold": 0.3}, (3, 4)),
        (
            {"select": "margin", "forget_threshold": 0.5, "retain_threshold": 0.3, "margin_z": 2.0},
            (2, 3),
        ),
    )
    def test_the_settings_of_a_run_choose_its_sets(self, changes, sizes):
        score_N = np.linspace(1, -1, 10)
        chosen = sets.select_sets(
            score_N,
            [f"id{i}" for i in range(10)],
            RetrieveConfig(**changes),
            num_targets=3,
            sigma=0.1,
        )
        self.assertEqual((len(chosen.forget), len(chosen.retain)), sizes)

    def test_sets_without_a_size_are_refused(self):
        with self.assertRaisesRegex(ValueError, "num_forget must be given"):
            sets.set_sizes(RetrieveConfig(), num_targets=0, num_eligible=9)
        settings = RetrieveConfig(select="quantile", forget_share=0.01)
        with self.assertRaisesRegex(ValueError, "forget_share must be one .*, got 0.01 of 11"):
            sets.set_sizes(settings, num_targets=0, num_eligible=11)


if __name__ == "__main__":
    absltest.main()
