"""The benchmark of unlearning steps runs, and documents every key it prints."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "bench_unlearn.py"


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--model=pythia-14m", *flags],
        capture_output=True,
        text=True,
        timeout=600,
    )


class BenchUnlearnTest(absltest.TestCase):
    @pytest.mark.heavy
    def test_measures_each_algorithm_and_documents_every_key(self):
        flags = ("--batch_size=2", "--length=16", "--rounds=2", "--algorithms=ga_gdr,npo_klr")
        done = run(*flags, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line["stage"] for line in lines], ["matmul", "lora", "ga_gdr", "npo_klr"])
        documentation = ast.get_docstring(ast.parse(SCRIPT.read_text()))
        for key in set().union(*lines):
            self.assertRegex(documentation, rf"\b{key}\b")
        self.assertTrue(all(line["seconds"] > 0 for line in lines))
        self.assertEqual((lines[1]["ratio"], lines[1]["cpu_ratio"]), (1.0, 1.0))
        # A step of NPO_KLR is two passes and two of the reference, half as dear each.
        per_second = [line["tflops"] * line["seconds"] for line in lines]
        self.assertAlmostEqual(per_second[3] / per_second[1], 1.5, places=6)

    def test_unknown_algorithms_are_refused(self):
        done = run("--algorithms=guess")
        self.assertEqual(done.returncode, 1)
        self.assertIn("'guess'", done.stderr)


if __name__ == "__main__":
    absltest.main()
