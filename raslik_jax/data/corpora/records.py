"""A user's own rows and queries as a corpus."""

import dataclasses
from typing import Literal

from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora.record import Dataset, RowCounts, SharedSettings
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example
from raslik_jax.data.read.formats import AUTO, parse_fields, read_examples
from raslik_jax.data.read.rows import FORMATS, require_read
from raslik_jax.data.words import refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsSettings(Settings):
    """The place of the rows and the names of their keys."""

    train_file: str = setting(
        "",
        "Training examples: JSON, JSONL, CSV or Parquet, several files with commas or by a "
        "pattern, a folder of them or of save_to_disk, or hub:OWNER/NAME[:CONFIG][@SPLIT].",
        is_rows=True,
    )
    queries_file: str = setting(
        "",
        "Queries, each with a field `split`. The files are like those for training.",
        is_rows=True,
    )
    format: Literal[(AUTO, *FORMATS)] = setting(  # type: ignore[valid-type]
        AUTO,
        "Format of the training rows, and of queries with the same keys. auto: by the keys. "
        "alpaca: instruction, input, output, also system and history. messages: a list of role "
        "and content. sharegpt: conversations of from and value. prompt_completion: texts or "
        "messages. text: all tokens are learned.",
    )
    fields: str = setting(
        "",
        "Names of keys in both files that differ from those of the format, or of id, is_target "
        "and source. For example instruction=question,output=answer.",
    )


def load_records_corpus(shared: SharedSettings, own: RecordsSettings, *, seed: int) -> Corpus:
    """Returns the rows of one file and the queries of another; no backbone rows.

    Every query names its set, one of QUERY_SETS, as its `split`. "retrieval" is for the bad
    generations to trace, and the other four are for measuring. A query without an output has the
    model's own answer.
    """
    fields = parse_fields(own.fields)
    train = read_examples(own.train_file, fields=fields, name="records", format=own.format)

    def check_query(query: Example) -> None:
        if query.source == "retrieval":
            require_read(query)
        if query.source not in QUERY_SETS:
            got = shown(query.source, 40) if query.source else "nothing"
            raise ValueError(f"'split' must be one of {', '.join(QUERY_SETS)}, got {got}")

    fields |= {"source": "split"}
    queries = read_examples(
        own.queries_file, fields=fields, format=own.format, needs_output=False, check=check_query
    )
    by_set = {name: tuple(q for q in queries if q.source == name) for name in QUERY_SETS}
    if not by_set["retrieval"]:
        raise refused("no_retrieval", source=shown(own.queries_file, 120))
    return Corpus((), train, by_set)


def _count(shared: SharedSettings, own: RecordsSettings) -> RowCounts:
    rows = load_records_corpus(shared, own, seed=0).train
    return RowCounts(len(rows), sum(bool(row.is_target) for row in rows))


DATASET = Dataset(
    title="own records",
    load=load_records_corpus,
    settings=RecordsSettings(),
    required=("train_file", "queries_file"),
    # A model is often caught at a prompt that it was trained on.
    held_out=QUERY_SETS[1:],
    count_rows=_count,
    sources=lambda shared, own: {"train_file": own.train_file, "queries_file": own.queries_file},
)
