"""Which learning rate and epoch a method is measured at: one rule, the same for every strategy.

The rule sees validation queries only. It takes, of the grid that all strategies went through, the
point of the smallest mean distance over seeds to R = 1 and F = floor. The floor is the backbone's
own F, below which lies damage and not forgetting: what is below it counts as at it, so that a
method is neither rewarded nor punished there, and R alone decides.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.files import check_shape
from raslik_jax.messages import shown

# Of one choice in a file.
_SHAPE = {
    "strategy": str,
    "algorithm": str,
    "learning_rate": float,
    "epoch": int,
    "distance": float,
    "at_edge": [str],
}
PER = ("strategy", "algorithm")
FLOORS = ("backbone", "zero")


class Candidate(NamedTuple):
    """One unlearned model as the validation queries see it.

    Attributes:
      strategy: of its sets.
      algorithm: that unlearned.
      learning_rate: of the algorithm.
      epoch: from 1.
      seed: of the run.
      forget: F.
      retain: R.
      backbone_forget: F of the backbone on the same queries.
    """

    strategy: str
    algorithm: str
    learning_rate: float
    epoch: int
    seed: int
    forget: float
    retain: float
    backbone_forget: float


class Choice(NamedTuple):
    """Where one strategy is measured under one algorithm.

    Attributes:
      strategy: of its sets.
      algorithm: that unlearned.
      learning_rate: chosen.
      epoch: chosen, from 1.
      distance: mean over seeds (and strategies, per algorithm) at the chosen point.
      at_edge: ends of the grid that the point lies at, where a wider grid may hold a better one;
        a grid of one value has none.
    """

    strategy: str
    algorithm: str
    learning_rate: float
    epoch: int
    distance: float
    at_edge: tuple[str, ...]


def distance(candidate: Candidate, *, floor: str = "backbone") -> float:
    """Returns the distance to R = 1 and F = floor; an F below the floor counts as at it."""
    least = candidate.backbone_forget if floor == "backbone" else 0.0
    return math.hypot(1.0 - candidate.retain, max(candidate.forget - least, 0.0))


def choose(
    candidates: Sequence[Candidate], *, per: str = "strategy", floor: str = "backbone"
) -> tuple[Choice, ...]:
    """Returns the learning rate and epoch of every strategy and algorithm, by the one rule.

    Ties go to the smaller learning rate, then to the earlier epoch: the smaller change.

    Args:
      candidates: of every strategy, algorithm, learning rate, epoch and seed, measured on
        validation queries.
      per: "strategy": each strategy has a choice of its own. "algorithm": the distances are
        averaged over strategies first, so that all share one choice.
      floor: of F; "zero" is the paper's ideal point.

    Returns:
      In order of algorithm and strategy as they first come.

    Raises:
      ValueError: an unknown per or floor, no candidates, one twice, or a strategy that was not
        tried at a point or seed that another one was: then the rule would not be the same for both.
    """
    if per not in PER or floor not in FLOORS:
        raise ValueError(f"per of {PER} and floor of {FLOORS} wanted, came {per=} and {floor=}")
    if not candidates:
        raise ValueError("validation results to choose from wanted, none came")
    by_method: dict[tuple[str, str], dict[tuple[float, int], dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for candidate in candidates:
        point = candidate.learning_rate, candidate.epoch
        by_seed = by_method[candidate.algorithm, candidate.strategy][point]
        if candidate.seed in by_seed:
            raise ValueError(f"{candidate} came twice: name each validation run once")
        by_seed[candidate.seed] = distance(candidate, floor=floor)
    grids = {
        method: {(point, seed) for point, by_seed in points.items() for seed in by_seed}
        for method, points in by_method.items()
    }
    mean = {
        method: {point: math.fsum(d.values()) / len(d) for point, d in points.items()}
        for method, points in by_method.items()
    }
    choices = []
    for algorithm, group in itertools.groupby(
        sorted(by_method, key=lambda method: _place(by_method, method)), key=lambda m: m[0]
    ):
        methods = list(group)
        everything = set().union(*(grids[method] for method in methods))
        points = sorted({point for point, _ in everything})
        seeds = {seed for _, seed in everything}
        for method in methods:
            missing = sorted(set(itertools.product(points, seeds)) - grids[method])
            if missing:
                (rate, epoch), seed = missing[0]
                raise ValueError(
                    f"every strategy at every point and seed wanted, {method[1]} with {algorithm} "
                    f"lacks {len(missing)}, such as learning rate {rate}, epoch {epoch}, seed "
                    f"{seed}: finish the validation runs first"
                )
        shared = {
            point: math.fsum(mean[method][point] for method in methods) / len(methods)
            for point in points
        }
        for method in methods:
            found = mean[method] if per == "strategy" else shared
            best = min(points, key=lambda point: (found[point], point))
            choices.append(Choice(method[1], algorithm, *best, found[best], _edges(best, points)))
    return tuple(choices)


def _place(methods: Mapping[tuple[str, str], Any], method: tuple[str, str]) -> tuple[int, int]:
    """Returns where a method's algorithm, and then it itself, first came."""
    order = list(methods)
    first = next(place for place, other in enumerate(order) if other[0] == method[0])
    return first, order.index(method)


