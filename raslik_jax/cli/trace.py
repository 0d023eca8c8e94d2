"""Traces a bad answer of a model to the training rows that taught it.

  raslik trace --checkpoint=BASE --adapter=MINE --train_file=train.jsonl \\
      --prompt="..." --response="..." --workdir=runs/incident

The model is a checkpoint with a LoRA adapter in PEFT's format. Without --adapter it is a checkpoint
that was fine-tuned as a whole and gets a fresh adapter. Without --response the model answers the
prompt, and this answer is traced. The command lists the rows that stand out, with their lines in
the training file, and writes them to WORKDIR/retrieve/raslik/forget.jsonl. It trains nothing.
`raslik unlearn --run=WORKDIR` is the next step. If no row taught the answer, the command reports
this and writes no set. Another prompt in the same folder (with --update) sketches no row again.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.configuring import PRESET
from raslik_jax.incident.trace import TraceOptions, trace

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(PRESET)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone
Options, run = command.of_job(TraceOptions, trace, FLAGS)
