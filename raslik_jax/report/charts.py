"""Figures of the page as SVG: they take their colors from the page, so dark mode and print work.

Matplotlib's figures (see `figures`) go beside report.md; these show the same numbers in the same
colors and markers, as small multiples that fit a phone.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate.summary import IntervalEntry, MethodEntry, Metrics, ModelEntry, rate_of
from raslik_jax.report import tables
from raslik_jax.report.figures import running_mean, strategy_styles
from raslik_jax.report.markup import Markup, element, join
from raslik_jax.report.runs import ScoreSample

# Coordinates are written as whole numbers too, which a strict check does not take for floats.
Number = float | int

_WIDTH, _HEIGHT = 440, 380
# Curves are drawn through at most as many points.
_MAX_POINTS = 240


class Frame(NamedTuple):
    """The plotting area of a panel and what its edges stand for."""

    left: Number
    right: Number
    top: Number
    bottom: Number
    x_low: Number
    x_high: Number
    y_low: Number
    y_high: Number

    def x(self, value: Number) -> Number:
        """Returns where a value lies from the left."""
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return self.left + share * (self.right - self.left)

    def y(self, value: Number) -> Number:
        """Returns where a value lies from the top."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.bottom - share * (self.bottom - self.top)


def _n(value: Number) -> str:
    """Returns a coordinate in as few characters as show no difference."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _line(x1: Number, y1: Number, x2: Number, y2: Number, class_: str) -> Markup:
    return element("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), class_=class_)


def _text(x: Number, y: Number, text: str, *, anchor: str = "middle", class_: str = "") -> Markup:
    return element("text", text, x=_n(x), y=_n(y), text_anchor=anchor, class_=class_ or None)


def _path(points: Sequence[tuple[Number, Number]], class_: str, **attributes: object) -> Markup:
    d = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    return element("path", d=d, class_=class_, **attributes)


def _ticks(low: Number, high: Number, num: int = 5) -> list[Number]:
    """Returns round values between two ends, about as many as asked for."""
    raw = (high - low) / max(1, num)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_label(value: Number) -> str:
    return f"{value:g}"


def _axes(frame: Frame, x_label: str, y_label: str, *, num_x: int = 5, num_y: int = 5) -> Markup:
    parts = []
    for value in _ticks(frame.x_low, frame.x_high, num_x):
        x = frame.x(value)
        parts.append(_line(x, frame.top, x, frame.bottom, "grid"))
        parts.append(_text(x, frame.bottom + 17, _tick_label(value)))
    for value in _ticks(frame.y_low, frame.y_high, num_y):
        y = frame.y(value)
        parts.append(_line(frame.left, y, frame.right, y, "grid"))
        parts.append(_text(frame.left - 7, y + 4, _tick_label(value), anchor="end"))
    middle = (frame.top + frame.bottom) / 2
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 37, x_label, class_="label"))
    parts.append(
        element(
            "text",
            y_label,
            transform=f"translate(13 {_n(middle)}) rotate(-90)",
            text_anchor="middle",
            class_="label",
        )
    )
    return join(*parts)


def _svg(width: int, height: int, title: str, *children: str) -> Markup:
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
    )


_CORNERS = {
    "^": (3, -90.0, 1.15),
    "v": (3, 90.0, 1.15),
    "<": (3, 180.0, 1.15),
    ">": (3, 0.0, 1.15),
    "s": (4, 45.0, 1.2),
    "D": (4, 0.0, 1.15),
    "p": (5, -90.0, 1.1),
    "h": (6, -90.0, 1.1),
}


def marker(shape: str, x: Number, y: Number, radius: Number, class_: str) -> Markup:
    """Returns a marker in one of Matplotlib's shapes, centered on a point."""
    if shape == "o":
        return element("circle", cx=_n(x), cy=_n(y), r=_n(0.95 * radius), class_=class_)
    if shape == "*":
        corners = [
            (radius * (1.45 if i % 2 == 0 else 0.6), math.radians(36 * i - 90)) for i in range(10)
        ]
    elif shape in ("X", "P"):
        thin, turn = 0.38, 45 if shape == "X" else 0
        long = math.hypot(1, thin)
        tilt = math.degrees(math.atan(thin))
        corners = []
        for quarter in range(4):
            base = 90 * quarter + turn
            corners += [
                (1.1 * radius * long, math.radians(base - tilt)),
                (1.1 * radius * long, math.radians(base + tilt)),
                (1.1 * radius * thin * math.sqrt(2), math.radians(base + 45)),
            ]
    else:
        number, start, scale = _CORNERS[shape]
        corners = [(scale * radius, math.radians(start + 360 * i / number)) for i in range(number)]
    points = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in corners]
    d = "M" + "L".join(f"{_n(px)} {_n(py)}" for px, py in points) + "Z"
    return element("path", d=d, class_=class_)


