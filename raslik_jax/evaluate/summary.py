"""From generated texts to the entries of metrics.json: pure functions, on the host.

The shapes of metrics.json are declared here, where its numbers are made; the reports read them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.evaluate import judgment, pareto, rates, tofu_metrics

# The strategy that every other one is compared with; metrics.json names it in its keys.
BASELINE = "random"
# Gives each text its probability of not showing the behavior, from 0 to 1.
NonSf = Callable[[Sequence[str]], Float[np.ndarray, " Q"]]


class IntervalEntry(TypedDict):
    """A mean and the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float


class DifferenceEntry(IntervalEntry):
    """A paired difference to the baseline; `share_below_zero` of the resamples were negative."""

    share_below_zero: float


class DiversityEntry(TypedDict):
    """How varied the answers to one kind of queries are (see `rates`)."""

    answers: int
    empty: int
    distinct_2: float
    repetition_4: float


class ModelEntry(TypedDict):
    """What the outputs of one model say, over target queries and normal queries.

    F, R and the distance are None where there are no queries to take them on, and so is Non-SF
    (`non_sf_`) where nothing marks the behavior. `diversity` has an entry for "target" and for
    "normal" queries, `distinct_2` and `repetition_4` are over all answers; `perplexity` is by set
    (see `perplexity.SETS`), `answer_perplexity` that of the model's own answers under the backbone,
    by kind of query; `judgment` says what became of an unlearned model; `tofu` is there where the
    corpus is TOFU.
    """

    forget: IntervalEntry | None
    retain: IntervalEntry | None
    non_sf_target: IntervalEntry | None
    non_sf_normal: IntervalEntry | None
    empty: int
    empty_references: int
    distinct_2: float
    repetition_4: float
    euclidean: float | None
    diversity: NotRequired[dict[str, DiversityEntry]]
    perplexity: NotRequired[dict[str, IntervalEntry]]
    answer_perplexity: NotRequired[dict[str, IntervalEntry]]
    judgment: NotRequired[judgment.JudgmentEntry]
    tofu: NotRequired[tofu_metrics.TofuEntry]


def rate_of(entry: ModelEntry, name: Literal["forget", "retain"]) -> IntervalEntry:
    """Returns F or R of a model of a run that has queries for it.

    Raises:
      ValueError: the run has none.
    """
    found = entry[name]
    if found is None:
        kind = "target" if name == "forget" else "normal"
        raise ValueError(f"the {name} rate needs {kind} queries, got a run without: add some")
    return found


class MahalanobisEntry(TypedDict):
    """D_mah of one method, with what tells how far to trust it (see `pareto.Mahalanobis`)."""

    distance: float
    condition_number: float
    is_negative: bool


class MethodEntry(ModelEntry):
    """A model unlearned with one strategy's sets by one algorithm, after one epoch.

    `pareto`, `tie`, `euclidean_min_max` and `mahalanobis` compare it with the other strategies of
    the same algorithm and epoch (`mark_frontier`); a model that is judged damaged is not
    Pareto-optimal. They are None without F or R, `mahalanobis` also for fewer than 5 models.
    """

    strategy: str
    algorithm: str
    epoch: int
    forget_minus_random: DifferenceEntry | None
    retain_minus_random: DifferenceEntry | None
    pareto: bool | None
    tie: bool | None
    euclidean_min_max: float | None
    mahalanobis: MahalanobisEntry | None


class RetrievalEntry(TypedDict):
    """What one strategy retrieved, held against the labels where there are any.

    `retain_scored_positive` counts the retain items whose score is not below zero: they are not
    anti-aligned with the queries. A strategy that ranks nothing, such as a random one, has no
    AUROC and no AUPRC.
    """

    num_forget: int
    num_retain: int
    num_queries: int
    retain_scored_positive: NotRequired[int]
    precision: NotRequired[float]
    base_rate: NotRequired[float]
    targets_in_retain: NotRequired[int]
    auroc: NotRequired[float | None]
    auprc: NotRequired[float | None]


