"""Traces a generation to the training examples that make it likelier or less likely.

  raslik query --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and this answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers). Their
mean is traced. The command uses the model and the settings of the run that made the index. --center
and --aggregate replace its settings.
"""

import dataclasses
import json

from raslik_jax.base import settings
from raslik_jax.base.settings import setting
from raslik_jax.cli import setting_flags
from raslik_jax.config import RetrieveConfig
from raslik_jax.incident import asking
from raslik_jax.incident.asking import OF_RUN, AskOptions, as_json
from raslik_jax.parallel.processes import JobConfig

# Settings of the run that a flag of the same name replaces.
FLAGS = [
    leaf._replace(value=None) for leaf in settings.leaves(RetrieveConfig()) if leaf.name in OF_RUN
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AskOptions, JobConfig):
    """The generation to trace and the form and receiver of the result."""

    json: bool = setting(False, "Print a JSON object.")


def run(options: Options) -> None:
    """Traces a generation and prints the result."""
    options = dataclasses.replace(options, settings=setting_flags.given(FLAGS))
    found = asking.ask(options)
    print(json.dumps(as_json(found.trace)) if options.json else found)
