"""BERT and RoBERTa encoders: sentence vectors and sequence classification.

One Transformer serves both: token, position and type embeddings, then layers whose norms come
after each residual sum. RoBERTa differs in its position ids and its classification head only.
Weights are one nested dict with the layers stacked, functions take one sequence, the caller vmaps.

Sources: Devlin et al. 2019 (arXiv:1810.04805), Liu et al. 2019 (arXiv:1907.11692); layout and
details as in transformers 5 (`modeling_bert.py`, `modeling_roberta.py`), checked against it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from raslik_jax.axes import Array, Tree
from raslik_jax.models import hf_config, layers

POOLINGS = ("cls", "mean")

# Known fields of an encoder's config.json that change nothing here: what is tied is a language
# model head, which is not loaded, and attention dropout is left out (see `bind_encoder`).
_INERT = ("tie_word_embeddings", "attention_probs_dropout_prob")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """What a BERT-like encoder looks like; fields of config.json under Hugging Face's names.

    Attributes:
      hidden_dropout_prob: Dropout on embeddings, attention outputs and MLP outputs, in training.
      classifier_dropout: Dropout before the classification layers, in training; None is
        hidden_dropout_prob.
      pooling: How a sequence becomes one vector: "cls" (its first token), "mean" (over its
        tokens), or None where it makes no sentence vectors. Not part of config.json.
      num_labels: Classes of the classification head; 0 is no head.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    hidden_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    position_embedding_type: str = "absolute"
    pad_token_id: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pooling: str | None = None
    num_labels: int = 0

    model_type = "bert"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        tables = ("intermediate_size", "max_position_embeddings", "type_vocab_size")
        hf_config.check_sizes(self, (*sizes, *tables, "layer_norm_eps"))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size=} "
                f"and {self.num_attention_heads=}: correct config.json"
            )
        for name, known in (
            ("hidden_act", tuple(layers.ACTIVATIONS)),
            ("position_embedding_type", ("absolute",)),
            ("pooling", (None, *POOLINGS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {known}, got {getattr(self, name)!r}: this kind of "
                    "encoder is not implemented"
                )

    @property
    def first_position(self) -> int:
        """The row of the position embedding that the first token reads."""
        return 0

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that has a position embedding for each."""
        return self.max_position_embeddings - self.first_position

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "EncoderConfig":
        """Returns the config of a parsed config.json, with a head where it is a classifier's.

        Raises:
          ValueError: Another model_type; unknown, missing, ill-typed or unsupported fields.
        """
        kept = {name: value for name, value in values.items() if name not in _INERT}
        config = hf_config.read_fields(
            cls, kept, model_type=cls.model_type, default_rotary_fraction=None
        )
        architecture = (values.get("architectures") or [""])[0]
        num_labels = 0
        if architecture.endswith("ForSequenceClassification"):
            # Hugging Face leaves id2label out at its default of two classes.
            num_labels = len(values.get("id2label") or (0, 1))
        return dataclasses.replace(
            config, num_labels=num_labels, classifier_dropout=values.get("classifier_dropout")
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json of this encoder."""
        family = {"bert": "Bert", "roberta": "Roberta"}[self.model_type]
        kind = "ForSequenceClassification" if self.num_labels else "Model"
        values = hf_config.write_fields(
            self, model_type=self.model_type, architecture=family + kind
        )
        del values["pooling"], values["num_labels"]
        if self.num_labels:
            names = [f"LABEL_{label}" for label in range(self.num_labels)]
            values["id2label"] = {str(label): name for label, name in enumerate(names)}
            values["label2id"] = {name: label for label, name in enumerate(names)}
        return values


class RobertaConfig(EncoderConfig):
    """What a RoBERTa encoder looks like: positions start above the padding token's own row."""

    model_type = "roberta"

    @property
    def first_position(self) -> int:
        """The row of the position embedding that the first token reads."""
        return self.pad_token_id + 1


ENCODERS: dict[str, type[EncoderConfig]] = {"bert": EncoderConfig, "roberta": RobertaConfig}


def abstract_encoder(config: EncoderConfig, *, dtype: Any) -> Tree:
    """Returns the shapes of an encoder's weights as `jax.ShapeDtypeStruct`s, taking no memory."""
    width, inner, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(inputs: int, outputs: int, *stack: int) -> Tree:
        return {"kernel": leaf(*stack, inputs, outputs), "bias": leaf(*stack, outputs)}

    def norm(*stack: int) -> Tree:
        return {"scale": leaf(*stack, width), "bias": leaf(*stack, width)}

    weights: Tree = {
        "word": {"embedding": leaf(config.vocab_size, width)},
        "position": {"embedding": leaf(config.max_position_embeddings, width)},
        "type": {"embedding": leaf(config.type_vocab_size, width)},
        "embed_norm": norm(),
        "layers": {
            "query": linear(width, width, depth),
            "key": linear(width, width, depth),
            "value": linear(width, width, depth),
            "attention_output": linear(width, width, depth),
            "attention_norm": norm(depth),
            "up": linear(width, inner, depth),
            "down": linear(inner, width, depth),
            "mlp_norm": norm(depth),
        },
    }
    if config.num_labels:
        # BERT calls the first layer of its head a pooler; it is the same tanh layer.
        weights["head_dense"] = linear(width, width)
        weights["head_output"] = linear(width, config.num_labels)
    return weights


def init_weights(shapes: Tree, *, key: jax.Array, initializer_range: float) -> Tree:
    """Returns fresh weights: kernels and embeddings normal, biases 0, norm scales 1, as BERT's.

    A leaf depends on the key, its path and its shape only, so a head drawn alone is the head that
    is drawn with the rest.
    """

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        if names[-1] in ("bias", "scale"):
            return jnp.full(leaf.shape, float(names[-1] == "scale"), leaf.dtype)
        own_key = jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))
        return (initializer_range * jax.random.normal(own_key, leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def init_encoder(config: EncoderConfig, *, key: jax.Array, dtype: Any) -> Tree:
    """Returns the weights of an encoder that has learnt nothing yet (`init_weights`)."""
    shapes = abstract_encoder(config, dtype=dtype)
    return init_weights(shapes, key=key, initializer_range=config.initializer_range)


class Encoder(NamedTuple):
    """Pure functions of one encoder on one sequence; the caller vmaps.

    config: The encoder's settings.
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

    A mask is True at real tokens; padding may stand on either side. Dropout is drawn where a key
    is given, on hidden states only: BERT's further dropout inside the softmax is left out, since
    `jax.nn.dot_product_attention` has none.

    Example:
      config, weights = load_encoder(directory, dtype=jnp.float32)
      encoder = bind_encoder(config)
      vectors_BE = jax.vmap(encoder.embed, in_axes=(None, 0, 0))(weights, tokens_BL, mask_BL)
    """

    def hidden(
        weights: Tree,
        tokens_L: Int[Array, " L"],
        mask_L: Bool[Array, " L"],
        types_L: Int[Array, " L"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[jax.Array, "L E"]:
        return _hidden(weights, tokens_L, mask_L, types_L, dropout_key, config=config)

    def embed(
        weights: Tree, tokens_L: Int[Array, " L"], mask_L: Bool[Array, " L"]
    ) -> Float[jax.Array, " E"]:
        hidden_LE = hidden(weights, tokens_L, mask_L).astype(jnp.float32)
        if config.pooling == "mean":
            weight_L1 = mask_L.astype(jnp.float32)[:, None]
            pooled_E = (hidden_LE * weight_L1).sum(0) / jnp.maximum(weight_L1.sum(), 1e-9)
        elif config.pooling == "cls":
            pooled_E = hidden_LE[_first_token(mask_L)]
        else:
            raise ValueError(
                f"a sentence vector wants a pooling, one of {POOLINGS}, got {config.pooling=};"
                " name it when loading the encoder"
            )
        return pooled_E / jnp.maximum(jnp.linalg.norm(pooled_E), 1e-12)

    def classify(
        weights: Tree,
        tokens_L: Int[Array, " L"],
        mask_L: Bool[Array, " L"],
        dropout_key: jax.Array | None = None,
    ) -> Float[jax.Array, " C"]:
        if not config.num_labels:
            raise ValueError(
                f"a classifier wants labels, got {config.num_labels=}; name num_labels when loading"
            )
        body_key, dense_key, output_key = _split(dropout_key, 3)
        hidden_LE = hidden(weights, tokens_L, mask_L, dropout_key=body_key)
        first_E = hidden_LE[_first_token(mask_L)]
        rate = config.classifier_dropout
        rate = config.hidden_dropout_prob if rate is None else rate
        # RoBERTa's head drops before both of its layers, BERT's after its pooler only.
        if config.model_type == "roberta":
            first_E = _dropout(first_E, rate, dense_key)
        dense_E = jnp.tanh(_linear(weights["head_dense"], first_E))
        dense_E = _dropout(dense_E, rate, output_key)
        return _linear(weights["head_output"], dense_E).astype(jnp.float32)

    return Encoder(config=config, hidden=hidden, embed=embed, classify=classify)


def _hidden(
    weights: Tree,
    tokens_L: Int[Array, " L"],
    mask_L: Bool[Array, " L"],
    types_L: Int[Array, " L"] | None,
    dropout_key: jax.Array | None,
    *,
    config: EncoderConfig,
) -> Float[jax.Array, "L E"]:
    if tokens_L.shape[0] > config.max_length:
        raise ValueError(
            f"a text must have at most {config.max_length} tokens, got {tokens_L.shape[0]}: "
            "truncate it"
        )
    embed_key, layers_key = _split(dropout_key, 2)
    hidden_LE = embed_tokens(weights, tokens_L, mask_L, types_L, config=config)
    hidden_LE = _dropout(hidden_LE, config.hidden_dropout_prob, embed_key)

    def run_layer(hidden_LE: Any, layer: Any) -> tuple[Any, None]:
        weights, key = layer
        return apply_block(weights, hidden_LE, mask_L, key, config=config), None

    keys = None if layers_key is None else jax.random.split(layers_key, config.num_hidden_layers)
    return jax.lax.scan(run_layer, hidden_LE, (weights["layers"], keys))[0]


def embed_tokens(
    weights: Tree,
    tokens_L: Int[Array, " L"],
    mask_L: Bool[Array, " L"],
    types_L: Int[Array, " L"] | None,
    *,
    config: EncoderConfig,
) -> Float[jax.Array, "L E"]:
    """Returns what the first layer reads: word, type and position vectors, summed and normed."""
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
    weights: Tree,
    hidden_LE: Float[jax.Array, "L E"],
    mask_L: Bool[Array, " L"],
    dropout_key: jax.Array | None,
    *,
    config: EncoderConfig,
) -> Float[jax.Array, "L E"]:
    """Returns the output of one layer, given its own weights without the stack's leading axis."""
    attention_key, mlp_key = _split(dropout_key, 2)
    rate, eps = config.hidden_dropout_prob, config.layer_norm_eps
    mixed_LE = _dropout(attend(weights, hidden_LE, mask_L, config=config), rate, attention_key)
    hidden_LE = normalize(weights["attention_norm"], hidden_LE + mixed_LE, eps)
    outer_LE = _dropout(apply_mlp(weights, hidden_LE, config=config), rate, mlp_key)
    return normalize(weights["mlp_norm"], hidden_LE + outer_LE, eps)


def attend(
    weights: Tree,
    hidden_LE: Float[jax.Array, "L E"],
    mask_L: Bool[Array, " L"],
    *,
    config: EncoderConfig,
) -> Float[jax.Array, "L E"]:
    """Returns one layer's attention in both directions, its output projection applied."""

    def heads(name: str) -> Float[jax.Array, "L H D"]:
        # In float32, as XLA keeps the attention weights, and as its backward pass wants it.
        projected_LE = _linear(weights[name], hidden_LE).astype(jnp.float32)
        return projected_LE.reshape(hidden_LE.shape[0], config.num_attention_heads, -1)

    mixed_LHD = jax.nn.dot_product_attention(
        heads("query"), heads("key"), heads("value"), mask=mask_L[None, None, :]
    )
    mixed_LE = mixed_LHD.reshape(hidden_LE.shape).astype(hidden_LE.dtype)
    return _linear(weights["attention_output"], mixed_LE)


def apply_mlp(
    weights: Tree, hidden_LE: Float[jax.Array, "L E"], *, config: EncoderConfig
) -> Float[jax.Array, "L E"]:
    """Returns one layer's MLP: up, activation, down."""
    inner = layers.ACTIVATIONS[config.hidden_act](_linear(weights["up"], hidden_LE))
    return _linear(weights["down"], inner)


def _linear(weights: Tree, x: Float[jax.Array, "*batch I"]) -> Float[jax.Array, "*batch O"]:
    out = x @ weights["kernel"]
    return out + weights["bias"].reshape((1,) * (out.ndim - 1) + (-1,))


def normalize(weights: Tree, x_LE: Float[jax.Array, "L E"], eps: float) -> Float[jax.Array, "L E"]:
    """Returns the rows at mean 0 and variance 1, scaled and shifted: layer normalization."""
    # Mean and variance in float32: bfloat16 loses the small deviations that a norm divides by.
    wide_LE = x_LE.astype(jnp.float32)
    mean_L1 = wide_LE.mean(-1, keepdims=True)
    variance_L1 = jnp.square(wide_LE - mean_L1).mean(-1, keepdims=True)
    unit_LE = (wide_LE - mean_L1) * jax.lax.rsqrt(variance_L1 + eps)
    scale_1E, bias_1E = (weights[name].astype(jnp.float32)[None] for name in ("scale", "bias"))
    return (unit_LE * scale_1E + bias_1E).astype(x_LE.dtype)


def _first_token(mask_L: Bool[Array, " L"]) -> Int[Array, ""]:
    """Returns the place of the first real token, the CLS token, whichever side is padded."""
    return jnp.argmax(mask_L)


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _split(key: jax.Array | None, number: int) -> Any:
    return (None,) * number if key is None else jax.random.split(key, number)
