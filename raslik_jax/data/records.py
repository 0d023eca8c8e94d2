"""A user's own rows and queries as a corpus."""

import os
from collections.abc import Mapping

from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, check_corpus
from raslik_jax.data.hub import read_rows
from raslik_jax.messages import shown


def load_records_corpus(
    train_path: str | os.PathLike[str],
    queries_path: str | os.PathLike[str],
    *,
    fields: Mapping[str, str] | None = None,
    split_field: str = "split",
) -> Corpus:
    """Returns the rows of one JSON or JSONL file and the queries of another; no backbone rows.

    Either may be a dataset of the hub, `hub:OWNER/NAME[:CONFIG][@SPLIT]`.

    Every query names its set, one of QUERY_SETS, in its split field: "retrieval" for the bad
    generations to be traced, the other four for measuring. A query may do without an output: its
    answer is then the model's own. Only "retrieval" may ask what a training row asks, since a model
    is often caught at a prompt that it was trained on.

    Args:
      train_path: the fine-tuning rows.
      queries_path: the queries, with the same keys.
      fields: as in `read_examples`, for both files.
      split_field: the key of a query that names its set.

    Raises:
      ValueError: what `read_examples` refuses, with file and line; a query of an unknown set; no
        retrieval query; a prompt in two sets, or a measuring prompt in the training rows.
    """
    train = read_rows(os.fspath(train_path), fields=fields, name="records")

    def check_split(query: Example) -> None:
        if query.source not in QUERY_SETS:
            raise ValueError(
                f"{split_field!r} must be one of {', '.join(QUERY_SETS)}, got "
                + (shown(query.source, 40) if query.source else "nothing")
            )

    queries = read_rows(
        os.fspath(queries_path),
        fields={**(fields or {}), "source": split_field},
        needs_output=False,
        check=check_split,
    )
    by_set = {
        name: tuple(query for query in queries if query.source == name) for name in QUERY_SETS
    }
    if not by_set["retrieval"]:
        raise ValueError(
            f"{shown(str(queries_path), 120)} must have a query with {split_field!r} 'retrieval', "
            "got none: give the bad generation"
        )
    evaluation = tuple(name for name in QUERY_SETS if name != "retrieval")
    return check_corpus(Corpus(backbone=(), train=train, queries=by_set), held_out=evaluation)
