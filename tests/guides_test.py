"""Every Python block of the guide to the pieces runs as it stands, in order, in one namespace."""

import pathlib
import re

import jax
from absl.testing import absltest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


class GuidesTest(absltest.TestCase):
    def test_the_python_blocks_run(self):
        text = (_REPOSITORY / "docs" / "guides" / "pieces.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        self.assertNotEmpty(blocks)
        names: dict[str, object] = {}
        # A reader's session has JAX's own settings, not the strict ones of the tests.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for block in blocks:
                exec(compile(block, "pieces.md", "exec"), names)  # noqa: S102
        # What the text says of the outcome.
        selection = names["selection"]
        self.assertLen(selection.forget, 8)
        self.assertEmpty(set(selection.forget) & set(selection.retain))


if __name__ == "__main__":
    absltest.main()
