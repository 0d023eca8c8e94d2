"""Tables and figures of the study of the theorem."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.curves import draw_boundary, draw_curves
from experiments.studies.reports import join_records, section
from raslik_jax.base.files import write_json, write_text
from raslik_jax.report import drawing, tables

# Half the width of the thresholds' neighborhoods, as in the paper.
GAMMA = 0.01
_ROUNDING = 1e-6  # of |Delta|^2, with products summed in float32
_SETTING = ("fluctuation", "moved", "rule", "retain")
_PARTS = ("over_fluctuations", "over_sketches", "total", "error")
_RATIOS = ("fixed_sketch_ratio", "averaged_ratio", "total_ratio", "error_ratio")


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
            if record["over_sketches"] is not None:
                # The law of total variance: what is left is that of Delta's mean over sketches.
                averaged = record["total"] - record["over_sketches"]
                record["averaged_ratio"] = averaged / beside["total"]
            record["error_ratio"] = record["error"] / beside["error"]
    values = [*_PARTS, *_RATIOS, "precision", "forget_items", "strangers"]
    return join_records(spreads, by=[*_SETTING, "kernel"], values=values)


def join_found(
    found: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns spreads and slopes joined over corpora, and the boundary of each corpus."""
    every = {name: [r for entry in found for r in entry[name]] for name in found[0]}
    values = ("sigma", "slope", "by_noise")
    slopes = join_records(every["slopes"], by=["end", "size"], values=values)
    return join_spreads(every["spreads"]), slopes, every["boundary"]


def write_report(found: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Writes variance.json, variance.md and the figures of what was measured of each corpus."""
    joined, slopes, boundary = join_found(found)
    of_slope = ("sigma", "slope", "by_noise")
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
    by = ["fluctuation", "moved", "kernel"]
    values = [*_PARTS, *_RATIOS, "precision", "strangers"]
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
    draw_ratio(joined, "total_ratio", out / "variance")
    draw_ratio(joined, "averaged_ratio", out / "averaged")
    draw_slope(slopes, out / "slope")
    draw_thresholds(found[0], out / "boundary")


def _curves(
    joined: Sequence[Mapping[str, Any]], ratio: str
) -> dict[str, dict[str, list[tuple[float, Any]]]]:
    """Returns a ratio over K, a panel for each fluctuation; 1 is the exact kernel."""
    panels: dict[str, dict[str, list[Any]]] = {}
    for entry in joined:
        is_shown = entry["retain"] == "antipodal" and entry["rule"] == "threshold"
        if not is_shown or entry["kernel"] == "exact" or not entry["moved"]:
            continue
        curves = panels.setdefault(f"fluctuation: {entry['fluctuation']}", {})
        if entry[ratio] is not None:
            size = float(entry["kernel"])
            curves.setdefault(f"|xi| = {entry['moved']:g} |q|", []).append((size, entry[ratio]))
    panels = {title: curves for title, curves in panels.items() if curves}
    for curves in panels.values():
        sizes = sorted({size for points in curves.values() for size, _ in points})
        curves["exact kernel"] = [(size, point(1.0)) for size in sizes]
    return panels


def point(value: float) -> dict[str, float]:
    """Returns one value as `join_records` has it."""
    return {"mean": value, "low": value, "high": value}


def _slope_curves(slopes: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, Any]]]:
    """Returns the slope of selection over K, that of a smoothed step, and that of the proof."""
    curves: dict[str, list[tuple[float, Any]]] = {}
    for entry in slopes:
        for name, label in (("slope", "measured"), ("by_noise", "1 / (sigma sqrt(2 pi))")):
            if entry[name] is not None:
                measured = float(entry["size"]), entry[name]
                curves.setdefault(f"{entry['end']}: {label}", []).append(measured)
    if first := next(iter(curves.values()), []):
        size, start = first[0]
        claimed = [(at, point(start["mean"] * (size / at) ** 0.5)) for at, _ in first]
        curves["as K^-.5, the proof's"] = claimed
    return curves


def draw_ratio(joined: Sequence[Mapping[str, Any]], ratio: str, path: pathlib.Path) -> None:
    """Writes a ratio over K as PNG and SVG."""
    is_averaged = ratio == "averaged_ratio"
    label = "mean over sketches" if is_averaged else "sketched"
    # An unbiased estimate of a small variance may be below zero.
    axes: Any = {"xlabel": "K", "log_x": True, "log_y": not is_averaged}
    figure = draw_curves(_curves(joined, ratio), ylabel=f"Var, {label} / Var, exact", **axes)
    drawing.save_figure(figure, path)


def draw_slope(slopes: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Writes the slope of selection over K."""
    panels = {"Slope of selection": _slope_curves(slopes)}
    axes: Any = {"xlabel": "K", "log_x": True, "log_y": True}
    drawing.save_figure(draw_curves(panels, ylabel="slope per unit of cosine", **axes), path)


def draw_thresholds(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes the scores of one corpus around its thresholds."""
    forget, retain = found["thresholds"]
    figure = draw_boundary(
        np.asarray(found["scores"]),
        forget_threshold=forget,
        retain_threshold=retain,
        gamma=GAMMA,
        xlabel="cosine with the query",
    )
    drawing.save_figure(figure, path)
