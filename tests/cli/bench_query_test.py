"""The query benchmark runs, checks itself, and says what it measured."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "bench_query.py"


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=300
    )


class BenchQueryTest(absltest.TestCase):
    def test_measures_every_dtype_against_numpy_and_cleans_up(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        sizes = ("--rows=100", "--size=128", "--chunk_rows=32", "--repeats=1", "--queries=1,3")
        done = run(*sizes, "--json", f"--folder={folder}")
        self.assertEqual(done.returncode, 0, msg=done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(
            [(line["dtype"], line["queries"]) for line in lines],
            [(d, q) for d in ("float32", "bfloat16", "int8", "sign") for q in (1, 3)],
        )
        # Whole chunks: 4 of 32 rows.
        self.assertEqual([line["row_bytes"] for line in lines[::2]], [65536, 32768, 16384, 2048])
        for line in lines:
            self.assertGreater(line["share_of_numpy"], 0)
            self.assertEqual((line["rows"], line["size"], line["repeats"]), (100, 128, 1))
        self.assertEqual(list(pathlib.Path(folder).iterdir()), [])

    def test_a_folder_that_holds_something_is_left_alone(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / "bench-int8").mkdir()
        (folder / "bench-int8" / "thesis.txt").write_text("mine")
        done = run("--rows=10", "--size=64", f"--folder={folder}")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "error: --folder must be new or empty")
        self.assertEqual((folder / "bench-int8" / "thesis.txt").read_text(), "mine")

    def test_an_error_is_a_sentence(self):
        done = run("--rows=10", "--size=64", "--dtypes=float16")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "flag --dtypes=float16: every item must be one of float32")
        self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    absltest.main()
