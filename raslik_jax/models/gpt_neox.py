"""GPT-NeoX, the architecture of Pythia (14m to 12b).

What differs from the other decoders: LayerNorm with bias; biases on every linear layer; one fused
projection whose output is laid out (head, [query, key, value], head width); only a fraction of each
head is rotated; attention and MLP read the same residual stream ("parallel residual") unless the
config says otherwise; the exact GELU.

Source: Black et al. 2022 (arXiv:2204.06745), Biderman et al. 2023 (arXiv:2304.01373); layout as in
transformers `models/gpt_neox/modeling_gpt_neox.py`, release 5.23.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from raslik_jax.models import hf_config, layers
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig:
    """The settings of a GPT-NeoX model, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_parameters: hf_config.RopeParameters = hf_config.RopeParameters(partial_rotary_factor=0.25)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    model_type = "gpt_neox"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        more = ("intermediate_size", "max_position_embeddings")
        hf_config.check_sizes(self, (*sizes, *more, "layer_norm_eps"))
        hf_config.check_heads(self, explicit_head_dim=False)
        hf_config.check_choice("hidden_act", self.hidden_act, layers.ACTIVATIONS)
        layers.rope_frequencies(self.rope_parameters, self.head_width)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def norm_epsilon(self) -> float:
        """The constant added to the variance in every norm."""
        return self.layer_norm_eps

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "GPTNeoXConfig":
        """Returns the config of a parsed config.json.

        Raises:
          ValueError: See `hf_config.read_fields`.
        """
        return hf_config.read_fields(
            cls, values, model_type=cls.model_type, default_rotary_fraction=0.25
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        return hf_config.write_fields(
            self, model_type=self.model_type, architecture="GPTNeoXForCausalLM"
        )


class GPTNeoXBlock(nnx.Module):
    """One GPT-NeoX layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: GPTNeoXConfig, lora: LoRAConfig | None, *, dtype: Any):
        width, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, in_features: int, out_features: int, bias: bool) -> layers.Linear:
            return layers.Linear(name, in_features, out_features, bias=bias, lora=lora, dtype=dtype)

        self.config = config
        self.input_layernorm = layers.LayerNorm(width, epsilon=config.norm_epsilon, dtype=dtype)
        self.post_attention_layernorm = layers.LayerNorm(
            width, epsilon=config.norm_epsilon, dtype=dtype
        )
        self.query_key_value = linear("query_key_value", width, 3 * width, config.attention_bias)
        self.dense = linear("dense", width, width, config.attention_bias)
        self.dense_h_to_4h = linear("dense_h_to_4h", width, inner, True)
        self.dense_4h_to_h = linear("dense_4h_to_h", inner, width, True)

    def attention(
        self,
        hidden_LE: Float[Array, "L E"],
        context: layers.Context,
        past: layers.KeyValues | None,
        key: jax.Array | None,
        *,
        kind: layers.AttentionKind | None,
    ) -> tuple[Float[Array, "L E"], layers.KeyValues]:
        """Returns the attention's output and the keys and values of these tokens."""
        num_heads, width = self.config.num_attention_heads, self.config.head_width
        # The fused projection is laid out by head first, and only then query, key, value.
        fused = self.query_key_value(hidden_LE, key).reshape(-1, num_heads, 3, width)
        query_LHD = layers.rotate(fused[:, :, 0], context.rotation)
        key_LHD = layers.rotate(fused[:, :, 1], context.rotation)
        value_LHD = fused[:, :, 2]
        mixed_LHD = layers.attend(query_LHD, key_LHD, value_LHD, context, past, kind=kind)
        output_LE = self.dense(mixed_LHD.reshape(-1, num_heads * width), key)
        return output_LE, layers.fresh_key_values(key_LHD, value_LHD)

    def mlp(self, hidden_LE: Float[Array, "L E"], key: jax.Array | None) -> Float[Array, "L E"]:
        """Returns the two-layer perceptron's output."""
        activation = layers.ACTIVATIONS[self.config.hidden_act]
        return self.dense_4h_to_h(activation(self.dense_h_to_4h(hidden_LE, key)), key)

    def __call__(
        self,
        hidden_LE: Float[Array, "L E"],
        context: layers.Context,
        past: layers.KeyValues | None,
        key: jax.Array | None,
        *,
        kind: layers.AttentionKind | None,
    ) -> tuple[Float[Array, "L E"], layers.KeyValues]:
        """Returns the residual stream after this layer, and its keys and values."""
        attention_LE, fresh = self.attention(
            self.input_layernorm(hidden_LE), context, past, key, kind=kind
        )
        if self.config.use_parallel_residual:
            mlp_LE = self.mlp(self.post_attention_layernorm(hidden_LE), key)
            return mlp_LE + attention_LE + hidden_LE, fresh
        attention_LE = attention_LE + hidden_LE
        return self.mlp(self.post_attention_layernorm(attention_LE), key) + attention_LE, fresh


class GPTNeoX(layers.CausalLM):
    """A GPT-NeoX language model."""

    block_class = GPTNeoXBlock
    norm_class = layers.LayerNorm
