"""Questions to an index: the question, the answer, and its form in the terminal."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from raslik_jax.base.messages import one_line
from raslik_jax.base.settings import Settings, setting
from raslik_jax.config import MeshConfig
from raslik_jax.data.examples import Example
from raslik_jax.data.read.formats import AUTO, parse_fields, read_examples
from raslik_jax.data.read.rows import require_read
from raslik_jax.incident import making
from raslik_jax.retrieve import chance

if TYPE_CHECKING:  # it takes jax with it
    from raslik_jax.incident.tracer import Influence, Trace

TEXTS = ("instruction", "input", "output")
# Characters that are shown of each text.
_WIDTH = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskOptions(Settings):
    """The generation to trace and the form of the result."""

    index: str = setting("", "Folder of the index: WORKDIR/sketch/index of a run.")
    run: str = setting("", "Work directory of the run, if the index is elsewhere.")
    instruction: str = setting("", "Instruction of the prompt.")
    input: str = setting("", "Input of the prompt.")
    system: str = setting("", "System prompt, for the chat template.")
    response: str = setting(
        "", "The model's answer, unchanged, blanks too (default: let the model answer)."
    )
    queries: str = setting("", "JSONL file of prompts and answers, instead of --instruction.")
    top: int = setting(10, "Number of examples to show that make the output likelier.", low=0)
    bottom: int = setting(10, "Number of examples to show that make it less likely.", low=0)
    mesh: MeshConfig = MeshConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        beside = [name for name in ("input", "system", "response") if getattr(self, name)]
        if beside and not self.instruction:
            yield f"--{beside[0]} needs --instruction: the rows of --queries have their own"


@dataclasses.dataclass(frozen=True)
class AskResult:
    """The rows behind a generation; printed, it shows those of the highest and lowest scores."""

    trace: "Trace"

    def __str__(self) -> str:
        return "\n".join(_lines(self.trace))


def ask(options: AskOptions | None = None, **named: Any) -> AskResult:
    """Traces a generation to the examples that make it likelier or less likely.

    Without a response the model answers, and this answer is traced. Options are those of
    `AskOptions`, as an object or by name.

    Example:
      print(raslik_jax.ask(run="runs/incident", instruction="...", response="..."))
    """
    options = making.options_of(options or AskOptions(), named)
    if not (options.index or options.run):
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    if bool(options.queries) == bool(options.instruction):
        raise ValueError("--instruction or --queries must be given, got none or both: give one")
    from raslik_jax.incident.tracer import Tracer
    from raslik_jax.parallel import meshes

    with meshes.use(meshes.make_mesh(options.mesh.data)):
        index = options.index or options.run
        tracer = Tracer(index, run=options.run or None, mesh=options.mesh)
        ends: Any = {"top": options.top, "bottom": options.bottom}
        if options.queries:
            queries = _read_queries(options.queries, tracer.workspace.config.corpus.own)
            return AskResult(tracer.trace_queries(queries, **ends))
        more: Any = {"input": options.input, "system": options.system}
        return AskResult(tracer.trace(options.instruction, options.response, **more, **ends))


def _read_queries(path: str, rows: Any) -> Sequence[Example]:
    """Returns the generations of a file, whose keys are those of the run's own rows."""
    fields = parse_fields(getattr(rows, "fields", ""))
    how: Any = {"format": getattr(rows, "format", AUTO), "needs_output": False}
    return read_examples(path, fields=fields, check=require_read, **how)


def as_json(trace: "Trace") -> dict[str, Any]:
    """Returns a trace as plain values."""

    def rows(influences: "Sequence[Influence]") -> list[dict[str, Any]]:
        return [
            {"id": found.example.example_id, "score": found.score, "sigma": found.sigma}
            | {name: getattr(found.example, name) for name in (*TEXTS, "is_target", "source")}
            | {"place": found.example.place, "file": found.example.file, "chance": found.chance}
            for found in influences
        ]

    return {
        "queries": [{name: getattr(query, name) for name in TEXTS} for query in trace.queries],
        "toward": rows(trace.toward),
        "against": rows(trace.against),
        "behaviors": [
            {"queries": [n + 1 for n in one.queries], "toward": rows(one.toward)}
            for one in trace.behaviors
        ],
    }


def _lines(trace: "Trace") -> Iterator[str]:
    """Yields the lines of a trace for the terminal, with its texts cut short."""
    for query in trace.queries:
        asked = f"{query.instruction}\n{query.input}"
        yield f"query   {one_line(asked, _WIDTH)}"
        yield f"output  {one_line(query.output, _WIDTH)}"
    if trace.told_apart:
        yield from ("", *textwrap.wrap(trace.told_apart, 96))
    parts = [("make this output likelier", trace.toward), ("make it less likely", trace.against)]
    parts += [
        (f"make behavior {number} alone likelier", one.toward)
        for number, one in enumerate(trace.behaviors, start=1)
    ]
    for way, influences in parts:
        yield f"\nrows that {way} (score +- standard deviation of its sketch)"
        for rank, found in enumerate(influences, start=1):
            row = found.example
            source = f"  {one_line(row.source, 60)}" if row.source else ""
            noise = "" if found.sigma is None else f" +- {found.sigma:.4f}"
            yield f"{rank:4}. {found.score:+.4f}{noise}  {one_line(row.example_id, 60)}{source}"
            if found.chance and influences is not trace.against:
                yield " " * 6 + chance.in_words(**found.chance)
            prompt = f"{row.instruction} | {row.input}" if row.input else row.instruction
            for text in (prompt, row.output):
                wrapped = textwrap.wrap(one_line(text, _WIDTH), 88)
                yield from (" " * 6 + part for part in wrapped)
