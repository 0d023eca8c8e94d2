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


def trials_table(least: int = 0) -> str:
    """Returns equal answers and the KL of trials with some `least` equal, at both ends."""
    stored = json.loads((HERE / "trials.json").read_text())
    found = {(one["name"], one["case"], one["model"]): one for one in stored}

    def cell(*key: str) -> str:
        one = found.get(key)
        return f"{one['equal']} ({1000 * one['kl']:.1f})" if one else ""

    def seconds(name: str) -> str:
        ends = (found.get((name, case, "end")) for case in ("workshop", "rude"))
        return ", ".join(f"{one['cpu_seconds']} s" for one in ends if one)

    cells = [(case, model) for case in ("workshop", "rude") for model in ("end", "least part")]
    rows = [
        [name, *(cell(name, *key) for key in cells), seconds(name)]
        for name in dict.fromkeys(one["name"] for one in stored)
        if max(found[key]["equal"] for key in found if key[0] == name) >= least
    ]
    return markdown_table(["trial", *(", ".join(key) for key in cells), "processor"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "decision": decision_table,
        "cells": lambda: cells_table("results", without="bound"),
        "all_cells": lambda: cells_table("results"),
        "validation": lambda: cells_table("validation"),
        "trials": lambda: trials_table(25),
        "all_trials": trials_table,
    }