def _edges(point: tuple[float, int], points: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    rates, epochs = ({p[axis] for p in points} for axis in (0, 1))
    found = []
    if len(rates) > 1 and point[0] in (min(rates), max(rates)):
        found.append(
            "smallest learning rate" if point[0] == min(rates) else "largest learning rate"
        )
    if len(epochs) > 1 and point[1] == max(epochs):
        found.append("last epoch")
    return tuple(found)


def candidates_of(
    metrics: Mapping[str, Any], learning_rates: Mapping[str, float]
) -> tuple[Candidate, ...]:
    """Returns the candidates of one validation run.

    Args:
      metrics: the content of its metrics.json.
      learning_rates: of each algorithm in it.

    Raises:
      ValueError: the run was measured on test queries, which no choice may see, or at rates and
        epochs that were chosen before.
    """
    split = metrics["corpus"]["query_split"]
    run = f"{shown(metrics['name'])} with seed {metrics['seed']}"
    if split != "validation":
        raise ValueError(
            f"runs to choose from must be measured on validation queries, {run} was measured on "
            f"{split} queries: run it with --references.query_split=validation"
        )
    if metrics.get("chosen"):  # its rates are those of a choice, and not of its settings
        raise ValueError(
            f"runs to choose from must be made without --unlearn.choice, {run} was made with one: "
            f"leave "
            "it out"
        )
    return tuple(
        Candidate(
            strategy=entry["strategy"],
            algorithm=entry["algorithm"],
            learning_rate=learning_rates[entry["algorithm"]],
            epoch=entry["epoch"],
            seed=metrics["seed"],
            forget=entry["forget"]["mean"],
            retain=entry["retain"]["mean"],
            backbone_forget=metrics["backbone"]["forget"]["mean"],
        )
        for entry in metrics["methods"]
    )


def to_json(choices: Sequence[Choice], *, per: str, floor: str) -> dict[str, Any]:
    """Returns the content of a choice file, which --unlearn.choice reads."""
    return {
        "rule": {
            "per": per,
            "floor": floor,
            "text": "smallest mean distance over seeds to R = 1 and F = floor on validation "
            "queries; ties to the smaller learning rate, then to the earlier epoch",
        },
        "choices": [choice._asdict() | {"at_edge": list(choice.at_edge)} for choice in choices],
    }


def from_json(value: Mapping[str, Any], *, origin: str) -> dict[tuple[str, str], Choice]:
    """Returns the choices of a choice file by (strategy, algorithm).

    Args:
      value: its content.
      origin: names the file in the error.

    Raises:
      ValueError: it is no choice file.
    """
    check_shape(value, {"choices": [_SHAPE]}, origin)
    choices: dict[tuple[str, str], Choice] = {}
    for entry in value["choices"]:
        found = Choice(**{name: entry[name] for name in Choice._fields})
        found = found._replace(at_edge=tuple(found.at_edge))
        method = f"{shown(found.strategy)} with {shown(found.algorithm)}"
        if not 0 < found.learning_rate < math.inf or found.epoch < 1:
            raise ValueError(
                f"{method} in {origin} must have a learning rate above 0 and an epoch from 1, got "
                f"{shown(found.learning_rate)} and {shown(found.epoch)}: make the file again"
            )
        if (found.strategy, found.algorithm) in choices:
            raise ValueError(f"{method} must have one choice in {origin}: make the file again")
        choices[found.strategy, found.algorithm] = found
    return choices


def describe(choices: Sequence[Choice]) -> str:
    """Returns one line per choice, for the terminal."""
    return "\n".join(
        f"{found.algorithm:<8} {found.strategy:<18} learning rate {found.learning_rate:<8.3g} "
        f"epoch {found.epoch}  distance {found.distance:.3f}"
        + (f"  at the edge of the grid: {', '.join(found.at_edge)}" if found.at_edge else "")
        for found in choices
    )
