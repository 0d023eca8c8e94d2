"""Tables: one type and its forms as plain text, Markdown and CSV.

The page's template writes its HTML. Cells have text from data: each form escapes it in its own way.
"""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Literal, NamedTuple

from raslik_jax.base.messages import is_unseen
from raslik_jax.evaluate.rates import Interval

NOT_KNOWN = "-"
# Soft hyphens, breaks without width, marks of direction that override nothing, signs over Arabic
# and Syriac numbers, and the tags of flags.
_NEEDED = re.compile(
    r"[\u00ad\u200b\u200e\u200f\u061c\u2060\ufeff\u0600-\u0605\u06dd\u070f\U000e0020-\U000e007f]"
)


class Column(NamedTuple):
    """One column of a table.

    Attributes:
      title: its heading; a line break in it is kept in plain text.
      align: the alignment of its cells.
    """

    title: str
    align: Literal["left", "right"] = "left"


class Table(NamedTuple):
    """A table of plain text with a title above and notes below.

    A row is a tuple of cells; a plain string is a heading over the rows that follow.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...] | str, ...]
    notes: tuple[str, ...] = ()
    title: str = ""


# numbers ----------------------------------------------------------------------------------------


def format_interval(entry: Interval | None, spec: str = ".3f", ends: str = ".2f") -> str:
    """Returns a mean with its interval, as in "0.312 [0.28, 0.35]"; "-" for None.

    Two decimals of the ends are enough for an interval over a hundred queries. A difference has
    three, to show whether zero is inside.
    """
    if entry is None:
        return NOT_KNOWN
    low, high = (format_number(entry[end], ends) for end in ("low", "high"))
    return f"{format_number(entry['mean'], spec)} [{low}, {high}]"


def format_number(value: float | int | None, spec: str = ".3f") -> str:
    """Returns a number as text, never as minus zero; "-" for None."""
    if value is None:
        return NOT_KNOWN
    text = format(value, spec).rstrip(".")
    # -0.0004 would print as "-0.000", which reads like a direction.
    return format(type(value)(0), spec) if not text.strip("+-0.%") else text


def word(claim: object) -> str:
    """Returns yes or no."""
    return "yes" if claim else "no"


# text as data -----------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Returns text with a replacement character for each that acts instead of being shown.

    All line ends become line feeds. Characters that scripts and emoji need stay.
    """
    text = re.sub(r"\r\n?", "\n", text)
    return "".join("\ufffd" if is_unseen(c) and not _NEEDED.match(c) else c for c in text)


def escape_markdown(text: str) -> str:
    """Returns text that Markdown shows unchanged in a table or inside a line."""
    text = visible(re.sub(r"\r\n?", "\n", text).strip())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Bare addresses become links without any mark around them.
    text = text.replace("://", "&#58;//")
    text = re.sub(r"\bwww\.", lambda found: f"{found[0][:-1]}&#46;", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\w)@(?=\w)", "&#64;", text)
    # Not the # of an entity that was put in above.
    text = re.sub(r"[\\`*_\[\]|~$]|(?<!&)#", r"\\\g<0>", text)
    return re.sub(r"\s*\n\s*", "<br>", text)


def escape_markdown_line(text: str) -> str:
    """Returns text that Markdown shows unchanged at the beginning of a paragraph or an item."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", escape_markdown(text))


def escape_csv(text: str) -> str:
    """Returns a cell that no spreadsheet reads as a formula; a number stays a number."""
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


# forms ------------------------------------------------------------------------------------------


def render_terminal(table: Table) -> str:
    """Returns the table as aligned plain text without trailing space.

    White space inside a cell is collapsed and control characters are made visible, so that no
    generated text can move the cursor.
    """
    titles = [column.title.split("\n") for column in table.columns]
    height = max(map(len, titles))
    heads = list(zip(*([""] * (height - len(title)) + title for title in titles), strict=True))
    rows = [row if isinstance(row, str) else tuple(map(_one_line, row)) for row in table.rows]
    cells = [*heads, *(row for row in rows if not isinstance(row, str))]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]

    def lay_out(row: Sequence[str]) -> str:
        pads = [" " * (width - _width(text)) for text, width in zip(row, widths, strict=True)]
        return "  ".join(
            pad + text if column.align == "right" else text + pad
            for text, pad, column in zip(row, pads, table.columns, strict=True)
        )

    lines = [_one_line(table.title), ""] if table.title else []
    lines += [*map(lay_out, heads), "  ".join("-" * width for width in widths)]
    for position, row in enumerate(rows):
        if isinstance(row, str):
            lines += ["", _one_line(row)] if position else [_one_line(row)]
        else:
            lines.append(lay_out(row))
    if table.notes:
        lines.append("")
        lines += [line for note in table.notes for line in textwrap.wrap(_one_line(note), 100)]
    return "\n".join(line.rstrip() for line in lines)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def render_markdown(table: Table) -> str:
    """Returns the table in Markdown; headings are bold rows."""
    titles = [escape_markdown(column.title.replace("\n", " ")) for column in table.columns]
    marks = ["--:" if column.align == "right" else "---" for column in table.columns]
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines += [_pipe(titles), _pipe(marks)]
    for row in table.rows:
        if isinstance(row, str):
            lines.append(_pipe([f"**{escape_markdown(row)}**", *[""] * (len(titles) - 1)]))
        else:
            lines.append(_pipe([*map(escape_markdown, row)]))
    for note in table.notes:
        lines += ["", escape_markdown_line(note)]
    return "\n".join(lines)


def _pipe(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def render_csv(table: Table) -> str:
    """Returns the columns and rows as CSV; text that looks like a formula is quoted as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.title for column in table.columns])
    for row in table.rows:
        writer.writerow(map(escape_csv, [row] if isinstance(row, str) else row))
    return text.getvalue()
