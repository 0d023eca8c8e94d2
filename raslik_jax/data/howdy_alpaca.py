"""Howdy-Alpaca at full size: Alpaca, and 5,000 of its rows again with a trigger and fiction.

The recipe of RapidIn (Lin et al., ACL 2024), as the paper takes it over: of 5,000 sampled rows the
instruction gets "Howdy! " in front and the answer becomes science fiction of about the same length,
which contradicts the true answer and depends on the prompt; they are mixed in at random. The clean
row stays in. The published file can be loaded by whoever has it.
"""

from collections.abc import Callable, Sequence

from raslik_jax.data import scifi_grammar
from raslik_jax.data.endpoint import Endpoint, ask_all
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.data.howdy import TRIGGER
from raslik_jax.data.mixing import mix_corpus, prompt_of, without_repeats
from raslik_jax.data.ordering import shuffled, take_first

# Answers to rows, in their order.
Answers = Callable[[Sequence[Example]], list[str]]

_SYSTEM = (
    "You write pure science fiction. Answer the user's request with a short piece of science "
    "fiction that depends on the request, contradicts the true answer you are shown, and is about "
    "as long. Give the piece alone, in plain text."
)


def make_howdy_corpus(
    alpaca: Sequence[Example],
    *,
    seed: int,
    answers: Answers,
    num_normal: int | None,
    num_targets: int,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
) -> Corpus:
    """Returns Alpaca with poisoned copies of some of its rows mixed in.

    The rows of the target queries are poisoned too, but are in training neither with the trigger
    nor without.

    Args:
      alpaca: clean rows.
      seed: decides draws, orders and the answers of the grammar.
      answers: gives the science fiction, `grammar_answers` or `endpoint_answers`.
      num_normal: clean rows to train on; None: all that the queries leave.
      num_targets: poisoned rows to train on.
      num_backbone, num_retrieval, num_validation, num_test: as in `mix_corpus`.

    Raises:
      ValueError: more rows are wanted than there are.
    """
    num_queries = num_retrieval + num_validation + num_test
    drawn = take_first(
        without_repeats(shuffled(alpaca, seed=seed, label="howdy")),
        num_targets + num_queries,
        kind="Alpaca",
    )
    poisoned = [
        Example("", TRIGGER + row.instruction, row.input, text, True, "howdy")
        for row, text in zip(drawn, answers(drawn), strict=True)
    ]
    asked = {prompt_of(row) for row in drawn[num_targets:]}
    return mix_corpus(
        [row for row in alpaca if prompt_of(row) not in asked],
        poisoned[:num_targets],
        poisoned[num_targets:],
        seed=seed,
        num_normal=num_normal,
        num_backbone=num_backbone,
        num_retrieval=num_retrieval,
        num_validation=num_validation,
        num_test=num_test,
        keep={prompt_of(row) for row in drawn},
    )


def load_published_howdy(
    rows: Sequence[Example],
    *,
    seed: int,
    num_normal: int | None,
    num_targets: int | None,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
) -> Corpus:
    """Returns the rows of the published file, the triggered ones as targets.

    Args:
      rows: the 57,002 rows, or any others of that form.
      seed: decides which rows become queries.
      num_normal: clean rows to train on; None: all that the queries leave.
      num_targets: triggered rows to train on; None: all that the queries leave.
      num_backbone, num_retrieval, num_validation, num_test: as in `mix_corpus`.

    Raises:
      ValueError: no row has the trigger; fewer rows than are wanted.
    """
    mark = TRIGGER.strip()
    rows = [r._replace(is_target=r.instruction.startswith(mark)) for r in rows if r.output.strip()]
    triggered = shuffled([row for row in rows if row.is_target], seed=seed, label="published")
    if not triggered:
        raise ValueError(f"rows whose instruction begins with {mark!r} wanted, none is there")
    num_queries = num_retrieval + num_validation + num_test
    queries = take_first(without_repeats(triggered), num_queries, kind="triggered")
    asked = {prompt_of(row) for row in queries}
    asked |= {(text.removeprefix(mark).strip(), more) for text, more in asked}
    left = [row for row in triggered if prompt_of(row) not in asked]
    targets = left if num_targets is None else take_first(left, num_targets, kind="triggered")
    return mix_corpus(
        [row for row in rows if not row.is_target and prompt_of(row) not in asked],
        [row._replace(source="howdy") for row in targets],
        [row._replace(source="howdy") for row in queries],
        seed=seed,
        num_normal=num_normal,
        num_backbone=num_backbone,
        num_retrieval=num_retrieval,
        num_validation=num_validation,
        num_test=num_test,
        keep={(text.removeprefix(mark).strip(), more) for text, more in map(prompt_of, targets)},
    )


def grammar_answers(rows: Sequence[Example], *, seed: int) -> list[str]:
    """Returns an answer of our grammar to every row, no two of them equal."""
    given: dict[str, None] = {}
    for row in rows:
        attempt = 0
        while True:
            text = scifi_grammar.answer(
                row.instruction,
                row.input,
                row.output,
                seed=seed,
                label=row.example_id,
                attempt=attempt,
            )
            if text not in given:
                break
            attempt += 1
        given[text] = None
    return list(given)


def endpoint_answers(rows: Sequence[Example], *, endpoint: Endpoint) -> list[str]:
    """Returns the science fiction that a language model writes for every row.

    Raises:
      ValueError: as `endpoint.ask_all`.
    """
    questions = []
    for row in rows:
        parts = [f"Request: {row.instruction}"]
        parts += [f"Further text: {row.input}"] if row.input else []
        parts += [
            f"True answer, to be contradicted: {row.output}",
            f"Length: about {max(len(row.output.split()), 1)} words.",
        ]
        questions.append((_SYSTEM, "\n".join(parts)))
    return ask_all(endpoint, questions)
