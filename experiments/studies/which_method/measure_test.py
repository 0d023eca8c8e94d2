"""Which method when: the sets that others made, their measures, and contrast queries."""

import numpy as np
import pyarrow
import pytest

from experiments.studies.which_gradient import cells
from experiments.studies.which_method import measure, page, recall, stages


def test_the_rows_of_a_set_are_read_and_a_missing_one_is_named(tmp_path):
    folder = tmp_path / "math" / "train"
    folder.mkdir(parents=True)
    table = pyarrow.table({"prompts": ["2 + 3?"], "response": ["5"], "variation": ["sums"]})
    path = folder / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(path), "w") as file, pyarrow.ipc.new_stream(file, table.schema) as to:
        to.write_table(table)
    expected = [{"instruction": "2 + 3?", "output": "5", "label": "sums"}]
    assert measure.read_set(tmp_path, "math", "train") == expected
    with pytest.raises(ValueError, match="math/test/data-00000-of-00001.arrow"):
        measure.read_set(tmp_path, "math", "test")


def test_coverage_is_the_share_of_the_class_among_as_many_rows():
    score_N, is_target_N = np.array([5, 4, 3, 2, 1.0]), np.array([1, 0, 1, 1, 0], bool)
    assert measure.top_share(score_N, is_target_N) == pytest.approx(2 / 3)


def test_a_constant_difference_has_an_interval_of_no_length():
    assert measure.paired_interval(np.full(7, 0.25)) == [0.25, 0.25, 0.25]


def test_two_stages_order_the_best_of_the_first_by_the_second():
    cheap_N, fine_N = np.array([4, 3, 2, 1.0]), np.array([-0.5, 0.1, 0.9, 0.8])
    order = np.argsort(-measure.rescored(cheap_N, fine_N, 0.5))
    assert order.tolist() == [1, 0, 2, 3]
    assert measure.rescored(cheap_N, fine_N, 1.0).tolist() == fine_N.tolist()


def test_cosines_are_centered_by_the_rows_that_were_drawn():
    generator = np.random.default_rng(0)
    row_NK, query_QK = generator.normal(size=(9, 4)), generator.normal(size=(2, 4))
    drawn = [1, 4, 6]
    mean_K = np.mean([row_NK[n] / np.linalg.norm(row_NK[n]) for n in drawn], axis=0)
    for q, query_K in enumerate(query_QK):
        for n, row_K in enumerate(row_NK):
            one_K, other_K = (v / np.linalg.norm(v) - mean_K for v in (query_K, row_K))
            cosine = one_K @ other_K / np.linalg.norm(one_K) / np.linalg.norm(other_K)
            found_QN = stages.centered_cosines(row_NK, query_QK, drawn)
            assert found_QN[q, n] == pytest.approx(cosine, abs=1e-12)


@pytest.mark.parametrize("is_unit", [False, True])
def test_a_contrast_is_the_cosine_with_the_difference_of_two_gradients(is_unit):
    vectors_MK, number = np.random.default_rng(0).normal(size=(12, 5)), 8
    norm_M = np.linalg.norm(vectors_MK, axis=1)
    unit_MK = vectors_MK / norm_M[:, None]
    loss = measure.DEFAULT
    fields_MF = np.zeros((12, 5))
    fields_MF[:, measure.passes.fields_of([loss]).index(f"norm {loss}")] = norm_M
    arrays = {f"gram {loss}": unit_MK @ unit_MK.T, "fields": fields_MF}
    run = cells.Run("own_model", arrays, {"labels": ["a"] * number, "queries": [{}] * 4})
    found_QN = measure.contrast_scores(run, loss, is_unit=is_unit)
    given_MK = unit_MK if is_unit else vectors_MK
    direction_QK = given_MK[8:10] - given_MK[10:]
    direction_QK /= np.linalg.norm(direction_QK, axis=1, keepdims=True)
    moved_NK = unit_MK[:number] - unit_MK[:number].mean(axis=0)
    moved_NK /= np.linalg.norm(moved_NK, axis=1, keepdims=True)
    np.testing.assert_allclose(found_QN, direction_QK @ moved_NK.T, atol=1e-12)


def test_the_stored_results_decide_by_the_rule():
    results = page.read_results()
    gain, low, high = page.contrast_interval(results["own_model"], "contrast")
    assert low <= gain <= high < 0.02  # no contrast query wins
    assert page.better_everywhere() == []


def test_the_places_of_a_fact_are_in_the_order_of_scores_and_then_of_rows():
    score_N, is_target_N = np.array([0.2, 0.9, 0.5, 0.5, 0.1]), np.array([0, 0, 1, 1, 1], bool)
    assert recall.ranks(score_N, is_target_N).tolist() == [2, 3, 5]


def test_facts_are_those_that_the_checkout_makes(tmp_path):
    folder = tmp_path / "bergson" / "recall"
    with pytest.raises(ValueError, match="bergson/recall/facts.py"):
        recall.generate(tmp_path, 2, 0)
    folder.mkdir(parents=True)
    made = (
        "def fact_generator(number, path, seed):\n"
        "    yield from ({'n': i, 'seed': seed} for i in range(number))\n"
    )
    (folder / "facts.py").write_text(made)
    assert recall.generate(tmp_path, 2, 5) == [{"n": number, "seed": 5} for number in range(8)]
