"""Unlearns the rows of a trace, measures, and writes the clean adapter.

  raslik unlearn --run=runs/incident --out=clean

The command continues the run of `raslik trace`. On the found rows the model moves toward its base.
On other rows it stays close to the model before unlearning. A model without an adapter unlearns by
gradient ascent. The command measures the model on rows of no set and on the traced prompt. It
writes the adapter with a card to --out, the training file without the found rows, and the report.
--forget_file and --retain_file take other sets: training rows by their id, place or text. The run
keeps these sets until --retrieve.strategies names another one.

--dry_run prints the time and memory of unlearning and of retraining, and recommends one of them.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.unlearn import UnlearnOptions, unlearn

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(None)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone
Options, run = command.of_job(UnlearnOptions, unlearn, FLAGS)
