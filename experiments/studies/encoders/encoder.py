"""BERT and RoBERTa encoders: sentence vectors and sequence classification.

One Transformer serves both. It has token, position and type embeddings and then layers with norms
after each residual sum. RoBERTa differs in its position ids and its classification head only.
Weights are one nested dict with the layers stacked. Functions take one sequence; the caller vmaps.

Sources: Devlin et al. 2019 (arXiv:1810.04805) and Liu et al. 2019 (arXiv:1907.11692). Layout and
details are those of transformers 5 (`modeling_bert.py` and `modeling_roberta.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from raslik_jax.base.axes import Array, Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models import hf_config, layers
from raslik_jax.models.architecture import Architecture, ModelConfig
from raslik_jax.models.lora import drop

POOLINGS = ("cls", "mean")
Tokens = Int[Array, " L"]
Mask = Bool[Array, " L"]
Hidden = Float[jax.Array, "L E"]
Key = jax.Array | None

# Known fields of an encoder's config.json that change nothing here: what is tied is a language
# model head, which is not loaded, and attention dropout is left out (see `bind_encoder`).
_INERT = ("tie_word_embeddings", "attention_probs_dropout_prob")


def real_tokens(batch: Batch) -> Bool[jax.Array, "B L"]:
    """Returns which tokens of a batch of `encode_rows` an encoder reads; one of a dummy row."""
    # With none, its softmax would be NaN.
    return batch.target_mask_BL.at[:, 0].set(True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The settings of a BERT under Hugging Face's names but for the last two.

    Attributes:
      hidden_dropout_prob: Dropout on embeddings, attention outputs and MLP outputs, in training.
      classifier_dropout: Dropout before the classification layers, in training; None is
        hidden_dropout_prob.
      pooling: How a sequence becomes one vector: "cls" (its first token), "mean" (over its
        tokens), or None where it makes no sentence vectors.
      num_labels: Classes of the classification head; 0 is no head.
    """

    type_vocab_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    pad_token_id: int = 0
    pooling: str | None = None
    num_labels: int = 0

    model_type = "bert"
    hf_name = "Bert"

    @property
    def first_position(self) -> int:
        """The row of the position embedding that the first token reads."""
        return 0

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens that has a position embedding for each."""
        return self.max_position_embeddings - self.first_position

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Any:
        """Returns the config of a parsed config.json; a classifier's has a head."""
        config = super().from_hf({k: value for k, value in values.items() if k not in _INERT})
        architecture, num_labels = (values.get("architectures") or [""])[0], 0
        if architecture.endswith("ForSequenceClassification"):
            # Hugging Face leaves id2label out at its default of two classes.
            num_labels = len(values.get("id2label") or (0, 1))
        return dataclasses.replace(
            config, num_labels=num_labels, classifier_dropout=values.get("classifier_dropout")
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json of this encoder."""
        kind = "ForSequenceClassification" if self.num_labels else "Model"
        values = hf_config.write_fields(self, self.hf_name + kind)
        del values["pooling"], values["num_labels"]
        if self.num_labels:
            names = [f"LABEL_{label}" for label in range(self.num_labels)]
            values["id2label"] = {str(label): name for label, name in enumerate(names)}
            values["label2id"] = {name: label for label, name in enumerate(names)}
        return values

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the key that `key_map` has for one of a bare encoder or an old release."""
        if key.startswith(("embeddings.", "encoder.", "pooler.")):
            key = f"{cls.model_type}.{key}"
        return key.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )


class RobertaConfig(EncoderConfig):
    """The settings of a RoBERTa: positions start above the padding token's own row."""

    model_type = "roberta"
    hf_name = "Roberta"

    @property
    def first_position(self) -> int:
        """The row of the position embedding that the first token reads."""
        return self.pad_token_id + 1


def _architecture(config: Any, head_dense: str, head_output: str, pretraining: str) -> Architecture:
    prefix = config.model_type
    key_map = {
        "word": f"{prefix}.embeddings.word_embeddings",
        "position": f"{prefix}.embeddings.position_embeddings",
        "type": f"{prefix}.embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}.embeddings.LayerNorm",
        "layers": f"{prefix}.encoder.layer.{{layer}}",
        "layers/query": "attention.self.query",
        "layers/key": "attention.self.key",
        "layers/value": "attention.self.value",
        "layers/attention_output": "attention.output.dense",
        "layers/attention_norm": "attention.output.LayerNorm",
        "layers/up": "intermediate.dense",
        "layers/down": "output.dense",
        "layers/mlp_norm": "output.LayerNorm",
        "head_dense": head_dense,
        "head_output": head_output,
    }
    # Pretraining heads, and the pooler and classifier where no head is asked for.
    unused = rf"{prefix}\.(embeddings\.position_ids|pooler\.dense\.(weight|bias))"
    return Architecture(config, key_map, rf"{unused}|{pretraining}\..*|classifier\..*")


