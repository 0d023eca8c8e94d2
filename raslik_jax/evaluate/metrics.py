"""What is measured of a model and of a strategy's sets: one record per metric.

Whoever computes, stores, prints or draws measures walks over `METRICS`. A record says what its
metric reads, how the value follows from that, and how which tables show it: adding a metric adds a
record. Pure functions, on the host.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float, Shaped

from raslik_jax.data.corpora.tofu import QUESTION_SETS
from raslik_jax.evaluate import pareto, perplexity, ranking, rates, tofu_metrics

# Gives each text its probability of not showing the behavior, from 0 to 1.
NonSf = Callable[[Sequence[str]], Float[np.ndarray, " Q"]]
Better = Literal["lower", "higher"]
KINDS = ("target", "normal")


class IntervalEntry(TypedDict):
    """A mean and the ends of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


# Of a metric; None for what could not be measured.
Value = int | float | IntervalEntry | None


class Column(NamedTuple):
    """How a table shows a metric. Metrics of one title in one table share its column: "a / b".

    Attributes:
      title: the heading; a line break in it is kept in the terminal.
      spec: format of the value.
      ends: format of the interval's ends; "" for the value alone.
    """

    title: str
    spec: str = ".3f"
    ends: str = ""


class Metric(NamedTuple):
    """A measure.

    Attributes:
      title: what it is called.
      unit: what its numbers are.
      better: which way is better; None where that depends, or where it only counts.
      reads: the parts of the evidence that it is computed from (see
        `summary.collect_evidence`), or for `of_pool` the metrics.
      of_model: takes what it reads. Returns a number, an interval, or an array of a value for each
        query, whose mean and interval are then taken; None where there is nothing to measure.
      of_pool: takes an array of each metric that it reads, over models that are compared. Returns
        an array of a number for each model, None where they cannot be compared.
      columns: how tables show it, by table.
      is_log: it is averaged over seeds by its logarithm, and drawn on such an axis.
    """

    title: str
    unit: str
    better: Better | None
    reads: tuple[str, ...]
    of_model: (
        Callable[..., int | float | rates.Interval | Float[np.ndarray, " Q"] | None] | None
    ) = None
    of_pool: Callable[..., Shaped[np.ndarray, " M"] | None] | None = None
    columns: Mapping[str, Column] = {}
    is_log: bool = False


def measure(evidence: Mapping[str, Any], *, seed: int = 0, resamples: int = 1) -> dict[str, Value]:
    """Returns every metric of a model or a strategy by name, None where the evidence lacks it.

    Args:
      evidence: what was recorded, by part.
      seed: of the bootstrap; one for all models, so that their intervals move together.
      resamples: draws of the bootstrap.
    """
    bootstrap = partial(rates.bootstrap, seed=seed, resamples=resamples)
    parts = {**evidence, "bootstrap": {"seed": seed, "resamples": resamples}}
    values: dict[str, Value] = dict.fromkeys(METRICS)
    for name, metric in METRICS.items():
        if metric.of_model and parts.keys() >= set(metric.reads):
            found = metric.of_model(*(parts[part] for part in metric.reads))
            found = bootstrap(found) if isinstance(found, np.ndarray) else found
            values[name] = as_entry(found) if isinstance(found, rates.Interval) else found
    return values


def as_entry(interval: rates.Interval) -> IntervalEntry:
    """Returns an interval as metrics.json holds it."""
    return IntervalEntry(mean=interval.mean, low=interval.low, high=interval.high)


def measure_pool(pool: Sequence[Mapping[str, Any]]) -> list[dict[str, Value]]:
    """Returns the metrics that compare the models of a pool with each other, for each of them."""
    values: list[dict[str, Value]] = [{} for _ in pool]
    for name, metric in METRICS.items():
        if metric.of_pool:
            parts = [[mean_of(look_up(entry, part)) for entry in pool] for part in metric.reads]
            is_known = all(mean is not None for part in parts for mean in part)
            found = metric.of_pool(*map(np.array, parts)) if is_known else None
            for place, own in enumerate(values):
                own[name] = None if found is None else found[place].item()
    return values


