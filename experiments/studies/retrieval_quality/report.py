"""Tables and figures of the study of retrieval quality, over all runs."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.curves import draw_curves, draw_intervals
from experiments.studies.rankings import QUALITY
from experiments.studies.reports import join_records, section
from raslik_jax.base.files import write_json, write_text
from raslik_jax.report import drawing

Entry = Mapping[str, Any]
Joined = Mapping[str, list[dict[str, Any]]]

Z_SUM = "z-sum of initial/next_token and finetuned/unshifted"
# Names of settings that have one.
PRESETS = {
    ("finetuned/next_token/response", "plain", "vector"): "paper",
    ("finetuned/unshifted/response", "plain", "per_tensor"): "released",
    ("finetuned/unshifted/all", "centered", "vector"): "robust",
}
_PERFORMANCE = {"auprc": "AUPRC", "auroc": "auROC", "precision": "precision"}
_SHOWN = _PERFORMANCE | {"targets_in_retain": "targets in retain"}
_BELOW_ZERO = _SHOWN | {"below_zero": "scores below 0"}
_COUNTED = {"auprc": "AUPRC", "least_auprc": "least AUPRC", "precision": "precision"}
_CHOICE = ("kernel", "centering", "normalize", "query", "combine")
_BY_COMBINE = {"kernel": "kernel", "centering": "centering", "combine": "queries by"}
_OF_SKETCHES = {
    "auprc": "AUPRC",
    "precision": "precision",
    "targets_in_retain": "targets in retain",
    "jaccard_seeds": "Jaccard of forget sets, between seeds",
    "jaccard_exact": "with the exact set",
    "spearman": "rank correlation with the exact kernel",
    "error": "rms error of a score",
}
_OF_SKETCH = {"kernel": "kernel", "family": "family", "size": "K", "dtype": "dtype"}


def join(records: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Returns the records joined over seeds, by table."""

    def joined(table: str, by: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
        return join_records([r for r in records if r["table"] == table], by=by, values=values)

    counted = (*QUALITY, "least_auprc")
    whole = [record for record in records if record["table"] == "kernel" and record["is_all"]]
    exact = join_records(whole, by=_CHOICE, values=QUALITY)
    for entry in exact:
        named = PRESETS.get((entry["kernel"], entry["centering"], entry["normalize"]), "")
        entry["preset"] = named if entry["combine"] == "mean" else ""
    return {
        "strategies": joined("strategy", ["strategy"], [*_SHOWN, "retain_positive"]),
        "strategy_queries": joined("strategy_queries", ["strategy", "num_queries"], counted),
        "kernels": exact,
        "queries": joined("kernel", [*_CHOICE, "num_queries"], counted),
        "sketches": joined("sketch", [*_OF_SKETCH, "combine"], [*QUALITY, *_OF_SKETCHES]),
        "norms": joined("norm", ["kernel"], QUALITY),
    }


def _is_own(entry: Entry) -> bool:
    return (entry["normalize"], entry["query"]) == ("vector", "own")


def _is_simple(entry: Entry) -> bool:
    return entry["centering"] in ("plain", "centered")


def _by_auprc(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry["auprc"]["mean"])


def sections(joined: Joined) -> list[str]:
    """Returns the sections of tables.md."""
    own = _by_auprc([entry for entry in joined["kernels"] if _is_own(entry)])
    main = [entry for entry in own if _is_simple(entry)]
    best = {entry["kernel"] for entry in main[:4]} | {name for name, _, _ in PRESETS}
    top = [(e["kernel"], e["centering"]) for e in main[:4]] + [key[:2] for key in PRESETS]
    further = [
        e for e in own if e["kernel"] in best and e["combine"] == "mean" and not _is_simple(e)
    ]
    options = [e for e in joined["kernels"] if e["kernel"] in best and _is_simple(e)]
    counts = [e for e in joined["queries"] if _is_own(e) and (e["kernel"], e["centering"]) in top]
    subsets = "Mean over random subsets; least: the worst subset."
    return [
        section(
            "Strategies, at the run's own settings",
            joined["strategies"],
            {"strategy": "strategy"},
            _SHOWN | {"retain_positive": "retain, score >= 0"},
        ),
        section(
            "Strategies by the number of queries",
            joined["strategy_queries"],
            {"strategy": "strategy", "num_queries": "queries"},
            _COUNTED,
            text=f"{subsets} What is drawn at random or by labels depends on no query.",
        ),
        section(
            "Exact kernel: which gradient, and what is taken away from it",
            main,
            _BY_COMBINE,
            _BELOW_ZERO,
            text="All queries, the model's own answers, cosine of whole gradients; best AUPRC "
            "first.",
        ),
        section(
            "More than the mean taken away: the largest principal directions of the centered rows",
            further,
            {"kernel": "kernel", "centering": "centering"},
            _BELOW_ZERO,
        ),
        section(
            "Normalization and the answers of the queries",
            options,
            {name: name for name in _CHOICE} | {"combine": "queries by", "preset": "preset"},
            _SHOWN,
        ),
        section(
            "Number of queries",
            counts,
            _BY_COMBINE | {"num_queries": "queries"},
            _COUNTED,
            text=subsets,
        ),
        section(
            "Sketches", joined["sketches"], _OF_SKETCH | {"combine": "queries by"}, _OF_SKETCHES
        ),
        section("Norm of the gradient alone", joined["norms"], {"kernel": "gradient"}, _SHOWN),
    ]


def write_figures(joined: Joined, out: pathlib.Path) -> None:
    """Writes the figures, each as PNG and SVG."""
    rows: dict[str, dict[str, Any]] = {}
    main = [e for e in joined["kernels"] if _is_own(e) and _is_simple(e) and e["combine"] == "mean"]
    for entry in _by_auprc(main):
        rows.setdefault(entry["kernel"], {})[entry["centering"]] = entry["auprc"]
    figure = draw_intervals(
        rows, xlabel="AUPRC of the forget ranking", title="Which gradient"
    )
    drawing.save_figure(figure, out / "kernels")

    names = {*[name for name in rows if name != Z_SUM][:3], *(name for name, _, _ in PRESETS)}
    panels: dict[str, dict[str, list[Any]]] = {}
    for entry in joined["queries"]:
        is_shown = _is_own(entry) and entry["centering"] == "centered"
        if is_shown and entry["combine"] in ("mean", "common") and entry["kernel"] in names:
            points = panels.setdefault(entry["kernel"], {}).setdefault(entry["combine"], [])
            points.append((float(entry["num_queries"]), entry["auprc"]))
    figure = draw_curves(panels, xlabel="queries", ylabel="AUPRC, centered", log_x=True)
    drawing.save_figure(figure, out / "queries")


def write_report(records: Sequence[Entry], out: pathlib.Path) -> None:
    """Writes summary.json, tables.md and the figures."""
    joined = join(records)
    write_json(out / "summary.json", joined)
    seeds = ", ".join(map(str, sorted({int(record["seed"]) for record in records})))
    parts = [f"Seeds {seeds}; mean [least, largest] over them.", *sections(joined)]
    write_text(out / "tables.md", "\n\n".join(parts) + "\n")
    write_figures(joined, out)
