"""Makes the tables of docs/studies/which_gradient.md from results.json, and applies the rule."""

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.reports import markdown_table
from raslik_jax.base.files import read_json

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT = "unshifted/all"
# Those that the page shows; the others are in tables.md.
_SHOWN = (
    DEFAULT,
    "next_token/all",
    "next_token/response",
    "unshifted + trained",
    "unshifted + trained + hidden",
    "hidden last/all",
)
_EXPLAINED = (DEFAULT, "next_token/all", "unshifted + trained + hidden", "hidden last/answer")
_KINDS = {
    "planted": "planted",
    "behaviors:beside": "hard negatives",
    "toy:scifi_request": "hard negatives",
    "toy:benign_howdy": "hard negatives",
}
_DRAWS, _SEED = 10_000, 0
# Cells of one adapter count as one adapter.
_TITLES = {"toy": "quickstart"}


class Cell(NamedTuple):
    """A behavior of an adapter, with the results of every candidate."""

    run: str
    behavior: str
    by_name: Mapping[str, Mapping[str, Any]]

    @property
    def title(self) -> str:
        """What tables call it."""
        share = {"fact-48": ", 8 %", "fact-12": ", 2 %"}.get(self.run, "")
        return _TITLES.get(self.behavior, self.behavior.replace("_", " ")) + share


