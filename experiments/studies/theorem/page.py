"""Makes the figures and the tables of docs/studies/theorem.md again, from the stored results.

  python experiments/studies/theorem/page.py --out=docs

The command writes variance.png, averaged.png, slope.png and boundary.png. `make tables` writes the
tables. results/ has the joined results of a run on SmolLM2, whose draws were not kept. It also has
the results of planted gradients. `--store=FILE` copies them there from the variance_draws.json that
measure.py writes.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np

from experiments.studies.reports import markdown_table
from experiments.studies.theorem import report
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.report import tables

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
FIGURES = ("variance", "averaged", "slope", "boundary")
_DIGITS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The folder of the figures, and results to store."""

    out: str = setting("docs", "Folder of the figures.")
    store: tuple[str, ...] = setting((), "Results of planted gradients to store first.")


class Results:
    """The measurements of one kind of gradients, joined over its corpora."""

    def __init__(
        self,
        spreads: Sequence[Mapping[str, Any]],
        slopes: Sequence[Mapping[str, Any]],
        boundary: Sequence[Mapping[str, Any]],
    ):
        self.spreads = [row for row in spreads if row["retain"] == "antipodal"]
        self.slopes, self.boundary = slopes, boundary


def read_planted() -> list[dict[str, Any]]:
    """Returns the stored results of planted corpora."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("planted-*.json"))]


def read_results() -> dict[str, Results]:
    """Returns the stored results by the kind of gradients."""
    stored = json.loads((RESULTS / "smollm2.json").read_text("utf-8"))

    def joined(row: Mapping[str, Any], values: Sequence[str]) -> dict[str, Any]:
        return dict(row) | {name: report.point(row[name]) for name in values}

    ratios, slopes = ("total_ratio", "error_ratio"), ("slope", "by_noise")
    real = Results(
        [joined(row, ratios) | {"retain": "antipodal"} for row in stored["spreads"]],
        [joined(row, slopes) for row in stored["slopes"]],
        [stored["boundary"]],
    )
    return {"real": real, "planted": Results(*report.join_found(read_planted()))}


def store(path: pathlib.Path) -> None:
    """Copies one corpus' results: numbers with five digits, retain sets by both poles alone."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(part) for name, part in value.items()}
        if isinstance(value, list):
            return [rounded(part) for part in value]
        return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value

    found = rounded(json.loads(path.read_text(encoding="utf-8")))
    found["spreads"] = [row for row in found["spreads"] if row["retain"] == "antipodal"]
    parts = []
    for name, rows in found.items():
        is_flat = not isinstance(rows[0], dict)
        lines = [json.dumps(rows)[1:-1]] if is_flat else map(json.dumps, rows)
        parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(lines) + "\n]")
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    (RESULTS / f"{path.parent.name}.json").write_text(text)


def _number(entry: Mapping[str, float] | None) -> str:
    if entry is None:
        return tables.NOT_KNOWN
    value = entry["mean"]
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.2f}"


def _as_stored(entry: Mapping[str, float]) -> str:
    return f"{entry['mean']:g}"


def ratio_table(
    results: Results, ratios: Sequence[str], rule: str, number: Callable[[Any], str] = _number
) -> str:
    """Returns ratios to the exact kernel, the second in parentheses: fluctuations by K."""
    shown = [row for row in results.spreads if row["rule"] == rule and row["moved"]]
    shown = [row for row in shown if row["kernel"] != "exact"]
    sizes = list(dict.fromkeys(row["kernel"] for row in shown))
    cells: dict[str, dict[str, str]] = {}
    for row in shown:
        first, *rest = (number(row[ratio]) for ratio in ratios)
        text = first + "".join(f" ({other})" for other in rest if first != tables.NOT_KNOWN)
        cells.setdefault(f"{row['fluctuation']} {row['moved']:g}", {})[row["kernel"]] = text
    rows = [[name, *(found[size] for size in sizes)] for name, found in cells.items()]
    return markdown_table(["fluctuation", *(f"K = {int(size):,}" for size in sizes)], rows)


