"""How a small step away from rows is told."""

import pytest

from raslik_jax.report.removal import Removal, helps, removal_sentence


def _found(measured, others, *, rows=32, score=0.41):
    draws = [Removal(rows, 0.01, 0.0, nats) for nats in others]
    return [Removal(rows, score, 0.187, measured), *draws]


@pytest.mark.parametrize(
    ("measured", "others", "expected"),
    [
        (0.214, (-0.003, 0.004, 0.001), True),
        (0.02, (-0.003, 0.03, 0.001), False),
        # More than each of the others, and hardly anything.
        (0.009, (-0.003, 0.004, 0.001), False),
        # Every step made the answer likelier, that away from the rows found the least.
        (-0.001, (-0.003, -0.004, -0.002), False),
    ],
)
def test_it_helps_where_no_draw_of_others_does_as_much(measured, others, expected):
    found = _found(measured, others)
    assert helps(found) == expected
    text = removal_sentence(found)
    assert text.endswith("Removing them should help.") == expected
    assert ("does not show that removing them would help" in text) != expected


def test_all_numbers_of_the_step_are_told():
    assert removal_sentence(_found(0.214, (-0.003, 0.004, 0.001))) == (
        "One small step away from 32 of the rows to forget makes the traced answers 0.214 nats a "
        "token less likely (+0.187 by the gradients alone, mean score 0.410); the same step away "
        "from as many other rows, drawn 3 times, changes them by -0.003 to +0.004. Removing them "
        "should help."
    )
    text = removal_sentence(_found(-0.02, (0.0,), rows=1, score=None), "best rows")
    assert text.startswith("One small step away from 1 of the best rows makes the traced answers ")
    assert "0.020 nats a token more likely (+0.187 by the gradients alone); the same step" in text


def test_without_rows_to_compare_with_nothing_is_said():
    assert removal_sentence(()) == removal_sentence(_found(0.2, ())) == ""
