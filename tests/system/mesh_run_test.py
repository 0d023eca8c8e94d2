"""A run of two processes gives what one device gives: sets, answers, rates, adapters, sketches.

So does the quickstart, on eight devices too (`pytest -m study`).

One of the two processes of the run is killed at a random moment of a stage, and it goes on from
there, with the weights split over the devices: each process reads its own part of them. With
several seeds it is killed once for each:
RASLIK_KILL_SEED=6,3,5 pytest -m heavy tests/system/mesh_run_test.py
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping

import numpy as np
import pytest
import waiting
from absl.testing import absltest, parameterized
from ports import free_address
from safetensors.numpy import load_file
from tiny import FLAGS, finished_run, run_command, start_script

from raslik_jax.index.store import SketchStore
from raslik_jax.parallel.processes import LOST_PROCESS_STATUS
from raslik_jax.run import manifests

# Of sketches of length one, where float32 has steps of 6e-8. Measured: 2e-7, and 9e-7 of weights.
# An expected share of false finds (q) divides small numbers that scores decide: 2e-5.
_SKETCH_ATOL, _ADAPTER_ATOL, _CHANCE_ATOL = 2e-6, 2e-5, 1e-4
# Programs as users compile them: its index would run longer without XLA's optimizing.
_AS_USERS = {"XLA_FLAGS": ""}
# A part of the run that goes through all kinds of work on the devices.
_PART = ("--retrieve.strategies=random,raslik", "--unlearn.algorithms=ga_klr")
_STAGES = "corpus,backbone,finetune,references,sketch,retrieve,unlearn,generate,evaluate"
# Each decides which unit is interrupted, which process is killed, and when.
_SEEDS = [*map(int, os.environ.get("RASLIK_KILL_SEED", "1").split(","))]
# A unit of every stage, in their order, and within how many seconds; the last must not be over.
_KILLED_IN = {
    "corpus": 0.3,
    "backbone": 2,
    "finetune": 2,
    "references/evaluation": 1,
    "sketch": 2,
    "retrieve/queries": 1,
    "unlearn/raslik-ga_klr": 2,
    "generate/raslik-ga_klr": 0.2,
    "evaluate": 0.2,
}


def _lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_two(
    command: str, *flags: str, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen]:
    """Starts both processes of a command, of four devices each."""
    coordinator = free_address()
    return [
        start_script(
            "tests/fixtures/program.py",
            *(command, *flags),
            *(f"--coordinator={coordinator}", "--num_processes=2", f"--process_id={number}"),
            env={"JAX_NUM_CPU_DEVICES": "4", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]


def finish(job: list[subprocess.Popen]) -> list[str]:
    """Waits for both processes; what each has printed."""
    ended = [process.communicate() for process in job]
    if any(process.returncode for process in job):
        raise AssertionError(ended)
    return [stdout for stdout, _ in ended]


class SameResults:
    """Holds the results of a run, `many`, to those of one device, `one`."""

    one: pathlib.Path
    many: pathlib.Path

    def pairs(self, pattern):
        """The files of both runs, by name."""
        names = sorted(str(path.relative_to(self.many)) for path in self.many.glob(pattern))
        self.assertNotEmpty(names)
        return [(name, self.one / name, self.many / name) for name in names]

    def check_sets(self):
        for kind in ("forget", "retain"):
            for name, one, many in self.pairs(f"retrieve/*/{kind}.jsonl"):
                ids = [[row["id"] for row in _lines(path)] for path in (one, many)]
                self.assertEqual(*ids, name)

    def check_answers(self):
        names = ("references/retrieval", "references/evaluation", "generate/*")
        for name in names:
            for found, one, many in self.pairs(f"{name}/*.jsonl"):
                said = [
                    [(row["id"], row["output"]) for row in _lines(path)] for path in (one, many)
                ]
                self.assertEqual(*said, found)

    def check_weights(self):
        for name, one, many in self.pairs("**/*.safetensors"):
            left, right = load_file(one), load_file(many)
            self.assertEqual(left.keys(), right.keys())
            for leaf, values in left.items():
                np.testing.assert_allclose(
                    right[leaf], values, rtol=0, atol=_ADAPTER_ATOL, err_msg=f"{name} {leaf}"
                )

    def check_sketches(self):
        one, many = (SketchStore.open(root / "sketch" / "index") for root in (self.one, self.many))
        self.assertEqual(one.ids, many.ids)
        for chunk in range(one.num_chunks):
            left, right = (store.read_array("rows", chunk) for store in (one, many))
            np.testing.assert_allclose(right, left, rtol=0, atol=_SKETCH_ATOL)
        for name, left, right in self.pairs("retrieve/*/*.npy"):
            left_N, right_N = np.load(left), np.load(right)
            atol = _CHANCE_ATOL if "chance" in name else _SKETCH_ATOL
            if name.endswith("chance/chance.npy"):
                # The prompts that score a row as high are counted: those that score it alike, to
                # rounding, may count in one run and not in the other.
                tied_N, prompts_N = self.ties(), left_N[:, 1]
                self.assertLess(tied_N.sum(), 0.05 * len(tied_N))
                for column, most_N in ((0, tied_N), (2, tied_N / (1 + prompts_N))):
                    off_N = np.abs(right_N[:, column] - left_N[:, column])
                    self.assertTrue(np.all(off_N <= most_N + 1e-9), name)
                left_N, right_N = left_N[:, [1, 3]], right_N[:, [1, 3]]
            np.testing.assert_allclose(right_N, left_N, rtol=0, atol=atol, err_msg=name)

    def ties(self):
        """How many unrelated prompts score each row as the traced one does, to rounding."""
        retrieved = self.one / "retrieve"
        length = json.loads((retrieved / "chance/summary.json").read_text())["length"]
        score_N = np.load(retrieved / "influence/influence.npy") / length
        null_NM = np.load(retrieved / "null/scores.npy")
        return (np.abs(null_NM - score_N[:, None]) <= 2 * _SKETCH_ATOL).sum(axis=1)

    def check_rates(self):
        one, many = (
            json.loads((root / "evaluate" / "metrics.json").read_text())
            for root in (self.one, self.many)
        )

        def flat(value, prefix=""):
            if isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                return {k: v for name, x in items for k, v in flat(x, f"{prefix}/{name}").items()}
            return {prefix: value}

        parts = ("finetuned", "backbone", "retrieval", "corpus")
        left, right = (flat({part: of[part] for part in parts}) for of in (one, many))
        # Others of a method's numbers compare it with all methods of its run.
        measured = {"forget", "retain", "non_sf_target", "non_sf_normal", "perplexity"}
        keys = ("strategy", "algorithm", "epoch")
        methods = {tuple(method[key] for key in keys): method for method in one["methods"]}
        for method in many["methods"]:
            name = tuple(method[key] for key in keys)
            rates = measured & method.keys()  # the quickstart leaves out perplexities
            self.assertContainsSubset(measured - {"perplexity"}, rates)
            left |= flat({rate: methods[name][rate] for rate in rates}, f"/{name}")
            right |= flat({rate: method[rate] for rate in rates}, f"/{name}")
        for name, value in right.items():
            if isinstance(value, float):
                np.testing.assert_allclose(left[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
            else:
                self.assertEqual(left[name], value, name)


@pytest.mark.heavy
class MeshRunTest(SameResults, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.one = finished_run()
        cls.many = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "many"
        kills = [cls.draw_kill(seed) for seed in _SEEDS]
        cls.ends = [cls.kill(*kill) for kill in sorted(kills)]
        cls.printed = finish(cls.start("--mesh.base=sharded"))

    @staticmethod
    def draw_kill(seed):
        """Draws what a kill interrupts, by its place in the run, who is killed, and when."""
        draw = random.Random(seed)
        unit, victim = draw.choice([*_KILLED_IN]), draw.randrange(2)
        return [*_KILLED_IN].index(unit), unit, victim, draw.uniform(0, _KILLED_IN[unit])

    @classmethod
    def kill(cls, _, unit, victim, seconds):
        """Starts the run and kills a process; returns the other's status, words, and the moment."""
        job = cls.start()
        while not (cls.many / ".making" / unit).is_dir() and job[victim].poll() is None:
            time.sleep(0.02)
        time.sleep(seconds)
        job[victim].kill()
        _, told = job[1 - victim].communicate(timeout=waiting.SECONDS)
        job[victim].communicate()
        when = f"process {victim} killed {seconds:.2f} s into {unit}"
        print(f"{when}: status {job[1 - victim].returncode}")
        return job[1 - victim].returncode, told, when

    @classmethod
    def start(cls, *more):
        """Starts both processes of the run."""
        return start_two(
            "run", *FLAGS, *_PART, f"--workdir={cls.many}", f"--stages={_STAGES}", *more
        )

    def test_the_loss_of_a_process_ends_the_job_with_a_reason(self):
        said = {
            LOST_PROCESS_STATUS: "lost another process of its job and ends. The stored results are",
            -signal.SIGABRT: "another task died",  # JAX was first
            -signal.SIGSEGV: "another task died",  # its abort met a thread that was running
        }
        for status, told, when in self.ends:
            self.assertIn(status, said, f"{when}: {told}")
            self.assertIn(said[status], told)
            self.assertNotIn("Traceback", told)

    def test_the_first_process_alone_speaks_and_writes(self):
        self.assertRegex(self.printed[0], r"\[(\d+)/\1\] evaluate: done in")
        self.assertNotIn("evaluate", self.printed[1])
        left = {str(path.relative_to(self.many)) for path in self.many.rglob("*.partial*")}
        self.assertEmpty(left)
        self.assertEmpty(manifests.verify(self.many))

    @parameterized.parameters("sets", "answers", "weights", "sketches", "rates")
    def test_these_results_are_those_of_one_device(self, name):
        getattr(self, f"check_{name}")()


@pytest.mark.study
class QuickstartTest(SameResults, absltest.TestCase):
    """The quickstart at its own size: some six processor minutes, so in one test, of one worker."""

    def test_eight_devices_and_two_processes_give_what_one_device_gives(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.one, eight, two = (folder / name for name in ("one", "eight", "two"))
        for root, devices in ((self.one, 1), (eight, 8)):
            env = {"JAX_NUM_CPU_DEVICES": str(devices), **_AS_USERS}
            done = run_command("quickstart", f"--workdir={root}", env=env)
            self.assertEqual(done.returncode, 0, done.stderr)
        finish(start_two("quickstart", f"--workdir={two}", "--mesh.base=sharded", env=_AS_USERS))
        for self.many in (eight, two):
            with self.subTest(self.many.name):
                self.check_sets()
                self.check_answers()
                self.check_weights()
                self.check_sketches()
                self.check_rates()
