"""Qwen3 (0.6B to 32B).

What differs from Llama: queries and keys are normalized, each head alone; the width of a head is
its own setting. Where `use_sliding_window` is set, the layers from `max_window_layers` on have a
sliding window.

Source: Yang et al. 2025 (arXiv:2505.09388); layout as in transformers
`models/qwen3/modeling_qwen3.py`, release 5.23; presets as Qwen publishes.
"""

import dataclasses
from typing import Any

from raslik_jax.models import architecture, layers, llama, qwen2
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(qwen2.Qwen2Config):
    """The settings of a Qwen3 model, under Hugging Face's names."""

    head_dim: int | None = 128

    model_type = "qwen3"
    hf_name = "Qwen3"


class Qwen3Block(llama.LlamaBlock):
    """One Qwen3 layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: Qwen3Config, lora: LoRAConfig | None, *, dtype: Any):
        super().__init__(config, lora, dtype=dtype)
        shape = {"epsilon": config.rms_norm_eps, "dtype": dtype}
        self.q_norm = layers.HeadNorm(config.head_width, **shape)
        self.k_norm = layers.HeadNorm(config.head_width, **shape)


def _preset(*sizes: int, **others: Any) -> Qwen3Config:
    return Qwen3Config(
        **architecture.name_sizes(*sizes),
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters=RopeParameters(rope_theta=1e6),
        bos_token_id=151643,
        eos_token_id=151645,
        **others,
    )


ARCHITECTURE = architecture.Architecture(
    Qwen3Config,
    key_map={
        **llama.KEY_MAP,
        "layers/q_norm": "self_attn.q_norm",
        "layers/k_norm": "self_attn.k_norm",
    },
    buffers=llama.BUFFERS,
    modules=(Qwen3Block, layers.RMSNorm),
    presets={
        "qwen3-0.6b": _preset(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
        "qwen3-1.7b": _preset(2048, 28, 16, 8, 6144, tie_word_embeddings=True),
        "qwen3-4b": _preset(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
        "qwen3-8b": _preset(4096, 36, 32, 8, 12288),
        "qwen3-14b": _preset(5120, 40, 40, 8, 17408),
        "qwen3-32b": _preset(5120, 64, 64, 8, 25600),
    },
    hub_names={r"Qwen3-(\d[\d.]*B)(-Base)?": "qwen3-{}"},
)
