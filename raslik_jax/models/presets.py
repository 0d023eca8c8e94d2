"""The published sizes of the models that the architectures here cover, as configs.

They are the config.json files of the named checkpoints, so that counts, shapes and memory can be
found without a download. Source: the checkpoints' pages on the Hugging Face hub (EleutherAI/pythia,
allenai/OLMo-2, HuggingFaceTB/SmolLM2, TinyLlama, meta-llama); the totals of parameters that those
pages and papers state are tested.
"""

import re

from raslik_jax.models.decoder import ModelConfig
from raslik_jax.models.gpt_neox import GPTNeoXConfig
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.llama import LlamaConfig
from raslik_jax.models.olmo2 import Olmo2Config


def _pythia(width: int, depth: int, heads: int, vocab_size: int = 50304) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
    )


def _olmo2(width: int, depth: int, heads: int, groups: int, inner: int) -> Olmo2Config:
    return Olmo2Config(
        vocab_size=100352,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters=RopeParameters(rope_theta=500000.0),
        eos_token_id=100257,
        pad_token_id=100277,
    )


def _smollm2(
    width: int, depth: int, heads: int, groups: int, inner: int, theta: float
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=RopeParameters(rope_theta=theta),
        bos_token_id=0,
        eos_token_id=0,
    )


def _llama(
    width: int, depth: int, heads: int, groups: int, inner: int, *, max_positions: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )


def _llama3(
    width: int, depth: int, heads: int, inner: int, *, factor: float, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=RopeParameters(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        bos_token_id=128000,
        eos_token_id=128001,
    )


MODEL_PRESETS: dict[str, ModelConfig] = {
    "pythia-14m": _pythia(128, 6, 4),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, 50432),
    "pythia-12b": _pythia(5120, 36, 40, 50688),
    "olmo2-1b": _olmo2(2048, 16, 16, 16, 8192),
    "olmo2-7b": _olmo2(4096, 32, 32, 32, 11008),
    "olmo2-13b": _olmo2(5120, 40, 40, 40, 13824),
    "olmo2-32b": _olmo2(5120, 64, 40, 8, 27648),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, 100000.0),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, 100000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130000.0),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, max_positions=2048),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, max_positions=4096),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, max_positions=4096),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14336, factor=8.0, tied=False),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True),
}

# Hub names, without their owner, of the checkpoints that share a preset's shapes.
_HUB_NAMES = (
    (r"pythia-(\d[\d.]*[mb])(-deduped)?", "pythia-{}"),
    (r"OLMo-2-\d{4}-(\d+B)(-\w+)?", "olmo2-{}"),
    (r"SmolLM2-(\d[\d.]*[MB])(-Instruct)?", "smollm2-{}"),
    (r"TinyLlama-(1\.1B)(-.*|_v1\.1)?", "tinyllama-{}"),
    (r"Llama-2-(\d+b)(-chat)?-hf", "llama-2-{}"),
    (r"Llama-(3\.1-8B|3\.2-1B)(-Instruct)?", "llama-{}"),
)


def preset_of(checkpoint: str) -> str | None:
    """Returns the preset of a hub checkpoint: olmo2-7b for allenai/OLMo-2-1124-7B-SFT.

    Args:
      checkpoint: "owner/model".

    Returns:
      A key of MODEL_PRESETS; None for a model without a preset.
    """
    name = checkpoint.rpartition("/")[2]
    for pattern, preset in _HUB_NAMES:
        found = re.fullmatch(pattern, name)
        if found:
            key = preset.format(found[1].lower())
            return key if key in MODEL_PRESETS else None
    return None
