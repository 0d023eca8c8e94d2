"""Tests of studies run under the settings of all tests, with the members of the studies."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.studies import objectives
from experiments.studies.behaviors import corpus
from experiments.studies.corpora import paper
from experiments.studies.sets import strategies
from raslik_jax.data.corpora import DATASETS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run.stages.scores import SCORES
from raslik_jax.train.objectives import OBJECTIVES
from tests.conftest import paper_corpora as paper_corpora
from tests.conftest import pytest_configure as pytest_configure


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder as a study."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.study)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with the members of the studies."""
    families = (
        (STRATEGIES, strategies.MEMBERS),
        (SCORES, strategies.SCORES),
        (OBJECTIVES, objectives.MEMBERS),
        (DATASETS, {"behaviors": corpus.DATASET}),
        *paper.FAMILIES,
    )
    for family, own in families:
        for name, record in own.items():
            monkeypatch.setitem(family, name, record)
