"""Makes the tables of docs/studies/precise.md from the stored results."""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scipy import stats

from experiments.studies.precise.measure import HERE, VALIDATION
from experiments.studies.reports import markdown_table
from experiments.studies.ways_out import page as ways_out

_OBJECTIVES = ("base_klr", "cap_klr")
_COUNTS = ("shown", "prompts", "normal_same", "normal_prompts", "normal_rouge")
_MODELS = {"base_klr": "BASE_KLR", "cap_klr": "CAP_KLR", "bound": "CAP_KLR with a bound"}
_MODELS["cap_klr_rep"] = "CAP_KLR, RepSelect"


def read(name: str) -> dict[str, Any]:
    """Returns stored results by "case/seed": validation, results or prototypes."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def _rows(results: Mapping[str, Any], without: str) -> Iterator[list[str]]:
    for name, found in results.items():
        before = found["before"]["shown"]
        for model in (model for model in found if model not in ("before", "trace", without)):
            one = found[model]
            cost = one.get("cost")
            yield [
                name,
                _MODELS.get(model, model),
                f"{one['shown']} of {one['prompts']} ({before})",
                f"{one['normal_same']} of {one['normal_prompts']}",
                f"{one['normal_rouge']:.2f}",
                f"{one['normal_words']:.1f}",
                f"{cost['cpu_seconds']} s, {cost['gigabytes']:.1f} GB" if cost else "",
            ]


_HEAD = ["case/seed", "model", "shows it (before)", "other answers equal", "ROUGE-L", "words"]


def cells_table(name: str, without: str = "") -> str:
    """Returns what each model of some results says to held-out prompts, and its cost."""
    return markdown_table([*_HEAD, "unlearning"], [*_rows(read(name), without)])


def _by_case() -> dict[str, dict[str, list[Any]]]:
    """Returns the cells of each model by case; those of retraining come from ways_out."""
    found: dict[str, dict[str, list[Any]]] = {}
    retrained = json.loads(ways_out.RESULTS.read_text())
    for name, cell in read("results").items():
        models = found.setdefault(name.split("/")[0], {})
        parts = {key: cell[key] for key in ("before", *_OBJECTIVES)}
        if other := retrained.get(name, {}).get("retrain"):
            parts["retrained"] = other
        for key, one in parts.items():
            models.setdefault(key, []).append(one)
    return found


def _close(case: str, model: str) -> list[str]:
    """Returns the mean KL to the model before, and the other behaviors before and after."""
    cells = [one for name, one in read("closeness").items() if name.split("/")[0] == case]
    kls = [one["kl"][model] for one in cells if model in one["kl"]]
    others = [(one["others"]["before"], one["others"][model]) for one in cells if "others" in one]
    kept = " to ".join(str(sum(part)) for part in zip(*others, strict=True))
    return [f"{statistics.mean(kls):.3f}" if kls else "", kept]


def cases_table() -> str:
    """Returns sums over seeds of what each model says to held-out prompts, by case."""
    rows = []
    for case, models in _by_case().items():
        before = sum(one["shown"] for one in models.pop("before"))
        for model, ones in models.items():
            total = {key: sum(one[key] for one in ones) for key in _COUNTS}
            costs = [one["cost"] for one in ones if "cost" in one]
            seconds = statistics.median(cost["cpu_seconds"] for cost in costs) if costs else 0
            rows.append(
                [
                    f"{case} ({len(ones)})",
                    _MODELS.get(model, model),
                    f"{total['shown']} of {total['prompts']} ({before})",
                    f"{total['normal_same']} of {total['normal_prompts']}",
                    f"{total['normal_rouge'] / len(ones):.2f}",
                    *_close(case, model),
                    f"{seconds:.0f} s" if costs else "",
                ]
            )
    head = ["case", "model", "shows it (before)", "other answers equal", "ROUGE-L", "KL"]
    return markdown_table([*head, "other behaviors", "unlearning"], rows)


def decision_table() -> str:
    """Returns the paired difference of the two objectives by the rule, over the test cells."""
    cells = [one for one in read("results").values() if {*_OBJECTIVES} <= one.keys()]
    shares = [
        [100 * one[name]["normal_same"] / one[name]["normal_prompts"] for one in cells]
        for name in _OBJECTIVES
    ]
    differences = [new - old for old, new in zip(*shares, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = stats.t.ppf(0.975, len(differences) - 1) * error
    shown = [sum(one[name]["shown"] for one in cells) for name in _OBJECTIVES]
    prompts = sum(one["before"]["prompts"] for one in cells)
    rows = [
        ["cells", f"{len(cells)}", f"{len(cells)}", ""],
        ["prompts that show it", *(f"{count} of {prompts}" for count in shown), ""],
        [
            "other answers equal",
            *(f"{statistics.mean(part):.0f} %" for part in shares),
            f"{mean:+.0f} points [{mean - half:+.0f}, {mean + half:+.0f}]",
        ],
    ]
    return markdown_table(["", "BASE_KLR", "CAP_KLR", "difference, 95 %"], rows)


def trials_table() -> str:
    """Returns equal answers and the KL of trials at both ends.

    A star: the rule of the end does not find enough gone, or a prompt shows the behavior.
    """
    found, cases = _trials(), VALIDATION[::-1]
    cells = [(case, model) for case in cases for model in _ENDS]
    rows = [
        [
            name,
            *(_trial(found.get((name, *key))) for key in cells),
            _by_validation(found, name, "others_lost"),
            _by_validation(found, name, "cpu_seconds", " s"),
        ]
        for name in dict.fromkeys(name for name, *_ in found)
    ]
    head = ["trial", *(", ".join(key) for key in cells), "others lost", "processor"]
    return markdown_table(head, rows)


def short_trials_table() -> str:
    """Returns the ends of the trials of the second trace that were run in both cases."""
    found, cases = _trials(), VALIDATION[::-1]
    rows = [
        [name, *(_trial(found[name, case, "end"]) for case in cases)]
        + [_by_validation(found, name, "others_lost"), _by_validation(found, name, "cpu_seconds", " s")]
        for name in dict.fromkeys(name for name, *_ in found)
        if all("others_lost" in found.get((name, case, "end"), ()) for case in cases)
    ]
    return markdown_table(["trial", *cases, "others lost", "processor"], rows)


_ENDS = "end", "least part"


def _trials() -> dict[tuple[str, str, str], Any]:
    stored = json.loads((HERE / "trials.json").read_text())
    return {(one["name"], one["case"], one["model"]): one for one in stored}


def _trial(one: Any) -> str:
    if not one:
        return ""
    star = "*" if one["shown"] or not one["is_enough"] else ""
    return f"{one['equal']}{star} ({1000 * one['kl']:.1f})"


def _by_validation(found: Mapping[Any, Any], name: str, field: str, unit: str = "") -> str:
    keys = ([(name, case, model) for model in _ENDS] for case in VALIDATION[::-1])
    firsts = (next((found[key] for key in of if key in found), {}) for of in keys)
    return ", ".join(f"{one[field]}{unit}" for one in firsts if field in one)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "decision": decision_table,
        "cases": cases_table,
        "all_cells": lambda: cells_table("results"),
        "validation": lambda: cells_table("validation"),
        "trials": short_trials_table,
        "all_trials": trials_table,
        "RepSelect": lambda: cells_table("repselect"),
    }
