"""Unlearns what a trace has found, measures, and writes the clean adapter.

  raslik unlearn --run=runs/incident --out=clean

goes on with the run of `raslik trace`: on the rows that stood out the model goes back to what its
base says without the adapter, while it is held to others (a model without one unlearns by ascent),
measures on rows that no set has and on the traced prompt itself, and writes the adapter with a card
to --out, the training file without the rows that were found, and the report. Sets that were edited,
or made elsewhere, are given as --forget_file and --retain_file: training rows by their id, place or
text. They stay the run's until --retrieve.strategies names another.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

import dataclasses

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.unlearn import UnlearnOptions, unlearn
from raslik_jax.parallel.processes import JobConfig

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(None)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(UnlearnOptions, JobConfig):
    """Which run goes on, what it leaves, and the processes that unlearn."""


def run(options: Options) -> None:
    """Unlearns, measures and exports; prints what became of the traced prompt."""
    print(unlearn(options, settings=setting_flags.given(FLAGS)))
