"""Chooses learning rate and epoch on validation queries, by one rule for all strategies.

  python experiments/choose.py --runs=runs/v-1e-5,runs/v-3e-5,runs/v-1e-4 --output=choice.json
  python experiments/run.py ... --references.query_split=test --unlearn.choice=choice.json

The runs differ in learning rate (and seed) and were measured with
--references.query_split=validation. For each algorithm and strategy the pair of learning rate and
epoch is taken whose Euclidean distance to R = 1 and F = floor, averaged over seeds, is smallest.
The floor is the backbone's own F: what is below it counts as at it, because a model that never
learned the behavior says no less. A point where a model was judged damaged is skipped. Ties go to
the smaller rate, then to the earlier epoch. Every strategy must have been tried at the same points.

--per=algorithm averages over strategies too, so that all share one pair; --floor=zero takes the
paper's ideal point. experiments/suite.py --choose does all of this for a grid.
"""

import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402
from raslik_jax.evaluate import choice  # noqa: E402
from raslik_jax.run.choosing import choose_from_runs  # noqa: E402

_RUNS = flags.DEFINE_list("runs", [], "Work directories of the validation runs.")
_PER = flags.DEFINE_enum("per", "strategy", list(choice.PER), "What has a choice of its own.")
_FLOOR = flags.DEFINE_enum(
    "floor", "backbone", list(choice.FLOORS), "F that is no longer improved upon."
)
_OUTPUT = flags.DEFINE_string("output", "choice.json", "Where the choice goes.")


def main() -> None:
    if not _RUNS.value:
        raise ValueError("--runs must name work directories, got none: give --runs=DIR,DIR")
    runs = [pathlib.Path(run) for run in _RUNS.value]
    output = pathlib.Path(_OUTPUT.value)
    choices = choose_from_runs(runs, output, per=_PER.value, floor=_FLOOR.value)
    print(choice.describe(choices))
    print(f"choice: {output}")


if __name__ == "__main__":
    command.start(main)
