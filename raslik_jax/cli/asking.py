"""Questions to an index: how they are read, shown, and asked one after the other."""

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from raslik_jax.base.files import parse_json
from raslik_jax.base.messages import bounded, one_line, some_of
from raslik_jax.config import MeshConfig
from raslik_jax.data.examples import Example, make_example, with_system
from raslik_jax.report import serving
from raslik_jax.retrieve import chance

# They are listed as flags of the command that asks for them.
flags.disclaim_key_flags()

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.incident.tracer import Influence, Trace, Tracer

_TEXTS = ("instruction", "input", "output")
# From a question to what is behind its answer.
Ask = Callable[[Example], "Trace"]


def open_index(index: str, run: str, mesh: MeshConfig) -> tuple["Tracer", Callable[..., "Trace"]]:
    """Returns the tracer of an index, and its `trace_queries` on the mesh, for any thread.

    `run` is the index's run; '' finds it by the index's folder.
    """
    from raslik_jax.incident.tracer import Tracer
    from raslik_jax.parallel import meshes  # these take jax with them

    devices = meshes.make_mesh(mesh.data)
    with meshes.use(devices):
        tracer = Tracer(index, run=run or None, mesh=mesh)

    def trace(queries: Sequence[Example], **how: Any) -> "Trace":
        with meshes.use(devices):  # a mesh holds for one thread
            return tracer.trace_queries(queries, **how)

    return tracer, trace


def read_question(text: str) -> Example:
    """Returns the question of a JSON object: an instruction, and perhaps an input and an output."""
    shape = {"instruction": str, "input?": str, "output?": str}
    value = parse_json(text, "a question", shape)
    unknown = sorted(value.keys() - set(_TEXTS))
    if unknown:
        raise ValueError(
            f"a question must have the keys {', '.join(_TEXTS)}, got {some_of(unknown)}"
        )
    return make_question(*(value.get(name, "") for name in _TEXTS))


def make_question(instruction: str, input: str, output: str, system: str = "") -> Example:
    """Returns a question of these texts; refuses an empty one and what is no text."""
    try:
        f"{instruction}{input}{output}{system}".encode()
    except UnicodeEncodeError:
        raise ValueError("a question must be UTF-8 text, got other bytes in it") from None
    if not instruction.strip():
        raise ValueError("a question must have an instruction, got none: say what was asked")
    question = make_example(instruction, input, output)
    return with_system(question, system) if system.strip() else question


def converse(ask: Ask, width: int) -> None:
    """Asks for prompt and response in turn, and prints what is behind it, until there is no more.

    From a terminal or from piped lines; a line that ends in a backslash goes on in the next.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # gives lines a history, where there is one
            import readline  # noqa: F401
        print("Ctrl-D ends; a line that ends in \\ goes on; without a response the model answers.")
    while True:
        prompt = _read("prompt", is_terminal)
        if prompt is None:
            return
        if prompt.strip():
            response = _read("response", is_terminal)
            if response is None and is_terminal:
                return
            try:
                found = ask(make_question(prompt, "", response or ""))
                print(f"\n{as_text(found, width)}\n", flush=True)
            except (ValueError, OSError) as error:
                print(f"error: {bounded(str(error))}", file=sys.stderr, flush=True)


def _read(label: str, is_terminal: bool) -> str | None:
    """Returns the next text that is typed or piped; None where there is no more."""
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
    """Answers questions in JSON, one a line, with a line of JSON for each: a trace, or an error."""
    for line in sys.stdin:
        if line.strip():
            try:
                answer = as_json(ask(read_question(line)))
            except (ValueError, OSError) as error:
                answer = {"error": bounded(str(error))}
            print(json.dumps(answer), flush=True)


def serve(ask: Ask, html: str, port: int) -> None:
    """Serves a page with a box for questions on this machine, until Ctrl-C."""

    def answer(text: str) -> dict[str, Any]:
        start = time.perf_counter()
        found = as_json(ask(read_question(text)))
        return found | {"seconds": time.perf_counter() - start}

    with serving.Server(html, answer, port=port) as server:
        print(f"open {server.url}\nfor this machine alone; Ctrl-C ends", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def bare_page(title: str) -> str:
    """Returns a page with nothing but the box for questions."""
    from raslik_jax.report import page  # of which a question on the terminal needs nothing

    return page.render([], title=title, is_served=True)


def as_json(trace: "Trace") -> dict[str, Any]:
    """Returns a trace as plain values."""

    def rows(influences: "Sequence[Influence]") -> list[dict[str, Any]]:
        return [
            {"id": found.example.example_id, "score": found.score, "sigma": found.sigma}
            | {name: getattr(found.example, name) for name in (*_TEXTS, "is_target", "source")}
            | {"place": found.example.place, "file": found.example.file, "chance": found.chance}
            for found in influences
        ]

    return {
        "queries": [{name: getattr(query, name) for name in _TEXTS} for query in trace.queries],
        "toward": rows(trace.toward),
        "against": rows(trace.against),
        "behaviors": [
            {"queries": [n + 1 for n in one.queries], "toward": rows(one.toward)}
            for one in trace.behaviors
        ],
    }


def as_text(trace: "Trace", width: int) -> str:
    """Returns a trace for the terminal, its texts cut to so many characters."""
    return "\n".join(_lines(trace, width))


def _lines(trace: "Trace", width: int) -> Iterator[str]:
    for query in trace.queries:
        asked = f"{query.instruction}\n{query.input}"
        yield f"query   {one_line(asked, width)}"
        yield f"output  {one_line(query.output, width)}"
    if trace.told_apart:
        yield from ("", *textwrap.wrap(trace.told_apart, 96))
    parts = [("toward this output", trace.toward), ("against this output", trace.against)]
    parts += [
        (f"toward behavior {number} alone", one.toward)
        for number, one in enumerate(trace.behaviors, start=1)
    ]
    for way, influences in parts:
        yield f"\npulls {way} (score +- sigma of the sketch)"
        for rank, found in enumerate(influences, start=1):
            row = found.example
            source = f"  {one_line(row.source, 60)}" if row.source else ""
            noise = "" if found.sigma is None else f" +- {found.sigma:.4f}"
            yield f"{rank:4}. {found.score:+.4f}{noise}  {one_line(row.example_id, 60)}{source}"
            if found.chance and way.startswith("toward"):
                yield " " * 6 + chance.in_words(**found.chance)
            prompt = f"{row.instruction} | {row.input}" if row.input else row.instruction
            for text in (prompt, row.output):
                wrapped = textwrap.wrap(one_line(text, width), 88)
                yield from (" " * 6 + part for part in wrapped)
