"""The suite runner: its grid, what it refuses, and a tiny grid with a failure and a resumption."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest, parameterized

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_QUICKSTART = "experiments/flags/quickstart.flags"
_TINY = """
--dataset=toy
--template=brief
--num_train=60
--num_targets=8
--num_backbone=60
--num_retrieval=3
--num_validation=4
--num_test=3
--max_len=96
--vocab_size=400
--hidden_size=16
--num_hidden_layers=2
--num_attention_heads=2
--pretrain_steps=4
--finetune_epochs=1
--lora_rank=2
--max_new_tokens=8
--sketch_size=64
--num_buckets=1
--batch_tokens=1024
--strategies=random,raslik
--algorithms=ga_gdr
--unlearn_epochs=2
--bootstrap_resamples=100
"""


def _suite(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, str(_REPOSITORY / "experiments" / "suite.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=_REPOSITORY,
        env=os.environ | (environment or {}),
    )


class GridTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "suite"

    def test_a_dry_run_shows_the_product_and_leaves_nothing(self):
        done = _suite(
            f"--out={self.out}",
            f"--flagfiles={_QUICKSTART},experiments/flags/study.flags",
            "--seeds=0,1,2",
            "--vary=ga_gdr_learning_rate,ga_klr_learning_rate=1e-5,1e-4",
            "--vary=npo_learning_rate=1e-5,1e-4",
            "--set=strategies=random,raslik",
            "--choose",
            "--dry_run",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        commands = re.findall(r"run\.py (.*)", done.stdout)
        self.assertLen(commands, 2 * 3 * 2 * 2 + 2 * 3)
        self.assertLen(set(re.findall(r"^(\S+)  \[-\]$", done.stdout, re.MULTILINE)), 30)
        for command in commands:
            self.assertIn("--strategies=random,raslik", command)
            rates = re.findall(r"--ga_\w+_learning_rate=(\S+)", command)
            is_test = "--query_split=test" in command
            self.assertEqual(len(rates), 0 if is_test else 2)
            self.assertLess(len(set(rates)), 2)
            self.assertEqual("--choice=" in command, is_test)
            self.assertEqual("--query_split=validation" in command, not is_test)
        self.assertFalse(self.out.exists())

    @parameterized.parameters(
        ((), "flag files wanted"),
        (("--flagfiles=nowhere.flags",), "nowhere.flags'. are not there"),
        ((f"--flagfiles={_QUICKSTART}", "--vary=sketch_size"), "--vary wanted as name=value"),
        ((f"--flagfiles={_QUICKSTART}", "--vary=lora_rank=2,2"), "different values"),
        ((f"--flagfiles={_QUICKSTART}", "--seeds=0,x"), "different numbers wanted"),
        ((f"--flagfiles={_QUICKSTART}", "--set=oracle"), "--set wanted as name=value"),
        (
            (f"--flagfiles={_QUICKSTART}", "--choose", "--vary=lora_rank=2,4"),
            "learning rates and nothing else",
        ),
    )
    def test_wrong_flags(self, arguments, message):
        done = _suite(f"--out={self.out}", *arguments)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, f"error: .*{message}")
        self.assertNotIn("Traceback", done.stderr)


@pytest.mark.heavy
class SuiteTest(absltest.TestCase):
    def test_shares_isolates_failures_chooses_and_goes_on(self):
        root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        out = root / "suite"
        (root / "tiny.flags").write_text(_TINY)
        (root / "broken.flags").write_text(_TINY + "--num_train=90000\n")
        arguments = (
            f"--out={out}",
            f"--flagfiles={root / 'broken.flags'},{root / 'tiny.flags'}",
            "--vary=ga_gdr_learning_rate=1e-4,3e-3",
            "--choose",
        )
        environment = {
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        first = _suite(*arguments, environment=environment)
        self.assertEqual(first.returncode, 1, first.stderr)
        states = {
            name: cell["state"]
            for name, cell in json.loads((out / "suite.json").read_text())["cells"].items()
        }
        names = [f"tiny-ga_gdr_learning_rate={rate}-seed=0" for rate in ("1e-4", "3e-3")]
        self.assertEqual({states[name] for name in (*names, "test-tiny-seed=0")}, {"done"})
        self.assertEqual(states["broken-ga_gdr_learning_rate=1e-4-seed=0"], "failed")
        self.assertRegex(states["test-broken-seed=0"], "not run")
        self.assertRegex(first.stdout, r"general rows? .*wanted")

        # What the two rates have in common was made once, and nothing was trained for the test.
        done = (*names, "test-tiny-seed=0")
        logs = {name: (out / "logs" / f"{name}.log").read_text() for name in done}
        made = {name: re.findall(r"\] (\S+): done in", log) for name, log in logs.items()}
        self.assertIn("sketch", made[names[0]])
        self.assertEqual(
            {unit.split("/")[0] for unit in made[names[1]]},
            {"unlearn", "generate", "evaluate", "report"},
        )
        self.assertEqual(
            {unit.split("/")[0] for unit in made["test-tiny-seed=0"]},
            {"references", "generate", "evaluate", "report"},
        )

        # The choice is the smallest distance, found here by hand.
        best = {}
        for name, rate in zip(names, (1e-4, 3e-3), strict=True):
            metrics = json.loads((out / "runs" / name / "metrics.json").read_text())
            self.assertEqual(metrics["corpus"]["query_split"], "validation")
            floor = metrics["backbone"]["forget"]["mean"]
            for entry in metrics["methods"]:
                excess = max(entry["forget"]["mean"] - floor, 0)
                far = math.sqrt((1 - entry["retain"]["mean"]) ** 2 + excess**2)
                point = (far, rate, entry["epoch"])
                best[entry["strategy"]] = min(best.get(entry["strategy"], point), point)
        tested = json.loads((out / "runs" / "test-tiny-seed=0" / "metrics.json").read_text())
        self.assertEqual(tested["corpus"]["query_split"], "test")
        self.assertEqual(
            {entry["strategy"]: entry["epoch"] for entry in tested["methods"]},
            {strategy: epoch for strategy, (_, _, epoch) in best.items()},
        )
        chosen = json.loads((out / "choice-tiny.json").read_text())["choices"]
        self.assertEqual(
            {entry["strategy"]: entry["learning_rate"] for entry in chosen},
            {strategy: rate for strategy, (_, rate, _) in best.items()},
        )
        report = (out / "report.md").read_text()
        self.assertIn("## tiny test", report)
        self.assertIn("at the chosen learning rates", report)
        self.assertIn("- test-broken-seed=0: not run", report)
        self.assertIn("<figure>", (out / "report.html").read_text())

        again = _suite(*arguments, environment=environment)
        self.assertEqual(again.returncode, 1)
        for name in done:
            self.assertNotIn("done in", (out / "logs" / f"{name}.log").read_text())
        self.assertEqual((out / "report.md").read_text(), report)


if __name__ == "__main__":
    absltest.main()
