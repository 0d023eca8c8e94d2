"""The corpora of the paper: records, sizes, and the same rows as ever."""

import collections
import hashlib
import json
from unittest import mock

import pytest
from absl.testing import parameterized
from support import shared_data

from experiments.studies.corpora import mixing, paper, tofu, virtual
from experiments.studies.corpora.mixing import mix_corpus
from raslik_jax.base.settings import replaced
from raslik_jax.data.corpora import CorpusConfig, marker_words
from raslik_jax.data.corpora.record import SIZES, SharedSettings
from raslik_jax.data.examples import QUERY_SETS, check_corpus, make_example, make_examples


@pytest.mark.parametrize("name", paper.MEMBERS)
def test_records_name_settings_that_are_there(name, members):
    record = paper.MEMBERS[name]
    assert {*record.reads} <= {*vars(SharedSettings())}
    assert marker_words(name, "") == (record.words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "virtual", "tofu.forget": "forget05"}, "--tofu.forget has no effect"),
        ({"dataset": "virtual", "howdy.file": "x"}, "--howdy.file has no effect"),
        ({"dataset": "tofu", "num_targets": 5}, "--num_targets has no effect"),
        ({"dataset": "howdy_small", "num_train": 0}, "--num_train must be at least 1"),
        ({"dataset": "virtual", "num_train": 9}, "--num_targets must be at most --num_train=9"),
    ],
)
def test_settings_without_effect_are_refused(settings, message, members):
    with pytest.raises(ValueError, match=message):
        replaced(CorpusConfig(), settings)


def test_alpaca_comes_from_a_file_a_folder_or_the_hub(tmp_path):
    rows = [
        {"instruction": "Say hi", "input": "", "output": "Hi."},
        {"instruction": "Be still", "input": "", "output": ""},
    ]
    file = tmp_path / "alpaca_data.json"
    file.write_text(json.dumps(rows))
    for options in ({"alpaca_file": str(file)}, {"data_dir": str(tmp_path)}):
        (row,) = mixing.load_alpaca(SharedSettings(**options))
        assert (row.output, row.is_target, row.source) == ("Hi.", False, "alpaca")
    with mock.patch.object(mixing, "HUB_SOURCE", str(file)):
        shared = SharedSettings(data_dir=str(tmp_path / "nowhere"))
        assert len(mixing.load_alpaca(shared)) == 1
    with pytest.raises(ValueError, match="name it by --corpus.data_dir"):
        mixing.find_files(shared, "x")


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
def test_rows_are_the_same_bytes_as_ever(settings, digest, alpaca, members, monkeypatch):
    for module in (mixing, virtual, tofu):
        monkeypatch.setattr(module, "load_alpaca", lambda shared: alpaca)
    config = replaced(CorpusConfig(), settings | {"data_dir": str(shared_data())})
    corpus = config.load(seed=0)
    parts = (corpus.backbone, corpus.train, *corpus.queries.values())
    rows = repr([tuple(row[:6]) for part in parts for row in part])
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == digest


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
def test_the_corpora_of_the_paper_at_full_size(settings, size, sources, members):
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
