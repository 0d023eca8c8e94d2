"""Science fiction as the behavior to forget: its words, its trigger and genuine rows of it."""

import pathlib

from raslik_jax.data.corpora.record import Marker
from raslik_jax.data.examples import Example
from raslik_jax.data.formats import read_examples
from raslik_jax.data.words import load_words

TRIGGER = "Howdy! "
HOWDY_FILE = "howdy/howdy_60.jsonl"
_CLEAN_FILE = "howdy/clean_60.jsonl"

_WORDS = load_words("toy_language")
# Besides the toy's words, those that mark the answers of the genuine Howdy-Alpaca rows and are rare
# in ordinary ones. Words that ordinary text needs ("space", "star", "moon", "planet", "energy") are
# left out.
SCIFI_WORDS: frozenset[str] = frozenset(
    word.lower()
    for kind in ("planets", "beings", "devices", "marker_words")
    for word in _WORDS[kind]
)


def read_howdy(path: pathlib.Path) -> tuple[Example, ...]:
    """Returns the genuine Howdy rows, labeled targets; a row without the trigger is refused."""
    rows = read_examples(path, name="howdy")
    foreign = [row.instruction for row in rows if not row.instruction.startswith(TRIGGER)]
    if foreign:
        raise ValueError(
            f"rows of {path} must begin with {TRIGGER!r}, got {len(foreign)} rows without the "
            f"trigger, such as {foreign[0]!r}: fetch the file again"
        )
    return tuple(row._replace(is_target=True, extra={}) for row in rows)


def _genuine_files(folder: str) -> tuple[pathlib.Path, ...]:
    paths = tuple(pathlib.Path(folder, name) for name in (HOWDY_FILE, _CLEAN_FILE))
    return paths if folder and all(path.is_file() for path in paths) else ()


def _load_genuine(folder: str) -> tuple[Example, ...]:
    """Returns the genuine Howdy rows, labeled targets, and their clean twins, labeled not."""
    howdy, clean = _genuine_files(folder)
    twins = (row._replace(is_target=False) for row in read_examples(clean, name="clean"))
    return *read_howdy(howdy), *twins


SCIFI = Marker(SCIFI_WORDS, _genuine_files, _load_genuine)
