"""The rule that ends unlearning: by hand, and held to a slow reading of its words."""

import itertools
import math
import random

import numpy as np
import pytest

from raslik_jax.evaluate import stopping


def _probes(*levels, sets=("forget", "kept")):
    return [
        {"step": 5 * n, "levels": dict(zip(sets, row, strict=True)), "answers": {}}
        for n, row in enumerate(levels)
    ]


def _goals(probes, **backbone):
    levels = {**probes[0]["levels"], **backbone}
    return stopping.find_goals(probes[0]["levels"], levels, forget_rise=2.0)


@pytest.mark.parametrize(
    ("levels", "kept", "end"),
    [
        ([(0.5, 2.0)], 0, ""),
        ([(0.5, 2.0), (1.0, 2.0)], 1, ""),
        # Two fifths of the way are enough, at two probes in a row.
        ([(0.5, 2.0), (2.5, 2.05)], 1, ""),
        ([(0.5, 2.0), (1.31, 2.05), (1.5, 2.0)], 2, "forgotten"),
        ([(0.5, 2.0), (1.31, 2.0), (1.29, 2.0)], 1, ""),
        ([(0.5, 2.0), (1.29, 2.0), (1.31, 2.0)], 2, ""),
        # Beyond the backbone is not better: the first that is there is kept.
        ([(0.5, 2.0), (2.5, 2.0), (9.0, 2.0)], 1, "forgotten"),
        # Beyond the bound once, it may come back.
        ([(0.5, 2.0), (1.0, 2.0), (2.5, 2.2)], 1, ""),
        ([(0.5, 2.0), (1.0, 2.0), (2.5, 2.2), (2.4, 2.0)], 3, ""),
        ([(0.5, 2.0), (1.0, 2.0), (2.5, 2.2), (2.4, 2.0), (2.3, 2.0)], 3, "forgotten"),
        ([(0.5, 2.0), (1.0, 2.0), (1.5, 2.2), (2.0, 2.3)], 1, "others lose too much"),
        # Nothing is kept that took more than it may.
        ([(0.5, 2.0), (9.0, 3.0), (9.0, 4.0)], 0, "others lose too much"),
        # What is less forgotten than before is no step forward.
        ([(0.5, 2.0), (0.4, 2.0)], 0, ""),
    ],
)
def test_the_most_forgotten_probe_within_the_bound_is_kept(levels, kept, end):
    probes = _probes(*levels)
    goals, is_natural = _goals(probes, forget=2.5)
    assert is_natural
    assert stopping.choose_step(probes, goals, max_rise=0.1) == kept
    assert stopping.find_end(probes, goals, max_rise=0.1) == end


def test_the_set_that_is_furthest_from_its_goal_decides():
    probes = _probes((0.5, 0.5, 2.0), (3.0, 1.0, 2.0), sets=("forget", "behavior", "kept"))
    goals, _ = _goals(probes, forget=2.5, behavior=2.5)
    assert stopping.share_forgotten(probes[1]["levels"], goals) == 0.25
    assert stopping.find_end(probes, goals, max_rise=0.1) == ""


def test_a_backbone_that_is_the_model_gives_no_goal_and_one_set_that_was_learned_is_enough():
    probes = _probes((0.5, 0.7, 2.0), sets=("forget", "behavior", "kept"))
    goals, is_natural = _goals(probes)
    assert not is_natural
    # Where each has lost 2 nats a token it is enough.
    for name, start in (("forget", 0.5), ("behavior", 0.7)):
        levels = {**probes[0]["levels"], "forget": 9.0, "behavior": 9.0}
        for rise, end in ((1.999, ""), (2.001, "forgotten")):
            probe = {"step": 5, "levels": levels | {name: start + rise}, "answers": {}}
            assert stopping.find_end([probes[0], probe, probe], goals, max_rise=0.1) == end
    goals, is_natural = _goals(probes, forget=0.5 + math.log(1.1) - 1e-6)
    assert not is_natural
    goals, is_natural = _goals(probes, forget=0.5 + math.log(1.1) + 1e-6)
    assert is_natural
    assert set(goals) == {"forget"}


