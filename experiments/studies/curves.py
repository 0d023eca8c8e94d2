"""Figures of studies: curves with bands, and scores around thresholds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate.rates import Interval
from raslik_jax.report import drawing


# Curves and dots that are no strategies, in their order: the palette of Okabe and Ito, which stays
# apart for color-blind readers.
COLORS = tuple("#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #5B3A8E #7A7A7A".split())
_STYLES = tuple(zip(COLORS, "o^DPvshX", strict=True))


def make_axes(
    size: tuple[float, float], num: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels next to each other."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, num, squeeze=False, **options).ravel())


@drawing.styled
def draw_intervals(
    rows: Mapping[str, Mapping[str, Interval]], *, xlabel: str, title: str
) -> Any:
    """Returns the figure of values one below the other with one marker for each variant of a row.

    Args:
      rows: for each row, from the top, the variants' mean with the ends of a thin bar.
      xlabel: the name of the value.
      title: of the figure.
    """
    variants = list(dict.fromkeys(name for row in rows.values() for name in row))
    figure, (axes,) = make_axes((7.6, 1.3 + 0.3 * max(1, len(rows))))
    axes.set_title(title)
    handles: dict[str, Any] = {}
    for row, entries in enumerate(rows.values()):
        for variant, entry in entries.items():
            place = variants.index(variant)
            color, marker = _STYLES[place % len(_STYLES)]
            at = row + 0.16 * (place - (len(variants) - 1) / 2)
            axes.plot([entry["low"], entry["high"]], [at, at], color=color, lw=1.1, alpha=0.5)
            look = {"color": color, "marker": marker, "mec": "white", "mew": 0.8, "ms": 6}
            (drawn,) = axes.plot(entry["mean"], at, ls="", **look)
            handles.setdefault(variant, drawn)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(xlabel)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4)
    return figure


@drawing.styled
def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Interval]]]],
    *,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Any:
    """Returns the figure of curves with bands, one panel each; colors go by label.

    Args:
      panels: by title, the curves by label: points of x, and a mean with the ends of the band.
      xlabel: what x is.
      ylabel: what the mean is.
      log_x: x to the base 2, ticks where points are.
      log_y: y to the base 10.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    styles = {
        name: _STYLES[i % len(_STYLES)] for i, name in enumerate(labels)
    }
    size = (max(6.4, 0.8 + 4.1 * len(panels)), 4.0)
    figure, all_axes = make_axes(size, max(1, len(panels)))
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
            # Matplotlib would write powers of ten as formulas, and text is text here.
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            low, high = axes.get_ylim()
            if high / low < 100:  # few powers of ten, or none: between them too
                axes.yaxis.set_minor_formatter(
                    lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
                )
            else:
                axes.yaxis.set_minor_formatter("")
    all_axes[0].set_ylabel(ylabel)
    if len(labels) > 1:
        columns = 2 if len(panels) == 1 else 4
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
    return figure


@drawing.styled
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
    """
    figure, (whole, *zooms) = make_axes((11.4, 3.6), 3)
    whole.set_title("all scores")
    whole.hist(scores_N, bins=60, color=drawing.OTHER_COLOR, alpha=0.45)
    ends = (
        (forget_threshold, "forget", drawing.TARGET_COLOR),
        (retain_threshold, "retain", "#009E73"),
    )
    for axes, (threshold, name, color) in zip(zooms, ends, strict=True):
        whole.axvline(threshold, color=color, lw=1.3, ls="--")
        near = int((np.abs(scores_N - threshold) <= gamma).sum())
        axes.set_title(f"{near:,} near the {name} threshold")
        edges = np.linspace(threshold - 5 * gamma, threshold + 5 * gamma, 41)
        axes.hist(scores_N, bins=edges, color=drawing.OTHER_COLOR, alpha=0.45)
        axes.axvspan(threshold - gamma, threshold + gamma, color=color, alpha=0.12, lw=0)
        axes.axvline(threshold, color=color, lw=1.3, ls="--")
    for axes in (whole, *zooms):
        axes.set_xlabel(xlabel)
    whole.set_ylabel("examples")
    return figure
