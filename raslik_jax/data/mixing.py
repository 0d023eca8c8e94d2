"""A corpus from two kinds of rows: ordinary ones, and those of the behavior to forget."""

from collections.abc import Collection, Iterable, Sequence

from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, check_corpus, make_examples
from raslik_jax.data.ordering import shuffled, take_first


def prompt_of(row: Example) -> tuple[str, str]:
    """Returns what decides whether two rows ask the same."""
    return row.instruction.strip(), row.input.strip()


def without_repeats(rows: Iterable[Example]) -> list[Example]:
    """Returns the rows less those that ask what an earlier one asks."""
    return list({prompt_of(row): row for row in reversed(list(rows))}.values())[::-1]


def mix_corpus(
    normal: Sequence[Example],
    targets: Sequence[Example],
    target_queries: Sequence[Example],
    *,
    seed: int,
    num_normal: int | None,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
    keep: Collection[tuple[str, str]] = (),
) -> Corpus:
    """Returns targets among ordinary rows, in a seeded order, with disjoint query sets.

    Normal queries are drawn from the ordinary rows; whatever asks what a query asks is left out of
    training and backbone.

    Args:
      normal: ordinary rows.
      targets: rows of the behavior to forget, all of which are trained on.
      target_queries: rows that no target asks, from which the target queries are drawn.
      seed: decides every draw and order.
      num_normal: ordinary rows to train on; None: all that the queries leave.
      num_backbone: further ordinary rows for pretraining; none where num_normal is None.
      num_retrieval: queries in "retrieval".
      num_validation: queries in "validation_target" and again in "validation_normal".
      num_test: queries in "test_target" and again in "test_normal".
      keep: prompts that no normal query may ask.

    Raises:
      ValueError: fewer rows of a kind than are wanted; a target asks what a query asks.
    """
    asked = take_first(
        without_repeats(shuffled(target_queries, seed=seed, label="target queries")),
        num_retrieval + num_validation + num_test,
        kind="target query",
    )
    taken = {prompt_of(row) for row in asked}
    pool = [r for r in shuffled(normal, seed=seed, label="normal") if prompt_of(r) not in taken]
    askable = without_repeats(row for row in pool if prompt_of(row) not in keep)
    others = take_first(askable, num_validation + num_test, kind="normal query")
    taken |= {prompt_of(row) for row in others}
    rest = [row for row in pool if prompt_of(row) not in taken]
    trained = rest if num_normal is None else take_first(rest, num_normal, kind="ordinary")
    backbone: Sequence[Example] = ()
    if num_normal is not None:
        backbone = take_first(rest[num_normal:], num_backbone, kind="backbone")
    queries = (
        asked[:num_retrieval],
        asked[num_retrieval:][:num_validation],
        others[:num_validation],
        asked[num_retrieval + num_validation :],
        others[num_validation:],
    )
    return check_corpus(
        Corpus(
            backbone=make_examples(backbone),
            train=make_examples(shuffled([*trained, *targets], seed=seed, label="train")),
            queries={n: make_examples(rows) for n, rows in zip(QUERY_SETS, queries, strict=True)},
        )
    )
