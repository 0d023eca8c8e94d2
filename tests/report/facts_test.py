"""Work directories as the reports read them."""

import pathlib
import shutil

import numpy as np
import sample_run
from finished import write_manifest
from folders import FolderTest

from raslik_jax.base.files import read_json, write_json
from raslik_jax.report import facts
from raslik_jax.run import artifacts


class ReadRunTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = self.folder / "run"
        sample_run.write_run(self.root)

    def test_answers_are_those_of_the_last_epoch(self):
        run = facts.read_facts(self.root)
        self.assertLen(run.answers, 2 + 8)
        self.assertEqual(run.answers["ga_gdr", "raslik"]["normal3"], "raslik-ga_gdr-2 says normal3")
        self.assertEqual(run.answers["", "backbone"]["normal3"], "backbone says normal3")

    def test_queries_keep_their_kind_and_input(self):
        run = facts.read_facts(self.root)
        self.assertEqual([q.is_target for q in run.queries], [True] * 5 + [False] * 5)
        self.assertEqual(run.queries[1][1:3], ("What is 1?", "here"))

    def test_copies_of_a_prompt_that_were_not_asked_are_no_queries(self):
        of_targets = artifacts.measured_rows("test", "target")
        rows = of_targets.read(self.root)
        copies = [*rows, rows[0]._replace(example_id="copy")]
        of_targets.save(of_targets.place(self.root), copies)
        found = [row.example_id for row in facts.read_facts(self.root).queries[:6]]
        self.assertEqual(found[:5], [row.example_id for row in rows])
        self.assertNotIn("copy", found)

    def test_sets_lie_where_their_rows_have_their_scores(self):
        ranked = np.sort(facts.read_facts(self.root).explorer.score_N)
        # The best row is held out, and the rows to retain are the third and the fifth lowest.
        for kind, kept in (("forget", slice(1, None)), ("retain", slice(2, 5, 2))):
            path = self.root / "retrieve" / "raslik" / f"{kind}.jsonl"
            rows = path.read_text().splitlines(keepends=True)
            path.write_text("".join(rows[kept]))
        found = facts.read_facts(self.root).explorer.distribution()
        np.testing.assert_allclose(found["forget"], [ranked[-12], ranked[-2]], rtol=1e-6)
        np.testing.assert_allclose(found["retain"], [ranked[2], ranked[4]], rtol=1e-6)
        self.assertEqual(found["is_target_N"].sum(), 12)

    def test_sets_are_cut_and_counted(self):
        run = facts.read_facts(self.root, num_rows=3)
        found = run.sets["raslik"]["forget"]
        self.assertLen(found.rows, 3)
        self.assertEqual(found.num_rows, 12)
        self.assertTrue(found.rows[0][0].is_target)

    def test_only_the_metrics_have_to_be_there(self):
        for path in self.root.iterdir():
            if path.name != "evaluate":
                shutil.rmtree(path)
        run = facts.read_facts(self.root)
        self.assertEqual((run.answers, run.queries, run.explorer, run.losses), ({}, (), None, {}))
        artifacts.METRICS.place(self.root).unlink()
        with self.assertRaisesRegex(
            ValueError, "no file .*metrics.json'?: give the folder of a run after"
        ):
            facts.read_facts(self.root)

    def test_a_damaged_file_is_named(self):
        path = self.root / "retrieve" / "raslik" / "forget.jsonl"
        for text, message in (
            ('{"id": "a", "instruction": "c", "output": "b", "score": 1}\n{"b"', ":2: "),
            ('{"id": "a", "instruction": "c", "output": "b"}', ":1 must have 'score'"),
            ('{"id": "a", "output": "b", "score": 1}', ":1: 'instruction' must be text"),
        ):
            path.write_text(text)
            with self.assertRaisesRegex(ValueError, message):
                facts.read_facts(self.root)


class ReadMetricsTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = self.folder / "run"
        sample_run.write_run(self.root)
        for name in ("retrieve/raslik", "references/evaluation"):
            write_manifest(self.root, name)
        write_manifest(self.root, "evaluate", ("retrieve/raslik", "references/evaluation"))

    def test_settings_come_from_the_file_of_the_numbers(self):
        (self.root / "config.json").write_text('{"name": "of another run"}')
        self.assertEqual(facts.read_facts(self.root).config["name"], "sample")

    def test_numbers_of_results_that_were_made_again_are_refused(self):
        (self.root / "retrieve" / "raslik" / "forget.jsonl").write_text("")
        write_manifest(self.root, "retrieve/raslik")
        with self.assertRaisesRegex(ValueError, "retrieve/raslik of .* has changed since evaluate"):
            facts.read_facts(self.root)

    def test_scores_of_another_corpus_are_not_shown(self):
        write_manifest(self.root, "corpus")
        write_manifest(self.root, "retrieve/influence", ("corpus",))
        self.assertIsNotNone(facts.read_facts(self.root).explorer)
        rows = (self.root / "corpus" / "train.jsonl").read_text()
        (self.root / "corpus" / "train.jsonl").write_text(rows.replace("answer 7", "answer x"))
        write_manifest(self.root, "corpus")  # a later run that asks for no such scores
        self.assertIsNone(facts.read_facts(self.root).explorer)

    def test_metrics_alone_are_checked_by_field(self):
        # As a study keeps them: no manifest says what their bytes were.
        studies = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "studies"
        stored = studies / "smollm2" / "smallest"
        for name, value, message in (
            ("finetuned", {}, "finetuned in .* must have 'forget'"),
            ("retrieval", {"raslik": {}}, "retrieval.raslik in .* must have 'num_forget'"),
            ("behavior", "much", "behavior in .* must be an object or null"),
        ):
            metrics = read_json(artifacts.METRICS.place(stored)) | {name: value}
            folder = self.folder / name
            (folder / "evaluate").mkdir(parents=True)
            write_json(artifacts.METRICS.place(folder), metrics)
            with self.subTest(name), self.assertRaisesRegex(ValueError, message):
                artifacts.read_metrics(folder)


class GroupTest(FolderTest):
    def _run(self, **changes):
        root = self.folder / str(len([*self.folder.iterdir()]))
        sample_run.write_run(root, **changes)
        return facts.read_facts(root)

    def test_seeds_of_one_experiment_join_and_others_stay_apart(self):
        changes = {"seed": 1}, {"name": "other"}, {}, {"backbone__hidden_size": 32}
        found = facts.group_runs([self._run(**own) for own in changes])
        names = [f"sample (backbone.hidden_size={size})" for size in (16, 32)]
        expected = [(names[0], (0, 1)), ("other", (0,)), (names[1], (0,))]
        self.assertEqual([(e.name, e.seeds) for e in found], expected)

    def test_runs_are_averaged_only_where_every_setting_is_known_and_equal(self):
        found = facts.group_runs([self._run(seed=0), self._run(seed=1, corpus__later=3)])
        names = ["sample (no corpus.later)", "sample (corpus.later=3)"]
        self.assertEqual([e.name for e in found], names)

    def test_a_choice_is_not_named_after_a_rate_that_it_was_not_trained_at(self):
        tested = {"unlearn__choice": "c.json", "unlearn__ga_gdr": {"learning_rate": 1e-5}}
        tried = {"unlearn__choice": "", "unlearn__ga_gdr": {"learning_rate": 3e-3}}
        found = facts.group_runs([self._run(**changes) for changes in (tested, tried)])
        other = "unlearn.choice=, unlearn.ga_gdr.learning_rate=0.003"
        names = [f"sample ({what})" for what in ("unlearn.choice=c.json", other)]
        self.assertEqual([e.name for e in found], names)
        # Where nothing else tells two of them apart, it does.
        other = tested | {"unlearn__ga_gdr": {"learning_rate": 1e-4}}
        found = facts.group_runs([self._run(**changes) for changes in (tested, other)])
        names = [f"sample (unlearn.ga_gdr.learning_rate={x})" for x in ("1e-05", "0.0001")]
        self.assertEqual([e.name for e in found], names)

    def test_refuses_one_seed_twice(self):
        with self.assertRaisesRegex(ValueError, "different seeds, got .0, 0."):
            facts.group_runs([self._run(), self._run()])
