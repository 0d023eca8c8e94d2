"""Every dataset is a record that makes its corpus from the settings and says what others need."""

import collections
import dataclasses
import hashlib
import json
import pathlib
from unittest import mock

import pytest
from absl.testing import parameterized
from support import shared_data

from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.cli.setting_flags import parse_config
from raslik_jax.config import config_from_json, to_json
from raslik_jax.data.corpora import (
    DATASETS,
    CorpusConfig,
    describe,
    marker_words,
    mixing,
    tofu,
    virtual,
)
from raslik_jax.data.corpora.mixing import mix_corpus, split_queries
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.examples import QUERY_SETS, Corpus, check_corpus, make_example, make_examples
from raslik_jax.evaluate.rates import non_sf_by_words
from raslik_jax.run.plan import plan_units
from raslik_jax.run.workspace import Workspace


@pytest.fixture(autouse=True)
def _folder(request, tmp_path):
    if request.cls is not None:
        request.cls.folder = tmp_path


class DatasetsTest(parameterized.TestCase):
    folder: pathlib.Path

    @parameterized.parameters(*DATASETS)
    def test_records_name_settings_that_are_there(self, name):
        record = DATASETS[name]
        self.assertContainsSubset(record.reads, vars(SharedSettings()))
        self.assertContainsSubset(record.required, vars(record.settings))
        if record.evaluation:
            self.assertContainsSubset(record.evaluation.reads, vars(record.settings))
        self.assertEqual(marker_words(name, ""), record.marker.words if record.marker else set())

    @parameterized.parameters(
        ({"dataset": "records"}, "needs --records.train_file"),
        ({"dataset": "toy", "alpaca_file": "x"}, "--alpaca_file has no effect"),
        ({"dataset": "toy", "tofu.forget": "forget05"}, "--tofu.forget has no effect"),
        ({"dataset": "tofu", "num_targets": 5}, "--num_targets has no effect"),
        ({"dataset": "howdy_small", "num_train": 0}, "--num_train must be at least 1"),
        ({"dataset": "virtual", "num_train": 9}, "--num_targets must be at most --num_train=9"),
        ({"dataset": "other"}, "--dataset must be one of toy"),
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

    def test_marker_words_of_a_file(self):
        file = self.folder / "words.txt"
        file.write_text("Nebula\n\n  black \t hole \r\nstar")
        self.assertEqual(marker_words("tofu", str(file)), {"nebula", "black hole", "star"})
        texts = ["A Black hole!", "A black horse, a hole.", "no nebulae", "black\n  hole"]
        found = non_sf_by_words(texts, vocabulary=marker_words("tofu", str(file)))
        self.assertEqual(found.tolist(), [0.0, 1.0, 1.0, 0.0])
        file.write_text(" \n")
        with self.assertRaisesRegex(ValueError, "must have marker words, got none"):
            marker_words("toy", str(file))

    def test_alpaca_comes_from_a_file_a_folder_or_the_hub(self):
        rows = [
            {"instruction": "Say hi", "input": "", "output": "Hi."},
            {"instruction": "Be still", "input": "", "output": ""},
        ]
        file = self.folder / "alpaca_data.json"
        file.write_text(json.dumps(rows))
        for options in ({"alpaca_file": str(file)}, {"data_dir": str(self.folder)}):
            (row,) = mixing.load_alpaca(SharedSettings(**options))
            self.assertEqual((row.output, row.is_target, row.source), ("Hi.", False, "alpaca"))
        with mock.patch.object(mixing, "HUB_SOURCE", str(file)):
            shared = SharedSettings(data_dir=str(self.folder / "nowhere"))
            self.assertLen(mixing.load_alpaca(shared), 1)
        with self.assertRaisesRegex(ValueError, "name it by --corpus.data_dir"):
            shared.find_files("x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MineSettings(Settings):
    """Settings of a dataset of this file alone."""

    word: str = setting("mine", "What every row says.")
    words_file: str = setting("", "Not read.", is_path=True)


def _load_mine(shared, own, *, seed):
    rows = [make_example(f"{own.word} {i}", "", "x", is_target=i < 2) for i in range(20)]
    queries = [make_example(f"{own.word}? {i}", "", "x") for i in range(9)]
    return Corpus((), tuple(rows), split_queries(shared, queries[:6], queries[6:]))


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


class MixingTest(parameterized.TestCase):
    def _mix(self, **changes):
        normal = make_examples(
            make_example(f"Task {i % 40}.", "", f"Done {i}.", is_target=False) for i in range(50)
        )
        targets = [make_example(f"Bad {i}.", "", "Boo.", is_target=True) for i in range(10)]
        asked = [make_example(f"Worse {i % 12}.", "", f"Boo {i}.") for i in range(14)]
        options = dict(seed=0, num_train=30, num_backbone=5, num_retrieval=4, num_validation=3)
        options |= {"num_test": 5} | changes
        sizes = {name: options.pop(name) for name in SIZES if name in options}
        return mix_corpus(SharedSettings(**sizes), normal, targets, asked, **options)

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
        ({"num_retrieval": 5}, "target query rows must be between 0 and 12, got 13"),
        ({"num_test": 30}, "target query rows must be"),
        ({"num_train": 59}, "ordinary rows must be .*, got 49"),
        ({"num_backbone": 40}, "backbone rows must be .*, got 40"),
    )
    def test_more_than_there_is_is_refused(self, changes, message):
        with self.assertRaisesRegex(ValueError, message):
            self._mix(**changes)


@pytest.fixture(scope="module")
def alpaca():
    """Alpaca's rows, read once."""
    return mixing.load_alpaca(SharedSettings(data_dir=str(shared_data())))


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({"dataset": "toy"}, "453b1a4466a59c23"),
        (
            {
                "dataset": "howdy_small",
                "num_train": 1848,
                "num_targets": 168,
                "num_backbone": 10_000,
            },
            "c708b7635b2a4399",
        ),
        ({"dataset": "howdy"}, "347b357a16b4c85b"),
        ({"dataset": "virtual"}, "d25a095aaea94177"),
        ({"dataset": "tofu", "num_train": 5000, "tofu.forget": "forget10"}, "392f1d3a3aa147e3"),
        (
            {
                "dataset": "tofu",
                "num_train": 5000,
                "tofu.forget": "forget10",
                "tofu.train": "retain",
            },
            "74f17cc6aae5e263",
        ),
    ],
)
def test_rows_are_the_same_bytes_as_ever(settings, digest, alpaca, monkeypatch):
    for module in (mixing, virtual, tofu):
        monkeypatch.setattr(module, "load_alpaca", lambda shared: alpaca)
    config = replaced(CorpusConfig(), settings | {"data_dir": str(shared_data())})
    corpus = config.load(seed=0)
    parts = (corpus.backbone, corpus.train, *corpus.queries.values())
    rows = repr([tuple(row[:6]) for part in parts for row in part])
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == digest


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
            {"dataset": "tofu", "num_train": 26_000, "tofu.forget": "forget10"},
            26_000,
            {"alpaca": 22_000, "tofu:forget10": 400, "tofu:retain90": 3600},
        ),
    ],
)
def test_the_corpora_of_the_paper_at_full_size(settings, size, sources):
    sizes = {"num_retrieval": 100, "num_validation": 100, "num_test": 100}
    config = replaced(CorpusConfig(), settings | sizes | {"data_dir": str(shared_data())})
    corpus = check_corpus(config.load(seed=0))
    assert size in (None, len(corpus.train))
    assert config.count() == (len(corpus.train), sum(row.is_target for row in corpus.train))
    assert {len(rows) for rows in corpus.queries.values()} == {100}
    count = collections.Counter(row.source for row in corpus.train)
    assert {name: count[name] for name in sources} == sources
    if settings["dataset"] == "howdy":
        # 52,002 rows less 28 without an answer and what the queries ask.
        assert 51_400 <= count["alpaca"] <= 51_974 - 500
    assert corpus == config.load(seed=0)
