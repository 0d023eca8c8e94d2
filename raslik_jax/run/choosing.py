"""Chooses learning rate and epoch from the work directories of validation runs."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.evaluate import choice
from raslik_jax.files import read_json, write_json
from raslik_jax.messages import one_line, shown
from raslik_jax.report.runs import read_metrics
from raslik_jax.run.workdir import differing_fields
from raslik_jax.train.objectives import OBJECTIVES


def choose_from_runs(
    runs: Sequence[pathlib.Path], output: pathlib.Path, *, per: choice.Per, floor: choice.Floor
) -> tuple[choice.Choice, ...]:
    """Writes the choice file of validation runs, which --unlearn.choice reads; returns the choices.

    The runs differ in learning rate and seed; for `per` and `floor` see `choice.choose`.
    """
    check_output(output)
    choices = choice.choose(read_candidates(runs), per=per, floor=floor)
    write_json(output, choice.to_json(choices, per=per, floor=floor))
    return choices


def read_candidates(runs: Sequence[pathlib.Path]) -> list[choice.Candidate]:
    """Returns the models of validation runs, to choose from; refuses runs of other settings."""
    candidates: list[choice.Candidate] = []
    first: dict[str, Any] = {}
    for run in runs:
        metrics = read_metrics(run)
        settings = metrics["settings"]
        first = first or settings
        check_alike(first, settings, run=str(run))
        names = {entry["algorithm"] for entry in metrics["methods"]}
        if not names:
            raise ValueError(f"{shown(str(run))} measured no unlearned model: finish the run first")
        rates = {name: settings["unlearn"][name]["learning_rate"] for name in names}
        candidates += choice.candidates_of(metrics, rates)
    # Runs that differ in the rate of one algorithm hold the same of the others.
    return list(dict.fromkeys(candidates))


def check_output(output: pathlib.Path) -> None:
    """Raises a ValueError where a choice would replace a file that is no choice."""
    if not os.path.lexists(output):
        return
    try:
        choice.from_json(read_json(output), origin=str(output))
    except ValueError:
        raise ValueError(
            f"--output must be a new file or an earlier choice, got {shown(str(output), 160)}: "
            "give another path"
        ) from None


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any], *, run: str) -> None:
    """Refuses settings that differ from those of the first run in more than a choice may see.

    That is the name, the seed and unlearning's learning rates; `run` names the other run.
    """
    lines = differing_fields(dict(first), dict(other))
    free = ("name:", "seed:", *(f"unlearn.{name}.learning_rate:" for name in OBJECTIVES))
    wrong = [line for line in lines if not line.startswith(free)]
    if wrong:
        raise ValueError(
            f"runs to choose from must differ in learning rate and seed alone, got "
            f"{one_line(wrong[0], 120)} in {shown(run)}: choose from runs of the same settings"
        )
