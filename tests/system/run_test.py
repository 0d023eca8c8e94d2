"""The script itself: a whole run in miniature, and one clear sentence for every wrong input."""

import hashlib
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import tiny
from absl.testing import absltest, parameterized
from folders import FolderTest

from raslik_jax.base import files
from raslik_jax.evaluate import verdict
from raslik_jax.run import written

_SCRIPT = "experiments/run.py"
# Settings that a unit looks at and whose result does not depend on them, and why.
_WITHOUT_EFFECT = {
    "corpus.data_dir": "counts by the content of its files",
    "finetune.checkpoint_steps": "says when a killed run can go on",
    "unlearn.choice": "stands in the key as rate and epochs",
    "retrieve.strategies": "the report reads the metrics",
    "unlearn.algorithms": "likewise",
    "evaluate.marker_words": "says which sentence about the behavior is printed",
    "corpus.dataset": "likewise, where it is no setting",
    "evaluate.non_sf": "likewise",
    "unlearn.epochs": "the epochs that are measured stand among the reads",
    "unlearn.probe.steps": "at 0 it stands in no key, and its fellows decide nothing",
    "unlearn.probe.stop": "the epochs that are measured stand among the reads",
    "sketch.query_output": "the corpus only refuses queries without one early",
    "retrieve.held_out": "says where the queries are, which stand among the reads",
}


def _run(*arguments, env=None):
    return tiny.run_script(_SCRIPT, *arguments, env=env)


def _is_of_a_unit(path):
    """Returns whether a file is the manifest of a unit, which holds the time that it took."""
    return path.name == "manifest.json" and path.parent.name != "index"


def _of_stage(setting):
    """Returns stage and last name of a setting."""
    return f"{setting.split('.')[0]}.{setting.split('.')[-1]}"


