"""Traces a generation to the training examples that make it likelier or less likely.

  raslik query --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and this answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers). Their
mean is traced. The command uses the model and the settings of the run that made the index.
"""

import dataclasses
import json

from raslik_jax.base.settings import setting
from raslik_jax.incident import asking
from raslik_jax.parallel.processes import JobConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(asking.AskOptions, JobConfig):
    """The generation to trace and the form and receiver of the result."""

    json: bool = setting(False, "Print a JSON object.")


def run(options: Options) -> None:
    """Traces a generation and prints the result."""
    found = asking.ask(options)
    print(json.dumps(asking.as_json(found.trace)) if options.json else found)
