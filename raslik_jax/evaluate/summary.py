"""From the records of each model to the entries of metrics.json: pure functions on the host.

The shapes of metrics.json are declared here. `metrics.METRICS` has the measures.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from raslik_jax.base.messages import some_of
from raslik_jax.data.words import refused
from raslik_jax.evaluate import judgment, rates, verdict
from raslik_jax.evaluate.metrics import KINDS, NonSf, look_up, measure, nest
from raslik_jax.evaluate.pareto import pareto_mask
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import describe_returns
from raslik_jax.train.objectives import OBJECTIVES, Objective

# The distance to a retrained model that the verdict uses.
_DISTANCE = "distance/normal/kl"
# The strategy that every other one is compared with; metrics.json names it in its keys.
BASELINE = "random"
# Texts by kind of query (KINDS) and query id.
Texts = Mapping[str, Mapping[str, str]]


# One model: its metrics by name (see `metrics.nest`), and its judgment. F, R and the distance are
# None where there are no queries to take them on, and Non-SF where nothing marks the behavior.
ModelEntry = dict[str, Any]
# A model unlearned with one strategy's sets by one algorithm, after one epoch. `pareto` compares it
# with the other strategies of the same algorithm and epoch (`mark_frontier`); None without F or R.
MethodEntry = dict[str, Any]


class Metrics(TypedDict):
    """All of metrics.json, for the reports.

    `settings` is the whole config. `chosen` is true if each method occurs once, at a learning rate
    and epoch that were chosen on other queries. `retrieval` has the rows that each strategy
    retrieved. `non_sf` names the measure of Non-SF (words by default, judge or classifier) and its
    quality. It is None if nothing marks the behavior. `behavior` is None if nothing measured it.
    `backbone` is missing if the fine-tuned model was given as a whole. Then nothing is compared
    with a model before fine-tuning. `probes` has the probes of each unlearning. `robustness` has
    the results of its tests for each method and the models before.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    versions: NotRequired[dict[str, str]]
    chosen: NotRequired[bool]
    non_sf: NotRequired[dict[str, Any] | None]
    behavior: NotRequired[judgment.BehaviorEntry | None]
    corpus: dict[str, Any]
    finetuned: ModelEntry
    backbone: NotRequired[ModelEntry]
    retrieval: dict[str, dict[str, Any]]
    probes: NotRequired[list[dict[str, Any]]]
    robustness: NotRequired[list[dict[str, Any]]]
    methods: list[MethodEntry]


class Variant(NamedTuple):
    """The name of an unlearned model: strategy of its sets, algorithm, epoch (from 1)."""

    strategy: str
    algorithm: str
    epoch: int