# By the model_type of config.json.
ENCODERS: dict[str, Architecture] = {
    "bert": _architecture(EncoderConfig, "bert.pooler.dense", "classifier", "cls"),
    "roberta": _architecture(RobertaConfig, "classifier.dense", "classifier.out_proj", "lm_head"),
}


def abstract_encoder(config: EncoderConfig, *, dtype: Any) -> Tree:
    """Returns the shapes of an encoder's weights as `jax.ShapeDtypeStruct`s without memory."""
    width, inner, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers

    def leaves(**shapes: tuple[int, ...]) -> Tree:
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    def linear(inputs: int, outputs: int, *stack: int) -> Tree:
        return leaves(kernel=(*stack, inputs, outputs), bias=(*stack, outputs))

    def norm(*stack: int) -> Tree:
        return leaves(scale=(*stack, width), bias=(*stack, width))

    square = ("query", "key", "value", "attention_output")
    stacked = {name: linear(width, width, depth) for name in square}
    stacked |= {"up": linear(width, inner, depth), "down": linear(inner, width, depth)}
    weights: Tree = {
        "word": leaves(embedding=(config.vocab_size, width)),
        "position": leaves(embedding=(config.max_position_embeddings, width)),
        "type": leaves(embedding=(config.type_vocab_size, width)),
        "embed_norm": norm(),
        "layers": {**stacked, "attention_norm": norm(depth), "mlp_norm": norm(depth)},
    }
    # BERT calls the first layer of its head a pooler; it is the same tanh layer.
    head = {"head_dense": linear(width, width), "head_output": linear(width, config.num_labels)}
    return weights | head if config.num_labels else weights


def init_encoder(config: EncoderConfig, *, key: jax.Array, dtype: Any) -> Tree:
    """Returns the weights of an encoder that has learnt nothing yet (`layers.init_weights`)."""
    shapes = abstract_encoder(config, dtype=dtype)
    return layers.init_weights(shapes, key=key, initializer_range=config.initializer_range)


class Encoder(NamedTuple):
    """Pure functions of one encoder on one sequence; the caller vmaps.

    hidden: (weights, tokens_L, mask_L, types_L=None, dropout_key=None) -> hidden_LE.
    embed: (weights, tokens_L, mask_L) -> the pooled sentence vector of length 1, float32 [E].
    classify: (weights, tokens_L, mask_L, dropout_key=None) -> logits, float32 [num_labels].
    """

    config: EncoderConfig
    hidden: Callable[..., Float[jax.Array, "L E"]]
    embed: Callable[..., Float[jax.Array, " E"]]
    classify: Callable[..., Float[jax.Array, " C"]]


def bind_encoder(config: EncoderConfig) -> Encoder:
    """Returns the functions of an encoder.

    A mask is True at real tokens. Padding may be on either side. Dropout is drawn if a key is
    given, on hidden states only. BERT's further dropout inside the softmax is left out, since
    `jax.nn.dot_product_attention` has none.

    Example:
      config, weights = load_encoder(directory, dtype=jnp.float32)
      encoder = bind_encoder(config)
      vectors_BE = jax.vmap(encoder.embed, in_axes=(None, 0, 0))(weights, tokens_BL, mask_BL)
    """

    def hidden(
        weights: Tree,
        tokens_L: Tokens,
        mask_L: Mask,
        types_L: Tokens | None = None,
        dropout_key: Key = None,
    ) -> Hidden:
        if tokens_L.shape[0] > config.max_length:
            most, got = config.max_length, tokens_L.shape[0]
            raise ValueError(f"a text must have at most {most} tokens, got {got}: truncate it")
        embed_key, layers_key = _split(dropout_key, 2)
        hidden_LE = embed_tokens(weights, tokens_L, mask_L, types_L, config=config)
        hidden_LE = drop(hidden_LE, config.hidden_dropout_prob, embed_key)

        def run_layer(hidden_LE: Any, layer: Any) -> tuple[Any, None]:
            weights, key = layer
            return apply_block(weights, hidden_LE, mask_L, key, config=config), None

        depth = config.num_hidden_layers
        keys = None if layers_key is None else jax.random.split(layers_key, depth)
        return jax.lax.scan(run_layer, hidden_LE, (weights["layers"], keys))[0]

    def embed(weights: Tree, tokens_L: Tokens, mask_L: Mask) -> Float[jax.Array, " E"]:
        hidden_LE = hidden(weights, tokens_L, mask_L).astype(jnp.float32)
        if config.pooling == "mean":
            weight_L1 = mask_L.astype(jnp.float32)[:, None]
            pooled_E = (hidden_LE * weight_L1).sum(0) / jnp.maximum(weight_L1.sum(), 1e-9)
        elif config.pooling == "cls":
            pooled_E = hidden_LE[jnp.argmax(mask_L)]  # the first real token, wherever padding is
        else:
            got = f"one of {POOLINGS} for sentence vectors, got {config.pooling}"
            raise ValueError(f"pooling must be {got}: name it when loading the encoder")
        return pooled_E / jnp.maximum(jnp.linalg.norm(pooled_E), 1e-12)

    def classify(
        weights: Tree, tokens_L: Tokens, mask_L: Mask, dropout_key: Key = None
    ) -> Float[jax.Array, " C"]:
        if not config.num_labels:
            raise ValueError("num_labels must be above 0 to classify, got 0: name it when loading")
        body_key, dense_key, output_key = _split(dropout_key, 3)
        hidden_LE = hidden(weights, tokens_L, mask_L, dropout_key=body_key)
        first_E = hidden_LE[jnp.argmax(mask_L)]
        rate = config.classifier_dropout
        rate = config.hidden_dropout_prob if rate is None else rate
        # RoBERTa's head drops before both of its layers, BERT's after its pooler only.
        if isinstance(config, RobertaConfig):
            first_E = drop(first_E, rate, dense_key)
        dense_E = jnp.tanh(_linear(weights["head_dense"], first_E))
        dense_E = drop(dense_E, rate, output_key)
        return _linear(weights["head_output"], dense_E).astype(jnp.float32)

    return Encoder(config=config, hidden=hidden, embed=embed, classify=classify)


