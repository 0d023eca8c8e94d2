"""The suite runner: its grid, what it refuses, and a tiny grid with a failure and a resumption."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import sample_run
import tiny
from absl.testing import absltest
from waiting import wait_until

from experiments.studies.suite import suite
from raslik_jax.base.files import read_json, write_json
from raslik_jax.run import artifacts

_DEMO = "experiments/flags/demo.flags"
_TINY = "\n".join(
    (
        *tiny.FLAGS,
        "--corpus.num_validation=4",
        "--retrieve.strategies=random,raslik",
        "--unlearn.algorithms=ga_gdr\n",
    )
)


def _suite(*arguments):
    return tiny.run_script("experiments/studies/raslik.py", "suite", *arguments)


def _options(out, *flagfiles, **options):
    return suite.Options(out=str(out), flagfiles=flagfiles or (_DEMO,), **options)


@pytest.mark.parametrize(
    ("vary", "common", "message"),
    [
        ("sketch.size", "", "--vary must be name=value"),
        ("finetune.lora_rank=2,2", "", "all different"),
        ("unlearn.ga_gdr.learning_rate=1e-4,0.0001", "", "must differ"),
        ("corpus.data_dir=a/b,a_b", "", "must differ in folder"),
        ("finetune.lora_rnak=2,4", "", "Unknown command line flag 'finetune.lora_rnak'"),
        ("finetune.lora_rank=2,0", "", "--finetune.lora_rank must be at least 1, got 0"),
        ("seed=1,2", "", "must not name seed: give --seeds"),
        ("", "seed=1", "must not name seed: give --seeds"),
        ("workdir=a,b", "", "must not name workdir"),
        ("", "mesh.base=split", "should be one of <replicated\\|sharded\\|auto>"),
        ("mesh.data=1,2", "", "must differ in folder and settings"),
        ("", "gpu=h100", "Unknown command line flag 'gpu'"),
        ("finetune.lora_rank=2,4", "finetune.lora_rank=8", "got finetune.lora_rank twice"),
        ("", "oracle", "--set must be name=value"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(tmp_path, vary, common, message):
    with pytest.raises(ValueError, match=message):
        options = {"vary": (vary,) if vary else (), "set": (common,) if common else ()}
        suite.plan_cells(_options(tmp_path, **options))


@pytest.mark.parametrize("line", ['{"instruction": "a row"}', "corpus.num_train=60"])
def test_a_line_of_a_flag_file_that_is_no_flag_is_refused_before_a_cell_runs(tmp_path, line):
    (tmp_path / "mine.flags").write_text(f"--seed=1\n{line}\n")
    with pytest.raises(ValueError, match="^mine-seed=0 cannot run: arguments must be flags, got "):
        suite.plan_cells(_options(tmp_path, str(tmp_path / "mine.flags")))


def test_what_a_run_is_told_beside_its_settings_is_left_to_it(tmp_path):
    told = (
        "mesh.data=1",
        "mesh.base=sharded",
        "measure=none",
        "stages=corpus",
    )
    (cell,), _ = suite.plan_cells(_options(tmp_path, set=told))
    assert {f"--{flag}" for flag in told} < {*cell.arguments}


def test_flag_files_must_be_there_and_a_choice_needs_learning_rates(tmp_path):
    with pytest.raises(ValueError, match="--flagfiles must be a list of files, got none"):
        suite.plan_cells(suite.Options(out=str(tmp_path)))
    with pytest.raises(ValueError, match="files, got 'nowhere.flags'"):
        suite.plan_cells(_options(tmp_path, "nowhere.flags"))
    with pytest.raises(ValueError, match="--choose needs --vary of learning rates"):
        suite.plan_cells(_options(tmp_path, choose=True))
    with pytest.raises(ValueError, match="must differ in learning rate and seed alone"):
        suite.plan_cells(_options(tmp_path, choose=True, vary=("finetune.lora_rank=2,4",)))
    flags = "evaluate.perplexity_examples=0", "retrieve.held_out=0.2"
    for flag in flags:
        vary = ("unlearn.ga_gdr.learning_rate=1e-5,1e-4",)
        with pytest.raises(ValueError, match=f"runs to choose from .* --{flag}: leave it out"):
            suite.plan_cells(_options(tmp_path, choose=True, vary=vary, set=(flag,)))
    with pytest.raises(ValueError, match="--seeds must be a list of numbers, each different"):
        _options(tmp_path, seeds=(1, 1))


def test_a_grid_is_the_product_and_its_choice_is_measured_on_test_queries(tmp_path, members):
    grid, tests = suite.plan_cells(
        _options(
            tmp_path,
            _DEMO,
            "experiments/flags/study.flags",
            seeds=(0, 1, 2),
            choose=True,
            vary=("unlearn.ga_gdr.learning_rate,unlearn.ga_klr.learning_rate=1e-5,1e-4",),
            set=("retrieve.strategies=random,raslik",),
        )
    )
    assert (len(grid), len(tests)) == (2 * 3 * 2, 2 * 3)
    assert len({cell.name for cell in (*grid, *tests)}) == 18
    for cell in (*grid, *tests):
        text = " ".join(cell.arguments)
        assert "--retrieve.strategies=random,raslik" in text
        rates = re.findall(r"--unlearn\.\w+\.learning_rate=(\S+)", text)
        is_test = cell in tests
        assert len(rates) == (0 if is_test else 2) and len(set(rates)) < 2
        assert ("--unlearn.choice=" in text, "--references.query_split=test" in text) == (
            is_test,
            is_test,
        )
        assert ("--references.query_split=validation" in text) == (not is_test)
        assert "perplexity_examples" not in text  # by likelihoods damage is judged
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_report_says_what_was_judged_damaged(tmp_path, seeds):
    grid, _ = suite.plan_cells(_options(tmp_path, seeds=seeds))
    found = suite.Suite(_options(tmp_path))
    for cell, seed in zip(grid, seeds, strict=True):
        root = found.workdir(cell)
        sample_run.write_run(root, seed=seed)
        metrics = read_json(artifacts.METRICS.place(root))
        metrics["methods"][-1]["judgment"]["verdict"] = "damaged"
        write_json(artifacts.METRICS.place(root), metrics)
        found.record(cell, "done")
    text = found.report(grid)
    if len(seeds) == 1:
        assert re.search(r"damaged: \w+ GA\\_KLR", text)
        assert "| Model | F, forget rate (lower is better)" in text
    else:
        assert f"Mean over the {len(seeds)} seeds" in text
        assert "| 3 damaged |" in text


def test_the_page_shows_validation_runs_where_nothing_could_be_chosen(tmp_path, monkeypatch):
    def run(self, cell, label):
        sample_run.write_run(self.workdir(cell))
        self.record(cell, "done")

    monkeypatch.setattr(suite.Suite, "run", run)
    monkeypatch.setattr(suite.Suite, "choose", lambda self, cells, experiment: "not run, why")
    options = _options(tmp_path, choose=True, vary=("unlearn.ga_gdr.learning_rate=1e-4",))
    assert not suite.Suite(options).run_all(*suite.plan_cells(options))
    assert "<figure>" in (tmp_path / "report.html").read_text()


def test_what_stops_the_suite_stops_its_run_first(tmp_path, monkeypatch):
    log, waits = tmp_path / "log", threading.Event()

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            waits.set()
            return super().wait(timeout)

    def stop():
        wait_until(lambda: log.exists() and "ready" in log.read_text())
        waits.wait(60)  # or the child is quicker than this process
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Process)

    child = "import time; print('ready', flush=True)\nwhile True: time.sleep(1)"
    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt) as found:
        suite.run_process([sys.executable, "-c", f"exec({child!r})"], log)
    frames = [entry.locals for entry in found.traceback if "process" in entry.locals]
    assert frames[0]["process"].returncode == -signal.SIGTERM


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
        first = _suite(*arguments)
        self.assertEqual(first.returncode, 1, first.stderr)
        states = {
            name: cell["state"]
            for name, cell in json.loads((out / "suite.json").read_text())["cells"].items()
        }
        names = [f"tiny-unlearn.ga_gdr.learning_rate={rate}-seed=0" for rate in ("1e-4", "3e-3")]
        self.assertEqual({states[name] for name in (*names, "test-tiny-seed=0")}, {"done"})
        self.assertEqual(states["broken-unlearn.ga_gdr.learning_rate=1e-4-seed=0"], "failed")
        self.assertRegex(states["test-broken-seed=0"], "not run")
        self.assertRegex(first.stdout, r"number of general rows must be")

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
                if entry["judgment"]["verdict"] == "damaged":  # such a model is not chosen
                    far = math.inf
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

        again = _suite(*arguments)
        self.assertEqual(again.returncode, 1)
        for name in done:
            self.assertNotIn("done in", (out / "logs" / f"{name}.log").read_text())
        self.assertEqual((out / "report.md").read_text(), report)


if __name__ == "__main__":
    absltest.main()
