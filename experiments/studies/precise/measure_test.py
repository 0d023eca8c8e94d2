"""Precise forgetting: the stored rows and results of the study."""

import json

from experiments.studies.precise import make_backdoor, make_rows, measure, page, trials


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
    assert {one["name"].split(", mean of")[0] for one in stored} <= {*titles, "raslik unlearn"}
    lines = page.trials_table().splitlines()[2:]
    assert len(lines) == len({one["name"] for one in stored})
    assert "| CAP_KLR | 21 (9.7) | 22 (6.3) | 23 (11.4) | 25 (7.1) | 42 s, 55 s |" in lines
    assert {*page.trials_table(25).splitlines()[2:]} < {*lines}
