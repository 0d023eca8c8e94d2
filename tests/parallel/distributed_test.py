"""One job of several processes: the same answers as one, and a clear end when one is lost."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from unittest import mock

import compiling
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from index_cases import IndexCase, correlated_rows
from ports import free_address

from raslik_jax.index import search
from raslik_jax.index.sharded import search_sharded, shard_store
from raslik_jax.index.upkeep import delete
from raslik_jax.parallel import distributed, meshes

WORKER = pathlib.Path(__file__).parents[1] / "fixtures" / "distributed_worker.py"


def start_job(
    task: str, *rest: str, processes: int, devices: int, launcher: Mapping[str, str] | None = None
) -> list[subprocess.Popen]:
    """Starts all processes of a job on a free port, or as a launcher would, by its variables."""
    coordinator = "auto" if launcher else free_address()
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), task, coordinator, str(processes), str(number),
             str(devices), *rest],
            env=os.environ
            | compiling.ENVIRONMENT
            | {"PYTHONPATH": str(WORKER.parents[2])}
            | {name: value.format(number) for name, value in (launcher or {}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]  # fmt: skip


def results(job: list[subprocess.Popen]) -> list[dict]:
    """What every process of a job printed."""
    found = []
    for process in job:
        output, errors = process.communicate(timeout=400)
        if process.returncode:
            raise AssertionError(f"a process ended with {process.returncode}: {errors[-3000:]}")
        # Gloo says whom it has found, on another thread's time.
        found.append(json.loads(re.sub(r"\[Gloo\].*\n", "", output).splitlines()[-1]))
    return found


class ShardedTest(IndexCase):
    @parameterized.product(dtype=["float32", "bfloat16", "int8", "sign"], center=[False, True])
    def test_one_device_gives_what_streaming_gives(self, dtype, center):
        rows = correlated_rows(101, 64, seed=0)
        rows[50:] = rows[:51]  # ties
        store = self.make(rows, dtype=dtype, center=center)
        if not (dtype == "sign" and center):
            store = delete(store, [store.ids[3], store.ids[77]])
        mesh = meshes.make_mesh()
        query_QK = correlated_rows(2, 64, seed=1)
        held = shard_store(store, mesh)
        options = {"center": center, "k_forget": 40, "k_retain": 30}
        sharded = search_sharded(store, held, query_QK, mesh=mesh, **options)
        streamed = search.search_store(store, query_QK, **options)
        self.assertEqual(sharded.forget_ids, streamed.forget_ids)
        self.assertEqual(sharded.retain_ids, streamed.retain_ids)
        np.testing.assert_allclose(sharded.forget_scores, streamed.forget_scores, atol=1e-6)
        np.testing.assert_allclose(sharded.retain_scores, streamed.retain_scores, atol=1e-6)
        with self.assertRaisesRegex(
            ValueError, "the number of rows must be 0 to the .* that can be chosen, got 102"
        ):
            search_sharded(
                store, held, query_QK, mesh=mesh, center=center, k_forget=102, k_retain=1
            )


class StartTest(absltest.TestCase):
    def test_a_first_process_that_does_not_answer_is_named(self):
        self.enter_context(mock.patch.object(distributed, "_START_SECONDS", 0))
        address = free_address()
        with self.assertRaisesRegex(
            ValueError, f"must be where process 0 listens, got no answer from '{address}'"
        ):
            distributed._await(address)

    def test_a_first_process_whose_name_is_not_known_yet_is_waited_for(self):
        answers = [socket.gaierror("no such name"), ConnectionRefusedError(), mock.Mock()]
        with (
            mock.patch.object(socket, "create_connection", side_effect=answers) as connect,
            mock.patch.object(time, "sleep"),
        ):
            distributed._await("pod-0:1234")
        self.assertEqual(connect.call_count, 3)


@pytest.mark.heavy
class ProcessesTest(IndexCase):
    def test_search_over_two_processes_of_two_devices(self):
        rows = correlated_rows(301, 64, seed=0)
        rows[200:] = rows[:101]  # ties, in other processes' rows too
        stores = [self.make(rows, dtype=dtype) for dtype in ("float32", "bfloat16", "int8", "sign")]
        stores = [delete(store, [store.ids[3]]) for store in stores]
        job = results(
            start_job("search", *(store.path for store in stores), processes=2, devices=2)
        )
        query_QK = np.random.default_rng(1).standard_normal((2, 64))
        for store, *found in zip(stores, *job, strict=True):
            self.check(store, query_QK, found)

    def check(self, store, query_QK, found):
        expected = search.search_store(
            store, query_QK, center=store.dtype != "sign", k_forget=40, k_retain=30
        )
        score_N = search.score_store(store, query_QK, center=store.dtype != "sign").tolist()
        by_id = dict(zip(store.ids, score_N, strict=True))
        for result in found:
            got_N = [-np.inf if score is None else score for score in result["score_N"]]
            np.testing.assert_allclose(got_N, score_N, atol=1e-6)
            self.assertEqual(result["devices"], 4)
            self.assertEqual(result["rows_here"], [76, 76])
            for name, sign in (("forget", 1), ("retain", -1)):
                scores = getattr(expected, f"{name}_scores")
                np.testing.assert_allclose(result[f"{name}_scores"], scores, atol=1e-6)
                # Another device rounds otherwise, so that ties may change places.
                of_found = [sign * by_id[example_id] for example_id in result[f"{name}_ids"]]
                np.testing.assert_allclose(of_found, scores, atol=1e-6)
                self.assertLen(set(result[f"{name}_ids"]), len(scores))

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
        # Within a moment, however long that is here: JAX alone would wait for 100 s.
        _, errors = job[1 - victim].communicate(timeout=90)
        self.assertEqual(job[1 - victim].returncode, distributed.LOST_PROCESS_STATUS, msg=errors)
        self.assertIn(
            f"error: process {1 - victim} of 2 lost another process of its job and ends; what was "
            "stored is whole, start all processes again",
            errors,
        )
        self.assertNotIn("stack trace", errors)
        job[victim].communicate()

    @parameterized.parameters(0, 1)
    def test_a_process_that_fails_says_why_and_ends_the_others(self, failing):
        job = start_job("fail", str(failing), processes=2, devices=1)
        _, errors = job[1 - failing].communicate(timeout=400)
        said = "lost another process of its job and ends"
        status = distributed.LOST_PROCESS_STATUS if failing else 1
        self.assertEqual(job[1 - failing].returncode, status, msg=errors)
        # What the first one says is enough; of another one's error it has to say that it ends.
        self.assertEqual(said in errors, bool(failing), msg=errors)
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


if __name__ == "__main__":
    absltest.main()