def nest(values: Mapping[str, Value]) -> dict[str, Any]:
    """Returns values as metrics.json holds them: "a/b" is b within a, where it was measured."""
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
    """Returns the value of a metric in an entry of metrics.json; None where there is none."""
    found: Any = entry
    for part in name.split("/"):
        found = (found or {}).get(part)
    return found


def mean_of(value: Value) -> float | None:
    """Returns a number, or the mean of an interval."""
    return value["mean"] if isinstance(value, dict) else value


def _difference(own: rates.PairScores, other: rates.PairScores) -> Float[np.ndarray, " Q"] | None:
    """Returns the paired differences.

    Queries are resampled then, not values: one that is easy for a model tends to be easy for the
    other, so the difference is known better than either mean.
    """
    values, base = (dict(zip(scores.ids, scores.rouge_Q, strict=True)) for scores in (own, other))
    # Where empty answers are dropped the two may lack different queries: what both kept is paired.
    shared = sorted(values.keys() & base.keys())
    return np.array([values[i] - base[i] for i in shared]) if shared else None


def _distance(target: rates.PairScores, normal: rates.PairScores) -> float:
    return float(np.hypot(1 - normal.rouge_Q.mean(), target.rouge_Q.mean()))


def _of_mahalanobis(
    retain_M: np.ndarray, forget_M: np.ndarray, *, name: str
) -> Shaped[np.ndarray, " M"] | None:
    """Returns a field of the distances, one number a model; None where there are none."""
    if not pareto.have_covariance(retain_M, forget_M):
        return None
    found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
    return np.broadcast_to(getattr(found, name), retain_M.shape)


def _metric(
    title: str,
    unit: str,
    better: Better | None,
    reads: str,
    of_model: Any = None,
    of_pool: Any = None,
    **columns: Column,
) -> Metric:
    """Returns a record; `reads` are words, `columns` are named by their tables."""
    return Metric(title, unit, better, tuple(reads.split()), of_model, of_pool, columns)


def _rate(letter: str, name: str, kind: str, better: Better) -> Metric:
    title, hint = f"{letter}, {name} rate", f"({better} is better)"
    return _metric(
        title,
        "mean ROUGE-L F1",
        better,
        f"{kind}_scores",
        lambda scores: scores.rouge_Q,
        results=Column(f"{title}\n{hint}", ends=".2f"),
        seeds=Column(title, ends=".3f"),
        card=Column(f"{title} {hint}", ends=".2f"),
    )


def _rate_difference(letter: str, kind: str, better: Better, table: str) -> Metric:
    # Three decimals of the ends say whether zero lies between them.
    column = Column(f"{letter} minus {letter} of Random", "+.3f", "+.3f")
    reads = f"{kind}_scores random_{kind}_scores"
    return _metric(column.title, "ROUGE-L F1", better, reads, _difference)._replace(
        columns={table: column}
    )


def _counts(name: str, metric: Metric, **apart: Column) -> dict[str, Metric]:
    """Returns a metric of all answers, and the same of those to each kind of queries."""
    return {name: metric} | {
        f"diversity/{kind}/{name}": metric._replace(
            title=f"{metric.title}, {kind} queries", reads=(kind,), columns=apart
        )
        for kind in KINDS
    }


def _perplexity(title: str, better: Better, part: str, **columns: Column) -> Metric:
    return _metric(
        title,
        "perplexity",
        better,
        f"{part} bootstrap",
        lambda records, bootstrap: perplexity.perplexity(records, **bootstrap),
        **columns,
    )._replace(is_log=True)


