"""Trains the adapter again without the rows that a trace has found, and measures it.

  raslik retrain --run=runs/incident --out=clean

The command trains a fresh adapter on the training file without the rows that were found. It follows
the recipe that the trainer left next to the adapter (training_args.json, trainer_state.json, a
model card, YAML of axolotl or LLaMA-Factory) or the one of --recipe. It prints each setting with
its origin. Then it measures the adapter as `raslik unlearn` does. It writes the adapter with its
card to --out, and the cleaned training file and the report to --run. `training_args.bin` is a
pickle and is not read: the message shows a line that prints it as training_args.json.

--check_recipe first trains on all rows and says whether the recipe gives the adapter.
--dry_run prints the time and memory of retraining and of unlearning, and recommends one of them.

Settings of the recipe can be given: --unlearn.retrain.learning_rate=1e-4. --helpfull lists all.
"""

import dataclasses

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.retrain import RetrainOptions, retrain
from raslik_jax.parallel.processes import JobConfig

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(None)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RetrainOptions, JobConfig):
    """The run to continue, the files to write, and the processes that train."""


def run(options: Options) -> None:
    """Trains, measures and exports; prints the outcome for the traced prompt."""
    print(retrain(options, settings=setting_flags.given(FLAGS)))
