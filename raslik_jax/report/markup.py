"""Text from data as data in HTML, Markdown, LaTeX and CSV: one escaping function for each.

HTML and SVG are nested calls of `element`: what is not markup already is escaped, wherever it
stands.
"""

import html
import re

from raslik_jax.messages import is_unseen

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


def visible(text: str) -> str:
    """Returns text with a replacement character for each that is not shown.

    Markup would have to escape the backslash of `messages.printable` once more.
    """
    return "".join("\N{REPLACEMENT CHARACTER}" if is_unseen(c) else c for c in text)


def escape(text: str) -> Markup:
    """Returns text that a page shows as it is; control and direction marks become visible."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(visible(text), quote=True))


def escape_markdown(text: str) -> str:
    """Returns text that Markdown shows as it is, in a table or inside a line."""
    text = visible(re.sub(r"\r\n?", "\n", text).strip())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Bare addresses become links without any mark around them.
    text = text.replace("://", "&#58;//")
    text = re.sub(r"\bwww\.", lambda found: f"{found[0][:-1]}&#46;", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\w)@(?=\w)", "&#64;", text)
    text = re.sub(r"([\\`*_\[\]|~#$])", _backslash, text)
    return re.sub(r"\s*\n\s*", "<br>", text)


def _backslash(found: re.Match[str]) -> str:
    # Not the # of an entity that was put in above.
    return found[0] if found.string[found.start() - 1 : found.end()] == "&#" else f"\\{found[0]}"


def escape_markdown_line(text: str) -> str:
    """Returns text that Markdown shows as it is where a line begins: a paragraph or an item."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", escape_markdown(text))


_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"$\sim$",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    **{c: "\\" + c for c in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Returns text in one line that LaTeX sets as it is, also at the beginning of a table's row."""
    text = "".join(_LATEX_SPECIAL.get(c, c) for c in " ".join(visible(text).split()))
    # After a line break of a table these two would be its arguments.
    return f"{{{text[0]}}}{text[1:]}" if text[:1] in ("[", "*") else text


def escape_csv(text: str) -> str:
    """Returns a cell of text that no spreadsheet takes for a formula; numbers need none of it."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def join(*parts: str, sep: str = "") -> Markup:
    """Returns the parts one after the other, escaped where they are plain text."""
    return Markup(sep.join(map(escape, parts)))
