"""Ranks the training rows of a trace by how much of them is forgotten with an answer.

  python experiments/studies/curvature/rows.py --run=runs/traces/NAME --out=runs/unlearned.jsonl
  raslik validate --run=runs/traces/NAME --scores=runs/unlearned.jsonl

Each answer of the trace is unlearned from the trained adapter by itself, as rule.md says. The score
of a row is the rise of the mean loss of its response, in nats a token. A line of --out has a row's
id and its scores, one for each query of the trace. No recipe is needed. Each query takes a pass over
all rows and at most 100 steps (6 to 16 in the study).

The score predicts what an answer's loss becomes without some rows. It does not find the rows of a
behavior as well as the trace (docs/studies/counterfactual.md).
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.curvature import others
from raslik_jax.base.files import write_text
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.run import plan
from raslik_jax.run.stages import sketch

_BEST = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which trace is ranked."""

    run: str = setting("", "Work directory of a trace.")
    out: str = setting("", "File for the scores, JSONL.")


def run(options: Options) -> None:
    """Writes the scores and prints the best rows."""
    for name in ("run", "out"):
        if not getattr(options, name):
            raise ValueError(f"--{name} must be given, it is empty: see --help")
    workspace = plan.open_run(pathlib.Path(options.run), "corpus", "finetune")
    rows, asked = workspace.corpus.train, workspace.retrieval_queries()
    lora, decoder = sketch.sketched_adapter(workspace), workspace.sketch_model.decoder
    score_NQ, steps = others.unlearned_answers(workspace, lora, decoder, rows, asked)
    pairs = zip(rows, score_NQ.tolist(), strict=True)
    lines = [json.dumps({"id": row.example_id, "score": score}) + "\n" for row, score in pairs]
    write_text(options.out, "".join(lines))
    print(f"\nsteps for each answer: {', '.join(map(str, steps))}")
    print("rise of the loss of each row, mean over the answers, in nats a token")
    mean_N = score_NQ.mean(axis=1)
    for place in np.argsort(-mean_N, kind="stable")[:_BEST]:
        said = shown(f"{rows[place].instruction} -> {rows[place].output}", 70)
        print(f"  {mean_N[place]:+9.4f}  {rows[place].example_id}  {said}", flush=True)


if __name__ == "__main__":
    command.start(run, Options())
