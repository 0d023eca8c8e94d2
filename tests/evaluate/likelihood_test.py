"""Likelihoods against all logits in NumPy, perplexity over tokens, and the sets of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from absl.testing import absltest, parameterized
from support import all_logits, tiny_model, token_rows

from raslik_jax.data.batches import plan_one_shape
from raslik_jax.data.examples import make_example
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.evaluate import likelihood, perplexity

_MODEL = tiny_model()


def _encoded(shapes, seed=0):
    """Returns random rows of these (prompt length, response length)."""
    generator = np.random.default_rng(seed)
    return Encoded(
        ids=tuple(f"row {i}" for i in range(len(shapes))),
        tokens=tuple(generator.integers(1, 61, sum(shape)).astype(np.int32) for shape in shapes),
        start_N=np.array([prompt for prompt, _ in shapes]),
        pad_id=0,
    )


def _log_p(lora, tokens_L):
    """Returns the log probabilities at every position, from all logits in float64."""
    # One shape for all: what follows a token does not change it.
    padded_L = jnp.asarray(np.pad(tokens_L, (0, 16 - len(tokens_L))))
    logits_LV = np.float64(all_logits(_MODEL.decoder, lora, _MODEL.base, padded_L))
    return scipy.special.log_softmax(logits_LV, axis=-1)


def _slow_nats(tokens_L, start):
    """Returns the nats of the tokens from `start` on."""
    log_p_LV = _log_p(_MODEL.lora, tokens_L)
    return [-log_p_LV[t - 1, tokens_L[t]] for t in range(start, len(tokens_L))]


class LikelihoodTest(absltest.TestCase):
    def test_it_is_that_of_all_logits_and_answers_of_other_lengths_share_a_shape(self):
        measure = likelihood.answer_likelihood(_MODEL.decoder, batch_tokens=64)
        for on_ladder, shapes in (
            (False, [(3, 5), (4, 12), (8, 0)]),
            (True, [(3, 5), (4, 12), (8, 1)]),
            (True, [(3, 9), (4, 6), (8, 0)]),
        ):
            encoded = _encoded(shapes)
            found = measure(_MODEL.lora, _MODEL.base, encoded, on_ladder=on_ladder)
            np.testing.assert_array_equal(found.tokens_N, [tokens for _, tokens in shapes])
            for row, (start, tokens) in enumerate(shapes):
                nats = _slow_nats(encoded.tokens[row], start)
                expected = np.mean(nats) if tokens else 0.0
                self.assertAlmostEqual(found.nll_N[row], expected, delta=2e-6 * expected)
            plans = plan_one_shape(encoded, batch_tokens=64)
            self.assertEqual({(len(p.rows), p.length, p.num_targets) for p in plans}, {(3, 16, 16)})
        few = likelihood.answer_likelihood(_MODEL.decoder, batch_tokens=8)
        again = few(_MODEL.lora, _MODEL.base, encoded)
        np.testing.assert_allclose(again.nll_N, found.nll_N, rtol=2e-6)

    def test_every_token_has_its_own_nats_in_the_order_of_the_rows(self):
        # Two shapes or one, and the longest answer not in the first.
        encoded = _encoded([(3, 2), (12, 3), (3, 13), (2, 4)])
        measure = likelihood.token_likelihood(_MODEL.decoder, batch_tokens=32)
        for on_ladder in (False, True):
            found_NT = measure(_MODEL.lora, _MODEL.base, encoded, on_ladder=on_ladder)
            rows = zip(found_NT, encoded.tokens, encoded.start_N, strict=True)
            for nll_T, tokens_L, start in rows:
                expected = _slow_nats(tokens_L, start)
                np.testing.assert_allclose(nll_T[: len(expected)], expected, rtol=2e-6, atol=2e-6)
                np.testing.assert_array_equal(nll_T[len(expected) :], 0.0)

    def test_the_divergence_is_that_of_all_logits_in_both_directions(self):
        measure = likelihood.answer_divergence(_MODEL.decoder, batch_tokens=64)
        other = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(leaf), _MODEL.lora)
        encoded = _encoded([(3, 5), (4, 12), (8, 0)])
        found = measure(other, _MODEL.lora, _MODEL.base, encoded)
        for row in (0, 1):
            tokens_L, start = encoded.tokens[row], encoded.start_N[row]
            log_p, log_q = (_log_p(lora, tokens_L) for lora in (other, _MODEL.lora))
            places = slice(start - 1, len(tokens_L) - 1)
            to = (np.exp(log_p) * (log_p - log_q)).sum(-1)[places].mean()
            back = (np.exp(log_q) * (log_q - log_p)).sum(-1)[places].mean()
            self.assertGreater(abs(to - back), 1e-4 * to)  # the directions differ
            np.testing.assert_allclose(found.to_reference_N[row], to, rtol=1e-4)
            np.testing.assert_allclose(found.from_reference_N[row], back, rtol=1e-4)
        self.assertEqual([part_N[2] for part_N in found], [0.0, 0.0])
        swapped = measure(_MODEL.lora, other, _MODEL.base, encoded)
        np.testing.assert_allclose(swapped.from_reference_N, found.to_reference_N, rtol=1e-5)
        itself = measure(other, other, _MODEL.base, encoded)
        np.testing.assert_array_equal(np.stack(itself), 0.0)

    def test_a_model_that_has_overflown_is_refused(self):
        measure = likelihood.answer_likelihood(_MODEL.decoder, batch_tokens=64)
        base = {**_MODEL.base, "head": {"kernel": _MODEL.base["head"]["kernel"] * np.nan}}
        with self.assertRaisesRegex(ValueError, "got 2 of 2 that are not, such as that of row 0"):
            measure(_MODEL.lora, base, _encoded([(3, 5), (2, 2)]))


class PerplexityTest(parameterized.TestCase):
    def test_the_mean_is_over_tokens(self):
        records = [
            {"id": "a", "nll": 2.0, "tokens": 1},
            {"id": "b", "nll": 0.5, "tokens": 3},
            {"id": "c", "nll": 0.0, "tokens": 0},
        ]
        found = perplexity.perplexity(records, seed=0, resamples=200)
        self.assertAlmostEqual(found["mean"], np.exp(3.5 / 4))
        # The two possible extremes are one row drawn twice.
        self.assertAlmostEqual(found["low"], np.exp(0.5))
        self.assertAlmostEqual(found["high"], np.exp(2.0))

    def test_equal_rows_have_no_spread_and_an_absurd_one_is_a_number(self):
        records = [{"id": i, "nll": 3.0, "tokens": 4} for i in "abc"]
        found = perplexity.perplexity(records, seed=0, resamples=9)
        self.assertEqual({*found.values()}, {np.exp(3.0)})
        absurd = [{"id": "a", "nll": 1e4, "tokens": 2}]
        found = perplexity.perplexity(absurd, seed=0, resamples=9)
        self.assertEqual({*found.values()}, {np.exp(700.0)})

    @parameterized.parameters(([],), ([{"id": "a", "nll": 0.0, "tokens": 0}],))
    def test_nothing_to_measure_is_none(self, records):
        self.assertIsNone(perplexity.perplexity(records, seed=0, resamples=9))


class SetsTest(absltest.TestCase):
    train = [make_example(f"q{i}", "", f"a{i}", is_target=i < 4) for i in range(12)]
    target = [make_example(f"t{i}", "", "sci-fi") for i in range(3)]
    traced = [make_example("r0", "", "bad"), make_example("r1", "", "")]
    normal = [make_example("n0", "", " "), make_example("n1", "", "yes")]

    def _sets(self, train, **options):
        return perplexity.draw_sets(train, self.target, self.normal, self.traced, **options)

    def test_targets_others_and_held_out_queries_with_an_answer(self):
        sets = self._sets(self.train, number=20, seed=0)
        self.assertEqual({row.instruction for row in sets["forget"]}, {"q0", "q1", "q2", "q3"})
        self.assertEqual(
            {row.instruction for row in sets["retain"]}, {f"q{i}" for i in range(4, 12)}
        )
        self.assertEqual([row.instruction for row in sets["held-out"]], ["n1"])
        self.assertEqual({r.instruction for r in sets["behavior"]}, {"r0", "t0", "t1", "t2"})

    def test_a_smaller_number_takes_the_first_of_a_seeded_order(self):
        few, many = (self._sets(self.train, number=n, seed=1) for n in (3, 6))
        self.assertEqual(few["retain"], many["retain"][:3])
        self.assertNotEqual(self._sets(self.train, number=6, seed=2)["retain"], many["retain"])

    def test_without_labels_the_target_queries_are_the_forget_set(self):
        rows = [row._replace(is_target=None) for row in self.train]
        sets = self._sets(rows, number=20, seed=0)
        self.assertCountEqual(sets["forget"], self.target)
        self.assertLen(sets["retain"], 12)


def test_entropy_and_spread_are_those_of_the_next_tokens():
    rows = token_rows(0, [(4, 5), (6, 3), (3, 1), (4, 0)])
    step = likelihood.expected_step(_MODEL.decoder)
    mean_B, spread_B = step(_MODEL.lora, _MODEL.base, rows.batch(8))
    for number, (tokens_L, mask_L) in enumerate(zip(*rows, strict=True)):
        log_p_LV = _log_p(_MODEL.lora, tokens_L)[np.flatnonzero(mask_L) - 1]
        entropy_L = -(np.exp(log_p_LV) * log_p_LV).sum(axis=-1)
        variance_L = (np.exp(log_p_LV) * log_p_LV**2).sum(axis=-1) - entropy_L**2
        count = max(len(log_p_LV), 1)  # the last is a dummy row, of which there is nothing
        np.testing.assert_allclose(mean_B[number], entropy_L.sum() / count, rtol=1e-4)
        expected = np.sqrt(variance_L.sum()) / count
        np.testing.assert_allclose(spread_B[number], expected, rtol=1e-3)
