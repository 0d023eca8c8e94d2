"""The classifier's training and its measures against their obvious versions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from experiments.studies.encoders import classifier, encoder
from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding
from raslik_jax.train import loop

_SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIZES |= {"intermediate_size": 16, "max_position_embeddings": 40, "type_vocab_size": 1}
_CONFIG = encoder.RobertaConfig(**_SIZES, pad_token_id=1, num_labels=2)
_SILENT = dataclasses.replace(_CONFIG, hidden_dropout_prob=0.0)


def _texts(count: int) -> tuple[list[list[int]], list[int]]:
    """Token ids whose class is which half of the vocabulary they come from."""
    rng = np.random.default_rng(0)
    labels = [row % 2 for row in range(count)]
    tokens = [
        [2, *rng.integers(*((6, 13) if label else (13, 20)), 1 + row % 10).tolist(), 3]
        for row, label in enumerate(labels)
    ]
    return tokens, labels


def _weights():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype),
        encoder.abstract_encoder(_CONFIG, dtype=jnp.float32),
    )


class TextsTest(parameterized.TestCase):
    def test_only_texts_of_one_label_count_and_each_once(self):
        found = classifier.label_texts(
            ["a", "b", "a", "c", "c", " ", "d", "e", "b", "f"],
            [True, False, True, True, False, True, None, True, False, False],
        )
        self.assertEqual(found.texts, ("a", "b", "e", "f"))
        self.assertEqual(found.labels, (1, 0, 1, 0))

    @parameterized.parameters(([False, False, False],), ([True, True, False],), ([None] * 3,))
    def test_a_class_that_is_missing_is_named(self, is_target):
        with self.assertRaisesRegex(ValueError, "each class, got .* --evaluate.non_sf=words"):
            classifier.label_texts(["a", "b", "c"], is_target)

    @parameterized.parameters((0.1, 0), (0.5, 7), (0.99, 0))
    def test_the_parts_are_disjoint_seeded_and_split_by_class(self, share, limit):
        texts = classifier.Texts(tuple(map(str, range(50))), (1,) * 10 + (0,) * 40)
        train, held = classifier.split_texts(texts, held_out=share, limit=limit, seed=3)
        again = classifier.split_texts(texts, held_out=share, limit=limit, seed=3)
        self.assertEqual((train, held), again)
        self.assertNotEqual(
            held, classifier.split_texts(texts, held_out=share, limit=limit, seed=4)[1]
        )
        self.assertEmpty(set(train.texts) & set(held.texts))
        for label, size in ((1, 10), (0, 40)):
            size = min(size, limit or size)
            expected = min(max(round(share * size), 1), size - 1)
            self.assertEqual(held.labels.count(label), expected)
            self.assertEqual(train.labels.count(label), size - expected)
        for part in (train, held):
            self.assertEqual([int(int(text) < 10) for text in part.texts], list(part.labels))

    @parameterized.parameters(
        ([1, 2], [2, 2], (2 / 3 + 4 / 5) / 2),
        ([2, 3], [2, 3], 1.0),
        ([0, 0], [1, 1], 0.0),
        # Everything called non-sf: precision 3/4, recall 1, and 0 for the other class.
        ([3, 0], [3, 1], (6 / 7 + 0) / 2),
    )
    def test_macro_f1(self, hits, counts, expected):
        self.assertAlmostEqual(classifier.macro_f1(hits, counts), expected)


class TrainingTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bound = encoder.bind_encoder(_SILENT)
        cls.weights = _weights()

    def test_a_step_is_the_mean_gradient_of_its_texts_alone_and_unpadded(self):
        tokens, labels = [[2, 7, 9, 3], [2, 14, 8, 3], [2, 19, 5, 3]], [1, 0, 1]

        @jax.jit
        @jax.value_and_grad
        def nll(weights, tokens_L, label):
            logits_C = self.bound.classify(weights, tokens_L, jnp.ones(4, bool))
            return -jax.nn.log_softmax(logits_C)[label]

        alone = [
            nll(self.weights, np.asarray(ids, np.int32), label)
            for ids, label in zip(tokens, labels, strict=True)
        ]
        expected = np.mean([loss for loss, _ in alone])
        gradient = jax.tree.map(lambda *leaves: sum(leaves) / 3, *(g for _, g in alone))
        tx = optax.sgd(0.5)
        algorithm = classifier.classifying(self.bound, tx, dropout_key=jax.random.key(0))
        encoded = encoding.encode_rows(tokens, pad_id=1)
        plan = batches.plan_rows(encoded, np.array([0, 1, 2, -1]))
        batch = batches.make_batch(encoded, plan)
        self.assertEqual(batch.tokens_BL.shape, (4, 16))
        state = algorithm.init(self.weights)
        state, info = jax.jit(algorithm.step)(state, jnp.asarray(labels), batch)
        np.testing.assert_allclose(info.loss, expected, rtol=1e-5)
        jax.tree.map(
            lambda new, old, g: np.testing.assert_allclose(new, old - 0.5 * g, atol=1e-6),
            state.params,
            self.weights,
            gradient,
        )

    def test_it_learns(self):
        tokens, labels = _texts(40)
        bound = encoder.bind_encoder(_CONFIG)
        encoded = encoding.encode_rows(tokens, pad_id=1)
        tx = loop.adamw(loop.make_schedule(1e-2, 60, kind="linear", warmup=0.0))
        # AdamW raises a float to an integer power, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            fitted = loop.fit(
                classifier.classifying(bound, tx, dropout_key=jax.random.key(0)),
                self.weights,
                jnp.asarray(labels),
                lambda start: batches.epoch_batches(encoded, batch_size=16, seed=0, start=start),
                num_steps=60,
            )
        predict = classifier.make_predictor(bound, fitted.state.params, batch_size=16)
        measured = classifier.measure(
            predict,
            lambda texts: [tokens[int(text)] for text in texts],
            classifier.Texts(tuple(map(str, range(40))), tuple(labels)),
        )
        self.assertEqual(measured["texts"], {"non-sf": 20, "sci-fi": 20})
        self.assertEqual(measured["macro_f1"], 1.0)
        self.assertGreater(measured["non_sf"]["non-sf"], 0.8)
        self.assertLess(measured["non_sf"]["sci-fi"], 0.2)

    def test_a_probability_does_not_depend_on_what_it_is_batched_with(self):
        tokens, _ = _texts(7)
        predict = classifier.make_predictor(self.bound, self.weights, batch_size=3)
        together_NC = predict(tokens)
        np.testing.assert_allclose(together_NC.sum(1), 1.0, rtol=1e-6)
        logits_C = jax.jit(self.bound.classify)(
            self.weights, jnp.asarray(tokens[4]), jnp.ones(len(tokens[4]), bool)
        )
        np.testing.assert_allclose(together_NC[4], jax.nn.softmax(logits_C), atol=1e-6)
        self.assertEqual(predict([]).shape, (0, 2))

    def test_what_cannot_be_trained_is_refused(self):
        with self.assertRaisesRegex(ValueError, "must have 1 to 38 tokens, got 39 to 39"):
            classifier.make_predictor(self.bound, self.weights)([[3] * 39])
