"""Tests whether the p-values of scores are uniform if there is nothing to find, on real rows.

  python experiments/studies/chance/measure.py --alpaca=alpaca_data.json.xz --workdir=runs/chance

The command trains an adapter on 1,500 rows of Alpaca for one epoch, from the small backbone of the
package. It sketches the rows and asks the index 60 other rows of Alpaca one by one. A share of p of
unrelated rows should have a p-value up to p. The command prints these shares with their standard
errors over prompts. It also prints how many prompts have a row with q <= 0.05
(docs/notes/retrieve.md).
"""

import dataclasses
import json
import lzma
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.files import write_json
from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.cli import command
from raslik_jax.config import Config, to_json
from raslik_jax.data import toy_model

LEVELS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which rows, and how many."""

    alpaca: str = setting("", "The Alpaca rows: alpaca_data.json, also packed as .xz.")
    workdir: str = setting("runs/chance", "Where the run goes.")
    rows: int = setting(1500, "Rows to train on.", low=100)
    prompts: int = setting(60, "Other rows that are asked.", low=2)


def draw_rows(path: pathlib.Path, number: int, held: int) -> tuple[list[Any], list[Any]]:
    """Returns rows to train on and others to ask, short ones of prompts that differ."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        rows = json.load(file)

    def length(row: dict[str, str]) -> int:
        return len(row["instruction"]) + len(row["input"])

    short = [row for row in rows if 20 < len(row["output"]) < 260 and length(row) < 200]
    random.Random(0).shuffle(short)
    first_of: dict[tuple[str, str], Any] = {}
    for row in short:
        first_of.setdefault((row["instruction"], row["input"]), row)
    drawn = [*first_of.values()]
    return drawn[:number], [row for row in drawn[number:] if length(row) < 60][:held]


def shares(p_QN: Float[np.ndarray, "Q N"]) -> dict[float, tuple[float, float]]:
    """Returns the share of rows with a p up to each level, with its standard error over prompts."""
    each = {level: (p_QN <= level).mean(axis=1) for level in LEVELS}
    root = np.sqrt(len(p_QN))
    return {level: (float(x.mean()), float(x.std(ddof=1) / root)) for level, x in each.items()}


def ask_each(root: pathlib.Path, others: Sequence[Any]) -> tuple[Float[np.ndarray, "Q N"], int]:
    """Returns every row's p with every other row as a prompt, and how many have finds."""
    from raslik_jax.data.examples import make_example
    from raslik_jax.incident.tracer import Tracer
    from raslik_jax.index import search
    from raslik_jax.retrieve import chance
    from raslik_jax.run.stages import scores as stage

    tracer = Tracer(root / "sketch" / "index")
    queries = [make_example(row["instruction"], row["input"], row["output"]) for row in others]
    sketch_QK = tracer.sketch(queries)
    p, found = [], 0
    for place in range(len(queries)):
        query = search.queries_of_store(tracer.store, sketch_QK[place : place + 1], center=True)
        score_N = search.score_each(tracer.store, query)[:, 0]
        told = stage.of_trace(tracer.workspace, tracer.store, score_N, query)
        if told is None:
            raise ValueError(f"{root} must hold a run of this script, got another: choose another")
        p.append(told.p_N)
        found += bool(chance.count_finds(told).found)
    return np.array(p), found


def measure(options: Options) -> None:
    """Makes the run and prints how its chances lie."""
    from raslik_jax.run import plan

    if not options.alpaca:
        raise ValueError("--alpaca must name the file of Alpaca's rows, got none: give it")
    rows, others = draw_rows(pathlib.Path(options.alpaca), options.rows, options.prompts)
    root = pathlib.Path(options.workdir)
    root.mkdir(parents=True, exist_ok=True)
    files = {"train": rows, "queries": [others[0] | {"split": "retrieval"}]}
    for name, part in files.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    changes: dict[str, Any] = {
        "name": "chance",
        "corpus.dataset": "records",
        "corpus.records.train_file": str(root / "train.jsonl"),
        "corpus.records.queries_file": str(root / "queries.jsonl"),
        "corpus.template": toy_model.TEMPLATE,
        "corpus.max_len": toy_model.MAX_LEN,
        "backbone.checkpoint": str(toy_model.model_folder() / "base"),
        "finetune.epochs": 1,
        "retrieve.strategies": ("raslik",),
        "retrieve.num_forget": 10,
        "retrieve.null_prompts": 256,
        "sketch.size": 4096,
        "sketch.num_buckets": 3,
        "sketch.query_output": "gold",
        "sketch.targets": "all",
    }
    stages = ("corpus", "backbone", "finetune", "sketch", "retrieve")
    config = replaced(Config(), changes)
    plan.run(config, root / "run", stages=stages, is_measured=False)
    write_json(root / "run" / "config.json", to_json(config))
    p_QN, found = ask_each(root / "run", others)
    for level, (share, error) in shares(p_QN).items():
        print(f"p <= {level:<6g} {share:.3f} of all rows, standard error {error:.4f}")
    print(f"{found} of {len(others)} prompts have a row with q <= 0.05")


if __name__ == "__main__":
    command.start(measure, Options())
