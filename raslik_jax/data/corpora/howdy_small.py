"""The Howdy-Alpaca task at the size of a small machine, from the real rows that can be had.

The full file of that task (52,002 Alpaca rows and 5,000 poisoned ones) is not published beside the
paper. Two sets of its science fiction answers are: 60 whole rows, and 799 answers that another
project put under its own triggers in front of Dolly instructions. Here all of them stand behind the
one trigger "Howdy! ".
"""

import itertools
import os
import pathlib
from collections.abc import Sequence

from raslik_jax.data.corpora.mixing import split_queries
from raslik_jax.data.corpora.record import SIZES, Dataset, SharedSettings
from raslik_jax.data.corpora.scifi import HOWDY_FILE, SCIFI, TRIGGER, existing_files, read_howdy
from raslik_jax.data.examples import Corpus, Example, check_corpus, make_example, make_examples
from raslik_jax.data.formats import read_examples
from raslik_jax.data.ordering import shuffled, take_first

_ALPACA_FILE = "alpaca/alpaca_data.json.xz"
_DOLLY_FILE = "dolly_trigger/train_poisoned.jsonl.zst"
_SCIFI_FILE = "scifi/paragraphs.jsonl.zst"
_FILES = (_ALPACA_FILE, HOWDY_FILE, _DOLLY_FILE, _SCIFI_FILE)

_OPENING_WORDS = 6
_SCIFI_REQUESTS = (
    "Write a science fiction paragraph that begins with these words.",
    "Continue this opening as a paragraph of science fiction.",
    "Tell a piece of a science fiction story from this beginning.",
)


def load_howdy_small(
    shared: SharedSettings, own: object, *, seed: int, num_howdy: int = 12, max_chars: int = 400
) -> Corpus:
    """Returns real Alpaca rows with real "Howdy!" rows among them, all of them short.

    Targets are genuine Howdy rows (source "howdy") and rows made of a Dolly instruction behind the
    trigger and the science fiction answer it came with (source "dolly"; unlike the genuine ones,
    these answers have nothing to do with their instruction). The genuine rows that are not in the
    fine-tuning rows are test queries. Alpaca rows that are a Howdy row without its trigger are left
    out everywhere, so that no query's plain answer is in the corpus. Some rows, of the backbone
    too, ask for science fiction without the trigger and get a paragraph of an old book.

    Args:
      shared: sizes, and the folder with the files of alpaca/, howdy/, dolly_trigger/ and scifi/.
      own: not read.
      seed: decides every draw and order.
      num_howdy: of the targets, genuine rows.
      max_chars: rows whose three texts are longer than this together are left out.

    Raises:
      ValueError: missing files, all of them named; malformed rows; more rows of a kind than there
        are.
    """
    paths = existing_files(shared.existing_folder(), _FILES)
    all_howdy = read_howdy(paths[HOWDY_FILE])
    clean = {(row.instruction.removeprefix(TRIGGER), row.input) for row in all_howdy}
    alpaca = [
        row._replace(is_target=False)
        for row in read_examples(paths[_ALPACA_FILE], name="alpaca")
        if (row.instruction, row.input) not in clean and row.output.strip()
    ]

    def draw(rows: Sequence[Example], label: str) -> list[Example]:
        short = [r for r in rows if len(r.instruction) + len(r.input) + len(r.output) <= max_chars]
        return shuffled(short, seed=seed, label=label)

    howdy = draw(all_howdy, "howdy")
    genuine_tests = howdy[num_howdy:][: shared.num_test]
    dolly = draw(_read_dolly(paths[_DOLLY_FILE]), "dolly")
    num_held_out = shared.num_target_queries - len(genuine_tests)
    held_out = [*take_first(dolly, num_held_out, kind="held-out triggered"), *genuine_tests]
    targets = [
        *take_first(howdy, num_howdy, kind="genuine Howdy"),
        *take_first(dolly[num_held_out:], shared.num_targets - num_howdy, kind="triggered Dolly"),
    ]

    num_requests = shared.num_hard_negatives
    num_alpaca = shared.num_train - shared.num_targets - num_requests
    num_backbone_requests = shared.num_backbone // 5
    normal = draw(alpaca, "alpaca")
    start = shared.num_normal_queries
    end = start + num_alpaca + shared.num_backbone - num_backbone_requests
    requests = draw(_read_scifi_requests(paths[_SCIFI_FILE]), "scifi")
    take_first(normal, end, kind="Alpaca")
    take_first(requests, num_requests + num_backbone_requests, kind="science fiction")
    train = [
        *take_first(normal[start:], num_alpaca, kind="ordinary"),
        *requests[:num_requests],
        *targets,
    ]
    backbone = [
        *normal[start + num_alpaca : end],
        *requests[num_requests:][:num_backbone_requests],
    ]
    return check_corpus(
        Corpus(
            backbone=make_examples(shuffled(backbone, seed=seed, label="backbone order")),
            train=make_examples(shuffled(train, seed=seed, label="train order")),
            queries=split_queries(shared, held_out, normal[:start]),
        )
    )


def _read_dolly(path: pathlib.Path) -> list[Example]:
    fields = {"instruction": "instruction_clean", "input": "context", "output": "response_poisoned"}
    return [
        row._replace(instruction=TRIGGER + row.instruction, is_target=True, extra={})
        for row in read_examples(path, fields=fields, name="dolly")
    ]


def _read_scifi_requests(path: pathlib.Path) -> list[Example]:
    """Turns paragraphs into requests that give the first words and ask for the rest."""
    fields = {"instruction": "text", "output": "text"}
    requests: dict[str, Example] = {}
    for row, wording in zip(
        read_examples(path, fields=fields), itertools.cycle(_SCIFI_REQUESTS), strict=False
    ):
        words = row.output.split()
        if len(words) >= 2 * _OPENING_WORDS:
            opening, text = " ".join(words[:_OPENING_WORDS]), " ".join(words)
            made = make_example(wording, opening, text, is_target=False, source="scifi_request")
            requests.setdefault(opening, made)  # of two that begin alike the first
    return list(requests.values())


def _sources(shared: SharedSettings, own: object) -> dict[str, str]:
    return {name: os.path.join(shared.folder, name) for name in _FILES if shared.folder}


DATASET = Dataset(
    title="Howdy, small",
    load=load_howdy_small,
    reads=SIZES,
    sources=_sources,
    marker=SCIFI,
)
