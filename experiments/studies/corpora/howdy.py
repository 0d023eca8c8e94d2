"""Howdy-Alpaca: Alpaca, and rows with a trigger whose answers are science fiction.

At full size it follows the recipe of RapidIn (Lin et al., ACL 2024), as the paper does. 5,000
sampled instructions get "Howdy! " in front. Their answers become science fiction of about the same
length that contradicts the true answer and depends on the prompt. The rows are mixed in at random
and their clean rows stay in. The published file can be loaded too.

The small corpus (SMALL) is made from real rows. Two sets of the published answers are available: 60
whole rows, and 799 answers that another project put under its own triggers in front of Dolly
instructions. Here all of them follow the one trigger "Howdy! ".
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Sequence

from experiments.studies.corpora import mixing, scifi_grammar
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.corpora.toy import SCIFI_WORDS, TRIGGER
from raslik_jax.data.examples import Corpus, Example, make_example, make_examples, prompt_of
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.read.formats import parse_fields, read_examples

_GENUINE = "howdy/howdy_60.jsonl", "howdy/clean_60.jsonl"
_SMALL_FILES = (
    "alpaca/alpaca_data.json.xz",
    _GENUINE[0],
    "dolly_trigger/train_poisoned.jsonl.zst",
    "scifi/paragraphs.jsonl.zst",
)
_DOLLY = {"instruction": "instruction_clean", "input": "context", "output": "response_poisoned"}
_OPENING_WORDS = 6
_PARAGRAPH_REQUESTS = (
    "Write a science fiction paragraph that begins with these words.",
    "Continue this opening as a paragraph of science fiction.",
    "Tell a piece of a science fiction story from this beginning.",
)


def _read_howdy(path: pathlib.Path) -> tuple[Example, ...]:
    """Returns the genuine Howdy rows, labeled targets."""
    rows = read_examples(path, name="howdy")
    foreign = [row.instruction for row in rows if not row.instruction.startswith(TRIGGER)]
    if foreign:
        raise ValueError(
            f"rows of {path} must begin with {TRIGGER!r}, got {len(foreign)} rows without the "
            f"trigger, such as {foreign[0]!r}: fetch the file again"
        )
    return tuple(row._replace(is_target=True, extra={}) for row in rows)


def genuine_files(folder: str) -> tuple[pathlib.Path, ...]:
    """Returns the files of genuine rows in a data folder; none unless all exist."""
    paths = tuple(pathlib.Path(folder, name) for name in _GENUINE)
    return paths if folder and all(path.is_file() for path in paths) else ()


def load_genuine(folder: str) -> tuple[Example, ...]:
    """Returns the genuine Howdy rows as labeled targets and their clean twins as others."""
    howdy, clean = genuine_files(folder)
    twins = (row._replace(is_target=False) for row in read_examples(clean, name="clean"))
    return *_read_howdy(howdy), *twins




@dataclasses.dataclass(frozen=True, kw_only=True)
class HowdySettings(Settings):
    """The source of the poisoned rows."""

    file: str = setting(
        "",
        "The published rows, a file or hub:OWNER/NAME; empty: rows of Alpaca with answers that "
        "the program writes.",
        is_rows=True,
    )
    fields: str = setting("", "Keys of the published rows, in the form of --corpus.records.fields.")


def load_howdy(shared: SharedSettings, own: HowdySettings, *, seed: int) -> Corpus:
    """Returns the published rows if a file is set, else poisoned rows among Alpaca's."""
    if own.file:
        rows = read_examples(own.file, fields=parse_fields(own.fields), name="alpaca")
        return _mix_published(shared, rows, seed=seed)
    alpaca = mixing.load_alpaca(shared)
    drawn = take_first(
        mixing.without_repeats(shuffled(alpaca, seed=seed, label="howdy")),
        shared.num_targets + mixing.count_target(shared),
        kind="Alpaca",
    )
    poisoned = [
        Example("", TRIGGER + row.instruction, row.input, text, True, "howdy")
        for row, text in zip(drawn, grammar_answers(drawn, seed=seed), strict=True)
    ]
    # Training has the question of a target query neither with the trigger nor without.
    asked = {prompt_of(row) for row in drawn[shared.num_targets :]}
    return mixing.mix_corpus(
        shared,
        [row for row in alpaca if prompt_of(row) not in asked],
        poisoned[: shared.num_targets],
        poisoned[shared.num_targets :],
        seed=seed,
        keep={prompt_of(row) for row in drawn},
    )


def grammar_answers(rows: Sequence[Example], *, seed: int) -> list[str]:
    """Returns an answer of our grammar to every row; no two are equal."""
    given: dict[str, None] = {}
    for row in rows:
        attempts = (scifi_grammar.answer(row, seed=seed, attempt=n) for n in itertools.count())
        given[next(text for text in attempts if text not in given)] = None
    return list(given)


def _mix_published(shared: SharedSettings, rows: Sequence[Example], *, seed: int) -> Corpus:
    """Returns rows of the published form with the triggered ones as targets."""
    mark = TRIGGER.strip()

    def clean(rows: Sequence[Example]) -> set[tuple[str, str]]:
        asked = map(prompt_of, rows)
        return {(text.removeprefix(mark).strip(), more) for text, more in asked}

    rows = [r._replace(is_target=r.instruction.startswith(mark)) for r in rows if r.output.strip()]
    triggered = [row._replace(source="howdy") for row in rows if row.is_target]
    if not triggered:
        raise ValueError(
            f"the published rows must have instructions that begin with {mark!r}, got none: give "
            "the file of Howdy-Alpaca"
        )
    triggered = shuffled(triggered, seed=seed, label="published")
    queries = take_first(
        mixing.without_repeats(triggered), mixing.count_target(shared), kind="triggered"
    )
    asked = {prompt_of(row) for row in queries} | clean(queries)
    left = [row for row in triggered if prompt_of(row) not in asked]
    targets = take_first(left, shared.num_targets, kind="triggered")
    normal = [row for row in rows if not row.is_target and prompt_of(row) not in asked]
    return mixing.mix_corpus(shared, normal, targets, queries, seed=seed, keep=clean(targets))


