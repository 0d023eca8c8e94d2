"""Qwen2 and Qwen2.5 (0.5B to 72B).

What differs from Llama: biases on queries, keys and values and nowhere else; where
`use_sliding_window` is set, the layers from `max_window_layers` on have a sliding window.

Source: Yang et al. 2024 (arXiv:2407.10671, arXiv:2412.15115); layout as in transformers
`models/qwen2/modeling_qwen2.py`, release 5.23; presets as Qwen publishes.
"""

import dataclasses
from typing import Any

from raslik_jax.models import architecture, layers, llama
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(architecture.MixedConfig):
    """The settings of a Qwen2 model, under Hugging Face's names."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    model_type = "qwen2"
    hf_name = "Qwen2"

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            # Published files name a window beside the switch that turns it off.
            object.__setattr__(self, "sliding_window", None)
        super().__post_init__()

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window where `layer_types` is not given."""
        return self.sliding_window is not None and layer >= self.max_window_layers


class Qwen2Block(llama.LlamaBlock):
    """One Qwen2 layer; parameter names are the last parts of Hugging Face's."""

    def __init__(self, config: Qwen2Config, lora: LoRAConfig | None, *, dtype: Any):
        super().__init__(config, lora, qkv_bias=True, dtype=dtype)


def _preset(*sizes: int, vocab_size: int = 151936, **others: Any) -> Qwen2Config:
    return Qwen2Config(
        **architecture.name_sizes(*sizes),
        vocab_size=vocab_size,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters=RopeParameters(rope_theta=1e6),
        bos_token_id=151643,
        eos_token_id=151645,
        **others,
    )


ARCHITECTURE = architecture.Architecture(
    Qwen2Config,
    key_map=llama.KEY_MAP,
    buffers=llama.BUFFERS,
    modules=(Qwen2Block, layers.RMSNorm),
    presets={
        "qwen2.5-0.5b": _preset(896, 24, 14, 2, 4864, tie_word_embeddings=True),
        "qwen2.5-1.5b": _preset(1536, 28, 12, 2, 8960, tie_word_embeddings=True),
        "qwen2.5-3b": _preset(2048, 36, 16, 2, 11008, tie_word_embeddings=True),
        "qwen2.5-7b": _preset(3584, 28, 28, 4, 18944, vocab_size=152064),
        "qwen2.5-14b": _preset(5120, 48, 40, 8, 13824, vocab_size=152064),
        "qwen2.5-32b": _preset(5120, 64, 40, 8, 27648, vocab_size=152064),
        "qwen2.5-72b": _preset(8192, 80, 64, 8, 29568, vocab_size=152064),
    },
    hub_names={r"Qwen2\.5-(?:Coder-)?(\d[\d.]*B)(-Instruct)?": "qwen2.5-{}"},
)
