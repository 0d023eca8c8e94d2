"""The published models of the architectures here, as configs without a download.

They give counts, shapes and memory. presets.json has the fields of their config.json files that
differ from the architecture's defaults, as published on the hub. It also has patterns of their
names there without the owner. Tests compare their totals of parameters with those of model pages
and papers.
"""

import json
import pathlib
import re

from raslik_jax.models.decoder import ARCHITECTURES, ModelConfig

_PUBLISHED = json.loads(pathlib.Path(__file__).with_name("presets.json").read_text("utf-8"))
MODEL_PRESETS: dict[str, ModelConfig] = {
    name: ARCHITECTURES[fields["model_type"]].config.from_hf(fields)
    for name, fields in _PUBLISHED["configs"].items()
}


def preset_of(checkpoint: str) -> str | None:
    """Returns the preset of a hub checkpoint: olmo2-7b for allenai/OLMo-2-1124-7B-SFT, or None."""
    name = checkpoint.rpartition("/")[2]
    for pattern, preset in _PUBLISHED["hub_names"].items():
        if found := re.fullmatch(pattern, name):
            key: str = preset.format(found[1].lower())
            return key if key in MODEL_PRESETS else None
    return None
