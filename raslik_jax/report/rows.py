"""All rows of a run with what was found of them, as Parquet with a dataset card beside it."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.base import files
from raslik_jax.config import kernel_name
from raslik_jax.report import names, tables
from raslik_jax.run import artifacts

# Both in a folder of their own, which can be uploaded as it is.
PLACE = "rows/rows.parquet"
# Characters of a traced answer that the card shows.
_SHOWN = 400


class Column(NamedTuple):
    """A column: its values, and what a cell means."""

    values: Sequence[Any]
    meaning: str


def write_rows(
    folder: pathlib.Path, root: pathlib.Path, config: Mapping[str, Any], set_of: Mapping[str, str]
) -> None:
    """Writes every training row of a work directory with its score and set, and the card.

    Needs pyarrow. The card counts and describes what is in the file, and nothing else.

    Args:
      folder: new, for both files.
      root: the work directory.
      config: the settings of the run, as config.json has them.
      set_of: names of sets by row id.
    """
    import pyarrow
    from pyarrow import parquet

    columns = read_columns(root, set_of)
    values = {name: column.values for name, column in columns.items()}
    folder.mkdir()
    parquet.write_table(pyarrow.table(values), folder / pathlib.Path(PLACE).name)
    files.write_text(folder / "README.md", _card(root, config, columns))


def read_columns(root: pathlib.Path, set_of: Mapping[str, str]) -> dict[str, Column]:
    """Returns the columns of a run's rows in the order of its corpus; None where nothing is known.

    Columns of what the run has not computed are left out.
    """
    rows = artifacts.TRAIN.read(root)
    meanings = {
        "place": "line of the training file, or number of the row in it, from 1",
        "example_id": "id of the row in the run",
        "instruction": "what is asked; of other formats than Alpaca's, the text that stands for it",
        "input": "what the instruction is about",
        "output": "the answer that is learned",
        "is_target": "whether the row is labeled as showing the behavior; no label where empty",
        "source": "where the row comes from",
    }
    if any(row.file for row in rows):
        meanings["file"] = "training file that the row is in"
    columns = {
        name: Column([getattr(row, name) for row in rows], meaning)
        for name, meaning in meanings.items()
    }
    score_N = artifacts.INFLUENCE.current(root, (len(rows),))
    if score_N is not None:
        scores = [x if x > -np.inf else None for x in score_N.tolist()]
        meaning = "cosine with the traced answers' gradients, from -1 to 1: above 0 the row pulls "
        columns["score"] = Column(scores, meaning + "toward them; empty: it has no gradient")
    sets = [set_of.get(row.example_id) for row in rows]
    columns["set"] = Column(sets, "set that the row is in; empty: in none")
    sigma = _known(artifacts.read_sigma(root, len(rows)))
    if any(x is not None for x in sigma):
        meaning = "noise of the sketch: standard deviation of the score about the exact cosine"
        columns["sigma"] = Column(sigma, meaning)
    if found := artifacts.CHANCE.current(root, len(rows)):
        told = (
            "unrelated prompts that score the row at least as high",
            "unrelated prompts that it was compared with",
            "(1 + higher) / (1 + prompts)",
            "share of false finds to be expected among this row and all that stand out further",
        )
        parts = zip(("higher", "prompts", "p", "q"), found, told, strict=True)
        columns |= {name: Column(_known(values), meaning) for name, values, meaning in parts}
    return columns


def _known(values: Any) -> list[float | None]:
    return [x if x == x else None for x in values.tolist()]  # NaN is not itself


def _card(root: pathlib.Path, config: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    traced = artifacts.RETRIEVAL.read(root)

    def quoted(text: str) -> str:
        left = len(text) - _SHOWN
        more = f" … ({left:,} characters more)" if left > 0 else ""
        return tables.escape_markdown_line(text[:_SHOWN] + more)

    sets = [name for name in columns["set"].values if name]
    environment = names.make_environment()
    return environment.get_template("rows.md.jinja").render(
        title=json.dumps(f"{config['name']}: training rows and their scores"),
        name=tables.escape_markdown(config["name"]),
        columns=columns,
        num_rows=len(columns["set"].values),
        sets={name: sets.count(name) for name in sorted({*sets})},
        traced=[quoted(f"{row.instruction}\n{row.input}".strip()) for row in traced[:4]],
        left_out=max(0, len(traced) - 4),
        kernel=kernel_name(config),
    )
