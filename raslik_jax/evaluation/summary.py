"""From generated texts to the entries of metrics.json: pure functions, on the host.

The shapes of metrics.json are declared here, where its numbers are made; the reports read them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluation import pareto, rates, tofu_metrics

# The strategy that every other one is compared with; metrics.json names it in its keys.
BASELINE = "random"
# Gives each text its probability of not being science fiction, from 0 to 1.
NonSf = Callable[[Sequence[str]], Float[np.ndarray, " Q"]]


class IntervalEntry(TypedDict):
    """A mean and the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float


class CollapseRule(NamedTuple):
    """From where on a model counts as collapsed, relative to the fine-tuned one.

    Attributes:
      least_distinct: share of its distinct-2 that has to be left.
      most_repeated: repetition-4 that may be added to its own.
      most_empty: share of the answers that may have become empty.
      most_perplexed: factor by which the perplexity of held-out answers may have grown.
    """

    least_distinct: float = 0.5
    most_repeated: float = 0.2
    most_empty: float = 0.1
    most_perplexed: float = 10.0


COLLAPSE_RULE = CollapseRule()


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

    `diversity` has one entry for "target" and one for "normal" queries, `distinct_2` and
    `repetition_4` are over all answers; `perplexity` is by set (see `perplexity.SETS`);
    `collapse` holds what `collapse_signs` found; `tofu` is there where the corpus is TOFU.
    """

    forget: IntervalEntry
    retain: IntervalEntry
    non_sf_target: IntervalEntry
    non_sf_normal: IntervalEntry
    empty: int
    empty_references: int
    distinct_2: float
    repetition_4: float
    euclidean: float
    diversity: NotRequired[dict[str, DiversityEntry]]
    perplexity: NotRequired[dict[str, IntervalEntry]]
    collapse: NotRequired[list[str]]
    tofu: NotRequired[tofu_metrics.TofuEntry]


class MahalanobisEntry(TypedDict):
    """D_mah of one method, with what tells how far to trust it (see `pareto.Mahalanobis`)."""

    distance: float
    condition_number: float
    is_negative: bool


class MethodEntry(ModelEntry):
    """A model unlearned with one strategy's sets by one algorithm, after one epoch.

    `pareto`, `tie`, `euclidean_min_max` and `mahalanobis` compare it with the other strategies of
    the same algorithm and epoch; `mahalanobis` is None for fewer than 5 of them.
    """

    strategy: str
    algorithm: str
    epoch: int
    forget_minus_random: DifferenceEntry | None
    retain_minus_random: DifferenceEntry | None
    pareto: bool
    tie: bool
    euclidean_min_max: float
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
    how well the classifier does.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    versions: NotRequired[dict[str, str]]
    reference: NotRequired[str]
    chosen: NotRequired[bool]
    non_sf: NotRequired[dict[str, Any]]
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
      forget: ROUGE-L F1 against the references on target queries.
      retain: the same on normal queries.
      non_sf_target_Q: probability of each target answer not to be science fiction.
      non_sf_normal_Q: the same of each normal answer.
      distinct_2: distinct-2 over all answers.
      repetition_4: seq-rep-4 over all answers.
      diversity: the same by kind of query, "target" and "normal".
    """

    forget: rates.PairScores
    retain: rates.PairScores
    non_sf_target_Q: Float[np.ndarray, " target"]
    non_sf_normal_Q: Float[np.ndarray, " normal"]
    distinct_2: float
    repetition_4: float
    diversity: Mapping[str, DiversityEntry]


def evaluate_outputs(
    predictions: Outputs, references: Outputs, *, non_sf: NonSf, drop_empty: bool = False
) -> Evaluation:
    """Returns the per-query values of one model's outputs, paired with references by id.

    Args:
      predictions: the model's answers.
      references: greedy answers of the fine-tuned model before unlearning to the same queries.
      non_sf: gives each text its probability of not being science fiction, for example
        `functools.partial(rates.non_sf_by_words, vocabulary=...)`.
      drop_empty: leave empty predictions out of the two rates, as the paper does. Non-SF and
        diversity always see every answer.

    Returns:
      The values, in order of query id.

    Raises:
      ValueError: as `rates.score_pairs`.
    """
    forget = rates.score_pairs(predictions.target, references.target, drop_empty=drop_empty)
    retain = rates.score_pairs(predictions.normal, references.normal, drop_empty=drop_empty)
    target = [predictions.target[i] for i in sorted(predictions.target)]
    normal = [predictions.normal[i] for i in sorted(predictions.normal)]
    return Evaluation(
        forget=forget,
        retain=retain,
        non_sf_target_Q=non_sf(target),
        non_sf_normal_Q=non_sf(normal),
        distinct_2=rates.distinct_ngrams(target + normal, n=2),
        repetition_4=rates.repeated_ngrams(target + normal, n=4),
        diversity={"target": _diversity(target), "normal": _diversity(normal)},
    )


def _diversity(texts: Sequence[str]) -> DiversityEntry:
    return DiversityEntry(
        answers=len(texts),
        empty=sum(not text.strip() for text in texts),
        distinct_2=rates.distinct_ngrams(texts, n=2),
        repetition_4=rates.repeated_ngrams(texts, n=4),
    )


