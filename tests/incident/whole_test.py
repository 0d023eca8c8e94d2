"""Own model in three commands: trace, unlearn, report, on the tiny run's model."""

import collections
import json
import pathlib
import re
import shlex
import tempfile

import numpy as np
import tiny
from absl.testing import parameterized

import raslik_jax
from raslik_jax.base.files import read_json_lines
from raslik_jax.run import artifacts, manifests, written

_FLAGS = (*tiny.TRACE_FLAGS, "--evaluate.perplexity_examples=2", "--retrieve.token_rows=8")
# Programs that a command compiles, single operations outside of a function included.
_PROGRAMS = {"trace": 22, "unlearn": 27}
_GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "own_model.md"


def _script(name, *arguments, **env):
    return tiny.run_command(name, *arguments, env=env)


def _transcript():
    """Returns the names of the flags of each command of the guide, and the lines it printed."""
    (block,) = re.findall(r"^```console\n(.*?)^```", _GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    found = {}
    for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        line, *told = part.splitlines()
        _, name, *flags = shlex.split(line)
        found[name] = [flag.partition("=")[0] for flag in flags], told
    return found


def _heads(lines):
    """Returns how lines begin, less what differs: numbers, texts of rows, which are indented."""
    whole = [re.sub(r"^\[ *\d+/\d+\] ", "", line) for line in lines]
    return {
        re.split(r":|  |\d", line)[0].strip() for line in whole if line.strip() and line[0] != " "
    }


_WISHED = "A kettle boils water."


class ThreeCommandsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tiny = tiny.finished_run()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.model = tiny.own_model(cls.folder)
        rows = read_json_lines(cls.tiny / "corpus" / "train.jsonl")
        # As a user would have them: no ids, a blank line, spaces of their own.
        texts = [{key: row[key] for key in ("output", "instruction")} for row in rows]
        lines = [json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(texts)]
        cls.lines = ["\n", *lines]
        cls.train = cls.folder / "train.jsonl"
        cls.train.write_text("".join(cls.lines))
        cls.run_dir = cls.folder / "incident"
        cls.clean = cls.folder / "clean"
        given = dict(flag.split("=", 1) for flag in cls.model)
        given |= {"--train_file": cls.train, "--prompt": "Howdy! what is\na kettle?"}
        given |= {"--workdir": cls.run_dir, "--run": cls.run_dir, "--out": cls.clean}
        more = {"trace": (f"--wished={_WISHED}", *_FLAGS)}
        cls.done = {}
        for name, (names, _) in _transcript().items():
            flags = [f"{flag}={given[flag]}" for flag in names]
            programs = {"RASLIK_TEST_PROGRAMS": str(cls.folder / f"{name}.programs")}
            cls.done[name] = _script(name, *flags, *more.get(name, ()), **programs)
            assert cls.done[name].returncode == 0, cls.done[name].stderr
        cls.traced, cls.unlearned = cls.done.values()
        cls.reported = _script("report", f"--run={cls.run_dir}")
        assert cls.reported.returncode == 0, cls.reported.stderr

    def rows(self, name):
        return read_json_lines(self.run_dir / name)

    @parameterized.parameters(*_PROGRAMS)
    def test_no_more_programs_are_compiled_than_these(self, name):
        found = collections.Counter((self.folder / f"{name}.programs").read_text().split())
        self.assertLessEqual(found.total(), _PROGRAMS[name], found)

    def test_a_trace_lists_rows_by_their_line_and_trains_nothing(self):
        self.assertNotIn("fine-tune", self.traced.stderr)
        self.assertRegex(self.traced.stdout, r"nats a token under the model")
        self.assertNotIn("references/evaluation", self.traced.stdout)
        forget = self.rows("retrieve/raslik/forget.jsonl")
        self.assertLen(forget, 8)  # two of ten are kept out
        for row in forget:
            line = json.loads(self.lines[row["place"] - 1])
            self.assertEqual(line["instruction"], row["instruction"])
        self.assertRegex(self.traced.stdout, rf"\n   \d\. .+ +{forget[0]['place']}  forget\n")
        self.assertIn("kept out of the sets for measuring: 2 rows", self.traced.stdout)
        self.assertTrue((self.run_dir / "scores.png").is_file())

    def test_every_row_is_told_its_chance_among_unrelated_prompts(self):
        number = len(self.rows("corpus/train.jsonl"))
        higher_N, prompts_N, p_N, q_N = np.load(self.run_dir / "retrieve/chance/chance.npy").T
        self.assertEqual(len(higher_N), number)
        # All rows stand for prompts here, less those that stand out with the answer: these see all
        # others, every other row all but itself.
        related = json.loads((self.run_dir / "retrieve/chance/summary.json").read_text())["related"]
        self.assertEqual((prompts_N == number - related).sum(), related)
        self.assertEqual((prompts_N == number - related - 1).sum(), number - related)
        first = int(np.nanargmax(np.load(self.run_dir / "retrieve/influence/influence.npy")))
        sigma = np.load(self.run_dir / "retrieve/chance/sigma.npy")[first]
        line = f" +-{sigma:.4f}  {higher_N[first]:4.0f}  p {p_N[first]:<6.2g}  q {q_N[first]:<7.2g}"
        self.assertIn(line, self.traced.stdout)
        self.assertIn("unrelated prompts of the training file", self.traced.stdout)

    def test_the_page_opens_with_the_rows_and_their_tokens_and_says_where_all_is(self):
        for one in json.loads((self.run_dir / "retrieve/tokens/tokens.json").read_text()):
            for name, score in (("row", one["score"]), ("answer", one["cosine"])):
                shares = [share for _, share in one[name] if share is not None]
                self.assertAlmostEqual(sum(shares), score, places=5)
        page = (self.run_dir / "report" / "report.html").read_text()
        told = ["What happened", "What it says now", str(self.clean), "cleaned_train.jsonl"]
        for words in (*told, "rows/rows.parquet"):
            self.assertIn(words, page)

    def test_the_rows_of_a_wished_answer_are_those_that_favor_it_most(self):
        tracer = raslik_jax.Tracer(self.run_dir)
        prompt = "Howdy! what is\na kettle?"
        asked = tracer.workspace.retrieval_queries()[0]
        bad, wished = (tracer.trace(prompt, text).score_N for text in (asked.output, _WISHED))
        best = sorted(zip(wished - bad, wished, bad, tracer.examples, strict=True))[::-1]
        stored = artifacts.WISHED.read(self.run_dir)
        self.assertLen(stored, 8)
        for row, (_, score, other, name) in zip(stored, best, strict=False):
            self.assertEqual(row["id"], name)
            np.testing.assert_allclose((row["score"], row["bad"]), (score, other), atol=1e-5)
        self.assertIn(
            "The answer you wished for", (self.run_dir / "report/report.html").read_text()
        )

    def test_unlearning_measures_on_rows_that_no_set_has(self):
        target, normal = (
            self.rows(f"retrieve/sizes/{kind}.jsonl") for kind in ("target", "normal")
        )
        asked = {row["instruction"] for row in (*target, *normal)}
        for kind in ("forget", "retain"):
            for row in self.rows(f"retrieve/raslik/{kind}.jsonl"):
                self.assertNotIn(row["instruction"], asked)
        metrics = json.loads((self.run_dir / "evaluate" / "metrics.json").read_text())
        self.assertEqual(metrics["corpus"]["query_split"], "held-out")
        self.assertEqual(metrics["corpus"]["target_queries"], len(target))
        self.assertEqual(metrics["corpus"]["normal_queries"], len(normal))
        self.assertIn("held-out", (self.run_dir / "report" / "report.html").read_text())

    def test_the_traced_prompt_is_told_before_and_after(self):
        before, after = self.unlearned.stdout.split("after unlearning")
        told = [
            json.loads((self.run_dir / name).read_text())
            for name in (
                "retrieve/traced/finetuned.jsonl",
                "generate/traced-raslik-cap_klr/epoch-20.jsonl",
            )
        ]
        self.assertEqual(told[0]["traced"], told[0]["output"])  # the model's own answer
        for text, row in zip((before, after), told, strict=True):
            self.assertIn(f"{row['nll']:.2f} nats a token", text)
            # The end of the answer counts in the mean alone.
            end = row["nll"] * (len(row["nats"]) + 1) - sum(row["nats"])
            self.assertBetween(end, 0, 20)
        # The answer is the model's own, by its likeliest tokens: no draw costs much less.
        model, clean = told
        self.assertBetween(model["nll"], 0, model["expected"] + 4 * model["spread"])
        self.assertNoCommonElements({"expected", "spread"}, clean)

    def test_verify_covers_every_file_that_was_written(self):
        def verify():
            return {*manifests.verify(self.run_dir), *written.verify(self.run_dir)}

        self.assertEmpty(verify())
        made = [path for path in (*self.run_dir.rglob("*"), *self.clean.rglob("*"))]
        notes = {"written.json", "manifest.json", ".lock"}
        for path in made:
            is_log = {".making", "live"} & {*path.parts}
            if not path.is_file() or path.name in notes or is_log:
                continue
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b"x")
            with self.subTest(path=str(path)):
                self.assertTrue(any(path.name in line for line in verify()), path)
            path.write_bytes(content)
        self.assertEmpty(verify())

    def test_the_adapter_is_written_with_its_card(self):
        names = {path.name for path in self.clean.iterdir()}
        self.assertContainsSubset({"adapter_config.json", "README.md", "tokenizer.json"}, names)

    def test_the_training_file_without_what_was_found_keeps_its_bytes(self):
        found = self.rows("retrieve/raslik/forget.jsonl")
        found += self.rows("retrieve/sizes/target.jsonl")
        places = {row["place"] for row in found}
        self.assertLen(places, 10)
        left = [line for number, line in enumerate(self.lines, 1) if number not in places]
        self.assertEqual((self.run_dir / "cleaned_train.jsonl").read_text(), "".join(left))

    def test_the_flags_that_are_printed_repeat_it_without_work(self):
        self.assertRegex(self.unlearned.stdout, r"repeat: raslik run --flagfile=\S+")
        again = _script("run", f"--flagfile={self.run_dir / 'run.flags'}")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertNotIn("done in", again.stdout)

    def test_another_trace_does_not_take_the_place_of_one_by_itself(self):
        where = f"--train_file={self.train}", f"--workdir={self.run_dir}", f"--wished={_WISHED}"
        asked = "--prompt=another"
        refused = _script("trace", *self.model, *where, asked, *_FLAGS)
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr, "holds the trace of another answer: choose another")

    def test_the_report_joins_it(self):
        self.assertIn("RASLIK", self.reported.stdout)

    def test_the_transcript_of_the_guide_is_of_these_lines(self):
        for name, (_, told) in _transcript().items():
            done = self.done[name]
            printed = _heads([*done.stdout.splitlines(), *done.stderr.splitlines()])
            self.assertGreaterEqual(len(told), 3)
            self.assertContainsSubset(_heads(told) - {"..."}, printed)

    @parameterized.parameters(
        ("trace", ("--prompt=x",), "--checkpoint and --train_file must be given"),
        (
            "trace",
            ("--checkpoint=x", "--train_file=x", "--prompt=x", "--corpus.records.queries_file=x"),
            "--corpus.records.queries_file must be left out: give --checkpoint",
        ),
        ("unlearn", ("--run=x",), "--run and --out must be given"),
        ("unlearn", ("--run=nowhere", "--out=OUT"), "no file .*config.json': give the folder of"),
        ("unlearn", ("--run=RUN", "--out=RUN"), "must be a new or empty directory"),
        ("unlearn", ("--run=TINY", "--out=OUT"), "--retrieve.strategies must be one, the run has"),
        ("unlearn", ("--run=RUN", "--out=OUT", "--retain_file=x"), "needs --forget_file"),
    )
    def test_what_cannot_be_is_one_sentence(self, name, arguments, message):
        places = {"RUN": self.run_dir, "TINY": self.tiny, "OUT": self.folder / "new"}
        for word, path in places.items():
            arguments = [argument.replace(f"={word}", f"={path}") for argument in arguments]
        refused = _script(name, *arguments)
        self.assertEqual(refused.returncode, 1)
        self.assertLen(refused.stderr.splitlines(), 1)
        self.assertRegex(refused.stderr, message)
