"""The script for GPU machines: it parses, refuses, and gives every benchmark flags that it has."""

import importlib
import pathlib
import re
import subprocess

from absl.testing import absltest

from raslik_jax.base import settings

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
_SCRIPT = _EXPERIMENTS / "gpu" / "run_all.sh"


class RunAllTest(absltest.TestCase):
    def test_parses_and_wants_a_folder(self):
        self.assertEqual(subprocess.run(["bash", "-n", str(_SCRIPT)]).returncode, 0)
        done = subprocess.run(["bash", str(_SCRIPT)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("error: one folder must be named", done.stderr)

    def test_every_flag_is_one_of_its_benchmark(self):
        text = _SCRIPT.read_text().replace("\\\n", " ")
        shared = re.search(r"SKETCH=\((.*?)\)", text, re.DOTALL)[1]
        small = re.search(r" KERNELS=\((.*?)\)", text, re.DOTALL)[1]
        commands = re.findall(r"^\s*measure \w+ (.+)$", text, re.MULTILINE)
        self.assertLen(commands, 6)
        for command in commands:
            command = command.replace('"${SKETCH[@]}"', shared).replace('"${KERNELS[@]}"', small)
            (script,) = re.findall(r"experiments/bench/(\w+)\.py", command)
            module = importlib.import_module(f"experiments.bench.{script}")
            defined = {leaf.name for leaf in settings.leaves(module.Options())}
            self.assertLessEqual(set(re.findall(r"--(?:no)?(\w+)", command)), defined)
            # Its results are JSON lines.
            self.assertIn("--json", command)
