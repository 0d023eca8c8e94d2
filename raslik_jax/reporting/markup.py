"""HTML and SVG as nested calls: what is not markup already is escaped, wherever it stands."""

import html
import unicodedata

_VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))


class Markup(str):
    """Text that is markup already and is put into a page as it is."""


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Returns one element; plain strings among its children are escaped.

    Args:
      name: the element's name.
      *children: text, or markup from this function.
      **attributes: their values, escaped. An underscore in a name stands for a hyphen, one at the
        end is dropped (`class_`). True gives the bare name; None and False leave it out.

    Returns:
      The markup.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    parts.append(">")
    if name not in _VOID:
        parts += [*map(escape, children), f"</{name}>"]
    return Markup("".join(parts))


def escape(text: str) -> Markup:
    """Returns text that a page shows as it is; control and direction marks become visible."""
    if isinstance(text, Markup):
        return text
    visible = "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "\ufffd"
        for c in text
    )
    return Markup(html.escape(visible, quote=True))


def join(*parts: str, sep: str = "") -> Markup:
    """Returns the parts one after the other, escaped where they are plain text."""
    return Markup(sep.join(map(escape, parts)))
