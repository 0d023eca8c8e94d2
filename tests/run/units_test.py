"""Units of work: run once, again when something changed, and after a kill at any step."""

import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
from unittest import mock

from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.base import files
from raslik_jax.config import Config, CorpusConfig
from raslik_jax.run import manifests, written
from raslik_jax.run import units as units_lib


class Killed(BaseException):
    """Ends the process where it is raised: nothing in the package catches it."""


class UnitsCase(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = self.folder / "run"
        self.root.mkdir()
        self.source = self.folder / "train.txt"
        self.source.write_text("rows")
        self.ran: list[str] = []
        self.lines: list[str] = []

    def units(self, *, rows="rows", size=1, fail_in="", error=KeyboardInterrupt):
        def make(name, **outputs):
            def run(folder):
                self.ran.append(name)
                for output, text in outputs.items():
                    (folder / f"{output}.txt").write_text(text)
                if name == fail_in:
                    raise error

            return run

        return (
            units_lib.Unit(
                "corpus",
                (),
                {"rows": rows},
                make("corpus", train="train", queries=rows),
                files={"train_file": self.source},
            ),
            units_lib.Unit(
                "sketch",
                ("corpus/train.txt",),
                {"size": size},
                make("sketch", result=f"sketch {size}"),
                is_resumable=True,
            ),
            units_lib.Unit("retrieve/a", ("sketch",), {}, make("retrieve/a", result="a")),
            units_lib.Unit("retrieve/b", ("corpus/queries.txt",), {}, make("b", result=rows)),
        )

    def run_units(self, *, stages=("corpus", "sketch", "retrieve"), **kwargs):
        self.ran.clear()
        self.lines.clear()
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                units_lib.run_units(self.root, self.units(**kwargs), stages=stages)
        finally:
            self.lines += said.getvalue().splitlines()
        return list(self.ran)

    def manifest(self, name):
        """What decides the key of a unit, and of those behind it."""
        found = files.read_json(self.root / name / "manifest.json")
        return {part: found[part] for part in ("key", "outputs", "reads")}

    def result(self, name):
        return (self.root / name / "result.txt").read_text()


class FindingTest(UnitsCase):
    """A unit that leaves a finding is the last one, now and when it is up to date."""

    def units(self, *, ends=True, **kwargs):
        def run(folder):
            self.ran.append("sketch")
            (folder / "result.txt").write_text(f"{ends}")
            if ends:
                files.write_json(folder / "finding.json", {"finding": "nothing"})

        units = list(super().units(**kwargs))
        units[1] = units[1]._replace(run=run, settings={"ends": ends})
        # It reads what a unit with a finding does not leave.
        units[2] = units[2]._replace(reads=("sketch/more.txt",) if ends else ("sketch",))
        return tuple(units)

    def test_it_ends_the_run_and_the_next_one_until_it_is_made_otherwise(self):
        units = self.units()
        stages = "corpus", "sketch", "retrieve"
        self.assertEqual(units_lib.run_units(self.root, units, stages=stages), "nothing")
        self.assertEqual(self.ran, ["corpus", "sketch"])
        for some in (stages, ("retrieve",)):
            again = units_lib.run_units(self.root, units, stages=some)
            self.assertEqual(again, "nothing")
        self.assertEqual(self.ran, ["corpus", "sketch"])
        found = units_lib.run_units(self.root, self.units(ends=False), stages=stages)
        self.assertEqual(found, "")
        self.assertEqual(self.ran, ["corpus", "sketch", "sketch", "retrieve/a", "b"])


class UnitsTest(UnitsCase):
    def test_a_second_run_does_nothing(self):
        self.assertLen(self.run_units(), 4)
        self.assertEmpty(self.run_units())

    def test_a_changed_setting_runs_its_unit_and_what_reads_what_came_out_otherwise(self):
        self.run_units()
        self.assertEqual(self.run_units(size=2), ["sketch", "retrieve/a"])
        self.assertEqual(self.run_units(size=2, rows="others"), ["corpus", "b"])

    def test_an_input_file_counts_by_its_content(self):
        self.run_units()
        os.utime(self.source)
        self.assertEmpty(self.run_units())
        self.source.write_text("swor")
        self.assertEqual(self.run_units(), ["corpus"])
        self.source.unlink()
        with self.assertRaisesRegex(ValueError, "no file .*train.txt"):
            self.run_units()

    def test_a_file_that_changes_while_it_is_read_is_another_for_the_next_run(self):
        corpus, sketch, *_ = self.units()
        sketch = sketch._replace(files={"train_file": self.source})
        read = []  # once, as weights are

        def make(name):
            def run(folder):
                self.ran.append(name)
                read.extend([] if read else [self.source.read_text()])
                self.source.write_text("swor")
                for output in ("train", "queries", "result"):
                    (folder / f"{output}.txt").write_text(read[0])

            return run

        units = [unit._replace(run=make(unit.name)) for unit in (corpus, sketch)]
        for expected in (["corpus", "sketch"], ["corpus", "sketch"], []):
            self.ran.clear()
            read.clear()
            units_lib.run_units(self.root, units)
            self.assertEqual(self.ran, expected)
        self.assertEqual(self.result("sketch"), "swor")

    @parameterized.parameters("", "sketch 7", None)
    def test_a_lost_shortened_or_damaged_output_is_made_again(self, text):
        self.run_units()
        path = self.root / "sketch" / "result.txt"
        path.unlink()
        if text is not None:
            path.write_text(text)
        self.assertEqual(self.run_units(), ["sketch"])
        self.assertEqual(self.result("sketch"), "sketch 1")

    def test_verify_names_what_is_damaged_or_made_from_something_else(self):
        self.run_units()
        self.assertEmpty(manifests.verify(self.root))
        path = self.root / "sketch" / "result.txt"
        times = path.stat()
        path.write_text("sketch 9")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        self.run_units(rows="others", stages=("corpus",))
        self.assertEqual(
            manifests.verify(self.root),
            [
                "retrieve/b: made from another version of corpus/queries.txt",
                "sketch/result.txt: missing or damaged",
            ],
        )

    def test_a_large_file_is_read_again_only_when_it_changed(self):
        with mock.patch.object(manifests, "_LARGE", 0):
            self.run_units()
            with mock.patch.object(manifests, "hash_file", side_effect=AssertionError):
                self.assertEmpty(self.run_units())
            (self.root / "sketch" / "result.txt").write_text("sketch 7")
            self.assertEqual(self.run_units(), ["sketch"])

    def test_a_result_is_refused_once_what_it_was_made_from_is_another(self):
        self.run_units()
        manifests.check_finished(self.root, "retrieve/a")
        self.run_units(size=2, stages=("sketch",))
        with self.assertRaisesRegex(ValueError, "sketch of .* has changed since retrieve/a read"):
            manifests.check_finished(self.root, "retrieve/a")
        with self.assertRaisesRegex(ValueError, "must hold a finished report"):
            manifests.check_finished(self.root, "report")

    def test_what_will_be_made_again_is_told_first_with_its_time(self):
        self.run_units()
        self.run_units(size=2)
        self.assertRegex(self.lines[0], r"^will be made again: sketch \(took \d+\.\d s\)$")
        self.assertRegex(self.lines[1], r"^may be made again: retrieve/a \(.* if sketch changes\)$")
        self.assertLen([line for line in self.lines if "made again" in line], 2)

    def test_a_killed_run_goes_on_at_the_unit_where_it_stopped(self):
        with self.assertRaises(KeyboardInterrupt):
            self.run_units(fail_in="retrieve/a")
        self.assertEqual(self.run_units(), ["retrieve/a", "b"])

    def test_only_a_resumable_unit_finds_what_it_left(self):
        for name, expected in (("sketch", True), ("corpus", False)):
            shutil.rmtree(self.root / name, ignore_errors=True)
            with self.assertRaises(KeyboardInterrupt):
                self.run_units(fail_in=name)
            found: list[bool] = []

            def look(folder, found=found):
                found.append(any(folder.glob("*.txt")))
                for name in ("train", "queries", "result"):
                    (folder / f"{name}.txt").write_text(name)

            units = [u._replace(run=look) if u.name == name else u for u in self.units()]
            units_lib.run_units(self.root, units, stages=(name,))
            self.assertEqual(found, [expected])
            self.run_units()

    def test_what_a_failed_or_killed_unit_left_is_no_output(self):
        with self.assertRaises(ValueError):
            self.run_units(fail_in="corpus", error=ValueError)
        self.assertFalse((self.root / ".making" / "corpus").exists())
        with self.assertRaises(Killed):
            self.run_units(fail_in="sketch", error=Killed)
        (self.root / ".making" / "sketch" / ".model.partial-7").mkdir()
        self.run_units()
        self.assertEqual(
            sorted(path.name for path in (self.root / "sketch").iterdir()),
            ["manifest.json", "result.txt"],
        )

    def test_what_a_kill_left_of_a_temporary_file_is_no_output(self):
        self.run_units()
        keys = {name: self.manifest(name) for name in ("corpus", "sketch", "retrieve/a")}
        shutil.rmtree(self.root / "sketch")
        real = os.replace

        def dying(source, target):
            if pathlib.Path(target).name == "manifest.json":
                shutil.copy(source, left)  # which a process that is killed does not remove
                raise Killed
            return real(source, target)

        name = f".manifest.json.elsewhere.{os.getpid()}-0.partial"
        left = self.root / ".making" / "sketch" / name
        with mock.patch.object(os, "replace", dying), self.assertRaises(Killed):
            self.run_units()
        self.assertTrue(left.is_file())
        self.assertEmpty(self.run_units())
        self.assertEqual({name: self.manifest(name) for name in keys}, keys)
        self.assertEmpty(manifests.verify(self.root))

    def test_a_stale_result_stays_until_its_successor_is_finished(self):
        self.run_units()
        with self.assertRaises(Killed):
            self.run_units(size=2, fail_in="sketch", error=Killed)
        self.assertEqual(self.result("sketch"), "sketch 1")
        self.assertEmpty(self.run_units())

    @parameterized.parameters(
        ("os", "rename"), ("os", "replace"), ("os", "fsync"), ("shutil", "rmtree")
    )
    def test_a_kill_before_any_step_leaves_the_old_or_the_new_result(self, module, step):
        self.run_units()
        steps = 0
        while True:
            self.run_units()
            real, calls = getattr({"os": os, "shutil": shutil}[module], step), []

            def dying(*args, real=real, calls=calls, last=steps, **kwargs):
                calls.append(args)
                if len(calls) > last:
                    raise Killed
                return real(*args, **kwargs)

            try:
                with mock.patch(f"{module}.{step}", dying):
                    self.run_units(size=2, stages=("sketch",))
            except Killed:
                made = list(self.ran)
            else:
                break
            # The old result can still be had without work, unless the new one stands.
            before = shutil.copytree(self.root, self.folder / f"copy-{steps}")
            again = self.run_units(size=2, stages=("sketch",))
            self.assertEqual(self.result("sketch"), "sketch 2")
            self.assertLessEqual(len(made + again), 2)
            new, self.root = self.root, before
            self.run_units(stages=("sketch",))
            self.assertEqual(self.result("sketch"), "sketch 1")
            self.root = new
            steps += 1
        self.assertGreater(steps, 0)

    @parameterized.parameters("manifest", "install")
    def test_a_finished_unit_is_kept_whatever_dies_after_it(self, where):
        place = {"manifest": (manifests, "files_of"), "install": (units_lib, "check_own")}[where]
        real = getattr(*place)

        def dying(folder):
            if (self.root / ".making" / "corpus").exists():
                raise Killed
            return real(folder)

        with mock.patch.object(*place, dying), self.assertRaises(Killed):
            self.run_units(stages=("corpus",))
        self.assertEqual(self.ran, ["corpus"])
        self.assertEmpty(self.run_units(stages=("corpus",)))
        self.assertTrue((self.root / "corpus" / "manifest.json").is_file())

    def test_a_folder_that_no_run_made_is_refused_and_kept(self):
        (self.root / "sketch").mkdir()
        (self.root / "sketch" / "thesis.txt").write_text("mine")
        with self.assertRaisesRegex(ValueError, "'.*sketch' must be a folder that a run made"):
            self.run_units()
        self.assertEmpty(self.ran)
        self.assertEqual((self.root / "sketch" / "thesis.txt").read_text(), "mine")

    def test_a_foreign_file_in_a_unit_is_never_deleted(self):
        self.run_units()
        thesis = self.root / "sketch" / "thesis.txt"
        thesis.write_text("mine")
        self.assertEmpty(self.run_units())
        with self.assertRaisesRegex(ValueError, "only files of the run.*'thesis.txt'"):
            self.run_units(size=2)
        self.assertEqual(thesis.read_text(), "mine")
        self.assertEqual(self.result("sketch"), "sketch 1")

    def test_a_damaged_manifest_is_a_sentence(self):
        self.run_units()
        for text in ("{", "{}", '{"format": 3, "key": "1", "outputs": {"a": 3}}'):
            (self.root / "sketch" / "manifest.json").write_text(text)
            with self.assertRaisesRegex(ValueError, "sketch/manifest.json.*the folder 'sketch'"):
                self.run_units()

    def test_a_stage_alone_says_which_result_it_lacks(self):
        with self.assertRaisesRegex(ValueError, "add sketch to --stages"):
            self.run_units(stages=("retrieve",))
        self.assertEmpty(list(self.root.iterdir()))

    def test_a_stage_alone_runs_on_results_that_are_there(self):
        self.run_units()
        shutil.rmtree(self.root / "retrieve" / "b")
        self.assertEqual(self.run_units(stages=("retrieve",)), ["b"])

    def test_nothing_is_recorded_before_the_first_unit_may_run(self):
        started: list[bool] = []
        units = self.units()
        options = {"on_start": lambda: started.append(True)}
        with self.assertRaises(ValueError):
            units_lib.run_units(self.root, units, stages=("retrieve",), **options)
        self.assertEmpty(started)
        units_lib.run_units(self.root, units, stages=("corpus",), **options)
        self.assertLen(started, 1)

    def test_equal_values_have_equal_hashes(self):
        self.assertEqual(
            manifests.content_hash({"a": 1, "b": 2}), manifests.content_hash({"b": 2, "a": 1})
        )


class WorkdirTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = self.folder / "a" / "run"

    def open(self, config=None, *, update=False, record=True, finish=True):
        with written.open_workdir(self.root, config or Config(), update=update) as start:
            if record:
                start()
            if finish:
                units = [units_lib.Unit("corpus", (), {}, lambda folder: None)]
                units_lib.run_units(self.root, units)

    def config(self):
        return files.read_json(self.root / "config.json", dict)

    def test_another_configuration_is_refused_and_nothing_touched(self):
        self.open()
        before = {p.name: p.read_bytes() for p in self.root.iterdir() if p.is_file()}
        other = Config(seed=3, corpus=CorpusConfig(num_train=10, num_targets=5))
        with self.assertRaisesRegex(ValueError, r"corpus\.num_targets: 200 -> 5.*seed: 0 -> 3"):
            self.open(other)
        self.assertEqual(
            before, {p.name: p.read_bytes() for p in self.root.iterdir() if p.is_file()}
        )
        self.open(other, update=True)
        self.assertEqual(self.config()["seed"], 3)

    def test_a_refused_update_records_nothing(self):
        self.open()
        self.open(Config(seed=3), update=True, record=False, finish=False)
        self.assertEqual(self.config()["seed"], 0)

    def test_a_refused_run_leaves_nothing_and_blocks_no_corrected_one(self):
        self.open(record=False, finish=False)
        self.assertFalse(self.root.parent.exists())
        self.open(finish=False)
        self.open(Config(seed=3))
        self.assertEqual(self.config()["seed"], 3)

    def test_two_runs_do_not_share_a_directory(self):
        with written.open_workdir(self.root, Config(), update=False):
            with self.assertRaisesRegex(ValueError, "in use by another process"):
                self.open()

    def test_a_disk_without_locks_is_not_in_use(self):
        lacking = OSError(errno.ENOLCK, "no locks")
        with mock.patch.object(written.fcntl, "flock", side_effect=lacking):
            self.open(finish=False)
        held = BlockingIOError(errno.EWOULDBLOCK, "held")
        with mock.patch.object(written.fcntl, "flock", side_effect=held):
            with self.assertRaisesRegex(ValueError, "in use by another process"):
                self.open()

    @parameterized.parameters(
        ("", "mine", "is a file"),
        (
            "config.json",
            '{"model_type": "llama"}',
            "config.json' must be of a run, it is of a model",
        ),
        ("run.flags", "mine", "run.flags' must be a folder of a run, it has no config.json"),
    )
    def test_what_is_no_folder_of_a_run_is_refused_and_kept(self, name, text, message):
        path = self.root / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        for update in (False, True):
            with self.assertRaisesRegex(ValueError, message):
                self.open(update=update)
        self.assertEqual(path.read_text(), text)

    def test_the_cores_used_are_recorded(self):
        self.assertRegex(manifests.versions()["cpus"], r"^\d+ of \d+$")
        self.open()
        manifest = json.loads((self.root / "corpus" / "manifest.json").read_text())
        self.assertEqual(manifest["versions"], manifests.versions())

    def test_a_name_is_one_folder_below_runs(self):
        for name in ("", " ", "..", "../x", "a/b", "a\\b", "a\x1b[31m", "a\n"):
            with self.assertRaisesRegex(ValueError, "--name must be printable"):
                Config(name=name)