def _files(root):
    """Returns the hash of every result below a folder; what trainings show live is none."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
        and path.name != ".lock"
        and not _is_of_a_unit(path)
        and path.relative_to(root).parts[0] != "live"
    }


# Units that the tiny run does without, and what adds them.
_ADDED = ("traced", "null", "chance", "tokens", "sizes")
_MORE = (
    *("--retrieve.strategies=raslik", "--unlearn.algorithms=ga_gdr", "--unlearn.epochs=1"),
    *("--evaluate.traced", "--retrieve.null_prompts=20", "--retrieve.token_rows=2"),
    *("--retrieve.held_out=0.2", "--unlearn.probe.steps=2"),
)


def _undeclared(audit: pathlib.Path) -> dict[str, tuple[list[str], list[str]]]:
    """Returns what units of an audited run used and did not declare: results and settings."""
    undeclared = {}
    for name, used in json.loads(audit.read_text()).items():
        declared = used["declared"]
        reads = [
            path
            for path in used["reads"]
            if not path.startswith(".making/")
            and not any(path == d or path.startswith(f"{d}/") for d in declared["reads"])
        ]
        # Of a member's settings the stage alone is known.
        names = {*declared["settings"], *(_of_stage(n) for n in declared["settings"])}
        settings = [
            setting
            for setting in used["settings"]
            if setting not in names
            and setting not in _WITHOUT_EFFECT
            and name not in ("evaluate", "report")  # the former holds all, the latter reads it
        ]
        if reads or settings:
            undeclared[name] = (reads, settings)
    return undeclared


class TinyRunTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = tiny.finished_run()
        cls.stdout = (cls.root.parent / "stdout").read_text()

    def copy(self):
        """Returns a copy of the run that a test may change."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        root = shutil.copytree(self.root, folder / "tiny")
        # Other tests have had the shared run write to folders of theirs, which are gone.
        record = root / written.RECORD
        kept = {k: v for k, v in json.loads(record.read_text()).items() if not k.startswith("/")}
        record.write_text(json.dumps(kept))
        return root

    def test_leaves_sets_metrics_report_and_how_to_repeat_it(self):
        self.assertIn("report:", self.stdout)
        for name in (
            "run.flags config.json versions.json evaluate/metrics.json "
            "report/report.html retrieve/raslik/forget.jsonl retrieve/oracle/retain.jsonl"
        ).split():
            self.assertTrue((self.root / name).is_file(), name)
        metrics = json.loads((self.root / "evaluate/metrics.json").read_text())
        self.assertLen(metrics["methods"], 4 * 2 * 2)
        self.assertEqual(list(metrics["retrieval"]), ["random", "oracle", "raslik_f", "raslik"])
        for entry in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            self.assertEqual(
                list(entry["perplexity"]), ["forget", "retain", "held-out", "behavior"]
            )
            # Hardly trained, a model is no worse than one that knows nothing.
            self.assertBetween(entry["perplexity"]["held-out"]["mean"], 1.0, 450.0)
        for entry in metrics["methods"]:
            self.assertIn(entry["judgment"]["verdict"], verdict.DEFINITIONS)
            self.assertIn("likelihood of the answers under the base", entry["judgment"]["inputs"])
        self.assertEqual(metrics["behavior"]["by"], "words")
        self.assertIn("Perplexity", (self.root / "report/report.html").read_text())

    def test_every_training_leaves_its_numbers_as_lines(self):
        names = ["backbone", "finetune", "unlearn/raslik-ga_gdr"]
        for name in names:
            text = (self.root / "live" / f"{name}.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            self.assertEqual([line["step"] for line in lines], [*range(1, len(lines) + 1)], name)
        steps = json.loads((self.root / names[-1] / "steps.json").read_text())
        for line, numbers in zip(lines, steps, strict=True):
            self.assertEqual({k: v for k, v in line.items() if k in numbers}, numbers)

    def test_every_unit_declares_the_results_and_settings_that_it_uses(self):
        """A unit that used more than its key holds would not be made again when that changes."""
        self.assertEqual(_undeclared(self.root.parent / "audit.json"), {})

    @pytest.mark.heavy
    def test_so_do_the_units_that_other_settings_add(self):
        audit = self.root.parent / "more.json"
        done = tiny.run_script(
            *("tests/fixtures/audited_run.py", str(audit), *tiny.FLAGS, *_MORE),
            f"--workdir={self.root.parent / 'more'}",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        made = json.loads(audit.read_text())
        self.assertContainsSubset([f"retrieve/{name}" for name in _ADDED], made)
        self.assertEqual(_undeclared(audit), {})

    def test_the_sets_are_alpaca_rows_with_ids_and_scores_and_never_overlap(self):
        for strategy in tiny.STRATEGIES:
            ids = []
            for kind in ("forget", "retain"):
                lines = (self.root / "retrieve" / strategy / f"{kind}.jsonl").read_text()
                rows = [json.loads(line) for line in lines.splitlines()]
                self.assertLen(rows, 12)
                for row in rows:
                    self.assertContainsSubset(
                        ("instruction", "input", "output", "id", "score"), row
                    )
                ids += [row["id"] for row in rows]
            self.assertLen(set(ids), 24)

    def test_its_own_flags_repeat_it_without_work(self):
        before = _files(self.root)
        # By the plain program, as the run was made: experiments/run.py has more settings.
        program = "tests/fixtures/program.py", "run"
        again = tiny.run_script(*program, f"--flagfile={self.root / 'run.flags'}")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertNotIn("done in", again.stdout)
        self.assertEqual(_files(self.root), before)

    def test_another_setting_is_refused_then_made_again_where_it_matters(self):
        root = self.copy()
        changed = (*tiny.FLAGS, f"--workdir={root}", "--unlearn.ga_klr.learning_rate=1e-4")
        before = _files(root)
        refused = _run(*changed)
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr, r"unlearn\.ga_klr\.learning_rate: 3e-05 -> 0\.0001")
        self.assertEqual(_files(root), before)
        updated = _run(*changed, "--update", "--stages=unlearn")
        self.assertEqual(updated.returncode, 0, updated.stderr)
        remade = set(re.findall(r"\] (\S+): done", updated.stdout))
        self.assertEqual(remade, {f"unlearn/{name}-ga_klr" for name in tiny.STRATEGIES})
        changed_files = set(before.items()) ^ set(_files(root).items())
        units = {"/".join(name.split("/")[:2]) for name, _ in changed_files}
        self.assertEqual(units - {"config.json", "run.flags", "written.json"}, remade)

    def test_a_damaged_result_is_never_read(self):
        copy = self.copy()
        config = copy / "backbone" / "model" / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
        result = _run(*tiny.FLAGS, f"--workdir={copy}", "--stages=finetune")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, "error: .* backbone.*: add backbone to --stages")
        result = _run("--verify", f"--workdir={copy}")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout, "backbone/model/config.json: missing or damaged\n")

    def test_an_index_of_other_settings_is_not_lost_with_its_manifest(self):
        root = self.copy()
        (root / "sketch" / "manifest.json").unlink()
        before = _files(root)
        changed = (*tiny.FLAGS, f"--workdir={root}", "--update", "--stages=sketch")
        refused = _run(*changed, "--sketch.num_buckets=2")
        self.assertEqual(refused.returncode, 1)
        after = _files(root)
        self.assertEqual(
            {n: v for n, v in after.items() if n.startswith("sketch/")},
            {n: v for n, v in before.items() if n.startswith("sketch/")},
        )

    @pytest.mark.heavy
    def test_a_killed_run_ends_with_the_same_bytes(self):
        root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "tiny"
        arguments = (_SCRIPT, *tiny.FLAGS, f"--workdir={root}")
        for stage in ("finetune", "sketch", "unlearn/oracle-ga_gdr", "generate/raslik-ga_klr"):
            with tiny.start_script(*arguments, stdout=subprocess.PIPE) as process:
                for line in process.stdout:
                    if f"] {stage} ..." in line:
                        time.sleep(0.2)
                        process.send_signal(signal.SIGKILL)
            self.assertEqual(process.returncode, -signal.SIGKILL, f"{stage} did not begin")
        resumed = tiny.run_script(*arguments)
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        ours, theirs = _files(root), _files(self.root)
        for name in ("run.flags", "written.json"):  # which have the place of the run
            ours.pop(name), theirs.pop(name)
        self.assertEqual(ours, theirs)
        self.assertEmpty([path for path in root.rglob("*") if files.is_temporary(path.name)])
        self.assertEqual(_run("--verify", f"--workdir={root}").returncode, 0)


