"""What processes of a job tell each other, and what a command says of a job that cannot be."""

import contextlib
import pathlib
import socket
import tempfile
import threading
from unittest import mock

from absl.testing import absltest, parameterized

from raslik_jax.base.settings import SettingsError
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig


class ProcessesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(processes.join, None)
        self.ends = [self.enter_context(end) for end in socket.socketpair()]
        self.first, self.other = (processes.Job(n, 2, [end]) for n, end in enumerate(self.ends))

    def beside_first(self, act):
        """What the other process makes while this one is the first; it acts in a thread."""
        found = []
        thread = threading.Thread(target=lambda: found.append(act()))
        thread.start()
        return found, thread

    def test_the_others_hear_what_the_first_one_makes(self):
        processes.join(self.first)
        self.assertEqual(processes.from_first(lambda: {"a": [1, None]}), {"a": [1, None]})
        self.assertEqual(processes.alone(lambda: object).__name__, "object")
        self.assertEqual([*processes.each_from_first(iter("ab"))], ["a", "b"])
        processes.join(self.other)
        never = mock.Mock()
        self.assertEqual(processes.from_first(never), {"a": [1, None]})
        self.assertIsNone(processes.alone(never))
        self.assertEqual([*processes.each_from_first(())], ["a", "b"])
        never.assert_not_called()

    def test_the_first_one_is_alone_where_the_others_wait(self):
        processes.join(self.first)
        inner = processes.alone(lambda: (processes.count(), processes.from_first(lambda: 1)))
        self.assertEqual((inner, processes.count()), ((1, 1), 2))
        processes.join(self.other)
        self.assertIsNone(processes.alone(mock.Mock()))
        self.assertTrue(self.other._messages.empty())

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
        self.assertFalse(self.first.fail(ValueError("no such file")))
        self.assertFalse(self.other.fail(ValueError("another one")))
        found, thread = self.beside_first(lambda: self.other.fail(ValueError("no such file")))
        self.assertTrue(thread.is_alive())  # until the first one has said it
        self.ends[0].shutdown(socket.SHUT_RDWR)
        thread.join()
        self.assertEqual(found, [True])

    def test_what_the_first_one_does_not_find_is_said_by_whom_it_befalls(self):
        with mock.patch.object(processes, "_ALIKE_SECONDS", 0):
            self.assertFalse(self.other.fail(ValueError("no such file")))

    def test_who_does_not_fail_ends_after_the_first_one_in_silence(self):
        with mock.patch.object(processes.os, "_exit") as leave:
            self.first.fail(KeyboardInterrupt())
            self.ends[0].shutdown(socket.SHUT_RDWR)
            self.other._watchers[0].join()
        leave.assert_called_once_with(130)

    def test_only_the_first_one_writes_where_it_is_kept(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "unit")
        (folder / "resume").mkdir(parents=True)
        (folder / "kept-3").mkdir()
        (folder / "kept-3" / "model.safetensors").write_text("large")
        (folder / "probes.json").write_text("small")
        processes.join(self.other)

        def write():
            with processes.own_folder(folder, shared=("resume",)) as own:
                names = {str(path.relative_to(own)) for path in own.rglob("*")}
                (own / "lost.txt").write_text("")
                (own / "resume" / "together.txt").write_text("")
            return names, own

        found, thread = self.beside_first(write)
        self.first.meet()
        thread.join()
        names, own = found[0]
        self.assertEqual(names, {"resume", "kept-3", "probes.json"})
        self.assertFalse(own.exists())
        self.assertEqual([*folder.glob("**/*.txt")], [folder / "resume" / "together.txt"])

    @parameterized.parameters((b"", True), (b"\n", False))
    def test_a_connection_that_ends_without_a_farewell_ends_the_process(self, said, is_lost):
        one, two = socket.socketpair()
        with mock.patch.object(processes.Job, "end") as end, contextlib.closing(two):
            job = processes.Job(0, 2, [two])
            one.sendall(said)
            one.close()
            job._watchers[0].join(60)
        self.assertEqual(end.called, is_lost)

    @parameterized.parameters(
        ({"num_processes": 2}, "--num_processes and --process_id need --coordinator=HOST:PORT"),
        ({"coordinator": "auto", "process_id": 1}, "need no number of its own, got .*leave both"),
        ({"coordinator": "host0"}, "--coordinator must be host:port or auto, got 'host0'"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "must be 0 to .* is 1, got 2",
        ),
        ({"coordinator": "a:1", "num_processes": 2}, "--process_id must be 0 to .*, got -1"),
    )
    def test_a_job_that_cannot_be_is_refused(self, given, message):
        with self.assertRaisesRegex(SettingsError, message):
            JobConfig(**given)
        JobConfig(coordinator="a:1", num_processes=2, process_id=0)
        JobConfig(coordinator="auto")


if __name__ == "__main__":
    absltest.main()
