"""Training examples that a user's file names."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.base.files import read_json_lines
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.examples import Example, content_id, learned_part
from raslik_jax.data.read.formats import FORMATS, says, what_it_says
from raslik_jax.data.words import refused


def find_rows(
    examples: Sequence[Example], path: str, *, flag: str, fields: Mapping[str, str]
) -> list[int]:
    """Returns the positions of the examples that a file names: by id, place or text, in this order.

    A line with an id names the row with this id, and a line without one the row at its place. Both
    must have the prompt and the answer that the line has. If this finds no row, the text of the
    line names all rows with this text. It raises a ValueError if a line names no example or if the
    file is empty.

    Args:
      path: a file of JSONL.
      flag: the flag that a message names.
      fields: the field map of the user's rows.
    """
    ids, places, texts = (collections.defaultdict[Any, list[int]](list) for _ in range(3))
    for position, row in enumerate(examples):
        at = (row.file, row.place)
        for known, key in ((ids, row.example_id), (places, at), (texts, _bare(says(row)))):
            known[key].append(position)
    found: list[int] = []
    unknown: list[str] = []
    mend = f"correct {flag} or its file"
    for number, line in enumerate(read_json_lines(path, dict, mend=mend), start=1):
        # A file of ours has the key "id", whatever the user's own is called.
        named = line.get(fields.get("id", "id"), line.get("id"))
        place = line.get("place")
        kinds = [{"row_format": name} | line for name in (None, *FORMATS)]  # it may be forced
        # A line may be a training row, or name one by its prompt alone.
        ways = itertools.product((fields, {}), kinds, (True, False))
        read = (what_it_says(kind, keys, needs_output) for keys, kind, needs_output in ways)
        said = [_bare(text) for text in read if text]
        if named is not None:
            positions = ids.get(str(named), [])
        else:
            at = (str(line.get("place_file", "")), place)
            positions = places.get(at, []) if type(place) is int and place > 0 else []
        # Ids and places may be those of an earlier file.
        positions = [p for p in positions if not said or _texts(examples[p]).intersection(said)]
        positions = positions or next((texts[text] for text in said if text in texts), [])
        found += positions
        unknown += [] if positions else [str(number)]
    if unknown:
        lines = some_of(unknown, quoted=False)
        raise refused("named_rows", flag=flag, lines=lines, path=shown(path, 80))
    if not found:
        raise ValueError(f"{flag} must name a row, {shown(path, 160)} is empty: add one")
    return [*dict.fromkeys(found)]


def _texts(row: Example) -> set[tuple[str, ...]]:
    """Returns the text of a row with its answer and without."""
    *asked, answer = _bare(says(row))
    return {(*asked, answer), (*asked, "")}


def _bare(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns texts without the white space at their ends."""
    return tuple(text.strip() for text in texts)


def with_copies(examples: Sequence[Example], positions: Sequence[int]) -> list[int]:
    """Returns positions, followed by those of other rows that are trained on in the same way."""
    names = [content_id(*learned_part(row)) for row in examples]
    asked = {names[position] for position in positions}
    more = (position for position, name in enumerate(names) if name in asked)
    return [*dict.fromkeys((*positions, *more))]
