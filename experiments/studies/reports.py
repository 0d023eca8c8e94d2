"""Runs of studies, the records joined over them, and their tables in Markdown."""

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from experiments.studies.gradients import Options
from raslik_jax.base.files import read_json, write_json
from raslik_jax.cli import command
from raslik_jax.report import tables


def measure_runs(
    options: Options, file: str, measure: Callable[[str], Any], names: Iterable[str]
) -> list[Any]:
    """Returns what `measure` gives for each run by name, kept in a file of the run's folder.

    --report_only reads these alone.
    """
    out = pathlib.Path(options.out)
    command.require("matplotlib")
    logging.set_verbosity(logging.WARNING)
    # Programs are the same for all seeds, and for a job that goes on after a kill.
    jax.config.update("jax_compilation_cache_dir", str((out / "compiled").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    for name in names:
        if not options.report_only:
            print(f"{name}:", flush=True)
            (out / name).mkdir(parents=True, exist_ok=True)
            write_json(out / name / file, measure(name))
    return [read_json(out / name / file) for name in names]


def join_records(
    records: Sequence[Mapping[str, Any]], *, by: Sequence[str], values: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns an entry for each group of records that agree in the fields `by`, in their order.

    An entry has these fields and `count`. For each of `values` it has the mean, low and high over
    the group. It has None if no record has the value. None and NaN do not count.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in by), []).append(record)
    joined = []
    for key, members in groups.items():
        entry: dict[str, Any] = dict(zip(by, key, strict=True)) | {"count": len(members)}
        for name in values:
            found = [member.get(name) for member in members]
            known = [value for value in found if value is not None and not math.isnan(value)]
            entry[name] = None
            if known:
                mean = sum(known) / len(known)
                entry[name] = {"mean": mean, "low": min(known), "high": max(known)}
        joined.append(entry)
    return joined


def section(
    title: str,
    entries: Sequence[Mapping[str, Any]],
    by: Mapping[str, str],
    values: Mapping[str, str],
    *,
    digits: str = ".3f",
    text: str = "",
) -> str:
    """Returns entries of `join_records` as a section of Markdown: a title, a text and a table.

    `by` and `values` have the titles of the fields that name a row and of those that were joined.
    """

    def cell(joined: Mapping[str, float] | None) -> str:
        if joined is None:
            return tables.NOT_KNOWN
        mean, low, high = (
            tables.format_number(joined[end], digits) for end in ("mean", "low", "high")
        )
        return mean if joined["low"] == joined["high"] else f"{mean} [{low}, {high}]"

    columns = [tables.Column(name) for name in (*by.values(), "seeds", *values.values())]
    columns[len(by)] = columns[len(by)]._replace(align="right")
    rows = tuple(
        (
            *(str(entry[name]) for name in by),
            str(entry["count"]),
            *(cell(entry[name]) for name in values),
        )
        for entry in entries
    )
    table = tables.render_markdown(tables.Table(tuple(columns), rows))
    return "\n\n".join(part for part in (f"## {title}", text, table) if part)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of finished cells in Markdown, all columns but the first to the right."""
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join([first, "|---|" + "--:|" * (len(head) - 1), *others])


def read_reported(folder: pathlib.Path) -> dict[str, Callable[[], str]]:
    """Returns makers of the tables in reported.json of a folder, by name.

    These cells were printed by a command whose results are not stored.
    """
    stored = read_json(folder / "reported.json")["tables"]
    return {
        name: lambda table=table: markdown_table(table["head"], table["rows"])
        for name, table in stored.items()
    }
