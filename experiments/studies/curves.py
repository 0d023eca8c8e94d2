"""Figures of studies: curves with bands, and scores around thresholds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate.rates import Interval
from raslik_jax.report import drawing


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
        name: drawing.LINE_STYLES[i % len(drawing.LINE_STYLES)] for i, name in enumerate(labels)
    }
    size = (max(6.4, 0.8 + 4.1 * len(panels)), 4.0)
    figure, all_axes = drawing.make_axes(size, None, max(1, len(panels)))
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
    figure, (whole, *zooms) = drawing.make_axes((11.4, 3.6), None, 3)
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
