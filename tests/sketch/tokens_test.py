"""Shares of a score by token, against gradients of single tokens and the plain score."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_model, token_rows

from raslik_jax.data.tokens.tokenization import train_bpe
from raslik_jax.index import search
from raslik_jax.sketch import gradients, projections, tokens
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.loss import example_loss

_MODEL = tiny_model()
_ROWS = token_rows(0, [(4, 5), (6, 3)])
_SIZE = projections.count_params(_MODEL.lora)


_CASES = [
    ("unshifted", "vector", "binned"),
    *(("unshifted", "vector", family) for family in PROJECTIONS if family != "binned"),
    ("next_token", "vector", "binned"),
    ("unshifted", "per_tensor", "binned"),
    ("next_token", "per_tensor", "binned"),
]
_HEAVY = [pytest.param(*case, marks=pytest.mark.heavy) for case in _CASES[1:]]


@pytest.mark.parametrize(("loss", "normalize", "family"), [_CASES[0], *_HEAVY])
def test_they_sum_to_the_score_and_are_those_of_each_token(loss, normalize, family):
    lora, kind = _MODEL.lora, {"loss": loss, "num_targets": 8}
    projection = projections.init_projection(7, family, _SIZE, 64)
    generator = np.random.default_rng(0)
    query_K, mean_K = generator.normal(size=64), 0.05 * generator.normal(size=64)
    row = jnp.asarray(_ROWS.tokens_BL[0]), jnp.asarray(_ROWS.target_mask_BL[0])
    # The direction that a row is multiplied with, as the plain score has it.
    queries = search.center_queries(query_K[None], mean_K)
    toward_K = jnp.asarray(queries.direction_QK[0], jnp.float32)
    found = jax.jit(
        functools.partial(tokens.token_shares, _MODEL.decoder, normalize=normalize, **kind)
    )(projection, lora, _MODEL.base, *row, toward_K, jnp.asarray(mean_K, jnp.float32))
    whole = functools.partial(example_loss, _MODEL.decoder, **kind)
    sketches = gradients.sketch_gradients(
        whole, projection, lora, _MODEL.base, *(x[None] for x in row), normalize=normalize
    )
    score = search.centered_cosine(np.asarray(sketches.unit_BK), query_K[None], mean_K)
    assert abs(float(found.score) - float(score[0])) <= 2e-6
    places = np.flatnonzero(row[1])
    assert float(jnp.abs(found.share_T[len(places) :]).sum()) == 0.0
    if normalize != "vector":
        return  # lengths of the whole example, which the gradient of a token does not have
    unit_K, norm = np.asarray(sketches.unit_BK[0]), float(sketches.norm_B[0])
    apart = np.linalg.norm(unit_K - mean_K)
    for number, place in enumerate(places.tolist()):
        alone_L = jnp.zeros_like(row[1]).at[place].set(True)
        flat_P = gradients.flat_gradient(
            whole, lora, _MODEL.base, row[0], alone_L, normalize=normalize
        )
        sketch_K = np.asarray(projections.project(projection, flat_P), np.float64)
        expected = toward_K @ (sketch_K / norm - mean_K) / apart / len(places)
        assert abs(float(found.share_T[number]) - float(expected)) <= 2e-6


def test_on_a_base_of_16_bits_they_sum_to_the_score():
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _MODEL.base)
    projection = projections.init_projection(7, "binned", _SIZE, 64)
    row = jnp.asarray(_ROWS.tokens_BL[0]), jnp.asarray(_ROWS.target_mask_BL[0])
    how = {"num_targets": 8, "loss": "unshifted"}
    toward_K = jax.random.normal(jax.random.key(0), (64,)) / 8
    found = tokens.token_shares(
        *(_MODEL.decoder, projection, _MODEL.lora, base, *row, toward_K, jnp.zeros(64)),
        **how,
        normalize="vector",
    )
    whole = functools.partial(example_loss, _MODEL.decoder, **how)
    batch = [x[None] for x in row]
    sketches = gradients.sketch_gradients(whole, projection, _MODEL.lora, base, *batch)
    # The score's own gradient is of products in 16 bits, of a relative error of 2**-8 each.
    error = abs(float(found.score) - float(sketches.unit_BK[0] @ toward_K))
    assert error < 5 * 2**-8 * float(jnp.linalg.norm(toward_K))


def test_pieces_make_the_text_and_a_character_of_several_tokens_is_one_piece():
    tokenizer = train_bpe(["a kettle hums", "a kettle boils"], vocab_size=280)
    ids = np.array(tokenizer.encode("a kettle hums 🚀 in\n orbit, é"))
    pieces = tokens.token_pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) and len(pieces) == len(ids)
    assert "🚀" in "|".join(pieces).replace(" ", "")
    assert "\ufffd" not in "".join(pieces)


def test_every_share_has_a_text():
    tokenizer = train_bpe(["a kettle hums"], vocab_size=280)
    ids = np.array([*tokenizer.encode("a 🚀"), tokenizer.eos_id])
    pieces = tokens.token_pieces(tokenizer, ids)
    shares = [None, *(0.25 * n for n in range(1, len(ids)))]
    whole = tokens.whole_pieces([*zip(pieces, shares, strict=True)])
    assert "".join(text for text, _ in whole) == "a 🚀<|endoftext|>"
    assert "" not in [text for text, _ in whole]
    assert sum(s for _, s in whole if s) == pytest.approx(sum(s for s in shares if s))
    cut = tokens.whole_pieces([("a", 0.5), ("", 0.25), ("", 0.125)])
    assert cut == [("a", 0.5), ("\ufffd", 0.375)]