def color_class(strategy: str, strategies: Sequence[str]) -> str:
    """Returns the class that gives a strategy its color on the page."""
    return "c-" + strategy_styles(strategies)[strategy][0].lstrip("#").lower()


def legend_mark(strategy: str, strategies: Sequence[str]) -> Markup:
    """Returns a strategy's marker on a line, for lists and headings."""
    shape = strategy_styles(strategies)[strategy][1]
    return element(
        "svg",
        _line(1, 8, 25, 8, "path"),
        marker(shape, 13, 8, 6, "full"),
        viewBox="0 0 26 16",
        class_=f"mark {color_class(strategy, strategies)}",
        aria_hidden="true",
    )


def reference_mark(name: str) -> Markup:
    """Returns the mark of the fine-tuned model, the backbone or the ideal."""
    shape, class_ = {"finetuned": ("o", "ink"), "backbone": ("X", "ink"), "ideal": ("*", "gold")}[
        name
    ]
    return element(
        "svg",
        marker(shape, 13, 8, 6, class_),
        viewBox="0 0 26 16",
        class_="mark",
        aria_hidden="true",
    )


def lowest_retain(metrics: Metrics) -> float:
    """Returns where the axis of R has to start for all of a run to be seen."""
    models: list[ModelEntry] = [metrics["finetuned"], *metrics["methods"]]
    if "backbone" in metrics:
        models.append(metrics["backbone"])
    lowest = min(rate_of(model, "retain")["low"] for model in models)
    return max(0.0, min(0.95, math.floor(lowest * 20) / 20))


def frontier(metrics: Metrics, algorithm: str, title: str, *, x_low: Number) -> Markup:
    """Returns the panel of forgetting against retention of one algorithm.

    R lies on x and F on y; the ideal is at the bottom right, and faint arcs join points at equal
    distance from it. Each strategy is a path over epochs from the fine-tuned model on; its last
    epoch has the large marker, filled if Pareto-optimal, and bars for the intervals.

    Args:
      metrics: the content of metrics.json.
      algorithm: whose methods to draw.
      title: what the figure is called for those who do not see it.
      x_low: where the axis of R starts (see `lowest_retain`).

    Returns:
      An SVG element.
    """
    methods = [entry for entry in metrics["methods"] if entry["algorithm"] == algorithm]
    strategies = list(dict.fromkeys(entry["strategy"] for entry in metrics["methods"]))
    models: list[ModelEntry] = [metrics["finetuned"], *metrics["methods"]]
    backbone = metrics.get("backbone")
    if backbone:
        models.append(backbone)
    pad = 0.03 * (1 - x_low)
    y_high = max(1.0, *(rate_of(model, "forget")["high"] for model in models))
    frame = Frame(54, _WIDTH - 14, 12, _HEIGHT - 48, x_low - pad, 1 + pad, -0.03, y_high + 0.03)
    clip = f"clip-{zlib.crc32(title.encode()):08x}"
    parts = [
        element(
            "clipPath",
            element(
                "rect",
                x=frame.left,
                y=frame.top,
                width=frame.right - frame.left,
                height=frame.bottom - frame.top,
            ),
            id=clip,
        ),
        _axes(frame, "R, retain rate (higher is better)", "F, forget rate (lower is better)"),
    ]
    angles = np.linspace(0, np.pi / 2, 46)
    arcs = [
        _path([(frame.x(1 - r * math.cos(a)), frame.y(r * math.sin(a))) for a in angles], "arc")
        for r in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    ]
    parts.append(element("g", *arcs, clip_path=f"url(#{clip})"))
    parts.append(marker("*", frame.x(1), frame.y(0), 8, "gold"))
    if backbone:
        x, y = (
            frame.x(rate_of(backbone, "retain")["mean"]),
            frame.y(rate_of(backbone, "forget")["mean"]),
        )
        parts.append(_line(frame.left, y, frame.right, y, "floor"))
        parts.append(_text(frame.left + 5, y - 5, "F of the backbone", anchor="start"))
        if x >= frame.left:
            parts.append(
                element(
                    "g", _title("Backbone", backbone), marker("X", x, y, 7, "ink"), class_="point"
                )
            )
    for strategy in strategies:
        path = sorted(
            (entry for entry in methods if entry["strategy"] == strategy),
            key=lambda entry: entry["epoch"],
        )
        if path:
            parts.append(_strategy_path(frame, metrics["finetuned"], path, strategies))
    start = metrics["finetuned"]
    parts.append(
        element(
            "g",
            _title("Fine-tuned", start),
            marker(
                "o",
                frame.x(rate_of(start, "retain")["mean"]),
                frame.y(rate_of(start, "forget")["mean"]),
                7,
                "ink",
            ),
            class_="point",
        )
    )
    return _svg(_WIDTH, _HEIGHT, title, *parts)


