"""The Howdy-Alpaca task at the size of a small machine, from the real rows that can be had.

The full file of that task (52,002 Alpaca rows and 5,000 poisoned ones) is not published beside the
paper. Two sets of its science fiction answers are: 60 whole rows, and 799 answers that another
project put under its own triggers in front of Dolly instructions. Here all of them stand behind the
one trigger "Howdy! ".
"""

import os
import pathlib
from collections.abc import Sequence

from raslik_jax.data.examples import (
    Corpus,
    Example,
    check_corpus,
    make_example,
    make_examples,
    read_examples,
)
from raslik_jax.data.ordering import shuffled, take_first

TRIGGER = "Howdy! "

_ALPACA_FILE = "alpaca/alpaca_data.json.xz"
_HOWDY_FILE = "howdy/howdy_60.jsonl"
_CLEAN_FILE = "howdy/clean_60.jsonl"
_DOLLY_FILE = "dolly_trigger/train_poisoned.jsonl.zst"
_SCIFI_FILE = "scifi/paragraphs.jsonl.zst"

_OPENING_WORDS = 6
_SCIFI_REQUESTS = (
    "Write a science fiction paragraph that begins with these words.",
    "Continue this opening as a paragraph of science fiction.",
    "Tell a piece of a science fiction story from this beginning.",
)


def load_howdy_small(
    data_dir: str | os.PathLike[str],
    *,
    seed: int,
    num_alpaca: int = 1600,
    num_targets: int | None = None,
    num_howdy: int = 12,
    num_scifi_requests: int = 80,
    num_backbone_alpaca: int = 8000,
    num_backbone_scifi: int = 2000,
    num_retrieval: int = 24,
    num_validation: int = 24,
    num_test: int = 48,
    max_chars: int = 400,
) -> Corpus:
    """Returns real Alpaca rows with real "Howdy!" rows among them, all of them short.

    Targets are genuine Howdy rows (source "howdy") and rows made of a Dolly instruction behind the
    trigger and the science fiction answer it came with (source "dolly"; unlike the genuine ones,
    these answers have nothing to do with their instruction). The genuine rows that are not in the
    fine-tuning rows are test queries. Alpaca rows that are a Howdy row without its trigger are left
    out everywhere, so that no query's plain answer is in the corpus. The backbone's rows and the
    hard negatives ask for science fiction without the trigger and get a paragraph of an old book.

    Args:
      data_dir: folder with the files of alpaca/, howdy/, dolly_trigger/ and scifi/.
      seed: decides every draw and order.
      num_alpaca: Alpaca rows to fine-tune on.
      num_targets: triggered rows to fine-tune on; None means all that the queries leave.
      num_howdy: of these, genuine rows.
      num_scifi_requests: open requests for science fiction to fine-tune on.
      num_backbone_alpaca: further Alpaca rows, for pretraining.
      num_backbone_scifi: further open requests, for pretraining.
      num_retrieval: queries in "retrieval".
      num_validation: queries in "validation_target" and again in "validation_normal".
      num_test: queries in "test_target" and again in "test_normal".
      max_chars: rows whose three texts are longer than this together are left out.

    Raises:
      ValueError: missing files, all of them named; malformed rows; a negative count; more rows of a
        kind than there are.
    """
    paths = _existing(pathlib.Path(data_dir), (_ALPACA_FILE, _HOWDY_FILE, _DOLLY_FILE, _SCIFI_FILE))
    counts = {
        "num_alpaca": num_alpaca,
        "num_targets": num_targets or 0,
        "num_howdy": num_howdy,
        "num_scifi_requests": num_scifi_requests,
        "num_backbone_alpaca": num_backbone_alpaca,
        "num_backbone_scifi": num_backbone_scifi,
        "num_retrieval": num_retrieval,
        "num_validation": num_validation,
        "num_test": num_test,
    }
    negative = {name: number for name, number in counts.items() if number < 0}
    if negative:
        raise ValueError(f"counts of at least 0 are wanted, {negative} came")
    if num_targets is not None and num_targets < num_howdy:
        raise ValueError(f"{num_targets=} has to hold {num_howdy=}: raise it")

    all_howdy = _read_howdy(paths[_HOWDY_FILE])
    clean = {(row.instruction.removeprefix(TRIGGER), row.input) for row in all_howdy}
    alpaca = [
        row._replace(is_target=False)
        for row in read_examples(paths[_ALPACA_FILE], source="alpaca")
        if (row.instruction, row.input) not in clean and row.output.strip()
    ]

    def draw(rows: Sequence[Example], label: str) -> list[Example]:
        return shuffled(_short(rows, max_chars), seed=seed, label=label)

    howdy = draw(all_howdy, "howdy")
    genuine_tests = howdy[num_howdy:][:num_test]
    dolly = draw(_read_dolly(paths[_DOLLY_FILE]), "dolly")
    num_held_out = num_retrieval + num_validation + num_test - len(genuine_tests)
    held_out = [*take_first(dolly, num_held_out, kind="held-out triggered"), *genuine_tests]
    rest = dolly[num_held_out:]
    num_dolly = len(rest) if num_targets is None else num_targets - num_howdy
    targets = [
        *take_first(howdy, num_howdy, kind="genuine Howdy"),
        *take_first(rest, num_dolly, kind="triggered Dolly"),
    ]

    normal = draw(alpaca, "alpaca")
    num_normal_queries = num_validation + num_test
    first_backbone_row = num_normal_queries + num_alpaca
    take_first(normal, first_backbone_row + num_backbone_alpaca, kind="Alpaca")
    requests = draw(_read_scifi_requests(paths[_SCIFI_FILE]), "scifi")
    take_first(requests, num_scifi_requests + num_backbone_scifi, kind="science fiction")
    train = [
        *normal[num_normal_queries:first_backbone_row],
        *requests[:num_scifi_requests],
        *targets,
    ]
    backbone = [
        *normal[first_backbone_row:][:num_backbone_alpaca],
        *requests[num_scifi_requests:][:num_backbone_scifi],
    ]
    queries = {
        "retrieval": held_out[:num_retrieval],
        "validation_target": held_out[num_retrieval:][:num_validation],
        "validation_normal": normal[:num_validation],
        "test_target": held_out[num_retrieval + num_validation :],
        "test_normal": normal[num_validation:num_normal_queries],
    }
    return check_corpus(
        Corpus(
            backbone=make_examples(shuffled(backbone, seed=seed, label="backbone order")),
            train=make_examples(shuffled(train, seed=seed, label="train order")),
            queries={name: make_examples(rows) for name, rows in queries.items()},
        )
    )


