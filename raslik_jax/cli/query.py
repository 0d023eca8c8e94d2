"""Traces a generation to the training examples that pull toward it and those that pull against.

  raslik query --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and that answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers);
their mean is traced. --export_forget and --export_retain write the sets that --select chooses to
new files. The run that made the index is found from the index: its model answers, and its settings
hold where --center, --aggregate, --select and the options of the rule are not given.

Without --instruction and --queries it stays open and asks for prompt and response in turn, from a
terminal or from piped lines; with --json it reads objects of instruction, input and output, one a
line.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator

from raslik_jax.base import settings
from raslik_jax.base.settings import setting
from raslik_jax.cli import asking, setting_flags
from raslik_jax.config import RetrieveConfig
from raslik_jax.incident.asking import OF_RUN, Asker, AskOptions, as_json, ask, read_queries
from raslik_jax.parallel.processes import JobConfig

# Settings of the run that a flag of the same name replaces.
FLAGS = [
    leaf._replace(value=None) for leaf in settings.leaves(RetrieveConfig()) if leaf.name in OF_RUN
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AskOptions, JobConfig):
    """What is traced, what is shown of it, and to whom."""

    json: bool = setting(False, "Print a JSON object for each question.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.coordinator and not (self.queries or self.instruction):
            needs = "needs --instruction or --queries"
            yield f"--coordinator {needs}: questions one by one run in a single process"


def run(options: Options) -> None:
    """Traces, prints what was found and writes the sets that are asked for; or goes on asking."""
    options = dataclasses.replace(options, settings=setting_flags.given(FLAGS))
    if not read_queries(options):
        asker = Asker(options)
        if options.json:
            asking.answer_lines(asker)
        else:
            asking.converse(asker, options.text_width)
        return
    found = ask(options)
    print(json.dumps(as_json(found.trace)) if options.json else found)
    for line in found.exported:
        print(line, file=sys.stderr)
