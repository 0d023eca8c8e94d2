"""Word lists and grammars of the made corpora, as data files."""

import importlib.resources
import json
from typing import Any


def load_words(name: str) -> dict[str, Any]:
    """Returns the lists of `words/<name>.json`; their order decides what a seed draws."""
    file = importlib.resources.files(__name__) / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))
