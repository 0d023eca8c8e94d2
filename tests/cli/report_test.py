"""The report script: what it prints and writes, and its sentences for wrong input."""

import csv
import subprocess

import sample_run
import tiny
from folders import FolderTest

from raslik_jax.base.files import read_json
from raslik_jax.report import results, tables


def _report(*flags: str) -> subprocess.CompletedProcess:
    return tiny.run_command("report", *flags)


class ReportTest(FolderTest):
    def setUp(self):
        super().setUp()
        for seed in (0, 1):
            sample_run.write_run(self.folder / str(seed), seed=seed)
        self.runs = f"--runs={self.folder / '0'},{self.folder / '1'}"

    def test_one_run_has_intervals_over_queries(self):
        run = read_json(self.folder / "0" / "evaluate" / "metrics.json")
        done = _report(f"--runs={self.folder / '0'}", "--format=markdown")
        self.assertIn("95 % bootstrap interval over queries", done.stdout)
        self.assertIn(tables.render_markdown(results.results_table(run)), done.stdout)
        self.assertIn(tables.render_markdown(results.retrieval_table(run)), done.stdout)
        self.assertNotIn("Mean over the", done.stdout)

    def test_prints_the_seeds(self):
        done = _report(self.runs)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Mean over the 2 seeds 0, 1", done.stdout)

    def test_writes_every_form(self):
        out = self.folder / "out"
        done = _report(self.runs, f"--out={out}", "--format=markdown")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertContainsSubset(
            ("report.html", "tables.md", "tables.csv"), {path.name for path in out.iterdir()}
        )
        self.assertEqual((out / "tables.md").read_text(), done.stdout)
        with (out / "tables.csv").open() as file:
            rows = list(csv.DictReader(file))
        forget = [row for row in rows if row["metric"] == "forget"]
        own = [row for row in forget if row["run"] == "sample" and row["algorithm"]]
        self.assertEqual({row["step"] for row in own}, {"1", "2"})
        self.assertTrue(all(row["low"] <= row["mean"] <= row["high"] for row in own))

    def test_rows_of_the_csv_tell_runs_of_one_name_apart(self):
        other = self.folder / "other"
        sample_run.write_run(other, seed=0, unlearn__epochs=3)
        done = _report(f"--runs={self.folder / '0'},{other}", "--format=csv")
        rows = list(csv.DictReader(done.stdout.splitlines()))
        keys = [
            (row["run"], row["strategy"], row["algorithm"], row["step"], row["metric"])
            for row in rows
        ]
        self.assertLen({*keys}, len(keys))
        self.assertLen({row["run"] for row in rows}, 2)

    def test_files_that_are_no_report_are_never_replaced(self):
        """Neither a user's own tables, nor what a link in an earlier report leads to."""
        own, earlier = (self.folder / name for name in ("own", "earlier"))
        own.mkdir()
        (own / "tables.csv").write_text("mine")
        done = _report(self.runs, f"--out={own}")
        self.assertRegex(
            done.stderr,
            "error: --out must be a folder of an earlier report, or one without tables.csv",
        )
        self.assertEqual([path.name for path in own.iterdir()], ["tables.csv"])
        self.assertEqual(_report(self.runs, f"--out={earlier}").returncode, 0)
        (earlier / "tables.md").unlink()
        (earlier / "tables.md").symlink_to(own / "tables.csv")
        done = _report(self.runs, f"--out={earlier}")
        self.assertRegex(done.stderr, "error: .*tables.md' must be a regular file")
        self.assertEqual((own / "tables.csv").read_text(), "mine")

    def test_an_error_is_a_sentence(self):
        for flags, message in (
            ((), "error: --run or --runs must name work directories"),
            (("--runs=/nonexistent",), "no file .*metrics.json"),
            ((self.runs + f",{self.folder / '0'}",), "must be a list without a repeated name"),
        ):
            done = _report(*flags)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, message)
            self.assertNotIn("Traceback", done.stderr)
