"""GPT-NeoX, the architecture of Pythia (14m to 12b).

It differs from the other decoders. LayerNorm and every linear layer have a bias. One fused
projection has the output layout (head, [query, key, value], head width). Only a fraction of each
head is rotated. Attention and MLP read the same residual stream ("parallel residual") unless the
config says otherwise. GELU is exact.

Source: Black et al. 2022 (arXiv:2204.06745), Biderman et al. 2023 (arXiv:2304.01373); layout as in
transformers `models/gpt_neox/modeling_gpt_neox.py`, release 5.23.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx

from raslik_jax.models import architecture, hf_config, layers
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(architecture.DecoderConfig):
    """The settings of a GPT-NeoX model under Hugging Face's names."""

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_parameters: hf_config.RopeParameters = hf_config.RopeParameters(partial_rotary_factor=0.25)

    model_type = "gpt_neox"
    hf_name = "GPTNeoX"
    old_rope = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the key that the key map knows for one of a file.

        The module of the head is `lm_head` in transformers 5, whose files have the old name.
        """
        return key.replace("lm_head.", "embed_out.", 1) if key.startswith("lm_head.") else key


class GPTNeoXBlock(nnx.Module):
    """One GPT-NeoX layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: GPTNeoXConfig, lora: LoRAConfig | None, *, dtype: Any):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        linear = functools.partial(layers.Linear, lora=lora, dtype=dtype)
        norm = functools.partial(layers.LayerNorm, epsilon=config.layer_norm_eps, dtype=dtype)
        self.config = config
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)
        self.query_key_value = linear("query_key_value", width, 3 * width, bias=bias)
        self.dense = linear("dense", width, width, bias=bias)
        self.dense_h_to_4h = linear("dense_h_to_4h", width, inner, bias=True)
        self.dense_4h_to_h = linear("dense_4h_to_h", inner, width, bias=True)

    def attention(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.LayerOutput:
        """Returns the attention's output and the keys and values of these tokens."""
        # The fused projection is laid out by head first, and only then query, key, value.
        fused_LHCD = self.query_key_value(hidden_LE, context.key).reshape(
            -1, self.config.num_attention_heads, 3, self.config.head_width
        )
        query_LHD, key_LHD, value_LHD = (fused_LHCD[:, :, part] for part in range(3))
        mixed_LI, fresh = layers.mix_tokens(query_LHD, key_LHD, value_LHD, context)
        return self.dense(mixed_LI, context.key), fresh

    def mlp(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.Hidden:
        """Returns the two-layer perceptron's output."""
        activation = layers.ACTIVATIONS[self.config.hidden_act]
        inner_LI = activation(self.dense_h_to_4h(hidden_LE, context.key))
        return self.dense_4h_to_h(inner_LI, context.key)

    def __call__(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.LayerOutput:
        """Returns the residual stream after this layer and its keys and values."""
        attention_LE, fresh = self.attention(self.input_layernorm(hidden_LE), context)
        if self.config.use_parallel_residual:
            mlp_LE = self.mlp(self.post_attention_layernorm(hidden_LE), context)
            return mlp_LE + attention_LE + hidden_LE, fresh
        attention_LE = attention_LE + hidden_LE
        return self.mlp(self.post_attention_layernorm(attention_LE), context) + attention_LE, fresh


ARCHITECTURE = architecture.Architecture(
    GPTNeoXConfig,
    key_map={
        "embed": "gpt_neox.embed_in",
        "layers": "gpt_neox.layers.{layer}",
        "layers/input_layernorm": "input_layernorm",
        "layers/post_attention_layernorm": "post_attention_layernorm",
        "layers/query_key_value": "attention.query_key_value",
        "layers/dense": "attention.dense",
        "layers/dense_h_to_4h": "mlp.dense_h_to_4h",
        "layers/dense_4h_to_h": "mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    # Older releases of transformers wrote these with the weights.
    buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    modules=(GPTNeoXBlock, layers.LayerNorm),
    lora_targets=("query_key_value", "dense"),
    is_served_with_lora=False,
)
