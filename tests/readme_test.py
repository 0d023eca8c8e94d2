"""Every Python block of the README runs as it stands, in order, in one namespace."""

import pathlib
import re

import jax
from absl.testing import absltest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


class ReadmeTest(absltest.TestCase):
    def test_the_python_blocks_run(self):
        text = (_REPOSITORY / "README.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        self.assertNotEmpty(blocks)
        names: dict[str, object] = {}
        # A reader's session has JAX's own settings, not the strict ones of the tests.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for block in blocks:
                exec(compile(block, "README.md", "exec"), names)  # noqa: S102
        # What the text says of the outcome.
        selection = names["selection"]
        self.assertLen(selection.forget, 8)
        self.assertEmpty(set(selection.forget) & set(selection.retain))

    def test_links_and_named_files_exist(self):
        text = (_REPOSITORY / "README.md").read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        named = re.findall(r"experiments/[\w/]+\.(?:py|flags|md)", text)
        for path in {*links, *named}:
            self.assertTrue((_REPOSITORY / path).exists(), path)


if __name__ == "__main__":
    absltest.main()
