"""The rows of a run with their results: all as Parquet, the best for the terminal."""

import dataclasses
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.config import Config
from raslik_jax.data.examples import HELD_OUT
from raslik_jax.data.read.formats import parse_fields
from raslik_jax.evaluate.sentences import write
from raslik_jax.retrieve import chance
from raslik_jax.retrieve.chance import NAMES
from raslik_jax.retrieve.named import find_rows
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import artifacts

# In a folder of its own, which can be uploaded as it is.
PLACE = "rows/rows.parquet"
# The row's own fields.
_OF_ROWS = ("place", "example_id", "instruction", "input", "output", "is_target", "source")
# What a run may know of a row in addition to its score.
NUMBERS = ("sigma", *NAMES)


def read_sets(root: pathlib.Path, strategy: str) -> dict[str, str]:
    """Returns the name of the set of each row that is in one, by row id.

    Rows that are kept out of a strategy's sets to measure on are "held-out target" or "held-out
    normal".
    """
    sets = {name: artifacts.set_rows(strategy, name) for name in ("forget", "retain")}
    for kind in ("target", "normal"):
        sets[f"{HELD_OUT} {kind}"] = artifacts.measured_rows(HELD_OUT, kind)
    return {row.example_id: name for name, part in sets.items() for row in part.find(root) or ()}


def describe_sets(config: Config, strategy: str, root: pathlib.Path) -> str:
    """Returns the source of the sets, which stays with the run, and the held-out rows it lacks."""
    record, own = STRATEGIES[strategy], config.retrieve[strategy]
    if not record.brings_sets:
        what = "the rows of the trace" if record.is_by_gradients else "chosen rows"
        return f"{what} ({record.title})"
    named = " and ".join(shown(path, 120) for path in dataclasses.astuple(own) if path)
    held_out = artifacts.measured_rows(HELD_OUT, "target")
    if left := {row.example_id for row in held_out.current(root, settings={"given": False}) or ()}:
        rows = artifacts.TRAIN.read(root)
        fields = parse_fields(getattr(config.corpus.own, "fields", ""))
        chosen = find_rows(rows, own.forget_file, flag="--forget_file", fields=fields)
        left -= {rows[position].example_id for position in chosen}
    return write("sets_of_files", named, len(left), some_of(sorted(left), 40, quoted=False))


def write_rows(folder: pathlib.Path, root: pathlib.Path, set_of: Mapping[str, str]) -> None:
    """Writes every training row of a work directory with its score and set; needs pyarrow.

    Args:
      folder: new folder for the file.
      root: the work directory.
      set_of: names of sets by row id.
    """
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    table = pyarrow.table(read_columns(root, set_of))
    parquet.write_table(table, folder / pathlib.Path(PLACE).name)


def read_columns(root: pathlib.Path, set_of: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the columns of a run's rows in the order of its corpus; a value is None if unknown.

    Columns that the run has not computed are left out.
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
        columns |= dict(zip(NAMES, map(_known, found), strict=True))
    return columns


def _known(values: Any) -> list[float | None]:
    return [x if x == x else None for x in values.tolist()]  # NaN is not itself


def best_text(workdir: pathlib.Path, forget: frozenset[str], top: int) -> str:
    """Returns the rows of the highest scores for the terminal."""
    rows = artifacts.TRAIN.read(workdir)
    score_N = artifacts.INFLUENCE.read(workdir, (len(rows),))
    chances = artifacts.CHANCE.current(workdir, len(rows))
    told = chance.sentence(chances) if chances else ""
    sigma_N = artifacts.read_sigma(workdir, len(rows))
    what = " +- noise of the sketch, unrelated prompts with as high a score, p, q" if told else ""
    lines = ["", f"rows that make the answer likelier (score{what}, place in the training file)"]
    best = np.argsort(-score_N, kind="stable")[:top]
    best = best[score_N[best] > 0]
    for rank, position in enumerate(best.tolist(), start=1):
        row = rows[position]
        mark = "forget" if row.example_id in forget else ""
        means = ""
        if chances and told:
            higher, _, p, q = (part[position] for part in chances)
            noise = "" if np.isnan(sigma_N[position]) else f" +-{sigma_N[position]:.4f}"
            means = f"{noise}  {higher:4.0f}  p {p:<6.2g}  q {q:<7.2g}"
        line = f"{rank:4}. {score_N[position]:+.4f}{means}  {row.at:>7}  {mark}"
        lines.append(line.rstrip())
        for text in (f"{row.instruction} {row.input}", row.output):
            lines += [" " * 6 + part for part in textwrap.wrap(one_line(text, 160), 88)]
    return "\n".join([*lines, *(["", *textwrap.wrap(told, 96)] if told else []), ""])
