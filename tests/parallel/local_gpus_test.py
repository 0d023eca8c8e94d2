"""The GPUs of a machine: which a process sees, and how several divide them."""

import os
from unittest import mock

from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.parallel import local_gpus
from raslik_jax.parallel.local_gpus import Seen

_FOUR = ("0", "1", "2", "3")


class LookTest(FolderTest):
    @parameterized.parameters(
        (None, ("0", "3", "10")),
        ("", ()),
        ("-1", ()),
        ("2, 0", ("10", "0")),
        ("1,7,0", ("3",)),  # what follows a GPU that is not there is not seen
        ("GPU-8f6,MIG-1c", ("GPU-8f6", "MIG-1c")),
    )
    def test_gpus_are_those_that_may_be_opened_and_are_visible(self, visible, expected):
        folder = self.folder
        for name in ("nvidia10", "nvidia0", "nvidia3", "nvidia4", "nvidiactl", "nvidia-uvm"):
            (folder / name).touch()
        environment = self.enter_context(mock.patch.dict(os.environ))
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        denied = mock.patch.object(os, "access", lambda path, _: path.name != "nvidia4")
        with denied:
            self.assertEqual(local_gpus.numbers(folder), ["0", "3", "10"])
            seen = local_gpus.look(folder)
        self.assertEqual(seen.gpus, expected)
        self.assertEqual(seen.machine, local_gpus.look(folder).machine)


class DivideTest(parameterized.TestCase):
    @parameterized.parameters(
        ([("a", ())] * 3, [(), (), ()]),  # none
        ([("a", _FOUR)], [(0, 1, 2, 3)]),
        ([("a", _FOUR), ("b", _FOUR)], [(0, 1, 2, 3)] * 2),  # one of each machine takes all
        ([("a", _FOUR)] * 2, [(0, 1), (2, 3)]),
        ([("a", _FOUR), ("b", _FOUR[:2])] * 2, [(0, 1), (0,), (2, 3), (1,)]),
        ([("a", _FOUR)] * 4, [(0,), (1,), (2,), (3,)]),
        ([("a", ("3",)), ("a", ("1",))], [(0,), (0,)]),  # a launcher gave each its own
        ([("a", ("GPU-8f6", "GPU-77a"))] * 2, [(0,), (1,)]),
    )
    def test_processes_of_a_machine_divide_what_they_see(self, seen, expected):
        self.assertEqual(local_gpus.divide([Seen(*one) for one in seen]), expected)

    @parameterized.parameters(
        ([("a", _FOUR)] * 3, "must divide its GPUs evenly, got 3 for 4: start another number"),
        ([("a", ("0",))] * 2, "must divide its GPUs evenly, got 2 for 1: "),
        ([("a", _FOUR), ("a", ("3",))], "or different ones, got 0,1,2,3 and 3: correct CUDA"),
    )
    def test_two_that_would_open_one_gpu_are_refused(self, seen, message):
        with self.assertRaisesRegex(ValueError, message):
            local_gpus.divide([Seen(*one) for one in seen])
