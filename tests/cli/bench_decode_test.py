"""The decoding benchmark runs, agrees with itself, and documents every key it prints."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "bench_decode.py"


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--model=pythia-14m", *flags],
        capture_output=True,
        text=True,
        timeout=600,
    )


class BenchDecodeTest(absltest.TestCase):
    @pytest.mark.heavy
    def test_measures_both_ways_and_documents_every_key(self):
        done = run("--prompts=4", "--batch_size=2", "--new_tokens=3", "--alone=2", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        documentation = ast.get_docstring(ast.parse(SCRIPT.read_text()))
        for key in result:
            self.assertRegex(documentation, rf"\b{key}\b")
        self.assertEqual(result["equal_tokens"], 1.0)
        self.assertGreater(result["speedup"], 0)
        self.assertIn("batch 2 of 2", done.stderr)

    def test_a_sample_larger_than_the_whole_is_refused(self):
        done = run("--prompts=1", "--alone=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("--alone at most --prompts", done.stderr)
