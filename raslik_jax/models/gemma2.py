"""Gemma 2 (2B, 9B, 27B).

It differs from Llama. The scale of a norm is stored as its excess over 1. A norm follows attention
and the MLP in addition to the norms in front. Embeddings are multiplied by the root of their width.
Every second layer has a sliding window. Logits of attention and of the vocabulary are capped by c
tanh(x / c). A setting scales queries in place of the width of a head.

Source: Gemma Team 2024 (arXiv:2408.00118); layout as in transformers
`models/gemma2/modeling_gemma2.py`, release 5.23.
"""

import dataclasses
import math

from raslik_jax.models import architecture, layers, llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(architecture.MixedConfig):
    """The settings that Gemma 2 and Gemma 3 share under Hugging Face's names."""

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None

    spellings = {"hidden_activation": "hidden_act"}

    def __post_init__(self) -> None:
        super().__post_init__()
        caps = [self.attention_cap, self.logit_cap]
        if self.query_pre_attn_scalar < 1 or any(cap is not None and cap <= 0 for cap in caps):
            got = f"got {self.query_pre_attn_scalar} and {caps}: correct config.json"
            raise ValueError(f"query_pre_attn_scalar and soft caps must be positive, {got}")

    @property
    def attention_scale(self) -> float:
        """The factor on a query's product with a key."""
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def logit_cap(self) -> float | None:
        """The bound of the vocabulary's logits."""
        return self.final_logit_softcapping

    @property
    def embedding_scale(self) -> float:
        """The root of the width."""
        return math.sqrt(self.hidden_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """The settings of a Gemma 2 model under Hugging Face's names."""

    max_position_embeddings: int = 8192
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

    model_type = "gemma2"
    hf_name = "Gemma2"
    # Published files have the window under both names.
    spellings = {**GemmaConfig.spellings, "sliding_window_size": "sliding_window"}

    @property
    def attention_cap(self) -> float | None:
        """The bound of attention logits."""
        return self.attn_logit_softcapping

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window where `layer_types` is not given."""
        return layer % 2 == 0


class GemmaBlock(layers.GatedBlock):
    """One layer of Gemma 2 or 3; parameter names are the last parts of Hugging Face's."""

    norms = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
    norm = layers.OffsetRMSNorm


# Gemma 3 shares it, with more norms.
KEY_MAP = {
    **llama.KEY_MAP,
    "layers/pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "layers/post_feedforward_layernorm": "post_feedforward_layernorm",
}


ARCHITECTURE = architecture.Architecture(
    Gemma2Config,
    key_map=KEY_MAP,
    buffers=llama.BUFFERS,
    modules=(GemmaBlock, layers.OffsetRMSNorm),
)
