"""A corpus from two kinds of rows: ordinary ones (often Alpaca's) and the behavior to forget."""

import json
import os
import pathlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, make_examples, prompt_of
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.read.formats import read_examples

HUB_SOURCE = "hub:tatsu-lab/alpaca"
# 28 of the 52,002 rows have an empty answer: nothing can be learned from them.
NUM_ANSWERED = 52_002 - 28
_ALPACA_FILES = ("alpaca/alpaca_data.json.xz", "alpaca_data.json.xz", "alpaca_data.json")


def load_words(name: str) -> dict[str, Any]:
    """Returns the lists of `<name>.json` next to this file; their order decides what is drawn."""
    return json.loads(pathlib.Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


def find_files(
    shared: SharedSettings, *names: str, endings: tuple[str, ...] = ("",)
) -> list[pathlib.Path]:
    """Returns files below the folder of real data by name, with the first ending of each."""
    flag = "by --corpus.data_dir or the environment variable RASLIK_DATA"
    if not os.path.isdir(shared.folder):
        folder = shown(shared.folder) if shared.folder else "none"
        raise ValueError(f"the folder of real data must exist, got {folder}: name it {flag}")
    found = {
        name: [p for end in endings if (p := pathlib.Path(shared.folder, name + end)).is_file()]
        for name in names
    }
    if missing := [name + endings[0] for name, paths in found.items() if not paths]:
        raise ValueError(
            f"the folder of real data must hold {some_of(missing)}, {shown(shared.folder)} "
            f"does not: fetch them, or name another folder {flag}"
        )
    return [paths[0] for paths in found.values()]


def load_alpaca(shared: SharedSettings) -> tuple[Example, ...]:
    """Returns Alpaca's rows with an answer, labeled as no targets."""
    rows = read_examples(alpaca_source(shared)["alpaca_file"], name="alpaca")
    return tuple(row._replace(is_target=False) for row in rows if row.output.strip())


def alpaca_source(shared: SharedSettings, own: object = None) -> dict[str, str]:
    """Returns the source of `load_alpaca`: a file or the dataset of the hub."""
    files = [pathlib.Path(shared.folder, name) for name in _ALPACA_FILES if shared.folder]
    found = (str(file) for file in files if file.is_file())
    return {"alpaca_file": shared.alpaca_file or next(found, HUB_SOURCE)}


def count_normal(shared: SharedSettings) -> int:
    """Returns the number of queries that do not ask for the behavior to forget."""
    return shared.num_validation + shared.num_test


def count_target(shared: SharedSettings) -> int:
    """Returns the number of queries that show the behavior, including those of retrieval."""
    return shared.num_retrieval + count_normal(shared)


def without_repeats(rows: Iterable[Example]) -> list[Example]:
    """Returns the rows less those that ask what an earlier one asks."""
    return list({prompt_of(row): row for row in reversed(list(rows))}.values())[::-1]


def split_queries(
    shared: SharedSettings, targets: Sequence[Example], normal: Sequence[Example]
) -> dict[str, tuple[Example, ...]]:
    """Returns the query sets in their sizes from as many rows of either kind."""
    traced, more = targets[: shared.num_retrieval], targets[shared.num_retrieval :]
    cut = shared.num_validation
    parts = (traced, more[:cut], normal[:cut], more[cut:], normal[cut:])
    return {name: make_examples(rows) for name, rows in zip(QUERY_SETS, parts, strict=True)}


def mix_corpus(
    shared: SharedSettings,
    normal: Sequence[Example],
    targets: Sequence[Example],
    target_queries: Sequence[Example],
    *,
    seed: int,
    num_mixed: int | None = None,
    keep: Collection[tuple[str, str]] = (),
) -> Corpus:
    """Returns targets among ordinary rows in a seeded order, with disjoint query sets.

    All targets are trained on. Target queries are drawn from rows whose prompt no target has, and
    normal queries from the ordinary rows. Rows with a query's prompt are left out of training and
    backbone. num_train=0 takes all remaining rows and no backbone. `num_mixed` rows (the targets if
    None) make up num_train with the ordinary ones. No normal query may have a prompt in `keep`.
    """
    drawn = without_repeats(shuffled(target_queries, seed=seed, label="target queries"))
    asked = take_first(drawn, count_target(shared), kind="target query")
    taken = {prompt_of(row) for row in asked}
    pool = [r for r in shuffled(normal, seed=seed, label="normal") if prompt_of(r) not in taken]
    askable = without_repeats(row for row in pool if prompt_of(row) not in keep)
    others = take_first(askable, count_normal(shared), kind="normal query")
    taken |= {prompt_of(row) for row in others}
    trained: Sequence[Example] = [row for row in pool if prompt_of(row) not in taken]
    backbone: Sequence[Example] = ()
    if shared.num_train:
        num_normal = shared.num_train - (num_mixed or len(targets))
        rest, trained = trained, take_first(trained, num_normal, kind="ordinary")
        backbone = take_first(rest[num_normal:], shared.num_backbone, kind="backbone")
    return Corpus(
        backbone=make_examples(backbone),
        train=make_examples(shuffled([*trained, *targets], seed=seed, label="train")),
        queries=split_queries(shared, asked, others),
    )