def collapse_signs(
    entry: ModelEntry, finetuned: ModelEntry, *, rule: CollapseRule = COLLAPSE_RULE
) -> list[str]:
    """Returns what says that a model's answers have collapsed, one phrase each.

    Held against the fine-tuned model's answers to the same queries, apart for target and normal
    ones: a model may babble on the first and write well on the others, and babble scores like
    forgetting.

    Args:
      entry: the model.
      finetuned: the model before unlearning.
      rule: how far is too far.

    Returns:
      The signs; none for the fine-tuned model itself.
    """
    signs = []
    before = finetuned.get("diversity", {})
    for kind, now in entry.get("diversity", {}).items():
        if kind not in before:
            continue
        then = before[kind]
        if now["distinct_2"] < rule.least_distinct * then["distinct_2"]:
            signs.append(
                f"{kind} answers alike: distinct-2 {now['distinct_2']:.2f}, was "
                f"{then['distinct_2']:.2f}"
            )
        if now["repetition_4"] > then["repetition_4"] + rule.most_repeated:
            signs.append(
                f"{kind} answers repeat themselves: repetition-4 {now['repetition_4']:.2f}, was "
                f"{then['repetition_4']:.2f}"
            )
        if now["empty"] - then["empty"] > rule.most_empty * now["answers"]:
            signs.append(f"{kind} answers empty: {now['empty']} of {now['answers']}")
    held_out, was = (model.get("perplexity", {}).get("held-out") for model in (entry, finetuned))
    if held_out and was and held_out["mean"] > rule.most_perplexed * was["mean"]:
        signs.append(f"held-out perplexity {held_out['mean']:.3g}, was {was['mean']:.3g}")
    return signs


def summarise(evaluation: Evaluation, *, seed: int, resamples: int = 10_000) -> ModelEntry:
    """Returns the entry of one model: its rates with 95 % intervals, and its checks.

    Args:
      evaluation: the per-query values.
      seed: of the bootstrap.
      resamples: draws of the bootstrap.

    Returns:
      A dict that JSON can hold.
    """
    forget_Q, retain_Q = evaluation.forget.rouge_Q, evaluation.retain.rouge_Q

    def interval(values_Q: np.ndarray) -> IntervalEntry:
        found = rates.bootstrap_interval(values_Q, seed=seed, resamples=resamples)
        return IntervalEntry(mean=found.mean, low=found.low, high=found.high)

    return ModelEntry(
        forget=interval(forget_Q),
        retain=interval(retain_Q),
        non_sf_target=interval(evaluation.non_sf_target_Q),
        non_sf_normal=interval(evaluation.non_sf_normal_Q),
        empty=evaluation.forget.num_empty + evaluation.retain.num_empty,
        empty_references=evaluation.forget.num_empty_references
        + evaluation.retain.num_empty_references,
        distinct_2=evaluation.distinct_2,
        repetition_4=evaluation.repetition_4,
        euclidean=float(np.hypot(1 - retain_Q.mean(), forget_Q.mean())),
        diversity=dict(evaluation.diversity),
    )


def compare_methods(
    evaluations: Mapping[Variant, Evaluation],
    *,
    seed: int,
    resamples: int = 10_000,
    across_epochs: bool = False,
) -> list[MethodEntry]:
    """Returns the entries of all unlearned models, compared within algorithm and epoch.

    Args:
      evaluations: the per-query values of each unlearned model, all on the same queries.
      across_epochs: compare within the algorithm, each strategy at its one epoch, which was chosen
        beforehand on other queries.
      seed: of the bootstrap; one seed for all, so that intervals are comparable.
      resamples: draws of the bootstrap.

    Returns:
      One entry per model, in the order given. Random's own differences to Random are None,
      and all are where a block of algorithm and epoch has no Random.

    Raises:
      ValueError: across_epochs with a strategy at more than one epoch.
    """
    blocks: dict[tuple[str, int], list[Variant]] = defaultdict(list)
    for variant in evaluations:
        blocks[variant.algorithm, 0 if across_epochs else variant.epoch].append(variant)
    entries: dict[Variant, MethodEntry] = {}
    for (algorithm, _), variants in blocks.items():
        if len({variant.strategy for variant in variants}) < len(variants):
            raise ValueError(f"one epoch of each strategy wanted, {variants} came")
        reference = next((evaluations[v] for v in variants if v.strategy == BASELINE), None)
        models = [
            summarise(evaluations[variant], seed=seed, resamples=resamples) for variant in variants
        ]
        retain_M = np.array([model["retain"]["mean"] for model in models])
        forget_M = np.array([model["forget"]["mean"] for model in models])
        optimal_M = pareto.pareto_mask(retain_M, forget_M)
        tie_M = pareto.rounding_ties(retain_M, forget_M)
        rescaled_M = pareto.euclidean_to_ideal(retain_M, forget_M, rescale=True)
        distances = _mahalanobis(retain_M, forget_M)
        for position, (variant, model) in enumerate(zip(variants, models, strict=True)):
            other = None if variant.strategy == BASELINE else reference
            evaluation = evaluations[variant]
            entries[variant] = MethodEntry(
                strategy=variant.strategy,
                algorithm=algorithm,
                epoch=variant.epoch,
                **model,
                forget_minus_random=other
                and _difference(evaluation.forget, other.forget, seed, resamples),
                retain_minus_random=other
                and _difference(evaluation.retain, other.retain, seed, resamples),
                pareto=bool(optimal_M[position]),
                tie=bool(tie_M[position]),
                euclidean_min_max=float(rescaled_M[position]),
                mahalanobis=distances[position],
            )
    return [entries[variant] for variant in evaluations]


def _difference(
    scores: rates.PairScores, baseline: rates.PairScores, seed: int, resamples: int
) -> DifferenceEntry | None:
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