def _title(name: str, entry: ModelEntry) -> Markup:
    forget, retain = (tables.format_interval(entry[rate]) for rate in ("forget", "retain"))
    return element("title", f"{name}: F {forget}, R {retain}")


def _strategy_path(
    frame: Frame, start: ModelEntry, path: Sequence[MethodEntry], strategies: Sequence[str]
) -> Markup:
    strategy, last = path[0]["strategy"], path[-1]
    shape = strategy_styles(strategies)[strategy][1]
    points = [
        (frame.x(rate_of(entry, "retain")["mean"]), frame.y(rate_of(entry, "forget")["mean"]))
        for entry in (start, *path)
    ]
    name = tables.strategy_name(strategy)
    x, y = points[-1]
    parts = [
        _path(points, "path"),
        _line(
            max(frame.left, frame.x(rate_of(last, "retain")["low"])),
            y,
            frame.x(rate_of(last, "retain")["high"]),
            y,
            "bar",
        ),
        _line(
            x,
            frame.y(rate_of(last, "forget")["low"]),
            x,
            frame.y(rate_of(last, "forget")["high"]),
            "bar",
        ),
    ]
    for (px, py), entry in zip(points[1:], path, strict=True):
        is_last = entry is last
        class_ = "full halo" if is_last and last["pareto"] else "hollow" if is_last else "full"
        parts.append(
            element(
                "g",
                _title(f"{name}, epoch {entry['epoch']}", entry),
                marker(shape, px, py, 7 if is_last else 3, class_),
                class_="point",
            )
        )
    return element("g", *parts, class_=color_class(strategy, strategies))


def forest(
    rows: Sequence[tuple[str, IntervalEntry, str]],
    *,
    label: str,
    title: str,
    low: Number = 0.0,
    floor: Number | None = None,
) -> Markup:
    """Returns intervals one below the other, for comparing strategies at a glance.

    Args:
      rows: name, mean with its interval, and color class ("" for the ink of the text).
      label: of the axis.
      title: what the figure is called for those who do not see it.
      low: where the axis starts; it ends at 1.
      floor: where to draw the dotted line of the backbone.

    Returns:
      An SVG element.
    """
    pitch, top = 27, 8
    width, height = _WIDTH, top + pitch * len(rows) + 48
    frame = Frame(92, width - 58, top, height - 44, low, 1.0, 0, 1)
    parts = []
    for value in _ticks(low, 1.0, 4):
        x = frame.x(value)
        parts.append(_line(x, frame.top, x, frame.bottom, "grid"))
        parts.append(_text(x, frame.bottom + 17, _tick_label(value)))
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 36, label, class_="label"))
    if floor is not None and floor >= low:
        x = frame.x(floor)
        parts.append(_line(x, frame.top, x, frame.bottom, "floor"))
    for i, (name, entry, class_) in enumerate(rows):
        y = top + pitch * (i + 0.5)
        start, end = (frame.x(max(low, entry[end])) for end in ("low", "high"))
        parts.append(
            element(
                "g",
                element("title", f"{name}: {tables.format_interval(entry)}"),
                _text(frame.left - 10, y + 4, name, anchor="end", class_="name"),
                _line(start, y, end, y, "interval"),
                element(
                    "circle",
                    cx=_n(frame.x(max(low, entry["mean"]))),
                    cy=_n(y),
                    r="5",
                    class_="full halo",
                ),
                _text(frame.right + 10, y + 4, f"{entry['mean']:.3f}", anchor="start"),
                class_=class_ or "c-ink",
            )
        )
    return _svg(width, height, title, *parts)


