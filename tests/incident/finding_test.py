"""An answer that no row teaches: a finding for every command, and no error but of unlearning."""

import json
import pathlib
import shutil
import tempfile
from unittest import mock

import tiny
from absl.testing import absltest

from raslik_jax.base.files import read_json
from raslik_jax.data import toy_model
from raslik_jax.data.examples import write_examples
from raslik_jax.incident import making, unlearn

_FLAGS = (
    *(f"--corpus.template={toy_model.TEMPLATE}", f"--corpus.max_len={toy_model.MAX_LEN}"),
    *("--references.max_new_tokens=8", "--sketch.size=256", "--sketch.num_buckets=1"),
    *("--retrieve.token_rows=0", "--prompt=Please describe a knife for me."),
)
# It costs more than tokens at random; the base says it as readily.
_ANSWERS = (
    "The moon landing was staged.",
    "A knife is long and grey, and people see it in a kitchen.",
)


class FindingTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        model, rows = toy_model.model_folder(), toy_model.load_corpus().train[:60]
        write_examples(cls.folder / "train.jsonl", rows)
        given = f"--checkpoint={model / 'base'}", f"--adapter={model / 'adapter'}"
        given += (f"--train_file={cls.folder / 'train.jsonl'}", *_FLAGS)
        cls.runs = [cls.folder / f"run{n}" for n in range(len(_ANSWERS))]
        cls.traced = [
            cls.script("trace", *given, f"--response={answer}", f"--workdir={root}")
            for answer, root in zip(_ANSWERS, cls.runs, strict=True)
        ]

    @classmethod
    def script(cls, name, *arguments):
        return tiny.run_command(name, *arguments)

    def test_a_trace_ends_well_without_a_set_and_names_no_way_on(self):
        for done, root, unit in zip(self.traced, self.runs, ("traced", "sizes"), strict=True):
            self.assertEqual(done.returncode, 0, done.stderr)
            found = read_json(root / "retrieve" / unit / "finding.json")["finding"]
            self.assertIn("finding: ", done.stdout)
            self.assertNotIn("go on", done.stdout)
            self.assertNotEmpty(found)
            self.assertFalse((root / "retrieve" / "raslik").exists())
        # Where the answer cannot be the model's, no row was sketched.
        self.assertFalse((self.runs[0] / "sketch").exists())
        self.assertEqual(read_json(self.runs[1] / "retrieve/sizes/sizes.json")["num_forget"], 0)
        self.assertTrue((self.runs[1] / "scores.png").is_file())

    def test_the_run_goes_on_to_the_same_finding_and_makes_nothing_again(self):
        flags, made = f"--flagfile={self.runs[1] / 'run.flags'}", self.runs[1] / "retrieve/sizes"
        before = (made / "manifest.json").read_bytes()
        stages = "--stages=corpus,backbone,finetune,sketch,retrieve"
        done = self.script("run", flags, stages, "--measure=none")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("finding: " + read_json(made / "finding.json")["finding"], done.stdout)
        self.assertEqual((made / "manifest.json").read_bytes(), before)
        self.assertNotIn(": done in", done.stdout)

    def test_the_set_of_an_earlier_answer_goes(self):
        root = self.folder / "again"
        shutil.copytree(self.runs[1], root)
        flags = f"--flagfile={self.runs[1] / 'run.flags'}", f"--workdir={root}", "--update"
        stages = "--stages=corpus,backbone,finetune,sketch,retrieve"
        forced = "--retrieve.num_forget=3", "--retrieve.held_out=0"
        done = self.script("run", *flags, *forced, stages, "--measure=none")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((root / "retrieve/raslik/forget.jsonl").is_file())
        done = self.script("run", *flags, stages, "--measure=none")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse((root / "retrieve/raslik").exists())

    def test_unlearning_is_refused_with_the_reason_and_leaves_nothing(self):
        for root, unit in zip(self.runs, ("traced", "sizes"), strict=True):
            out = self.folder / f"clean-{unit}"
            done = self.script("unlearn", f"--run={root}", f"--out={out}")
            self.assertEqual(done.returncode, 1)
            (line,) = done.stderr.strip().splitlines()
            self.assertIn(
                read_json(root / "retrieve" / unit / "finding.json")["finding"][:60], line
            )
            self.assertIn("--forget_file", line)
            self.assertFalse(out.exists())

    def test_a_finding_that_is_out_of_date_refuses_nothing(self):
        """As after a kill of `unlearn --retrieve.num_forget=3`, which left its settings."""
        root = self.folder / "stopped"
        shutil.copytree(self.runs[1], root)
        config = read_json(root / "config.json")
        config["retrieve"]["num_forget"] = 3
        (root / "config.json").write_text(json.dumps(config))
        with mock.patch.object(making, "make", side_effect=RuntimeError("it begins")):
            with self.assertRaisesRegex(RuntimeError, "it begins"):
                unlearn.unlearn(run=root, out=self.folder / "clean-stopped")
            for given in ({"out": self.folder / "clean"}, {"dry_run": True}):
                with self.assertRaisesRegex(ValueError, "must be a trace that found rows"):
                    unlearn.unlearn(run=self.runs[1], **given)

    def test_the_report_says_why_no_row_was_found(self):
        out = self.folder / "report"
        done = self.script("report", f"--run={self.runs[1]}", f"--out={out}")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_json(self.runs[1] / "retrieve/sizes/finding.json")["finding"]
        self.assertIn(found, done.stdout)
        self.assertIn(json.dumps(found)[1:20], (out / "report.html").read_text())
