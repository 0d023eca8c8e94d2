"""Makes the figures and the tables of docs/studies/mixed_file.md from the stored results.

  python experiments/studies/mixed_file/page.py

The command writes three figures to --out.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.reports import markdown_table
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
SECOND = RESULTS.with_name("smollm2.json")
_MODELS = {"before": "before", "unlearn": "unlearned", "retrain": "retrained"}
_COMMANDS = ("trace", "unlearn", "retrain", "report")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Where the figures go."""

    out: str = setting("docs", "Folder of the figures.")


def read_results() -> Mapping[str, Any]:
    """Returns the stored parts by behavior and seed, without the answers."""
    found: Mapping[str, Any] = json.loads(RESULTS.read_text())
    return found


def _of(results: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name: one[part] for name, one in results.items() if part in one}


def traces_table() -> str:
    """Returns the rows that each trace finds."""
    rows = [
        [
            name,
            str(one.get("found", 0)),
            str(one["targets"]),
            f"{one['precision']:.3f}" if "precision" in one else "-",
            f"{one['recall']:.3f}" if "recall" in one else "-",
            f"{one['auprc']:.3f}",
        ]
        for name, one in _of(read_results(), "trace").items()
    ]
    head = ["behavior/seed", "rows found", "rows that teach it", "precision", "recall", "AUPRC"]
    return markdown_table(head, rows)


def methods_table() -> str:
    """Returns for each method and behavior the areas of single queries, and F1."""
    ranked = _of(read_results(), "rank")

    def cell(one: Mapping[str, Any]) -> str:
        areas = one["auprc"]
        mean, lowest = statistics.mean(areas), min(areas)
        return f"{areas[0]:.3f}, {mean:.3f} ({lowest:.3f}), {statistics.mean(one['f1']):.2f}"

    methods = dict.fromkeys(name for found in ranked.values() for name in found["methods"])
    rows = []
    for method in methods:
        each = [found["methods"].get(method) for found in ranked.values()]
        seconds = [one["seconds"] for one in each if one and one.get("seconds") is not None]
        cost = " to ".join(dict.fromkeys(f"{f(seconds):.0f}" for f in (min, max) if seconds))
        rows.append([method, *(cell(one) if one else "" for one in each), cost])
    return markdown_table(["method", *(name.split("/")[0] for name in ranked), "seconds"], rows)


def second_table() -> str:
    """Returns the measures of each method on the rows of act 1 with the adapters of SmolLM2.

    F1 of before is that of the gap rule without `selectors.count_apart`, which was found on adapter
    0. Adapter 1 was trained after it.
    """
    rows = []
    for name, parts in json.loads(SECOND.read_text()).items():
        again = parts.get("rank_again")
        for method, one in (again or parts["rank"])["methods"].items():
            cells = [f"{statistics.mean(one[key]):.3f}" for key in ("precision", "recall", "f1")]
            before = f"{statistics.mean(parts['rank']['methods'][method]['f1']):.3f}"
            area = f"{statistics.mean(one['auprc']):.3f} ({min(one['auprc']):.3f})"
            rows.append([name, method, area, *cells, before if again else ""])
    head = ["behavior/adapter", "method", "AUPRC", "precision", "recall", "F1", "F1 before"]
    return markdown_table(head, rows)


def second_costs_table() -> str:
    """Returns the traces of SmolLM2, and what the pass of our five methods took."""
    rows = []
    for name, parts in json.loads(SECOND.read_text()).items():
        trace, spent = parts["trace"], parts["rank"]["pass"]
        shown = f"{parts['before']['shown']} of {parts['before']['prompts']}"
        count = trace.get("found", 0)
        found = f"{count}, {round(count * trace.get('precision', 0))} of {trace['targets']}"
        costs = f"{spent['seconds']:.0f} s, {spent['gigabytes']:.1f} GB"
        rows.append([name, shown, found, f"{trace['auprc']:.3f}", costs])
    head = ["behavior/adapter", "prompts that show it", "rows found, right ones", "AUPRC"]
    head += ["five methods"]
    return markdown_table(head, rows)


def answers_table() -> str:
    """Returns what each model says to held-out prompts."""
    rows = []
    for name, parts in read_results().items():
        for part, title in _MODELS.items():
            # All seeds of a behavior have one adapter.
            if (one := parts.get(part)) and (part != "before" or name.endswith("/0")):
                cells = [
                    f"{one['shown']} of {one['prompts']}",
                    str(one["as_other"]),
                    f"{one['normal_same']} of {one['normal_prompts']}",
                    f"{one['normal_rouge']:.2f}",
                    f"{one['normal_words']:.1f}",
                    f"{one['other_same']} of {one['other_prompts']}",
                ]
                rows.append([name, title, *cells])
    head = ["behavior/seed", "model", "shows it", "shows the other one"]
    head += ["ordinary answers equal", "ROUGE-L", "words"]
    return markdown_table([*head, "answers of the other behavior equal"], rows)


