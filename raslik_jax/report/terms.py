"""The exact definitions that the page shows for its words and numbers on a click or a tap."""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from raslik_jax.evaluate import verdict
from raslik_jax.report import names, tables


def _read_terms() -> dict[str, str]:
    """Returns the definitions of terms.jinja by the words that occur on the page."""
    environment = names.make_environment()
    environment.globals.update(
        state=lambda name: f"{name.capitalize()}: {verdict.DEFINITIONS[name]}.",
        percent="{:.0%}".format,
        half=verdict.HALF,
        enough=verdict.ENOUGH,
    )
    lines = environment.get_template("terms.jinja").render().splitlines()
    return dict(line.split(" | ") for line in lines if line)


TERMS = _read_terms()
_KEYS = list(TERMS)
_CASELESS = {name.lower(): name for name in TERMS if " " in name or name in ("score", "perplexity")}
_FIND = re.compile(
    r"(?<![\w.-])(?:"
    + "|".join(
        f"(?i:{re.escape(name)})" if name.lower() in _CASELESS else re.escape(name)
        for name in sorted(TERMS, key=len, reverse=True)
    )
    + r")(?![\w-])"
)


def defined(text: str, done: Iterable[str] = ()) -> Markup:
    """Returns a sentence, escaped, in which each term is a button for its definition.

    Args:
      text: a sentence of the program, not of data.
      done: terms that stay words; only the first occurrence of a term becomes a button.
    """
    seen = set(done)

    def button(found: re.Match[str]) -> str:
        name = _CASELESS.get(found[0].lower(), found[0])
        if name in seen:
            return str(escape(found[0]))
        seen.add(name)
        return (
            f'<button type="button" class="term" popovertarget="term-{_KEYS.index(name)}">'
            f"{escape(found[0])}</button>"
        )

    parts, end = [], 0
    shown = tables.visible(str(text))
    for found in _FIND.finditer(shown):
        parts += [str(escape(shown[end : found.start()])), button(found)]
        end = found.end()
    return Markup("".join([*parts, str(escape(shown[end:]))]))


def used(contents: Iterable[str]) -> Sequence[tuple[str, str, str]]:
    """Returns anchor, term and definition of each term that has a button in these contents."""
    found = {int(n) for text in contents for n in re.findall(r'popovertarget="term-(\d+)"', text)}
    return [(f"term-{n}", _KEYS[n], TERMS[_KEYS[n]]) for n in sorted(found)]
