"""Writes the unlearned model of a stored run as files that other programs read.

  raslik export --run=runs/demo --strategy=raslik --algorithm=ga_gdr --out=exported

The command writes a PEFT adapter, or with --merged a whole Hugging Face checkpoint. It adds the
tokenizer and a model card with the removed behavior, the settings and the measurements. If it
fails, it leaves no folder. A folder with files is refused.
"""

from raslik_jax.incident.export import ExportOptions as Options
from raslik_jax.incident.export import export


def run(options: Options) -> None:
    """Exports and prints the place."""
    print(export(options))
