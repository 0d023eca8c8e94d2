"""All rows of a run with their scores, for the page to search, sort and filter.

The page has them as compressed JSON, which a browser does not take for markup. `explorer.js` shows
it as text. The grid is Tabulator's, in `third_party/tabulator` with its license.
"""

import base64
import gzip
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report import incident, tables
from raslik_jax.report import rows as rows_lib
from raslik_jax.report.names import FOLDER, highlighted
from raslik_jax.run import artifacts

# The part of a page that all its rows may take, compressed.
MOST_BYTES = 5_000_000
# Characters of a row's prompt or answer, and scores of single queries on a page.
_MOST_TEXT, _MOST_PAIRS = 20_000, 400_000
# Of the rows that are left out none is among the highest; a third of those that stay are lowest.
_LOWEST = 1 / 3
_BINS = 60
# Scores of single queries are written in steps of this size.
_STEP = 1e-4
_GRID = FOLDER.parent / "third_party" / "tabulator"


class Explorer(NamedTuple):
    """All rows of a run in the order of its corpus.

    Attributes:
      score_N: RASLIK's scores, minus infinity for a row without a gradient.
      columns: further values of each row, by name; None if unknown.
      queries: the texts of the traced queries: prompt and answer.
      each_NQ: the score with each of the (first) queries; None for a single query.
      behaviors: the queries by behavior, as positions; empty if unknown.
      tokens: the pieces of a row and of the answer, by position: text, share, step of the color.
      strategy: the strategy whose sets are shown.
      has_lines: whether `line` is the line in the user's file and not the position in the corpus.
    """

    score_N: Float[np.ndarray, " N"]
    columns: Mapping[str, Sequence[Any]]
    queries: tuple[tuple[str, str], ...]
    each_NQ: Float[np.ndarray, "N Q"] | None
    behaviors: tuple[tuple[int, ...], ...]
    tokens: Mapping[int, Mapping[str, Any]]
    strategy: str
    has_lines: bool

    def distribution(self) -> dict[str, Any]:
        """Returns the known scores, whether each is of a target, and the ends of both sets.

        There are no labels if a row has none. There are no ends if the sets were made by other
        scores.
        """
        is_known_N = self.score_N > -np.inf
        label_N, set_N = (np.array(self.columns[n], object)[is_known_N] for n in ("label", "set"))
        found: dict[str, Any] = {"score_N": self.score_N[is_known_N]}
        found["is_target_N"] = None if None in label_N.tolist() else label_N.astype(bool)
        for kind in ("forget", "retain"):
            own = found["score_N"][set_N == kind] if highlighted([self.strategy]) else ()
            found[kind] = (float(min(own)), float(max(own))) if len(own) else None
        return found


def read_explorer(root: pathlib.Path, metrics: Metrics) -> Explorer | None:
    """Returns the rows of a run with their results; None if the run has no scores."""
    rows, entries = artifacts.TRAIN.find(root) or (), metrics["retrieval"]
    number = len(rows)
    score_N = artifacts.INFLUENCE.current(root, (number,)) if rows and entries else None
    if score_N is None:
        return None
    strategy = highlighted(entries) or next(iter(entries))
    known = rows_lib.read_columns(root, rows_lib.read_sets(root, strategy))
    columns: dict[str, Sequence[Any]] = {
        "line": [row.place or n for n, row in enumerate(rows, start=1)],
        "file": [row.file or None for row in rows],
        "id": known["example_id"],
        "asked": [incident.asked_of(row) for row in rows],
        "said": known["output"],
        "set": [name or "" for name in known["set"]],
        "label": known["is_target"],
    }
    for name in rows_lib.NUMBERS:
        if name in known:
            columns[name] = [None if x is None else float(f"{x:.5g}") for x in known[name]]
    queries = _read_queries(root)
    each_NQ = artifacts.EACH_INFLUENCE.find(root, (number, None))
    if each_NQ is not None and each_NQ.shape[1] > len(queries):
        place, got = artifacts.EACH_INFLUENCE.place(root), each_NQ.shape[1]
        must = f"must have a column for each of {len(queries)} queries"
        raise ValueError(f"{place} {must}, got {got}: retrieve again")
    apart = artifacts.BEHAVIORS.current(root, [*queries])
    return Explorer(
        score_N.astype(np.float64),
        columns,
        tuple(queries.values()),
        each_NQ,
        apart.groups if apart else (),
        _read_tokens(root, {row.example_id: n for n, row in enumerate(rows)}),
        strategy,
        all(row.place for row in rows),
    )