def embed_tokens(
    weights: Tree, tokens_L: Tokens, mask_L: Mask, types_L: Tokens | None, *, config: EncoderConfig
) -> Hidden:
    """Returns the first layer's input: the normed sum of word, type and position vectors."""
    # A token's position is the number of tokens before it, so left padding changes nothing.
    # RoBERTa starts above the padding's own row, which its padding tokens keep.
    count_L = jnp.cumsum(mask_L.astype(jnp.int32))
    first = config.first_position
    positions_L = jnp.where(mask_L, count_L - 1 + first, max(first - 1, 0))
    types_L = jnp.zeros_like(tokens_L) if types_L is None else types_L
    word_LE, position_LE, type_LE = (
        weights[name]["embedding"][index_L]
        for name, index_L in (("word", tokens_L), ("position", positions_L), ("type", types_L))
    )
    return normalize(weights["embed_norm"], word_LE + type_LE + position_LE, config.layer_norm_eps)


def apply_block(
    weights: Tree, hidden_LE: Hidden, mask_L: Mask, dropout_key: Key, *, config: EncoderConfig
) -> Hidden:
    """Returns the output of one layer from its own weights without the stack's leading axis."""
    attention_key, mlp_key = _split(dropout_key, 2)
    rate, eps = config.hidden_dropout_prob, config.layer_norm_eps
    mixed_LE = drop(attend(weights, hidden_LE, mask_L, config=config), rate, attention_key)
    hidden_LE = normalize(weights["attention_norm"], hidden_LE + mixed_LE, eps)
    outer_LE = drop(apply_mlp(weights, hidden_LE, config=config), rate, mlp_key)
    return normalize(weights["mlp_norm"], hidden_LE + outer_LE, eps)


def attend(weights: Tree, hidden_LE: Hidden, mask_L: Mask, *, config: EncoderConfig) -> Hidden:
    """Returns one layer's attention in both directions after its output projection."""

    def heads(name: str) -> Float[jax.Array, "L H D"]:
        # In float32, as XLA keeps the attention weights, and as its backward pass wants it.
        projected_LE = _linear(weights[name], hidden_LE).astype(jnp.float32)
        return projected_LE.reshape(hidden_LE.shape[0], config.num_attention_heads, -1)

    mixed_LHD = jax.nn.dot_product_attention(
        heads("query"), heads("key"), heads("value"), mask=mask_L[None, None, :]
    )
    mixed_LE = mixed_LHD.reshape(hidden_LE.shape).astype(hidden_LE.dtype)
    return _linear(weights["attention_output"], mixed_LE)


def apply_mlp(weights: Tree, hidden_LE: Hidden, *, config: EncoderConfig) -> Hidden:
    """Returns one layer's MLP: up, activation, down."""
    inner = layers.ACTIVATIONS[config.hidden_act](_linear(weights["up"], hidden_LE))
    return _linear(weights["down"], inner)


def _linear(weights: Tree, x: Float[jax.Array, "*batch I"]) -> Float[jax.Array, "*batch O"]:
    out = x @ weights["kernel"]
    return out + weights["bias"].reshape((1,) * (out.ndim - 1) + (-1,))


def normalize(weights: Tree, x_LE: Hidden, eps: float) -> Hidden:
    """Returns the rows at mean 0 and variance 1 with scale and shift: layer normalization."""
    return layers.normalize(x_LE, eps, weights["scale"], weights["bias"])


def _split(key: Key, number: int) -> Any:
    return (None,) * number if key is None else jax.random.split(key, number)
