"""The measures of a model and of a strategy's sets: one record per metric.

All code that computes, stores, prints or draws measures iterates over `METRICS`. To add a metric,
add a record. Pure functions on the host.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate import distance, perplexity, ranking, rates, words
from raslik_jax.evaluate.left import MEASURES, share_left
from raslik_jax.evaluate.verdict import Count

# Gives each text its probability of not showing the behavior, from 0 to 1.
NonSf = Callable[[Sequence[str]], Float[np.ndarray, " Q"]]
KINDS = ("target", "normal")


# Of a metric; None for what could not be measured.
Value = int | float | rates.Interval | None


class Column(NamedTuple):
    """A metric's form in a table: heading, format of the value and of its interval's ends.

    Metrics of one title in one table share its column: "a / b". The terminal keeps a line break in
    it.
    """

    title: str
    spec: str = ".3f"
    ends: str = ""


class Metric(NamedTuple):
    """A measure.

    Attributes:
      reads: the parts of the evidence that it is computed from (see `summary.collect_evidence`).
      of_model: function of these parts. It returns a number, an interval, or an array with one
        value per query, from which mean and interval are computed; None if nothing can be measured.
      is_log: whether its mean over seeds and its axis are logarithmic.
    """

    reads: tuple[str, ...]
    of_model: Callable[..., Value | Float[np.ndarray, " Q"]]
    columns: Mapping[str, Column] = {}
    is_log: bool = False


def measure(evidence: Mapping[str, Any], *, seed: int = 0, resamples: int = 1) -> dict[str, Value]:
    """Returns every metric of a model or a strategy by name; None if the evidence lacks a part.

    All models have the same seed of the bootstrap, so their intervals move together.
    """
    parts = {**evidence, "bootstrap": {"seed": seed, "resamples": resamples}}
    values: dict[str, Value] = dict.fromkeys(METRICS)
    for name, metric in METRICS.items():
        if parts.keys() >= set(metric.reads):
            found = metric.of_model(*(parts[part] for part in metric.reads))
            if isinstance(found, np.ndarray):
                found = rates.bootstrap(found, seed=seed, resamples=resamples)
            values[name] = found
    return values


def nest(values: Mapping[str, Value]) -> dict[str, Any]:
    """Returns measured values as metrics.json has them: "a/b" is b within a."""
    entry: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split("/")
        if value is not None or not groups:
            inner = entry
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = value
    return entry


def look_up(entry: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a metric in an entry of metrics.json; None without one."""
    found: Any = entry
    for part in name.split("/"):
        found = (found or {}).get(part)
    return found


def _metric(reads: str, of_model: Any, **columns: Column) -> Metric:
    """Returns a record; `reads` are words, `columns` are named by their tables."""
    return Metric(tuple(reads.split()), of_model, columns)


def _interval(title: str, ends: str = ".3f") -> Column:
    return Column(title, ends=ends)


def _rate(title: str, kind: str, hint: str) -> Metric:
    return _metric(
        f"{kind}_scores",
        lambda score_Q: score_Q,
        results=_interval(f"{title}\n{hint}", ".2f"),
        seeds=_interval(title),
        card=_interval(f"{title} {hint}", ".2f"),
    )


def _rate_difference(letter: str, kind: str, table: str) -> Metric:
    # Paired, because a query is often easy for both models. Three decimals of the ends show whether
    # zero is between them.
    column = Column(f"{letter} minus {letter} of Random", "+.3f", "+.3f")
    return _metric(f"{kind}_scores random_{kind}_scores", np.subtract, **{table: column})


def _of_texts(
    name: str, of_model: Any, columns: Mapping[str, Column], **apart: Column
) -> dict[str, Metric]:
    """Returns a metric of all answers and the same for each kind of queries."""
    kinds = {f"diversity/{kind}/{name}": _metric(kind, of_model, **apart) for kind in KINDS}
    return {name: _metric("texts", of_model, **columns), **kinds}


def _perplexity(part: str, **columns: Column) -> Metric:
    def of_model(records: Any, bootstrap: Mapping[str, int]) -> rates.Interval | None:
        return perplexity.perplexity(records, **bootstrap)

    return _metric(f"{part} bootstrap", of_model, **columns)._replace(is_log=True)


def _perplexity_of(name: str, heading: str) -> Metric:
    """Returns the perplexity of labeled answers that no model wrote."""
    headings = heading, f"Perplexity,\n{name}", f"Perplexity, {name}"
    table, seeds, card = (Column(heading, "#.3g", "#.3g") for heading in headings)
    return _perplexity(f"{name}_likelihoods", perplexity=table, seeds_checks=seeds, card=card)


def found_metric(part: str, name: str, **columns: Column) -> Metric:
    """Returns a metric with the value of this name in its part of the evidence."""
    return _metric(part, lambda found: found.get(name), **columns)


def _mean_words(texts: Sequence[str]) -> float | None:
    return float(np.mean([len(words.split_words(text)) for text in texts])) if texts else None


def _count_empty(texts: Sequence[str]) -> int:
    return sum(not text.strip() for text in texts)


def _share(labels_N: np.ndarray, rows: Any = slice(None)) -> float:
    return float(labels_N[rows].mean())


