"""Kills and a full disk leave no trace in an index."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from folders import FolderTest
from index_cases import tree_bytes

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


@pytest.mark.heavy
class ProcessesTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root, self.path = str(self.folder), f"{self.folder}/index"

    SHAPE = (600, 256, 20, "bfloat16")

    def undisturbed(self) -> dict[str, bytes]:
        finish(start(f"{self.root}/undisturbed", *self.SHAPE))
        return tree_bytes(f"{self.root}/undisturbed")

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
        shape = (30, 64, 20, "bfloat16")
        finish(start(f"{self.root}/undisturbed", *shape))
        expected = tree_bytes(f"{self.root}/undisturbed")
        # 7 files at creation and 5 a chunk; past the last write the job just ends.
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
        self.assertEqual(number, 7 + 2 * 5 + 1)

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
            self.skipTest("namespaces are forbidden here")
        self.assertEqual(done.returncode, 0, msg=done.stderr)
        self.assertRegex(
            done.stderr, "error: No space left writing .* what was committed is safe; free"
        )
        self.assertEqual(tree_bytes(self.path), expected)
