"""Jobs that help a run with its index: the same bytes as the run alone, kills included."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import compiling
import pytest
from absl.testing import absltest
from index_cases import tree_bytes
from waiting import wait_until

from raslik_jax.cli import sketch_job
from raslik_jax.index.store import SketchStore
from raslik_jax.index.upkeep import verify
from raslik_jax.run.units import making_folder

_PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "program.py"
_TINY = (
    "--corpus.dataset=toy", "--corpus.template=brief", "--corpus.num_train=60",
    "--corpus.num_targets=8", "--corpus.num_backbone=60",
    "--corpus.num_retrieval=3", "--corpus.num_validation=2", "--corpus.num_test=3",
    "--corpus.max_len=96", "--corpus.vocab_size=400",
    "--backbone.hidden_size=16", "--backbone.num_hidden_layers=2",
    "--backbone.num_attention_heads=2", "--backbone.steps=4",
    "--finetune.epochs=1", "--finetune.lora_rank=2", "--references.max_new_tokens=8",
    "--sketch.size=256",
    "--sketch.num_buckets=1", "--sketch.batch_tokens=512", "--sketch.chunk_rows=4",
)  # fmt: skip
_BEFORE = "--stages=corpus,backbone,finetune,references"


class NotReadyTest(absltest.TestCase):
    def test_what_makes_a_work_directory_that_can_be_helped_is_told(self):
        made = "`raslik run` with --stages=corpus,backbone,finetune makes a work directory"
        with self.assertRaisesRegex(ValueError, f"^no file 'nowhere/config.json': {made}"):
            sketch_job.run(sketch_job.Options(workdir="nowhere"))


@pytest.mark.heavy
class SketchJobTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.environment = os.environ | compiling.ENVIRONMENT

    def start(self, name: str, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(_PROGRAM), name, *flags],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, job: subprocess.Popen) -> str:
        output, errors = job.communicate(timeout=400)
        self.assertEqual(job.returncode, 0, msg=errors[-3000:])
        return output

    def test_jobs_and_the_run_make_one_index_together(self):
        alone, shared = self.root / "alone", self.root / "shared"
        self.finish(self.start("run", *_TINY, f"--workdir={shared}", _BEFORE))
        shutil.copytree(shared, alone)
        self.finish(self.start("run", *_TINY, f"--workdir={alone}", "--stages=sketch"))
        jobs = [self.start("sketch_job", f"--workdir={shared}") for _ in range(3)]
        claims = making_folder(shared, "sketch") / "index" / "claims"
        wait_until(lambda: list(claims.glob("*.json")) or jobs[0].poll() is not None)
        self.assertIsNone(jobs[0].poll())
        jobs[0].send_signal(signal.SIGKILL)
        jobs[0].communicate()
        for job in jobs[1:]:
            self.assertIn("the index is complete", self.finish(job))
        self.finish(self.start("run", *_TINY, f"--workdir={shared}", "--stages=sketch"))
        index = "sketch/index"
        self.assertEqual(tree_bytes(shared / index), tree_bytes(alone / index))
        self.assertEqual(verify(SketchStore.open(shared / index)), ())
        job = self.start("sketch_job", f"--workdir={shared}")
        self.assertIn("the index is up to date", self.finish(job))


if __name__ == "__main__":
    absltest.main()
