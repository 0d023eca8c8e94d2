"""Jobs that share an index: one maker a chunk, dead claims expire, kills leave no trace."""

import collections
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized
from index_cases import tree_bytes
from index_worker import sketches
from waiting import wait_until

from raslik_jax.index.claims import Claims, claim_file
from raslik_jax.index.store import SketchStore
from raslik_jax.index.upkeep import verify

WORKER = pathlib.Path(__file__).parents[1] / "fixtures" / "index_worker.py"


def start(path: str, *shape: object, **options: object) -> subprocess.Popen:
    """Starts one job on an index of (num_rows, size, chunk_rows, dtype)."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[2])}
    return subprocess.Popen(
        [sys.executable, str(WORKER), path, *map(str, shape), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    """Waits for a job that should end well; its output."""
    output, errors = process.communicate(timeout=400)
    if process.returncode:
        raise AssertionError(f"job ended with {process.returncode}: {errors}")
    return output


class TemporaryFolder(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        self.path = f"{self.root}/index"


class ClaimsTest(TemporaryFolder):
    def setUp(self):
        super().setUp()
        self.now = 0.0
        self.store = SketchStore.create(
            self.path, identity={}, ids=[f"r{n}" for n in range(12)], size=8, chunk_rows=4
        )

    def claims(self, worker: str, store: SketchStore | None = None) -> Claims:
        return Claims(
            store or SketchStore.open(self.path),
            worker=worker, heartbeat_s=1.0, expiry_s=5.0, clock=lambda: self.now,
        )  # fmt: skip

    def write(self, value: bytes) -> None:
        self.store.place.write(claim_file(0), value)

    def test_a_chunk_has_one_maker(self):
        first, second = self.claims("first"), self.claims("second")
        taken = [claims.take().chunk for claims in (first, second, first)]
        self.assertEqual(taken, [0, 1, 2])
        self.assertIsNone(first.take())
        self.assertIsNone(second.take())

    def test_commits_are_listed_before_the_first_claim_and_after_the_last(self):
        store = SketchStore.open(self.path)
        with mock.patch.object(store.place, "names", wraps=store.place.names) as names:
            made = []
            for chunk in self.claims("one", store).chunks():
                rows_CK = np.eye(4, 8, dtype=np.float32)
                store.write_chunk(chunk, rows_CK, np.ones(4, np.float32))
                made.append(chunk)
        self.assertEqual(made, [0, 1, 2])
        self.assertEqual(names.call_count, 2)

    def test_a_claim_without_heartbeats_expires(self):
        dead, alive = self.claims("dead"), self.claims("alive")
        for chunk in range(3):
            self.assertEqual(dead.take().chunk, chunk)
        self.assertIsNone(alive.take())  # first seen here
        self.now = 5
        self.assertIsNone(alive.take())
        self.now = 5.1
        self.assertEqual(alive.take().chunk, 0)
        # The dead job's clock does not matter, nor that of a third who has not watched.
        self.assertIsNone(self.claims("third").take())

    def test_a_dead_process_of_this_host_loses_its_claim_at_once(self):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        claim = json.loads(self.claims("w")._value(0, 0)) | {"pid": gone.pid}
        for host, expected in ((claim["host"], 0), ("elsewhere", 1)):
            self.write(json.dumps(claim | {"host": host}).encode())
            self.assertEqual(self.claims("other").take().chunk, expected)

    def test_a_claim_on_an_index_of_other_settings_is_void(self):
        claim = json.loads(self.claims("w")._value(0, 0))
        self.write(json.dumps(claim | {"index": "another"}).encode())
        self.assertEqual(self.claims("other").take().chunk, 0)

    @parameterized.parameters(b"", b"{}", b"[1]", b'{"host": 3}', b"\xff", b"[" * 9999)
    def test_a_claim_that_cannot_be_read_expires_like_any_other(self, value):
        self.write(value)
        other = self.claims("other")
        self.assertEqual([other.take().chunk for _ in range(2)], [1, 2])
        self.now = 5.1
        self.assertEqual(other.take().chunk, 0)

    def test_a_heartbeat_keeps_a_claim(self):
        worker, other = self.claims("worker"), self.claims("other")
        claims = [worker.take() for _ in range(3)]
        self.assertIsNone(other.take())
        beat = worker._value(0, 1)
        self.assertTrue(self.store.place.write(claim_file(0), beat, if_equal=claims[0].generation))
        self.now = 6
        self.assertEqual(other.take().chunk, 1)  # 0 has changed since it was seen

    def test_the_heart_beats_and_stops(self):
        claims = Claims(self.store, worker="w", heartbeat_s=0.02, expiry_s=5.0)
        claim = claims.take()
        with claims.beating(claim):
            wait_until(lambda: self.store.place.look(claim_file(0)).generation != claim.generation)
            self.assertIn(b'"worker": "w"', self.store.place.read(claim_file(0)))
        self.assertIsNone(self.store.place.read(claim_file(0)))

    def test_a_job_that_lost_its_claim_leaves_the_new_one_alone(self):
        claims = Claims(self.store, worker="slow", heartbeat_s=0.02, expiry_s=5.0)
        claim = claims.take()
        self.write(b"the other's")
        with claims.beating(claim):  # the first beat finds the other's claim, and is the last
            wait_until(lambda: all("claim" not in t.name for t in threading.enumerate()))
        self.assertEqual(self.store.place.read(claim_file(0)), b"the other's")

    def test_committed_chunks_are_not_claimed(self):
        self.store.write_chunk(0, *sketches(slice(0, 4), 8))
        self.assertEqual(self.claims("w").take().chunk, 1)

    def test_a_job_that_fails_frees_its_chunk(self):
        chunks = Claims(self.store, worker="w", heartbeat_s=1.0).chunks()
        self.assertEqual(next(chunks), 0)
        chunks.close()
        self.assertIsNone(self.store.place.read(claim_file(0)))

    def test_one_job_makes_all_and_leaves_no_trace(self):
        for chunk in Claims(self.store, worker="w").chunks():
            span = self.store.chunk_positions(chunk)
            self.store.write_chunk(chunk, *sketches(span, 8))
        self.store.finish()
        self.assertFalse([name for name in tree_bytes(self.path) if "claims" in name])
        self.assertEqual(verify(self.store), ())

    def test_a_job_leaves_nothing_where_the_index_was_moved_away(self):
        """A finished index takes its place by a rename, while other jobs still look for work."""
        chunks = Claims(self.store, worker="w").chunks()
        self.assertEqual(next(chunks), 0)
        os.rename(self.path, f"{self.root}/finished")
        with self.assertRaisesRegex(ValueError, "was replaced or removed"):
            self.store.write_chunk(0, *sketches(slice(0, 4), 8))
        with self.assertRaisesRegex(ValueError, "was replaced or removed"):
            next(chunks)
        self.assertFalse(os.path.exists(self.path))

    def test_refuses_a_claim_that_dies_between_heartbeats(self):
        with self.assertRaisesRegex(ValueError, "must be longer than heartbeat_s"):
            Claims(self.store, worker="w", heartbeat_s=60.0, expiry_s=60.0)


class StoppedTest(TemporaryFolder):
    def test_a_process_stopped_in_a_write_holds_up_no_other_and_ends_well(self):
        """Neither the same chunk nor the end of the index waits for it."""
        folder, enough = (
            pathlib.Path(self.path, "rows", "c", "0"),
            pathlib.Path(self.root, "enough"),
        )
        job = start(self.path, 128, 32768, 128, "float32", again=enough)
        self.addCleanup(job.kill)
        wait_until(lambda: folder.is_dir() or job.poll() is not None)
        while not list(folder.glob("*.__lock")):  # stopped between two writes: again
            job.send_signal(signal.SIGCONT)
            time.sleep(0.001)
            job.send_signal(signal.SIGSTOP)
            # Not before all of its threads have stopped.
            ended = os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self.assertEqual(ended.si_code, os.CLD_STOPPED)
        store = SketchStore.open(self.path)
        other = threading.Thread(
            target=lambda: (store.write_chunk(0, *sketches(slice(0, 128), 32768)), store.finish()),
            daemon=True,
        )
        other.start()
        other.join(timeout=100)
        self.assertFalse(other.is_alive())
        enough.touch()
        job.send_signal(signal.SIGCONT)
        self.assertEqual(finish(job).split()[-1], "finished")
        self.assertEqual(verify(SketchStore.open(self.path)), ())
        self.assertFalse(list(folder.glob("*.__lock")))


@pytest.mark.heavy
class ProcessesTest(TemporaryFolder):
    SHAPE = (600, 256, 20, "bfloat16")

    def undisturbed(self) -> dict[str, bytes]:
        finish(start(f"{self.root}/undisturbed", *self.SHAPE))
        return tree_bytes(f"{self.root}/undisturbed")

    def shared(self, expiry_s: float, hosts: bool) -> collections.Counter[str]:
        """Runs four jobs, of which one is killed; returns what the others made beside its chunk."""
        expected = self.undisturbed()

        def join(number: int, **options: object) -> subprocess.Popen:
            host = {"host": f"host-{number}"} if hosts else {}
            name = f"job-{number}"
            return start(
                self.path, *self.SHAPE, claim=name, delay=0.1, expiry=expiry_s, **host, **options
            )

        victim = join(0, hold=3)
        last = [victim.stdout.readline().strip() for _ in range(3)][-1]
        store = SketchStore.open(self.path)
        self.assertLen(store.missing_chunks(), 30 - 2)
        jobs = [join(number) for number in (1, 2, 3)]
        wait_until(lambda: len(store.missing_chunks()) < 30 - 2)
        victim.send_signal(signal.SIGKILL)  # with a claim on its third chunk, beside the others
        victim.communicate()
        made = collections.Counter(chunk for job in jobs for chunk in finish(job).split())
        self.assertEqual(made.pop("finished"), 3)
        self.assertGreater(made.pop(last), 0)  # its unfinished chunk went to another
        self.assertLen(made, 30 - 3)
        self.assertEqual(tree_bytes(self.path), expected)
        self.assertEqual(verify(SketchStore.open(self.path)), ())
        return made

    def test_a_killed_job_of_the_same_host_is_seen_to_be_gone(self):
        made = self.shared(expiry_s=600, hosts=False)  # so no claim expires
        self.assertEqual(set(made.values()), {1})

    def test_the_claim_of_a_job_killed_on_another_host_expires(self):
        # A busy machine may hold up a job for longer than this, whose chunk is then made twice.
        made = self.shared(expiry_s=2, hosts=True)
        self.assertLess(made.total(), 2 * len(made))

    def test_killed_at_twenty_random_moments(self):
        expected = self.undisturbed()
        random = np.random.default_rng(0)
        kills = 0
        while kills < 20:
            # With a delay per chunk, so that twenty kills find it at work.
            job = start(self.path, *self.SHAPE, delay=0.03)
            job.stdout.readline()
            time.sleep(random.uniform(0, 0.08))
            job.kill()
            job.communicate()
            self.assertIn(job.returncode, (0, -signal.SIGKILL))
            kills += job.returncode != 0
            if job.returncode == 0:  # it had made all that was left: from the beginning
                self.assertEqual(tree_bytes(self.path), expected)
                shutil.rmtree(self.path)
        finish(start(self.path, *self.SHAPE))
        self.assertEqual(tree_bytes(self.path), expected)

    def test_killed_at_every_step_of_creation_and_commit(self):
        shape = (30, 64, 20, "int8")  # the dtype with the most files
        finish(start(f"{self.root}/undisturbed", *shape))
        expected = tree_bytes(f"{self.root}/undisturbed")
        # 8 files at creation and 6 a chunk; past the last write the job just ends.
        number, ended = 0, False
        while not ended:
            number += 1
            for moment in ("die_before", "die_after"):
                shutil.rmtree(self.path, ignore_errors=True)
                job = start(self.path, *shape, **{moment: number})
                job.communicate()
                ended = job.returncode == 0
                if not ended:
                    self.assertEqual(job.returncode, -signal.SIGKILL)
                    finish(start(self.path, *shape))
                self.assertEqual(tree_bytes(self.path), expected, msg=f"{moment} {number}")
        self.assertEqual(number, 8 + 2 * 6 + 1)

    def test_a_full_disk_ends_with_a_clear_error_and_the_next_start_goes_on(self):
        expected = self.undisturbed()
        worker = [sys.executable, str(WORKER), f"{self.root}/disk/index", *map(str, self.SHAPE)]
        os.mkdir(f"{self.root}/disk")
        # A disk of 300 kB in a namespace of our own: no privilege, no trace outside of it.
        script = """
            mount -t tmpfs -o size=300k tmpfs "$DISK" || exit 77
            "$@"; test $? = 1 || exit 2
            "$@"; test $? = 1 || exit 3
            mount -o remount,size=30m "$DISK" && "$@" && cp -r "$DISK/index" "$COPY"
        """
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *worker],
            env=os.environ
            | {
                "PYTHONPATH": str(WORKER.parents[2]),
                "DISK": f"{self.root}/disk",
                "COPY": self.path,
            },
            capture_output=True,
            text=True,
            timeout=400,
        )
        if done.returncode in (1, 77):
            # Namespaces are forbidden here; the default tests inject the same error.
            self.assertRegex(done.stderr, "unshare|mount")
            return
        self.assertEqual(done.returncode, 0, msg=done.stderr)
        self.assertRegex(
            done.stderr, "error: No space left writing .* what was committed is safe; free"
        )
        self.assertEqual(tree_bytes(self.path), expected)


if __name__ == "__main__":
    absltest.main()