def test_a_token_broken_alone_is_not_counted_as_forgotten():
    """One token of a name becomes impossible, the fact stays: by a plain mean all is forgotten."""
    number, tokens = np.array([5, 4]), [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    start, backbone = 0.1 * np.array(tokens), np.array([[1.0, 0.1, 1, 1, 8], [1, 0.1, 1, 8, 0]])
    broken, back = start.copy(), 0.95 * backbone
    broken[:, 1] = 20.0

    def share(nll_NT, most_NT):
        levels = [
            {"forget": stopping.mean_nats(part, number, most_NT=most_NT).mean(), "kept": 1.0}
            for part in (start, nll_NT)
        ]
        usual = {"forget": stopping.mean_nats(backbone, number).mean(), "kept": 1.0}
        plain = {"forget": 0.1, "kept": 1.0}
        goals, _ = stopping.find_goals(plain, usual, forget_rise=2.0, counted=levels[0])
        return stopping.share_forgotten(levels[1], goals)

    assert share(broken, None) == 1
    assert share(broken, backbone) == 0
    assert share(back, backbone) == pytest.approx(0.95, abs=0.06)


def test_without_rows_to_keep_the_retained_ones_stand_for_them():
    assert stopping.rise_of({"forget": 1.0, "retain": 2.5}, {"forget": 0.5, "retain": 2.0}) == 0.5
    both = {"retain": 9.0, "kept": 2.25}
    assert stopping.rise_of(both, {"retain": 0.0, "kept": 2.0}) == 0.25
    assert stopping.rise_of({"forget": 1.0}, {"forget": 0.5}) == 0.0


def test_a_quarter_of_rows_that_show_the_behavior_unlabeled_moves_nothing():
    assert stopping.middle_mean([0.01] * 12 + [3.0] * 4) == pytest.approx(0.01)
    assert stopping.middle_mean([0.0] * 8 + [3.0] * 8) == pytest.approx(1.5)
    assert stopping.middle_mean([1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert stopping.middle_mean([9.0, 1.0, 2.0, -9.0]) == pytest.approx(1.5)


def _slowly(probes, goal, bound):
    """Returns the kept step and the end of a training that is watched probe by probe."""
    start, best, best_share, misses, hits = probes[0]["levels"], 0, 0.0, 0, 0
    for probe in probes[1:]:
        levels = probe["levels"]
        if levels["kept"] - start["kept"] > bound:
            misses, hits = misses + 1, 0
            if misses == 2:
                return best, probe["step"]
            continue
        misses = 0
        share = min((levels["forget"] - start["forget"]) / (goal - start["forget"]), 1.0)
        if share > best_share:
            best, best_share = probe["step"], share
        hits = hits + 1 if share >= 0.4 else 0
        if hits == 2:
            return best, probe["step"]
    return best, None


def test_probe_by_probe_it_keeps_and_ends_where_its_words_say():
    """The kept probe changes to the newest alone: no model of an earlier one is needed again."""
    draw = random.Random(0)
    ends = []
    for _ in range(300):
        walk = [(0.5, 2.0)]
        for _ in range(12):
            forget, kept = walk[-1]
            walk.append((forget + draw.uniform(-0.2, 0.6), kept + draw.uniform(-0.08, 0.08)))
        probes = _probes(*walk)
        goals, _ = _goals(probes, forget=2.5)
        kept = 0
        for count in itertools.count(2):
            seen = probes[:count]
            chosen = probes[stopping.choose_step(seen, goals, max_rise=0.1)]["step"]
            assert chosen in (kept, seen[-1]["step"])
            kept, end = chosen, stopping.find_end(seen, goals, max_rise=0.1)
            if end or count == len(probes):
                break
        assert (kept, seen[-1]["step"] if end else None) == _slowly(probes, 2.5, 0.1)
        ends.append(end)
    assert set(ends) == {"", "forgotten", "others lose too much"}
