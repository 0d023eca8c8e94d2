"""The report stage on a stored run: every form, from nothing but what is stored."""

import pathlib
import tempfile

import sample_run
from absl.testing import absltest

from raslik_jax.config import Config, UnlearnConfig
from raslik_jax.run.stages.report import report
from raslik_jax.run.workspace import Workspace


class ReportStageTest(absltest.TestCase):
    def test_writes_tables_figures_and_the_page(self):
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        sample_run.write_run(root)
        (root / "report").mkdir()
        config = Config(name="sample", unlearn=UnlearnConfig(epochs=2))
        report(Workspace(root, config), root / "report")
        names = {path.name for path in (root / "report").iterdir()}
        images = {
            f"{n}.{form}" for n in ("frontier", "scores", "losses") for form in ("png", "svg")
        }
        self.assertEqual(names, {"report.md", "report.html", "table.txt", *images})
        markdown = (root / "report" / "report.md").read_text()
        for name in ("frontier", "scores", "losses"):
            self.assertIn(f"({name}.png)", markdown)
        self.assertIn("| **&gt; What is 2?** |  |\n| fine-tuned | (empty) |", markdown)
        page = (root / "report" / "report.html").read_text()
        self.assertEqual(page.count("<figure>"), 2 * 2 + 2 + 1 + 4)
        self.assertNotIn(str(root), page)


if __name__ == "__main__":
    absltest.main()
