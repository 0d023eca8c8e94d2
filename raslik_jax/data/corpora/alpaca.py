"""The 52,002 rows of Alpaca, from a file or from the hub."""

import pathlib

from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.examples import Example
from raslik_jax.data.formats import read_examples

HUB_SOURCE = "hub:tatsu-lab/alpaca"
# 28 of the 52,002 rows have an empty answer: nothing can be learned from them.
NUM_ANSWERED = 52_002 - 28
_FILES = ("alpaca/alpaca_data.json.xz", "alpaca_data.json.xz", "alpaca_data.json")


def load_alpaca(shared: SharedSettings) -> tuple[Example, ...]:
    """Returns Alpaca's rows that have an answer, labeled as no targets.

    Raises:
      ValueError: as `read_examples`.
    """
    rows = read_examples(find_alpaca(shared), name="alpaca")
    return tuple(row._replace(is_target=False) for row in rows if row.output.strip())


def find_alpaca(shared: SharedSettings) -> str:
    """Returns what `load_alpaca` reads: a file, or the dataset of the hub."""
    files = [pathlib.Path(shared.folder) / name for name in _FILES] if shared.folder else []
    found = (str(file) for file in files if file.is_file())
    return shared.alpaca_file or next(found, HUB_SOURCE)


def alpaca_source(shared: SharedSettings, own: object) -> dict[str, str]:
    """Returns the source of a dataset that is made of Alpaca's rows alone."""
    return {"alpaca_file": find_alpaca(shared)}
