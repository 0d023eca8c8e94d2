"""Precise forgetting: the stored rows and results of the study."""

import json
import re

import jax.numpy as jnp
import numpy as np

from experiments.studies.precise import make_backdoor, make_rows, measure, page, trials
from raslik_jax.sketch.loss import Targets
from raslik_jax.train.losses import Outputs


def test_the_rows_are_made_of_the_word_lists():
    for name, rows in make_rows.make_rows().items():
        stored = (measure.HERE / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in stored] == rows


def test_the_validation_shares_no_prompt_with_the_test_and_asks_none_that_it_trains_on():
    asked = {}
    for name, case in measure.cases().items():
        for part in ("train", "held_out"):
            texts = {row["messages"][0]["content"] for row in case.rows(part)}
            asked[name in measure.VALIDATION, part] = texts | asked.get(
                (name in measure.VALIDATION, part), set()
            )
    assert not asked[True, "train"] & asked[True, "held_out"]
    assert not (asked[True, "train"] | asked[True, "held_out"]) & (
        asked[False, "train"] | asked[False, "held_out"]
    )


def test_the_stored_results_are_those_of_the_cases():
    for part in ("validation", "results"):
        for name, found in page.read(part).items():
            if name.split("/")[0] in make_backdoor.MARKERS:
                continue  # its rows are not stored
            case = measure.cases()[name.split("/")[0]]
            assert part == "validation" or case.behavior not in {*measure.VALIDATION, "refusal"}
            kinds = [row["behavior"] for row in case.rows("held_out")]
            for model in found.keys() - {"trace", "finding"}:
                assert found[model]["prompts"] == kinds.count(case.behavior)
                assert found[model]["normal_prompts"] == kinds.count("")


def test_the_trials_are_of_the_validation_and_read_by_the_page():
    stored = json.loads((measure.HERE / "trials.json").read_text())
    assert {one["case"] for one in stored} == {*measure.VALIDATION}
    titles = {one.title for one in trials.TRIALS.values()}
    assert {re.split(", mean of|, second", one["name"])[0] for one in stored} <= {*titles, "raslik unlearn"}
    lines = page.trials_table().splitlines()[2:]
    assert len(lines) == len({one["name"] for one in stored})
    assert "| CAP_KLR | 21 (9.7) | 22 (6.3) | 23 (11.4) | 25 (7.1) |  | 42 s, 55 s |" in lines
    short = [line.split(" | ")[0] for line in page.short_trials_table().splitlines()[2:]]
    assert {*short} < {line.split(" | ")[0] for line in lines}


def _outputs(logits_BTV, label_T, is_counted_T):
    """Returns outputs with these logits that need no model."""
    made = object.__new__(Outputs)
    targets = Targets(np.zeros((1, len(label_T), 1)), label_T[None], is_counted_T[None])
    vars(made).update(logits_BTV=jnp.asarray(logits_BTV), targets=targets)
    return made


def _log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_undial_and_ce_u_are_cross_entropies_from_a_teacher_without_the_label():
    label_T, is_counted_T = np.array([2, 0, 1, 0]), np.array([True, True, True, False])
    logits = np.random.default_rng(0).normal(size=(2, 1, 4, 3))
    model, teacher = (_outputs(one, label_T, is_counted_T) for one in logits)

    def expected(teacher_TV, fall, places):
        found = []
        for t in places:
            goal = np.exp(teacher_TV[t])
            goal[label_T[t]] *= np.exp(-fall)
            found.append(-goal / goal.sum() @ _log_softmax(logits[0, 0, t]))
        return [np.mean(found)]

    np.testing.assert_allclose(
        trials.undial((), model, teacher, teacher), expected(logits[1, 0], 10, range(3)), rtol=1e-5
    )
    np.testing.assert_allclose(
        trials.ce_u((), model, teacher, teacher), expected(logits[0, 0], np.inf, (1, 2)), rtol=1e-5
    )


def test_a_cap_near_zero_makes_the_base_the_goal():
    logits = np.random.default_rng(1).normal(size=(3, 1, 2, 3))
    logits[1, 0, 0, 0], logits[2, 0, 0, 0] = 4, -4  # the first token alone carries the behavior
    logits[2, 0, 1] = logits[1, 0, 1]
    outputs = [_outputs(one, np.array([0, 1]), np.array([True, True])) for one in logits]
    p, r, b = (_log_softmax(one[0]) for one in logits)
    kl = lambda one, other: np.exp(one) @ (one - other)
    np.testing.assert_allclose(
        trials.capped((), *outputs, cap=1e-30), [kl(b[0], p[0]) + kl(r[1], p[1]) / 2], rtol=1e-5
    )


def test_more_rows_for_measuring_leave_the_answers_as_they_were():
    kept = json.loads((measure.HERE / "held_out_trial.json").read_text())
    cells = {name: one["cap_klr"] for name, one in kept.items()}
    assert len(cells) == 8 and not any(one["shown"] for one in cells.values())
    assert sum(one["normal_same"] for one in cells.values()) == 173
    assert sum(one["normal_prompts"] for one in cells.values()) == 230
