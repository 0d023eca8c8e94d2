"""The sketch benchmark runs, checks itself, and documents every key it prints."""

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest
from absl.testing import absltest

from raslik_jax.models.lora import LORA_PRESETS
from raslik_jax.models.presets import MODEL_PRESETS

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "bench_sketch.py"
SMALL = ("--lengths=16", "--batch_tokens=32", "--repeats=1", "--size=4096")


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=900
    )


def objects(done: subprocess.CompletedProcess) -> dict[str, list[dict]]:
    """Returns the printed objects by stage."""
    assert done.returncode == 0, done.stderr
    stages: dict[str, list[dict]] = {}
    for line in done.stdout.splitlines():
        stages.setdefault(json.loads(line)["stage"], []).append(json.loads(line))
    return stages


class BenchSketchTest(absltest.TestCase):
    def test_measures_every_stage_and_documents_every_key(self):
        done = run(*SMALL, "--json", "--breakdown", "--micro_tokens=16")
        stages = objects(done)
        self.assertEqual(
            list(stages),
            ["setup", "plan", "check", "shape", "matmul", "projection", "breakdown", "summary"],
        )
        documentation = ast.get_docstring(ast.parse(SCRIPT.read_text()))
        for stage, lines in stages.items():
            text = re.search(rf"^{stage}[ :].*?(?=^\w+[^\n]*:|\Z)", documentation, re.M | re.S)
            self.assertIsNotNone(text, stage)
            for key in lines[0].keys() - {"stage"}:
                self.assertRegex(text.group(), rf"\b{key}\b", f"{stage}: {key}")
        summary = stages["summary"][0]
        self.assertGreater(summary["examples_per_s"], 0)
        self.assertGreater(summary["worst_cosine"], 0.99999)
        self.assertTrue(summary["memory_within_bound"])
        self.assertIsNone(summary["speedup_vs_torch_loop"])
        self.assertEqual(stages["plan"][0]["rows"], 2)
        # One line of progress a stage.
        for said in ("drawing", "compiling shape 1 of 1", "checking", "warming up", "repetition 1"):
            self.assertIn(said, done.stderr)

    @pytest.mark.heavy
    def test_compares_with_a_torch_loop_of_the_same_weights(self):
        done = run(*SMALL, "--json", "--compare=torch_loop", "--torch_examples=2")
        stages = objects(done)
        self.assertGreater(stages["torch_loop"][0]["worst_cosine"], 0.9999)
        self.assertGreater(stages["summary"][0]["speedup_vs_torch_loop"], 0)

    @pytest.mark.heavy
    def test_other_families_quantized_bases_and_the_real_lengths_run(self):
        for flags in (
            ("--family=dense_rademacher", "--operand=bfloat16", "--dtype=bfloat16"),
            ("--family=binned_hashed", "--quantize=nf4", "--remat", "--loss=unshifted"),
            ("--lengths=alpaca", "--max_len=48", "--batch_tokens=96", "--num_buckets=2"),
        ):
            done = run(*SMALL, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("share of the matmul rate", done.stdout)

    def test_an_error_is_a_sentence(self):
        done = run("--size=1000000")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "error: the sketch size K .* size=1000000 .*196608")
        self.assertNotIn("Traceback", done.stderr)

    def test_help_loads_no_jax_and_names_all_presets(self):
        code = (
            f"import sys, runpy; sys.argv = ['bench']; module = runpy.run_path({str(SCRIPT)!r});"
            "assert 'jax' not in sys.modules; print(*module['MODELS']); print(*module['LORAS'])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        models, loras = (line.split() for line in done.stdout.splitlines())
        self.assertEqual(set(models), set(MODEL_PRESETS))
        self.assertEqual(set(loras), set(LORA_PRESETS))


if __name__ == "__main__":
    absltest.main()
