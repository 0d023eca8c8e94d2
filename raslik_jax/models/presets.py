"""The published models that the architectures here cover, as configs without a download.

Their totals of parameters are tested against those that model pages and papers state.
"""

import re

from raslik_jax.models.decoder import ARCHITECTURES, ModelConfig

MODEL_PRESETS: dict[str, ModelConfig] = {
    name: config for found in ARCHITECTURES.values() for name, config in found.presets.items()
}


def preset_of(checkpoint: str) -> str | None:
    """Returns the preset of a hub checkpoint: olmo2-7b for allenai/OLMo-2-1124-7B-SFT, or None."""
    name = checkpoint.rpartition("/")[2]
    for architecture in ARCHITECTURES.values():
        for pattern, preset in architecture.hub_names.items():
            found = re.fullmatch(pattern, name)
            if found:
                key = preset.format(found[1].lower())
                return key if key in MODEL_PRESETS else None
    return None