def collect_evidence(
    answers: Texts,
    references: Texts,
    *,
    non_sf: NonSf | None = None,
    likelihoods: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns the records of one model in the parts that metrics read.

    The parts of answers are "texts" (all, in order of kind and query id), "target" and "normal",
    "references", and "target_scores" and "normal_scores" of `rates.score_pairs`. Empty parts are
    left out.

    Args:
      likelihoods: `perplexity.AnswerRecord`s of the "sets" of labeled answers
        ("held-out_likelihoods" and its like) and of the model's own "answers" under the backbone
        ("target_said" and "normal_said").
    """
    evidence: dict[str, Any] = {"texts": [], "references": []}
    for kind in KINDS:
        own, other = answers.get(kind, {}), references.get(kind, {})
        evidence["references"] += other.values()
        if own or other:
            scores = rates.score_pairs(own, other)
            texts = [own[name] for name in sorted(own)]
            evidence |= {f"{kind}_scores": scores, kind: texts}
            evidence["texts"] += texts
    if non_sf:
        evidence["non_sf"] = non_sf
    if likelihoods:
        evidence |= {f"{name}_likelihoods": part for name, part in likelihoods["sets"].items()}
        evidence |= {f"{kind}_said": part for kind, part in likelihoods["answers"].items()}
    return evidence


def compare(
    own: Mapping[str, Any], finetuned: Mapping[str, Any], backbone: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the parts of a model's evidence that compare it with those before.

    "normal_before" are the fine-tuned model's answers. "prompts" counts the target queries that
    still show the behavior (`verdict.Count`) by its mark, otherwise by F. "outputs" counts the bad
    outputs that are about as likely as before. "finetuned_records" and "base_records" are the
    "normal_records" of those models, `left.NormalRecord`s of the same queries in the same order.
    """
    parts: dict[str, Any] = {"normal_before": finetuned["normal"]} if "normal" in own else {}
    if backbone is None:
        return parts
    models = (own, finetuned, backbone)
    if all("normal_records" in model for model in models):
        parts["finetuned_records"] = finetuned["normal_records"]
        parts["base_records"] = backbone["normal_records"]
    if "target" in own and "non_sf" in own:
        shown = (1.0 - own["non_sf"](model["target"]) for model in models)
        parts["prompts"] = verdict.count_shown(*shown)
    elif "target_scores" in own:
        rates_MQ = [model["target_scores"] for model in models]
        parts["prompts"] = verdict.count_way(
            *rates_MQ, least=verdict.LEAST_APART, enough=verdict.HALF
        )
    outputs = [model.get("behavior_likelihoods") for model in models]
    if all(outputs):
        nats_QM = [
            [record["nll"] for record in row]
            for row in zip(*outputs, strict=True)
            if all(record["tokens"] for record in row)
        ]
        parts["outputs"] = verdict.count_way(
            *-np.array(nats_QM).reshape(-1, len(models)).T,
            least=verdict.LEAST_NATS,
            enough=verdict.MEAN_WAY,
        )
    return parts


def measure_methods(
    evidence: Mapping[Variant, Mapping[str, Any]],
    *,
    seed: int,
    resamples: int = 10_000,
    across_epochs: bool = False,
) -> list[dict[str, Any]]:
    """Returns the entries of all unlearned models in their order, with differences to Random.

    The differences are None for Random itself, and if a block of algorithm and epoch has no Random.
    Across epochs a block is one algorithm: each strategy has one epoch, chosen on other queries.
    """
    names = [f"{kind}_scores" for kind in KINDS]
    random: dict[tuple[str, int], dict[str, Any]] = {}
    for variant, own in evidence.items():
        if variant.strategy == BASELINE:
            scores = {f"random_{name}": own[name] for name in names if name in own}
            random.setdefault((variant.algorithm, 0 if across_epochs else variant.epoch), scores)
    entries = []
    for variant, own in evidence.items():
        block = (variant.algorithm, 0 if across_epochs else variant.epoch)
        other = {} if variant.strategy == BASELINE else random.get(block, {})
        values = measure({**own, **other}, seed=seed, resamples=resamples)
        entries.append(variant._asdict() | nest(values) | {"pareto": None})
    return entries


def mark_frontier(
    entries: Sequence[Mapping[str, Any]], *, across_epochs: bool = False
) -> list[dict[str, Any]]:
    """Returns the entries with their places among the models of one algorithm and epoch.

    A damaged model is no candidate: it is not Pareto-optimal and dominates no other model.
    `across_epochs` is that of `measure_methods`.
    """
    marked = [{**entry} for entry in entries]
    blocks: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in marked:
        blocks[entry["algorithm"], 0 if across_epochs else entry["epoch"]].append(entry)
    for block in blocks.values():
        if len({entry["strategy"] for entry in block}) < len(block):
            names = some_of(sorted({entry["strategy"] for entry in block}))
            raise refused("one_epoch", count=len(block), names=names)
        points = [[entry[name] for entry in block] for name in ("retain", "forget")]
        if not all(point for rate in points for point in rate):
            continue
        retain_M, forget_M = (np.array([point["mean"] for point in rate]) for rate in points)
        is_eligible_M = np.array([not judgment.is_damaged(entry) for entry in block])
        is_optimal_M = pareto_mask(retain_M, forget_M, is_eligible_M)
        for entry, is_optimal in zip(block, is_optimal_M.tolist(), strict=True):
            entry["pareto"] = is_optimal
    return marked


def judge_metrics(metrics: dict[str, Any]) -> None:
    """Adds the conclusions to the measures: the behavior before, each judgment, the frontier."""
    finetuned, backbone = metrics["finetuned"], metrics.get("backbone")
    behavior = judgment.behavior_of(finetuned, backbone, metrics["non_sf"])
    metrics["behavior"] = behavior
    kept = {}
    for one in metrics.get("probes", ()):
        if "kept" in one:
            name = one["strategy"], one["algorithm"]
            kept[name] = next(p["gone"] for p in one["probes"] if p["step"] == one["kept"])
    for entry in metrics["methods"]:
        gone = kept.get((entry["strategy"], entry["algorithm"]))
        entry["judgment"] = judgment.judge(entry, finetuned, backbone, behavior=behavior, gone=gone)
        found = [
            one["found"]
            for one in metrics.get("robustness", ())
            if all(one[key] == entry[key] for key in ("strategy", "algorithm", "epoch"))
            and ROBUSTNESS[one["measure"]].returns
        ]
        if phrase := describe_returns(found):
            entry["judgment"]["returns"] = phrase
        apart = look_up(entry, _DISTANCE)
        if apart and not _objective(entry).retrains:
            floor = _floor(metrics["methods"], entry["strategy"])
            entry["judgment"]["distance"] = verdict.describe_distance(apart["mean"], floor)
    metrics["methods"] = mark_frontier(metrics["methods"], across_epochs=bool(metrics["chosen"]))


def _objective(entry: MethodEntry) -> Objective:
    return OBJECTIVES[entry["algorithm"]]


def _floor(methods: Sequence[MethodEntry], strategy: str) -> float | None:
    """Returns the distance between two trainings without the rows; None without a second one."""
    again = (e for e in methods if e["strategy"] == strategy and _objective(e).repeats)
    found = [value["mean"] for e in again if (value := look_up(e, _DISTANCE))]
    return found[0] if found else None
