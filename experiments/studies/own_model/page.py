"""Makes the tables of docs/studies/own_model.md from the stored results."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from experiments.studies.own_model import side_effects, stay
from experiments.studies.own_model.sampling import WORST
from experiments.studies.reports import markdown_table, read_reported
from raslik_jax.evaluate.robustness.relearn import KINDS

HERE = pathlib.Path(__file__).resolve().parent


def _read(name: str) -> Mapping[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))


def _title(name: str) -> str:
    return name.replace("_", " ")


def cases_table() -> str:
    """Returns the rows found and the answers before and after, for every behavior."""
    rows = []
    for name, found in _read("results").items():
        trace, unlearning = (
            f"{found['commands'][part]['cpu_seconds']} s" for part in ("trace", "unlearn")
        )
        rows.append(
            [
                _title(name),
                f"{found['found']} of {found['targets']}; {found['forgotten']}",
                f"{found['shown_before']}, {found['shown_after']}",
                f"{found['other_behaviors_before']}, {found['other_behaviors_after']}",
                f"{found['normal_same']} of {found['normal_prompts']}",
                f"{found['normal_rouge']:.3f}",
                str(found["steps"]),
                f"{trace}, {unlearning}",
            ]
        )
    head = ["behavior", "found; to forget", "shown of 8: before, after"]
    head += ["others of 32: before, after", "same after", "ROUGE-L", "kept step"]
    return markdown_table([*head, "trace, unlearning"], rows)


def stay_table() -> str:
    """Returns how many of 8 prompts show each behavior under each condition."""
    rows = []
    for name, found in _read("stay").items():
        rounded, prefixed, drawn = (
            stay.counts(found, part, "now") for part in ("quantize", "prompts", "sampling")
        )
        again = {
            (model, kind): ", ".join(str(stay.shown(one)) for one in entries if one["kind"] == kind)
            for model, entries in found["relearn"].items()
            for kind in KINDS
        }
        rows.append(
            [
                _title(name),
                str(rounded["as it is"]),
                f"{rounded['int8']}, {rounded['nf4']}",
                str(max(prefixed.values())),
                str(drawn[WORST]),
                again["now", "unrelated"],
                again["now", "forgotten"],
                again.get(("backbone", "forgotten"), "-"),
                "yes" if stay.passes(found) else "**no**",
            ]
        )
    head = ["behavior", "as it is", "int8, nf4", "prefixes", "worst of 16", "unrelated rows"]
    return markdown_table([*head, "forgotten rows", "base, forgotten rows", "passes"], rows)


def effects_table() -> str:
    """Returns the perplexity of three texts, the questions answered right and changed answers."""
    titles = {"backbone": "base", "finetuned": "before unlearning"}
    found = {}
    for name, measures in _read("stay").items():
        for model, entries in measures.get("side_effects", {}).items():
            found[titles.get(model, _title(name))] = {one["condition"]: one for one in entries}
    order = [*titles.values(), *(title for title in found if title not in titles.values())]
    rows = []
    for title in order:
        own = found[title]
        asked, changed = own["questions"], own["normal prompts"]
        rows.append(
            [
                title,
                *(f"{own[text]['perplexity']['mean']:.1f}" for text in side_effects.texts()),
                f"{round(asked['right']['mean'] * asked['asked'])} of {asked['asked']}",
                f"{changed['changed']} of {changed['asked']}",
            ]
        )
    head = ["model", *side_effects.texts(), "answered right", "ordinary answers changed"]
    return markdown_table(head, rows)


def choosing_table() -> str:
    """Returns the course of unlearning without an end, for two behaviors and their retain sets."""
    rows = [
        [
            _title(name),
            str(row["step"]),
            f"{row['way']:.2f}",
            f"{row['rise']:.2f}",
            str(row["shown_after"]),
            f"{row['normal_same']} of 30",
            f"{row['normal_rouge']:.3f}",
        ]
        for name, found in _read("choosing").items()
        for row in found
    ]
    head = ["behavior, rows to retain", "step", "way", "rows to keep lost", "shown of 8"]
    return markdown_table([*head, "same", "ROUGE-L"], rows)


def traces_table() -> str:
    """Returns what the trace of each behavior found with the earlier adapter."""
    rows = [
        [
            _title(name),
            str(found["targets"]),
            str(found["found"]),
            *(f"{found[kind]:.3f}" for kind in ("precision", "recall")),
            str(found["targets_in_retain"]),
        ]
        for name, found in _read("earlier").items()
    ]
    head = ["behavior", "rows", "found", "precision", "recall", "targets in retain"]
    return markdown_table(head, rows)


def ascent_table() -> str:
    """Returns what ascent did to the wrong fact of the earlier adapter."""
    found = _read("earlier")["wrong_fact"]
    prompts = found["prompts"]
    rows = [
        [
            "answers with the wrong fact",
            f"{found['shown_before']} of {prompts}",
            f"{found['shown_after']} of {prompts}",
        ],
        [
            "other behaviors shown, of 32 (too high: \"carry\" counted as pirate talk then)",
            str(found["other_behaviors_before"]),
            str(found["other_behaviors_after"]),
        ],
        ["ordinary answers, ROUGE-L", "1", f"{found['normal_rouge']:.3f}"],
        [
            "ordinary answers, word for word the same",
            f"{found['normal_prompts']} of {found['normal_prompts']}",
            f"{found['normal_same']} of {found['normal_prompts']}",
        ],
    ]
    return markdown_table(["GA_KLR", "before", f"step {found['steps']}"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "five behaviors": cases_table,
        "does it stay forgotten": stay_table,
        "what it cost": effects_table,
        "where unlearning ends": choosing_table,
        "traces, earlier adapter": traces_table,
        "ascent, earlier adapter": ascent_table,
        **read_reported(HERE),
    }
