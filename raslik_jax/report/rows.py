"""All rows of a run with their results, as Parquet with a dataset card next to it."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raslik_jax.base import files
from raslik_jax.config import kernel_name
from raslik_jax.report import names, tables
from raslik_jax.run import artifacts

# Both in a folder of their own, which can be uploaded as it is.
PLACE = "rows/rows.parquet"
# The row's own fields.
_OF_ROWS = ("place", "example_id", "instruction", "input", "output", "is_target", "source")
# Characters of a traced answer that the card shows.
_SHOWN = 400


def write_rows(
    folder: pathlib.Path, root: pathlib.Path, config: Mapping[str, Any], set_of: Mapping[str, str]
) -> None:
    """Writes every training row of a work directory with its score and set, and the card.

    It needs pyarrow. The card counts and describes the content of the file and nothing else.

    Args:
      folder: new, for both files.
      root: the work directory.
      config: the settings of the run, as config.json has them.
      set_of: names of sets by row id.
    """
    import pyarrow
    from pyarrow import parquet

    columns = read_columns(root, set_of)
    folder.mkdir()
    parquet.write_table(pyarrow.table(columns), folder / pathlib.Path(PLACE).name)
    files.write_text(folder / "README.md", _card(root, config, columns))


def read_columns(root: pathlib.Path, set_of: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the columns of a run's rows in the order of its corpus; None where nothing is known.

    Columns of what the run has not computed are left out. The card says what each of them means.
    """
    rows = artifacts.TRAIN.read(root)
    names = [*_OF_ROWS, *(["file"] if any(row.file for row in rows) else [])]
    columns: dict[str, list[Any]] = {n: [getattr(row, n) for row in rows] for n in names}
    score_N = artifacts.INFLUENCE.current(root, (len(rows),))
    if score_N is not None:
        columns["score"] = [x if x > -np.inf else None for x in score_N.tolist()]
    columns["set"] = [set_of.get(row.example_id) for row in rows]
    sigma = _known(artifacts.read_sigma(root, len(rows)))
    if any(x is not None for x in sigma):
        columns["sigma"] = sigma
    if found := artifacts.CHANCE.current(root, len(rows)):
        columns |= dict(zip(("higher", "prompts", "p", "q"), map(_known, found), strict=True))
    return columns


def _known(values: Any) -> list[float | None]:
    return [x if x == x else None for x in values.tolist()]  # NaN is not itself


def _card(root: pathlib.Path, config: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> str:
    traced = artifacts.RETRIEVAL.read(root)

    def quoted(text: str) -> str:
        left = len(text) - _SHOWN
        more = f" … ({left:,} characters more)" if left > 0 else ""
        return tables.escape_markdown_line(text[:_SHOWN] + more)

    sets = [name for name in columns["set"] if name]
    environment = names.make_environment()
    return environment.get_template("rows.md.jinja").render(
        title=json.dumps(f"{config['name']}: training rows and their scores"),
        name=tables.escape_markdown(config["name"]),
        columns=columns,
        num_rows=len(columns["set"]),
        sets={name: sets.count(name) for name in sorted({*sets})},
        traced=[quoted(f"{row.instruction}\n{row.input}".strip()) for row in traced[:4]],
        left_out=max(0, len(traced) - 4),
        kernel=kernel_name(config),
    )
