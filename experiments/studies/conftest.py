"""Studies are tested under the settings of all tests, with members of their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.studies.sets import strategies
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run.stages.retrieve import SCORES
from tests.conftest import pytest_configure as pytest_configure


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with the members of the studies."""
    for name, record in strategies.MEMBERS.items():
        monkeypatch.setitem(STRATEGIES, name, record)
    for name, units in strategies.SCORES.items():
        monkeypatch.setitem(SCORES, name, units)
