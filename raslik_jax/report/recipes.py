"""The recipe of a training in lines for the terminal."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from raslik_jax.train import recipe
from raslik_jax.train.objectives import RetrainSettings

# The recipe, without what checks it.
FIELDS = [one for one in dataclasses.fields(RetrainSettings) if one.metadata["decides"]]


def recipe_lines(
    found: recipe.Recipe,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    own: str,
    dropout: float | None,
) -> Iterator[str]:
    """Yields a recipe, one line per setting with the source of its value, and what differs.

    Args:
      found: what the files of the trainer say.
      values: their values by the name of a field.
      settings: the values of the run, by dotted name, which begins with `own`.
      given: those that replace values of the files.
      dropout: that of the adapter.
    """
    yield "recipe of the training"
    for field in FIELDS:
        value = settings[own + field.name]
        origin = "default"
        if field.name in values:
            origin = found.settings[field.name].origin
        if value != values.get(field.name, field.default):
            origin = "given"
        yield f"  {field.name:<17}{value!s:<10} {origin}"
    targets = found.settings.get("targets")
    if targets and targets.value == recipe.BY_ROWS and f"{own}targets" not in given:
        other = {"all": "response", "response": "all"}[values["targets"]]
        yield "  the trainer chose the targets by the form of its rows, here by those of the run's"
        yield "  file: for a file of another form, or if a function such as train_on_responses_only"
        yield f"  masked the prompts, pass --{own}targets={other}"
    elif not targets and f"{own}targets" not in given:
        yield "  no file says which tokens counted, here those of the answers: the default of TRL"
        yield f"  counts all tokens of a conversation (--{own}targets=all)"
    for difference in found.differences:
        yield f"  the files differ: {difference}; the first one decides"
    for lack in found.lacks:
        yield f"  left out: {lack}"
    if dropout:
        yield "  dropout uses other random numbers than the trainer"
