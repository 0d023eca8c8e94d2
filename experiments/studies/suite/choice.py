"""One rule that chooses learning rate and epoch, the same for every strategy.

The rule sees validation queries only. All strategies went through one grid. The rule takes the
point of the grid with the smallest mean distance over seeds to R = 1 and F = floor. The floor is
the backbone's own F, because a lower F is damage and not forgetting. An F below the floor counts as
the floor. A point is skipped if the model of any seed was judged damaged.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raslik_jax.base.messages import shown
from raslik_jax.evaluate.judgment import is_damaged

Floor = Literal["backbone", "zero"]


class Candidate(NamedTuple):
    """One unlearned model on the validation queries: F and R, and F of the backbone.

    Epochs count from 1. A model that was judged damaged cannot be chosen. Without a model before
    fine-tuning there is no F of a backbone.
    """

    strategy: str
    algorithm: str
    learning_rate: float
    epoch: int
    seed: int
    forget: float
    retain: float
    backbone_forget: float | None
    is_damaged: bool = False


class Choice(NamedTuple):
    """The rate and epoch of one strategy and algorithm, with their mean distance.

    `at_edge` names ends of the grid that the choice is at. `skipped` counts damaged points.
    """

    strategy: str
    algorithm: str
    learning_rate: float
    epoch: int
    distance: float
    at_edge: tuple[str, ...]
    skipped: int = 0


# Learning rate and epoch.
_Point = tuple[float, int]


def distance(candidate: Candidate, *, floor: Floor = "backbone") -> float:
    """Returns the distance to R = 1 and F = floor; an F below the floor counts as at it."""
    least = candidate.backbone_forget if floor == "backbone" else 0.0
    if least is None:
        must = "must be zero for runs without a model before fine-tuning, got backbone"
        raise ValueError(f"--floor {must}: give --floor=zero")
    return math.hypot(1.0 - candidate.retain, max(candidate.forget - least, 0.0))


def choose(candidates: Sequence[Candidate], *, floor: Floor = "backbone") -> tuple[Choice, ...]:
    """Returns the learning rate and epoch of every strategy and algorithm, by the one rule.

    Ties go to the smaller learning rate, then to the earlier epoch: the smaller change. Floor
    "zero" is the paper's ideal point.
    """
    if not candidates:
        raise ValueError("a choice must have validation results to choose from, got none")
    by_method: dict[str, dict[str, dict[tuple[_Point, int], float]]] = {}
    for candidate in candidates:
        group = by_method.setdefault(candidate.algorithm, {})
        own = group.setdefault(candidate.strategy, {})
        tried = (candidate.learning_rate, candidate.epoch), candidate.seed
        if tried in own:
            must = f"each validation run must be named once, got {candidate} twice"
            raise ValueError(f"{must}: leave one out")
        own[tried] = math.inf if candidate.is_damaged else distance(candidate, floor=floor)
    choices: list[Choice] = []
    for algorithm, group in by_method.items():
        tried_by_any = set().union(*group.values())
        points, seeds = (sorted(set(axis)) for axis in zip(*tried_by_any, strict=True))
        for strategy, own in group.items():
            missing = sorted(set(itertools.product(points, seeds)) - own.keys())
            if missing:
                (rate, epoch), seed = missing[0]
                raise ValueError(
                    f"{strategy} with {algorithm} must be tried at every point, got {len(missing)} "
                    f"without, such as learning rate {rate}, epoch {epoch}, seed {seed}"
                )
            means = {
                point: statistics.fmean(own[point, seed] for seed in seeds) for point in points
            }
            choices.append(_choose_point(strategy, algorithm, means))
    return tuple(choices)


def _choose_point(strategy: str, algorithm: str, distances: Mapping[_Point, float]) -> Choice:
    best = min(distances, key=lambda point: (distances[point], point))
    skipped = sum(math.isinf(value) for value in distances.values())
    if skipped == len(distances):
        raise ValueError(
            f"{strategy} with {algorithm} must not be damaged to be chosen, got damage at all "
            f"{skipped} points of the grid: try lower learning rates"
        )
    rates, epochs = ({point[axis] for point in distances} for axis in (0, 1))
    edges = []
    if len(rates) > 1 and best[0] in (min(rates), max(rates)):
        edges.append("smallest learning rate" if best[0] == min(rates) else "largest learning rate")
    if len(epochs) > 1 and best[1] == max(epochs):
        edges.append("last epoch")
    return Choice(strategy, algorithm, *best, distances[best], tuple(edges), skipped)


def check_settings(settings: Mapping[str, Any], *, run: str) -> None:
    """Refuses a run whose stored settings leave out what the rule reads; `run` names it."""
    evaluate = settings["evaluate"]
    if not evaluate["perplexity_examples"]:
        raise ValueError(
            "runs to choose from must be measured with likelihoods, without which most damage is "
            f"not seen, {run} has --evaluate.perplexity_examples=0: leave it out"
        )
    if share := settings["retrieve"].get("held_out"):
        raise ValueError(
            "runs to choose from must be measured on validation queries, "
            f"{run} is measured on training rows by --retrieve.held_out={share}: leave it out"
        )


def candidates_of(metrics: Mapping[str, Any]) -> list[Candidate]:
    """Returns the candidates of a validation run, from its metrics.json.

    Raises a ValueError if the run used other queries, lacks what the rule reads, or has rates that
    a rule chose.
    """
    split = metrics["corpus"]["query_split"]
    run = f"{shown(metrics['name'])} with seed {metrics['seed']}"
    check_settings(metrics["settings"], run=run)
    if split != "validation":
        raise ValueError(
            f"runs to choose from must be measured on validation queries, {run} was measured on "
            f"{split} queries: run it with --references.query_split=validation"
        )
    if metrics.get("chosen"):  # its rates are those of a choice, and not of its settings
        raise ValueError(f"{run} must be made without --unlearn.choice, to be chosen from")
    for kind in ("target", "normal"):
        if not metrics["corpus"][f"{kind}_queries"]:
            raise ValueError(
                f"runs to choose from must have target and normal queries, {run} has no {kind} "
                "queries: add some to its validation queries"
            )
    return [
        Candidate(
            strategy=entry["strategy"],
            algorithm=entry["algorithm"],
            learning_rate=metrics["settings"]["unlearn"][entry["algorithm"]]["learning_rate"],
            epoch=entry["epoch"],
            seed=metrics["seed"],
            forget=entry["forget"]["mean"],
            retain=entry["retain"]["mean"],
            backbone_forget=metrics["backbone"]["forget"]["mean"]
            if "backbone" in metrics
            else None,
            is_damaged=is_damaged(entry),
        )
        for entry in metrics["methods"]
    ]


def to_json(choices: Sequence[Choice], *, floor: Floor) -> dict[str, Any]:
    """Returns the content of a choice file, which --unlearn.choice reads."""
    return {
        "rule": {
            "floor": floor,
            "text": "smallest mean distance over seeds to R = 1 and F = floor on validation "
            "queries, without points where a model is damaged; ties to the smaller learning rate, "
            "then to the earlier epoch",
        },
        "choices": [choice._asdict() | {"at_edge": list(choice.at_edge)} for choice in choices],
    }


def describe(choices: Sequence[Choice]) -> str:
    """Returns one line per choice, for the terminal."""
    return "\n".join(
        f"{found.algorithm:<8} {found.strategy:<18} learning rate {found.learning_rate:<8.3g} "
        f"epoch {found.epoch}  distance {found.distance:.3f}"
        + (f"  at the edge of the grid: {', '.join(found.at_edge)}" if found.at_edge else "")
        + (f"  damaged points skipped: {found.skipped}" if found.skipped else "")
        for found in choices
    )
