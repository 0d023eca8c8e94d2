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
line. --serve does the same for a browser on this machine.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags, logging

from raslik_jax.base import files, settings
from raslik_jax.base.settings import setting
from raslik_jax.cli import asking
from raslik_jax.config import MeshConfig, RetrieveConfig
from raslik_jax.data.examples import Example, write_examples
from raslik_jax.data.read.formats import AUTO, read_examples
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.run import written

if TYPE_CHECKING:  # it takes jax with it, and --help should not
    from raslik_jax.incident.tracer import Trace, Tracer

# Settings of the run that a flag of the same name replaces.
_RULE = ("select", "num_forget", "num_retain", "forget_threshold", "retain_threshold")
_OF_RUN = ("center", "aggregate", *_RULE, "margin_z", "forget_share", "retain_share")
FLAGS = [
    leaf._replace(value=None) for leaf in settings.leaves(RetrieveConfig()) if leaf.name in _OF_RUN
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobConfig):
    """What is traced, and what is shown of it."""

    index: str = setting("", "The index: WORKDIR/sketch/index of a run.")
    run: str = setting("", "Work directory of the run, if the index lies elsewhere.")
    instruction: str = setting("", "Instruction of the prompt.")
    input: str = setting("", "Input of the prompt.")
    system: str = setting("", "System prompt that stood before it, by the chat template.")
    response: str = setting(
        "", "What the model said (default: let it answer); follows a text as it stands, blanks too."
    )
    queries: str = setting("", "JSONL of generations, instead of --instruction.")
    top: int = setting(10, "Examples shown that pull toward the output.", low=0)
    bottom: int = setting(10, "Examples shown that pull against it.", low=0)
    finer: str = setting("", "A finer index, to score an int8 or sign one's best again.")
    json: bool = setting(False, "Print a JSON object for each question.")
    serve: bool = setting(False, "Serve a page with a box for questions, to this machine alone.")
    port: int = setting(0, "--serve: port; 0: a free one.", low=0, high=65535)
    text_width: int = setting(240, "Characters of each text shown; 0: all.", low=0)
    export_forget: str = setting("", "New JSONL file to write the forget set to.")
    export_retain: str = setting("", "New JSONL file to write the retain set to.")
    mesh: MeshConfig = MeshConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        beside = [name for name in ("input", "system", "response") if getattr(self, name)]
        if self.coordinator and not (self.instruction or self.queries):
            needs = "needs --instruction or --queries"
            yield f"--coordinator {needs}: questions one by one run in a single process"
        elif beside and not self.instruction:
            whose = "it belongs to that prompt, --queries have their own"
            yield f"--{beside[0]} needs --instruction: {whose}"
        elif self.serve and self.json:
            yield "--json has no effect with --serve: leave one of the two out"
        elif self.port and not self.serve:
            yield "--port needs --serve: give both"


def run(options: Options) -> None:
    """Traces, prints what was found and writes the sets that are asked for; or goes on asking."""
    if not options.index:
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    if options.queries and options.instruction:
        raise ValueError("--instruction or --queries must be given, got both: leave one out")
    exports = {"forget": options.export_forget, "retain": options.export_retain}
    paths = {name: pathlib.Path(path) for name, path in exports.items() if path}
    for name, path in paths.items():
        processes.alone(functools.partial(written.check_outside, path, f"--export_{name}"))
        processes.alone(functools.partial(files.check_new, path, f"--export_{name}"))
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError("--export_forget and --export_retain must be two files, they are one")
    queries = _queries(options)
    given = {name: flags.FLAGS[name].value for name in _OF_RUN}
    rule = {name: given.pop(name) for name in _OF_RUN if name not in ("center", "aggregate")}
    rule = {name: value for name, value in rule.items() if value is not None}
    if not queries:
        needing = [f"--export_{name}" for name in paths] + [f"--{name}" for name in rule]
        if needing:
            raise ValueError(f"{needing[0]} needs --instruction or --queries: give one of the two")
    logging.set_verbosity(logging.WARNING)
    _ask(options, queries, paths, given, rule)


def _ask(
    options: Options,
    queries: Sequence[Example],
    paths: dict[str, pathlib.Path],
    given: dict[str, Any],
    rule: dict[str, Any],
) -> None:
    """Traces the generations, or what is asked for one by one."""
    from raslik_jax.data.tokens import prompts
    from raslik_jax.index import search
    from raslik_jax.index.store import SketchStore

    tracer, trace = asking.open_index(options.index, options.run, options.mesh)
    if options.system.strip():
        prompts.require_system(tracer.workspace.template, tracer.workspace.template_name)
    how: dict[str, Any] = {**given, "top": options.top, "bottom": options.bottom}
    how["finer"] = SketchStore.open(options.finer) if options.finer else None
    if options.finer:
        search.check_finer(tracer.store, how["finer"])  # and not at the first question

    def ask(question: Example) -> "Trace":
        return trace((question,), **how)

    if options.serve:
        title = f"Asking {tracer.workspace.config.name}"
        asking.serve(ask, asking.bare_page(title), options.port)
    elif not queries:
        if options.json:
            asking.answer_lines(ask)
        else:
            asking.converse(ask, options.text_width)
    else:
        found = trace(queries, **how)
        export = functools.partial(_export, tracer, found, paths, rule)
        exported = (processes.alone(export) or []) if paths else []
        as_json = json.dumps(asking.as_json(found)) if options.json else ""
        print(as_json or asking.as_text(found, options.text_width))
        for line in exported:
            print(line, file=sys.stderr)


def _queries(options: Options) -> Sequence[Example]:
    """Returns the generations that the flags give; none where they are to be asked for."""
    given = options.queries or options.instruction
    if options.serve and given:
        name = "queries" if options.queries else "instruction"
        raise ValueError(f"--{name} has no effect with --serve: leave one of the two out")
    if options.queries:
        return read_examples(options.queries, format=AUTO, needs_output=False)
    asked = options.instruction, options.input, options.response, options.system
    return (asking.make_question(*asked),) if options.instruction else ()


def _export(
    tracer: "Tracer", trace: "Trace", paths: dict[str, pathlib.Path], rule: dict[str, Any]
) -> list[str]:
    """Writes the sets that are asked for; a line for each."""
    chosen, lines = tracer.select_sets(trace, **rule), []
    if not len(chosen.forget):
        return ["no row stands out of the unrelated ones: no set is written"]
    for name, path in paths.items():
        positions, sign = getattr(chosen, name), 1 if name == "forget" else -1
        rows = [tracer.examples[tracer.store.ids[position]] for position in positions]
        extra = [{"score": sign * float(trace.score_N[position])} for position in positions]
        with written.replacing(tracer.workspace.root, path) as made:
            write_examples(made, rows, extra=extra)
        lines.append(f"{len(rows)} examples to {name} written to {path}")
    return lines
