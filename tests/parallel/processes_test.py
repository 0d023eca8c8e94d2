"""One job of several processes: the same answers as one, and a clear end when one is lost."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from unittest import mock

import compiling
import jax
import numpy as np
import pytest
import waiting
from absl.testing import parameterized
from index_cases import IndexCase, correlated_rows
from ports import free_address
from snapshots import refused

from raslik_jax.base.settings import SettingsError
from raslik_jax.index import search
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig

WORKER = pathlib.Path(__file__).parents[1] / "fixtures" / "distributed_worker.py"


class Store(dict):
    """The key-value store of a job whose other process has come to every barrier."""

    key_value_set = dict.__setitem__

    def blocking_key_value_get(self, name, timeout_in_ms):
        if name not in self:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")
        return self[name]

    def wait_at_barrier(self, name, timeout_in_ms):
        self[name + "/barrier"] = ""


class JobTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(processes.join, None)
        self.store = Store()
        self.first, self.other = (processes.Job(number, 2, self.store) for number in range(2))

    def test_the_others_hear_what_the_first_one_makes(self):
        processes.join(self.first)
        self.assertEqual(processes.from_first(lambda: {"a": [1, None]}), {"a": [1, None]})
        self.assertEqual(processes.alone(lambda: object).__name__, "object")
        processes.join(self.other)
        never = mock.Mock()
        self.assertEqual(processes.from_first(never), {"a": [1, None]})
        self.assertIsNone(processes.alone(never))
        never.assert_not_called()

    def test_the_first_one_is_alone_where_the_others_wait(self):
        processes.join(self.first)
        inner = processes.alone(lambda: (processes.count(), processes.from_first(lambda: 1)))
        self.assertEqual((inner, processes.count()), ((1, 1), 2))
        self.assertLen(self.store, 1)

    def test_what_a_disk_shows_late_is_waited_for_by_all_but_the_first_one(self):
        value = object()

        def shown_late():
            return mock.Mock(side_effect=[OSError("stale"), ValueError("half of it"), value])

        processes.join(self.first)
        with self.assertRaisesRegex(OSError, "stale"):
            processes.when_visible(shown_late())
        processes.join(self.other)
        self.assertIs(processes.when_visible(shown_late()), value)
        with (
            mock.patch.object(processes, "_VISIBLE_SECONDS", 0),
            self.assertRaisesRegex(OSError, "stale"),
        ):
            processes.when_visible(shown_late())

    def test_an_error_of_the_first_one_ends_the_others_in_silence(self):
        processes.join(self.first)
        with self.assertRaisesRegex(ValueError, "no such file"):
            processes.from_first(mock.Mock(side_effect=ValueError("no such file")))
        processes.join(self.other)
        with self.assertRaises(processes.FirstFailed) as raised:
            processes.from_first(mock.Mock())
        self.assertEqual(raised.exception.code, 1)
        self.assertEqual(self.other.fail(raised.exception), (True, True))

    @parameterized.parameters(
        (ValueError("no"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("what was wanted"), 1),
    )
    def test_a_failed_process_keeps_the_status_of_its_error(self, error, status):
        self.assertEqual(processes.status_of(error), status)

    def test_what_the_first_one_finds_too_it_says_alone(self):
        self.assertEqual(self.first.fail(ValueError("no such file")), (True, False))
        self.assertEqual(self.other.fail(ValueError("no such file")), (True, True))
        self.assertEqual(self.other.fail(ValueError("another one")), (True, False))

    def test_what_the_first_one_does_not_find_is_said_by_whom_it_befalls(self):
        with mock.patch.object(processes, "_ALIKE_MS", 0):
            self.assertEqual(self.other.fail(ValueError("no such file")), (False, False))

    def test_only_the_first_one_writes_where_it_is_kept(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "unit")
        (folder / "resume").mkdir(parents=True)
        (folder / "kept-3").mkdir()
        (folder / "kept-3" / "model.safetensors").write_text("large")
        (folder / "probes.json").write_text("small")
        processes.join(self.other)
        with processes.own_folder(folder, shared=("resume",)) as own:
            names = {str(path.relative_to(own)) for path in own.rglob("*")}
            (own / "lost.txt").write_text("")
            (own / "resume" / "together.txt").write_text("")
        self.assertEqual(names, {"resume", "kept-3", "probes.json"})
        self.assertFalse(own.exists())
        self.assertEqual([*folder.glob("**/*.txt")], [folder / "resume" / "together.txt"])
        processes.join(self.first)
        with processes.own_folder(folder, shared=("resume",)) as own:
            self.assertEqual(own, folder)

    @parameterized.parameters(
        {"num_processes": 2},
        {"coordinator": "auto", "process_id": 1},
        {"coordinator": "host0"},
        {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
        {"coordinator": "a:1", "num_processes": 2},
        {"coordinator": "a:1"},
    )
    def test_a_job_that_cannot_be_is_refused(self, **given):
        with refused(SettingsError):
            JobConfig(**given)
        JobConfig(coordinator="a:1", num_processes=2, process_id=0)
        JobConfig(coordinator="auto")


def start_job(
    task: str, *rest: str, processes: int, devices: int, launcher: Mapping[str, str] | None = None
) -> list[subprocess.Popen]:
    """Starts all processes of a job on a free port, or as a launcher would, by its variables."""
    coordinator = "auto" if launcher else free_address()
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), task, coordinator, str(processes), str(number), *rest],
            env=os.environ
            | compiling.ENVIRONMENT
            | {"PYTHONPATH": str(WORKER.parents[2])}
            | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            | {name: value.format(number) for name, value in (launcher or {}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]  # fmt: skip


def results(job: list[subprocess.Popen]) -> list:
    """What every process of a job printed."""
    found = []
    for process in job:
        output, errors = process.communicate(timeout=400)
        if process.returncode:
            raise AssertionError(f"a process ended with {process.returncode}: {errors[-3000:]}")
        # Gloo says whom it has found, on another thread's time.
        found.append(json.loads(re.sub(r"\[Gloo\].*\n", "", output).splitlines()[-1]))
    return found


@pytest.mark.heavy
class ProcessesTest(IndexCase):
    def test_search_over_two_processes_of_two_devices(self):
        rows = correlated_rows(301, 64, seed=0)
        stores = [self.make(rows, dtype=dtype) for dtype in ("float32", "bfloat16")]
        job = results(
            start_job("search", *(store.path for store in stores), processes=2, devices=2)
        )
        query_QK = np.random.default_rng(1).standard_normal((2, 64))
        for store, *found in zip(stores, *job, strict=True):
            score_N = search.score_store(store, query_QK, center=True)
            for scores in found:
                got_N = [-np.inf if score is None else score for score in scores]
                np.testing.assert_allclose(got_N, score_N, atol=1e-6)

    @parameterized.parameters(
        {
            "SLURM_JOB_ID": str(os.getpid()),  # of which JAX makes a port
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "{}",
            "SLURM_LOCALID": "{}",
        },
        {
            "OMPI_MCA_orte_hnp_uri": f"{os.getpid() << 16}.0;tcp://127.0.0.1:1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "{}",
            "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
        },
    )
    def test_what_slurm_and_open_mpi_say_is_enough(self, **launcher):
        found = results(start_job("count", processes=2, devices=2, launcher=launcher))
        self.assertEqual(found, [[2, 4, 0], [2, 4, 1]])

    def test_training_over_two_processes_of_two_devices(self):
        alone = results(start_job("train", processes=1, devices=1))[0]
        first, second = results(start_job("train", processes=2, devices=2))
        self.assertEqual(first, second)
        np.testing.assert_allclose(first["lora"], alone["lora"], atol=2e-5)
        self.assertAlmostEqual(first["loss"], alone["loss"], places=4)

    @parameterized.parameters(0, 1)
    def test_a_killed_process_ends_the_job_with_a_clear_message(self, victim):
        job = start_job("wait", processes=2, devices=2)
        for process in job:
            lines = iter(process.stdout.readline, "")  # Gloo has its say first
            self.assertIn("summed\n", lines)
        job[victim].send_signal(signal.SIGKILL)
        _, errors = job[1 - victim].communicate(timeout=waiting.SECONDS)
        status = job[1 - victim].returncode
        # JAX aborts a process that misses its coordinator, or is the last to see the loss.
        self.assertIn(status, (processes.LOST_PROCESS_STATUS, -signal.SIGABRT), msg=errors)
        said = (
            f"error: process {1 - victim} of 2 lost another process of its job and ends. The "
            "stored results are whole: start all processes again"
        )
        # JAX's own thread may write its trace in the same moment.
        if status == processes.LOST_PROCESS_STATUS:
            self.assertIn(said, errors)
        else:
            self.assertIn("another task died", errors)
        job[victim].communicate()

    @parameterized.parameters(0, 1)
    def test_a_process_that_fails_says_why_and_ends_the_others(self, failing):
        job = start_job("fail", str(failing), processes=2, devices=1)
        _, errors = job[1 - failing].communicate(timeout=400)
        self.assertIn(
            job[1 - failing].returncode,
            (processes.LOST_PROCESS_STATUS, -signal.SIGABRT),
            msg=errors,
        )
        _, errors = job[failing].communicate(timeout=400)
        self.assertEqual(job[failing].returncode, 1, msg=errors)
        self.assertEqual(errors.splitlines()[-1], f"ValueError: of process {failing}")
        self.assertNotIn("lost another process", errors)

    def test_processes_of_one_machine_divide_its_gpus_or_are_refused_once(self):
        found = results(start_job("gpus", "0", "1", "2", "3", processes=2, devices=1))
        self.assertEqual(found, ["0,1", "2,3"])
        job = start_job("gpus", "0", processes=2, devices=1)
        (_, first), (_, other) = (process.communicate(timeout=400) for process in job)
        self.assertEqual([process.returncode for process in job], [1, 1], msg=first + other)
        self.assertIn("must divide its GPUs evenly, got 2 for 1: start another", first)
        self.assertNotIn("must divide", other)

    def test_what_all_find_the_first_one_says(self):
        job = start_job("fail", "0", "1", processes=2, devices=1)
        (_, first), (_, other) = (process.communicate(timeout=400) for process in job)
        self.assertEqual([process.returncode for process in job], [1, 1], msg=first + other)
        self.assertEqual(first.splitlines()[-1], "ValueError: of process 0, 1")
        for word in ("ValueError", "lost another process", "stack trace"):
            self.assertNotIn(word, other)
