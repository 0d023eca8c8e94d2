"""The templates of the page, of a model's card and of the notes below tables."""

import pathlib
from typing import Any

import jinja2

from raslik_jax.report.names import algorithm_name, strategy_name

FOLDER = pathlib.Path(__file__).parent


def make_environment(**options: Any) -> jinja2.Environment:
    """Returns what renders the templates of this folder, with filters for printed names."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
    environment.filters |= {"strategy_name": strategy_name, "algorithm_name": algorithm_name}
    return environment
