"""Mistral (7B v0.1 to v0.3, Nemo 12B).

It differs from Llama: all layers have a sliding window if `sliding_window` is set.

Source: Jiang et al. 2023 (arXiv:2310.06825); layout as in transformers
`models/mistral/modeling_mistral.py`, release 5.23.
"""

import dataclasses

from raslik_jax.models import architecture, llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(architecture.SlidingConfig):
    """The settings of a Mistral model under Hugging Face's names."""

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096

    model_type = "mistral"
    hf_name = "Mistral"


ARCHITECTURE = llama.ARCHITECTURE._replace(config=MistralConfig)