def costs_table() -> str:
    """Returns the processor seconds and the peak memory of each command."""
    rows = []
    for name, parts in read_results().items():
        costs = [parts.get(part, {}).get("cost") for part in _COMMANDS]
        shown = [f"{c['cpu_seconds']} s, {c['gigabytes']:.1f} GB" if c else "" for c in costs]
        if any(shown):
            rows.append([name, *shown])
    return markdown_table(["behavior/seed", *_COMMANDS], rows)


def stay_table() -> str:
    """Returns F of the unlearned model in each condition of the robustness tests, and the base's."""
    found = _of(read_results(), "stay")
    conditions = dict.fromkeys(
        reading["condition"]
        for one in found.values()
        for test in one["found"].values()
        for reading in test["now"]
    )
    rows = []
    for name, one in found.items():
        read = {
            model: {
                reading["condition"]: reading["forget"]["mean"]
                for test in one["found"].values()
                for reading in test[model]
            }
            for model in ("now", "backbone")
        }
        cells = (f"{read['now'][c]:.2f}, {read['backbone'][c]:.2f}" for c in conditions)
        rows.append([name, *cells])
    return markdown_table(["behavior/seed", *conditions], rows)


def distances_table() -> str:
    """Returns the distance to the retrained model before and after unlearning."""
    rows = []
    for name, one in _of(read_results(), "report").items():
        if all(one["distance"].get(key) for key in ("", "cap_klr")):
            far = [one["distance"][key] for key in ("", "cap_klr")]
            cells = [of[kind] for kind in ("target", "normal") for of in far]
            rows.append([name, *(f"{cell['kl']['mean']:.2f}" for cell in cells)])
    head = ["behavior/seed", "its prompts, before", "unlearned", "ordinary prompts, before"]
    return markdown_table([*head, "unlearned"], rows)


def _bars(axes: Any, groups: Mapping[str, Mapping[str, float]], ylabel: str) -> None:
    """Draws a group of bars for each name, one bar for each series."""
    from experiments.studies.curves import COLORS

    series = list(dict.fromkeys(key for one in groups.values() for key in one))
    width = 0.8 / len(series)
    for number, key in enumerate(series):
        at = [n + width * (number - (len(series) - 1) / 2) for n in range(len(groups))]
        heights = [one.get(key, 0.0) for one in groups.values()]
        axes.bar(at, heights, width, color=COLORS[number % len(COLORS)], label=key)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(ylabel)
    axes.grid(axis="x", visible=False)
    axes.legend(fontsize=8, ncols=min(4, len(series)), loc="upper left", bbox_to_anchor=(0, -0.1))


def _means(results: Mapping[str, Any], value: Callable[[Any], Mapping[str, float]]) -> Any:
    """Returns the means of values over seeds by behavior."""
    by_name: dict[str, list[Mapping[str, float]]] = {}
    for name, parts in results.items():
        by_name.setdefault(name.split("/")[0], []).append(value(parts))
    return {
        name: {
            key: statistics.mean(one[key] for one in ones if key in one)
            for key in dict.fromkeys(key for one in ones for key in one)
        }
        for name, ones in by_name.items()
        if any(ones)  # a height of 0 would read as a measurement
    }


def figures() -> dict[str, tuple[Any, str]]:
    """Returns the values and the axis of each figure by its file's name."""
    results = read_results()

    def ranked(parts: Any) -> dict[str, float]:
        methods = parts.get("rank", {}).get("methods", {})
        return {name: statistics.mean(one["auprc"]) for name, one in methods.items()}

    def shown(parts: Any) -> dict[str, float]:
        ones = {title: parts[part] for part, title in _MODELS.items() if part in parts}
        if len(ones) == 1:  # nothing was changed yet
            return {}
        found = {f"shows it, {t}": 100 * one["shown"] / one["prompts"] for t, one in ones.items()}
        equal = {t: 100 * one["normal_same"] / one["normal_prompts"] for t, one in ones.items()}
        return found | {f"equal, {t}": value for t, value in equal.items() if t != "before"}

    def costs(parts: Any) -> dict[str, float]:
        return {part: parts[part]["cost"]["cpu_seconds"] for part in _COMMANDS if part in parts}

    return {
        "mixed_file_rows": (_means(results, ranked), "AUPRC, mean of single answers"),
        "mixed_file_answers": (_means(results, shown), "held-out prompts (%)"),
        "mixed_file_costs": (_means(results, costs), "processor seconds"),
    }


def main(options: Options) -> None:
    """Writes the figures."""
    command.require("matplotlib")
    from experiments.studies import curves
    from raslik_jax.report import drawing

    @drawing.styled
    def draw(groups: Mapping[str, Mapping[str, float]], ylabel: str) -> Any:
        figure, (axes,) = curves.make_axes((7.6, 3.4))
        _bars(axes, groups, ylabel)
        return figure

    for name, (groups, ylabel) in figures().items():
        stem = pathlib.Path(options.out) / name
        drawing.save_figure(draw(groups, ylabel), stem)
        stem.with_suffix(".svg").unlink()


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "traces": traces_table,
        "methods": methods_table,
        "answers": answers_table,
        "costs": costs_table,
        "distances": distances_table,
        "stay": stay_table,
        "SmolLM2, traces": second_costs_table,
        "SmolLM2, methods": second_table,
    }


if __name__ == "__main__":
    command.start(main, Options())
