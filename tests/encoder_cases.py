"""The encoders of the golden file as checkpoints and as loaded models, for tests and parity."""

import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from golden import make_encoders

from raslik_jax.axes import Tree
from raslik_jax.models import checkpoint, encoder, key_map

NAMES = tuple(make_encoders.CASES)
GOLDEN = dict(np.load(make_encoders.FILE))


def config_fields(name: str) -> dict:
    """A config.json as Hugging Face writes it."""
    family, settings = make_encoders.CASES[name]
    settings = dict(settings)
    fields = {"model_type": family.lower(), "type_vocab_size": 2, **make_encoders.SMALL}
    kind = "Model"
    if "num_labels" in settings:
        kind = "ForSequenceClassification"
        fields["id2label"] = {str(i): f"LABEL_{i}" for i in range(settings.pop("num_labels"))}
    return {**fields, **settings, "architectures": [family + kind]}


def write(folder: pathlib.Path, name: str, **changes) -> pathlib.Path:
    """A checkpoint with the weights that the golden outputs were computed with."""
    fields = config_fields(name) | changes
    config = encoder.ENCODERS[fields["model_type"]].from_hf(fields)
    slots = key_map.plan(config.model_type, encoder.abstract_encoder(config, dtype=jnp.float32))
    prefix = "" if config.num_labels else f"{config.model_type}."
    keys = {key.removeprefix(prefix): slot.shape for key, slot in slots.items()}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(
        {key: make_encoders.tensor(key, shape) for key, shape in keys.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@functools.cache
def load(name: str) -> tuple[encoder.Encoder, Tree]:
    """A case as it is loaded from its checkpoint: the bound functions and the weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint.load_encoder(write(pathlib.Path(folder), name), dtype=jnp.float32)
    return encoder.bind_encoder(model.config), model.weights


def real_vectors(
    folder: pathlib.Path, tokenizer_file: pathlib.Path
) -> tuple[np.ndarray, encoder.EncoderConfig]:
    """The sentence vectors of a real checkpoint, in one padded batch, and its config."""
    model = checkpoint.load_encoder(folder, dtype=jnp.float32)
    bound = encoder.bind_encoder(model.config)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_padding(length=64)
    encodings = tokenizer.encode_batch(list(make_encoders.SENTENCES))
    tokens_BL = np.array([encoding.ids for encoding in encodings], np.int32)
    mask_BL = np.array([encoding.attention_mask for encoding in encodings], bool)
    vectors_BE = jax.jit(jax.vmap(bound.embed, in_axes=(None, 0, 0)))(
        model.weights, tokens_BL, mask_BL
    )
    return np.asarray(vectors_BE), model.config
