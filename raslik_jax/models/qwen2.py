"""Qwen2 and Qwen2.5 (0.5B to 72B).

It differs from Llama. Queries, keys and values have biases and nothing else has. If
`use_sliding_window` is set the layers from `max_window_layers` on have a sliding window.

Source: Yang et al. 2024 (arXiv:2407.10671, arXiv:2412.15115); layout as in transformers
`models/qwen2/modeling_qwen2.py`, release 5.23.
"""

import dataclasses

from raslik_jax.models import architecture, layers, llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(architecture.MixedConfig):
    """The settings of a Qwen2 model under Hugging Face's names."""

    max_position_embeddings: int = 32_768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    model_type = "qwen2"
    hf_name = "Qwen2"

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            # Published files name a window in addition to the switch that turns it off.
            object.__setattr__(self, "sliding_window", None)
        super().__post_init__()

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window where `layer_types` is not given."""
        return self.sliding_window is not None and layer >= self.max_window_layers


class Qwen2Block(llama.LlamaBlock):
    """One Qwen2 layer; parameter names are the last parts of Hugging Face's."""

    qkv_bias = True


ARCHITECTURE = llama.ARCHITECTURE._replace(config=Qwen2Config, modules=(Qwen2Block, layers.RMSNorm))
