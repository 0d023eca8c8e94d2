"""Tables and figures of the study of retrieval quality, over all runs."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.studies.gradients import join_table
from experiments.studies.rankings import join_records
from experiments.studies.retrieval_quality.labels import QUALITY
from raslik_jax.files import write_json, write_text
from raslik_jax.report import drawing, figures, tables

Entry = Mapping[str, Any]
Joined = Mapping[str, list[dict[str, Any]]]

Z_SUM = "z-sum of initial/next_token and finetuned/unshifted"
# Names of settings that have one.
PRESETS = {
    ("finetuned/next_token/response", "plain", "vector"): "paper",
    ("finetuned/unshifted/response", "plain", "per_tensor"): "released",
    ("finetuned/unshifted/all", "centered", "vector"): "robust",
}
_SIMPLE = ("plain", "centered")
_PERFORMANCE = {"auprc": "auPRC", "auroc": "auROC", "precision": "precision"}
_SHOWN = _PERFORMANCE | {"targets_in_retain": "targets in retain"}
_COUNTED = {"auprc": "auPRC", "least_auprc": "least auPRC", "precision": "precision"}
_CHOICE = ("kernel", "centering", "normalize", "query", "combine")
_BY_COMBINE = {"kernel": "kernel", "centering": "centering", "combine": "queries by"}


def join(records: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Returns the records joined over seeds, by table."""

    def joined(table: str, by: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
        return join_records([r for r in records if r["table"] == table], by=by, values=values)

    counted = (*QUALITY, "least_auprc")
    queries = joined("kernel", [*_CHOICE, "num_queries"], counted)
    whole = [record for record in records if record["table"] == "kernel" and record["is_all"]]
    kernels = join_records(whole, by=_CHOICE, values=QUALITY)
    for entry in kernels:
        named = PRESETS.get((entry["kernel"], entry["centering"], entry["normalize"]), "")
        entry["preset"] = named if entry["combine"] == "mean" else ""
    of_sketch = (*QUALITY, "jaccard_seeds", "jaccard_exact", "spearman", "error")
    return {
        "strategies": joined("strategy", ["strategy"], [*_SHOWN, "retain_positive"]),
        "strategy_queries": joined("strategy_queries", ["strategy", "num_queries"], counted),
        "kernels": kernels,
        "queries": queries,
        "sketches": joined("sketch", ["kernel", "family", "size", "dtype", "combine"], of_sketch),
        "norms": joined("norm", ["kernel"], QUALITY),
    }


def _cell(entry: Mapping[str, float]) -> str:
    if entry["low"] == entry["high"]:
        return f"{entry['mean']:.3f}"
    return tables.format_interval(dict(entry), ends=".3f")  # type: ignore[arg-type]


def _is_own(entry: Entry) -> bool:
    return (entry["normalize"], entry["query"]) == ("vector", "own")


def _is_main(entry: Entry) -> bool:
    return _is_own(entry) and entry["combine"] == "mean"


def _is_simple(entry: Entry) -> bool:
    return entry["centering"] in _SIMPLE


class Section(NamedTuple):
    """A section of tables.md: title, text, entries, and titles of what names and fills a row."""

    title: str
    text: str
    entries: Sequence[Entry]
    by: Mapping[str, str]
    values: Mapping[str, str]

    def render(self) -> str:
        """Returns its Markdown."""
        table = join_table(self.entries, self.by, self.values, _cell)
        return "\n\n".join(part for part in (f"## {self.title}", self.text, table) if part)


def sections(joined: Joined) -> tuple[Section, ...]:
    """Returns the sections of tables.md."""

    def by_value(entry: Entry) -> float:
        return -entry["auprc"]["mean"]

    own = [entry for entry in joined["kernels"] if _is_own(entry)]
    ranked = sorted(filter(_is_main, own), key=by_value)
    main = sorted(filter(_is_simple, own), key=by_value)
    best = {entry["kernel"] for entry in main[:4]} | {name for name, _, _ in PRESETS}
    top = [(e["kernel"], e["centering"]) for e in main[:4]] + [key[:2] for key in PRESETS]
    further = [e for e in ranked if e["kernel"] in best and not _is_simple(e)]
    options = [e for e in joined["kernels"] if e["kernel"] in best and _is_simple(e)]
    counts = [e for e in joined["queries"] if _is_own(e) and (e["kernel"], e["centering"]) in top]
    subsets = "Mean over random subsets; least: the worst subset."
    return (
        Section(
            "Strategies, at the run's own settings",
            "",
            joined["strategies"],
            {"strategy": "strategy"},
            _SHOWN | {"retain_positive": "retain, score >= 0"},
        ),
        Section(
            "Strategies by the number of queries",
            f"{subsets} What is drawn at random or by labels depends on no query.",
            joined["strategy_queries"],
            {"strategy": "strategy", "num_queries": "queries"},
            _COUNTED,
        ),
        Section(
            "Exact kernel: which gradient, and what is taken away from it",
            "All queries, the model's own answers, cosine of whole gradients; best auPRC first.",
            main,
            _BY_COMBINE,
            _SHOWN | {"below_zero": "scores below 0"},
        ),
        Section(
            "More than the mean taken away: the largest principal directions of the centered rows",
            "",
            further,
            {"kernel": "kernel", "centering": "centering"},
            _SHOWN | {"below_zero": "scores below 0"},
        ),
        Section(
            "Normalization and the answers of the queries",
            "",
            options,
            {name: name for name in _CHOICE} | {"combine": "queries by", "preset": "preset"},
            _SHOWN,
        ),
        Section(
            "Number of queries", subsets, counts, _BY_COMBINE | {"num_queries": "queries"}, _COUNTED
        ),
        Section(
            "Sketches",
            "",
            joined["sketches"],
            {"kernel": "kernel", "family": "family", "size": "K", "dtype": "dtype"}
            | {"combine": "queries by"},
            {
                "auprc": "auPRC",
                "precision": "precision",
                "targets_in_retain": "targets in retain",
                "jaccard_seeds": "Jaccard of forget sets, between seeds",
                "jaccard_exact": "with the exact set",
                "spearman": "rank correlation with the exact kernel",
                "error": "rms error of a score",
            },
        ),
        Section("Norm of the gradient alone", "", joined["norms"], {"kernel": "gradient"}, _SHOWN),
    )


def write_figures(joined: Joined, out: pathlib.Path) -> None:
    """Writes the figures, each as PNG and SVG."""
    rows: dict[str, dict[str, Any]] = {}
    main = [entry for entry in joined["kernels"] if _is_main(entry) and _is_simple(entry)]
    for entry in sorted(main, key=lambda entry: -entry["auprc"]["mean"]):
        rows.setdefault(entry["kernel"], {})[entry["centering"]] = entry["auprc"]
    figure = figures.draw_intervals(
        rows, xlabel="auPRC of the forget ranking", title="Which gradient"
    )
    drawing.save_figure(figure, out / "kernels")

    names = {*[name for name in rows if name != Z_SUM][:3], *(name for name, _, _ in PRESETS)}
    by_kernel: dict[str, dict[str, list[Any]]] = {}
    for entry in joined["queries"]:
        is_shown = _is_own(entry) and entry["centering"] == "centered"
        if is_shown and entry["combine"] in ("mean", "common") and entry["kernel"] in names:
            points = by_kernel.setdefault(entry["kernel"], {}).setdefault(entry["combine"], [])
            points.append((float(entry["num_queries"]), entry["auprc"]))
    figure = figures.draw_curves(by_kernel, xlabel="queries", ylabel="auPRC, centered", log_x=True)
    drawing.save_figure(figure, out / "queries")

    if not joined["sketches"]:
        return
    panels: dict[str, dict[str, list[Any]]] = {"auPRC": {}, "Jaccard with the exact set": {}}
    first = joined["sketches"][0]["kernel"]
    for entry in joined["sketches"]:
        if entry["combine"] == "mean" and entry["kernel"] == first:
            label = f"{entry['family']}, {entry['dtype']}"
            for panel, field in zip(panels, ("auprc", "jaccard_exact"), strict=True):
                point = float(entry["size"]), entry[field]
                panels[panel].setdefault(label, []).append(point)
    figure = figures.draw_curves(panels, xlabel="K", ylabel="", log_x=True)
    drawing.save_figure(figure, out / "sketches")


def write_report(records: Sequence[Entry], out: pathlib.Path) -> None:
    """Writes records.csv, summary.json, tables.md and the figures."""
    lines = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(lines, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(out / "records.csv", lines.getvalue())
    joined = join(records)
    write_json(out / "summary.json", joined)
    seeds = ", ".join(map(str, sorted({int(record["seed"]) for record in records})))
    parts = [f"Seeds {seeds}; mean [least, largest] over them."]
    parts += [section.render() for section in sections(joined)]
    write_text(out / "tables.md", "\n\n".join(parts) + "\n")
    write_figures(joined, out)
