"""Chooses learning rate and epoch from the work directories of validation runs."""

import pathlib
from collections.abc import Sequence

from raslik_jax.evaluation import choice
from raslik_jax.pipeline import read_json, write_json


def choose_from_runs(
    runs: Sequence[pathlib.Path], output: pathlib.Path, *, per: str, floor: str
) -> tuple[choice.Choice, ...]:
    """Writes the choice file of validation runs, which --choice reads, and returns the choices.

    Args:
      runs: work directories that differ in learning rate and seed, measured on validation queries.
      output: where the file goes.
      per: see `choice.choose`; floor: likewise.

    Raises:
      ValueError: a run without metrics, one measured on test queries, or an incomplete grid.
    """
    candidates: list[choice.Candidate] = []
    for run in runs:
        metrics = read_json(run / "metrics.json")
        settings = read_json(run / "config.json")["unlearn"]
        names = {entry["algorithm"] for entry in metrics["methods"]}
        rates = {name: settings[f"{name}_learning_rate"] for name in names}
        candidates += choice.candidates_of(metrics, rates)
    # Runs that differ in the rate of one algorithm hold the same of the others.
    choices = choice.choose(list(dict.fromkeys(candidates)), per=per, floor=floor)
    write_json(output, choice.to_json(choices, per=per, floor=floor))
    return choices
