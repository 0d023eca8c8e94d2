"""Chooses learning rate and epoch on validation queries, by one rule for all strategies.

  raslik choose --runs=runs/v-1e-5,runs/v-3e-5,runs/v-1e-4 --output=choice.json
  raslik run ... --references.query_split=test --unlearn.choice=choice.json

The runs differ in learning rate (and seed) and were measured with
--references.query_split=validation. For each algorithm and strategy the pair of learning rate and
epoch is taken whose Euclidean distance to R = 1 and F = floor, averaged over seeds, is smallest.
The floor is the backbone's own F: what is below it counts as at it, because a model that never
learned the behavior says no less. A pair at which a model was judged damaged is skipped. Ties go to
the smaller rate, then to the earlier epoch. Every strategy must have been tried at the same pairs.

--per=algorithm averages over strategies too, so that all share one pair; --floor=zero takes the
paper's ideal point. `raslik suite --choose` does all of this for a grid.
"""

import dataclasses
import pathlib
from typing import NoReturn

from absl import flags

from raslik_jax.cli import command
from raslik_jax.evaluate import choice
from raslik_jax.run.choosing import choose_from_runs
from raslik_jax.settings import Settings, setting

flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is chosen from."""

    runs: tuple[str, ...] = setting((), "Work directories of the validation runs.")
    per: choice.Per = setting("strategy", "What has a choice of its own.")
    floor: choice.Floor = setting("backbone", "F that is no longer improved upon.")
    output: str = setting("choice.json", "Where the choice goes.")


def main() -> NoReturn:
    """Runs the command."""
    command.start(run, Options())


def run(options: Options) -> None:
    """Chooses, and prints what was chosen."""
    if not options.runs:
        raise ValueError("--runs must name work directories, got none: give --runs=DIR,DIR")
    runs, output = [pathlib.Path(run) for run in options.runs], pathlib.Path(options.output)
    choices = choose_from_runs(runs, output, per=options.per, floor=options.floor)
    print(choice.describe(choices))
    print(f"choice: {output}")
