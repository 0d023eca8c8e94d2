"""Makes the tables of docs/studies/ways_out.md from the stored results."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from experiments.studies.reports import markdown_table

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
# Names in the results, in the order of the tables.
_WAYS = {"before": "before", "unlearn": "unlearned", "retrain": "retrained"}
_MODELS = {"": "before", "base_klr": "unlearned", "retrain_again": "retrained, other seed"}


def _cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def answers_table() -> str:
    """Returns what each model says to held-out prompts."""
    rows = []
    for name, found in _cases().items():
        for way, title in _WAYS.items():
            one = found[way]
            rows.append(
                [
                    name,
                    title,
                    f"{one['shown']} of {one['prompts']}",
                    f"{one['normal_same']} of {one['normal_prompts']}",
                    f"{one['normal_rouge']:.2f}",
                    f"{one['normal_words']:.1f}",
                ]
            )
    head = ["case/seed", "model", "shows the behavior", "other answers equal", "ROUGE-L", "words"]
    return markdown_table(head, rows)


def distance_table() -> str:
    """Returns how far each model is from the retrained one, in nats a token and in floors."""
    rows = []
    for name, found in _cases().items():
        kl = {
            model: [found["distance"][model][kind]["kl"]["mean"] for kind in ("target", "normal")]
            for model in _MODELS
        }
        floor = kl["retrain_again"][1]
        for model, title in _MODELS.items():
            target, normal = kl[model]
            cells = [f"{target:.3f}", f"{normal:.3f}", f"{normal / floor:.1f}"]
            rows.append([name, title, *cells])
    return markdown_table(["case/seed", "model", "KL, target", "KL, normal", "floors"], rows)


def costs_table() -> str:
    """Returns processor seconds and peak memory of each command."""
    rows = []
    for name, found in _cases().items():
        took = found["commands"]
        cells = [
            f"{took[part]['cpu_seconds']} s, {took[part]['gigabytes']:.1f} GB"
            for part in ("trace", "unlearn", "retrain")
        ]
        rows.append([name, *cells])
    return markdown_table(["case/seed", "trace", "unlearn", "retrain twice"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {"answers": answers_table, "distances": distance_table, "costs": costs_table}
