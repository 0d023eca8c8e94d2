"""Gemma 3 (270M and 1B, and the text part of 4B, 12B, 27B).

It differs from Gemma 2. It has no caps. Queries and keys are normalized by head. Five of six layers
have the sliding window. These have a rotation of their own, which is not stretched.

The larger models read images too. The text part of their checkpoints ("model_type": "gemma3") is
read, and written as a text model ("gemma3_text").

Source: Gemma Team 2025 (arXiv:2503.19786); layout as in transformers
`models/gemma3/modeling_gemma3.py`, release 5.23.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from raslik_jax.base.messages import shown
from raslik_jax.models import architecture, gemma2, hf_config, layers, llama
from raslik_jax.models.hf_config import RopeParameters

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Of the text part in a model that reads images too.
_STEM = "model.language_model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(gemma2.GemmaConfig):
    """The settings of a Gemma 3 text model under Hugging Face's names.

    `local_rope_parameters` is the rotation of layers with the window. config.json has it in
    `rope_parameters` by kind of layer or as `rope_local_base_freq`.
    """

    # The files of the larger models leave these out.
    vocab_size: int = 262208
    num_attention_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    rope_parameters: RopeParameters = RopeParameters(rope_theta=1e6)
    local_rope_parameters: RopeParameters = RopeParameters()

    model_type = "gemma3_text"
    hf_name = "Gemma3"
    spellings = {
        **gemma2.GemmaConfig.spellings,
        "_sliding_window_pattern": "sliding_window_pattern",
    }

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window where `layer_types` is not given."""
        return (layer + 1) % self.sliding_window_pattern != 0

    @property
    def layer_ropes(self) -> tuple[RopeParameters, ...]:
        """How positions rotate queries and keys in each layer."""
        ropes = self.rope_parameters, self.local_rope_parameters
        return tuple(ropes[self.is_sliding(layer)] for layer in range(self.num_hidden_layers))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Any:
        """Returns the config of a parsed config.json; refuses as `hf_config.read_fields` does."""
        values = dict(values)
        local = {"rope_theta": values.pop("rope_local_base_freq", None)}
        nested = values.get("rope_parameters")
        if nested is not None:
            if not isinstance(nested, Mapping) or not set(nested) <= {_FULL, _SLIDING}:
                must = f"must have an object for {_FULL} and one for {_SLIDING}"
                raise ValueError(f"rope_parameters {must}, got {shown(nested, 99)}: correct it")
            values["rope_parameters"], local["rope_parameters"] = map(nested.get, (_FULL, _SLIDING))
        source = f"the config.json of this {cls.model_type} model, for its layers with a window"
        rope = hf_config.read_rope(local, RopeParameters(), source)
        if rope.partial_rotary_factor != 1:  # transformers turns the whole head
            raise hf_config.refused("partial_rope", source=source, got=rope.partial_rotary_factor)
        return dataclasses.replace(super().from_hf(values), local_rope_parameters=rope)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        values = super().to_hf()
        local = values.pop("local_rope_parameters")
        values["rope_local_base_freq"] = local.rope_theta
        return values | {
            "rope_parameters": {_FULL: values["rope_parameters"], _SLIDING: local.to_hf()}
        }

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the key of a text model for one of a model that reads images too."""
        for prefix in ("language_model.model.", "model.language_model."):
            if key.startswith(prefix):
                return "model." + key.removeprefix(prefix)
        return key.removeprefix("language_model.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3TextConfig):
    """The settings of a Gemma 3 model that reads images too: those of its text part."""

    model_type = "gemma3"

    @property
    def text_part(self) -> Gemma3TextConfig:
        """The settings of the text part alone."""
        return Gemma3TextConfig(**vars(self))

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the newest of the keys that such a model's text part has had."""
        return re.sub(r"^model\.(?=layers\.|embed_tokens|norm)", _STEM, super().full_key(key))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Any:
        """Returns the text part's settings of a parsed config.json."""
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config must be an object, got {shown(text)}: correct it")
        outer = {"eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings"}
        around = {name: values[name] for name in outer if values.get(name) is not None}
        return cls(**vars(Gemma3TextConfig.from_hf({**text, **around})))


class Gemma3Block(gemma2.GemmaBlock):
    """One Gemma 3 layer; parameter names are the last parts of Hugging Face's."""

    head_norm = "each"


ARCHITECTURE = architecture.Architecture(
    Gemma3TextConfig,
    key_map={**gemma2.KEY_MAP, **llama.HEAD_NORMS},
    # The part that reads images.
    buffers=llama.BUFFERS + r"|(model\.)?(vision_tower|multi_modal_projector)\..*",
    modules=(Gemma3Block, layers.OffsetRMSNorm),
)
WITH_IMAGES = ARCHITECTURE._replace(
    config=Gemma3Config,
    key_map={name: Gemma3Config.full_key(key) for name, key in ARCHITECTURE.key_map.items()},
)
