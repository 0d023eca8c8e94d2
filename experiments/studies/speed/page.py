"""Makes the tables of docs/studies/speed.md from the stored results."""

import json
import pathlib
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

from experiments.studies.reports import markdown_table

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
# Names in the results, in the order of the tables.
_TOOLS = {"ours": "raslik_jax", "loop": "PyTorch", "bergson": "bergson", "dattri": "dattri"}
_DTYPES = ("float32", "bfloat16")
_MODEL = "smollm2-135m"
Found = Mapping[str, Any]  # of a model on a machine, by task


def further_row(task: Found, each: Mapping[str, Any]) -> float:
    """Returns the seconds of a further row, the median of the turns' differences."""
    pairs = zip(each["filled"], each["fewer"], strict=False)
    return median((more - less) / (task["rows"] - task["fewer"]) for more, less in pairs)


_INDEX: dict[str, Callable[[Found, Mapping[str, Any]], float]] = {
    "cold": lambda task, each: median(each["cold"]),
    "filled": lambda task, each: median(each["filled"]),
    "further": further_row,
}


def seconds_of(found: Found, what: str, tool: str, dtype: str = "") -> float | None:
    """Returns the seconds of a tool in a dtype, in its fastest without one; None if not measured.

    `what` is "cold", "filled", "further", "decode" or "unlearn".
    """
    if not dtype:
        known = [seconds_of(found, what, tool, one) for one in _DTYPES]
        return min((one for one in known if one is not None), default=None)
    task = found.get("index" if what in _INDEX else what, {})
    each = task.get("each", {}).get(f"{tool}/{dtype}")
    if each is None:
        return None
    return _INDEX[what](task, each) if what in _INDEX else median(each["seconds"])


class Bar(NamedTuple):
    """A goal: our seconds over those of another tool, each in its fastest dtype.

    Attributes:
      title: the goal in words.
      what: as in `seconds_of`.
      tool: the other tool.
      most: the ratio that is the goal.
      is_speed: whether the table has the inverse.
    """

    title: str
    what: str
    tool: str
    most: float
    is_speed: bool = False


BARS = (
    Bar("a further row, compared with bergson", "further", "bergson", 1 / 3, True),
    Bar("a further row, compared with the loop", "further", "loop", 1 / 2.5, True),
    Bar("an index, caches empty, over bergson's time", "cold", "bergson", 1.0),
    Bar("an index, caches filled, over bergson's time", "filled", "bergson", 0.6),
    Bar("answers, over PyTorch's time", "decode", "loop", 1.0),
)


def ratio_of(found: Found, bar: Bar) -> float | None:
    """Returns our seconds over those of the other tool; None if one was not measured."""
    ours, other = (seconds_of(found, bar.what, tool) for tool in ("ours", bar.tool))
    return None if ours is None or other is None else ours / other


def _stored() -> dict[str, dict[str, Found]]:
    stored: dict[str, dict[str, Found]] = json.loads(RESULTS.read_text())
    return stored


def span(values: list[float | None], digits: int) -> str:
    """Returns the lowest and the highest value over machines as text, "-" without any."""
    known = sorted({f"{value:.{digits}f}" for value in values if value is not None}, key=float)
    return " to ".join(dict.fromkeys([*known[:1], *known[-1:]])) or "-"


def time_table(model: str = _MODEL) -> str:
    """Returns the processor seconds of all tools and the lowest cosine of their gradients."""
    machines = [machine[model] for machine in _stored().values() if model in machine]
    rows = []
    for tool, title in _TOOLS.items():
        for dtype in _DTYPES:
            key = f"{tool}/{dtype}"
            cells = [
                span([seconds_of(found, what, tool, dtype) for found in machines], digits)
                for what, digits in (
                    ("cold", 1),
                    ("filled", 1),
                    ("further", 3),
                    ("decode", 1),
                    ("unlearn", 1),
                )
            ]
            each = [found.get("index", {}).get("each", {}).get(key) for found in machines]
            cells.append(span([one and one["cosine"][0] for one in each], 5))
            if any(cell != "-" for cell in cells):
                rows.append([title, dtype, *cells])
    head = ["tool", "dtype", "index, cold", "filled", "a further row", "answers", "unlearning"]
    return markdown_table([*head, "lowest cosine"], rows)


def bars_table() -> str:
    """Returns the goals with what was measured."""
    rows = []
    for bar in BARS:
        ratios = [ratio_of(machine[_MODEL], bar) for machine in _stored().values()]
        known = [ratio for ratio in ratios if ratio is not None]
        shown: list[float | None] = [1 / ratio if bar.is_speed else ratio for ratio in known]
        goal = f"at least {1 / bar.most:.1f}" if bar.is_speed else f"at most {bar.most:.1f}"
        reached = "yes" if known and max(known) <= bar.most else "no" if known else "-"
        rows.append([bar.title, goal, span(shown, 2), reached])
    return markdown_table(["task", "goal", "measured", "reached"], rows)


def turns_table() -> str:
    """Returns the machines with the versions, the commands and the numbers of turns."""
    rows = []
    for machine, models in _stored().items():
        for model, tasks in models.items():
            for name, task in tasks.items():
                turns = {
                    key: len(each.get("seconds", each.get("fewer", ())))
                    for key, each in task["each"].items()
                }
                shown = ", ".join(f"{key} {count}" for key, count in turns.items())
                used = ", ".join(f"{tool} {version}" for tool, version in task["versions"].items())
                rows.append([machine, model, name, shown, used])
    return markdown_table(["machine", "model", "task", "turns", "versions"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "times": time_table,
        "times of Pythia-14m": lambda: time_table("pythia-14m"),
        "goals": bars_table,
        "turns": turns_table,
    }
