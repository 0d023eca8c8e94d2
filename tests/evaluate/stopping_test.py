"""The rule that ends unlearning: by hand, and held to a slow reading of its words."""

import itertools
import random

import numpy as np
import pytest

from raslik_jax.evaluate import stopping, verdict


def _probes(*levels, sets=("forget", "kept"), **backbone):
    """Returns probes of sets of one row of one token, whose level is that of the row."""
    start = dict(zip(sets, levels[0], strict=True))
    goals = {
        name: verdict.make_goal(
            np.array([[start[name]]]),
            np.array([[backbone.get(name, start[name])]]),
            np.array([1]),
            forget_rise=2.0,
        )
        for name in stopping.FORGOTTEN
        if name in sets
    }
    found = []
    for n, row in enumerate(levels):
        own = dict(zip(sets, row, strict=True))
        gone = {name: goal.progress(np.array([[own[name]]])) for name, goal in goals.items()}
        found.append({"step": 5 * n, "levels": own, "gone": gone, "answers": {}})
    return found


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
        # Eight probes have to bring another row that is gone, or a twentieth of the way.
        ([(0.5, 2.0), (1.2, 2.0), *[(1.1, 2.0), (1.2, 2.0)] * 3, (1.1, 2.0)], 1, ""),
        ([(0.5, 2.0), (1.2, 2.0), *[(1.1, 2.0), (1.2, 2.0)] * 4], 1, "no progress"),
        ([(0.5, 2.0), (1.1, 2.0), *[(1.0, 2.0)] * 7, (1.21, 2.0)], 9, ""),
        ([(0.5, 2.0), (1.1, 2.0), *[(1.0, 2.0)] * 7, (1.19, 2.0)], 9, "no progress"),
        ([(0.5, 2.0), (1.29, 2.0), *[(1.2, 2.0)] * 7, (1.31, 2.0)], 9, ""),
        ([(0.5, 2.0), *[(0.5 + 0.013 * n, 2.0) for n in range(1, 21)]], 20, ""),
        ([(0.5, 2.0), *[(0.5 + 0.012 * n, 2.0) for n in range(1, 21)]], 20, "no progress"),
        ([(0.5, 2.0), *[(0.5, 2.0)] * 8], 0, "no progress"),
        # What is less forgotten than before is no step forward.
        ([(0.5, 2.0), (0.4, 2.0)], 0, ""),
    ],
)
def test_the_most_forgotten_probe_within_the_bound_is_kept(levels, kept, end):
    probes = _probes(*levels, forget=2.5)
    assert stopping.choose_step(probes, max_rise=0.1) == kept
    assert stopping.find_end(probes, max_rise=0.1) == end


def test_a_probe_at_which_enough_is_gone_is_kept_before_one_that_went_further():
    probes = _probes((0.5, 2.0), (1.31, 2.0), forget=2.5)
    one = {"forget": verdict.Progress(way=0.9, gone=3, of=10)}
    other = {"forget": verdict.Progress(way=0.8, gone=8, of=10)}
    for first, second, kept in ((one, other, 2), (other, one, 1)):
        probes[1] = probes[1] | {"gone": first}
        assert stopping.choose_step([*probes, probes[1] | {"gone": second}], max_rise=0.1) == kept


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
    start, best, best_share, misses, hits, shares = probes[0]["levels"], 0, 0.0, 0, 0, [0.0]
    for probe in probes[1:]:
        levels = probe["levels"]
        is_beyond = levels["kept"] - start["kept"] > bound
        share = min((levels["forget"] - start["forget"]) / (goal - start["forget"]), 1.0)
        if share > best_share and not is_beyond:
            best, best_share = probe["step"], share
        shares.append(best_share)
        before = shares[-9] if len(shares) > 8 else -1.0
        # Its only token, and so the row, is gone at a share of 0.4.
        is_stale = best_share < before + 0.05 and (best_share >= 0.4) == (before >= 0.4)
        misses = misses + 1 if is_beyond else 0
        hits = hits + 1 if share >= 0.4 and not is_beyond else 0
        if misses == 2 or hits == 2 or is_stale:
            return best, probe["step"]
    return best, None


def test_probe_by_probe_it_keeps_and_ends_where_its_words_say():
    """The kept probe changes to the newest alone: no model of an earlier one is needed again."""
    draw = random.Random(0)
    ends = []
    for _ in range(300):
        walk = [(0.5, 2.0)]
        for _ in range(20):
            forget, kept = walk[-1]
            walk.append((forget + draw.uniform(-0.4, 0.5), kept + draw.uniform(-0.08, 0.08)))
        probes = _probes(*walk, forget=2.5)
        kept = 0
        for count in itertools.count(2):
            seen = probes[:count]
            chosen = probes[stopping.choose_step(seen, max_rise=0.1)]["step"]
            assert chosen in (kept, seen[-1]["step"])
            kept, end = chosen, stopping.find_end(seen, max_rise=0.1)
            if end or count == len(probes):
                break
        assert (kept, seen[-1]["step"] if end else None) == _slowly(probes, 2.5, 0.1)
        ends.append(end)
    assert set(ends) == {"", "forgotten", "others lose too much", "no progress"}
