"""Gradients of the model's own weights: those of plain jax.grad, and no others."""

import functools

import decoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_model_config, token_rows

from raslik_jax.models import decoder as decoders
from raslik_jax.models.llama import LlamaConfig
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.sketch import gradients, projections, weights

_CASE = decoder_cases.CASES["llama"]["grouped_tied"].config
_LLAMA = LlamaConfig.from_hf({**_CASE, "vocab_size": 61, "initializer_range": 0.3})
_NEOX = tiny_model_config()
_ROW = tuple(part[0] for part in token_rows(1, [(4, 5)]))
_TARGETS = {_LLAMA: ("q_proj", "down_proj"), _NEOX: ("query_key_value",)}


@functools.cache
def _model(config, dtype=jnp.float32):
    lora_config = LoRAConfig(rank=2, alpha=4.0, targets=_TARGETS[config])
    graphdef, lora, base = decoders.create(config, lora_config, key=jax.random.key(0), dtype=dtype)
    lora = jax.tree.map(lambda leaf: leaf + 0.1, lora)  # so that B is not 0
    return decoders.bind(graphdef), lora, base


@functools.cache
def _plain_gradient(config):
    """The gradient of all base weights of a row's next-token loss, written out."""
    bound, lora, base = _model(config)
    tokens_L, mask_L = _ROW
    (position_T,) = np.nonzero(mask_L)

    def loss(base):
        hidden_LE = bound.hidden(lora, base, jnp.asarray(tokens_L))
        logits_TV = bound.logits(lora, base, hidden_LE[position_T - 1])
        log_p_TV = logits_TV - jax.scipy.special.logsumexp(logits_TV, axis=1, keepdims=True)
        return -jnp.mean(log_p_TV[np.arange(len(position_T)), tokens_L[position_T]])

    return jax.jit(jax.grad(loss))(base)


@pytest.mark.parametrize(
    ("config", "pattern", "rows"),
    [
        (_LLAMA, ".", {}),  # the head is the table of embeddings
        (_LLAMA, r"layers\.1\.mlp", {"up_proj": (1,), "down_proj": (1,), "gate_proj": (1,)}),
        (_NEOX, r"embed_out|layers\.0\.attention.dense.weight", {"dense": (0,), "head": ()}),
    ],
    ids=["all", "a layer", "a head of its own"],
)
def test_the_gradient_is_that_of_plain_jax(config, pattern, rows):
    bound, lora, base = _model(config)
    chosen = weights.choose_weights(pattern, config)
    point, held = weights.take(base, chosen), {"lora": lora, "base": base}
    assert projections.count_params(point) == weights.count_weights(chosen)
    assert {one.path[-2]: one.layers for one in chosen} == rows or pattern == "."
    assert weights.count_weights(chosen) == projections.count_params(base) or rows
    loss = weights.weights_loss(bound, chosen, num_targets=8, loss="next_token")
    found = jax.jit(jax.grad(loss))(point, held, *map(jnp.asarray, _ROW))
    for one in chosen:
        leaf = _plain_gradient(config)
        for key in one.path:
            leaf = leaf[key]
        leaf = leaf[jnp.array(one.layers)] if one.layers else leaf[None]
        assert float(jnp.abs(leaf).max()) > 1e-4
        np.testing.assert_allclose(found[one.name], leaf, rtol=2e-4, atol=2e-6)


def test_a_batch_is_sketched_one_by_one_as_adapters_are():
    """The cosines of examples' gradients, through sketches as long as the gradient."""
    bound, lora, base = _model(_LLAMA, jnp.bfloat16)
    chosen = weights.choose_weights("mlp", _LLAMA)
    size = weights.count_weights(chosen)
    projection = projections.init_projection(0, "binned", size, size)
    batch = token_rows(1, [(4, 5), (3, 2), (2, 6)])
    rows = jnp.asarray(batch.tokens_BL), jnp.asarray(batch.target_mask_BL)
    loss = weights.weights_loss(bound, chosen, num_targets=8, loss="unshifted")
    point, held = weights.take(base, chosen), {"lora": lora, "base": base}

    @jax.jit
    def both(point, held):
        each = jax.vmap(jax.grad(loss), in_axes=(None, None, 0, 0))(point, held, *rows)
        flat_BP = jax.vmap(projections.flatten_gradients)(each)
        sketch = functools.partial(gradients.sketch_gradients, loss, micro_tokens=1)
        return flat_BP, sketch(projection, (point,), held, *rows)

    flat_BP, found = both(point, held)
    flat_BP = np.asarray(flat_BP, np.float64)
    unit_BP = flat_BP / np.linalg.norm(flat_BP, axis=1, keepdims=True)
    cosine_BB = np.asarray(found.unit_BK) @ np.asarray(found.unit_BK).T
    np.testing.assert_allclose(cosine_BB, unit_BP @ unit_BP.T, atol=2e-2)  # of bfloat16 weights
    np.testing.assert_allclose(found.norm_B, np.linalg.norm(flat_BP, axis=1), rtol=2e-2)


def test_what_is_put_back_is_the_base():
    _, _, base = _model(_NEOX)
    for pattern in (".", r"layers\.1\.", "embed_in"):
        chosen = weights.choose_weights(pattern, _NEOX)
        same = weights.put(base, chosen, weights.take(base, chosen))
        jax.tree.map(np.testing.assert_array_equal, same, base)


def test_wrong_choices_are_a_sentence():
    with pytest.raises(ValueError, match="--sketch.parameters must be lora, or found in names"):
        weights.choose_weights("no_such_layer", _NEOX)
    huge = tiny_model_config(vocab_size=2**27)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 = 2,147,483,648 weights, got 4,29"):
        weights.choose_weights("embed", huge)
    weights.check_memory(1000, 16_000)
    with pytest.raises(ValueError, match=r"2,000,000,000 x 16 bytes = 32.0 GB .* got 8.0 GB"):
        weights.check_memory(2_000_000_000, 8_000_000_000)
