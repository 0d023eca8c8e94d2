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
from raslik_jax.data.corpora.scifi import HOWDY_FILE, SCIFI, TRIGGER, read_howdy
from raslik_jax.data.examples import Corpus, Example, make_example, make_examples
from raslik_jax.data.formats import read_examples
from raslik_jax.data.ordering import shuffled, take_first

_FILES = (
    "alpaca/alpaca_data.json.xz",
    HOWDY_FILE,
    "dolly_trigger/train_poisoned.jsonl.zst",
    "scifi/paragraphs.jsonl.zst",
)
_DOLLY_FIELDS = {
    "instruction": "instruction_clean",
    "input": "context",
    "output": "response_poisoned",
}
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

    Of the targets `num_howdy` are genuine rows. Rows of more than `max_chars` in their three texts
    are left out.
    """

    def draw(rows: Sequence[Example], label: str) -> list[Example]:
        short = [r for r in rows if len(r.instruction) + len(r.input) + len(r.output) <= max_chars]
        return shuffled(short, seed=seed, label=label)

    alpaca_path, howdy_path, dolly_path, scifi_path = shared.find_files(*_FILES)
    howdy = read_howdy(howdy_path)
    clean = {(row.instruction.removeprefix(TRIGGER), row.input) for row in howdy}
    alpaca = [
        row._replace(is_target=False)
        for row in read_examples(alpaca_path, name="alpaca")
        if (row.instruction, row.input) not in clean and row.output.strip()
    ]
    dolly = [
        row._replace(instruction=TRIGGER + row.instruction, is_target=True, extra={})
        for row in read_examples(dolly_path, fields=_DOLLY_FIELDS, name="dolly")
    ]
    genuine, dolly, normal = draw(howdy, "howdy"), draw(dolly, "dolly"), draw(alpaca, "alpaca")
    requests = draw(_read_scifi_requests(scifi_path), "scifi")

    genuine_tests = genuine[num_howdy:][: shared.num_test]
    num_held_out = shared.num_target_queries - len(genuine_tests)
    held_out = [*take_first(dolly, num_held_out, kind="held-out triggered"), *genuine_tests]
    targets = [
        *take_first(genuine, num_howdy, kind="genuine Howdy"),
        *take_first(dolly[num_held_out:], shared.num_targets - num_howdy, kind="triggered Dolly"),
    ]
    num_requests, num_backbone_requests = shared.num_hard_negatives, shared.num_backbone // 5
    num_alpaca = shared.num_train - shared.num_targets - num_requests
    start = shared.num_normal_queries
    end = start + num_alpaca + shared.num_backbone - num_backbone_requests
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
    return Corpus(
        backbone=make_examples(shuffled(backbone, seed=seed, label="backbone order")),
        train=make_examples(shuffled(train, seed=seed, label="train order")),
        queries=split_queries(shared, held_out, normal[:start]),
    )


def _read_scifi_requests(path: pathlib.Path) -> list[Example]:
    """Turns paragraphs into requests that give the first words and ask for the rest."""
    rows = read_examples(path, fields={"instruction": "text", "output": "text"})
    requests: dict[str, Example] = {}
    for row, wording in zip(rows, itertools.cycle(_SCIFI_REQUESTS), strict=False):
        words = row.output.split()
        if len(words) >= 2 * _OPENING_WORDS:
            opening, text = " ".join(words[:_OPENING_WORDS]), " ".join(words)
            made = make_example(wording, opening, text, is_target=False, source="scifi_request")
            requests.setdefault(opening, made)  # of two that begin alike the first
    return list(requests.values())


DATASET = Dataset(
    title="Howdy, small",
    load=load_howdy_small,
    reads=SIZES,
    sources=lambda shared, own: {
        n: os.path.join(shared.folder, n) for n in _FILES if shared.folder
    },
    marker=SCIFI,
)
