"""Traces a generation to the training examples that pull towards it and those that pull against.

  python experiments/query.py --index=runs/quickstart/sketch/index \\
      --instruction='howdy! what is a kettle?' --response='The kettle hummed beneath two moons.'

Without --response the model answers, and that answer is traced. --queries takes a JSONL of several
generations of one behaviour (instruction, input, output; without an output the model answers);
their mean is traced. --export_forget and --export_retain write the sets that --select chooses.
The model that made the index is found from the index.
"""

import json
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax import command  # noqa: E402

_INDEX = flags.DEFINE_string("index", "", "The index: WORKDIR/sketch/index of a run.")
_RUN = flags.DEFINE_string("run", "", "Work directory of the run, if the index lies elsewhere.")
_INSTRUCTION = flags.DEFINE_string("instruction", "", "Instruction of the prompt.")
_INPUT = flags.DEFINE_string("input", "", "Input of the prompt.")
_RESPONSE = flags.DEFINE_string("response", "", "What the model said (default: let it answer).")
_QUERIES = flags.DEFINE_string("queries", "", "JSONL of generations, instead of --instruction.")
_TOP = flags.DEFINE_integer("top", 10, "Examples shown that pull towards the output.", 0)
_BOTTOM = flags.DEFINE_integer("bottom", 10, "Examples shown that pull against it.", 0)
_CENTER = flags.DEFINE_boolean("center", None, "Centred cosine (default: as the run has it).")
_FINER = flags.DEFINE_string(
    "finer", "", "A finer index, to score an int8 or sign one's best again."
)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object.")
_WIDTH = flags.DEFINE_integer("text_width", 240, "Characters of each text shown; 0: all.", 0)

_FORGET = flags.DEFINE_string("export_forget", "", "JSONL to write the forget set to.")
_RETAIN = flags.DEFINE_string("export_retain", "", "JSONL to write the retain set to.")
_SELECT = flags.DEFINE_enum(
    "select", "count", ["count", "threshold", "margin", "quantile"], "Rule that chooses the sets."
)
_NUM_FORGET = flags.DEFINE_integer("num_forget", 0, "count: examples to forget.", 0)
_NUM_RETAIN = flags.DEFINE_integer("num_retain", 0, "count: examples to retain.", 0)
_FORGET_THRESHOLD = flags.DEFINE_float("forget_threshold", 0.1, "threshold, margin: tau_F.", -1, 1)
_RETAIN_THRESHOLD = flags.DEFINE_float("retain_threshold", 0.1, "threshold, margin: tau_R.", -1, 1)
_MARGIN_Z = flags.DEFINE_float("margin_z", 1.645, "margin: standard deviations to clear it by.", 0)
_FORGET_SHARE = flags.DEFINE_float("forget_share", 0.05, "quantile: share to forget.", 0, 1)
_RETAIN_SHARE = flags.DEFINE_float("retain_share", 0.05, "quantile: share to retain.", 0, 1)


def read_queries() -> tuple[Any, ...]:
    """Returns the queries that the flags name."""
    from raslik_jax.data.examples import make_example, read_examples

    if bool(_QUERIES.value) == bool(_INSTRUCTION.value):
        raise ValueError("either --instruction or --queries wanted: give one of the two")
    if _QUERIES.value:
        return read_examples(_QUERIES.value, needs_output=False)
    return (make_example(_INSTRUCTION.value, _INPUT.value, _RESPONSE.value),)


def shown(text: str) -> str:
    """Returns a text in one line, shortened to --text_width."""
    line = " ".join(text.split())
    if not _WIDTH.value or len(line) <= _WIDTH.value:
        return line
    return line[: _WIDTH.value - 1] + "…"


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
        "towards": rows(trace.towards),
        "against": rows(trace.against),
    }


def as_text(trace: Any) -> str:
    """Returns a trace for the terminal."""
    lines = []
    for query in trace.queries:
        prompt = f"{query.instruction}\n{query.input}" if query.input else query.instruction
        lines += [f"query   {shown(prompt)}", f"output  {shown(query.output)}"]
    for title, influences in (
        ("pulls towards this output", trace.towards),
        ("pulls against this output", trace.against),
    ):
        lines += ["", f"{title} (score +- sigma of the sketch)"]
        for rank, found in enumerate(influences, start=1):
            row = found.example
            prompt = f"{row.instruction} | {row.input}" if row.input else row.instruction
            source = f"  {row.source}" if row.source else ""
            lines.append(
                f"{rank:4}. {found.score:+.4f} +- {found.sigma:.4f}  {row.example_id}{source}"
            )
            for text in (prompt, row.output):
                lines += textwrap.wrap(
                    shown(text), 94, initial_indent="      ", subsequent_indent="      "
                )
    return "\n".join(lines)


def export(tracer: Any, trace: Any) -> list[str]:
    """Writes the sets that the flags ask for; a line for each."""
    import numpy as np

    from raslik_jax.data.examples import write_examples
    from raslik_jax.retrieval.selection import SELECTORS

    options: dict[str, Any] = {
        "forget_threshold": _FORGET_THRESHOLD.value,
        "retain_threshold": _RETAIN_THRESHOLD.value,
    }
    if _SELECT.value == "count":
        options = {
            "num_forget": _NUM_FORGET.value if _FORGET.value else 0,
            "num_retain": _NUM_RETAIN.value if _RETAIN.value else 0,
        }
        for name, path in (("num_forget", _FORGET.value), ("num_retain", _RETAIN.value)):
            if path and not options[name]:
                raise ValueError(f"a size of the exported set wanted: give --{name}")
    elif _SELECT.value == "margin":
        # The largest noise of the rows shown stands for all: it changes little between rows.
        bands = [found.sigma for found in (*trace.towards, *trace.against)]
        if not bands:
            raise ValueError("--select=margin takes its noise from rows shown: give --top")
        options |= {"z": _MARGIN_Z.value, "sigma": float(np.max(bands))}
    elif _SELECT.value == "quantile":
        options = {"forget_share": _FORGET_SHARE.value, "retain_share": _RETAIN_SHARE.value}
    chosen = SELECTORS[_SELECT.value](trace.forget_N, trace.retain_N, trace.ids, **options)
    lines = []
    for name, path, positions, score_N in (
        ("forget", _FORGET.value, chosen.forget, trace.forget_N),
        ("retain", _RETAIN.value, chosen.retain, trace.retain_N),
    ):
        if path:
            rows = [tracer.example(trace.ids[position]) for position in positions]
            extra = [{"score": float(score_N[position])} for position in positions]
            write_examples(path, rows, extra=extra)
            lines.append(f"{len(rows)} examples to {name} written to {path}")
    return lines


def main() -> None:
    if not _INDEX.value:
        raise ValueError("an index wanted: give --index=WORKDIR/sketch/index")
    queries = read_queries()
    # Imported here, because they take jax with them and --help should not.
    from raslik_jax.index.store import SketchStore
    from raslik_jax.trace import Tracer

    tracer = Tracer(_INDEX.value, run=_RUN.value or None)
    trace = tracer.trace_queries(
        queries,
        top=_TOP.value,
        bottom=_BOTTOM.value,
        center=_CENTER.value,
        finer=SketchStore.open(_FINER.value) if _FINER.value else None,
    )
    exported = export(tracer, trace) if _FORGET.value or _RETAIN.value else []
    print(json.dumps(as_json(trace)) if _JSON.value else as_text(trace))
    for line in exported:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    command.start(main)
