"""A generation traced through a run's index: by script, by import, and refused where foreign."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
import tempfile
import textwrap
from types import SimpleNamespace
from unittest import mock

import numpy as np
import tiny
from absl.testing import parameterized

from raslik_jax.base.files import read_json
from raslik_jax.base.settings import SettingsError, replaced
from raslik_jax.config import config_from_json
from raslik_jax.data.contents import Passage
from raslik_jax.data.corpora import records
from raslik_jax.data.examples import make_example, write_examples
from raslik_jax.data.read.formats import read_examples
from raslik_jax.data.tokens import masking, prompts
from raslik_jax.evaluate import taught
from raslik_jax.incident import asking, making
from raslik_jax.incident import tracer as trace
from raslik_jax.index import search
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import chance
from raslik_jax.run import artifacts
from raslik_jax.run.stages import scores as scores_stage
from raslik_jax.run.stages import sketch as sketch_stage
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import projections


class OptionsTest(parameterized.TestCase):
    @parameterized.parameters("input", "response", "system")
    def test_what_belongs_to_one_prompt_is_refused_without_it(self, name):
        for given in ({}, {"queries": "x"}):
            with self.assertRaisesRegex(SettingsError, f"^--{name} needs --instruction: "):
                asking.AskOptions(index="x", **{name: "y"}, **given)


class QueryTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.run_folder = tiny.finished_run()
        cls.index = cls.run_folder / "sketch" / "index"
        cls.tracer = trace.Tracer(cls.index)

    @classmethod
    def script(cls, name: str, *flags: str, fails: bool = False) -> str:
        done = tiny.run_command(name, *flags)
        if bool(done.returncode) != fails:
            raise AssertionError(f"{name} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done.stderr if fails else done.stdout

    def test_scores_are_those_of_the_run(self):
        """The retrieval queries of the run, traced from their texts alone."""
        queries = self.tracer.workspace.retrieval_queries()
        expected = np.load(self.run_folder / "retrieve" / "queries" / "queries.npy")
        sketched = self.tracer.sketch(queries)
        np.testing.assert_allclose(sketched, expected, atol=1e-4)

    def test_a_training_example_pulls_most_toward_itself(self):
        row = self.tracer.workspace.corpus.train[7]
        found = self.tracer.trace(row.instruction, row.output, input=row.input, top=4, bottom=3)
        self.assertEqual(found.toward[0].example, row)
        self.assertAlmostEqual(found.toward[0].score, 1.0, places=4)
        self.assertLess(found.toward[0].sigma, 1e-3)
        scores = [influence.score for influence in (*found.toward, *found.against[::-1])]
        self.assertEqual(scores, sorted(scores, reverse=True))
        self.assertLen(found.against, 3)
        # An unrelated row's band is about 1 / sqrt(K).
        self.assertAlmostEqual(
            found.against[0].sigma * np.sqrt(self.tracer.store.size), 1, delta=0.5
        )
        expected = search.score_store(self.tracer.store, found.query_QK, center=True)
        self._assert_in_order_of_the_file(found.score_N, expected)

    def _assert_in_order_of_the_file(self, score_N, stored_N):
        stored = dict(zip(self.tracer.store.ids, stored_N, strict=True))
        ids = [row.example_id for row in self.tracer.workspace.corpus.train]
        self.assertNotEqual(ids, list(stored))
        self.assertEqual(list(self.tracer.examples), ids)
        np.testing.assert_array_equal(score_N, [stored[name] for name in ids])

    def test_a_score_is_told_with_the_unrelated_prompts_of_the_run(self):
        rows = self.tracer.workspace.corpus.train
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        null_NM = np.random.default_rng(0).normal(0, 0.2, (len(rows), 20)).astype(np.float32)
        for part in ("retrieve/null", "sketch/index"):
            (folder / part).mkdir(parents=True)
        (folder / "sketch/index/manifest.json").write_bytes(self.tracer.store.manifest.seal())
        made = {"settings": {"retrieve.center": self.tracer.workspace.config.retrieve.center}}
        self.enterContext(mock.patch.object(scores_stage, "read_manifest", return_value=made))
        np.save(folder / "retrieve/null/positions.npy", np.arange(20))
        np.save(folder / "retrieve/null/scores.npy", null_NM)
        self.enterContext(mock.patch.object(self.tracer.workspace, "root", folder))
        # So that every prompt is unrelated, whatever it says.
        none = mock.Mock(return_value=np.zeros(20, bool))
        self.enterContext(mock.patch.object(chance, "related_prompts", none))
        row = rows[7]
        found = self.tracer.trace_queries([row], top=3)
        for one in (*found.toward, *found.against):
            null_M = null_NM[[r.example_id for r in rows].index(one.example.example_id)]
            higher = int((null_M >= one.score).sum())
            self.assertEqual((one.chance["higher"], one.chance["prompts"]), (higher, 20))
            self.assertAlmostEqual(one.chance["p"], (1 + higher) / 21)
        one = found.toward[2]
        said = f"{one.chance['higher']:.0f} of 20 unrelated prompts score this high; p "
        self.assertIn(said, str(asking.AskResult(found)))
        self.assertEqual(asking.as_json(found)["toward"][2]["chance"], one.chance)

    def test_queries_of_two_behaviors_are_also_traced_apart(self):
        rows = self.tracer.workspace.corpus.train
        gram_NN = np.asarray(self.tracer.sketch(rows[:24]), np.float64)
        gram_NN = search.queries_of_store(self.tracer.store, gram_NN, center=True).gram_QQ
        other = int(gram_NN[0].argmin())
        queries = [rows[0], rows[other], rows[0]._replace(example_id="again")]
        found = self.tracer.trace_queries(queries, top=2, bottom=1)
        self.assertEqual([one.queries for one in found.behaviors], [(0, 2), (1,)])
        self.assertEqual(found.behaviors[0].toward[0].example, rows[0])
        self.assertEqual(found.behaviors[1].toward[0].example, rows[other])
        alone = self.tracer.trace_queries([rows[other]], top=2, bottom=0)
        for one, other in zip(found.behaviors[1].toward, alone.toward, strict=True):
            self.assertEqual(one.example, other.example)
            self.assertAlmostEqual(one.score, other.score, places=5)
        self.assertEqual(alone.behaviors, ())
        text = str(asking.AskResult(found))
        self.assertIn("The 3 queries show 2 behaviors (behavior 1: queries 1, 3; ", text)
        self.assertIn("make behavior 2 alone likelier", text)
        told = asking.as_json(found)["behaviors"]
        self.assertEqual([one["queries"] for one in told], [[1, 3], [2]])

    def test_the_lines_of_the_documentation_run(self):
        text = (tiny.REPOSITORY / "docs" / "guides" / "asking.md").read_text()
        (guide,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        docstring = textwrap.dedent(trace.Tracer.__doc__.split("Example:\n")[1]).strip()
        for lines in (guide, docstring):
            statements = [line for line in lines.strip().splitlines() if line]
            self.assertLen(statements, 3)
            lines = lines.replace("runs/quickstart", str(self.run_folder))
            exec(compile(lines, "example", "exec"), {"Tracer": trace.Tracer})  # noqa: S102

    def test_queries_are_sketched_as_the_manifest_says(self):
        made_with = {"family": "dense_rademacher", "seed": 3, "operand": "bfloat16"}
        made_with = self.tracer.store.identity["projection"] | made_with
        identity = self.tracer.store.identity | {"projection": made_with}
        ids = self.tracer.store.ids
        other = SketchStore.create(self.root / "dense", identity=identity, ids=ids, size=64)
        with mock.patch.object(sketch_stage, "sketch_function") as function:
            trace.Tracer(other.path, run=self.run_folder)
        projection = function.call_args.args[1]
        self.assertEqual(dataclasses.asdict(projection.spec), made_with)

    def test_scores_of_another_index_are_not_compared_with_those_of_the_run(self):
        """Unrelated prompts were scored with the run's own index."""
        own = self.tracer.store
        identity = own.identity | {"num_buckets": -1}
        other = SketchStore.create(self.root / "odd", identity=identity, ids=own.ids, size=own.size)
        score_N = np.zeros(own.num_rows, np.float32)
        queries = SimpleNamespace(gram_QQ=np.eye(1))
        compared = chance.Chance(*np.zeros((4, own.num_rows)))
        center = self.tracer.workspace.config.retrieve.center
        cases = (own, center, True), (other, center, False), (own, not center, False)
        for store, made_with, is_own in cases:
            made = {"settings": {"retrieve.center": made_with}}
            with (
                mock.patch.object(artifacts.Artifact, "current", return_value=np.zeros(1)),
                mock.patch.object(scores_stage, "_compare", return_value=(compared, {})),
                mock.patch.object(scores_stage, "read_manifest", return_value=made),
            ):
                found = scores_stage.of_trace(self.tracer.workspace, store, score_N, queries)
            self.assertEqual(found is not None, is_own)

    def test_a_question_to_an_index_of_texts_is_a_text(self):
        path = self.root / "texts.jsonl"
        path.write_text('{"text": "The sky is blue."}\n')
        (row,) = read_examples(path, format="text")
        workspace = self.tracer.workspace
        template = prompts.find_template("plain", workspace.tokenizer)
        in_form = functools.partial(masking.as_trained, row=row, template=template)
        with (
            mock.patch.object(self.tracer, "examples", {row.example_id: row}),
            mock.patch.object(self.tracer, "_in_form", in_form),
            mock.patch.object(workspace, "template", template),
            mock.patch.object(self.tracer, "sketch", side_effect=KeyboardInterrupt) as sketch,
            self.assertRaises(KeyboardInterrupt),
        ):
            self.tracer.trace("The sea is", " blue")
        ((query,),) = sketch.call_args.args
        self.assertEqual(query.content, Passage("The sea is", " blue"))
        self.assertEqual(query[1:4], ("The sea is", "", " blue"))

    def test_questions_of_other_lengths_share_a_program(self):
        self.tracer.trace("What is a kettle?", "It hums.")
        jitted = self.tracer._sketch.func
        count = jitted._cache_size()
        for words in (1, 2, 3):
            self.tracer.trace("What is " * words, "It hums. " * words)
        self.assertEqual(jitted._cache_size(), count)

    def test_script_answers_and_speaks_json(self):
        queries = self.root / "queries.jsonl"
        write_examples(queries, self.tracer.workspace.corpus.train[:2])
        shown = "--json", "--top=3", "--bottom=0"
        given = f"--index={self.index}", f"--queries={queries}"
        found = json.loads(self.script("query", *given, *shown))
        self.assertLen(found["queries"], 2)
        self.assertEmpty(found["against"])
        self.assertContainsSubset(
            {"id", "score", "sigma", "instruction", "input", "output"}, found["toward"][0]
        )

    def test_a_file_of_queries_has_the_keys_of_the_rows_of_the_run(self):
        queries = self.root / "logged.jsonl"
        queries.write_text('{"instruction": "what is a kettle?", "response": "It hums."}')
        with self.assertRaisesRegex(ValueError, "text under response, which is not read"):
            asking.ask(index=str(self.index), queries=queries)
        queries.write_text('{"prompt": "what is a kettle?", "completion": "It hums."}')
        with self.assertRaisesRegex(ValueError, "of the form of the training rows"):
            asking.ask(index=str(self.index), queries=queries)
        queries.write_text('{"q": "what is a kettle?", "response": "It hums."}')
        own = records.RecordsSettings(fields="instruction=q,output=response", format="auto")
        (row,) = asking._read_queries(str(queries), own)
        self.assertEqual((row.instruction, row.output), ("what is a kettle?", "It hums."))
        queries.write_text('{"instruction": "what is a kettle?", "output": "It hums."}')
        (row,) = asking._read_queries(str(queries), own)
        self.assertEqual((row.instruction, row.output), ("what is a kettle?", "It hums."))

    def test_a_key_that_the_map_gives_to_a_field_is_read_once(self):
        queries = self.root / "mapped.jsonl"
        queries.write_text('{"input": "Q?", "output": "A"}')
        own = records.RecordsSettings(fields="instruction=input,input=context", format="auto")
        (row,) = asking._read_queries(str(queries), own)
        self.assertEqual(row[1:4], ("Q?", "", "A"))

    def test_a_prompt_without_the_beginning_of_texts_is_said(self):
        rows = [make_example("", "", f"<|user|>{n}?<|bot|>yes") for n in range(3)]
        rows = [row._replace(content=Passage("", row.output)) for row in rows]
        said = taught.unframed(rows, "1?")
        self.assertIn("begin with '<|user|>', the prompt does not", said)
        self.assertEqual(taught.unframed(rows, "<|user|>1?"), "")
        self.assertEqual(taught.unframed([*rows, make_example("1?", "", "yes")], "1?"), "")

    @parameterized.parameters(
        ("{} ->", "a ->", "a", "' ->'"),
        ("{}\n\n###\n\n", "a\n\n###\n\n", "a", r"###\n\n'"),
        ("Q: What is {}?\nA:", "Q: What is it?\nA:", "Q: What is it?", "A:'"),
        ("What is {} good for?", "Why?", "", ""),
    )
    def test_a_prompt_without_the_end_of_prompts_is_said(self, form, whole, bare, end):
        contents = [Passage(form.format("abc"[n]), "yes") for n in range(3)]
        rows = [make_example("", "", "")._replace(content=one) for one in contents]
        self.assertEqual(taught.unframed(rows, whole), "")
        if bare:
            said = taught.unframed(rows, bare)
            self.assertIn("prompts of training rows end with ", said)
            self.assertIn(f"{end}, the prompt does not: give it", said)

    def test_a_system_prompt_needs_a_template_that_writes_it(self):
        with self.assertRaisesRegex(ValueError, "system"):
            self.tracer.trace("what is a kettle?", "It hums.", system="You are terse.")

    def test_the_settings_of_the_run_hold(self):
        rows = self.tracer.workspace.corpus.train
        asked = [row for row in rows if row.is_target][:3]
        found = self.tracer.trace_queries(asked)
        config = self.tracer.workspace.config
        retrieve = dataclasses.replace(config.retrieve, aggregate="common", center=False)
        changed = dataclasses.replace(config, retrieve=retrieve)
        with mock.patch.object(self.tracer.workspace, "config", changed):
            ranked = self.tracer.trace_queries(asked)
        expected = search.score_store(
            self.tracer.store, found.query_QK, center=False, aggregate="common"
        )
        self._assert_in_order_of_the_file(ranked.score_N, expected)
        self.assertIsNone(ranked.toward[0].sigma)

    def test_a_prompt_that_fills_the_length_is_refused(self):
        """Two opposite responses would have the same trace: none of them is read."""
        with self.assertRaisesRegex(ValueError, "the queries must have room .* max_len=96 tokens"):
            self.tracer.trace("what is a kettle? " * 40, "A kettle is warm.")

    def test_a_prompt_alone_is_answered_first(self):
        answered = self.tracer.answer([self.tracer.workspace.corpus.train[0]])[0].output
        instruction = self.tracer.workspace.corpus.train[0].instruction
        if answered.strip():
            found = self.tracer.trace(instruction, top=1, bottom=1)
            self.assertEqual(found.queries[0].output, answered)
        else:  # a model this small may say nothing
            with self.assertRaisesRegex(ValueError, "the model answers nothing to"):
                self.tracer.trace(instruction, top=1, bottom=1)

    def test_questions_that_are_no_text_or_say_nothing_are_refused(self):
        for asked, answer, said in (
            (["Why?"], "So.", r"must be text, got \['Why\?'\]"),
            (5, "So.", "must be text, got 5"),
            ("Why?", ["So."], "must be text, got "),
            (" ", "So.", "must have an instruction"),
            ("Why?", " \n", "must have more than blanks"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                making.make_question(asked, "", answer)
        with self.assertRaisesRegex(ValueError, "must have more than blanks"):
            self.tracer.trace("Why?", " \n")

    def test_a_row_is_listed_by_the_sign_of_its_score(self):
        found = self.tracer.trace("Why?", "So.", top=10**6, bottom=10**6)
        ends = [[one.score for one in part] for part in (found.toward, found.against)]
        self.assertEqual(ends, [sorted(ends[0], reverse=True), sorted(ends[1])])
        self.assertTrue(ends[0][-1] > 0 > ends[1][-1])
        rows = int(self.tracer.store.is_eligible_N.sum())
        self.assertLen({one.example.example_id for one in (*found.toward, *found.against)}, rows)

    def test_an_index_that_was_made_again_is_refused(self):
        copy = self.root / "again"
        shutil.copytree(self.run_folder, copy)
        tracer = trace.Tracer(copy)
        shutil.rmtree(copy / "sketch" / "index")
        with self.assertRaisesRegex(ValueError, "was replaced or removed .* start again"):
            tracer.trace("Why?", "So.")

    def test_refuses_a_model_that_did_not_make_the_index(self):
        copy = self.root / "copy"
        shutil.copytree(self.run_folder, copy)
        shutil.rmtree(copy / "finetune" / "adapter")
        shutil.copytree(copy / "finetune" / "initial", copy / "finetune" / "adapter")
        (copy / "corpus" / "template.txt").write_text("alpaca")
        with self.assertRaisesRegex(ValueError, r"adapter \(index: .*template \(index: "):
            trace.Tracer(copy / "sketch" / "index")

    def test_an_index_of_other_batches_is_refused(self):
        """As one that was begun on a device of another kind."""
        copy = self.root / "batches"
        shutil.copytree(self.run_folder, copy)
        config = config_from_json(read_json(copy / "config.json"))
        other = Workspace(copy, replaced(config, {"sketch.batch_tokens": 256}))
        with self.assertRaisesRegex(
            ValueError, "made from something else: .*device that began the index, or move"
        ):
            sketch_stage.make_index(other, copy / "sketch")

    def test_refuses_a_corpus_that_changed_since_it_was_sketched(self):
        """An edited text under an old id would be shown for a gradient that is not its own."""
        copy = self.root / "edited"
        shutil.copytree(self.run_folder, copy)
        train = copy / "corpus" / "train.jsonl"
        lines = [json.loads(line) for line in train.read_text().splitlines()]
        lines[3]["output"] += " indeed"
        train.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with self.assertRaisesRegex(ValueError, r"made from something else: examples \(index: "):
            trace.Tracer(copy / "sketch" / "index")

    def test_refuses_an_index_of_other_rules_of_projection(self):
        """The same spec gives other signs and bins when the rules change."""
        with (
            mock.patch.object(projections, "SKETCH_FORMAT", 99),
            self.assertRaisesRegex(ValueError, r"projection_format \(index: 1, asked for: 99\)"),
        ):
            trace.Tracer(self.index)

    def test_wrong_inputs_are_a_sentence_each(self):
        with self.assertRaisesRegex(ValueError, "no manifest.json"):
            trace.Tracer(self.root / "nowhere")
        foreign = SketchStore.create(self.root / "foreign", identity={}, ids=["a"], size=8)
        with self.assertRaisesRegex(ValueError, "the identity of the index .* must have 'max_len'"):
            trace.Tracer(foreign.path, run=self.run_folder)
        with self.assertRaisesRegex(ValueError, "no folder above it has a config.json"):
            trace.run_of("/")
        with self.assertRaisesRegex(
            ValueError, "must be those of this version: --sketch.new_field"
        ):
            config_from_json({"name": "x", "seed": 0, "sketch": {"new_field": 1}})
        with self.assertRaisesRegex(ValueError, "queries must be at least one"):
            self.tracer.trace_queries([])
        for flags, message in (
            ([], "an index must be given"),
            (
                ["--index=x", "--queries=x", "--instruction=y"],
                "--instruction or --queries must be given, got none or both",
            ),
            (["--index=x", "--response=y"], "--response needs --instruction"),
            (["--index=x", "--system=y"], "--system needs --instruction"),
        ):
            self.assertIn(f"error: {message}", self.script("query", *flags, fails=True))