def _read_queries(root: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Returns prompt and answer of the traced queries by id, without empty answers.

    The order is that of `Workspace.retrieval_queries` and of the scores with single queries.
    """
    own = artifacts.OWN_ANSWERS.current(root) or {}
    found = {
        row.example_id: (incident.asked_of(row), own.get(row.example_id, row.output))
        for row in artifacts.RETRIEVAL.find(root) or ()
    }
    return {name: texts for name, texts in found.items() if texts[1].strip()}


def _read_tokens(root: pathlib.Path, place: Mapping[str, int]) -> dict[int, dict[str, Any]]:
    def pieces(found: Sequence[Sequence[Any]]) -> list[tuple[str, float | None, int]]:
        return [
            (tables.visible(text), share and float(f"{share:.4g}"), tone)
            for text, share, tone in incident.shaded(found)
        ]

    return {
        place[one["id"]]: {name: pieces(one[name]) for name in ("row", "answer")}
        | {"alike": len(one["alike"])}
        for one in artifacts.TOKEN_SHARES.current(root) or ()
    }


def pack(found: Explorer, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Returns the template's values: both ends of the ranking if not all rows fit.

    "text" is the compressed JSON in base64. Two thirds of the rows that fit have the highest
    scores. The histogram counts all rows. "num_unscored" counts the other rows without a score, and
    "left_out" counts those in the middle of the ranking. "queries" are those with single scores on
    the page. "num_queries" counts all traced ones. "groups" has the positions by behavior.
    """
    number = len(found.score_N)
    size, text = number, ""
    while True:
        chosen = tails(found.score_N, size)
        content = _content(found, chosen)
        # In base64 no markup can be in it. Equal content gives equal bytes.
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
        text = base64.b64encode(packed).decode()
        if len(text) <= most_bytes or size <= 1:
            break
        size = max(1, min(size - 1, int(0.95 * size * most_bytes / len(text))))
    texts = [found.columns[name][n] for name in ("asked", "said") for n in chosen.tolist()]
    num_unscored = int(np.isneginf(np.delete(found.score_N, chosen)).sum())
    return {
        "text": text,
        "num_shown": len(chosen),
        "num_rows": number,
        "num_unscored": num_unscored,
        "left_out": number - len(chosen) - num_unscored,
        "num_cut": sum(len(part) > _MOST_TEXT for part in texts),
        "has_labels": any(label is not None for label in found.columns["label"]),
        "sets": sorted({name for name in found.columns["set"] if name}),
        "queries": [asked for asked, _ in found.queries[: _num_queries(found, len(chosen))]],
        "num_queries": len(found.queries),
        "groups": _groups(found, len(chosen)),
        "strategy": found.strategy,
    }


def tails(score_N: Float[np.ndarray, " N"], size: int) -> Int[np.ndarray, " M"]:
    """Returns the positions of both ends of a ranking, best first; all if they fit.

    Rows with a score of minus infinity are in no ranking. They come last and only if all others
    fit.
    """
    order, num_scored = np.argsort(-score_N, kind="stable"), int((score_N > -np.inf).sum())
    if size >= num_scored:
        return order[:size]
    lowest = int(_LOWEST * size)
    return order[np.r_[: size - lowest, num_scored - lowest : num_scored]]


def _num_queries(found: Explorer, num_rows: int) -> int:
    """Returns the number of queries with single scores on a page; 0 for a single query."""
    if found.each_NQ is None or len(found.queries) < 2:
        return 0
    return min(found.each_NQ.shape[1], max(1, _MOST_PAIRS // max(1, num_rows)))


def _groups(found: Explorer, num_rows: int) -> tuple[tuple[int, ...], ...]:
    """Returns the queries with single scores on a page, by behavior."""
    shown = range(_num_queries(found, num_rows))
    parts = [tuple(n for n in group if n in shown) for group in found.behaviors]
    kept = tuple(part for part in parts if part)
    return kept if sum(map(len, kept)) == len(shown) else (tuple(shown),)


def _content(found: Explorer, chosen: Int[np.ndarray, " M"]) -> dict[str, Any]:
    """Returns the script's data: a list for each column and the values that all rows share."""
    places, score_N = chosen.tolist(), found.score_N
    columns: dict[str, list[Any]] = {
        name: [_shown(values[n]) for n in places]
        for name, values in found.columns.items()
        if any(value is not None for value in values)
    }
    columns["score"] = [
        float(f"{score_N[n]:.6g}") if score_N[n] > -np.inf else None for n in places
    ]
    count, each_NQ = _num_queries(found, len(places)), found.each_NQ
    if count and each_NQ is not None:
        step_MQ = np.rint(each_NQ[chosen, :count].astype(np.float64) / _STEP).astype(int)
        # A row without a gradient has no score with one query either.
        columns["each"] = [
            steps if score_N[n] > -np.inf else None
            for n, steps in zip(places, step_MQ.tolist(), strict=True)
        ]
    at = {n: place for place, n in enumerate(places)}
    kept_N = score_N[score_N > -np.inf]
    counts, edges = np.histogram(kept_N, bins=_BINS)
    return {
        "columns": columns,
        "step": _STEP,
        "left_out": len(kept_N) - int((score_N[chosen] > -np.inf).sum()),
        "has_lines": found.has_lines,
        "queries": [
            [tables.visible(text[:_MOST_TEXT]) for text in query]
            for query in found.queries[: count or 1]
        ],
        "tokens": {at[n]: told for n, told in found.tokens.items() if n in at},
        "histogram": {
            "low": float(edges[0]),
            "high": float(edges[-1]),
            "counts": counts.tolist(),
        },
    }


def _shown(value: Any) -> Any:
    """Returns a text without invisible characters, cut to the shown length."""
    if not isinstance(value, str):
        return value
    more = len(value) - _MOST_TEXT
    mark = f" … ({more:,} characters more)" if more > 0 else ""
    return tables.visible(value[:_MOST_TEXT]) + mark


def script() -> str:
    """Returns the grid below its license and the code that fills it with the rows."""
    license_text = (_GRID / "LICENSE").read_text(encoding="utf-8")
    grid = _inlined("tabulator.min.js")
    own = (FOLDER / "explorer.js").read_text(encoding="utf-8")
    return f"/*! {license_text} */\n{grid}\n{own}"


def style() -> str:
    """Returns the style of the grid and its changes for the page."""
    return _inlined("tabulator.min.css") + (FOLDER / "explorer.css").read_text(encoding="utf-8")


def _inlined(name: str) -> str:
    """Returns a file of the grid without the address of its source map, which is not here."""
    text = (_GRID / name).read_text(encoding="utf-8")
    return re.sub(r"(?://|/\*)# sourceMappingURL=\S+(?: \*/)?", "", text)
