"""The curvature of the study in rows agrees with the matrix of all parameters."""

import numpy as np

from experiments.studies.curvature import measure


def test_products_agree_with_the_inverse_matrix():
    draw = np.random.default_rng(0)
    rows_NP, asked_QP, curved_SP = (draw.normal(size=(n, 9)).astype(np.float32) for n in (5, 3, 4))
    mean_P = rows_NP.mean(axis=0)
    rows, asked = rows_NP - mean_P, asked_QP - mean_P
    moment_PP = curved_SP.T @ curved_SP / 4
    ridge = 0.1 * np.trace(moment_PP) / 4
    inverse_PP = np.linalg.inv(moment_PP + ridge * np.eye(9))
    expected = rows @ inverse_PP @ asked.T
    found = measure.scores(rows_NP, asked_QP, curved_SP, 0.1)
    np.testing.assert_allclose(found["product"], expected, rtol=1e-4, atol=1e-5)
    norms = [np.sqrt(np.diag(one @ inverse_PP @ one.T)) for one in (rows, asked)]
    np.testing.assert_allclose(found["cosine"], expected / np.outer(*norms), rtol=1e-4, atol=1e-5)


def test_without_a_curvature_the_cosine_is_that_of_centered_rows():
    draw = np.random.default_rng(1)
    rows_NP, asked_QP = (draw.normal(size=(n, 9)).astype(np.float32) for n in (5, 3))
    rows, asked = rows_NP - rows_NP.mean(axis=0), asked_QP - rows_NP.mean(axis=0)
    unit = [one / np.linalg.norm(one, axis=1, keepdims=True) for one in (rows, asked)]
    found = measure.scores(rows_NP, asked_QP, None, 0.0)["cosine"]
    np.testing.assert_allclose(found, unit[0] @ unit[1].T, rtol=1e-4, atol=1e-5)


def test_a_joint_score_does_not_depend_on_units():
    draw = np.random.default_rng(2)
    first_NQ, second_NQ = draw.normal(size=(2, 6, 3))
    found = measure.joint(1000 * first_NQ, second_NQ)
    expected = [[a / np.std(x) + b / np.std(y) for a, b in zip(x, y, strict=True)]
                for x, y in zip(first_NQ.T, second_NQ.T, strict=True)]  # fmt: skip
    np.testing.assert_allclose(found.T, expected, rtol=1e-12)