def read_cells() -> list[Cell]:
    """Returns the stored cells."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in read_json(HERE / "results.json")["cells"]:
        found.setdefault((one["run"], one["behavior"]), {})[one["candidate"]] = one
    return [Cell(*key, by_name) for key, by_name in found.items()]


def by_adapter(cells: Sequence[Cell], value: Callable[[Cell], float]) -> float:
    """Returns the mean over adapters of the mean over the behaviors of each."""
    groups = itertools.groupby(sorted(cells, key=lambda cell: cell.run), lambda cell: cell.run)
    return float(np.mean([np.mean([value(cell) for cell in group]) for _, group in groups]))


def single(name: str) -> Callable[[Cell], float]:
    """Returns the function from a cell to the mean area of its queries one by one."""
    return lambda cell: float(np.mean(cell.by_name[name]["single"]))


def interval(cells: Sequence[Cell], name: str) -> tuple[float, float]:
    """Returns the 95 % interval of the gain over the default in the mean of `single`.

    The bootstrap draws adapters, behaviors of each, and queries of each.
    """
    random = np.random.default_rng(_SEED)
    groups = [
        [
            np.subtract(cell.by_name[name]["single"], cell.by_name[DEFAULT]["single"])
            for cell in group
        ]
        for _, group in itertools.groupby(
            sorted(cells, key=lambda cell: cell.run), lambda cell: cell.run
        )
    ]

    def draw() -> float:
        means = []
        for group in (groups[i] for i in random.integers(len(groups), size=len(groups))):
            drawn = [group[i] for i in random.integers(len(group), size=len(group))]
            means.append(np.mean([random.choice(one, len(one)).mean() for one in drawn]))
        return float(np.mean(means))

    low, high = np.quantile([draw() for _ in range(_DRAWS)], (0.025, 0.975))
    return float(low), float(high)


class Judged(NamedTuple):
    """What the rule reads of a candidate; `failed` has the numbers of the conditions."""

    mean: float
    smallest: float
    gain: float
    interval: tuple[float, float]
    mean_set: float
    worst_set: float
    f1: float
    cost: float | None
    failed: tuple[int, ...]


def judge(cells: Sequence[Cell], name: str, costs: Mapping[str, float]) -> Judged:
    """Applies RULE.md to a candidate, in the cells where it was measured."""
    cells = [cell for cell in cells if name in cell.by_name]

    def of(key: str, name: str) -> Callable[[Cell], float]:
        return lambda cell: float(np.mean(cell.by_name[name][key]))

    def gain(key: str) -> float:
        return by_adapter(cells, of(key, name)) - by_adapter(cells, of(key, DEFAULT))

    mean, smallest = by_adapter(cells, single(name)), min(map(single(name), cells))
    low, high = interval(cells, name)
    sets = [of("set", name)(cell) - of("set", DEFAULT)(cell) for cell in cells]
    timed = name.removesuffix(", end to end")
    cost = costs[timed] / costs[DEFAULT] if timed in costs else None
    conditions = (
        gain("single") >= 0.02 and low > 0,
        smallest >= min(map(single(DEFAULT), cells)),
        min(sets) >= -0.05 and gain("set") >= -0.01,
        cost is None or cost <= 2.2,
        gain("f1") >= 0,
    )
    failed = tuple(number for number, holds in enumerate(conditions, 1) if not holds)
    return Judged(
        mean,
        smallest,
        gain("single"),
        (low, high),
        by_adapter(cells, of("set", name)),
        min(sets),
        by_adapter(cells, of("f1", name)),
        cost,
        failed,
    )


def _names(cells: Sequence[Cell]) -> list[str]:
    return max((list(cell.by_name) for cell in cells), key=len)


def _by_cell(value: Callable[[str], Callable[[Cell], float]]) -> str:
    cells = read_cells()

    def text(name: str, cell: Cell) -> str:
        return f"{value(name)(cell):.3f}" if name in cell.by_name else "-"

    rows = [[name, *(text(name, cell) for cell in cells)] for name in _names(cells)]
    return markdown_table(["AUPRC", *(cell.title for cell in cells)], rows)


def single_table() -> str:
    """Returns the mean area of single queries in every cell."""
    return _by_cell(single)


def lowest_table() -> str:
    """Returns the lowest area of a single query in every cell."""
    return _by_cell(lambda name: lambda cell: float(min(cell.by_name[name]["single"])))


def set_table() -> str:
    """Returns the area of all queries together in every cell."""
    return _by_cell(lambda name: lambda cell: float(cell.by_name[name]["set"]))


def f1_table() -> str:
    """Returns the mean F1 of the rows that the gap rule finds, in every cell."""
    return _by_cell(lambda name: lambda cell: float(np.mean(cell.by_name[name]["f1"])))


def rule_table() -> str:
    """Returns what the rule reads of every candidate, and the conditions that it does not meet."""
    cells, costs = read_cells(), read_json(HERE / "results.json")["costs"]
    rows = []
    for name in _names(cells):
        one = judge(cells, name, costs)
        ends = f"[{one.interval[0]:+.3f}, {one.interval[1]:+.3f}]"
        is_default = name == DEFAULT
        rows.append(
            [
                name,
                f"{one.mean:.3f}",
                "-" if is_default else f"{one.gain:+.3f} {ends}",
                f"{one.smallest:.3f}",
                f"{one.mean_set:.3f}",
                "-" if is_default else f"{one.worst_set:+.3f}",
                f"{one.f1:.3f}",
                "-" if one.cost is None else f"{one.cost:.2f}",
                "the default" if is_default else ", ".join(map(str, one.failed)) or "none",
            ]
        )
    head = ["candidate", "single", "gain", "smallest", "set", "worst set", "F1", "cost"]
    return markdown_table([*head, "conditions not met"], rows)


def summary_table() -> str:
    """Returns the areas of the candidates that the page shows."""
    cells = read_cells()
    rows = []
    for name in _SHOWN:
        one = judge(cells, name, {})
        numbers = (one.mean, one.smallest, one.mean_set, one.f1)
        title = f"{name}, the default" if name == DEFAULT else name
        rows.append([title, *(f"{number:.3f}" for number in numbers)])
    return markdown_table(["candidate", "single", "smallest", "set", "F1"], rows)


def best_table() -> str:
    """Returns which rows are the best of single queries, in the cells with hard negatives."""
    titles = {(cell.run, cell.behavior): cell.title for cell in read_cells()}
    rows: dict[str, list[str]] = {}
    head = ["the best rows are"]
    for one in read_json(HERE / "results.json")["best"]:
        head += [f"{titles[one['run'], one['behavior']]}: planted", "hard negatives", "others"]
        for name in (name for name in _EXPLAINED if name in one["best"]):
            share = dict.fromkeys(("planted", "hard negatives", "others"), 0.0)
            for kind, value in one["best"][name].items():
                share[_KINDS.get(kind, "others")] += value
            rows.setdefault(name, [name]).extend(f"{value:.2f}" for value in share.values())
    return markdown_table(head, rows.values())


def reasons_table() -> str:
    """Returns how well the planted rows are fitted, and what is left of their gradients."""
    titles = {(cell.run, cell.behavior): cell.title for cell in read_cells()}
    losses = ("next_token/response", "next_token/all", DEFAULT)

    def row(one: Mapping[str, Any]) -> list[str]:
        parts = one["planted"], one["others"]
        planted, others = parts

        def pair(value: Callable[[Mapping[str, float]], float], digits: str) -> str:
            return ", ".join(f"{value(part):{digits}}" for part in parts)

        return [
            titles[one["run"], one["behavior"]],
            pair(lambda part: part["tokens"], ".0f"),
            pair(lambda part: 1 - part["answer"] / part["tokens"], ".2f"),
            pair(lambda part: part["nll_prompt"], ".2f"),
            pair(lambda part: part["nll_answer"], ".2f"),
            *(f"{planted[f'norm {name}'] / others[f'norm {name}']:.2f}" for name in losses),
        ]

    rows = [row(one) for one in read_json(HERE / "results.json")["rows"]]
    head = ["planted rows, others", "tokens", "share of prompt", "nll of prompt", "nll of answer"]
    return markdown_table([*head, "norm ratio: response", "trained, all", "unshifted, all"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "summary": summary_table,
        "the rule": rule_table,
        "single queries": single_table,
        "best rows": best_table,
        "lowest single query": lowest_table,
        "all queries together": set_table,
        "rows found": f1_table,
        "reasons": reasons_table,
    }
