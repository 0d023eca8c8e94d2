"""Ranks the training rows of a trace by how much an answer depends on each of them alone.

  python experiments/studies/replay/rows.py --run=runs/traces/NAME --out=runs/replay.jsonl
  raslik validate --run=runs/traces/NAME --scores=runs/replay.jsonl

The adapter is trained again on all rows by its recipe, as `raslik validate` does, and each query is
differentiated with respect to the rows, back through this training. The score of a row is the rise
of the mean loss of a query's answer without the row, to first order, in nats a token. A line of
--out has a row's id and its scores, one for each query of the trace.

A replay needs the recipe of the adapter. It does not find the rows of a behavior that many rows
teach: without one of them the others still teach it (docs/studies/replay.md). A high learning rate
makes the training so rough that the first order says little. --check trainings show it. The time is
that of two trainings and of a backward pass through every step for each query.
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.replay import training as replayed
from raslik_jax.base.files import write_text
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import replaced, setting
from raslik_jax.cli import command
from raslik_jax.config import config_from_json
from raslik_jax.incident import making
from raslik_jax.incident.configuring import ALGORITHM, RecipeOptions, read_settings
from raslik_jax.run import artifacts, plan
from raslik_jax.run.workspace import Workspace

_BEST = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """Which trace is replayed."""

    run: str = setting("", "Work directory of a trace of an adapter.")
    out: str = setting("", "File for the scores, JSONL.")
    check: int = setting(3, "Best rows that a training leaves out, to measure the rise.", low=0)


def open_training(options: Options) -> replayed.Training:
    """Returns the training of a trace's adapter by its recipe, with float32 products.

    Raises:
      ValueError: if the run has no adapter, or its recipe is not known or has dropout.
    """
    root = pathlib.Path(options.run)
    config = config_from_json(artifacts.CONFIG.read(root, "give the folder of a trace"))
    settings = read_settings(config, options, {}, root=root)
    chosen = {**settings, "unlearn.algorithms": (ALGORITHM,)}
    recipe = making.changed(config, chosen).unlearn[ALGORITHM]
    plan.open_run(root, "corpus", "finetune")
    exact = replaced(config, {"backbone.operands": "float32"})  # the effects are small
    workspace = Workspace(root, exact)
    return replayed.make_training(workspace, recipe, workspace.retrieval_queries())


def run(options: Options) -> None:
    """Writes the scores and prints the rows on which the answers depend most."""
    for name in ("run", "out"):
        if not getattr(options, name):
            raise ValueError(f"--{name} must be given, it is empty: see --help")
    training = open_training(options)
    (effect_NQ, last), ids = training.effects(), training.rows.ids
    rows = {row.example_id: row for row in artifacts.TRAIN.read(pathlib.Path(options.run))}
    # A row without an answer takes no part in the training.
    scores = dict.fromkeys(rows, [0.0] * effect_NQ.shape[1])
    scores |= dict(zip(ids, (-effect_NQ).tolist(), strict=True))
    lines = [json.dumps({"id": name, "score": score}) + "\n" for name, score in scores.items()]
    write_text(options.out, "".join(lines))
    rise_N, train = -effect_NQ.mean(axis=1), training.trainer()
    value = np.asarray(training.values(last.params, training.base)).mean()
    print("\nrise of the mean loss of the queries without each row, in nats a token")
    print("  predicted  measured  row")
    for number, place in enumerate(np.argsort(-rise_N, kind="stable")[:_BEST]):
        measured = " " * 8
        if number < options.check:
            without = train(np.arange(len(ids)) != place)
            measured = f"{without.mean() - value:+8.4f}"
        row = rows[ids[place]]
        said = shown(f"{row.instruction} -> {row.output}", 70)
        print(f"  {rise_N[place]:+9.4f}  {measured}  {ids[place]}  {said}", flush=True)


if __name__ == "__main__":
    command.start(run, Options())
