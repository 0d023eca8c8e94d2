"""Which of unlearning and retraining is recommended, by their costs and the recipe."""

import pytest
from snapshots import said

from raslik_jax.incident import advising
from raslik_jax.incident.advising import Cost

_UNKNOWN = "no file next to it has one"


@pytest.mark.parametrize(
    ("unlearn", "retrain", "more", "command"),
    [
        # Few rows and a recipe.
        (Cost(480.0), Cost(285.0), {}, "retrain"),
        (Cost(480.0), Cost(900.0), {}, "retrain"),
        # Longer by ten minutes at most.
        (Cost(60.0), Cost(600.0), {}, "retrain"),
        # A large file.
        (Cost(480.0), Cost(40_000.0), {}, "unlearn"),
        # No recipe, however few the rows.
        (Cost(480.0), Cost(285.0), {"unknown": _UNKNOWN}, "unlearn"),
        # Only one of them fits.
        (Cost(480.0, 2e9), Cost(285.0, 9e9), {"memory_bytes": 8e9}, "unlearn"),
        (Cost(480.0, 9e9), Cost(9e5, 2e9), {"memory_bytes": 8e9}, "retrain"),
        (Cost(480.0, 9e9), Cost(9e5, 9e9), {"memory_bytes": 8e9}, "unlearn"),
    ],
)
def test_the_exact_answer_is_recommended_where_it_is_possible_and_cheap(
    unlearn, retrain, more, command
):
    advised, reason = advising.choose(unlearn, retrain, **more)
    assert advised == command
    said(reason)
