"""Questions to an index one after the other: on a terminal or in lines of JSON."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raslik_jax.base.messages import bounded
from raslik_jax.data.examples import Example
from raslik_jax.incident.asking import as_json, as_text, make_question, read_question

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.incident.tracer import Trace

# From questions of one behavior to what is behind the answers.
Ask = Callable[[Sequence[Example]], "Trace"]


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
                found = ask([make_question(prompt, "", response or "")])
                print(f"\n{as_text(found)}\n", flush=True)
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
                answer = as_json(ask([read_question(line)]))
            except (ValueError, OSError) as error:
                answer = {"error": bounded(str(error))}
            print(json.dumps(answer), flush=True)