def _perplexity_of(name: str, title: str, better: Better) -> Metric:
    """Returns the perplexity of labeled answers, which no model wrote."""
    hint = {"higher": "higher is forgotten", "lower": "lower is better"}[better]
    headings = (f"{title}\n({hint})", f"Perplexity,\n{name}", f"Perplexity, {name}")
    table, seeds, card = (Column(heading, "#.3g", "#.3g") for heading in headings)
    part = f"{name}_likelihoods"
    return _perplexity(card.title, better, part, perplexity=table, seeds_checks=seeds, card=card)


def _tofu(name: str, title: str, unit: str, **columns: Column) -> Metric:
    return _metric(title, unit, "higher", "tofu", lambda found: found.get(name), **columns)


def _count_empty(texts: Sequence[str]) -> int:
    return sum(not text.strip() for text in texts)


def _mark(non_sf: NonSf, texts: Sequence[str]) -> Float[np.ndarray, " Q"]:
    return non_sf(texts)


_distinct, _repeated = partial(rates.distinct_ngrams, n=2), partial(rates.repeated_ngrams, n=4)
# Tables show their columns in this order.
METRICS: dict[str, Metric] = {
    **{
        f"diversity/{kind}/answers": _metric(f"Answers, {kind} queries", "answers", None, kind, len)
        for kind in KINDS
    },
    **_counts(
        "empty",
        _metric("Empty", "answers", "lower", "texts", _count_empty, checks=Column("Empty", "d")),
    ),
    "empty_references": _metric("Empty references", "texts", None, "references", _count_empty),
    **_counts(
        "distinct_2",
        _metric(
            "Distinct-2",
            "share of word pairs",
            "higher",
            "texts",
            _distinct,
            seeds_checks=Column("Distinct-2", ends=".3f"),
        ),
        checks=Column("Distinct-2", ".2f"),
    ),
    **_counts(
        "repetition_4",
        _metric(
            "Repetition-4",
            "share of runs of four words",
            "lower",
            "texts",
            _repeated,
            seeds_checks=Column("Repetition-4", ends=".3f"),
        ),
        checks=Column("Repetition-4", ".2f"),
    ),
    **{
        f"answer_perplexity/{kind}": _perplexity(
            f"Perplexity of {kind} answers under the backbone",
            "lower",
            f"{kind}_said",
            checks=Column("Perplexity under\nthe backbone", ".3g"),
        )
        for kind in KINDS
    },
    "forget": _rate("F", "forget", "target", "lower"),
    "retain": _rate("R", "retain", "normal", "higher"),
    "non_sf_target": _metric(
        "Non-SF, target queries",
        "mean probability",
        "higher",
        "non_sf target",
        _mark,
        results=Column("Non-SF, target\n(higher is better)", ends=".2f"),
        seeds=Column("Non-SF, target", ends=".3f"),
        card=Column("Non-SF, target queries (higher is better)", ends=".2f"),
    ),
    "non_sf_normal": _metric(
        "Non-SF, normal queries",
        "mean probability",
        "higher",
        "non_sf normal",
        _mark,
        results=Column("Non-SF,\nnormal"),
        checks=Column("Non-SF, normal", ends=".2f"),
        seeds_checks=Column("Non-SF,\nnormal", ends=".3f"),
        card=Column("Non-SF, normal queries (higher is better)", ends=".2f"),
    ),
    "euclidean": _metric(
        "Distance to ideal",
        "distance",
        "lower",
        "target_scores normal_scores",
        _distance,
        results=Column("Distance\nto ideal"),
        distances=Column("Euclidean"),
        seeds=Column("Distance", ends=".3f"),
    ),
    "euclidean_min_max": _metric(
        "Distance to ideal, min-max",
        "distance",
        "lower",
        "retain forget",
        of_pool=partial(pareto.euclidean_to_ideal, rescale=True),
        distances=Column("Euclidean,\nmin-max"),
    ),
    "mahalanobis/distance": _metric(
        "D_mah",
        "distance",
        "lower",
        "retain forget",
        of_pool=partial(_of_mahalanobis, name="distance_M"),
        results=Column("D_mah"),
        distances=Column("D_mah"),
    ),
    "mahalanobis/is_negative": _metric(
        "R and F are negatively correlated",
        "flag",
        None,
        "retain forget",
        of_pool=partial(_of_mahalanobis, name="is_negative"),
    ),
    "mahalanobis/condition_number": _metric(
        "Condition number",
        "ratio",
        None,
        "retain forget",
        of_pool=partial(_of_mahalanobis, name="condition_number"),
        distances=Column("Condition\nnumber", ".3g"),
    ),
    "forget_minus_random": _rate_difference("F", "target", "lower", "results"),
    "retain_minus_random": _rate_difference("R", "normal", "higher", "checks"),
    "perplexity/forget": _perplexity_of("forget", "Forget", "higher"),
    "perplexity/retain": _perplexity_of("retain", "Retain", "lower"),
    "perplexity/held-out": _perplexity_of("held-out", "Held-out", "lower"),
    "perplexity/behavior": _perplexity(
        "Perplexity, bad outputs",
        "higher",
        "behavior_likelihoods",
        perplexity=Column("Bad outputs\n(higher is forgotten)", "#.3g", "#.3g"),
    ),
    "tofu/forget_quality": _tofu(
        "forget_quality",
        "TOFU, forget quality",
        "p-value",
        tofu=Column("Forget\nquality", ".3g"),
        seeds_checks=Column("TOFU, forget\nquality", ends=".3f"),
    ),
    "tofu/model_utility": _tofu(
        "model_utility",
        "TOFU, model utility",
        "harmonic mean",
        tofu=Column("Model\nutility"),
        seeds_checks=Column("TOFU, model\nutility", ends=".3f"),
    ),
    **{
        f"tofu/sets/{name}/{part}": _tofu(
            f"sets/{name}/{part}", f"TOFU, {title.lower()}: {part}", "mean", tofu=Column(title)
        )
        for name, title in zip(
            QUESTION_SETS,
            ("Forget set", "Retain set", "Real authors", "World facts"),
            strict=True,
        )
        for part in tofu_metrics.PARTS
    },
    "retrieval/num_forget": _metric(
        "Forget items", "examples", None, "forget_set", len, retrieval=Column("Forget\nitems", "d")
    ),
    "retrieval/precision": _metric(
        "Precision",
        "share",
        "higher",
        "labels_N forget_set",
        lambda labels_N, rows: float(labels_N[rows].mean()),
        retrieval=Column("Precision"),
        seeds=Column("Precision", ends=".3f"),
    ),
    "retrieval/base_rate": _metric(
        "Base rate",
        "share",
        None,
        "labels_N",
        lambda labels_N: float(labels_N.mean()),
        retrieval=Column("Base\nrate"),
    ),
    "retrieval/num_retain": _metric(
        "Retain items", "examples", None, "retain_set", len, retrieval=Column("Retain\nitems", "d")
    ),
    "retrieval/targets_in_retain": _metric(
        "Targets in the retain set",
        "examples",
        "lower",
        "labels_N retain_set",
        lambda labels_N, rows: int(labels_N[rows].sum()),
        retrieval=Column("Targets\nin retain", "d"),
    ),
    "retrieval/retain_scored_positive": _metric(
        "Retain items with a score of 0 or above",
        "examples",
        None,
        "influence_N retain_set",
        lambda influence_N, rows: int((influence_N[rows] >= 0).sum()),
        retrieval=Column("Retain,\nscore >= 0", "d"),
    ),
    "retrieval/auroc": _metric(
        "AUROC", "area", "higher", "ranking_N labels_N", ranking.auroc, retrieval=Column("AUROC")
    ),
    "retrieval/auprc": _metric(
        "AUPRC", "area", "higher", "ranking_N labels_N", ranking.auprc, retrieval=Column("AUPRC")
    ),
}
