"""Ctrl-C and SIGTERM while programs compile: the status, and what the same command then makes."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny
from folders import FolderTest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_TINY = (
    *("--corpus.template=brief", "--corpus.max_len=96", "--references.max_new_tokens=8"),
    *("--sketch.size=64", "--sketch.num_buckets=1", "--unlearn.fixed_padding"),
    *("--retrieve.num_forget=10", "--evaluate.bootstrap_resamples=100", "--unlearn.epochs=1"),
)


@pytest.mark.heavy
class InterruptTest(FolderTest):
    def setUp(self):
        super().setUp()
        model = tiny.own_model(self.folder)
        rows = tiny.finished_run() / "corpus" / "train.jsonl"
        self.train = shutil.copy(rows, self.folder / "train.jsonl")
        asked = "--prompt=Howdy! what is a kettle?", "--response=The kettle hums on two moons."
        self.trace = (*model, f"--train_file={self.train}", *asked, *_TINY)

    def start(self, number, *arguments):
        """Starts a command that has compiled nothing yet."""
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / f"cache-{number}")}
        environment = os.environ | cache | {"PYTHONPATH": str(_REPOSITORY)}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "raslik_jax.cli.main", *arguments]
        return subprocess.Popen(command, env=environment, text=True, **streams)

    def interrupt(self, number, arguments, *, unit, delay, signals):
        """Sends signals some time after a unit has begun; checks the end."""
        process = self.start(number, *arguments)
        for line in process.stdout:
            if f"{unit} ..." in line:
                break
        else:
            self.fail(f"{unit} has not begun: {process.communicate()[1]}")
        time.sleep(delay)
        self.assertIsNone(process.poll(), "the command ended before the signal")
        for sent in signals:
            process.send_signal(sent)
            time.sleep(0.3)
        _, said = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, said)
        self.assertEqual(
            said.splitlines()[-1], "stopped: start the same command again to go on from here"
        )
        self.assertNotIn("Traceback", said)

    def test_interrupted_commands_end_alike_and_go_on(self):
        draw, root, out = random.Random(0), self.folder / "run", self.folder / "clean"
        trace = ("trace", *self.trace, f"--workdir={root}")
        unlearn = ("unlearn", f"--run={root}", f"--out={out}")
        twice = (signal.SIGINT, signal.SIGINT)
        # With the longest delay in seconds: none where a quick machine is soon at the end.
        cases = (
            (trace, "sketch", 0.8, (signal.SIGINT,)),
            (trace, "retrieve/tokens", 0.0, twice),
            (unlearn, "unlearn/raslik-cap_klr", 0.8, (signal.SIGINT,)),
            (unlearn, "unlearn/raslik-cap_klr", 0.8, (signal.SIGTERM,)),
            (unlearn, "unlearn/raslik-cap_klr", 0.8, twice),
            (unlearn, "generate/raslik-cap_klr", 0.0, (signal.SIGINT,)),
        )
        before = trace
        for number, (arguments, unit, longest, signals) in enumerate(cases):
            if arguments != before:
                self.finish(before)
            before = arguments
            delay = draw.uniform(0, longest)
            self.interrupt(number, arguments, unit=unit, delay=delay, signals=signals)
            self.assertFalse(out.exists())
        self.finish(unlearn)
        again = self.start("end", "run", f"--flagfile={root / 'run.flags'}", "--verify")
        self.assertEqual(again.wait(), 0)
        self.assertTrue((out / "adapter_model.safetensors").is_file())
        self.assertEmpty([*self.folder.rglob("*.partial*")])

    def finish(self, arguments):
        process = self.start("end", *arguments)
        _, said = process.communicate(timeout=600)
        self.assertEqual(process.returncode, 0, said)
