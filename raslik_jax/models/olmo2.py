"""OLMo-2 (1B, 7B, 13B, 32B).

What differs from Llama: the RMSNorms stand after attention and after the MLP, inside the residual
branch, and none before them; queries and keys are normalized over the whole projection, before it
is cut into heads.

Source: OLMo Team 2024, "2 OLMo 2 Furious" (arXiv:2501.00656); layout as in transformers
`models/olmo2/modeling_olmo2.py`, release 5.23.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float

from raslik_jax.models import hf_config, layers
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config:
    """The settings of an OLMo-2 model, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: hf_config.RopeParameters = hf_config.RopeParameters()
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    model_type = "olmo2"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        more = ("intermediate_size", "max_position_embeddings")
        hf_config.check_sizes(self, (*sizes, *more, "rms_norm_eps"))
        hf_config.check_heads(self, explicit_head_dim=False)
        hf_config.check_choice("hidden_act", self.hidden_act, layers.ACTIVATIONS)
        layers.rope_frequencies(self.rope_parameters, self.head_width)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_cached_heads(self) -> int:
        """The number of key-value heads; Hugging Face leaves it out where all heads have one."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def norm_epsilon(self) -> float:
        """The constant added to the mean square in every norm."""
        return self.rms_norm_eps

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Olmo2Config":
        """Returns the config of a parsed config.json.

        Raises:
          ValueError: See `hf_config.read_fields`.
        """
        return hf_config.read_fields(cls, values, model_type=cls.model_type)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        return hf_config.write_fields(
            self, model_type=self.model_type, architecture="Olmo2ForCausalLM"
        )


class Olmo2Block(nnx.Module):
    """One OLMo-2 layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: Olmo2Config, lora: LoRAConfig | None, *, dtype: Any):
        width, inner = config.hidden_size, config.intermediate_size
        query_width = config.num_attention_heads * config.head_width
        key_width = config.num_cached_heads * config.head_width

        def linear(name: str, in_features: int, out_features: int, bias: bool) -> layers.Linear:
            return layers.Linear(name, in_features, out_features, bias=bias, lora=lora, dtype=dtype)

        def norm(norm_width: int) -> layers.RMSNorm:
            return layers.RMSNorm(norm_width, epsilon=config.rms_norm_eps, dtype=dtype)

        self.config = config
        self.q_proj = linear("q_proj", width, query_width, config.attention_bias)
        self.k_proj = linear("k_proj", width, key_width, config.attention_bias)
        self.v_proj = linear("v_proj", width, key_width, config.attention_bias)
        self.o_proj = linear("o_proj", query_width, width, config.attention_bias)
        self.q_norm = norm(query_width)
        self.k_norm = norm(key_width)
        self.post_attention_layernorm = norm(width)
        self.post_feedforward_layernorm = norm(width)
        self.gate_proj = linear("gate_proj", width, inner, False)
        self.up_proj = linear("up_proj", width, inner, False)
        self.down_proj = linear("down_proj", inner, width, False)

    def attention(
        self,
        hidden_LE: Float[Array, "L E"],
        context: layers.Context,
        past: layers.KeyValues | None,
        key: Array | None,
        *,
        kind: layers.AttentionKind | None,
    ) -> tuple[Float[Array, "L E"], layers.KeyValues]:
        """Returns the attention's output and the keys and values of these tokens."""
        num_tokens, head_width = hidden_LE.shape[0], self.config.head_width
        # The norm spans all heads: cutting first would divide by each head's own mean square.
        query_LE = self.q_norm(self.q_proj(hidden_LE, key))
        key_LE = self.k_norm(self.k_proj(hidden_LE, key))
        value_LGD = self.v_proj(hidden_LE, key).reshape(num_tokens, -1, head_width)
        query_LHD = layers.rotate(query_LE.reshape(num_tokens, -1, head_width), context.rotation)
        key_LGD = layers.rotate(key_LE.reshape(num_tokens, -1, head_width), context.rotation)
        mixed_LHD = layers.attend(query_LHD, key_LGD, value_LGD, context, past, kind=kind)
        output_LE = self.o_proj(mixed_LHD.reshape(num_tokens, -1), key)
        return output_LE, layers.fresh_key_values(key_LGD, value_LGD)

    def mlp(self, hidden_LE: Float[Array, "L E"], key: Array | None) -> Float[Array, "L E"]:
        """Returns the gated perceptron's output."""
        gate_LI = layers.ACTIVATIONS[self.config.hidden_act](self.gate_proj(hidden_LE, key))
        return self.down_proj(gate_LI * self.up_proj(hidden_LE, key), key)

    def __call__(
        self,
        hidden_LE: Float[Array, "L E"],
        context: layers.Context,
        past: layers.KeyValues | None,
        key: Array | None,
        *,
        kind: layers.AttentionKind | None,
    ) -> tuple[Float[Array, "L E"], layers.KeyValues]:
        """Returns the residual stream after this layer, and its keys and values."""
        attention_LE, fresh = self.attention(hidden_LE, context, past, key, kind=kind)
        hidden_LE = hidden_LE + self.post_attention_layernorm(attention_LE)
        return hidden_LE + self.post_feedforward_layernorm(self.mlp(hidden_LE, key)), fresh


class Olmo2(layers.CausalLM):
    """An OLMo-2 language model."""

    block_class = Olmo2Block
    norm_class = layers.RMSNorm