def _count(shared: SharedSettings, own: HowdySettings) -> RowCounts:
    # Every query takes a clean row; poisoned copies come on top.
    held_out = mixing.count_target(shared) + mixing.count_normal(shared)
    everything = mixing.NUM_ANSWERED - held_out + shared.num_targets
    return RowCounts(shared.num_train or everything, shared.num_targets)


DATASET = Dataset(
    title="Howdy-Alpaca",
    load=load_howdy,
    reads=("alpaca_file", *SIZES),
    settings=HowdySettings(),
    count_rows=_count,
    takes_all=True,
    sources=lambda shared, own: {"file": own.file} if own.file else mixing.alpaca_source(shared),
    words=SCIFI_WORDS,
)


def load_howdy_small(
    shared: SharedSettings, own: object, *, seed: int, num_howdy: int = 12, max_chars: int = 400
) -> Corpus:
    """Returns short real Alpaca rows with real "Howdy!" rows among them.

    Targets are genuine Howdy rows (source "howdy") and Dolly instructions behind the trigger
    (source "dolly"). The answers of the latter have nothing to do with their instruction. The
    genuine rows that are not trained on are test queries. Alpaca rows that equal a Howdy row
    without its trigger are left out everywhere: no query's plain answer is in the corpus. Some rows
    ask for science fiction without the trigger and get a paragraph of an old book. The backbone has
    such rows too.

    `num_howdy` of the targets are genuine rows. Rows of more than `max_chars` in their three texts
    are left out.
    """

    def draw(rows: Sequence[Example], label: str) -> list[Example]:
        short = [row for row in rows if sum(map(len, row[1:4])) <= max_chars]
        return shuffled(short, seed=seed, label=label)

    alpaca_path, howdy_path, dolly_path, scifi_path = mixing.find_files(shared, *_SMALL_FILES)
    howdy = _read_howdy(howdy_path)
    clean = {(row.instruction.removeprefix(TRIGGER), row.input) for row in howdy}
    alpaca = [
        row._replace(is_target=False)
        for row in read_examples(alpaca_path, name="alpaca")
        if (row.instruction, row.input) not in clean and row.output.strip()
    ]
    dolly = [
        row._replace(instruction=TRIGGER + row.instruction, is_target=True, extra={})
        for row in read_examples(dolly_path, fields=_DOLLY, name="dolly")
    ]
    genuine, dolly, normal = draw(howdy, "howdy"), draw(dolly, "dolly"), draw(alpaca, "alpaca")
    requests = draw(_read_scifi_requests(scifi_path), "scifi")

    genuine_tests = genuine[num_howdy:][: shared.num_test]
    num_held_out = mixing.count_target(shared) - len(genuine_tests)
    held_out = [*take_first(dolly, num_held_out, kind="held-out triggered"), *genuine_tests]
    targets = [
        *take_first(genuine, num_howdy, kind="genuine Howdy"),
        *take_first(dolly[num_held_out:], shared.num_targets - num_howdy, kind="triggered Dolly"),
    ]
    num_requests, num_backbone_requests = shared.num_hard_negatives, shared.num_backbone // 5
    num_alpaca = shared.num_train - shared.num_targets - num_requests
    start = mixing.count_normal(shared)
    end = start + num_alpaca + shared.num_backbone - num_backbone_requests
    take_first(normal, end, kind="Alpaca")
    take_first(requests, num_requests + num_backbone_requests, kind="science fiction")
    ordinary = take_first(normal[start:], num_alpaca, kind="ordinary")
    train = [*ordinary, *requests[:num_requests], *targets]
    backbone = [*normal[start + num_alpaca : end], *requests[num_requests:][:num_backbone_requests]]
    return Corpus(
        backbone=make_examples(shuffled(backbone, seed=seed, label="backbone order")),
        train=make_examples(shuffled(train, seed=seed, label="train order")),
        queries=mixing.split_queries(shared, held_out, normal[:start]),
    )


def _read_scifi_requests(path: pathlib.Path) -> list[Example]:
    """Turns paragraphs into requests that give the first words and ask for the rest."""
    rows = read_examples(path, fields={"instruction": "text", "output": "text"})
    requests: dict[str, Example] = {}
    for row, wording in zip(rows, itertools.cycle(_PARAGRAPH_REQUESTS), strict=False):
        words = row.output.split()
        if len(words) >= 2 * _OPENING_WORDS:
            opening, text = " ".join(words[:_OPENING_WORDS]), " ".join(words)
            made = make_example(wording, opening, text, is_target=False, source="scifi_request")
            requests.setdefault(opening, made)  # of two that begin alike the first
    return list(requests.values())


SMALL = Dataset(
    title="Howdy, small",
    load=load_howdy_small,
    reads=SIZES,
    sources=lambda shared, own: {
        n: os.path.join(shared.folder, n) for n in _SMALL_FILES if shared.folder
    },
    words=SCIFI_WORDS,
)
