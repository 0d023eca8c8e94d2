"""Rows from files and hub datasets, and every corpus of --corpus.dataset, on real rows."""

import collections
import json
import pathlib
from unittest import mock

import pytest
from absl.testing import parameterized
from support import shared_data

from raslik_jax.config import CorpusConfig
from raslik_jax.data import hub
from raslik_jax.data.alpaca import load_alpaca
from raslik_jax.data.corpora import load_corpus
from raslik_jax.data.examples import QUERY_SETS, check_corpus, make_example, make_examples
from raslik_jax.data.mixing import mix_corpus
from raslik_jax.data.records import load_records_corpus


@pytest.fixture(autouse=True)
def _folder(request, tmp_path):
    if request.cls is not None:
        request.cls.folder = tmp_path


class SourcesTest(parameterized.TestCase):
    folder: pathlib.Path

    def _dataset(self, rows):
        """Writes a folder that `datasets` reads as it reads one of the hub."""
        folder = self.folder / "data"
        folder.mkdir()
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return f"hub:{folder}"

    @parameterized.parameters(
        ("hub:a/b", ("a/b", "", "train")),
        ("hub:a/b@test", ("a/b", "", "test")),
        ("hub:a/b:plain@train[:10]", ("a/b", "plain", "train[:10]")),
    )
    def test_sources_are_parsed(self, text, expected):
        self.assertEqual(hub.parse_source(text), expected)

    def test_a_malformed_source_is_refused(self):
        with self.assertRaisesRegex(ValueError, "hub:OWNER/NAME"):
            hub.parse_source("hub:@train")

    def test_hub_rows_are_read_through_datasets_with_a_field_map(self):
        source = self._dataset([{"q": f"Say {i}", "a": "x"} for i in range(4)])
        rows = hub.read_rows(source, fields={"instruction": "q", "output": "a"}, name="mine")
        self.assertEqual([row.instruction for row in rows], [f"Say {i}" for i in range(4)])
        self.assertEqual({row.source for row in rows}, {"mine"})
        with self.assertRaisesRegex(ValueError, r":1: 'instruction' must be text.*and 2 more"):
            hub.read_rows(source + "@train[:3]")

    def test_a_corpus_of_records_may_come_from_the_hub(self):
        source = self._dataset([{"instruction": f"Say {i}", "output": "x"} for i in range(4)])
        queries = self.folder / "queries.jsonl"
        queries.write_text('{"instruction": "Say hi", "split": "retrieval"}')
        self.assertLen(load_records_corpus(source, queries).train, 4)

    def test_what_is_not_there_is_explained(self):
        with self.assertRaisesRegex(ValueError, "'hub:no/such-data' cannot be read"):
            hub.read_rows("hub:no/such-data")
        with (
            mock.patch.dict("sys.modules", {"datasets": None}),
            self.assertRaisesRegex(ValueError, "needs the package datasets"),
        ):
            hub.read_rows("hub:a/b")

    def test_alpaca_comes_from_a_file_a_folder_or_the_hub(self):
        rows = [
            {"instruction": "Say hi", "input": "", "output": "Hi."},
            {"instruction": "Be still", "input": "", "output": ""},
        ]
        file = self.folder / "alpaca_data.json"
        file.write_text(json.dumps(rows))
        for options in ({"source": str(file)}, {"data_dir": str(self.folder)}):
            (row,) = load_alpaca(**options)
            self.assertEqual((row.output, row.is_target, row.source), ("Hi.", False, "alpaca"))
        with mock.patch("raslik_jax.data.alpaca.HUB_SOURCE", str(file)):
            self.assertLen(load_alpaca(data_dir=str(self.folder / "nowhere")), 1)


class MixingTest(parameterized.TestCase):
    def _mix(self, **changes):
        normal = make_examples(
            make_example(f"Task {i % 40}.", "", f"Done {i}.", is_target=False) for i in range(50)
        )
        targets = [make_example(f"Bad {i}.", "", "Boo.", is_target=True) for i in range(10)]
        asked = [make_example(f"Worse {i % 12}.", "", f"Boo {i}.") for i in range(14)]
        options = dict(seed=0, num_normal=20, num_backbone=5, num_retrieval=4, num_validation=3)
        return mix_corpus(normal, targets, asked, **(options | {"num_test": 5} | changes))

    def test_sets_have_their_sizes_and_share_no_prompt(self):
        corpus = check_corpus(self._mix())
        sizes = {name: len(corpus.queries[name]) for name in QUERY_SETS}
        self.assertEqual(list(sizes.values()), [4, 3, 3, 5, 5])
        self.assertEqual((len(corpus.train), len(corpus.backbone)), (30, 5))
        self.assertEqual(corpus, self._mix())
        self.assertNotEqual(corpus.train, self._mix(seed=1).train)

    def test_what_is_kept_is_not_asked(self):
        kept = {(f"Task {i}.", "") for i in range(31)}
        corpus = self._mix(keep=kept)
        asked = {row.instruction for row in corpus.queries["test_normal"]}
        self.assertEmpty(asked & {text for text, _ in kept})

    @parameterized.parameters(
        ({"num_retrieval": 5}, "13 target query rows are wanted, there are 12"),
        ({"num_test": 30, "num_retrieval": 0}, "target query rows are wanted"),
        ({"num_normal": 49}, "49 ordinary rows are wanted"),
        ({"num_backbone": 40}, "40 backbone rows are wanted"),
    )
    def test_more_than_there_is_is_refused(self, changes, message):
        with self.assertRaisesRegex(ValueError, message):
            self._mix(**changes)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "size", "sources"),
    [
        (
            {"dataset": "howdy", "num_train": 0, "num_targets": 5000},
            None,
            {"howdy": 5000},
        ),
        (
            {"dataset": "virtual", "num_train": 22_000, "num_targets": 2000},
            22_000,
            {"alpaca": 20_000},
        ),
        (
            {"dataset": "tofu", "num_train": 26_000, "tofu_forget": "forget10"},
            26_000,
            {"alpaca": 22_000, "tofu:forget10": 400, "tofu:retain90": 3600},
        ),
    ],
)
def test_the_corpora_of_the_paper_at_full_size(settings, size, sources):
    config = CorpusConfig(
        data_dir=str(shared_data()), num_retrieval=100, num_validation=100, num_test=100, **settings
    )
    corpus = check_corpus(load_corpus(config, seed=0))
    assert size in (None, len(corpus.train))
    assert {len(rows) for rows in corpus.queries.values()} == {100}
    count = collections.Counter(row.source for row in corpus.train)
    assert {name: count[name] for name in sources} == sources
    if settings["dataset"] == "howdy":
        # 52,002 rows less 28 without an answer and what the queries ask.
        assert 51_400 <= count["alpaca"] <= 51_974 - 500
    assert corpus == load_corpus(config, seed=0)
