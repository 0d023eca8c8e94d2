"""Traces a generation to the training examples that pull toward it and those that pull against.

  raslik query --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and that answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers);
their mean is traced. --export_forget and --export_retain write the sets that --select chooses to
new files. The run that made the index is found from the index: its model answers, and its settings
hold where --center, --aggregate, --select and the options of the rule are not given.
"""

import dataclasses
import json
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from raslik_jax import files, settings
from raslik_jax.config import RetrieveConfig
from raslik_jax.data.examples import Example, make_example, write_examples
from raslik_jax.data.formats import AUTO, read_examples
from raslik_jax.messages import one_line
from raslik_jax.settings import setting

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.trace import Influence, Trace, Tracer

# Settings of the run that a flag of the same name replaces.
_RULE = ("select", "num_forget", "num_retain", "forget_threshold", "retain_threshold")
_OF_RUN = ("center", "aggregate", *_RULE, "margin_z", "forget_share", "retain_share")
FLAGS = [
    leaf._replace(value=None) for leaf in settings.leaves(RetrieveConfig()) if leaf.name in _OF_RUN
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(settings.Settings):
    """What is traced, and what is shown of it."""

    index: str = setting("", "The index: WORKDIR/sketch/index of a run.")
    run: str = setting("", "Work directory of the run, if the index lies elsewhere.")
    instruction: str = setting("", "Instruction of the prompt.")
    input: str = setting("", "Input of the prompt.")
    response: str = setting("", "What the model said (default: let it answer).")
    queries: str = setting("", "JSONL of generations, instead of --instruction.")
    top: int = setting(10, "Examples shown that pull toward the output.", low=0)
    bottom: int = setting(10, "Examples shown that pull against it.", low=0)
    finer: str = setting("", "A finer index, to score an int8 or sign one's best again.")
    json: bool = setting(False, "Print one JSON object.")
    text_width: int = setting(240, "Characters of each text shown; 0: all.", low=0)
    export_forget: str = setting("", "New JSONL file to write the forget set to.")
    export_retain: str = setting("", "New JSONL file to write the retain set to.")


def run(options: Options) -> None:
    """Traces, prints what was found and writes the sets that are asked for."""
    if not options.index:
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    exports = {"forget": options.export_forget, "retain": options.export_retain}
    paths = {name: pathlib.Path(path) for name, path in exports.items() if path}
    for name, path in paths.items():
        files.check_new(path, f"--export_{name}")
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError("--export_forget and --export_retain must be two files, they are one")
    if bool(options.queries) == bool(options.instruction):
        raise ValueError("either --instruction or --queries must be given: give one of the two")
    queries: Sequence[Example]
    queries = [make_example(options.instruction, options.input, options.response)]
    if options.queries:
        queries = read_examples(options.queries, format=AUTO, needs_output=False)
    from raslik_jax.index.store import SketchStore
    from raslik_jax.trace import Tracer

    given = {name: flags.FLAGS[name].value for name in _OF_RUN}
    tracer = Tracer(options.index, run=options.run or None)
    finer = SketchStore.open(options.finer) if options.finer else None
    how: dict[str, Any] = {name: given.pop(name) for name in ("center", "aggregate")}
    how |= {"top": options.top, "bottom": options.bottom}
    trace = tracer.trace_queries(queries, **how, finer=finer)
    rule = {name: value for name, value in given.items() if value is not None}
    exported = _export(tracer, trace, paths, rule) if paths else []
    print(json.dumps(_as_json(trace)) if options.json else _as_text(trace, options.text_width))
    for line in exported:
        print(line, file=sys.stderr)


def _export(
    tracer: "Tracer", trace: "Trace", paths: dict[str, pathlib.Path], rule: dict[str, Any]
) -> list[str]:
    """Writes the sets that are asked for; a line for each."""
    chosen, lines = tracer.select_sets(trace, **rule), []
    for name, path in paths.items():
        positions, sign = getattr(chosen, name), 1 if name == "forget" else -1
        rows = [tracer.examples[tracer.store.ids[position]] for position in positions]
        extra = [{"score": sign * float(trace.score_N[position])} for position in positions]
        write_examples(path, rows, extra=extra)
        lines.append(f"{len(rows)} examples to {name} written to {path}")
    return lines


def _as_json(trace: "Trace") -> dict[str, Any]:
    texts = ("instruction", "input", "output")

    def rows(influences: "Sequence[Influence]") -> list[dict[str, Any]]:
        return [
            {"id": found.example.example_id, "score": found.score, "sigma": found.sigma}
            | {name: getattr(found.example, name) for name in (*texts, "is_target", "source")}
            for found in influences
        ]

    return {
        "queries": [{name: getattr(query, name) for name in texts} for query in trace.queries],
        "toward": rows(trace.toward),
        "against": rows(trace.against),
    }


def _as_text(trace: "Trace", width: int) -> str:
    """Returns a trace for the terminal, its texts cut to so many characters."""
    lines = []
    for query in trace.queries:
        prompt = one_line(f"{query.instruction}\n{query.input}", width)
        lines += [f"query   {prompt}", f"output  {one_line(query.output, width)}"]
    for way, influences in (("toward", trace.toward), ("against", trace.against)):
        lines += ["", f"pulls {way} this output (score +- sigma of the sketch)"]
        for rank, found in enumerate(influences, start=1):
            row = found.example
            prompt = f"{row.instruction} | {row.input}" if row.input else row.instruction
            source = f"  {one_line(row.source, 60)}" if row.source else ""
            noise = "" if found.sigma is None else f" +- {found.sigma:.4f}"
            name = one_line(row.example_id, 60)
            lines.append(f"{rank:4}. {found.score:+.4f}{noise}  {name}{source}")
            for text in (prompt, row.output):
                wrapped = textwrap.wrap(one_line(text, width), 88)
                lines += [" " * 6 + part for part in wrapped]
    return "\n".join(lines)
