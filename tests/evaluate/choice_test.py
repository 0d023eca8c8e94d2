"""The file of --unlearn.choice: what comes back, and the fields that are refused."""

import math

import pytest
from snapshots import refused

from raslik_jax.evaluate import choice

_ENTRY = {"strategy": "raslik", "algorithm": "ga_gdr", "learning_rate": 1e-4, "epoch": 2}


def test_the_file_gives_one_point_for_each_method():
    value = {"choices": [_ENTRY, _ENTRY | {"algorithm": "ga_klr", "epoch": 1}], "rule": {}}
    assert choice.from_json(value, origin="c.json") == {
        ("raslik", "ga_gdr"): (1e-4, 2),
        ("raslik", "ga_klr"): (1e-4, 1),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": -1e-4},
        {"learning_rate": math.nan},
        {"learning_rate": "1e-4"},
        {"epoch": 0},
        {"epoch": 1.5},
        {},
    ],
)
def test_a_file_that_no_rule_writes_is_refused_by_field(change):
    with refused(ValueError):
        choice.from_json({"choices": [_ENTRY, _ENTRY | change]}, origin="choice.json")