def histogram(scores: ScoreSample, title: str, *, num_bins: int = 48) -> Markup:
    """Returns the scores' histogram by label, with the ends that the sets take shaded.

    Args:
      scores: the scores; each kind is drawn as a share of its own number.
      title: what the figure is called for those who do not see it.
      num_bins: bins over their range.

    Returns:
      An SVG element.
    """
    score_N = scores.score_N
    groups = [("all examples", np.ones(len(score_N), bool), "c-0072b2")]
    if scores.is_target_N is not None:
        groups = [
            ("other examples", ~scores.is_target_N, "c-0072b2"),
            ("targets", scores.is_target_N, "c-d55e00"),
        ]
    low, high = float(score_N.min()), float(score_N.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, num_bins + 1)
    shares = {
        label: 100 * np.histogram(score_N[is_member_N], edges)[0] / max(1, is_member_N.sum())
        for label, is_member_N, _ in groups
    }
    tallest = max(float(share.max()) for share in shares.values())
    height = 330
    frame = Frame(54, _WIDTH - 14, 12, height - 48, low, high, 0, 1.15 * tallest)
    parts = []
    for threshold, end, name, anchor in (
        (scores.retain_threshold, low, "retain set", "start"),
        (scores.forget_threshold, high, "forget set", "end"),
    ):
        edge, border = frame.x(threshold), frame.x(end)
        parts.append(
            element(
                "rect",
                x=_n(min(edge, border)),
                y=frame.top,
                width=_n(abs(edge - border)),
                height=frame.bottom - frame.top,
                class_="zone",
            )
        )
        parts.append(_line(edge, frame.top, edge, frame.bottom, "threshold"))
        inwards = 1 if anchor == "start" else -1
        # Beside a zone too narrow for its name.
        start = border if abs(edge - border) > 72 else edge
        parts.append(_text(start + 5 * inwards, frame.top + 14, name, anchor=anchor))
    axes = _axes(frame, "retrieval score (forget direction)", "share of its kind (%)")
    for label, _, class_ in groups:
        outline = [(frame.x(low), frame.y(0))]
        for i, share in enumerate(shares[label]):
            outline += [
                (frame.x(edges[i]), frame.y(share)),
                (frame.x(edges[i + 1]), frame.y(share)),
            ]
        outline.append((frame.x(high), frame.y(0)))
        parts.append(_path(outline, f"area {class_}"))
    return _svg(_WIDTH, height, title, axes, *parts)


def losses(curves: Mapping[str, Sequence[float]], strategies: Sequence[str], title: str) -> Markup:
    """Returns loss curves: faint every step, strong their running mean.

    Args:
      curves: one loss per step, by strategy; "loss" for a training before unlearning.
      strategies: all of the run, which decide the colors.
      title: what the figure is called for those who do not see it.

    Returns:
      An SVG element; long curves are drawn through means of neighboring steps.
    """
    series = {label: np.asarray(values, np.float64) for label, values in curves.items()}
    shown = {label: running_mean(values) for label, values in series.items()}
    num_steps = max(len(values) for values in series.values())
    low = min(float(values.min()) for values in series.values())
    high = max(float(np.quantile(values, 0.995)) for values in series.values())
    high = max(high, *(float(values.max()) for values in shown.values()))
    low, high = min(0.0, low), high if high > low else low + 1
    height = 300
    frame = Frame(54, _WIDTH - 14, 12, height - 48, 0, max(1, num_steps), low, high * 1.05)
    parts = [_axes(frame, "optimizer step", "loss (nats)")]
    for label, values in series.items():
        class_ = color_class(label, strategies) if label in strategies else "c-0072b2"
        raw, smooth = _thin(np.minimum(values, high)), _thin(shown[label])
        name = tables.strategy_name(label)
        parts.append(
            element(
                "g",
                element("title", f"{name}: {values[0]:.3g} at first, {values[-1]:.3g} at the end"),
                _path([(frame.x(x), frame.y(y)) for x, y in raw], "thin"),
                _path([(frame.x(x), frame.y(y)) for x, y in smooth], "path"),
                class_=class_,
            )
        )
    return _svg(_WIDTH, height, title, *parts)


def _thin(values: Float[np.ndarray, " steps"]) -> list[tuple[Number, Number]]:
    """Returns (step, value) of a curve, means of neighbors where it is long."""
    parts = np.array_split(values, min(len(values), _MAX_POINTS))
    sizes = np.cumsum([0, *map(len, parts)])
    return [
        (float(start + (len(part) + 1) / 2), float(part.mean()))
        for start, part in zip(sizes, parts, strict=False)
    ]
