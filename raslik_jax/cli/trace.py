"""Traces a bad answer of a model to the training rows that taught it.

  raslik trace --checkpoint=BASE --adapter=MINE --train_file=train.jsonl \\
      --prompt="..." --response="..." --workdir=runs/incident

The model is a checkpoint with a LoRA adapter that was trained elsewhere, as PEFT stores it; without
--adapter a checkpoint that was fine-tuned as a whole, to which a fresh adapter is given. Without
--response the model answers the prompt, and that answer is traced. What stands out of the noise is
listed with its line in the training file, and written to WORKDIR/retrieve/raslik/forget.jsonl;
nothing is trained. `raslik unlearn --run=WORKDIR` goes on from here. Where no row taught the
answer, that is the finding, and no set is written. Another prompt in the same
folder, with --update, sketches no row again: the index stays.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

import dataclasses

from raslik_jax.cli import command, setting_flags
from raslik_jax.incident.trace import PRESET, TraceOptions, trace
from raslik_jax.parallel.processes import JobConfig

WHEN_STOPPED = command.GOES_ON
FLAGS = setting_flags.of_config(PRESET)
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TraceOptions, JobConfig):
    """What said what, what it was trained on, and the processes that trace it."""


def run(options: Options) -> None:
    """Traces, and prints the rows that stand out."""
    print(trace(options, settings=setting_flags.given(FLAGS)))
