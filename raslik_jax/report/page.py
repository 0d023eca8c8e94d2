"""A report as one self-contained HTML page: stored runs in, text out.

The functions here gather facts, and the template `page.html.jinja` writes them. The page loads
nothing: styles and script are inline, and only their hashes are allowed. So text that gets past the
escaping cannot run. Without the script the whole page can be read.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from raslik_jax.report import drawing, incident, names, notes, sections, tables, terms
from raslik_jax.report.facts import Experiment
from raslik_jax.report.sections import SECTIONS, Section

_STORY = "Why the model said this, and what it says now"
_GENERATOR = '<meta name="generator" content="raslik_jax">'


def is_page(head: bytes) -> bool:
    """Returns whether a file with this beginning is a page that `render` wrote."""
    return _GENERATOR.encode() in head


def render(
    experiments: Sequence[Experiment],
    *,
    title: str = "",
    findings: Mapping[str, str] = {},
) -> str:
    """Returns the page of some experiments as an HTML document; equal runs give equal bytes.

    Args:
      experiments: stored runs, grouped. With several seeds, tables and summary have all of them.
        Answers, examples and curves are those of the first seed.
      title: the heading; by default words for one incident, otherwise the names of the experiments.
      findings: why a run found no row (`retrieve.finding`), by the name of the run.
    """
    environment = _environment()
    facts = {key: section.facts(experiments) for key, section in SECTIONS.items()}
    shown = {key: section for key, section in SECTIONS.items() if facts[key]}
    parts: dict[str, list[Any]] = {part: [] for part in ("", *sections.PARTS)}
    for key, section in shown.items():
        content = Markup(make_template(section).render(**facts[key]))
        parts[section.part].append((key, section.title, content))
    names_of = " · ".join([*(e.name for e in experiments), *findings])
    has_story = len(experiments) == 1 and "story" in shown
    heading = _STORY if has_story else names_of
    return environment.get_template("page.html.jinja").render(
        heading=title or heading,
        has_runs=bool(experiments),
        facts=sections.facts_of(experiments),
        parts=parts,
        titles=sections.PARTS,
        has_story=has_story,
        has_answers="answers" in shown,
        terms=terms.used(content for part in parts.values() for *_, content in part),
        findings=findings,
        stylesheet=functools.partial(_stylesheet, shown.values()),
        script=Markup("".join([_read("page.js"), *(one.script() for one in shown.values())])),
    )


def make_template(section: Section) -> jinja2.Template:
    """Returns the template of a section: a file of this room or text."""
    environment = _environment()
    if section.template.endswith(".jinja"):
        return environment.get_template(f"templates/{section.template}")
    return environment.from_string(section.template)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = names.make_environment(
        autoescape=True,
        # Control and direction marks become visible; then what is no markup is escaped.
        finalize=lambda value: tables.visible(value) if type(value) is str else value,
    )
    environment.filters |= {"defined": terms.defined, "asked": incident.asked_of}
    environment.globals.update(
        digest=_digest,
        generator=Markup(_GENERATOR),
        limits=sections.LIMITS,
        notes=notes.macros(),
        shorten=sections.shorten,
    )
    return environment


def _read(name: str) -> str:
    return (names.FOLDER / name).read_text(encoding="utf-8")


def _stylesheet(shown: Iterable[Section], body: str) -> Markup:
    """Returns the page's style with the colors of its figures in light and in dark."""
    colors = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6})\)", body)))
    light = "".join(f"--c-{color}:#{color};" for color in colors)
    dark = "".join(f"--c-{color}:{drawing.dark_color('#' + color)};" for color in colors)
    screen = "@media screen and (prefers-color-scheme: dark)"
    palette = f":root{{{light}}}\n{screen}{{:root{{{dark}}}}}\n"
    return Markup("".join([palette, *(one.style() for one in shown), _read("page.css")]))


def _digest(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")
