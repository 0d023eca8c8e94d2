"""The geometry study: its predictions beside a model of two parameters, its results, its text."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.studies.geometry import measure, page
from raslik_jax.data.batches import Batch
from raslik_jax.models.decoder import Decoder


def _points(gradient, pull):
    """A path on a plane: row losses are y(p) of which `gradient` is the derivative."""
    places = {step: np.array([0.01 * step, -0.02 * step]) for step in measure.POINTS}
    return {
        step: measure.Point(place, gradient(place), pull(place)) for step, place in places.items()
    }


def test_predictions_of_quadratic_losses_are_exact_where_they_should_be():
    generator = np.random.default_rng(0)
    slope_MP, factor_MPP = generator.normal(size=(5, 2)), generator.normal(size=(5, 2, 2))
    hessian_MPP = factor_MPP @ factor_MPP.transpose(0, 2, 1)

    def loss(place):
        return slope_MP @ place + np.einsum("i,mij,j->m", place, hessian_MPP, place) / 2

    def bend(direction):
        return np.einsum("i,mij,j->m", direction, hessian_MPP, direction)

    points = _points(lambda place: slope_MP + hessian_MPP @ place, lambda place: np.array([1, -2]))
    for step in measure.STEPS:
        found = measure.predict(points, step, bend, np.array([2.0, 1.0]))
        measured = loss(points[step].params_P)
        # The way is along the sets' gradient, whose length is told.
        for name in ("way, curved", "way, path", "sets, curved"):
            np.testing.assert_allclose(found[name], measured, rtol=1e-9, err_msg=name)
        first = slope_MP @ points[step].params_P
        for name in ("way, start", "sets, start"):
            np.testing.assert_allclose(found[name], first, rtol=1e-9)
        length = np.hypot(0.01, 0.02) * step
        along = slope_MP @ np.array([1, -1]) / np.sqrt(2) * length
        np.testing.assert_allclose(found["sets, signs"], along, rtol=1e-9)
        other = np.array([2, 1]) / np.sqrt(5) * length
        wanted = slope_MP @ other + bend(other) / 2
        np.testing.assert_allclose(found["sets, sharpest"], wanted, rtol=1e-9)
        assert ("sets, late" in found) == (step > measure.LATE)
    # From point to point each gradient counts for its own stretch.
    places = [points[at].params_P for at in measure.POINTS]
    wanted = sum(
        (slope_MP + hessian_MPP @ one) @ (other - one)
        for one, other in zip(places[:-1], places[1:], strict=True)
    )
    np.testing.assert_allclose(found["sets, path"], wanted, rtol=1e-9)


def test_a_gradient_of_zero_predicts_no_change():
    np.testing.assert_array_equal(measure.along(np.ones((3, 2)), np.zeros(2), 1.0), np.zeros(3))


def test_curvature_is_that_of_a_softmax_by_hand():
    generator = np.random.default_rng(1)
    weight_PV = generator.normal(size=(3, 4)).astype(np.float32)
    start_P, along_P = generator.normal(size=(2, 3)).astype(np.float32)

    # Logits are linear in the parameters, so that Gauss-Newton is the whole Hessian.
    bound = Decoder(
        SimpleNamespace(rotation_border=None, logit_cap=None),
        hidden=lambda lora, base, tokens_L, **options: jnp.broadcast_to(lora, (len(tokens_L), 3)),
        logits=lambda lora, base, hidden_TE: hidden_TE @ base["head"]["kernel"],
        prefill=None,
        extend=None,
    )
    base = {"head": {"kernel": jnp.asarray(weight_PV)}}
    tokens_BL = np.array([[0, 2, 1], [3, 1, 0]], np.int32)
    mask_BL = np.array([[False, True, True], [False, True, False]])
    batch = Batch(tokens_BL, mask_BL, 2, np.arange(2, dtype=np.int32))
    nll, gradients, bend, sharpen = measure._functions(bound, lambda flat_P: flat_P)

    def by_hand(params_P, row):
        logits_V = params_P @ weight_PV.astype(np.float64)
        log_p_V = logits_V - np.log(np.exp(logits_V).sum())
        return -np.mean([log_p_V[t] for t in tokens_BL[row][mask_BL[row]]])

    p_V = np.exp(start_P @ weight_PV)
    p_V = p_V / p_V.sum()
    hessian_PP = weight_PV @ (np.diag(p_V) - np.outer(p_V, p_V)) @ weight_PV.T
    wanted = [by_hand(start_P.astype(np.float64), row) for row in range(2)]
    np.testing.assert_allclose(nll(start_P, base, batch), wanted, rtol=1e-5)
    np.testing.assert_allclose(
        bend(start_P, base, batch, along_P), [along_P @ hessian_PP @ along_P] * 2, rtol=1e-4
    )
    np.testing.assert_allclose(
        sharpen(start_P, base, batch, along_P), 2 * hessian_PP @ along_P, rtol=1e-4, atol=1e-6
    )
    steps = [start_P + 1e-3 * step for step in np.eye(3)], [start_P - 1e-3 * s for s in np.eye(3)]
    wanted = [
        [(by_hand(up, row) - by_hand(down, row)) / 2e-3 for up, down in zip(*steps, strict=True)]
        for row in range(2)
    ]
    np.testing.assert_allclose(gradients(start_P, base, batch), wanted, atol=1e-4)


def test_statistics_are_those_of_scipy_and_the_interval_holds_the_mean():
    generator = np.random.default_rng(0)
    rows = 8 * len(measure.KINDS)
    paths = []
    for seed in range(3):
        predicted = generator.normal(size=(len(measure.STEPS), rows))
        measured = 0.5 * predicted + 0.2 * generator.normal(size=predicted.shape)
        found = {"measured": measured, "sets, start": predicted}
        paths.append(page.Path(seed, "antipodal", "ga_gdr", 1e-4, found))
    one, other = (paths[0].found[name][0, :8] for name in ("sets, start", "measured"))
    assert page.correlation(one, other) == pytest.approx(stats.pearsonr(one, other).statistic)
    assert page.slope(one, 3 * one) == pytest.approx(3)
    assert page.correlation(np.ones(4), np.arange(4.0)) == 0
    mean, low, high = page.judge(paths, page.slope, "sets, start", 16, "targets")
    assert low < mean < high and mean == pytest.approx(0.5, abs=0.15)