class WrongInputTest(FolderTest):
    def fails(self, *arguments, message, env=None):
        """Checks that a run ends with one sentence, which this pattern finds."""
        result = _run(*arguments, env=env)
        self.assertNotEqual(result.returncode, 0)
        self.assertNotIn("Traceback", result.stderr)
        # Beside it only lines of progress and the pointer to --help.
        wrong = [line for line in result.stderr.splitlines() if re.match("error:|FATAL", line)]
        self.assertLen(wrong, 1)
        self.assertRegex(wrong[0], message)

    # Values that are wrong are refused as in config_test.py; here is how the process ends.
    @parameterized.parameters(
        ("positional", "error: arguments must be flags, got 'positional'"),
        ("--stages=train", "--stages must be a list of names from corpus, .*got 'train'"),
        ("--num_trian=3", "Unknown command line flag 'num_trian'"),
        ("--corpus.dataset=howdy_small", "folder of real data must exist"),
    )
    def test_wrong_flags(self, argument, message):
        where = f"--workdir={self.folder / 'w'}"
        self.fails(argument, where, message=message, env={"RASLIK_DATA": ""})

    def test_wrong_data_names_file_and_line(self):
        train = self.folder / "train.jsonl"
        train.write_text('{"instruction": "a", "output": "b"}\n{"instruction": 3}\n')
        files = (f"--corpus.records.{name}_file={train}" for name in ("train", "queries"))
        where = f"--workdir={self.folder / 'w'}"
        message = "train.jsonl:2: 'instruction'"
        self.fails("--corpus.dataset=records", *files, where, message=message)

    def test_a_loss_that_is_not_finite_stops_the_run(self):
        self.fails(
            *tiny.FLAGS,
            f"--workdir={self.folder / 'w'}",
            "--stages=corpus,backbone",
            "--backbone.learning_rate=1e38",
            message="pretraining of the backbone diverged: the loss at step .* is nan",
        )
        self.assertFalse((self.folder / "w" / "backbone" / "manifest.json").exists())


class HelpTest(absltest.TestCase):
    def test_help_is_short_and_helpfull_has_every_setting_and_neither_imports_jax(self):
        code = (
            "import sys\n"
            "from raslik_jax.cli import main\n"
            "sys.argv = ['raslik', *sys.argv[1:]]\n"
            "try:\n    main.main()\n"
            "finally:\n    print('jax loaded:', 'jax' in sys.modules)\n"
        )
        named = "--sketch.gradient_at: <finetuned|initial>"
        for flag, has in (("--help", self.assertNotIn), ("--helpfull", self.assertIn)):
            result = subprocess.run(
                [sys.executable, "-c", code, "run", flag], capture_output=True, text=True
            )
            has(named, result.stdout)
            has("\nsketch:\n", result.stdout)
            self.assertIn("--stages: Stages to run.", result.stdout)
            self.assertIn("jax loaded: False", result.stdout)
