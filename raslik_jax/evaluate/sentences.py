"""Sentences on numbers: the macros of sentences.jinja."""

import functools
import math
import pathlib
from typing import Any


def percent(share: float) -> str:
    """Returns a share in whole percent; rounded down."""
    return f"{math.floor(100 * share + 1e-9)}%"


@functools.cache
def _macros() -> Any:
    import jinja2  # it takes long to load

    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": percent, "form": format}
    return environment.get_template("sentences.jinja").module


def write(macro: str, *values: Any, **named: Any) -> str:
    """Returns the text of a macro in one line."""
    return " ".join(getattr(_macros(), macro)(*values, **named).split())
