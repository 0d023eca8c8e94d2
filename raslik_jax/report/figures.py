"""Figures of a run: panels for the page, or files if no `frame` is given."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.evaluate.rates import Interval
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report import drawing
from raslik_jax.report.drawing import INK, Frame, make_panel, note, styled
from raslik_jax.report.names import strategy_name, strategy_styles
from raslik_jax.report.tables import format_interval
from raslik_jax.report.tidy import Model, collect_models, is_probed

# Marker, size and color of what every strategy is held against.
REFERENCE_MARKS = {"finetuned": ("o", 12, INK), "backbone": ("X", 13, INK)}
REFERENCE_MARKS |= {"ideal": ("*", 20, drawing.GOLD)}
# Curves are drawn through at most as many points.
_MAX_POINTS = 240


# frontier ---------------------------------------------------------------------------------------


@styled
def draw_frontier(metrics: Metrics, algorithm: str, *, retain_from: float, frame: Frame) -> Any:
    """Returns the figure of forgetting against retention of one algorithm.

    R is on x and F on y, so the ideal is at the bottom right. Thin arcs join points at equal
    Euclidean distance from it. Each strategy is a path over epochs that starts at the fine-tuned
    model. Its last epoch has the large marker, filled if Pareto-optimal there, and thin bars for
    the 95 % intervals. The dotted line is the base's F, below which F shows no more forgetting.

    Args:
      metrics: the content of metrics.json.
      algorithm: the one to draw.
      retain_from: where the axis of R starts (`lowest_retain`).
      frame: frame of a panel for the page, which has its own legend, also in other figures.
    """
    models = collect_models([metrics], is_last=False)
    references = [model for model in models if not model.algorithm]
    methods = [model for model in models if model.algorithm]
    figure, axes = make_panel(frame)
    high = max(1.0, *(model.intervals("forget")[0]["high"] for model in models))
    _draw_ground(axes, references)
    for strategy, style in strategy_styles([model.strategy for model in methods]).items():
        path = [m for m in methods if (m.algorithm, m.strategy) == (algorithm, strategy)]
        if path:
            path.sort(key=lambda model: model.epochs)
            is_step = is_probed(metrics["settings"], algorithm)
            _draw_path(axes, [models[0], *path], *style, is_step=is_step)
    margin = 0.03 * (1 - retain_from)
    axes.set_xlabel("R, retain rate (higher is better)")
    axes.set_xlim(retain_from - margin, 1 + margin)
    axes.set_ylim(-0.03, high + 0.03)
    axes.set_ylabel("F, forget rate (lower is better)")
    return figure


def lowest_retain(metrics: Metrics) -> float:
    """Returns the start of the axis of R at which all points of a run are visible."""
    lowest = min(
        rate["low"]
        for model in collect_models([metrics], is_last=False)
        for rate in model.intervals("retain")
    )
    return max(0.0, min(0.95, float(np.floor(lowest * 20)) / 20))


def _draw_ground(axes: Any, references: Sequence[Model]) -> None:
    """Draws the references of every path: ideal, equal distances, fine-tuned, backbone."""
    angle = np.linspace(0, np.pi / 2, 46)
    for radius in np.arange(0.2, 1.5, 0.2):
        points = 1 - radius * np.cos(angle), radius * np.sin(angle)
        axes.plot(*points, color="#DCDCDC", lw=0.8, zorder=0.5)
    marker, size, color = REFERENCE_MARKS["ideal"]
    axes.plot(1, 0, marker=marker, color=color, ms=size, mec=INK, mew=0.7, zorder=5, clip_on=False)
    for model in references:
        marker, size, color = REFERENCE_MARKS[model.strategy]
        is_floor = model.strategy == "backbone"
        look = {"marker": marker, "color": color, "ms": size, "mec": "white", "zorder": 6}
        tip = _tip(strategy_name(model.strategy), model)
        axes.plot(*_point(model), clip_on=is_floor, gid=tip, **look)
        if is_floor:
            floor = model.value("forget")
            axes.axhline(floor, color=INK, ls=":", lw=1.1, zorder=1)
            note(axes, "F of the base", (0, floor), (4, 3), "axes fraction", "data")


def _draw_path(axes: Any, path: Sequence[Model], color: str, marker: str, *, is_step: bool) -> None:
    axes.plot(*zip(*map(_point, path), strict=True), color=color, lw=2, alpha=0.9, zorder=3)
    last = path[-1]
    (retain, forget), bars = _point(last), {"color": color, "lw": 1.2, "alpha": 0.8, "zorder": 3.5}
    ends = {name: last.intervals(name)[0] for name in ("retain", "forget")}
    axes.plot([ends["retain"]["low"], ends["retain"]["high"]], [forget, forget], **bars)
    axes.plot([retain, retain], [ends["forget"]["low"], ends["forget"]["high"]], **bars)
    small = {"color": color, "ms": 5}
    filled = {"mfc": color, "mec": "white", "mew": 0.8, "ms": 13}
    hollow = {"mfc": "white", "mec": color, "mew": 2, "ms": 11}
    for model in path[1:]:
        look = small if model is not last else filled if model.value("pareto") else hollow
        when = "the step that its probes chose" if is_step else f"epoch {model.epochs[0]}"
        tip = _tip(f"{strategy_name(model.strategy)}, {when}", model)
        axes.plot(*_point(model), ls="", marker=marker, zorder=4, gid=tip, **look)


def _point(model: Model) -> tuple[float, float]:
    return model.value("retain"), model.value("forget")


def _tip(name: str, model: Model) -> str:
    forget, retain = (format_interval(model.intervals(rate)[0]) for rate in ("forget", "retain"))
    return f"tip:{name}: F {forget}, R {retain}"


# others -----------------------------------------------------------------------------------------


@styled
def draw_intervals(
    rows: Mapping[str, Interval],
    *,
    xlabel: str,
    colors: Mapping[str, str],
    start: float,
    floor: float | None,
    frame: Frame,
) -> Any:
    """Returns the figure of values one below the other, with their means in numbers.

    Args:
      rows: values from the top, each with the ends of a bar.
      xlabel: the name of the value.
      colors: colors of the rows.
      start: start of the axis; it ends at 1.
      floor: the place of a dotted line.
      frame: frame of a panel for the page.
    """
    figure, axes = make_panel(frame)
    if floor is not None:
        axes.axvline(floor, color=INK, ls=":", lw=1.5)
    for row, (name, entry) in enumerate(rows.items()):
        low, mean, high = (max(entry[end], start) for end in ("low", "mean", "high"))
        color, tip = colors[name], f"tip:{name}: {format_interval(entry)}"
        axes.plot([low, high], [row, row], color=color, lw=3.5, alpha=0.5)
        look = {"marker": "o", "mec": "white", "mew": 0.8, "ms": 10}
        axes.plot(mean, row, ls="", color=color, gid=tip, **look)
        place = "axes fraction", "data"
        note(axes, f"{entry['mean']:.3f}", (1, row), (10, 0), *place, va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(xlabel)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(start, 1)
    return figure


@styled
def draw_scores(
    score_N: Float[np.ndarray, " N"],
    is_target_N: Bool[np.ndarray, " N"] | None = None,
    *,
    forget: tuple[float, float] | None = None,
    retain: tuple[float, float] | None = None,
    num_bins: int = 60,
    frame: Frame,
) -> Any:
    """Returns the histogram of retrieval scores, split by label if labels are known.

    Targets are few, so each kind is drawn as a share of its own number. The shaded areas are the
    sets from the lowest to the highest score of each, with a dashed line at its inner end. Scores
    are the forget scores of the training examples, finite.
    """
    groups = [(np.ones(len(score_N), np.bool_), drawing.OTHER_COLOR)]
    if is_target_N is not None:
        groups = [(~is_target_N, drawing.OTHER_COLOR)]
        groups.append((is_target_N, drawing.TARGET_COLOR))
    edges = np.linspace(score_N.min(), score_N.max(), num_bins + 1)
    if edges[0] == edges[-1]:
        edges = edges + np.linspace(-0.5, 0.5, num_bins + 1)
    figure, axes = make_panel(frame)
    tallest = 0.0
    for is_member_N, color in groups:
        count = int(is_member_N.sum())
        share = 100 * np.histogram(score_N[is_member_N], edges)[0] / max(1, count)
        tallest = max(tallest, float(share.max()))
        axes.stairs(share, edges, fill=True, color=color, alpha=0.35)
        axes.stairs(share, edges, color=color, lw=1.4)
    axes.set_ylim(0, 1.22 * tallest)
    axes.set_xlim(edges[0], edges[-1])
    for ends, label, side, offset in (
        (forget, "forget set", "right", -5),
        (retain and retain[::-1], "retain set", "left", 5),
    ):
        if ends is None:
            continue
        threshold, end = ends
        axes.axvspan(*sorted(ends), color="#000000", alpha=0.05, lw=0)
        axes.axvline(threshold, color=INK, lw=1, ls="--")
        # Beside a zone too narrow for its name.
        is_wide = abs(end - threshold) > 0.2 * (edges[-1] - edges[0])
        place = (end if is_wide else threshold, 1), (offset, -4), "data", "axes fraction"
        note(axes, label, *place, ha=side, va="top")
    axes.set_xlabel("retrieval score (forget direction)")
    axes.set_ylabel("share of its kind (%)")
    return figure


@styled
def draw_cut(
    score_N: Float[np.ndarray, " N"],
    *,
    num_forget: int,
    middle: float,
    edge: float,
    frame: Frame | None = None,
) -> Any:
    """Returns the figure of all scores in order with the noise band and the cut.

    Args:
      score_N: forget scores of the training examples; minus infinity for none.
      num_forget: number of examples that stand out, above the cut; 0 draws no cut.
      middle: median of the scores of unrelated examples.
      edge: the highest of these scores; the band reaches equally far down.
      frame: frame of a panel for the page.
    """
    ranked_N = np.sort(score_N[score_N > -np.inf])[::-1]
    rank_N = np.arange(1, len(ranked_N) + 1)
    figure, axes = make_panel(frame)
    if frame:  # a page has no more points than the eye separates
        kept = np.unique(np.geomspace(1, max(len(ranked_N), 1), 600).astype(np.int64)) - 1
        kept = np.union1d(kept, np.arange(num_forget - 1, num_forget + 1)[: 2 * bool(num_forget)])
        kept = kept[kept < len(ranked_N)]
    else:
        kept = rank_N - 1
    axes.axhspan(2 * middle - edge, edge, color="#000000", alpha=0.07, lw=0)
    axes.plot(rank_N[kept], ranked_N[kept], color=drawing.OTHER_COLOR, lw=1.6)
    note(axes, "noise band", (1, edge), (4, -4), "data", "data", ha="left", va="top")
    if num_forget:
        color, below = drawing.TARGET_COLOR, ranked_N[num_forget : num_forget + 1]
        best = kept[kept < num_forget]
        axes.plot(rank_N[best], ranked_N[best], color=color, lw=2.4)
        cut = float(np.mean([ranked_N[num_forget - 1], *below]))
        axes.axhline(cut, color=INK, lw=1, ls="--")
        axes.axvline(num_forget + 0.5, color=INK, lw=1, ls="--")
        place = (num_forget + 0.5, 1), (5, -4), "data", "axes fraction"
        note(axes, f"{num_forget:,} rows", *place, ha="left", va="top")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training examples by score")
    axes.set_ylabel("retrieval score (forget direction)")
    return figure


@styled
def draw_losses(
    curves: Mapping[str, Sequence[float]], strategies: Sequence[str], *, frame: Frame
) -> Any:
    """Returns the figure of loss curves.

    The faint line is the loss of every step, or means of neighboring steps in a long curve. The
    strong line is the running mean over a twentieth of the steps.

    Args:
      curves: by strategy, or "loss" for a training before unlearning: one loss per optimizer step.
      strategies: all strategies of the run, which decide the colors.
      frame: frame of a panel for the page.
    """
    figure, axes = make_panel(frame)
    styles = strategy_styles(strategies or list(curves))
    for name, losses in curves.items():
        values = np.asarray(losses, np.float64)
        color = styles[name][0] if name in styles else drawing.OTHER_COLOR
        label = strategy_name(name)
        tip = f"tip:{label}: {losses[0]:.3g} at first, {losses[-1]:.3g} at the end"
        axes.plot(*_thin(values), color=color, lw=0.8, alpha=0.3)
        mean = _thin(running_mean(values))
        axes.plot(*mean, color=color, lw=1.9, label=label, gid=tip)
    everything = np.concatenate([[0.0], *map(np.asarray, curves.values())])
    high = float(np.quantile(everything, 0.995))
    axes.set_ylim(min(0.0, float(everything.min())), 1.05 * high if high > 0 else 1.0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats)")
    return figure


def _thin(values: Float[np.ndarray, " steps"]) -> Iterator[Sequence[float]]:
    """Returns the steps and values of a curve; means of neighbors if it is long."""
    parts = np.array_split(values, min(len(values), _MAX_POINTS))
    ends = np.cumsum([len(part) for part in parts])
    yield [float(end - (len(part) - 1) / 2) for end, part in zip(ends, parts, strict=True)]
    yield [float(part.mean()) for part in parts]


def running_mean(losses: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    """Returns the mean over a window around each step, cut off at both ends."""
    reach = len(losses) // 40
    total = np.concatenate([[0.0], np.cumsum(losses)])
    step = np.arange(len(losses))
    first, last = np.maximum(step - reach, 0), np.minimum(step + reach + 1, len(losses))
    return (total[last] - total[first]) / (last - first)
