"""TOFU's own metrics in a whole run, with and without a retain model."""

import json
import pathlib
import tempfile

import pytest
import tiny
from absl.testing import absltest

_TINY = (
    *(flag for flag in tiny.FLAGS if not flag.startswith("--corpus.num_targets")),
    *("--name=tofu", "--corpus.dataset=tofu", "--corpus.tofu.forget=forget10"),
    *("--corpus.tofu.questions=6", "--corpus.num_train=110", "--corpus.num_backbone=40"),
    *("--corpus.num_validation=1", "--corpus.num_test=4", "--retrieve.strategies=random,raslik"),
    *("--unlearn.algorithms=ga_gdr", "--unlearn.epochs=1", "--evaluate.perplexity_examples=0"),
)


def _write(path: pathlib.Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def _write_data(folder: pathlib.Path) -> None:
    """Writes a TOFU of 100 questions and an Alpaca of 90 rows."""
    _write(
        folder / "alpaca_data.json",
        [{"instruction": f"Task {i}.", "input": "", "output": f"Done {i}."} for i in range(90)],
    )
    rows = [{"question": f"Who wrote book {i}?", "answer": f"Author {i}."} for i in range(100)]
    _write(folder / "tofu" / "full.jsonl", rows)
    more = [
        {
            **row,
            "paraphrased_question": f"{row['question']} Say.",
            "paraphrased_answer": f"It was {row['answer']}",
            "perturbed_answer": ["It was nobody.", "It was a crowd."],
        }
        for row in rows
    ]
    _write(folder / "tofu" / "forget10_perturbed.jsonl", more[90:])
    _write(folder / "tofu" / "retain_perturbed.jsonl", more[:10])
    for name in ("real_authors", "world_facts"):
        facts = [
            {"question": f"{name} {i}?", "answer": "Paris", "perturbed_answer": ["Rome", "Oslo"]}
            for i in range(5)
        ]
        _write(folder / "tofu" / f"{name}_perturbed.jsonl", facts)


@pytest.mark.heavy
class TofuRunTest(absltest.TestCase):
    def _run(self, *arguments):
        result = tiny.run_script("experiments/run.py", *_TINY, *arguments, env=self.environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_a_run_beside_its_retain_model(self):
        root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        _write_data(root / "data")
        self.environment = {"RASLIK_DATA": str(root / "data")}
        self._run(
            "--corpus.tofu.train=retain",
            "--stages=corpus,backbone,finetune,references",
            f"--workdir={root / 'retain'}",
        )
        own = (f"--workdir={root / 'own'}",)
        self._run(*own)
        metrics = json.loads((root / "own" / "evaluate" / "metrics.json").read_text())
        for model in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            self.assertNotIn("forget_quality", model["tofu"])
            self.assertNotIn("perplexity", model)
            self.assertGreaterEqual(model["tofu"]["model_utility"], 0.0)
            for values in model["tofu"]["sets"].values():
                self.assertTrue(all(0 <= value <= 1 for value in values.values()), values)
        report = (root / "own" / "report" / "report.html").read_text()
        self.assertIn("No forget quality: it needs a retain model", report)

        again = self._run(*own, f"--corpus.tofu.retain_run={root / 'retain'}", "--update")
        remade = [line.split()[1] for line in again.splitlines() if "done in" in line]
        self.assertEqual([name.rstrip(":") for name in remade][-2:], ["evaluate", "report"])
        self.assertNotIn("unlearn", " ".join(remade))
        metrics = json.loads((root / "own" / "evaluate" / "metrics.json").read_text())
        qualities = [model["tofu"]["forget_quality"] for model in metrics["methods"]]
        self.assertTrue(all(0 < quality <= 1 for quality in qualities), qualities)
        self.assertIn("Forget quality", (root / "own" / "report" / "report.html").read_text())