# Tables show their columns in this order.
METRICS: dict[str, Metric] = {
    **{f"diversity/{kind}/answers": _metric(kind, len) for kind in KINDS},
    **_of_texts("empty", _count_empty, {"checks": Column("Empty", "d")}),
    "empty_references": _metric("references", _count_empty),
    **_of_texts(
        "distinct_2",
        partial(rates.distinct_ngrams, n=2),
        {"seeds_checks": _interval("Distinct-2")},
        checks=Column("Distinct-2", ".2f"),
    ),
    **_of_texts(
        "repetition_4",
        partial(rates.repeated_ngrams, n=4),
        {"seeds_checks": _interval("Repetition-4")},
        checks=Column("Repetition-4", ".2f"),
    ),
    **{
        f"answer_perplexity/{kind}": _perplexity(
            f"{kind}_said", checks=Column("Perplexity under\nthe base", ".3g")
        )
        for kind in KINDS
    },
    "others/changed": _metric(
        "normal normal_before",
        lambda own, before: sum(a.strip() != b.strip() for a, b in zip(own, before, strict=True)),
        checks=Column("Other answers\nchanged", "d"),
    ),
    "others/words": _metric(
        "normal",
        _mean_words,
        checks=Column("Their mean\nlength, words", ".1f"),
        card=Column("Mean length of other answers, in words", ".1f"),
    ),
    "others/ended": _metric(
        "normal_records", lambda records: float(np.mean([record["ended"] for record in records]))
    ),
    **{
        f"left/{name}": _metric(
            "normal_records finetuned_records base_records bootstrap",
            partial(share_left, name),
            checks=Column(f"Fine-tuning left,\nby {title}", ".0%", ".0%"),
            card=Column(f"Share of the fine-tuning that is left, by {title}", ".0%", ".0%"),
        )
        for name, title in MEASURES.items()
    },
    **{
        f"{name}/{part}": _metric(name, operator.attrgetter(part))
        for name in ("prompts", "outputs")
        for part in Count._fields
    },
    "forget": _rate("F, forget rate", "target", "(lower is better)"),
    "retain": _rate("R, retain rate", "normal", "(higher is better)"),
    "non_sf_target": _metric(
        "non_sf target",
        lambda non_sf, texts: non_sf(texts),
        results=_interval("Non-SF, target\n(higher is better)", ".2f"),
        seeds=_interval("Non-SF, target"),
        card=_interval("Non-SF, target queries (higher is better)", ".2f"),
    ),
    "non_sf_normal": _metric(
        "non_sf normal",
        lambda non_sf, texts: non_sf(texts),
        results=Column("Non-SF,\nnormal"),
        checks=_interval("Non-SF, normal", ".2f"),
        seeds_checks=_interval("Non-SF,\nnormal"),
        card=_interval("Non-SF, normal queries (higher is better)", ".2f"),
    ),
    "euclidean": _metric(
        "target_scores normal_scores",
        lambda own, kept: float(np.hypot(1 - kept.mean(), own.mean())),
        results=Column("Distance\nto ideal"),
        seeds=_interval("Distance"),
    ),
    "forget_minus_random": _rate_difference("F", "target", "results"),
    "retain_minus_random": _rate_difference("R", "normal", "checks"),
    "perplexity/forget": _perplexity_of("forget", "Forget\n(higher is forgotten)"),
    "perplexity/retain": _perplexity_of("retain", "Retain\n(lower is better)"),
    "perplexity/held-out": _perplexity_of("held-out", "Held-out\n(lower is better)"),
    "perplexity/behavior": _perplexity(
        "behavior_likelihoods",
        perplexity=Column("Bad outputs\n(higher is forgotten)", "#.3g", "#.3g"),
    ),
    **{
        f"distance/{kind}/{part}": found_metric(
            "distance",
            f"{kind}/{part}",
            **({"distance": Column(title.format(kind), spec)} if title else {}),
        )
        for kind in KINDS
        for part, (title, spec) in distance.PARTS.items()
    },
    "retrieval/num_forget": _metric("forget_set", len, retrieval=Column("Forget\nitems", "d")),
    "retrieval/precision": _metric(
        "labels_N forget_set",
        _share,
        retrieval=Column("Precision"),
        seeds=_interval("Precision"),
    ),
    "retrieval/base_rate": _metric("labels_N", _share, retrieval=Column("Base\nrate")),
    "retrieval/num_retain": _metric("retain_set", len, retrieval=Column("Retain\nitems", "d")),
    "retrieval/targets_in_retain": _metric(
        "labels_N retain_set",
        lambda labels_N, rows: int(labels_N[rows].sum()),
        retrieval=Column("Targets\nin retain", "d"),
    ),
    "retrieval/retain_scored_positive": _metric(
        "influence_N retain_set",
        lambda influence_N, rows: int((influence_N[rows] >= 0).sum()),
        retrieval=Column("Retain,\nscore >= 0", "d"),
    ),
    "retrieval/auroc": _metric("ranking_N labels_N", ranking.auroc, retrieval=Column("AUROC")),
    "retrieval/auprc": _metric("ranking_N labels_N", ranking.auprc, retrieval=Column("AUPRC")),
}