def size_table(results: Results) -> str:
    """Returns noise, slope and strangers of the forget set at the unmoved query, by K."""
    still = {
        row["kernel"]: row["strangers"]
        for row in results.spreads
        if not row["moved"] and row["rule"] == "count"
    }
    cosines = [row for row in results.boundary if row["scale"] == "cosine"]
    density = np.mean([row["boundary_forget_density"] * row["items"] for row in cosines])
    rows = []
    for row in results.slopes:
        if row["end"] != "forget":
            continue
        sigma = row["sigma"]["mean"]
        expected = density * sigma / np.sqrt(2 * np.pi)
        cells = [f"{row['size']:,}", f"{sigma:.4f}", _number(row["slope"])]
        cells += [_number(row["by_noise"]), f"{still[str(row['size'])]['mean']:.1f}"]
        rows.append([*cells, f"{expected:.1f}"])
    return markdown_table(["K", "sigma", "slope", "1 / (sigma sqrt(2 pi))", "strangers", "expected"], rows)


def summary_table(found: Mapping[str, Results]) -> str:
    """Returns the ratios of variances of the page: real gradients, by threshold and by count."""
    names = {"threshold": "thresholds", "count": "count"}
    lines = []
    for rule, title in names.items():
        whole = ratio_table(found["real"], ("total_ratio",), rule, _as_stored).splitlines()
        head, rows = whole[0], whole[2:]
        shown = [row for row in rows if not row.startswith("| isotropic")]
        lines += [f"| {title} {row}" for row in shown]
    width = head.count("K = ")
    return "\n".join([f"| sets cut by {head}", "|---|---|" + "--:|" * width, *lines])


def near_table(found: Mapping[str, Results]) -> str:
    """Returns how many rows are within .01 of the thresholds, by raw cosines."""
    rows = []
    for name, results in found.items():
        for row in results.boundary:
            if row.get("scale", "cosine") != "cosine":
                continue
            given = {key.removeprefix("boundary_"): value for key, value in row.items()}
            ends = [given.get(f"{end}_threshold", given.get(end)) for end in ("forget", "retain")]
            near = [str(given[f"near_{end}"]) for end in ("forget", "retain")]
            rows.append([name, str(given["items"]), *(f"{end:.3f}" for end in ends), *near])
    head = ["gradients", "rows", "forget at", "retain at", "near the first", "near the second"]
    return markdown_table(head, rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    found = read_results()
    both = ("total_ratio", "error_ratio")

    def ratios(kind: str, names: Sequence[str], rule: str, *number: Any) -> Callable[[], str]:
        return lambda: ratio_table(found[kind], names, rule, *number)

    return {
        "summary": lambda: summary_table(found),
        "total variance (and error), real, thresholds": ratios(
            "real", both, "threshold", _as_stored
        ),
        "total variance (and error), real, count": ratios("real", both, "count", _as_stored),
        "total variance (and error), planted, thresholds": ratios("planted", both, "threshold"),
        "variance of the mean over sketches, planted": ratios(
            "planted", ("averaged_ratio",), "threshold"
        ),
        "sizes": lambda: size_table(found["planted"]),
        "rows within .01 of the thresholds": lambda: near_table(found),
    }


def write_figures(folder: pathlib.Path) -> None:
    """Writes the figures of the page."""
    found = read_results()
    report.draw_ratio(found["real"].spreads, "total_ratio", folder / "variance")
    report.draw_ratio(found["planted"].spreads, "averaged_ratio", folder / "averaged")
    report.draw_slope(found["real"].slopes, folder / "slope")
    report.draw_thresholds(read_planted()[0], folder / "boundary")


def main(options: Options) -> None:
    """Stores what is named, and writes the figures."""
    for path in options.store:
        store(pathlib.Path(path))
    command.require("matplotlib")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_figures(folder)
        for figure in FIGURES:
            made = folder / f"{figure}.png"
            (pathlib.Path(options.out) / made.name).write_bytes(made.read_bytes())


if __name__ == "__main__":
    command.start(main, Options())
