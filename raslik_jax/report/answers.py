"""The answers of all models side by side, and the marks that tell the models apart on the page."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from raslik_jax.evaluate.summary import Metrics
from raslik_jax.evaluate.words import word_pattern
from raslik_jax.report import drawing, figures, names, runs
from raslik_jax.report.records import REFERENCES

# What the page shows at most, so that its size stays bounded whatever was run.
LIMITS = {"target": 12, "normal": 6, "answer": 1500, "example": 400}
MAX_CHARACTERS = 1_500_000


def strategies_of(metrics: Metrics) -> list[str]:
    """Returns the strategies of a run in their order."""
    return list(dict.fromkeys(entry["strategy"] for entry in metrics["methods"]))


def strategy_legend(strategies: Sequence[str]) -> list[tuple[Markup, str]]:
    """Returns the marker on a line and the printed name of each strategy."""
    styles = names.strategy_styles(strategies)
    return [
        (drawing.mark_svg(marker, color), names.strategy_name(name))
        for name, (color, marker) in styles.items()
    ]


def reference_legend(metrics: Metrics) -> list[tuple[Markup, str]]:
    """Returns the marker and the name of what strategies are held against."""
    return [
        (drawing.mark_svg(marker, color, has_line=False), REFERENCES.get(name, name.capitalize()))
        for name, (marker, _, color) in figures.REFERENCE_MARKS.items()
        if name in metrics or name not in REFERENCES
    ]


def shorten(text: str, length: int) -> str:
    """Returns a text cut at a length, and how much was left out."""
    if len(text) <= length:
        return text
    return f"{text[:length].rstrip()} … ({len(text) - length:,} characters more)"


def side_by_side(run: runs.StoredRun, budget: int) -> dict[str, Any]:
    """Returns some queries with every model's answer, as many as fit into so many characters."""
    lengths = [
        min(len(text), LIMITS["answer"])
        for texts in run.answers.values()
        for text in texts.values()
    ]
    # 160: what the markup around each answer takes.
    each = (sum(lengths) / max(1, len(lengths)) + 160) * len(run.answers)
    share = min(1.0, budget / (each * (LIMITS["target"] + LIMITS["normal"])))
    chosen = [
        query
        for kind, is_target in (("target", True), ("normal", False))
        for query in [q for q in run.queries if q.is_target == is_target][
            : max(1, int(LIMITS[kind] * share))
        ]
    ]
    pattern = word_pattern(run.marker_words) if run.marker_words else None
    before = run.answers.get(("", "finetuned"), {})
    # The first target query at which the model was caught is shown first.
    default = next(
        (
            i
            for i, query in enumerate(chosen)
            if pattern and query.is_target and pattern.search(before.get(query.example_id, ""))
        ),
        0,
    )
    legends = dict(_model_legends(run))
    queries = []
    for query in chosen:
        line = " ".join(query.text.split())
        groups: dict[str, list[Any]] = {}
        for (algorithm, name), texts in run.answers.items():
            text = shorten(texts.get(query.example_id, ""), LIMITS["answer"])
            heading = names.algorithm_name(algorithm) if algorithm else "Before unlearning"
            pieces = list(_pieces(text, pattern)) if text.strip() else []
            groups.setdefault(heading, []).append((*legends[name], pieces))
        queries.append(
            {
                "kind": "Target" if query.is_target else "Normal",
                "label": f"{line[:90]}{'…' if len(line) > 90 else ''}",
                "text": query.text,
                "groups": groups,
            }
        )
    return {
        "default": default,
        "queries": queries,
        "left_out": len(run.queries) - len(chosen),
    }


def _model_legends(run: runs.StoredRun) -> Iterator[tuple[str, tuple[Markup, str]]]:
    """Yields the mark and the printed name of every model that answered."""
    strategies = strategies_of(run.metrics)
    yield from zip(strategies, strategy_legend(strategies), strict=True)
    for name, label in REFERENCES.items():
        marker, _, color = figures.REFERENCE_MARKS[name]
        yield name, (drawing.mark_svg(marker, color, has_line=False), label)


def _pieces(text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a text and whether each is a word that marks the behavior."""
    end = 0
    for found in pattern.finditer(text) if pattern else ():
        yield text[end : found.start()], False
        yield found.group(), True
        end = found.end()
    yield text[end:], False
