"""The study of sets: its hypervolume beside sums over a grid, its rule, the stored results."""

import numpy as np
import pytest

from experiments.studies.own_model import measure
from experiments.studies.sets import page, report, smollm2



@pytest.mark.parametrize("seed", range(4))
def test_the_volume_is_the_mean_of_the_best_retention_over_a_grid_of_forget_rates(seed):
    generator = np.random.default_rng(seed)
    forget_E, retain_E = generator.uniform(0.1, 1, 6), generator.uniform(size=6)
    floor, grid = 0.3, 0.3 + 0.7 * (np.arange(200_000) + 0.5) / 200_000
    best = np.zeros(len(grid))
    for forget, retain in zip(forget_E, retain_E, strict=True):
        best = np.maximum(best, np.where(grid >= max(forget, floor), retain, 0))
    found = report.hypervolume(forget_E, retain_E, floor)
    np.testing.assert_allclose(found, best.mean(), atol=2e-5)


def test_the_volume_is_one_where_all_is_forgotten_and_nothing_lost_and_none_where_nothing_is():
    one = np.ones(1)
    assert report.hypervolume(0.2 * one, one, 0.3) == pytest.approx(1)
    assert report.hypervolume(one, one, 0.3) == 0


def _run(seed, split, better):
    """Runs in which `better` forgets at the second model, and others at the third."""

    def path(name):
        ends = [1.0, 0.2 if name == better else 0.9, 0.2]
        return {"F": [[f] * 3 for f in ends], "R": [[0.9] * 2 for _ in ends]}

    names = (*report.NEW, *report.AGAINST)
    paths = {f"{name} ga_gdr": path(name) for name in names}
    for epoch in range(3):  # the others never forget
        for name in names:
            if name != better:
                paths[f"{name} ga_gdr"]["F"][epoch] = [0.9] * 3
    return {"seed": seed, "split": split, "backbone": [0.3] * 3, "paths": paths}


def test_the_rule_reads_validation_queries_alone():
    runs = [_run(0, "validation", "trial"), _run(0, "test", "coverage")]
    assert report.choose(runs) == "trial"
    assert "| trial | 0.900 | 0.900 [0.900, 0.900] |" in report.volume_table(runs[:1])
    # (1 - .9) / (1 - .3) of R = .9 where F stays at .9.
    assert "| raslik | 0.129 | 0.129 [0.129, 0.129] |" in report.volume_table(runs[:1])
    table = report.difference_table(runs[:1], ("trial",))
    assert "+0.771 [+0.771, +0.771]" in table


_SMOLLM2 = report.HERE / "smollm2"


@pytest.mark.parametrize("objective", ["npo_klr", "ga_gdr", "ga_klr"])
def test_an_objective_changes_no_set(objective):
    sets = [
        {run["name"]: run["sets"] for run in found if run["split"] == "validation"}
        for found in (report.read_results(_SMOLLM2 / objective), report.read_results(_SMOLLM2))
    ]
    assert sets[0] == sets[1]


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("objectives with ascent, validation queries, seed 0", 13),
        ("all objectives, test queries", 4),
        ("`weighted`, all objectives", 5),
        ("the retain set, Embedding and Random, all objectives", 8),
    ],
)
def test_every_run_of_a_reading_has_a_path_of_each_strategy_and_objective(name, strategies):
    reading = page.READINGS[name]
    runs = reading.runs()
    assert runs
    assert {len(run["paths"]) for run in runs} == {strategies * len(reading.objectives)}


def test_raslik_with_the_papers_gradient_is_stored_by_its_own_name():
    paper = {"sketch": {"loss": "next_token", "targets": "response", "normalize": "vector"}}
    paper |= {"retrieve": {"center": False, "aggregate": "mean"}}
    assert report.stored_name("raslik", {}) == "raslik"
    assert report.stored_name("raslik", paper) == report.PAPER
    assert report.stored_name("bm25", paper) == "bm25"


def test_the_corpora_have_three_seeds_each():
    found = report.by_behavior(report.read_results(_SMOLLM2 / "mixtures"))
    assert {name: [run["seed"] for run in runs] for name, runs in found.items()} == {
        "howdy": [0, 1, 2],
        "tofu": [0, 1, 2],
    }


def test_students_interval_over_behaviors_by_hand():
    def run(name, retains):
        paths = {
            f"{one} ga_gdr": {"F": [[0.2] * 3], "R": [[retain] * 2]}
            for one, retain in zip(("raslik", "bm25"), retains, strict=True)
        }
        return {"name": name, "seed": 0, "split": "test", "backbone": [0.2] * 3, "paths": paths}

    runs = [run("a", (0.5, 0.4)), run("b", (0.7, 0.5)), run("c", (0.2, 0.2))]
    # .1, .2 and 0: spread .1, 4.303 of Student's with two degrees of freedom.
    found = report.behavior_differences(runs, "raslik", "bm25")
    assert found == "+0.100 [-0.148, +0.348], 2 of 3 above"


