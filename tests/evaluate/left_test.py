"""The share of the fine-tuning that is left, against loops over resampled prompts."""

import numpy as np
import pytest

from raslik_jax.evaluate import left

_HOW = {"seed": 3, "resamples": 400}


def _records(*columns):
    """Records of a model: nats, words and ended of its prompts."""
    return [
        left.NormalRecord(id=str(n), **dict(zip(left.MEASURES, row, strict=True)))
        for n, row in enumerate(zip(*columns, strict=True))
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_each_share_equals_a_loop_over_resampled_prompts(seed):
    draw, size = np.random.default_rng(seed), 12
    values = {
        "nats": [draw.uniform(low, low + 9, size).tolist() for low in (4, 0, 30)],
        "words": [draw.integers(low, low + 9, size).tolist() for low in (18, 9, 60)],
        "ended": [[True] * 11 + [False], [True] * 12, [False] * 8 + [True] * 4],
    }
    models = [_records(*(columns[m] for columns in values.values())) for m in range(3)]
    for name, (now, before, base) in values.items():
        found = left.share_left(name, *models, _HOW)
        over, under = (np.array(base, float) - np.array(part, float) for part in (now, before))
        draws = np.random.default_rng(3).integers(size, size=(400, size))
        shares = [over[d].sum() / under[d].sum() for d in draws]
        ends = np.quantile(shares, [0.025, 0.975])
        np.testing.assert_allclose([*found.values()], [over.sum() / under.sum(), *ends])
    shown = {name: left.share_left(name, *models, _HOW) for name in values}
    assert f"by length {shown['words']['mean']:.0%} [" in left.describe(shown)


def test_the_fine_tuned_model_has_all_and_the_base_nothing():
    before = _records([2.0, 3.0, 5.0], [5, 7, 0], [True, True, True])
    base = _records([9.0, 8.0, 7.0], [40, 60, 30], [False] * 3)
    for name in left.MEASURES:
        for model, share in ((before, 1.0), (base, 0.0)):
            found = left.share_left(name, model, before, base, _HOW)
            assert [*found.values()] == [share] * 3


@pytest.mark.parametrize("count", [1, 2])
def test_it_is_unknown_for_so_few_prompts(count):
    models = [_records([nats] * count, [9] * count, [True] * count) for nats in (5.0, 2.0, 9.0)]
    found = {name: left.share_left(name, *models, _HOW) for name in left.MEASURES}
    assert {*found.values()} == {None}


def test_it_is_unknown_where_the_base_answers_alike():
    before = _records([2.0, 3.0, 4.0], [5, 7, 9], [True] * 3)
    base = _records([9.0, 8.0, 7.0], [9, 7, 5], [True] * 3)
    found = {name: left.share_left(name, base, before, base, _HOW) for name in left.MEASURES}
    assert found["words"] is None and found["ended"] is None
    assert "length and ending unknown" in left.describe(found)
    assert left.warn(found) == "other fine-tuning is lost too: by likelihood at most 0% is left"
