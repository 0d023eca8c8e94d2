"""The drawing of figures: files as PNG and SVG, and SVG for the page in the page's colors.

Drawing needs Matplotlib (extra `eval`), which is imported at the first figure. Figures are made
without pyplot: no global state is left behind and no display is needed. They depend on the shown
numbers alone: the same figure gives the same bytes.
"""

import functools
import io
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from raslik_jax.base import files

OTHER_COLOR, TARGET_COLOR = "#0072B2", "#D55E00"
INK, GOLD, _FAINT, SOFT = "#222222", "#F0C000", "#B8B8B8", "#555555"
_STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.constrained_layout.w_pad": 0.09,
    "font.family": "DejaVu Sans",  # comes with Matplotlib: the same letters on every machine
    "font.size": 10,
    "text.parse_math": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _FAINT,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#ECECEC",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "raslik_jax",
    "svg.fonttype": "path",
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
}
# On the page the panels are small and next to each other, and all frames are the page's.
_PAGE_STYLE = _STYLE | {
    "font.size": 12.5,
    "svg.fonttype": "none",
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), SOFT),
    **dict.fromkeys(("axes.spines.left", "axes.spines.bottom"), False),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 7),
}
_PAGE_WIDTH = 440  # points, as all sizes on the page


class Frame(NamedTuple):
    """The place of the axes in a panel of the page: points from the sides of the figure."""

    height: int
    left: int = 54
    right: int = 14
    top: int = 12
    bottom: int = 48


def _style(settings: Mapping[str, Any]) -> Any:
    import matplotlib.style

    return matplotlib.style.context(["default", dict(settings)], after_reset=True)


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under the style of the file or, with `frame`, of the page."""

    @functools.wraps(draw)
    def styled(*args: Any, **options: Any) -> Any:
        with _style(_PAGE_STYLE if options.get("frame") else _STYLE):
            return draw(*args, **options)

    return styled


def make_panel(frame: Frame | None) -> tuple[Any, Any]:
    """Returns a figure and its axes: a panel for the page, or one for a file."""
    import matplotlib.figure

    if frame is None:
        figure = matplotlib.figure.Figure(figsize=(7.6, 3.8), layout="constrained")
        return figure, figure.subplots()
    figure = matplotlib.figure.Figure(figsize=(_PAGE_WIDTH / 72, frame.height / 72))
    place = frame.left / _PAGE_WIDTH, frame.bottom / frame.height
    width = 1 - (frame.left + frame.right) / _PAGE_WIDTH
    height = 1 - (frame.top + frame.bottom) / frame.height
    return figure, figure.add_axes((*place, width, height))


def note(axes: Any, text: str, at: Any, offset: Any, *coordinates: str, **options: Any) -> None:
    """Writes a text at a distance in points from a place in Matplotlib's coordinates."""
    place = {"xy": at, "xytext": offset, "xycoords": coordinates, "textcoords": "offset points"}
    axes.annotate(text, **place, color=SOFT, **options)


# forms ------------------------------------------------------------------------------------------


def save_figure(
    figure: Any,
    stem: pathlib.Path,
    *,
    write: Callable[[pathlib.Path, bytes], None] = files.write_bytes,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a figure as `<stem>.png` and `<stem>.svg` and returns both paths.

    The files hold no date and no version, and each appears whole or not at all.
    """
    paths = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with _style(_STYLE):
        for path in paths:
            write(path, _saved(figure, path.suffix[1:]))
    return paths


def _saved(figure: Any, form: str) -> bytes:
    entries = ("Software",) if form == "png" else ("Date", "Creator", "Format", "Type")
    content = io.BytesIO()
    figure.savefig(content, format=form, metadata=dict.fromkeys(entries))
    if form == "png":
        return content.getvalue()
    tip = rb'<g class="point"><title>\1</title>'
    return re.sub(rb'<g id="tip:([^"]*)">', tip, content.getvalue())


def page_svg(figure: Any, title: str) -> Markup:
    """Returns a figure as an SVG element that takes fonts and colors from the page around it.

    Colors are `var(--c-...)`, named after their light value (see `dark_color`). An artist whose gid
    begins with "tip:" shows the rest of the gid as a tooltip. The title is for readers who do not
    see the figure. It is unique on the page.
    """
    with _style(_PAGE_STYLE):
        text = _saved(figure, "svg").decode()
    text = re.sub(
        r"<defs>\s*<style.*?</defs>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.S
    )
    text = re.sub(r' style="([^"]*)"', _attributes, text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"|<(path d=""|g id="\w+"/)[^>]*>', "", text)
    # The remaining ids are referred to and have to be this figure's own.
    text = re.sub(r'<g id="[^"]*">', "<g>", text).replace("xlink:href", "href")
    key = f"{zlib.crc32(title.encode()):08x}"
    text = re.sub(r'(id="|"#|\(#)([mp]\w+)', rf"\1\2-{key}", text)
    _, _, width, height = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', text).groups()  # type: ignore[union-attr]
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(head + re.sub(r"\s*\n\s*", " ", text[text.index(">") + 1 :]).strip())


def _attributes(found: re.Match[str]) -> str:
    """Returns a style attribute as attributes, which the page's policy allows."""
    pairs = [pair.split(": ", 1) for pair in found[1].split("; ")]
    kept = [(name, value) for name, value in pairs if name != "font-family"]
    values = "".join(f' {name}="{value}"' for name, value in kept)
    return re.sub("#([0-9a-f]{6})", r"var(--c-\1)", values)


def dark_color(color: str) -> str:
    """Returns a figure's color on a dark background: gray is inverted, other colors stay.

    White becomes the ground. The ink of the figures becomes that of the page.
    """
    from matplotlib.colors import to_hex, to_rgb

    values, low, high = (np.array(to_rgb(c)) for c in (color, "#1b1f23", "#e8eaec"))
    if np.ptp(values) < 0.05:
        share = (1 - values.mean()) / (1 - to_rgb(INK)[0])
        return to_hex((low + (high - low) * min(share, 1.0)).tolist())
    mixed = values
    for share in np.arange(0, 1, 0.05):
        mixed = values + (1 - values) * share
        if (_luminance(mixed) + 0.05) / (_luminance(low) + 0.05) >= 6:
            break
    return to_hex(mixed.tolist())


def _luminance(values: Any) -> float:
    linear = np.where(values <= 0.03928, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def mark_svg(marker: str, color: str, *, has_line: bool = True) -> Markup:
    """Returns a marker of Matplotlib's for the page's lists, on a line if it has one."""
    from matplotlib.markers import MarkerStyle

    style: Any = MarkerStyle(marker)
    shape = style.get_path().transformed(style.get_transform().scale(11 if has_line else 13))
    d = "".join(
        "M" + "L".join(f"{13 + x:.1f} {8 - y:.1f}" for x, y in polygon) + "Z"
        for polygon in shape.to_polygons()
    )
    line = '<path d="M1 8H25" stroke="currentColor" stroke-width="2"/>' if has_line else ""
    var = f"var(--c-{color[1:].lower()})"
    return Markup(
        f'<svg viewBox="0 0 26 16" class="mark" color="{var}" aria-hidden="true">{line}'
        f'<path d="{d}" fill="currentColor"/></svg>'
    )
