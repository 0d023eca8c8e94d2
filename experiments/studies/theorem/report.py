"""Tables and figures of the study of the theorem."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.reports import join_records, section
from raslik_jax.files import write_json, write_text
from raslik_jax.report import drawing, tables
from raslik_jax.report.figures import draw_boundary, draw_curves

# Half the width of the thresholds' neighborhoods, as in the paper.
GAMMA = 0.01
_ROUNDING = 1e-6  # of |Delta|^2, with products summed in float32
_SETTING = ("fluctuation", "moved", "rule", "retain")
_PARTS = ("over_fluctuations", "over_sketches", "total", "error")
_RATIOS = ("fixed_sketch_ratio", "total_ratio", "error_ratio")


def _power(points: Mapping[int, float]) -> float:
    """Returns the exponent b of the least-squares fit y = a K^b."""
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def _section(
    title: str, entries: Sequence[Mapping[str, Any]], by: Sequence[str], values: Sequence[str]
) -> str:
    names = ({name: name.replace("_", " ") for name in part} for part in (by, values))
    return section(title, entries, *names, digits=".3g")


def join_spreads(spreads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the spreads joined over corpora, with their ratios to the exact kernel's."""

    def key(record: Mapping[str, Any]) -> tuple:
        return (record["run"], *(record[name] for name in _SETTING))

    exact = {key(record): record for record in spreads if record["kernel"] == "exact"}
    for record in spreads:
        beside = exact.get(key(record))
        # A fluctuation that moves no item leaves rounding, of which no ratio says anything.
        if beside is not None and min(beside["total"], beside["error"]) > _ROUNDING:
            record["total_ratio"] = record["total"] / beside["total"]
            record["fixed_sketch_ratio"] = (record["over_fluctuations"] or 0) / beside["total"]
            record["error_ratio"] = record["error"] / beside["error"]
    values = [*_PARTS, *_RATIOS, "precision", "forget_items"]
    return join_records(spreads, by=[*_SETTING, "kernel"], values=values)


def write_report(found: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Writes variance.json, variance.md and the figures of what was measured of each corpus."""
    every = {name: [r for entry in found for r in entry[name]] for name in found[0]}
    joined, boundary = join_spreads(every["spreads"]), every["boundary"]
    of_slope = ("sigma", "slope", "by_noise")
    slopes = join_records(every["slopes"], by=["end", "size"], values=of_slope)
    powers = {
        f"{end} {name}": _power(
            {e["size"]: e[name]["mean"] for e in slopes if e["end"] == end and e[name]}
        )
        for end in ("forget", "retain")
        for name in ("slope", "sigma")
    }
    results = {"spreads": joined, "slopes": slopes, "boundary": boundary, "exponents": powers}
    write_json(out / "variance.json", results)
    text = [
        "Variances and errors are sums over coordinates, in units of the target's |Delta|^2; "
        "ratios are to the exact kernel's under the same fluctuation. Mean [least, largest] over "
        "corpora.",
    ]
    by, values = ["fluctuation", "moved", "kernel"], [*_PARTS, *_RATIOS, "precision"]
    for rule in ("threshold", "count"):
        for retain in ("antipodal", "random", "none"):
            shown = [e for e in joined if e["rule"] == rule and e["retain"] == retain]
            text.append(_section(f"Sets by {rule}, retain set: {retain}", shown, by, values))
    fitted = ", ".join(f"{name} {value:+.2f}" for name, value in powers.items())
    columns = tuple(tables.Column(name.replace("_", " ")) for name in boundary[0])
    cells = tuple(
        tuple(v if isinstance(v, str) else format(v, ".4g") for v in entry.values())
        for entry in boundary
    )
    text += [
        _section("Slope of selection in the exact score", slopes, ["end", "size"], of_slope),
        f"Fitted exponents of K: {fitted}. The paper's claim is -0.5 for the slope.",
        "## Boundary",
        tables.render_markdown(tables.Table(columns, cells)),
    ]
    write_text(out / "variance.md", "\n\n".join(text) + "\n")
    write_figures(joined, slopes, found[0], out)


def write_figures(
    joined: Sequence[Mapping[str, Any]],
    slopes: Sequence[Mapping[str, Any]],
    first: Mapping[str, Any],
    out: pathlib.Path,
) -> None:
    """Writes the figures, each as PNG and SVG; the boundary is that of the first corpus."""
    panels: dict[str, dict[str, list[Any]]] = {}
    for entry in joined:
        is_shown = entry["retain"] == "antipodal" and entry["rule"] == "threshold"
        if not is_shown or entry["kernel"] == "exact" or not entry["moved"]:
            continue
        curves = panels.setdefault(f"fluctuation: {entry['fluctuation']}", {})
        if entry["total_ratio"] is not None:
            point = float(entry["kernel"]), entry["total_ratio"]
            curves.setdefault(f"|xi| = {entry['moved']:g} |q|", []).append(point)
    axes: Any = {"xlabel": "K", "log_x": True, "log_y": True}
    figure = draw_curves(panels, ylabel="Var, sketched / Var, exact", **axes)
    drawing.save_figure(figure, out / "variance")
    curves = {}
    for entry in slopes:
        for name, label in (("slope", "measured"), ("by_noise", "1 / (sigma sqrt(2 pi))")):
            if entry[name] is not None:
                point = float(entry["size"]), entry[name]
                curves.setdefault(f"{entry['end']}: {label}", []).append(point)
    figure = draw_curves({"Slope of selection": curves}, ylabel="slope per unit of cosine", **axes)
    drawing.save_figure(figure, out / "slope")
    forget, retain = first["thresholds"]
    figure = draw_boundary(
        np.asarray(first["scores"]),
        forget_threshold=forget,
        retain_threshold=retain,
        gamma=GAMMA,
        xlabel="cosine with the query",
    )
    drawing.save_figure(figure, out / "boundary")
