"""Phi-3, Phi-3.5 and Phi-4 (mini, medium, Phi-4 14B).

It differs from Llama. One projection makes queries, keys and values in this order and not by head.
One makes gate and up. Some sizes rotate a fraction of each head. Some have a sliding window in all
layers or longrope's two lists of frequencies.

Source: Abdin et al. 2024 (arXiv:2404.14219, arXiv:2412.08905); layout as in transformers
`models/phi3/modeling_phi3.py`, release 5.23.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from raslik_jax.models import architecture, layers, llama
from raslik_jax.models.attention import mix_tokens
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.lora import LoRAConfig

_KINDS, _ORIGINAL = ("type", "rope_type"), "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(architecture.SlidingConfig):
    """The settings of a Phi-3 model under Hugging Face's names."""

    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters(original_max_position_embeddings=4096)

    model_type = "phi3"
    hf_name = "Phi3"
    old_rope = {name: name for name in ("rope_theta", "partial_rotary_factor", _ORIGINAL)}

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Any:
        """Returns the config of a parsed config.json; refuses as `hf_config.read_fields` does."""
        values = dict(values)
        for field in ("rope_scaling", "rope_parameters"):
            if isinstance(values.get(field), Mapping):
                # The first files called longrope by other names.
                values[field] = {
                    name: "longrope" if name in _KINDS and kind in ("su", "yarn") else kind
                    for name, kind in values[field].items()
                }
        return super().from_hf(values)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        values, rope = super().to_hf(), self.rope_parameters
        if rope.rope_type == "longrope":
            # transformers 4 takes these three and no other.
            factors = {name: getattr(rope, name) for name in ("short_factor", "long_factor")}
            values["rope_scaling"] = {"type": "longrope", **factors}
        else:
            values["rope_parameters"].pop(_ORIGINAL, None)
        return values


class Phi3Block(nnx.Module):
    """One Phi-3 layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: Phi3Config, lora: LoRAConfig | None, *, dtype: Any):
        width, inner = config.hidden_size, config.intermediate_size
        linear = functools.partial(layers.Linear, bias=False, lora=lora, dtype=dtype)
        norm = functools.partial(layers.RMSNorm, epsilon=config.rms_norm_eps, dtype=dtype)
        self.config = config
        heads = config.num_attention_heads + 2 * config.num_cached_heads
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)
        self.qkv_proj = linear("qkv_proj", width, heads * config.head_width)
        self.o_proj = linear("o_proj", config.num_attention_heads * config.head_width, width)
        self.gate_up_proj = linear("gate_up_proj", width, 2 * inner)
        self.down_proj = linear("down_proj", inner, width)

    def attention(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.LayerOutput:
        """Returns the attention's output and the keys and values of these tokens."""
        queries, groups = self.config.num_attention_heads, self.config.num_cached_heads
        fused_LI = self.qkv_proj(hidden_LE, context.key)
        fused_LHD = fused_LI.reshape(len(hidden_LE), -1, self.config.head_width)
        heads = jnp.split(fused_LHD, (queries, queries + groups), axis=1)
        mixed_LI, fresh = mix_tokens(heads[0], heads[1], heads[2], context)
        return self.o_proj(mixed_LI, context.key), fresh

    def mlp(self, hidden_LE: layers.Hidden, context: layers.Context) -> layers.Hidden:
        """Returns the gated perceptron's output."""
        gate_LI, up_LI = jnp.split(self.gate_up_proj(hidden_LE, context.key), 2, axis=1)
        gate_LI = layers.ACTIVATIONS[self.config.hidden_act](gate_LI)
        return self.down_proj(gate_LI * up_LI, context.key)

    norms, __call__ = llama.LlamaBlock.norms, llama.LlamaBlock.__call__


ARCHITECTURE = architecture.Architecture(
    Phi3Config,
    key_map={
        **{name: llama.KEY_MAP[name] for name in ("embed", "layers", "final_norm", "head")},
        **{f"layers/{name}": f"self_attn.{name}" for name in ("qkv_proj", "o_proj")},
        **{f"layers/{name}": f"mlp.{name}" for name in ("gate_up_proj", "down_proj")},
        **{f"layers/{name}": name for name in ("input_layernorm", "post_attention_layernorm")},
    },
    buffers=llama.BUFFERS,
    modules=(Phi3Block, layers.RMSNorm),
    lora_targets=("qkv_proj", "o_proj"),
)
