"""Makes the tables of docs/studies/precise.md from the stored results."""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scipy import stats

from experiments.studies.precise.measure import HERE, VALIDATION
from experiments.studies.reports import markdown_table

_MODELS = {"base_klr": "BASE_KLR", "cap_klr": "CAP_KLR", "bound": "CAP_KLR with a bound"}


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


def decision_table() -> str:
    """Returns the paired difference of the two objectives by the rule, over the test cells."""
    cells = [one for one in read("results").values() if {"base_klr", "cap_klr"} <= one.keys()]
    shares = [
        [100 * one[name]["normal_same"] / one[name]["normal_prompts"] for one in cells]
        for name in ("base_klr", "cap_klr")
    ]
    differences = [new - old for old, new in zip(*shares, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = stats.t.ppf(0.975, len(differences) - 1) * error
    shown = [sum(one[name]["shown"] for one in cells) for name in ("base_klr", "cap_klr")]
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


def trials_table(is_whole: bool = False) -> str:
    """Returns equal answers and the KL of trials at both ends; `is_whole`: of those in both cases.

    A star: the rule of the end does not find enough gone, or a prompt shows the behavior.
    """
    stored = json.loads((HERE / "trials.json").read_text())
    found = {(one["name"], one["case"], one["model"]): one for one in stored}

    def cell(*key: str) -> str:
        one = found.get(key)
        if not one:
            return ""
        star = "*" if one["shown"] or not one["is_enough"] else ""
        return f"{one['equal']}{star} ({1000 * one['kl']:.1f})"

    def by_case(name: str, field: str, unit: str = "") -> str:
        keys = ([(name, case, model) for model in ends] for case in VALIDATION[::-1])
        firsts = (next((found[key] for key in of if key in found), {}) for of in keys)
        return ", ".join(f"{one[field]}{unit}" for one in firsts if field in one)

    ends = "end", "least part"
    cells = [(case, model) for case in VALIDATION[::-1] for model in ends]
    rows = [
        [
            name,
            *(cell(name, *key) for key in cells),
            by_case(name, "others_lost"),
            by_case(name, "cpu_seconds", " s"),
        ]
        for name in dict.fromkeys(one["name"] for one in stored)
        if not is_whole or all((name, case, "end") in found for case in VALIDATION)
    ]
    head = ["trial", *(", ".join(key) for key in cells), "others lost", "processor"]
    return markdown_table(head, rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "decision": decision_table,
        "cells": lambda: cells_table("results", without="bound"),
        "all_cells": lambda: cells_table("results"),
        "validation": lambda: cells_table("validation"),
        "trials": lambda: trials_table(is_whole=True),
        "all_trials": trials_table,
    }
