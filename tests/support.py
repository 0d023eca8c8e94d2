"""What several tests need: the folder of real data, a tiny model, rows of tokens."""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raslik_jax.axes import Tree
from raslik_jax.models import decoder, gpt_neox
from raslik_jax.models.lora import LoRAConfig

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


def shared_data() -> pathlib.Path:
    """Returns the folder of real data, or skips the test, saying what is missing.

    The folder is named by the environment variable RASLIK_DATA; without it, `shared/data` beside
    the checkout is used.
    """
    folder = pathlib.Path(os.environ.get("RASLIK_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data wanted in {folder}: set RASLIK_DATA to the folder that holds it")
    return folder


class TinyModel(NamedTuple):
    """A random two-layer GPT-NeoX with both LoRA factors random."""

    decoder: decoder.Decoder
    lora: Tree
    base: Tree
    lora_config: LoRAConfig


def tiny_model(seed: int = 0, *, vocab_size: int = 61, dropout: float = 0.0) -> TinyModel:
    """Returns a model small enough to differentiate in a second."""
    config = gpt_neox.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    lora_config = LoRAConfig(
        rank=2, alpha=4.0, dropout=dropout, targets=("query_key_value", "dense_4h_to_h")
    )
    graphdef, lora, base = decoder.create(
        config, lora_config, key=jax.random.key(seed), dtype=jnp.float32
    )
    leaves, structure = jax.tree.flatten(lora)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [jax.random.normal(k, leaf.shape) * 0.3 for k, leaf in zip(keys, leaves, strict=True)]
    return TinyModel(
        decoder.bind(graphdef), jax.tree.unflatten(structure, leaves), base, lora_config
    )


class TokenRows(NamedTuple):
    """Random rows of tokens: [B, L] ids, padded on the right, and which of them are targets."""

    tokens_BL: np.ndarray
    target_mask_BL: np.ndarray


def token_rows(
    seed: int, shapes: Sequence[tuple[int, int]], *, length: int = 0, vocab_size: int = 61
) -> TokenRows:
    """Returns rows of these (prompt length, response length)."""
    generator = np.random.default_rng(seed)
    width = length or max(map(sum, shapes))
    tokens_BL = np.zeros((len(shapes), width), np.int32)
    target_mask_BL = np.zeros((len(shapes), width), bool)
    for row, (prompt, response) in enumerate(shapes):
        tokens_BL[row, : prompt + response] = generator.integers(1, vocab_size, prompt + response)
        target_mask_BL[row, prompt : prompt + response] = True
    return TokenRows(tokens_BL, target_mask_BL)
