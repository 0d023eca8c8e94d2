"""The 52,002 rows of Alpaca, from a file or from the hub."""

import pathlib

from raslik_jax.data.examples import Example
from raslik_jax.data.hub import read_rows

HUB_SOURCE = "hub:tatsu-lab/alpaca"
_FILES = ("alpaca/alpaca_data.json.xz", "alpaca_data.json.xz", "alpaca_data.json")


def load_alpaca(source: str = "", *, data_dir: str = "") -> tuple[Example, ...]:
    """Returns Alpaca's rows that have an answer, labeled as no targets.

    28 of the 52,002 rows have an empty answer: nothing can be learned from them, and they are left
    out.

    Args:
      source: a file, or "hub:OWNER/NAME". Empty: the file of data_dir if there is one, otherwise
        the hub.
      data_dir: folder that may hold alpaca/alpaca_data.json.xz or alpaca_data.json.

    Raises:
      ValueError: as `hub.read_rows`.
    """
    rows = read_rows(find_alpaca(source, data_dir=data_dir), name="alpaca")
    return tuple(row._replace(is_target=False) for row in rows if row.output.strip())


def find_alpaca(source: str = "", *, data_dir: str = "") -> str:
    """Returns what `load_alpaca` reads: a file, or "hub:OWNER/NAME"."""
    files = [pathlib.Path(data_dir) / name for name in _FILES] if data_dir else []
    found = (str(file) for file in files if file.is_file())
    return source or next(found, HUB_SOURCE)
