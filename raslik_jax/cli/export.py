"""Writes the unlearned model of a stored run as files that other programs read.

  raslik export --run=runs/demo --strategy=raslik --algorithm=ga_gdr --out=exported

writes a PEFT adapter; --merged a whole Hugging Face checkpoint. Either has the tokenizer and a
model card, which says what was removed, from what, by which settings, and what was measured. The
folder appears whole or not at all, and one that holds something is refused. --push_to_hub uploads
it as well, as a private model.
"""

from raslik_jax.incident.export import ExportOptions as Options
from raslik_jax.incident.export import export


def run(options: Options) -> None:
    """Exports, and prints where to."""
    print(export(options))
