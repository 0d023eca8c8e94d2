"""Rows of a dataset of the Hugging Face hub, or of a local folder that `datasets` reads."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raslik_jax.data.examples import Example, examples_from_rows, read_examples
from raslik_jax.messages import one_line, shown

PREFIX = "hub:"
_SOURCE = re.compile(r"hub:(?P<name>[^@:]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


class HubSource(NamedTuple):
    """A split of a dataset on the hub; `config` is empty where it has but one."""

    name: str
    config: str
    split: str


def parse_source(text: str) -> HubSource:
    """Returns what `hub:OWNER/NAME[:CONFIG][@SPLIT]` names; the split is "train" unless given.

    Raises:
      ValueError: another form.
    """
    found = _SOURCE.fullmatch(text)
    if not found:
        raise ValueError(
            f"a hub dataset must be like hub:OWNER/NAME[:CONFIG][@SPLIT], got {shown(text)}"
        )
    return HubSource(found["name"], found["config"] or "", found["split"] or "train")


def read_rows(
    source: str,
    *,
    fields: Mapping[str, str] | None = None,
    name: str = "",
    needs_output: bool = True,
    check: Callable[[Example], None] | None = None,
) -> tuple[Example, ...]:
    """Returns the rows of a file or of a hub dataset as examples.

    Args:
      source: a path of `read_examples`, or `hub:OWNER/NAME[:CONFIG][@SPLIT]`; a folder may stand
        for OWNER/NAME.
      fields: which key holds which field, as in `read_examples`.
      name: kept as the source of every example.
      needs_output: False lets a row do without an output.
      check: refuses single rows, as in `read_examples`.

    Raises:
      ValueError: what `read_examples` refuses, rows named by file and line, or by number in a hub
        dataset; the package `datasets` is missing; there is no such dataset, or no way to it.
    """
    options: dict[str, Any] = {
        "fields": fields,
        "source": name,
        "needs_output": needs_output,
        "check": check,
    }
    if not source.startswith(PREFIX):
        return read_examples(source, **options)
    asked = parse_source(source)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{shown(source)} needs the package datasets: install raslik-jax[data] or give a file"
        ) from error
    try:
        rows = datasets.load_dataset(asked.name, asked.config or None, split=asked.split)
    except Exception as error:  # a missing dataset or network shows in a dozen classes
        raise ValueError(
            f"the dataset {shown(source)} cannot be read ({one_line(str(error), 100)}): check "
            "name, config, split and network, or give a local file"
        ) from error
    return examples_from_rows(
        ((number, _plain(row)) for number, row in enumerate(rows, start=1)),
        where=source,
        **options,
    )


def _plain(row: Any) -> Any:
    """Returns a row in JSON's types: a date as its text, a NaN as null."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
