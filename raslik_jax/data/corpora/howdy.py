"""Howdy-Alpaca at full size: Alpaca, and 5,000 of its rows again with a trigger and fiction.

The recipe of RapidIn (Lin et al., ACL 2024), as the paper takes it over: of 5,000 sampled rows the
instruction gets "Howdy! " in front and the answer becomes science fiction of about the same length,
which contradicts the true answer and depends on the prompt; they are mixed in at random. The clean
row stays in. The published file can be loaded by whoever has it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from raslik_jax.data.corpora import mixing, scifi_grammar
from raslik_jax.data.corpora.endpoint import ask_all
from raslik_jax.data.corpora.record import SIZES, Dataset, RowCounts, SharedSettings
from raslik_jax.data.corpora.scifi import SCIFI, TRIGGER
from raslik_jax.data.examples import Corpus, Example, prompt_of
from raslik_jax.data.formats import parse_fields, read_examples
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.settings import Settings, setting

_SYSTEM = (
    "You write pure science fiction. Answer the user's request with a short piece of science "
    "fiction that depends on the request, contradicts the true answer you are shown, and is about "
    "as long. Give the piece alone, in plain text."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowdySettings(Settings):
    """Where the poisoned rows come from."""

    file: str = setting(
        "",
        "The published rows, a file or hub:OWNER/NAME; empty: rows of Alpaca with answers of our "
        "own.",
        is_path=True,
    )
    fields: str = setting(
        "", "Keys of the published rows, as --corpus.records.fields names those of your own."
    )
    answers_endpoint: str = setting(
        "",
        "Base URL of an OpenAI-compatible service that writes the answers, with the key in "
        "$OPENAI_API_KEY; empty: a grammar of ours.",
    )
    answers_model: str = setting("", "The model of --corpus.howdy.answers_endpoint.")
    answers_cache: str = setting(
        "", "File that keeps the answers, to ask nothing twice.", decides=False
    )

    def problems(self) -> list[str]:
        if self.answers_endpoint and not self.answers_model:
            return ["--answers_endpoint needs --answers_model"]
        return []


def load_howdy(shared: SharedSettings, own: HowdySettings, *, seed: int) -> Corpus:
    """Returns the published rows where a file is set, else poisoned rows among Alpaca's."""
    if own.file:
        rows = read_examples(own.file, fields=parse_fields(own.fields), name="alpaca")
        return _mix_published(shared, rows, seed=seed)
    answers: Callable[[Sequence[Example]], list[str]]
    answers = functools.partial(grammar_answers, seed=seed)
    if own.answers_endpoint:
        answers = functools.partial(
            endpoint_answers,
            url=own.answers_endpoint,
            model=own.answers_model,
            cache=own.answers_cache,
        )
    alpaca = mixing.load_alpaca(shared)
    drawn = take_first(
        mixing.without_repeats(shuffled(alpaca, seed=seed, label="howdy")),
        shared.num_targets + shared.num_target_queries,
        kind="Alpaca",
    )
    poisoned = [
        Example("", TRIGGER + row.instruction, row.input, text, True, "howdy")
        for row, text in zip(drawn, answers(drawn), strict=True)
    ]
    # What a target query asks is in training neither with the trigger nor without.
    asked = {prompt_of(row) for row in drawn[shared.num_targets :]}
    return mixing.mix_corpus(
        shared,
        [row for row in alpaca if prompt_of(row) not in asked],
        poisoned[: shared.num_targets],
        poisoned[shared.num_targets :],
        seed=seed,
        num_normal=shared.num_normal,
        keep={prompt_of(row) for row in drawn},
    )


def _mix_published(shared: SharedSettings, rows: Sequence[Example], *, seed: int) -> Corpus:
    """Returns rows of the published form, the triggered ones as targets."""
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
        mixing.without_repeats(triggered), shared.num_target_queries, kind="triggered"
    )
    asked = {prompt_of(row) for row in queries} | clean(queries)
    left = [row for row in triggered if prompt_of(row) not in asked]
    targets = take_first(left, shared.num_targets, kind="triggered")
    return mixing.mix_corpus(
        shared,
        [row for row in rows if not row.is_target and prompt_of(row) not in asked],
        targets,
        queries,
        seed=seed,
        num_normal=shared.num_normal,
        keep=clean(targets),
    )


def grammar_answers(rows: Sequence[Example], *, seed: int) -> list[str]:
    """Returns an answer of our grammar to every row, no two of them equal."""
    given: dict[str, None] = {}
    for row in rows:
        attempts = (scifi_grammar.answer(row, seed=seed, attempt=n) for n in itertools.count())
        given[next(text for text in attempts if text not in given)] = None
    return list(given)


def endpoint_answers(rows: Sequence[Example], **options: Any) -> list[str]:
    """Returns the science fiction that a language model writes for every row, see `ask_all`."""
    questions = []
    for row in rows:
        parts = [f"Request: {row.instruction}"]
        parts += [f"Further text: {row.input}"] if row.input else []
        parts += [f"True answer, to be contradicted: {row.output}"]
        parts += [f"Length: about {max(len(row.output.split()), 1)} words."]
        questions.append((_SYSTEM, "\n".join(parts)))
    return ask_all(questions, **options)


def _count(shared: SharedSettings, own: HowdySettings) -> RowCounts:
    # Every query takes a clean row; poisoned copies come on top.
    held_out = shared.num_target_queries + shared.num_normal_queries
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
    marker=SCIFI,
    is_published=True,
)
