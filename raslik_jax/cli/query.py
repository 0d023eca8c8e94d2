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

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from raslik_jax.base import settings
from raslik_jax.base.messages import bounded
from raslik_jax.base.settings import setting
from raslik_jax.cli import setting_flags
from raslik_jax.config import RetrieveConfig
from raslik_jax.data.examples import Example
from raslik_jax.incident import asking
from raslik_jax.incident.asking import OF_RUN, AskOptions, as_json
from raslik_jax.parallel.processes import JobConfig

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.incident.tracer import Trace

# From questions of one behavior to what is behind the answers.
Ask = Callable[[Sequence[Example]], "Trace"]

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
    if not asking.read_queries(options):
        answer = answer_lines if options.json else converse
        answer(asking.open_index(options))
        return
    found = asking.ask(options)
    print(json.dumps(as_json(found.trace)) if options.json else found)


def converse(ask: Ask) -> None:
    """Asks for prompt and response in turn and prints the rows behind them until the end.

    It reads from a terminal or from piped lines. A backslash at the end of a line joins the next
    line.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # gives lines a history, where there is one
            import readline  # noqa: F401
        print(
            "Ctrl-D quits. A line that ends in \\ continues on the next line. If the response is "
            "empty, the model answers."
        )
    while True:
        prompt = _read("prompt", is_terminal)
        if prompt is None:
            return
        if prompt.strip():
            response = _read("response", is_terminal)
            if response is None and is_terminal:
                return
            try:
                found = ask([asking.make_question(prompt, "", response or "")])
                print(f"\n{asking.as_text(found)}\n", flush=True)
            except (ValueError, OSError) as error:
                print(f"error: {bounded(str(error))}", file=sys.stderr, flush=True)


def _read(label: str, is_terminal: bool) -> str | None:
    """Returns the next typed or piped text; None at the end."""
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        try:
            # Not the stream of texts from data: on the terminal itself lines can be edited.
            with contextlib.redirect_stdout(sys.__stdout__):
                line = input(f"{label + ':':10}" if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return "\n".join(line.removesuffix("\\") for line in lines) if lines else None
        lines.append(line)
    return "\n".join([line.removesuffix("\\") for line in lines])


def answer_lines(ask: Ask) -> None:
    """Answers questions in JSON, one a line, with a line of JSON for each: a trace or an error."""
    for line in sys.stdin:
        if line.strip():
            try:
                answer = as_json(ask([asking.read_question(line)]))
            except (ValueError, OSError) as error:
                answer = {"error": bounded(str(error))}
            print(json.dumps(answer), flush=True)
