"""Sentence vectors of many texts: batching changes nothing, real weights give torch's vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from support import shared_data

from experiments.studies.encoders import checkpoint, encoder, encoder_cases, make_encoders
from experiments.studies.encoders.checkpoint import load_sentence_tokenizer
from experiments.studies.encoders.embedding import embed_texts


class EmbedTextsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        bound, self.weights = encoder_cases.load("bert_plain")
        config = dataclasses.replace(bound.config, pooling="mean")
        self.encoder = encoder.bind_encoder(config)
        generator = np.random.default_rng(0)
        longest = min(config.max_length, 20)
        self.tokens = [
            generator.integers(1, config.vocab_size, length).tolist()
            for length in (1, longest, 3, 17, 5, 5, 16)
        ]

    def test_batches_give_what_single_texts_give(self):
        width = max(map(len, self.tokens))
        tokens_BL = np.array([ids + [0] * (width - len(ids)) for ids in self.tokens], np.int32)
        mask_BL = np.arange(width) < np.array([len(ids) for ids in self.tokens])[:, None]
        embed = jax.jit(self.encoder.embed)
        alone = [embed(self.weights, *row) for row in zip(tokens_BL, mask_BL, strict=True)]
        vector_NE = embed_texts(self.encoder, self.weights, self.tokens, batch_size=3)
        np.testing.assert_allclose(vector_NE, np.stack(alone), atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(vector_NE, axis=1), 1.0, atol=1e-5)

    def test_empty_and_overlong_texts_are_refused(self):
        too_long = [1] * (self.encoder.config.max_length + 1)
        for tokens in ([[]], [too_long]):
            with self.assertRaisesRegex(ValueError, "cut them when tokenizing"):
                embed_texts(self.encoder, self.weights, tokens)


def test_the_sentence_tokenizer_adds_its_tokens_and_cuts_between_them():
    folder = shared_data() / "models" / "bge-small-en-v1.5"
    encode = load_sentence_tokenizer(folder, max_len=8)
    short, cut = encode(["Howdy!", "word " * 40])
    assert (short[0], short[-1]) == (cut[0], cut[-1]) == (101, 102)
    assert len(short) < 8 and len(cut) == 8
    with pytest.raises(ValueError, match="a tokenizer must exist"):
        load_sentence_tokenizer(folder / "nowhere.json", max_len=8)


@pytest.mark.heavy
def test_real_bge_in_batches_gives_the_vectors_that_torch_gives():
    folder = shared_data() / "models" / "bge-small-en-v1.5"
    model = checkpoint.load_encoder(folder, dtype=jnp.float32)
    bound = encoder.bind_encoder(model.config)
    tokens = load_sentence_tokenizer(folder, max_len=512)(make_encoders.SENTENCES)
    vector_NE = embed_texts(bound, model.weights, tokens)
    worst = np.abs(vector_NE - encoder_cases.GOLDEN["bge_small"]).max()
    print(f"largest difference from torch {worst:.1e}")
    assert worst < 1e-4
