"""The suite runner: its grid, what it refuses, and a tiny grid with a failure and a resumption."""

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import compiling
import pytest
from absl.testing import absltest, parameterized

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_QUICKSTART = "experiments/flags/quickstart.flags"
_TINY = """
--corpus.dataset=toy
--corpus.template=brief
--corpus.num_train=60
--corpus.num_targets=8
--corpus.num_backbone=60
--corpus.num_retrieval=3
--corpus.num_validation=4
--corpus.num_test=3
--corpus.max_len=96
--corpus.vocab_size=400
--backbone.hidden_size=16
--backbone.num_hidden_layers=2
--backbone.num_attention_heads=2
--backbone.steps=4
--finetune.epochs=1
--finetune.lora_rank=2
--references.max_new_tokens=8
--sketch.size=64
--sketch.num_buckets=1
--sketch.batch_tokens=1024
--retrieve.strategies=random,raslik
--unlearn.algorithms=ga_gdr
--unlearn.epochs=2
--evaluate.bootstrap_resamples=100
"""


def _suite(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, str(_REPOSITORY / "experiments" / "suite.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=_REPOSITORY,
        env=os.environ | (environment or {}),
    )


_WRONG = (
    ("no_file", (), "--flagfiles must be a list of files, got none"),
    ("missing_file", ("--flagfiles=nowhere.flags",), "files, got 'nowhere.flags'"),
    ("empty_axis", ("--vary=sketch_size",), "--vary must be name=value"),
    ("one_value_twice", ("--vary=lora_rank=2,2",), "different values"),
    ("one_value_in_two_forms", ("--vary=unlearn.ga_gdr.learning_rate=1e-4,0.0001",), "must differ"),
    ("one_folder", ("--vary=data_dir=a/b,a_b",), "must differ .* one folder"),
    ("unknown_flag", ("--vary=lora_rnak=2,4",), "Unknown command line flag 'lora_rnak'"),
    ("refused_value", ("--vary=lora_rank=2,0",), "--finetune.lora_rank must be at least 1, got 0"),
    ("seed_varied", ("--vary=seed=1,2",), "must not name seed: give --seeds"),
    ("seed_set", ("--set=seed=1",), "must not name seed: give --seeds"),
    ("workdir", ("--vary=workdir=a,b",), "must not name workdir"),
    ("flag_twice", ("--vary=lora_rank=2,4", "--set=lora_rank=8"), "got lora_rank twice"),
    ("set_without_value", ("--set=oracle",), "--set must be name=value"),
    ("choose", ("--choose", "--vary=lora_rank=2,4"), "--choose needs --vary of learning rates"),
    ("no_seed", ("--seeds=",), "--seeds=: every item must be a number"),
    ("seed_twice", ("--seeds=1,01",), "each item must be given once"),
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
            "--vary=unlearn.ga_gdr.learning_rate,unlearn.ga_klr.learning_rate=1e-5,1e-4",
            "--vary=unlearn.npo.learning_rate=1e-5,1e-4",
            "--set=strategies=random,raslik",
            "--choose",
            "--dry_run",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        commands = re.findall(r"run\.py (.*)", done.stdout)
        self.assertLen(commands, 2 * 3 * 2 * 2 + 2 * 3)
        self.assertLen(set(re.findall(r"^(\S+)  \[-\]$", done.stdout, re.MULTILINE)), 30)
        for command in commands:
            self.assertIn("--retrieve.strategies=random,raslik", command)
            rates = re.findall(r"--unlearn\.ga_\w+\.learning_rate=(\S+)", command)
            is_test = "--references.query_split=test" in command
            self.assertEqual(len(rates), 0 if is_test else 2)
            self.assertLess(len(set(rates)), 2)
            self.assertEqual("--unlearn.choice=" in command, is_test)
            self.assertEqual("--references.query_split=validation" in command, not is_test)
        self.assertFalse(self.out.exists())

    @parameterized.named_parameters(*_WRONG)
    def test_a_grid_that_cannot_be_run_is_refused_before_anything_runs(self, arguments, message):
        (case,) = [name for name, given, _ in _WRONG if given == arguments]
        self.assertRegex(_refusals()[case], message)

    def test_a_second_suite_on_one_folder_is_refused(self):
        self.assertRegex(_refusals()["lock"], "--out=.* is in use by another suite")

    def test_what_stops_the_suite_stops_its_run_first(self):
        self.assertEqual(_refusals()["stopped"], "stopped with a run that ended by SIGTERM")


# In one process: what the suite says of the cases above, of a second lock and of a termination.
_REFUSALS = """
import json, os, pathlib, runpy, signal, sys, tempfile, threading, time
from absl import flags
suite = runpy.run_path("experiments/suite.py", run_name="suite")
said = {}
out = pathlib.Path(tempfile.mkdtemp())
for case, arguments in json.loads(sys.argv[1]).items():
    for name in ("out", "flagfiles", "seeds", "vary", "set", "choose", "dry_run"):
        flags.FLAGS[name].unparse()
    try:
        flags.FLAGS(["suite.py", *arguments])
        suite["run_suite"](out / "suite")
    except (ValueError, flags.Error) as error:
        said[case] = str(error)
with suite["lock_folder"](out):
    try:
        with suite["lock_folder"](out):
            pass
    except ValueError as error:
        said["lock"] = str(error)
def stop():
    while not log.exists() or "ready" not in log.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
log = out / "log"
child = "import signal, sys, time; print('ready', flush=True)\\nwhile True: time.sleep(1)"
threading.Thread(target=stop).start()
try:
    suite["run_process"]([sys.executable, "-c", f"exec({child!r})"], log)
except KeyboardInterrupt as error:
    process = error.__traceback__.tb_next.tb_frame.f_locals["process"]
    ended = signal.Signals(-process.returncode).name
    said["stopped"] = f"stopped with a run that ended by {ended}"
print(json.dumps(said))
"""


@functools.cache
def _refusals():
    cases = {}
    for name, arguments, _ in _WRONG:
        given = () if name in ("no_file", "missing_file") else (f"--flagfiles={_QUICKSTART}",)
        cases[name] = (*given, *arguments)
    done = subprocess.run(
        [sys.executable, "-c", _REFUSALS, json.dumps(cases)],
        capture_output=True,
        text=True,
        cwd=_REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(_REPOSITORY)},
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


@pytest.mark.heavy
class SuiteTest(absltest.TestCase):
    def test_shares_isolates_failures_chooses_and_goes_on(self):
        root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        out = root / "suite"
        (root / "tiny.flags").write_text(_TINY)
        (root / "broken.flags").write_text(_TINY + "--corpus.num_train=90000\n")
        arguments = (
            f"--out={out}",
            f"--flagfiles={root / 'broken.flags'},{root / 'tiny.flags'}",
            "--vary=unlearn.ga_gdr.learning_rate=1e-4,3e-3",
            "--choose",
        )
        first = _suite(*arguments, environment=compiling.ENVIRONMENT)
        self.assertEqual(first.returncode, 1, first.stderr)
        states = {
            name: cell["state"]
            for name, cell in json.loads((out / "suite.json").read_text())["cells"].items()
        }
        names = [f"tiny-unlearn.ga_gdr.learning_rate={rate}-seed=0" for rate in ("1e-4", "3e-3")]
        self.assertEqual({states[name] for name in (*names, "test-tiny-seed=0")}, {"done"})
        self.assertEqual(states["broken-unlearn.ga_gdr.learning_rate=1e-4-seed=0"], "failed")
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
            metrics = json.loads((out / "runs" / name / "evaluate" / "metrics.json").read_text())
            self.assertEqual(metrics["corpus"]["query_split"], "validation")
            floor = metrics["backbone"]["forget"]["mean"]
            for entry in metrics["methods"]:
                excess = max(entry["forget"]["mean"] - floor, 0)
                far = math.sqrt((1 - entry["retain"]["mean"]) ** 2 + excess**2)
                point = (far, rate, entry["epoch"])
                best[entry["strategy"]] = min(best.get(entry["strategy"], point), point)
        tested = json.loads(
            (out / "runs" / "test-tiny-seed=0" / "evaluate" / "metrics.json").read_text()
        )
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

        again = _suite(*arguments, environment=compiling.ENVIRONMENT)
        self.assertEqual(again.returncode, 1)
        for name in done:
            self.assertNotIn("done in", (out / "logs" / f"{name}.log").read_text())
        self.assertEqual((out / "report.md").read_text(), report)


if __name__ == "__main__":
    absltest.main()
