"""Traces a generation to the training examples that pull toward it and those that pull against.

  python experiments/query.py --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and that answer is traced. --queries takes a JSONL of several
generations of one behavior (instruction, input, output; without an output the model answers);
their mean is traced. --export_forget and --export_retain write the sets that --select chooses to
new files. The run that made the index is found from the index: its model answers, and its settings
hold where no flag is given.
"""

import json
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax import files  # noqa: E402
from raslik_jax.cli import command  # noqa: E402
from raslik_jax.messages import one_line  # noqa: E402

_INDEX = flags.DEFINE_string("index", "", "The index: WORKDIR/sketch/index of a run.")
_RUN = flags.DEFINE_string("run", "", "Work directory of the run, if the index lies elsewhere.")
_INSTRUCTION = flags.DEFINE_string("instruction", "", "Instruction of the prompt.")
_INPUT = flags.DEFINE_string("input", "", "Input of the prompt.")
_RESPONSE = flags.DEFINE_string("response", "", "What the model said (default: let it answer).")
_QUERIES = flags.DEFINE_string("queries", "", "JSONL of generations, instead of --instruction.")
_TOP = flags.DEFINE_integer("top", 10, "Examples shown that pull toward the output.", 0)
_BOTTOM = flags.DEFINE_integer("bottom", 10, "Examples shown that pull against it.", 0)
_CENTER = flags.DEFINE_boolean("center", None, "Centered cosine (default: as the run has it).")
_AGGREGATE = flags.DEFINE_enum(
    "aggregate",
    None,
    ["mean", "mean_rank", "common"],
    "How the scores of several queries become one (default: as the run has it).",
)
_FINER = flags.DEFINE_string(
    "finer", "", "A finer index, to score an int8 or sign one's best again."
)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object.")
_WIDTH = flags.DEFINE_integer("text_width", 240, "Characters of each text shown; 0: all.", 0)

_FORGET = flags.DEFINE_string("export_forget", "", "New JSONL file to write the forget set to.")
_RETAIN = flags.DEFINE_string("export_retain", "", "New JSONL file to write the retain set to.")
# The run's own settings where they are not given.
_RULES = {
    holder.name: holder
    for holder in (
        flags.DEFINE_enum(
            "select",
            None,
            ["count", "threshold", "margin", "quantile"],
            "Rule that chooses the sets (default, as of the following: as the run has it).",
        ),
        flags.DEFINE_integer("num_forget", None, "count: examples to forget; 0: all targets."),
        flags.DEFINE_integer("num_retain", None, "count: examples to retain; 0: num_forget."),
        flags.DEFINE_float("forget_threshold", None, "threshold, margin: tau_F."),
        flags.DEFINE_float("retain_threshold", None, "threshold, margin: tau_R."),
        flags.DEFINE_float("margin_z", None, "margin: standard deviations to clear it by."),
        flags.DEFINE_float("forget_share", None, "quantile: share to forget."),
        flags.DEFINE_float("retain_share", None, "quantile: share to retain."),
    )
}


def read_queries() -> tuple[Any, ...]:
    """Returns the queries that the flags name."""
    from raslik_jax.data.examples import make_example
    from raslik_jax.data.formats import read_examples

    if bool(_QUERIES.value) == bool(_INSTRUCTION.value):
        raise ValueError("either --instruction or --queries must be given: give one of the two")
    if _QUERIES.value:
        return read_examples(_QUERIES.value, needs_output=False)
    return (make_example(_INSTRUCTION.value, _INPUT.value, _RESPONSE.value),)


def export_paths() -> dict[str, pathlib.Path]:
    """Returns where the forget and the retain set go, those of the two that are asked for.

    Raises:
      ValueError: something is there already, the folder is not, or both are one file.
    """
    paths = {
        name: pathlib.Path(flag.value)
        for name, flag in (("forget", _FORGET), ("retain", _RETAIN))
        if flag.value
    }
    for name, path in paths.items():
        files.check_new(path, f"--export_{name}")
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError("--export_forget and --export_retain must be two files, they are one")
    return paths


def excerpt(text: str) -> str:
    """Returns a text in one printable line, shortened to --text_width."""
    return one_line(text, _WIDTH.value)


def as_json(trace: Any) -> dict[str, Any]:
    """Returns a trace as plain values."""

    def rows(influences: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "id": found.example.example_id,
                "score": found.score,
                "sigma": found.sigma,
                "instruction": found.example.instruction,
                "input": found.example.input,
                "output": found.example.output,
                "is_target": found.example.is_target,
                "source": found.example.source,
            }
            for found in influences
        ]

    return {
        "queries": [
            {"instruction": query.instruction, "input": query.input, "output": query.output}
            for query in trace.queries
        ],
        "toward": rows(trace.toward),
        "against": rows(trace.against),
    }


def as_text(trace: Any) -> str:
    """Returns a trace for the terminal."""
    lines = []
    for query in trace.queries:
        prompt = f"{query.instruction}\n{query.input}" if query.input else query.instruction
        lines += [f"query   {excerpt(prompt)}", f"output  {excerpt(query.output)}"]
    for title, influences in (
        ("pulls toward this output", trace.toward),
        ("pulls against this output", trace.against),
    ):
        lines += ["", f"{title} (score +- sigma of the sketch)"]
        for rank, found in enumerate(influences, start=1):
            row = found.example
            prompt = f"{row.instruction} | {row.input}" if row.input else row.instruction
            source = f"  {one_line(row.source, 60)}" if row.source else ""
            noise = "" if found.sigma is None else f" +- {found.sigma:.4f}"
            name = one_line(row.example_id, 60)
            lines.append(f"{rank:4}. {found.score:+.4f}{noise}  {name}{source}")
            for text in (prompt, row.output):
                lines += textwrap.wrap(
                    excerpt(text), 94, initial_indent="      ", subsequent_indent="      "
                )
    return "\n".join(lines)


def export(tracer: Any, trace: Any, paths: dict[str, pathlib.Path]) -> list[str]:
    """Writes the sets that the flags ask for; a line for each."""
    from raslik_jax.data.examples import write_examples

    given = {name: flag.value for name, flag in _RULES.items() if flag.value is not None}
    chosen = tracer.select_sets(trace, **given)
    lines = []
    for name, path in paths.items():
        positions = getattr(chosen, name)
        score_N = getattr(trace.scores, f"{name}_N")
        rows = [tracer.example(trace.ids[position]) for position in positions]
        extra = [{"score": float(score_N[position])} for position in positions]
        write_examples(path, rows, extra=extra)
        lines.append(f"{len(rows)} examples to {name} written to {path}")
    return lines


def main() -> None:
    if not _INDEX.value:
        raise ValueError("an index must be given: give --index=WORKDIR/sketch/index")
    paths = export_paths()
    queries = read_queries()
    # Imported here, because they take jax with them and --help should not.
    from raslik_jax.index.store import SketchStore
    from raslik_jax.trace import Tracer

    aggregate: Any = _AGGREGATE.value
    tracer = Tracer(_INDEX.value, run=_RUN.value or None)
    trace = tracer.trace_queries(
        queries,
        top=_TOP.value,
        bottom=_BOTTOM.value,
        center=_CENTER.value,
        aggregate=aggregate,
        finer=SketchStore.open(_FINER.value) if _FINER.value else None,
    )
    exported = export(tracer, trace, paths) if paths else []
    print(json.dumps(as_json(trace)) if _JSON.value else as_text(trace))
    for line in exported:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    command.start(main)
