"""Columns of a row that change what it taught and that no reader here can follow."""

import re
from collections.abc import Iterator

from raslik_jax.data.read.fields import Row, parsed

# Columns of preference sets, as TRL, axolotl, LLaMA-Factory and ms-swift name them.
_CHOSEN = re.compile(r"chosen(_\w+)?")
_REJECTED = re.compile(r"rejected(_\w+)?")
# KTO's label: LLaMA-Factory's, and TRL's next to a prompt or messages.
_KTO, _LABEL = "kto_tag", "label"
_IDS = "input_ids"
_MEDIA = re.compile(r"(image|audio|video)s?")


def check_columns(row: Row) -> None:
    """Refuses rows of preferences or ids, and rows with images, audio or videos.

    A column in the field map is read for another purpose and is not refused.
    """
    mapped = {key for name, key in row.keys.items() if name != key}
    filled = [key for key, value in row.record.items() if value not in (None, "", [], {})]
    for problem in (*_preferences(row, filled, mapped), *_media(row, filled, mapped)):
        raise ValueError(problem)
    if _IDS in filled and _IDS not in mapped:
        raise ValueError(f"rows of token ids ({_IDS}) cannot be read: give the file of their texts")


def _preferences(row: Row, filled: list[str], mapped: set[str]) -> Iterator[str]:
    chosen = [key for key in filled if _CHOSEN.fullmatch(key)]
    rejected = [key for key in filled if _REJECTED.fullmatch(key)]
    must = "must not count as learned answers"
    if {*chosen} & mapped:
        return
    if chosen and rejected:
        yield (
            f"preferences ({chosen[0]}, {rejected[0]}) {must}: to trace the chosen ones give "
            f"--corpus.records.fields={_map_for(row, chosen[0])}"
        )
    elif {"rejected", "rejected_response", "rejected_messages"} & {*rejected}:
        yield (f"preferences ({rejected[0]}) {must}: to trace the preferred ones remove the column")
    talks = {"prompt", "messages", "conversations"} & {*filled}
    for name in (_KTO, *([_LABEL] if talks else [])):
        value = row.record.get(name)
        if name not in mapped and (value is False or value in ("false", "False")):
            yield (
                f"a row of KTO with {name}=false {must}: keep the rows with true, or give "
                f"--corpus.records.fields=is_target={name} where {name} has another meaning"
            )


def _map_for(row: Row, chosen: str) -> str:
    """Returns the field map that reads the chosen answers of a row."""
    value = parsed(row.record[chosen])
    is_whole = isinstance(value, list) and len(value) > 1
    if is_whole:
        return f"messages={chosen}"
    for name in ("conversations", "messages", "question"):
        if row.record.get(name):
            return f"prompt={name},completion={chosen}"
    if row.record.get("prompt"):
        return f"completion={chosen}"
    return f"output={chosen}" if row.record.get("instruction") else f"text={chosen}"


def _media(row: Row, filled: list[str], mapped: set[str]) -> Iterator[str]:
    for key in filled:
        kind = _MEDIA.fullmatch(key)
        if kind is None or key in mapped:
            continue
        value = parsed(row.record[key])
        # A text may be a column of the user's own, unless a text of the row has its place.
        if isinstance(value, list | dict) or f"<{kind[1]}>" in str(row.record):
            yield (
                f"rows with {kind[1]}s ({key}) must be left out: the model read them in training, "
                "and the models here read text alone"
            )
            return
