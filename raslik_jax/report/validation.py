"""The table of a validation: how well the scores of rows predict retraining without the rows."""

from collections.abc import Mapping
from typing import Any

from raslik_jax.report.notes import write_notes
from raslik_jax.report.tables import NOT_KNOWN, Column, Table, format_interval


def table_of(found: Mapping[str, Any]) -> Table:
    """Returns QLD and LDS of every ranking."""
    qld, lds, rows = found.get("qld", {}), found.get("lds", {}), []
    for name, title in found["titles"].items():
        cells = [
            format_interval(part.get(name), spec, ends)
            for part, spec, ends in (
                (qld.get("rise", {}), "+.3f", "+.3f"),
                (qld.get("over_nothing", {}), "+.3f", "+.3f"),
                (lds.get("score", {}), ".3f", ".2f"),
            )
        ]
        rows.append((title, *cells))
    heads = ("Ranking", "QLD", "Rise over\nnothing removed", "LDS")
    notes = write_notes("validation", found=found, qld=qld, lds=lds)
    kept = [0, *(n for n in (1, 2, 3) if any(row[n] != NOT_KNOWN for row in rows))]
    columns = tuple(Column(heads[n]) for n in kept)
    return Table(columns, tuple(tuple(row[n] for n in kept) for row in rows), notes)
