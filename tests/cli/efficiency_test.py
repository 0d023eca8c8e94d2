"""The efficiency tables of a run in miniature, and that every key is documented."""

import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import compiling
import pytest
from absl.testing import absltest

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
_TINY = (
    "--corpus.dataset=toy --corpus.template=brief --corpus.num_train=60 --corpus.num_targets=8 "
    "--corpus.num_backbone=60 --corpus.num_retrieval=3 --corpus.num_validation=2 "
    "--corpus.num_test=3 --corpus.max_len=96 --corpus.vocab_size=400 --backbone.hidden_size=16 "
    "--backbone.num_hidden_layers=2 --backbone.num_attention_heads=2 --backbone.steps=4 "
    "--finetune.epochs=1 --finetune.lora_rank=2 --references.max_new_tokens=8 --sketch.size=256 "
    "--sketch.num_buckets=2 --sketch.batch_tokens=512 --retrieve.strategies=random "
    "--stages=corpus,backbone,finetune,references,sketch"
)


def _start(script, *arguments):
    return subprocess.run(
        [sys.executable, str(_EXPERIMENTS / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | compiling.ENVIRONMENT,
    )


class EfficiencyTest(absltest.TestCase):
    @pytest.mark.heavy
    def test_measures_every_method_and_documents_every_key(self):
        workdir = self.enter_context(tempfile.TemporaryDirectory())
        run = _start("run.py", *_TINY.split(), f"--workdir={workdir}")
        self.assertEqual(run.returncode, 0, run.stderr)
        done = _start(
            "efficiency.py",
            f"--workdir={workdir}",
            "--methods=bm25,raslik,exact",
            "--repeats=1",
            "--exact_batches=1",
            "--json",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        documentation = ast.get_docstring(ast.parse((_EXPERIMENTS / "efficiency.py").read_text()))
        for entry in found:
            for key in entry:
                self.assertRegex(documentation, rf"\b{key}\b")
        methods = {entry["method"]: entry for entry in found if entry["stage"] == "method"}
        self.assertEqual(list(methods), ["bm25", "raslik", "exact"])
        self.assertEqual({entry["examples"] for entry in methods.values()}, {60})
        self.assertLess(methods["exact"]["measured_share"], 1)
        memory = found[-1]
        # Rank 2 on the four linear layers of two blocks of width 16.
        widths = 2 * 2 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
        self.assertEqual((memory["num_params"], memory["sketch_size"]), (widths, 256))
        self.assertEqual(memory["gradient_bytes"] / memory["sketch_bytes"], widths / 256)
        self.assertEqual(memory["index_bytes"], 60 * 256 * 4)

    def test_wrong_flags_are_a_sentence(self):
        done = _start("efficiency.py")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: --workdir must be the work directory of a run", done.stderr)


if __name__ == "__main__":
    absltest.main()
