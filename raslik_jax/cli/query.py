"""Traces a generation to the training examples that make it likelier or less likely.

  raslik query --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and this answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers). Their
mean is traced. The command uses the model and the settings of the run that made the index. --center
and --aggregate replace its settings.

Without --instruction and --queries the command stays open. It asks for a prompt and a response, in
a terminal or from piped lines. With --json each line is an object of instruction, input and output.
"""

import dataclasses
import json
from collections.abc import Iterator

from raslik_jax.base import settings
from raslik_jax.base.settings import setting
from raslik_jax.cli import asking, setting_flags
from raslik_jax.config import RetrieveConfig
from raslik_jax.incident.asking import OF_RUN, AskOptions, as_json, ask, open_index, read_queries
from raslik_jax.parallel.processes import JobConfig

# Settings of the run that a flag of the same name replaces.
FLAGS = [
    leaf._replace(value=None) for leaf in settings.leaves(RetrieveConfig()) if leaf.name in OF_RUN
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AskOptions, JobConfig):
    """The generation to trace and the form and receiver of the result."""

    json: bool = setting(False, "Print a JSON object for each question.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.coordinator and not (self.queries or self.instruction):
            needs = "needs --instruction or --queries"
            yield (
                f"--coordinator {needs}: without them the command asks in a terminal, in one "
                "process"
            )


def run(options: Options) -> None:
    """Traces and prints the result, or asks for questions."""
    options = dataclasses.replace(options, settings=setting_flags.given(FLAGS))
    if not read_queries(options):
        answer = asking.answer_lines if options.json else asking.converse
        answer(open_index(options))
        return
    found = ask(options)
    print(json.dumps(as_json(found.trace)) if options.json else found)
