"""Mistral (7B v0.1 to v0.3, Nemo 12B).

What differs from Llama: all layers have a sliding window where `sliding_window` is set.

Source: Jiang et al. 2023 (arXiv:2310.06825); layout as in transformers
`models/mistral/modeling_mistral.py`, release 5.23; presets as Mistral AI publishes.
"""

import dataclasses
from typing import Any

from raslik_jax.models import architecture, layers, llama
from raslik_jax.models.hf_config import RopeParameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(architecture.SlidingConfig):
    """The settings of a Mistral model, under Hugging Face's names."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    model_type = "mistral"
    hf_name = "Mistral"


def _preset(*sizes: int, theta: float = 1e6, **others: Any) -> MistralConfig:
    return MistralConfig(
        **architecture.name_sizes(*sizes),
        rms_norm_eps=1e-5,
        rope_parameters=RopeParameters(rope_theta=theta),
        bos_token_id=1,
        eos_token_id=2,
        **{"max_position_embeddings": 32768, "sliding_window": None, **others},
    )


_7B = (4096, 32, 32, 8, 14336)
ARCHITECTURE = architecture.Architecture(
    MistralConfig,
    key_map=llama.KEY_MAP,
    buffers=llama.BUFFERS,
    modules=(llama.LlamaBlock, layers.RMSNorm),
    presets={
        "mistral-7b-v0.1": _preset(*_7B, theta=1e4, vocab_size=32000, sliding_window=4096),
        "mistral-7b-v0.2": _preset(*_7B, vocab_size=32000),
        "mistral-7b-v0.3": _preset(*_7B, vocab_size=32768),
        "mistral-nemo-12b": _preset(
            *(5120, 40, 32, 8, 14336),
            vocab_size=131072,
            head_dim=128,
            max_position_embeddings=131072,
        ),
    },
    hub_names={
        r"Mistral-(7B(?:-Instruct)?-v0\.1)": "mistral-7b-v0.1",
        r"Mistral-(7B-Instruct-v0\.2)": "mistral-7b-v0.2",
        r"Mistral-(7B(?:-Instruct)?-v0\.3)": "mistral-7b-v0.3",
        r"Mistral-(Nemo)-(Base|Instruct)-2407": "mistral-nemo-12b",
    },
)
