"""Every Python block of the guides runs as it stands, in order, in one namespace."""

import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest

from raslik_jax.data.corpora import DATASETS
from raslik_jax.evaluate.metrics import METRICS
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.models import decoder
from raslik_jax.models.decoder import ARCHITECTURES
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.report.sections import SECTIONS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run.plan import UNITS
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.train.objectives import OBJECTIVES

_GUIDES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "guides"
_FAMILIES = (ARCHITECTURES, DATASETS, METRICS, OBJECTIVES, PROJECTIONS)
_FAMILIES += (ROBUSTNESS, SECTIONS, STRATEGIES, UNITS)


def _run_blocks(*pages: str) -> dict[str, object]:
    """Returns the names that the blocks of pages leave behind."""
    text = "\n".join((_GUIDES / page).read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    # A reader's session has JAX's own settings, not the strict ones of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, pages[0], "exec"), names)  # noqa: S102
    return names


class GuidesTest(absltest.TestCase):
    def test_a_model_of_ones_own_unlearns_the_rows_that_its_gradients_find(self):
        names = _run_blocks("pieces.md")
        self.assertCountEqual(names["sets"].forget.tolist(), range(0, 64, 8))
        before, after = (
            [float(names["mean_loss"](names[model], names[rows])) for rows in ("queries", "retain")]
            for model in ("params", "clean")
        )
        self.assertGreater(after[0], before[0] + 5)
        self.assertLess(after[1], before[1] + 0.1)
        self.assertEqual(names["sketches"].unit_BK.shape, (4, 256))

    def test_added_members_are_chosen_and_told_by_flags(self):
        for family in _FAMILIES:
            self.enterContext(mock.patch.dict(family))
        names = _run_blocks(
            *(f"extending{page}.md" for page in ("", "_objective", "_data", "_run"))
        )
        config = names["config"]
        self.assertEqual(config.corpus["counting"].last, 60)
        self.assertEqual(config.retrieve["shortest"].power, 2)
        self.assertEqual(config.unlearn["push"].bound, 4)
        self.assertEqual(config.unlearn["push"].learning_rate, 1e-4)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        model = names["ParallelConfig"](vocab_size=16, hidden_size=8, **sizes)
        graphdef, lora, base = decoder.create(
            model, LoRAConfig(rank=2, alpha=4.0, targets=("q_proj",)), key=jax.random.key(0)
        )
        hidden_LE = decoder.bind(graphdef).hidden(lora, base, jnp.arange(4))
        self.assertTrue(jnp.isfinite(hidden_LE).all())
