"""OLMo-2 (1B, 7B, 13B, 32B).

It differs from Llama. The RMSNorms follow attention and the MLP inside the residual branch and none
precedes them. Queries and keys are normalized over the whole projection before it is cut into
heads.

Source: OLMo Team 2024, "2 OLMo 2 Furious" (arXiv:2501.00656); layout as in transformers
`models/olmo2/modeling_olmo2.py`, release 5.23.
"""

import dataclasses
import functools
from typing import Any

from raslik_jax.models import architecture, layers, llama
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(architecture.DecoderConfig):
    """The settings of an OLMo-2 model under Hugging Face's names."""

    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5

    model_type = "olmo2"
    hf_name = "Olmo2"


class Olmo2Block(layers.GatedBlock):
    """One OLMo-2 layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: Olmo2Config, lora: LoRAConfig | None, *, dtype: Any):
        super().__init__(config, lora, dtype=dtype)
        norm = functools.partial(layers.RMSNorm, epsilon=config.rms_norm_eps, dtype=dtype)
        # They span all heads: cutting first would divide by each head's own mean square.
        self.q_norm = norm(config.num_attention_heads * config.head_width)
        self.k_norm = norm(config.num_cached_heads * config.head_width)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def __call__(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.LayerOutput:
        """Returns the residual stream after this layer and its keys and values."""
        attention_LE, fresh = self.attention(hidden_LE, context)
        hidden_LE = hidden_LE + self.post_attention_layernorm(attention_LE)
        return hidden_LE + self.post_feedforward_layernorm(self.mlp(hidden_LE, context)), fresh


ARCHITECTURE = llama.ARCHITECTURE._replace(
    config=Olmo2Config,
    key_map={
        **llama.KEY_MAP,
        **llama.HEAD_NORMS,
        "layers/post_feedforward_layernorm": "post_feedforward_layernorm",
    },
    modules=(Olmo2Block, layers.RMSNorm),
)