class Metrics(TypedDict):
    """All of metrics.json: what the reports read.

    `settings` is the whole config that the numbers were measured with, `versions` what measured.
    `reference` names whose answers F and R are taken against: finetuned (also where it is not
    given), backbone or gold. `chosen` is true where each method stands once, at a learning rate and
    epoch that were chosen on other queries.
    `non_sf` says by what Non-SF is measured, words (also where it is not given) or classifier, and
    how well the classifier does; it is None where nothing marks the behavior. `behavior` says how
    far the behavior was there before unlearning, None where nothing measured it.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    versions: NotRequired[dict[str, str]]
    reference: NotRequired[str]
    chosen: NotRequired[bool]
    non_sf: NotRequired[dict[str, Any] | None]
    behavior: NotRequired[judgment.BehaviorEntry | None]
    corpus: dict[str, Any]
    finetuned: ModelEntry
    backbone: NotRequired[ModelEntry]
    retrieval: dict[str, RetrievalEntry]
    methods: list[MethodEntry]


class Outputs(NamedTuple):
    """The texts one model gave, by query id.

    Attributes:
      target: answers to the held-out target queries, which the forget rate is taken on.
      normal: answers to the held-out normal queries, which the retain rate is taken on.
    """

    target: Mapping[str, str]
    normal: Mapping[str, str]


class Variant(NamedTuple):
    """Which unlearned model it is: strategy of its sets, algorithm, epoch (from 1)."""

    strategy: str
    algorithm: str
    epoch: int


class Evaluation(NamedTuple):
    """The per-query values of one model's outputs, from which every number of an entry comes.

    Attributes:
      forget: ROUGE-L F1 against the references on target queries; None where there are none.
      retain: the same on normal queries.
      non_sf_target_Q: probability of each target answer not to show the behavior; None where
        nothing marks it.
      non_sf_normal_Q: the same of each normal answer.
      distinct_2: distinct-2 over all answers.
      repetition_4: seq-rep-4 over all answers.
      diversity: the same by kind of query, "target" and "normal".
    """

    forget: rates.PairScores | None
    retain: rates.PairScores | None
    non_sf_target_Q: Float[np.ndarray, " target"] | None
    non_sf_normal_Q: Float[np.ndarray, " normal"] | None
    distinct_2: float
    repetition_4: float
    diversity: Mapping[str, DiversityEntry]


def evaluate_outputs(
    predictions: Outputs, references: Outputs, *, non_sf: NonSf | None, drop_empty: bool = False
) -> Evaluation:
    """Returns the per-query values of one model's outputs, paired with references by id.

    Args:
      predictions: the model's answers.
      references: greedy answers of the fine-tuned model before unlearning to the same queries.
      non_sf: gives each text its probability of not showing the behavior, for example
        `functools.partial(rates.non_sf_by_words, vocabulary=...)`; None where nothing marks it.
      drop_empty: leave empty predictions out of the two rates, as the paper does. Non-SF and
        diversity always see every answer.

    Returns:
      The values, in order of query id.

    Raises:
      ValueError: as `rates.score_pairs`.
    """

    def paired(own: Mapping[str, str], other: Mapping[str, str]) -> rates.PairScores | None:
        return rates.score_pairs(own, other, drop_empty=drop_empty) if own or other else None

    target = [predictions.target[i] for i in sorted(predictions.target)]
    normal = [predictions.normal[i] for i in sorted(predictions.normal)]
    parts = {"target": target, "normal": normal}
    marked = {name: non_sf(texts) if non_sf and texts else None for name, texts in parts.items()}
    return Evaluation(
        forget=paired(predictions.target, references.target),
        retain=paired(predictions.normal, references.normal),
        non_sf_target_Q=marked["target"],
        non_sf_normal_Q=marked["normal"],
        distinct_2=rates.distinct_ngrams(target + normal, n=2),
        repetition_4=rates.repeated_ngrams(target + normal, n=4),
        diversity={name: _diversity(texts) for name, texts in parts.items() if texts},
    )


def _diversity(texts: Sequence[str]) -> DiversityEntry:
    return DiversityEntry(
        answers=len(texts),
        empty=sum(not text.strip() for text in texts),
        distinct_2=rates.distinct_ngrams(texts, n=2),
        repetition_4=rates.repeated_ngrams(texts, n=4),
    )


def summarize(evaluation: Evaluation, *, seed: int, resamples: int = 10_000) -> ModelEntry:
    """Returns the entry of one model: its rates with 95 % intervals, and its checks.

    Args:
      evaluation: the per-query values.
      seed: of the bootstrap.
      resamples: draws of the bootstrap.

    Returns:
      A dict that JSON can hold.
    """

    def interval(values_Q: np.ndarray | None) -> IntervalEntry | None:
        if values_Q is None:
            return None
        found = rates.bootstrap_interval(values_Q, seed=seed, resamples=resamples)
        return IntervalEntry(mean=found.mean, low=found.low, high=found.high)

    pairs = [scores for scores in (evaluation.forget, evaluation.retain) if scores]
    forget = interval(evaluation.forget and evaluation.forget.rouge_Q)
    retain = interval(evaluation.retain and evaluation.retain.rouge_Q)
    distance = np.hypot(1 - retain["mean"], forget["mean"]) if forget and retain else None
    return ModelEntry(
        forget=forget,
        retain=retain,
        non_sf_target=interval(evaluation.non_sf_target_Q),
        non_sf_normal=interval(evaluation.non_sf_normal_Q),
        empty=sum(scores.num_empty for scores in pairs),
        empty_references=sum(scores.num_empty_references for scores in pairs),
        distinct_2=evaluation.distinct_2,
        repetition_4=evaluation.repetition_4,
        euclidean=None if distance is None else float(distance),
        diversity=dict(evaluation.diversity),
    )


def compare_methods(
    evaluations: Mapping[Variant, Evaluation],
    *,
    seed: int,
    resamples: int = 10_000,
    across_epochs: bool = False,
) -> list[MethodEntry]:
    """Returns the entries of all unlearned models, with their differences to Random.

    The frontier among them is for `mark_frontier`, after each was judged.

    Args:
      evaluations: the per-query values of each unlearned model, all on the same queries.
      across_epochs: compare within the algorithm, each strategy at its one epoch, which was chosen
        beforehand on other queries.
      seed: of the bootstrap; one seed for all, so that intervals are comparable.
      resamples: draws of the bootstrap.

    Returns:
      One entry per model, in the order given. Random's own differences to Random are None,
      and all are where a block of algorithm and epoch has no Random.
    """
    entries = []
    for variant, evaluation in evaluations.items():
        epoch = None if across_epochs else variant.epoch
        reference = next(
            (
                found
                for other, found in evaluations.items()
                if (other.strategy, other.algorithm) == (BASELINE, variant.algorithm)
                and epoch in (None, other.epoch)
            ),
            None,
        )
        other = None if variant.strategy == BASELINE else reference
        entries.append(
            MethodEntry(
                strategy=variant.strategy,
                algorithm=variant.algorithm,
                epoch=variant.epoch,
                **summarize(evaluation, seed=seed, resamples=resamples),
                forget_minus_random=other
                and _difference(evaluation.forget, other.forget, seed, resamples),
                retain_minus_random=other
                and _difference(evaluation.retain, other.retain, seed, resamples),
                pareto=None,
                tie=None,
                euclidean_min_max=None,
                mahalanobis=None,
            )
        )
    return entries


def mark_frontier(
    entries: Sequence[MethodEntry], *, across_epochs: bool = False
) -> list[MethodEntry]:
    """Returns the entries with their places among the models of one algorithm and epoch.

    A damaged model is no candidate: it is not Pareto-optimal and dominates none. It stays in the
    pool that distances are taken over.

    Args:
      entries: from `compare_methods`, judged where there was anything to judge by.
      across_epochs: as there.

    Raises:
      ValueError: across_epochs with a strategy at more than one epoch.
    """
    blocks: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position, entry in enumerate(entries):
        blocks[entry["algorithm"], 0 if across_epochs else entry["epoch"]].append(position)
    marked = [entry.copy() for entry in entries]
    for positions in blocks.values():
        block = [marked[position] for position in positions]
        if len({entry["strategy"] for entry in block}) < len(block):
            names = [(entry["strategy"], entry["epoch"]) for entry in block]
            raise ValueError(f"each strategy must have one epoch, got {names}: choose one")
        points = [(e["retain"], e["forget"]) for e in block]
        if any(retain is None or forget is None for retain, forget in points):
            continue
        retain_M = np.array([retain["mean"] for retain, _ in points if retain])
        forget_M = np.array([forget["mean"] for _, forget in points if forget])
        rescaled_M = pareto.euclidean_to_ideal(retain_M, forget_M, rescale=True)
        distances = _mahalanobis(retain_M, forget_M)
        is_eligible_M = np.array([not judgment.is_damaged(entry) for entry in block])
        optimal_M, tie_M = frontier_among(retain_M, forget_M, is_eligible_M)
        for place, entry in enumerate(block):
            entry["pareto"], entry["tie"] = bool(optimal_M[place]), bool(tie_M[place])
            entry["euclidean_min_max"] = float(rescaled_M[place])
            entry["mahalanobis"] = distances[place]
    return marked


def frontier_among(
    retain_M: Float[np.ndarray, " M"],
    forget_M: Float[np.ndarray, " M"],
    is_eligible_M: Bool[np.ndarray, " M"],
) -> tuple[Bool[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
    """Returns the Pareto flags, and which hang on a tie, with the others left out of the question.

    Args:
      retain_M: R of each method.
      forget_M: F of each method.
      is_eligible_M: False for a method that can neither be optimal nor dominate: a damaged one.
    """
    optimal_M, tie_M = np.zeros(len(retain_M), np.bool_), np.zeros(len(retain_M), np.bool_)
    if is_eligible_M.any():
        points = retain_M[is_eligible_M], forget_M[is_eligible_M]
        optimal_M[is_eligible_M] = pareto.pareto_mask(*points)
        tie_M[is_eligible_M] = pareto.rounding_ties(*points)
    return optimal_M, tie_M


def _difference(
    scores: rates.PairScores | None, baseline: rates.PairScores | None, seed: int, resamples: int
) -> DifferenceEntry | None:
    if scores is None or baseline is None:
        return None
    # With drop_empty the two may have lost different queries: what both kept is paired.
    value = dict(zip(scores.ids, scores.rouge_Q, strict=True))
    base = dict(zip(baseline.ids, baseline.rouge_Q, strict=True))
    shared = sorted(value.keys() & base.keys())
    if not shared:
        return None
    found = rates.paired_bootstrap(
        np.array([value[i] for i in shared]),
        np.array([base[i] for i in shared]),
        seed=seed,
        resamples=resamples,
    )
    return DifferenceEntry(
        mean=found.mean,
        low=found.low,
        high=found.high,
        share_below_zero=found.share_below_zero,
    )


def _mahalanobis(
    retain_M: Float[np.ndarray, " M"], forget_M: Float[np.ndarray, " M"]
) -> Sequence[MahalanobisEntry | None]:
    spread = np.ptp(retain_M) > 0 and np.ptp(forget_M) > 0
    if len(retain_M) < pareto.MIN_METHODS or not spread:
        return [None] * len(retain_M)
    found = pareto.mahalanobis_to_ideal(retain_M, forget_M)
    return [
        MahalanobisEntry(
            distance=float(distance),
            condition_number=found.condition_number,
            is_negative=found.is_negative,
        )
        for distance in found.distance_M
    ]
