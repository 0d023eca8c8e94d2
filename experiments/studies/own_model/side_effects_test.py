"""The test of general text and general knowledge."""

import numpy as np

from experiments.studies.own_model import side_effects


def test_the_general_texts_and_questions_are_what_the_notes_say():
    texts, questions = side_effects.texts(), side_effects.questions()
    assert len(texts) == 3
    assert all(len(rows) == 5 and len({row.output for row in rows}) == 5 for rows in texts.values())
    assert len(questions) == len({rows[0].instruction for rows in questions}) == 40
    assert all(len({row.output for row in rows}) == 4 for rows in questions)


def test_the_likeliest_option_answers_and_a_tie_or_a_lost_one_does_not():
    nll_N = np.array([1.0, 2.0, 3.0, 4.0, 2.0, 1.0, 3.0, 4.0, 1.0, 1.0, 3.0, 4.0, 0.0, 1.0, 1.0, 1])
    tokens_N = np.array([2] * 12 + [0, 2, 2, 2])
    right_Q = side_effects.answered_right(nll_N, tokens_N, options=4)
    assert right_Q.tolist() == [True, False, False]


class General:
    """A bench that knows every answer but that of one question."""

    bootstrap = {"seed": 0, "resamples": 100}

    def __init__(self):
        self.workspace = self

    def fresh(self, model):
        return model

    def encode(self, rows, what):
        return rows

    def likelihood_of(self, model, rows):
        right = {rows_[0].example_id for rows_ in side_effects.questions()[1:]}
        nll_N = np.array([model - (row.example_id in right) for row in rows])
        return nll_N, np.full(len(rows), 7)


def test_what_else_changed_is_told_beside_the_models_before():
    found = {
        name: side_effects.measure(General(), nats, None)
        for name, nats in (("now", 2.0), ("finetuned", 1.0), ("backbone", 1.5))
    }
    assert [one["condition"] for one in found["now"]] == [*side_effects.texts(), "questions"]
    assert "a story 7.389 (before unlearning 2.718, in the base 4.482)" in side_effects.tell(found)
    found["now"][0]["perplexity"] = {"mean": 1e30, "low": 1e29, "high": 1e31}
    assert "a story 1e+30 (before unlearning 2.718" in side_effects.tell(found)
