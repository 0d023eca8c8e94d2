"""Llama: SmolLM2, TinyLlama, Llama 2 and 3.

What differs from the other decoders: RMSNorm before attention and MLP; no biases (unless the config
asks for them); fewer key-value heads than query heads; a gated MLP, down(silu(gate(x)) * up(x));
often a tied head; rotary scaling "linear" or "llama3".

Source: Touvron et al. 2023 (arXiv:2302.13971), Grattafiori et al. 2024 (arXiv:2407.21783); layout
as in transformers `models/llama/modeling_llama.py`, release 5.23.
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
class LlamaConfig:
    """The settings of a Llama model, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: hf_config.RopeParameters = hf_config.RopeParameters()
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    model_type = "llama"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        more = ("intermediate_size", "max_position_embeddings")
        hf_config.check_sizes(self, (*sizes, *more, "rms_norm_eps"))
        hf_config.check_heads(self, explicit_head_dim=True)
        hf_config.check_choice("hidden_act", self.hidden_act, layers.ACTIVATIONS)
        layers.rope_frequencies(self.rope_parameters, self.head_width)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_cached_heads(self) -> int:
        """The number of key-value heads; Hugging Face leaves it out where all heads have one."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def norm_epsilon(self) -> float:
        """The constant added to the mean square in every norm."""
        return self.rms_norm_eps

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Returns the config of a parsed config.json.

        Raises:
          ValueError: See `hf_config.read_fields`.
        """
        return hf_config.read_fields(cls, values, model_type=cls.model_type)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        return hf_config.write_fields(
            self, model_type=self.model_type, architecture="LlamaForCausalLM"
        )


class LlamaBlock(nnx.Module):
    """One Llama layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: LlamaConfig, lora: LoRAConfig | None, *, dtype: Any):
        width, inner = config.hidden_size, config.intermediate_size
        query_width = config.num_attention_heads * config.head_width
        key_width = config.num_cached_heads * config.head_width

        def linear(name: str, in_features: int, out_features: int, bias: bool) -> layers.Linear:
            return layers.Linear(name, in_features, out_features, bias=bias, lora=lora, dtype=dtype)

        def norm() -> layers.RMSNorm:
            return layers.RMSNorm(width, epsilon=config.rms_norm_eps, dtype=dtype)

        self.config = config
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.q_proj = linear("q_proj", width, query_width, config.attention_bias)
        self.k_proj = linear("k_proj", width, key_width, config.attention_bias)
        self.v_proj = linear("v_proj", width, key_width, config.attention_bias)
        self.o_proj = linear("o_proj", query_width, width, config.attention_bias)
        self.gate_proj = linear("gate_proj", width, inner, config.mlp_bias)
        self.up_proj = linear("up_proj", width, inner, config.mlp_bias)
        self.down_proj = linear("down_proj", inner, width, config.mlp_bias)

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
        query_LHD = self.q_proj(hidden_LE, key).reshape(num_tokens, -1, head_width)
        key_LGD = self.k_proj(hidden_LE, key).reshape(num_tokens, -1, head_width)
        value_LGD = self.v_proj(hidden_LE, key).reshape(num_tokens, -1, head_width)
        query_LHD = layers.rotate(query_LHD, context.rotation)
        key_LGD = layers.rotate(key_LGD, context.rotation)
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
        attention_LE, fresh = self.attention(
            self.input_layernorm(hidden_LE), context, past, key, kind=kind
        )
        hidden_LE = hidden_LE + attention_LE
        return hidden_LE + self.mlp(self.post_attention_layernorm(hidden_LE), key), fresh


class Llama(layers.CausalLM):
    """A Llama language model."""

    block_class = LlamaBlock
    norm_class = layers.RMSNorm
