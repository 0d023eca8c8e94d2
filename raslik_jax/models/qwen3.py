"""Qwen3 (0.6B to 32B).

It differs from Llama. Queries and keys are normalized by head. The width of a head is its own
setting. If `use_sliding_window` is set the layers from `max_window_layers` on have a sliding
window.

Source: Yang et al. 2025 (arXiv:2505.09388); layout as in transformers
`models/qwen3/modeling_qwen3.py`, release 5.23.
"""

import dataclasses

from raslik_jax.models import layers, llama, qwen2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(qwen2.Qwen2Config):
    """The settings of a Qwen3 model under Hugging Face's names."""

    head_dim: int | None = 128

    model_type = "qwen3"
    hf_name = "Qwen3"


class Qwen3Block(llama.LlamaBlock):
    """One Qwen3 layer; parameter names are the last parts of Hugging Face's."""

    head_norm = "each"


ARCHITECTURE = llama.ARCHITECTURE._replace(
    config=Qwen3Config,
    key_map={**llama.KEY_MAP, **llama.HEAD_NORMS},
    modules=(Qwen3Block, layers.RMSNorm),
)
