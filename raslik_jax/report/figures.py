"""Figures of a run, as PNG and SVG whose bytes depend on nothing but the numbers shown.

Drawing needs Matplotlib (extra `eval`), which is imported when the first figure is drawn. Figures
are made without pyplot, so that no global state is left behind and no display is needed.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.evaluate.summary import IntervalEntry, MethodEntry, Metrics, ModelEntry, rate_of
from raslik_jax.report.tables import algorithm_name, strategy_name

# The palette of Okabe and Ito, which stays apart for color-blind readers; every strategy also has
# a marker of its own, for print in gray.
_STRATEGY_STYLES = {
    "random": ("#7A7A7A", "o"),
    "bm25": ("#E69F00", "v"),
    "embedding": ("#CC79A7", "P"),
    "oracle": ("#009E73", "D"),
    "raslik_f": ("#56B4E9", "s"),
    "raslik": ("#D55E00", "^"),
    "exact": ("#0072B2", "X"),
}
_OTHER_STYLES = (("#0072B2", "<"), ("#B59F00", ">"), ("#8C4A2F", "p"), ("#5B3A8E", "h"))
_TARGET_COLOR, _OTHER_COLOR = "#D55E00", "#0072B2"
# Curves and dots that are no strategies, in their order.
_LINE_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "^"),
    ("#009E73", "D"),
    ("#CC79A7", "P"),
    ("#E69F00", "v"),
    ("#56B4E9", "s"),
    ("#5B3A8E", "h"),
    ("#7A7A7A", "X"),
)
_INK, _FAINT, _GOLD = "#222222", "#B8B8B8", "#F0C000"
_STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.09,
    "font.family": "DejaVu Sans",  # comes with Matplotlib: the same letters on every machine
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#ECECEC",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "legend.frameon": False,
    "svg.hashsalt": "raslik_jax",
    "svg.fonttype": "path",
}


def save_figure(figure: Any, stem: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a figure as `<stem>.png` and `<stem>.svg` and returns both paths.

    The files hold no date and no version, and their ids come from a fixed salt: the same figure
    drawn by the same Matplotlib gives the same bytes. Each file appears whole or not at all.

    Args:
      figure: a Matplotlib figure, as the functions below return it.
      stem: path without extension; its folder exists.
    """
    import matplotlib.style

    paths = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    metadata: tuple[dict[str, Any], ...] = (
        {"Software": None},
        {"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        for path, entries in zip(paths, metadata, strict=True):
            partial = path.with_name(path.name + ".partial")
            figure.savefig(partial, format=path.suffix[1:], metadata=entries)
            os.replace(partial, path)
    return paths


def draw_frontier(metrics: Metrics) -> Any:
    """Returns the figure of forgetting against retention, one panel per algorithm.

    R lies on x and F on y, so the ideal is at the bottom right; thin arcs join points at equal
    Euclidean distance from it. Each strategy is a path over epochs that starts at the fine-tuned
    model; its last epoch has the large marker, filled if Pareto-optimal there, and thin bars for
    the 95 % intervals. The dotted line is the backbone's F, the floor of honest forgetting.

    Args:
      metrics: the content of metrics.json.

    Returns:
      A Matplotlib figure.
    """
    import matplotlib.figure
    import matplotlib.style

    algorithms = list(dict.fromkeys(entry["algorithm"] for entry in metrics["methods"]))
    strategies = list(dict.fromkeys(entry["strategy"] for entry in metrics["methods"]))
    styles = strategy_styles(strategies)
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(1.2 + 4.4 * max(1, len(algorithms)), 5.2))
        all_axes = figure.subplots(
            1, max(1, len(algorithms)), sharex=True, sharey=True, squeeze=False
        )[0]
        for axes, algorithm in zip(all_axes, algorithms or [""], strict=True):
            axes.set_title(algorithm_name(algorithm))
            _draw_ground(axes, metrics)
            for strategy in strategies:
                path = sorted(
                    (
                        entry
                        for entry in metrics["methods"]
                        if entry["algorithm"] == algorithm and entry["strategy"] == strategy
                    ),
                    key=lambda entry: entry["epoch"],
                )
                if path:
                    _draw_path(axes, metrics["finetuned"], path, *styles[strategy])
            axes.set_xlabel("R, retain rate (higher is better)")
        all_axes[0].set_ylabel("F, forget rate (lower is better)")
        _set_limits(all_axes[0], metrics)

        note = [
            "Small markers: epochs. Large: the last one, filled if Pareto-optimal,",
            "with 95 % intervals. Arcs: equal distance to the ideal.",
        ]
        narrow = len(all_axes) == 1
        legend = figure.legend(
            handles=_frontier_legend(strategies, "backbone" in metrics),
            loc="outside lower center",
            ncols=4 if narrow else 7,
            title=("\n" if narrow else " ").join(note),
            title_fontproperties={"size": 8.5},
        )
        legend.get_title().set(color="#555555", multialignment="center")
    return figure


def _frontier_legend(strategies: Sequence[str], has_backbone: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    styles = strategy_styles(strategies)
    handles = [
        Line2D([], [], color=styles[name][0], marker=styles[name][1], label=strategy_name(name))
        for name in strategies
    ]
    marks = [("Fine-tuned", "o", 8, _INK), ("Backbone", "X", 9, _INK), ("Ideal", "*", 14, _GOLD)]
    handles += [
        Line2D(
            [],
            [],
            ls="",
            color=color,
            marker=marker,
            ms=size,
            label=label,
            mec="white" if color == _INK else _INK,
            mew=0.7,
        )
        for label, marker, size, color in marks
        if has_backbone or label != "Backbone"
    ]
    return handles


def strategy_styles(strategies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the color and the marker of each strategy, the same in every figure of a run."""
    others = iter(_OTHER_STYLES * len(strategies))
    return {name: _STRATEGY_STYLES.get(name) or next(others) for name in strategies}


def _draw_ground(axes: Any, metrics: Metrics) -> None:
    """Draws what every path is read against: ideal, equal distances, fine-tuned, backbone."""
    angle = np.linspace(0, np.pi / 2, 91)
    for radius in np.arange(0.2, 1.5, 0.2):
        axes.plot(
            1 - radius * np.cos(angle), radius * np.sin(angle), color="#DCDCDC", lw=0.7, zorder=0.5
        )
    axes.plot(1, 0, marker="*", color=_GOLD, ms=17, mec=_INK, mew=0.7, zorder=5, clip_on=False)
    if "backbone" in metrics:
        retain, forget = _point(metrics["backbone"])
        axes.axhline(forget, color=_INK, ls=":", lw=1, zorder=1)
        axes.annotate(
            "F of the backbone",
            (0, forget),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
        axes.plot(retain, forget, marker="X", color=_INK, ms=10, mec="white", zorder=4)
    retain, forget = _point(metrics["finetuned"])
    axes.plot(retain, forget, marker="o", color=_INK, ms=9, mec="white", zorder=6, clip_on=False)


def _draw_path(
    axes: Any, start: ModelEntry, path: Sequence[MethodEntry], color: str, marker: str
) -> None:
    points = np.array([_point(entry) for entry in (start, *path)])
    last = path[-1]
    axes.plot(*points.T, color=color, lw=1.6, alpha=0.9, zorder=3)
    axes.plot(*points[1:-1].T, color=color, ls="", marker=marker, ms=4, zorder=3)
    retain, forget = points[-1]
    bars = {"color": color, "lw": 1.1, "alpha": 0.8, "zorder": 3.5}
    axes.plot(
        [rate_of(last, "retain")["low"], rate_of(last, "retain")["high"]], [forget, forget], **bars
    )
    axes.plot(
        [retain, retain], [rate_of(last, "forget")["low"], rate_of(last, "forget")["high"]], **bars
    )
    filled = {"mfc": color, "mec": "white", "mew": 0.8, "ms": 10.5}
    hollow = {"mfc": "white", "mec": color, "mew": 1.7, "ms": 8.5}
    axes.plot(retain, forget, marker=marker, zorder=4, **(filled if last["pareto"] else hollow))


def _set_limits(axes: Any, metrics: Metrics) -> None:
    models: list[ModelEntry] = [metrics["finetuned"], *metrics["methods"]]
    if "backbone" in metrics:
        models.append(metrics["backbone"])
    lowest = min(rate_of(model, "retain")["low"] for model in models)
    highest = max(rate_of(model, "forget")["high"] for model in models)
    axes.set_xlim(max(0.0, np.floor(lowest * 10 - 0.2) / 10) - 0.01, 1.02)
    axes.set_ylim(-0.02, max(highest, 1.0) + 0.03)


def _point(entry: ModelEntry) -> tuple[float, float]:
    return rate_of(entry, "retain")["mean"], rate_of(entry, "forget")["mean"]


def draw_scores(
    scores_N: Float[np.ndarray, " N"],
    is_target_N: Bool[np.ndarray, " N"] | None = None,
    *,
    forget_threshold: float,
    retain_threshold: float,
    num_bins: int = 60,
) -> Any:
    """Returns the histogram of retrieval scores, split by label where labels are known.

    Targets are few, so each kind is drawn as a share of its own number. The shaded ends are the
    forget set (at or above its threshold) and the retain set (at or below its own).

    Args:
      scores_N: the forget scores of the training examples, finite.
      is_target_N: which of them are labeled targets; None if nobody knows.
      forget_threshold: the lowest score in the forget set.
      retain_threshold: the highest score in the retain set.
      num_bins: bins over the range of the scores.

    Returns:
      A Matplotlib figure.
    """
    import matplotlib.figure
    import matplotlib.style

    groups = [("all examples", np.ones(len(scores_N), np.bool_), _OTHER_COLOR)]
    if is_target_N is not None:
        groups = [
            ("other examples", ~is_target_N, _OTHER_COLOR),
            ("targets", is_target_N, _TARGET_COLOR),
        ]
    edges = np.linspace(scores_N.min(), scores_N.max(), num_bins + 1)
    if edges[0] == edges[-1]:
        edges = edges + np.linspace(-0.5, 0.5, num_bins + 1)
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(7.6, 3.8))
        axes = figure.subplots()
        tallest = 0.0
        for label, is_member_N, color in groups:
            count = int(is_member_N.sum())
            share = 100 * np.histogram(scores_N[is_member_N], edges)[0] / max(1, count)
            tallest = max(tallest, float(share.max()))
            axes.stairs(share, edges, fill=True, color=color, alpha=0.35)
            axes.stairs(share, edges, color=color, lw=1.4, label=f"{label} ({count:,})")
        top = 1.22 * tallest
        axes.set_ylim(0, top)
        axes.set_xlim(edges[0], edges[-1])
        for threshold, end, label, side in (
            (forget_threshold, edges[-1], "forget set", "right"),
            (retain_threshold, edges[0], "retain set", "left"),
        ):
            axes.axvspan(threshold, end, color="#000000", alpha=0.05, lw=0)
            axes.axvline(threshold, color=_INK, lw=1, ls="--")
            axes.annotate(
                label,
                (end, top),
                xytext=(-4 if side == "right" else 4, -4),
                textcoords="offset points",
                ha=side,
                va="top",
                fontsize=9,
            )
        axes.set_xlabel("retrieval score (forget direction)")
        axes.set_ylabel("share of its kind (%)")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_boundary(
    scores_N: Float[np.ndarray, " N"],
    *,
    forget_threshold: float,
    retain_threshold: float,
    gamma: float,
    xlabel: str,
) -> Any:
    """Returns the paper's three histograms: all scores, and around each of the thresholds.

    Args:
      scores_N: the scores, finite.
      forget_threshold: tau_F.
      retain_threshold: -tau_R.
      gamma: half the width of the neighborhoods, shaded; the zooms show five of it to each side.
      xlabel: what the scores are.

    Returns:
      A Matplotlib figure; the panels' titles name how many scores are in the neighborhood.
    """
    import matplotlib.figure
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(11.4, 3.6))
        whole, *zooms = figure.subplots(1, 3)
        whole.set_title("all scores")
        whole.hist(scores_N, bins=60, color=_OTHER_COLOR, alpha=0.45)
        ends = (forget_threshold, "forget", _TARGET_COLOR), (retain_threshold, "retain", "#009E73")
        for axes, (threshold, name, color) in zip(zooms, ends, strict=True):
            whole.axvline(threshold, color=color, lw=1.3, ls="--")
            near = int((np.abs(scores_N - threshold) <= gamma).sum())
            axes.set_title(f"{near:,} near the {name} threshold")
            edges = np.linspace(threshold - 5 * gamma, threshold + 5 * gamma, 41)
            axes.hist(scores_N, bins=edges, color=_OTHER_COLOR, alpha=0.45)
            axes.axvspan(threshold - gamma, threshold + gamma, color=color, alpha=0.12, lw=0)
            axes.axvline(threshold, color=color, lw=1.3, ls="--")
        for axes in (whole, *zooms):
            axes.set_xlabel(xlabel)
        whole.set_ylabel("examples")
    return figure


def draw_losses(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """Returns the figure of loss curves, one panel each.

    The faint line is the loss of every step, the strong one its running mean over a twentieth of
    the steps.

    Args:
      panels: for each panel title, the curves by label: one loss per optimizer step.

    Returns:
      A Matplotlib figure; a panel without steps stays empty.
    """
    import matplotlib.figure
    import matplotlib.style

    colors = (_OTHER_COLOR, _TARGET_COLOR, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    num_columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    num_rows = -(-max(1, len(panels)) // num_columns)
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(3.9 * num_columns + 0.4, 3.0 * num_rows))
        all_axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, (title, curves) in zip(all_axes, panels.items(), strict=False):
            axes.set_title(title)
            for position, (label, losses) in enumerate(curves.items()):
                color = colors[position % len(colors)]
                steps = np.arange(1, len(losses) + 1)
                axes.plot(steps, losses, color=color, lw=0.8, alpha=0.3)
                axes.plot(
                    steps,
                    running_mean(np.asarray(losses, np.float64)),
                    color=color,
                    lw=1.8,
                    label=label,
                )
            axes.set_xlabel("optimizer step")
            axes.set_ylabel("loss (nats)")
            if len(curves) > 1:
                axes.legend()
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
    return figure


def draw_dots(
    rows: Mapping[str, Mapping[str, IntervalEntry]], *, xlabel: str, title: str = ""
) -> Any:
    """Returns the figure of one value for each row, one marker for each variant of it.

    Args:
      rows: for each row, from the top, the variants' mean with the ends of a thin bar.
      xlabel: what the value is.
      title: of the figure.

    Returns:
      A Matplotlib figure; its height grows with the rows.
    """
    import matplotlib.figure
    import matplotlib.style

    names = list(rows)
    variants = list(dict.fromkeys(name for row in rows.values() for name in row))
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(7.6, 1.3 + 0.3 * max(1, len(rows))))
        axes = figure.subplots()
        axes.set_title(title)
        for place, variant in enumerate(variants):
            color, marker = _LINE_STYLES[place % len(_LINE_STYLES)]
            label: str | None = variant
            shift = 0.16 * (place - (len(variants) - 1) / 2)
            for row, entries in enumerate(rows.values()):
                if variant not in entries:
                    continue
                entry = entries[variant]
                ends = [entry["low"], entry["high"]]
                axes.plot(ends, [row + shift] * 2, color=color, lw=1.1, alpha=0.8)
                axes.plot(
                    entry["mean"],
                    row + shift,
                    color=color,
                    marker=marker,
                    ls="",
                    mec="white",
                    mew=0.7,
                    label=label,
                )
                label = None
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(xlabel)
        if len(variants) > 1:
            figure.legend(loc="outside upper center", ncols=4)
    return figure


def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, IntervalEntry]]]],
    *,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Any:
    """Returns the figure of curves with bands, one panel each; colors go by label.

    Args:
      panels: for each panel title, the curves by label: points of x, and a mean with the ends of
        the band.
      xlabel: what x is.
      ylabel: what the mean is.
      log_x: x to the base 2, ticks where points are.
      log_y: y to the base 10.

    Returns:
      A Matplotlib figure.
    """
    import matplotlib.figure
    import matplotlib.style

    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    styles = {name: _LINE_STYLES[i % len(_LINE_STYLES)] for i, name in enumerate(labels)}
    with matplotlib.style.context(["default", _STYLE], after_reset=True):
        figure = matplotlib.figure.Figure(figsize=(max(6.4, 0.8 + 4.1 * len(panels)), 4.0))
        all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axes, (title, curves) in zip(all_axes, panels.items(), strict=False):
            axes.set_title(title)
            axes.set_xlabel(xlabel)
            for label, points in curves.items():
                color, marker = styles[label]
                x = [at for at, _ in points]
                ends = [[entry[end] for _, entry in points] for end in ("low", "mean", "high")]
                axes.fill_between(x, ends[0], ends[2], color=color, alpha=0.15, lw=0)
                (handles[label],) = axes.plot(
                    x, ends[1], color=color, marker=marker, ms=5, lw=1.6, mec="white", mew=0.6
                )
            if log_x:
                axes.set_xscale("log", base=2)
                ticks = sorted({at for points in curves.values() for at, _ in points})
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
            if log_y:
                axes.set_yscale("log")
        all_axes[0].set_ylabel(ylabel)
        if len(labels) > 1:
            columns = 2 if len(panels) == 1 else 4
            figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
    return figure


def running_mean(losses: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    """Returns the mean over a window around each step, cut off at both ends."""
    reach = len(losses) // 40
    total = np.concatenate([[0.0], np.cumsum(losses)])
    step = np.arange(len(losses))
    first, last = np.maximum(step - reach, 0), np.minimum(step + reach + 1, len(losses))
    return (total[last] - total[first]) / (last - first)