def test_the_stop_rule_keeps_one_model():
    results = report.read_results(_SMOLLM2 / "stop")
    assert all(len(path["F"]) == 1 for run in results for path in run["paths"].values())


def test_paths_are_joined_of_the_same_answers_alone():
    run = _run(0, "test", "trial")
    other = run | {"paths": {"trial npo_klr": run["paths"]["trial ga_gdr"]}}
    (joined,) = report.join_paths([run, other])
    assert joined["paths"] == run["paths"] | other["paths"]
    for wrong in (other | {"backbone": [0.1] * 3}, run):
        with pytest.raises(ValueError, match="must have the same answers before unlearning"):
            report.join_paths([run, wrong])


def test_the_distance_is_that_of_the_last_model():
    forget_E, retain_E = np.array([0.2, 0.7]), np.array([1.0, 0.7])
    assert report.distance(forget_E, retain_E, 0.3) == pytest.approx(0.5)
    assert report.distance(forget_E, retain_E, 0.9) == pytest.approx(0.3)


def test_no_prompt_is_in_two_places():
    results = report.read_results(_SMOLLM2)
    trained_on = {measure.prompt_of(row) for row in measure.read_rows("train")}
    for name in measure.behaviors():
        asked = smollm2.candidates(name)
        parts = [trained_on, *map(set, asked.values())]
        parts += [set(smollm2.normal_prompts(split)) for split in ("validation", "test")]
        assert len(set.union(*parts)) == sum(map(len, parts))
        for run in results:
            if run["name"] == name:
                prompts, split = run["prompts"], run["split"]
                assert len(prompts["target"]) == smollm2.MOST[split]
                assert set(prompts["target"]) <= set(asked[split])
                assert prompts["normal"] == smollm2.normal_prompts(split)


def test_seeds_of_a_behavior_are_drawn_within_it():
    def path(retain):
        return {"raslik ga_gdr": {"F": [[0.2] * 3], "R": [[retain] * 2]}}

    seeds = [("style", 0.4), ("style", 0.8), ("style", 0.9), ("refusal", 0.2)]
    runs = [
        {"name": name, "seed": seed, "split": "test", "backbone": [0.2] * 3, "paths": path(retain)}
        for seed, (name, retain) in enumerate(seeds)
    ]
    # A behavior counts once, whatever its seeds.
    assert "| raslik | 0.700 | 0.200 | 0.450 [" in report.volume_table(runs)
    drawn = report.volumes(runs, resamples=4000)["raslik ga_gdr"]
    # Of both, of either alone, with means of three seeds drawn from three: [.4, .9].
    assert set(np.round(drawn[drawn < 0.29], 9)) == {0.2}
    np.testing.assert_allclose(np.mean(drawn), 0.45, atol=0.01)
    spread = np.var([0.4, 0.8, 0.9]) / 3  # of a mean of three
    # A quarter of draws has style twice, a half once.
    expected = (0.25 * (0.7**2 + spread / 2) + 0.25 * 0.04 + 0.5 * (0.45**2 + spread / 4)) - 0.45**2
    np.testing.assert_allclose(np.var(drawn), expected, rtol=0.1)


def test_a_table_of_behaviors_has_their_own_volumes_and_their_mean():
    path = {"F": [[0.2] * 3], "shown": [[0.0, 1.0, 1.0]], "R": [[0.9] * 2]}
    sets = dict.fromkeys((*report.NEW, *report.AGAINST), {"forget": ["1*"], "retain": ["2"]})
    runs = [
        {"name": name, "seed": 0, "split": "validation", "backbone": [floor] * 3, "sets": sets}
        | {"backbone_shown": [0.0] * 3, "paths": {f"{one} ga_gdr": path for one in sets}}
        for name, floor in (("style", 0.2), ("refusal", 0.0))
    ]
    volumes, _, shown, _, course, taken = report.tables(runs, "validation")
    # (1 - .2) / (1 - .2) and (1 - .2) of R = .9.
    assert "| trial | 0.900 | 0.720 | 0.810 [0.720, 0.900] |" in volumes
    assert "| trial | 0.300 | 0.300 | 0.300 [" in shown  # (1 - 2 / 3) of R
    assert "| trial ga_gdr | 0.20, 0.67, 0.90 |" in course
    assert "| trial | 1, 0, 1 | 1, 0, 1 |" in taken
