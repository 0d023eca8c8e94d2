"""Trains the adapter again without the rows that a trace has found, and measures it.

  raslik retrain --run=runs/incident --out=clean

The command trains a fresh adapter on the training file without the rows that were found. It follows
the recipe that the trainer left next to the adapter (training_args.json, trainer_state.json, a
model card, YAML of axolotl or LLaMA-Factory) or the one of --recipe. It prints each setting with
its origin. Then it measures the adapter as `raslik unlearn` does. It writes the adapter with its
card to --out, and the cleaned training file and the report to --run. `training_args.bin` is a
pickle and is not read: the error shows a line that prints it as training_args.json.

--check_recipe first trains on all rows and says whether the recipe gives the adapter.
--dry_run prints the time and memory of retraining and of unlearning, and recommends one of them.

Settings of the recipe can be given: --unlearn.retrain.learning_rate=1e-4. --helpfull lists all.
"""

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.retrain import RetrainOptions, retrain

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(None)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone
Options, run = command.of_job(RetrainOptions, retrain, FLAGS)
