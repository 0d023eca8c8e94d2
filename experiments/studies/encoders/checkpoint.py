"""Encoders from checkpoints and back, with the loading and writing of the package's decoders."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.studies.encoders import encoder as encoders
from raslik_jax.base import files
from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import some_of
from raslik_jax.data.tokens import tokenization
from raslik_jax.models import checkpoint, key_map, layers, storage
from raslik_jax.models.storage import resolve_folder

# How an encoder pools, in the layout of sentence-transformers.
_POOLING = pathlib.Path("1_Pooling", "config.json")
_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean"}
# The parts of a sentence encoder that are computed here, of those that its modules.json may name.
_PARTS = ("Transformer", "Pooling", "Normalize")


class LoadedEncoder(NamedTuple):
    """An encoder from a checkpoint: the argument of `encoder.bind_encoder` and its weights."""

    config: encoders.EncoderConfig
    weights: Tree


def load_encoder(
    name: str | os.PathLike[str],
    *,
    dtype: Any,
    pooling: str | None = None,
    num_labels: int | None = None,
    key: jax.Array | None = None,
) -> LoadedEncoder:
    """Returns a BERT or RoBERTa encoder from a Hugging Face checkpoint: (config, weights).

    Args:
      name: A directory, or "owner/model" on the hub.
      dtype: The dtype of the weights.
      pooling: "cls" or "mean"; None takes what the checkpoint says in 1_Pooling/config.json, and
        "cls" for the BGE family, which was trained so. Otherwise there are no sentence vectors.
      num_labels: Classes of the classification head; None takes the checkpoint's own head, if it
        is a sequence classifier, else none.
      key: Draws a head of `num_labels` classes where the checkpoint has none.
    """
    folder = resolve_folder(name, auto="AutoModel")
    config, fields = checkpoint.read_settings(folder, encoders.ENCODERS, "encoders")
    architecture = encoders.ENCODERS[config.model_type]
    names = architecture.key_map
    has_own_head = config.num_labels > 0
    config = dataclasses.replace(
        config,
        pooling=_read_pooling(folder, fields, pooling),
        num_labels=config.num_labels if num_labels is None else num_labels,
    )
    if not config.num_labels:
        _check_parts(folder / "modules.json")
    checkpoint.check_own_tokenizer(folder, config)
    shapes = encoders.abstract_encoder(config, dtype=dtype)
    fresh: Tree = {}
    tensors = storage.open_tensors(folder, auto="AutoModel", rename=config.full_key)
    if config.num_labels and not has_own_head:
        # A BERT without a classifier may still bring the pooler, its first half.
        keys = {name: f"{names[name]}.weight" for name in ("head_dense", "head_output")}
        absent = {name: shapes.pop(name) for name in keys if keys[name] not in tensors.files}
        spread = config.initializer_range
        if absent and key is None:
            raise ValueError(
                f"{folder} must have a head for num_labels={num_labels!r}: give a key to draw one"
            )
        if key is not None:
            fresh = layers.init_weights(absent, key=key, initializer_range=spread)
    slots = key_map.plan(names, shapes)
    what = f"the {config.model_type} of {folder / 'config.json'}"
    key_map.check_fit(slots, tensors, what, architecture.buffers)
    weights = key_map.fill(shapes, slots, tensors)
    return LoadedEncoder(config, {**weights, **fresh})


def _check_parts(path: pathlib.Path) -> None:
    """Refuses a sentence encoder with parts behind its pooling, such as a dense layer."""
    parts = storage.read_json(path, [{"type": str}]) if path.is_file() else []
    names = [part["type"].rpartition(".")[2] for part in parts]
    others = [name for name in names if name not in _PARTS]
    if others:
        got = f"got {some_of(others, 3)}: use another encoder"
        raise ValueError(f"{path} must name no parts but {', '.join(_PARTS)}, {got}")


def _read_pooling(folder: pathlib.Path, fields: Mapping[str, Any], asked: str | None) -> str | None:
    path, own = folder / _POOLING, None
    if path.is_file():
        said = storage.read_json(path, {"pooling_mode?": (str, [str], None)})
        on = [name for name, is_on in said.items() if is_on is True]
        # Newer releases of sentence-transformers have it in one field.
        named = said.get("pooling_mode") or [n for n in on if n.startswith("pooling_mode_")]
        modes = [named] if isinstance(named, str) else named
        known = {**_POOLINGS, **{one: one for one in encoders.POOLINGS}}
        own = known.get(modes[0].removeprefix("pooling_mode_")) if len(modes) == 1 else None
        if own is None:
            must = f"must set one pooling mode of {sorted(_POOLINGS)}"
            raise ValueError(f"{path} {must}, got {sorted(modes)}: use another encoder")
    elif "bge-" in str(fields.get("_name_or_path", "")).lower():
        own = "cls"
    if own is not None and asked not in (None, own):
        raise ValueError(f"{folder} has the pooling {own!r}, got {asked!r}: leave it out")
    return own or asked


def save_encoder(
    folder: str | os.PathLike[str], config: encoders.EncoderConfig, weights: Tree
) -> None:
    """Writes an encoder as a Hugging Face checkpoint that transformers loads."""
    shapes = encoders.abstract_encoder(config, dtype=jnp.float32)
    key_map.check_tree(weights, shapes, f"a {config.model_type} of this config")
    names = encoders.ENCODERS[config.model_type].key_map
    with storage.new_folder(folder) as partial:
        slots = key_map.plan(names, weights)
        key_map.write_weights(partial, slots, weights, storage.SHARD_BYTES)
        dtype = weights["word"]["embedding"].dtype.name
        fields = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
        files.write_json(partial / "config.json", fields)


def load_sentence_tokenizer(
    path: str | os.PathLike[str], *, max_len: int
) -> Callable[[Sequence[str]], list[list[int]]]:
    """Returns the function from texts to the ids that a sentence encoder reads.

    The encoder's own special tokens are around every text, which is cut at max_len ids with them.
    """
    _, backend = tokenization.read_backend(path)
    backend.no_padding()
    backend.enable_truncation(max_len)
    return lambda texts: [encoding.ids for encoding in backend.encode_batch(list(texts))]


def save_sentence_tokenizer(
    path: str | os.PathLike[str], tokenizer: tokenization.Tokenizer
) -> None:
    """Writes a tokenizer.json for `load_sentence_tokenizer` with EOS before and after a text."""
    import tokenizers

    eos = tokenizer.backend.id_to_token(tokenizer.eos_id)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_id)]
    )
    tokenization.save_tokenizer(path, tokenizer._replace(backend=backend))


# The encoder of a name that is no folder: RoBERTa base, which has BERT base's layers.
_BASE_ENCODER: encoders.EncoderConfig = encoders.RobertaConfig(
    vocab_size=50_265,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=514,
    type_vocab_size=1,
    pad_token_id=1,
)


def encoder_config(name: str) -> encoders.EncoderConfig:
    """Returns the shapes of a named encoder for a forecast."""
    path, config = pathlib.Path(name) / "config.json", _BASE_ENCODER
    if name and path.is_file():
        fields = files.read_json(path, {"model_type": str})
        config = encoders.ENCODERS[fields["model_type"]].config.from_hf(fields)
    return dataclasses.replace(config, pooling="cls")


def bind_shapes(config: encoders.EncoderConfig) -> tuple[encoders.Encoder, Tree]:
    """Returns an encoder's functions and the shapes of its weights; allocates nothing."""
    key = jax.random.key(0)
    make = functools.partial(encoders.init_encoder, config, key=key, dtype=jnp.float32)
    return encoders.bind_encoder(config), jax.eval_shape(make)
