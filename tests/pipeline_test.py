"""Units of work: run once, again when something changed, and after a kill."""

import json
import pathlib
import tempfile

from absl.testing import absltest

from raslik_jax import pipeline
from raslik_jax.config import Config, CorpusConfig, content_hash


class UnitsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.ran: list[str] = []

    def units(self, *, sketch_settings=1, fail_in=""):
        def make(name):
            def run(folder):
                self.ran.append(name)
                (folder / "result.txt").write_text(name)
                if name == fail_in:
                    raise KeyboardInterrupt

            return run

        return (
            pipeline.Unit("corpus", (), {"seed": 0}, make("corpus")),
            pipeline.Unit("sketch", ("corpus",), {"size": sketch_settings}, make("sketch"), True),
            pipeline.Unit("retrieve/a", ("sketch",), {}, make("retrieve/a")),
            pipeline.Unit("retrieve/b", ("corpus",), {}, make("retrieve/b")),
        )

    def run_units(self, **kwargs):
        stages = kwargs.pop("stages", ("corpus", "sketch", "retrieve"))
        self.ran.clear()
        shared = kwargs.pop("shared", None)
        pipeline.run_units(
            self.root, self.units(**kwargs), stages=stages, shared=shared, log=lambda line: None
        )
        return list(self.ran)

    def test_a_second_run_does_nothing(self):
        self.assertLen(self.run_units(), 4)
        self.assertEmpty(self.run_units())

    def test_a_changed_setting_runs_its_unit_and_what_follows(self):
        self.run_units()
        self.assertEqual(self.run_units(sketch_settings=2), ["sketch", "retrieve/a"])

    def test_a_lost_or_shortened_output_is_made_again(self):
        self.run_units()
        (self.root / "sketch" / "result.txt").write_text("")
        self.assertEqual(self.run_units(), ["sketch"])
        (self.root / "corpus" / "result.txt").unlink()
        self.assertEqual(self.run_units(), ["corpus"])

    def test_runs_share_finished_units_of_the_same_key(self):
        shared, first = self.root / "shared", self.root
        self.root = first / "a"
        self.assertLen(self.run_units(shared=shared), 4)
        self.root = first / "b"
        self.assertEqual(self.run_units(shared=shared, sketch_settings=2), ["sketch", "retrieve/a"])
        self.root = first / "c"
        self.assertEmpty(self.run_units(shared=shared, sketch_settings=2))
        self.assertEqual((self.root / "retrieve" / "b" / "result.txt").read_text(), "retrieve/b")
        # What one run makes anew is no other's.
        self.assertEqual(self.run_units(sketch_settings=3), ["sketch", "retrieve/a"])
        self.root = first / "b"
        self.assertEmpty(self.run_units(sketch_settings=2))

    def test_an_unfinished_or_damaged_unit_is_not_shared(self):
        shared, first = self.root / "shared", self.root
        self.root = first / "a"
        with self.assertRaises(KeyboardInterrupt):
            self.run_units(shared=shared, fail_in="retrieve/a")
        self.root = first / "b"
        self.assertEqual(self.run_units(shared=shared), ["retrieve/a", "retrieve/b"])
        (damaged,) = shared.glob("*/retrieve/b/result.txt")
        damaged.unlink()
        self.root = first / "c"
        self.assertEqual(self.run_units(shared=shared), ["retrieve/b"])

    def test_units_of_equal_settings_and_inputs_are_not_mixed_up(self):
        shared, first = self.root / "shared", self.root
        for name in ("a", "b"):
            self.root = first / name
            units = [
                pipeline.Unit(
                    f"retrieve/{strategy}", (), {}, lambda f, s=strategy: (f / "x").write_text(s)
                )
                for strategy in ("oracle", "random")
            ]
            pipeline.run_units(
                self.root, units, stages=("retrieve",), shared=shared, log=lambda line: None
            )
            for strategy in ("oracle", "random"):
                self.assertEqual((self.root / "retrieve" / strategy / "x").read_text(), strategy)

    def test_a_killed_run_goes_on_at_the_unit_where_it_stopped(self):
        with self.assertRaises(KeyboardInterrupt):
            self.run_units(fail_in="retrieve/a")
        self.assertEqual(self.run_units(), ["retrieve/a", "retrieve/b"])

    def test_only_a_resumable_unit_finds_what_it_left(self):
        for name, expected in (("sketch", True), ("corpus", False)):
            (self.root / name / "manifest.json").unlink(missing_ok=True)
            with self.assertRaises(KeyboardInterrupt):
                self.run_units(fail_in=name)
            found: list[bool] = []

            def look(folder, found=found):
                found.append((folder / "result.txt").exists())

            units = [u._replace(run=look) if u.name == name else u for u in self.units()]
            pipeline.run_units(self.root, units, stages=(name,), log=lambda line: None)
            self.assertEqual(found, [expected])
            self.run_units()

    def test_a_stage_alone_says_which_result_it_lacks(self):
        with self.assertRaisesRegex(ValueError, "add corpus to --stages"):
            self.run_units(stages=("retrieve",))
        self.assertEmpty(list(self.root.iterdir()))

    def test_a_stage_alone_runs_on_results_that_are_there(self):
        self.run_units()
        (self.root / "retrieve" / "b" / "manifest.json").unlink()
        self.assertEqual(self.run_units(stages=("retrieve",)), ["retrieve/b"])

    def test_keys_follow_settings_and_inputs_only(self):
        first, second = (pipeline.unit_keys(self.units(sketch_settings=n)) for n in (1, 2))
        self.assertEqual(first["corpus"], second["corpus"])
        self.assertEqual(first["retrieve/b"], second["retrieve/b"])
        self.assertNotEqual(first["sketch"], second["sketch"])
        self.assertNotEqual(first["retrieve/a"], second["retrieve/a"])
        self.assertEqual(content_hash({"a": 1, "b": 2}), content_hash({"b": 2, "a": 1}))


class WorkdirTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "run"

    def test_another_configuration_is_refused_and_nothing_touched(self):
        with pipeline.open_workdir(self.root, Config(), update=False):
            pass
        before = {path.name: path.read_bytes() for path in self.root.iterdir()}
        other = Config(seed=3, corpus=CorpusConfig(num_train=10, num_targets=5))
        with self.assertRaisesRegex(ValueError, r"corpus\.num_targets: 200 -> 5.*seed: 0 -> 3"):
            with pipeline.open_workdir(self.root, other, update=False):
                pass
        self.assertEqual(before, {path.name: path.read_bytes() for path in self.root.iterdir()})
        with pipeline.open_workdir(self.root, other, update=True):
            self.assertEqual(pipeline.read_json(self.root / "config.json")["seed"], 3)

    def test_a_setting_that_came_later_is_at_its_default(self):
        with pipeline.open_workdir(self.root, Config(), update=False):
            pass
        path = self.root / "config.json"
        recorded = pipeline.read_json(path)
        del recorded["corpus"]["num_targets"], recorded["evaluate"]
        path.write_text(json.dumps(recorded))
        other = Config(corpus=CorpusConfig(num_targets=5))
        with self.assertRaisesRegex(ValueError, r"\(corpus\.num_targets: 200 -> 5\)"):
            with pipeline.open_workdir(self.root, other, update=False):
                pass
        with pipeline.open_workdir(self.root, Config(), update=False):
            pass

    def test_two_runs_do_not_share_a_directory(self):
        with pipeline.open_workdir(self.root, Config(), update=False):
            with self.assertRaisesRegex(ValueError, "in use by another run"):
                with pipeline.open_workdir(self.root, Config(), update=False):
                    pass

    def test_a_file_is_no_directory(self):
        self.root.write_text("mine")
        with self.assertRaisesRegex(ValueError, "is a file"):
            with pipeline.open_workdir(self.root, Config(), update=False):
                pass
        self.assertEqual(self.root.read_text(), "mine")

    def test_a_broken_json_is_named(self):
        self.root.mkdir()
        (self.root / "config.json").write_text("{")
        with self.assertRaisesRegex(ValueError, "config.json is no JSON"):
            pipeline.read_json(self.root / "config.json")


if __name__ == "__main__":
    absltest.main()
