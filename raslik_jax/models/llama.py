"""Llama: SmolLM2, TinyLlama, Llama 2 and 3.

It differs from the other decoders. RMSNorm precedes attention and MLP. There are no biases unless
the config asks for them. Key-value heads are fewer than query heads. The MLP is gated:
down(silu(gate(x)) * up(x)). The head is often tied. Rotary scaling is "linear" or "llama3".

Source: Touvron et al. 2023 (arXiv:2302.13971), Grattafiori et al. 2024 (arXiv:2407.21783); layout
as in transformers `models/llama/modeling_llama.py`, release 5.23.
"""

import dataclasses

from raslik_jax.models import architecture, layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(architecture.DecoderConfig):
    """The settings of a Llama model under Hugging Face's names."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    mlp_bias: bool = False

    model_type = "llama"
    hf_name = "Llama"


class LlamaBlock(layers.GatedBlock):
    """One Llama layer; parameter names are the last parts of Hugging Face's.

    Mistral's layers have this shape. Qwen's have it with more biases or norms.
    """

    norms = ("input_layernorm", "", "post_attention_layernorm", "")


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
# Of those that normalize queries and keys.
HEAD_NORMS = {f"layers/{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
# Older releases of transformers wrote these with the weights.
BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


ARCHITECTURE = architecture.Architecture(
    LlamaConfig, key_map=KEY_MAP, buffers=BUFFERS, modules=(LlamaBlock, layers.RMSNorm)
)
