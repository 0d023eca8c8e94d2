"""Llama: SmolLM2, TinyLlama, Llama 2 and 3.

What differs from the other decoders: RMSNorm before attention and MLP; no biases (unless the config
asks for them); fewer key-value heads than query heads; a gated MLP, down(silu(gate(x)) * up(x));
often a tied head; rotary scaling "linear" or "llama3".

Source: Touvron et al. 2023 (arXiv:2302.13971), Grattafiori et al. 2024 (arXiv:2407.21783); layout
as in transformers `models/llama/modeling_llama.py`, release 5.23; presets as published on the
Hugging Face hub by meta-llama, TinyLlama and HuggingFaceTB.
"""

import dataclasses
import functools
from typing import Any

from raslik_jax.models import architecture, layers
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(architecture.DecoderConfig):
    """The settings of a Llama model, under Hugging Face's names."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    mlp_bias: bool = False

    model_type = "llama"
    hf_name = "Llama"


class LlamaBlock(layers.GatedBlock):
    """One Llama layer; parameter names are the last parts of Hugging Face's.

    Layers of this shape are Mistral's and, with more biases or norms, Qwen's.
    """

    def __init__(
        self, config: Any, lora: LoRAConfig | None, *, qkv_bias: bool | None = None, dtype: Any
    ):
        mlp_bias = getattr(config, "mlp_bias", False)
        super().__init__(config, lora, mlp_bias=mlp_bias, qkv_bias=qkv_bias, dtype=dtype)
        norm = functools.partial(layers.RMSNorm, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm(config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size)

    def __call__(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.LayerOutput:
        """Returns the residual stream after this layer, and its keys and values."""
        attention_LE, fresh = self.attention(self.input_layernorm(hidden_LE), context)
        hidden_LE = hidden_LE + attention_LE
        return hidden_LE + self.mlp(self.post_attention_layernorm(hidden_LE), context), fresh


# Most architectures share it, some with more norms.
KEY_MAP = {
    "embed": "model.embed_tokens",
    "layers": "model.layers.{layer}",
    **{f"layers/{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"layers/{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"layers/{name}": name for name in ("input_layernorm", "post_attention_layernorm")},
    "final_norm": "model.norm",
    "head": "lm_head",
}
# Older releases of transformers wrote these beside the weights.
BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def _preset(*sizes: int, theta: float = 1e4, **others: Any) -> LlamaConfig:
    others.setdefault("rope_parameters", RopeParameters(rope_theta=theta))
    return LlamaConfig(**architecture.name_sizes(*sizes), rms_norm_eps=1e-5, **others)


_smollm2 = functools.partial(
    _preset, vocab_size=49152, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0
)
_llama2 = functools.partial(_preset, vocab_size=32000, bos_token_id=1, eos_token_id=2)
_llama3 = functools.partial(
    _preset,
    vocab_size=128256,
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_id=128001,
)
_stretched = functools.partial(
    RopeParameters,
    rope_type="llama3",
    rope_theta=500000.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
ARCHITECTURE = architecture.Architecture(
    LlamaConfig,
    key_map=KEY_MAP,
    buffers=BUFFERS,
    modules=(LlamaBlock, layers.RMSNorm),
    presets={
        "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, theta=1e5, tie_word_embeddings=True),
        "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, theta=1e5, tie_word_embeddings=True),
        "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, theta=1.3e5, tie_word_embeddings=True),
        "tinyllama-1.1b": _llama2(2048, 22, 32, 4, 5632),
        "llama-2-7b": _llama2(4096, 32, 32, 32, 11008, max_position_embeddings=4096),
        "llama-2-13b": _llama2(5120, 40, 40, 40, 13824, max_position_embeddings=4096),
        "llama-3.1-8b": _llama3(4096, 32, 32, 8, 14336, rope_parameters=_stretched(factor=8.0)),
        "llama-3.1-70b": _llama3(8192, 80, 64, 8, 28672, rope_parameters=_stretched(factor=8.0)),
        "llama-3.2-1b": _llama3(
            *(2048, 16, 32, 8, 8192),
            rope_parameters=_stretched(factor=32.0),
            tie_word_embeddings=True,
        ),
    },
    hub_names={
        r"SmolLM2-(\d[\d.]*[MB])(-Instruct)?": "smollm2-{}",
        r"TinyLlama-(1\.1B)(-.*|_v1\.1)?": "tinyllama-{}",
        r"Llama-2-(\d+b)(-chat)?-hf": "llama-2-{}",
        r"Llama-(3\.1-8B|3\.1-70B|3\.2-1B)(-Instruct)?": "llama-{}",
    },
)
