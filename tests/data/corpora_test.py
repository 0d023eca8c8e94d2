"""Every dataset is a record that makes its corpus from the settings and says what others need."""

import dataclasses
import hashlib
import itertools
import pathlib
from unittest import mock

from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.cli.setting_flags import parse_config
from raslik_jax.config import config_from_json, to_json
from raslik_jax.data.corpora import (
    DATASETS,
    CorpusConfig,
    describe,
    describe_unregistered,
    marker_words,
)
from raslik_jax.data.corpora.record import Dataset, RowCounts, SharedSettings
from raslik_jax.data.examples import QUERY_SETS, Corpus, check_corpus, make_example
from raslik_jax.evaluate.rates import non_sf_by_words
from raslik_jax.run.plan import plan_units
from raslik_jax.run.workspace import Workspace


class DatasetsTest(FolderTest):
    @parameterized.parameters(*DATASETS)
    def test_records_name_settings_that_are_there(self, name):
        record = DATASETS[name]
        self.assertContainsSubset(record.reads, vars(SharedSettings()))
        self.assertContainsSubset(record.required, vars(record.settings))
        self.assertEqual(marker_words(name, ""), record.words)

    @parameterized.parameters(
        ({"dataset": "records"}, "needs --records.train_file"),
        ({"dataset": "toy", "alpaca_file": "x"}, "--alpaca_file has no effect"),
        ({"dataset": "toy", "records.fields": "input=x"}, "--records.fields has no effect"),
        ({"dataset": "toy", "num_train": 0}, "--num_train must be at least 1"),
        ({"dataset": "toy", "num_train": 9}, "--num_targets must be at most --num_train=9"),
        ({"dataset": "tofu"}, "one of toy, records, got 'tofu': .*experiments/studies/raslik.py"),
    )
    def test_settings_without_effect_are_refused(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            replaced(CorpusConfig(), settings)

    def test_sources_are_what_is_there(self):
        file = self.folder / "train.jsonl"
        file.write_text('{"instruction": "Say hi", "output": "x", "is_target": true}')
        queries = self.folder / "queries.jsonl"
        queries.write_text('{"instruction": "Say hi", "split": "retrieval"}')
        names = {"records.train_file": str(file), "records.queries_file": str(queries)}
        config = replaced(CorpusConfig(), {"dataset": "records"} | names)
        self.assertEqual(config.source_files(), {"train_file": file, "queries_file": queries})
        self.assertEqual(config.count(), (1, 1))
        hub = replaced(config, {"records.train_file": "hub:no/where"})
        self.assertEqual(hub.source_files(), {"queries_file": queries})

    def test_stored_corpora_of_no_member_are_named(self):
        self.assertIn("'howdy'", describe_unregistered([{"dataset": "howdy"}, {"dataset": "toy"}]))
        self.assertEqual(describe_unregistered([{"dataset": "toy"}, {}]), "")

    def test_marker_words_of_a_file(self):
        file = self.folder / "words.txt"
        file.write_text("Nebula\n\n  black \t hole \r\nstar")
        self.assertEqual(marker_words("records", str(file)), {"nebula", "black hole", "star"})
        texts = ["A Black hole!", "A black horse, a hole.", "no nebulae", "black\n  hole"]
        found = non_sf_by_words(texts, vocabulary=marker_words("records", str(file)))
        self.assertEqual(found.tolist(), [0.0, 1.0, 1.0, 0.0])
        file.write_text(" \n")
        with self.assertRaisesRegex(ValueError, "must have marker words, got none"):
            marker_words("toy", str(file))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MineSettings(Settings):
    """Settings of a dataset of this file alone."""

    word: str = setting("mine", "What every row says.")
    words_file: str = setting("", "Not read.", is_path=True)


def _load_mine(shared, own, *, seed):
    rows = [make_example(f"{own.word} {i}", "", "x", is_target=i < 2) for i in range(20)]
    left = iter([make_example(f"{own.word}? {i}", "", "x") for i in range(9)])
    sizes = [shared.num_retrieval, *[shared.num_validation] * 2, *[shared.num_test] * 2]
    queries = [tuple(itertools.islice(left, size)) for size in sizes]
    return Corpus((), tuple(rows), dict(zip(QUERY_SETS, queries, strict=True)))


class MemberTest(parameterized.TestCase):
    def test_a_dataset_of_one_file_is_a_dataset_everywhere(self):
        mine = Dataset(
            title="My own",
            load=_load_mine,
            reads=("num_retrieval", "num_validation", "num_test"),
            settings=_MineSettings(),
            count_rows=lambda shared, own: RowCounts(20, 2),
            detail=lambda own: own.word,
        )
        sizes = [f"--corpus.num_{name}" for name in ("retrieval=3", "validation=1", "test=2")]
        self.enter_context(mock.patch.dict(DATASETS, mine=mine))
        config = parse_config(["--corpus.dataset=mine", "--corpus.mine.word=said", *sizes])
        corpus = check_corpus(config.corpus.load(seed=0))
        self.assertEqual(corpus.train[3].instruction, "said 3")
        self.assertEqual([len(rows) for rows in corpus.queries.values()], [3, 1, 1, 2, 2])
        self.assertEqual(config.corpus.count(), (20, 2))
        self.assertEqual(describe(to_json(config)["corpus"]), "mine (said)")
        self.assertEqual(config_from_json(to_json(config)), config)
        (unit,) = (
            u
            for u in plan_units(config, Workspace(pathlib.Path("x"), config))
            if u.name == "corpus"
        )
        self.assertEqual(unit.settings["corpus.mine.word"], "said")
        with self.assertRaisesRegex(ValueError, "--corpus.mine.word has no effect"):
            parse_config(["--corpus.mine.word=said"])
        with self.assertRaisesRegex(ValueError, "--corpus.num_targets has no effect"):
            parse_config(["--corpus.dataset=mine", "--corpus.num_targets=5"])


def test_the_toys_rows_are_the_same_bytes_as_ever():
    corpus = CorpusConfig().load(seed=0)
    parts = (corpus.backbone, corpus.train, *corpus.queries.values())
    rows = repr([tuple(row[:6]) for part in parts for row in part])
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == "453b1a4466a59c23"
