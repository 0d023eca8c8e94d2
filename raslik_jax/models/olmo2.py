"""OLMo-2 (1B, 7B, 13B, 32B).

It differs from Llama. The RMSNorms follow attention and the MLP inside the residual branch and none
precedes them. Queries and keys are normalized over the whole projection before it is cut into
heads.

Source: OLMo Team 2024, "2 OLMo 2 Furious" (arXiv:2501.00656); layout as in transformers
`models/olmo2/modeling_olmo2.py`, release 5.23.
"""

import dataclasses

from raslik_jax.models import architecture, layers, llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(architecture.DecoderConfig):
    """The settings of an OLMo-2 model under Hugging Face's names."""

    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5

    model_type = "olmo2"
    hf_name = "Olmo2"


class Olmo2Block(layers.GatedBlock):
    """One OLMo-2 layer; parameter names are the last parts of Hugging Face's."""

    norms = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    head_norm = "all"


ARCHITECTURE = llama.ARCHITECTURE._replace(
    config=Olmo2Config,
    key_map={
        **llama.KEY_MAP,
        **llama.HEAD_NORMS,
        "layers/post_feedforward_layernorm": "post_feedforward_layernorm",
    },
    modules=(Olmo2Block, layers.RMSNorm),
)
