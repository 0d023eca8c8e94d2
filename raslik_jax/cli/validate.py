"""Trains the adapter of a trace again without rows and judges the scores of these rows.

  raslik validate --run=runs/incident --retrainings=32

The command follows the recipe of the adapter as `raslik retrain` does. It prints two numbers for
each ranking of the rows: the scores of the trace, BM25 on prompts and answers, and the files of
--scores.

QLD: how much the loss of the traced answer rises after retraining without the top rows (--top),
compared with retraining without the same number of random rows. The interval is Student's over
--seeds.
LDS: the rank correlation of the likelihood of the traced answer with the sum of the scores of the
rows that are left, over retrainings on random subsets. The interval is a bootstrap over subsets and
queries.

The losses of the queries after each retraining are stored. A larger --retrainings adds to them. The
report of the run shows the table.
"""

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.validate import ValidateOptions, validate

WHEN_STOPPED = command.GOES_ON
FLAGS = tuple(
    leaf for leaf in setting_flags.of_config(None) if leaf.name.startswith("unlearn.retrain.")
)
Options, run = command.of_job(ValidateOptions, validate, FLAGS)
