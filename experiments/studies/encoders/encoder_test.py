"""The encoders equal torch's, padded or not, and read what a checkpoint says about itself."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized
from folders import FolderTest
from support import shared_data

from experiments.studies.encoders import checkpoint, encoder, encoder_cases, make_encoders


@pytest.mark.parametrize("name", encoder_cases.NAMES)
def test_hidden_states_and_logits_equal_torch(name):
    bound, weights = encoder_cases.load(name)
    rows = make_encoders.rows(name)
    types_BL = rows["types"] if name.startswith("bert") else np.zeros_like(rows["types"])
    hidden_BLE = jax.jit(jax.vmap(bound.hidden, in_axes=(None, 0, 0, 0)))(
        weights, rows["tokens"], rows["mask"], types_BL
    )
    np.testing.assert_allclose(
        np.asarray(hidden_BLE)[rows["mask"]],
        encoder_cases.GOLDEN[f"{name}/hidden"][rows["mask"]],
        atol=1e-5,
        rtol=1e-5,
    )
    if bound.config.num_labels:
        logits_BC = jax.vmap(bound.classify, in_axes=(None, 0, 0))(
            weights, rows["tokens"], rows["mask"]
        )
        np.testing.assert_allclose(logits_BC, encoder_cases.GOLDEN[f"{name}/logits"], atol=1e-4)


@pytest.mark.parametrize("name", ("bert_plain", "roberta_classifier"))
def test_padding_on_either_side_changes_nothing(name):
    bound, weights = encoder_cases.load(name)
    bound = encoder.bind_encoder(dataclasses.replace(bound.config, pooling="mean"))
    tokens_L = jnp.array([7, 12, 31, 8], jnp.int32)
    pad = bound.config.pad_token_id

    @jax.jit
    def pooled(tokens_L, mask_L):
        vector_E = bound.embed(weights, tokens_L, mask_L)
        logits_C = bound.classify(weights, tokens_L, mask_L) if bound.config.num_labels else ()
        return vector_E, logits_C

    alone = pooled(tokens_L, jnp.ones(4, bool))
    for before, after in ((0, 3), (3, 0), (1, 2)):
        padded_L = np.pad(tokens_L, (before, after), constant_values=pad)
        mask_L = np.pad(np.ones(4, bool), (before, after))
        padded = pooled(padded_L, mask_L)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), padded, alone)


def test_sentence_vectors_are_the_pooled_hidden_states_at_length_one():
    bound, weights = encoder_cases.load("bert_plain")
    tokens_L, mask_L = jnp.array([3, 4, 5, 0]), jnp.array([True, True, True, False])
    hidden_LE = np.asarray(bound.hidden(weights, tokens_L, mask_L))
    for pooling, pooled_E in (("cls", hidden_LE[0]), ("mean", hidden_LE[:3].mean(0))):
        config = dataclasses.replace(bound.config, pooling=pooling)
        vector_E = encoder.bind_encoder(config).embed(weights, tokens_L, mask_L)
        np.testing.assert_allclose(vector_E, pooled_E / np.linalg.norm(pooled_E), atol=1e-6)
    with pytest.raises(ValueError, match="pooling"):
        bound.embed(weights, tokens_L, mask_L)


def test_dropout_is_drawn_from_the_key_only():
    bound, weights = encoder_cases.load("roberta_classifier")
    tokens_L, mask_L = jnp.arange(3, 9), jnp.ones(6, bool)
    plain = bound.classify(weights, tokens_L, mask_L)
    classify = jax.jit(bound.classify)
    first, again, other = (
        classify(weights, tokens_L, mask_L, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, plain) and not np.allclose(first, other)
    silent = dataclasses.replace(bound.config, hidden_dropout_prob=0.0, classifier_dropout=0.0)
    np.testing.assert_array_equal(
        encoder.bind_encoder(silent).classify(weights, tokens_L, mask_L, jax.random.key(0)), plain
    )


def test_a_sequence_beyond_the_position_table_is_refused():
    for name, longest in (("bert_full_length", 9), ("roberta_full_length", 9)):
        bound, weights = encoder_cases.load(name)
        assert bound.config.max_length == longest
        with pytest.raises(ValueError, match=f"at most {longest} tokens"):
            bound.hidden(weights, jnp.ones(10, jnp.int32), jnp.ones(10, bool))


def test_bfloat16_keeps_its_dtype_and_comes_close():
    bound, weights = encoder_cases.load("bert_plain")
    tokens_L, mask_L = jnp.arange(3, 12), jnp.ones(9, bool)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    hidden_LE = bound.hidden(low, tokens_L, mask_L)
    assert hidden_LE.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        hidden_LE.astype(jnp.float32), bound.hidden(weights, tokens_L, mask_L), atol=0.15
    )


class CheckpointTest(FolderTest):
    @parameterized.parameters("bert_classifier", "bert_plain", "roberta_classifier")
    def test_what_is_saved_loads_again(self, name):
        first = checkpoint.load_encoder(
            encoder_cases.write(self.folder / "in", name), dtype=jnp.float32
        )
        checkpoint.save_encoder(self.folder / "out", first.config, first.weights)
        second = checkpoint.load_encoder(self.folder / "out", dtype=jnp.float32)
        self.assertEqual(second.config, first.config)
        jax.tree.map(np.testing.assert_array_equal, first.weights, second.weights)

    def test_old_names_pretraining_heads_and_position_ids_are_known(self):
        folder = encoder_cases.write(self.folder / "old", "bert_plain")
        new = checkpoint.load_encoder(folder, dtype=jnp.float32)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        old = {
            "bert."
            + key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): value
            for key, value in tensors.items()
        }
        old |= {
            "bert.embeddings.position_ids": np.arange(24)[None],
            "bert.pooler.dense.weight": np.zeros((32, 32), np.float32),
            "bert.pooler.dense.bias": np.zeros(32, np.float32),
            "cls.predictions.bias": np.zeros(50, np.float32),
        }
        safetensors.numpy.save_file(old, folder / "model.safetensors")
        again = checkpoint.load_encoder(folder, dtype=jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, new.weights, again.weights)

    def test_a_fresh_head_needs_a_key(self):
        folder = encoder_cases.write(self.folder / "bare", "roberta_plain")
        with self.assertRaisesRegex(ValueError, "must have a head for num_labels=2"):
            checkpoint.load_encoder(folder, dtype=jnp.float32, num_labels=2)
        config, weights = checkpoint.load_encoder(
            folder, dtype=jnp.float32, num_labels=2, key=jax.random.key(0)
        )
        logits_C = encoder.bind_encoder(config).classify(weights, jnp.arange(3, 7), jnp.ones(4) > 0)
        self.assertEqual(logits_C.shape, (2,))
        self.assertGreater(float(jnp.std(weights["head_dense"]["kernel"])), 0.015)
        whole = encoder.init_encoder(config, key=jax.random.key(0), dtype=jnp.float32)
        for name in ("head_dense", "head_output"):
            jax.tree.map(np.testing.assert_array_equal, weights[name], whole[name])

    @parameterized.parameters(("cls", "mean"), ("mean", "cls"))
    def test_the_checkpoint_says_how_it_pools(self, own, other):
        folder = encoder_cases.write(self.folder / "pooled", "bert_plain")
        (folder / "1_Pooling").mkdir()
        modes = {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": own == "cls",
            "pooling_mode_mean_tokens": own == "mean",
            "pooling_mode_max_tokens": False,
            "include_prompt": True,
        }
        file = folder / "1_Pooling" / "config.json"
        file.write_text(json.dumps(modes))
        self.assertEqual(checkpoint.load_encoder(folder, dtype=jnp.float32).config.pooling, own)
        with self.assertRaisesRegex(ValueError, f"{own!r}, got {other!r}"):
            checkpoint.load_encoder(folder, dtype=jnp.float32, pooling=other)
        later = {"embedding_dimension": 16, "include_prompt": True}
        file.write_text(json.dumps(later | {"pooling_mode": own}))
        self.assertEqual(checkpoint.load_encoder(folder, dtype=jnp.float32).config.pooling, own)
        for mode in ("lasttoken", ["cls", "mean"]):
            file.write_text(json.dumps(later | {"pooling_mode": mode}))
            with self.assertRaisesRegex(ValueError, "must set one pooling mode"):
                checkpoint.load_encoder(folder, dtype=jnp.float32)
        file.write_text(json.dumps(modes | {"pooling_mode_max_tokens": True}))
        with self.assertRaisesRegex(ValueError, "pooling_mode_max_tokens"):
            checkpoint.load_encoder(folder, dtype=jnp.float32)

    def test_a_part_behind_the_pooling_is_refused(self):
        folder = encoder_cases.write(self.folder / "e", "bert_plain")
        names = ["base.Transformer", "models.Pooling", "base.dense.Dense", "models.Normalize"]
        for kept in (names[:2] + names[3:], names):
            parts = [{"idx": n, "type": f"sentence_transformers.{p}"} for n, p in enumerate(kept)]
            (folder / "modules.json").write_text(json.dumps(parts))
            if len(kept) == 3:
                checkpoint.load_encoder(folder, dtype=jnp.float32)
        with self.assertRaisesRegex(ValueError, "modules.json must name no parts but .*Dense"):
            checkpoint.load_encoder(folder, dtype=jnp.float32)
        checkpoint.load_encoder(folder, dtype=jnp.float32, num_labels=2, key=jax.random.key(0))

    def test_bge_pools_its_first_token(self):
        folder = encoder_cases.write(
            self.folder / "b", "bert_plain", _name_or_path="BAAI/bge-base-en-v1.5"
        )
        self.assertEqual(checkpoint.load_encoder(folder, dtype=jnp.float32).config.pooling, "cls")

    @parameterized.parameters(
        ({"relative_bias": 4}, "relative_bias=4"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"model_type": "albert"}, "'albert'"),
    )
    def test_a_config_it_cannot_compute_is_refused_by_name(self, changes, named):
        folder = encoder_cases.write(self.folder / "odd", "bert_plain")
        fields = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(fields))
        with self.assertRaisesRegex(ValueError, named) as caught:
            checkpoint.load_encoder(folder, dtype=jnp.float32)
        self.assertIn("config.json", str(caught.exception))


def test_bge_small_gives_the_vectors_that_torch_gives():
    folder = shared_data() / "models" / "bge-small-en-v1.5"
    vectors_BE, config = encoder_cases.real_vectors(folder, folder / "tokenizer.json")
    assert config.pooling == "cls"
    cosine_B = (vectors_BE * encoder_cases.GOLDEN["bge_small"]).sum(1)
    assert (1 - cosine_B).max() < 1e-4
    # Far below what is asked for: float32 rounding is all that differs.
    np.testing.assert_allclose(vectors_BE, encoder_cases.GOLDEN["bge_small"], atol=2e-5)
