"""Trains a model on each of the five behaviors at 2 % and ranks the rows for their queries.

  python experiments/studies/behaviors/trained.py --model=FOLDER/smollm2 --workdir=runs/behaviors

FOLDER/smollm2 is made by own_model/checkpoint.py. A cell is a behavior and a seed: 600 rows with 12
targets and 12 hard negatives, the adapter of which_gradient/rows.flags, and 16 queries with their
labeled answers. `single` are the areas (AUPRC) of the queries one by one, `set` that of their mean
score. Cells go to trained.json in this folder as they come. A cell that is there is not made again.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.behaviors.corpus import BEHAVIORS, register
from experiments.studies.which_gradient import cells
from experiments.studies.which_gradient import measure as passes
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import MeshConfig
from raslik_jax.incident import making
from raslik_jax.run import plan

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "trained.json"
METHODS = {"RASLIK": passes.DEFAULT, "hidden states": "hidden last/all", "BM25": "BM25, answers"}
_STAGES = ("corpus", "backbone", "finetune")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    workdir: str = setting("runs/behaviors", "Where runs and vectors go.")
    seeds: tuple[int, ...] = setting((0, 1), "Seeds of rows, adapter and orders.")
    targets: int = setting(12, "Targets among the 600 rows.", low=1)


def measure(name: str, seed: int, options: Options) -> dict[str, Any]:
    """Returns the areas of a cell by method, and the processor seconds of training and pass."""
    start, root = time.process_time(), pathlib.Path(options.workdir).resolve()
    flags = [f"--flagfile={HERE.parent / 'which_gradient' / 'rows.flags'}", f"--seed={seed}"]
    flags += [f"--corpus.behaviors.behavior={name}", f"--corpus.num_targets={options.targets}"]
    flags += [f"--backbone.checkpoint={pathlib.Path(options.model).resolve()}"]
    flags += ["--corpus.max_len=128"]  # some queries are longer than the 64 of the file
    how: Any = {"mesh": MeshConfig(), "update": True, "is_measured": False}
    run, path = root / f"{name}-{seed}", root / "passes" / f"{name}-{seed}"
    making.make(setting_flags.parse_config(flags), run, stages=_STAGES, **how)
    trained = time.process_time() - start
    workspace = plan.open_run(run, "corpus", "finetune")
    rows, asked = workspace.corpus.train, workspace.corpus.queries["retrieval"]
    labels = [name if row.is_target else "" for row in rows]
    given = [passes.Traced(row, name, True) for row in asked]
    path.parent.mkdir(parents=True, exist_ok=True)
    passes.store(
        workspace, given, labels, labels, path, (passes.DEFAULT,), seconds=start + trained
    )
    stored = next(one for one in cells.read_runs(path.parent) if one.name == path.name)
    found = {one["candidate"]: one for one in cells.measure_cells(stored)}
    areas = {
        title: {key: found[method][key] for key in ("single", "set", "f1")}
        for title, method in METHODS.items()
    }
    return {"areas": areas, "seconds": [round(trained), stored.stored["seconds"]]}


def main(options: Options) -> None:
    """Measures the cells that are missing, seed by seed."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    register()
    for seed in options.seeds:
        for name in BEHAVIORS:
            results = read_json(RESULTS) if RESULTS.is_file() else {}
            if f"{name}/{seed}" not in results:
                results[f"{name}/{seed}"] = measure(name, seed, options)
                write_json(RESULTS, results)
            print(f"{name}/{seed}", results[f"{name}/{seed}"]["areas"], flush=True)


if __name__ == "__main__":
    command.start(main, Options())
