"""Chooses learning rate and epoch on validation queries, by one rule for all strategies.

  raslik.py choose --runs=runs/v-1e-5,runs/v-3e-5,runs/v-1e-4 --output=choice.json
  raslik.py run ... --references.query_split=test --unlearn.choice=choice.json

The runs differ in learning rate (and seed) and were measured with
--references.query_split=validation. For each algorithm and strategy the command takes the pair of
learning rate and epoch with the smallest Euclidean distance to R = 1 and F = floor, averaged over
seeds. The floor is the backbone's own F. A model that never learned the behavior reaches this F, so
a lower F counts as the floor. A pair is skipped if a model was judged damaged at it. Ties go to the
smaller rate, then to the earlier epoch. Every strategy must have been tried at the same pairs.

The command refuses these runs: without the likelihoods that damage is judged by
(--evaluate.perplexity_examples=0); with queries from training rows (--retrieve.held_out); without
target or normal queries.

--floor=zero takes the paper's ideal point. `raslik.py suite --choose` does all of this for a grid.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.suite import choice
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.settings import Settings, setting
from raslik_jax.evaluate.choice import from_json
from raslik_jax.run import written
from raslik_jax.run.artifacts import read_metrics
from raslik_jax.run.written import differing_fields
from raslik_jax.train.objectives import OBJECTIVES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is chosen from."""

    runs: tuple[str, ...] = setting((), "Work directories of the validation runs.")
    floor: choice.Floor = setting("backbone", "F below which models count as equal.")
    output: str = setting("choice.json", "File for the choice.")


def run(options: Options) -> None:
    """Writes the choice file, and prints what was chosen."""
    if not options.runs:
        raise ValueError("--runs must name work directories, got none: give --runs=DIR,DIR")
    check_output(output := pathlib.Path(options.output))
    candidates = read_candidates([*map(pathlib.Path, options.runs)])
    choices = choice.choose(candidates, floor=options.floor)
    write_json(output, choice.to_json(choices, floor=options.floor))
    print(choice.describe(choices))
    print(f"choice: {output}", flush=True)


def read_candidates(runs: Sequence[pathlib.Path]) -> list[choice.Candidate]:
    """Returns the models of validation runs, to choose from; refuses runs of other settings."""
    candidates: list[choice.Candidate] = []
    first: dict[str, Any] = {}
    for run in runs:
        metrics = read_metrics(run)
        first = first or metrics["settings"]
        check_alike(first, metrics["settings"], run=str(run))
        if not metrics["methods"]:
            raise ValueError(f"{shown(str(run))} measured no unlearned model: finish the run first")
        candidates += choice.candidates_of(metrics)
    # Runs that differ in the rate of one algorithm hold the same of the others.
    return list(dict.fromkeys(candidates))


def check_output(output: pathlib.Path) -> None:
    """Raises a ValueError where a choice would replace a file that is no choice."""
    written.check_outside(output, "--output")
    if not os.path.lexists(output):
        return
    try:
        from_json(read_json(output), origin=str(output))
    except ValueError:
        name = shown(str(output), 160)
        raise ValueError(f"--output must be new or an earlier choice, got {name}") from None


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any], *, run: str) -> None:
    """Refuses settings that differ from those of the first run in more than a choice may see.

    That is the name, the seed and unlearning's learning rates; `run` names the other run.
    """
    lines = differing_fields(dict(first), dict(other))
    free = ("name:", "seed:", *(f"unlearn.{name}.learning_rate:" for name in OBJECTIVES))
    wrong = [line for line in lines if not line.startswith(free)]
    if wrong:
        got = f"{one_line(wrong[0], 120)} in {shown(run)}"
        raise ValueError(f"runs must differ in learning rate and seed alone, got {got}")