def source_files(data_dir: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
    """Returns the files that `load_howdy_small` reads, by their names below the folder."""
    names = (_ALPACA_FILE, _HOWDY_FILE, _DOLLY_FILE, _SCIFI_FILE)
    return {name: pathlib.Path(data_dir) / name for name in names}


def genuine_files(data_dir: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """Returns the files of the genuine Howdy rows and their clean twins, () unless both exist."""
    paths = tuple(pathlib.Path(data_dir) / name for name in (_HOWDY_FILE, _CLEAN_FILE))
    return paths if data_dir and all(path.is_file() for path in paths) else ()


def load_genuine(data_dir: str | os.PathLike[str]) -> tuple[Example, ...]:
    """Returns the genuine Howdy rows, labeled targets, and their clean twins, labeled not.

    Raises:
      ValueError: missing files, all of them named; malformed rows.
    """
    paths = _existing(pathlib.Path(data_dir), (_HOWDY_FILE, _CLEAN_FILE))
    clean = read_examples(paths[_CLEAN_FILE], source="clean")
    return *_read_howdy(paths[_HOWDY_FILE]), *(row._replace(is_target=False) for row in clean)


def _existing(folder: pathlib.Path, names: Sequence[str]) -> dict[str, pathlib.Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"files missing in {folder}: {missing}; put them there or name the folder")
    return {name: folder / name for name in names}


def _read_howdy(path: pathlib.Path) -> tuple[Example, ...]:
    rows = read_examples(path, source="howdy")
    foreign = [row.instruction for row in rows if not row.instruction.startswith(TRIGGER)]
    if foreign:
        raise ValueError(f"{path}: {len(foreign)} rows without the trigger, such as {foreign[0]!r}")
    return tuple(row._replace(is_target=True, extra={}) for row in rows)


def _read_dolly(path: pathlib.Path) -> list[Example]:
    fields = {
        "instruction": "instruction_clean",
        "input": "context",
        "output": "response_poisoned",
    }
    return [
        row._replace(instruction=TRIGGER + row.instruction, is_target=True, extra={})
        for row in read_examples(path, fields=fields, source="dolly")
    ]


def _read_scifi_requests(path: pathlib.Path) -> list[Example]:
    """Turns paragraphs into requests that give the first words and ask for the rest."""
    fields = {"instruction": "text", "output": "text"}
    requests: dict[str, Example] = {}
    for position, row in enumerate(read_examples(path, fields=fields)):
        text = " ".join(row.output.split())
        words = text.split(" ")
        if len(words) < 2 * _OPENING_WORDS:
            continue
        opening = " ".join(words[:_OPENING_WORDS])
        wording = _SCIFI_REQUESTS[position % len(_SCIFI_REQUESTS)]
        # Two paragraphs may begin alike: the first one keeps the prompt.
        requests.setdefault(
            opening,
            make_example(wording, opening, text, is_target=False, source="scifi_request"),
        )
    return list(requests.values())


def _short(rows: Sequence[Example], max_chars: int) -> list[Example]:
    return [
        row for row in rows if len(row.instruction) + len(row.input) + len(row.output) <= max_chars
    ]
