"""Does EK-FAC predict what a training without rows says? It adds a peer to the study.

  python experiments/studies/replay/ekfac.py --workdir=runs/replay-smollm2 \\
      --model=FOLDER/smollm2 --python=ENV/bin/python --queries=0,4,8,11,14,17 --out=runs/ekfac

WORKDIR and the queries are those of measure.py. ENV has torch, transformers, peft and bergson,
which scores the rows of WORKDIR/traced. It reads the token ids and targets that the training has,
those of the answers, and the trained adapter in PEFT's files.

OUT/scores.npz has the scores [rows, queries] and bergson's processor seconds. A higher score says
that the answer's loss rises more without the row. If the file is there, it is not made again. For
each size of sets in WORKDIR/results.json, or in --results, OUT/results.json has the sums of the
scores over the same sets. The rank correlations with the stored changes are printed.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.replay import measure, page
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.evaluate import counterfactual
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.models import adapters
from raslik_jax.run import plan
from raslik_jax.run.stages import retrain
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.objectives import RetrainSettings

HERE = pathlib.Path(__file__).resolve().parent
NAME = "ekfac"
_NO_TARGET = -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is scored."""

    workdir: str = setting("runs/replay-smollm2", "The run of measure.py.")
    case: str = setting("smollm2", "Case of the results.")
    model: str = setting("", "The checkpoint that checkpoint.py made.")
    python: str = setting("", "Python with bergson.")
    queries: tuple[int, ...] = setting((0, 4, 8, 11, 14, 17), "Prompts, as of measure.py.")
    out: str = setting("runs/ekfac", "Where the scores and the sums go.")
    results: str = setting("", "Results with the sets; empty: those of the run.")


def write_tokens(path: pathlib.Path, rows: Encoded) -> None:
    """Writes the ids of rows and their labels, which have an id only where the loss counts it."""
    pairs = zip(rows.tokens, rows.target_masks(), strict=True)
    lines = (
        {"input_ids": ids.tolist(), "labels": np.where(mask, ids, _NO_TARGET).tolist()}
        for ids, mask in pairs
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def score_rows(
    workspace: Workspace, rows: Encoded, queries: Encoded, options: Options
) -> dict[str, Any]:
    """Returns the scores by bergson [rows, queries], and the processor seconds of its process."""
    folder, config = pathlib.Path(options.out).resolve() / "files", workspace.model.decoder.config
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    model, adapter = pathlib.Path(options.model).resolve(), folder / "adapter"
    given: Any = {"base_model": str(model)}
    adapters.save_adapter(
        adapter, workspace.finetuned, workspace.model.lora_config, config, **given
    )
    # bergson reads the tokenizer, which it does not use, next to the adapter.
    for path in model.glob("*token*"):
        shutil.copy(path, adapter)
    line = [options.python, HERE / "torch_program.py", f"--model={adapter}"]
    for name, encoded in (("rows", rows), ("queries", queries)):
        write_tokens(folder / f"{name}.jsonl", encoded)
        line.append(f"--{name}={folder / f'{name}.jsonl'}")
    before = sum(os.times()[2:4])  # of children that ended
    subprocess.run([*map(str, line), f"--out={folder / 'out'}"], check=True)
    seconds = sum(os.times()[2:4]) - before
    return {"score": np.load(folder / "out" / "scores.npy"), "seconds": seconds}


def add_sums(
    score_NQ: Float[np.ndarray, "N Q"], found: dict[str, Any]
) -> dict[str, dict[str, list[list[float]]]]:
    """Returns by size of the sets in results how much the scores say that each loss rises."""
    sizes = (size for size in measure.SIZES if f"sets of {size}" in found)
    sums = {}
    for size in sizes:
        sets = measure.draw_sets(len(score_NQ), size, len(found[f"sets of {size}"]["change"]))
        each = np.stack([score_NQ[one].sum(axis=0, dtype=np.float64) for one in sets])
        sums[f"sets of {size}"] = {NAME: each.tolist()}
    return sums


def print_correlations(part: dict[str, Any]) -> None:
    """Prints the rank correlation with the stored changes by answer, and the mean with interval."""
    change_SQ = np.array(part["change"])
    for name in (name for name in part if name != "change"):
        each_Q = counterfactual.correlations(-np.array(part[name]), change_SQ)
        by_answer = ", ".join(f"{one:.3f}" for one in each_Q)
        print(f"  {name}: {page.interval_of(part, name)}, by answer {by_answer}")


def run(options: Options) -> None:
    """Scores the rows, writes the sums and prints how they agree with the trainings."""
    if not (options.model and options.python):
        raise ValueError("--model and --python must be given, got an empty one")
    root, out = pathlib.Path(options.workdir), pathlib.Path(options.out)
    workspace = plan.open_run(root / "traced", "corpus", "finetune", "retrieve/influence")
    rows = retrain.encode_rows(workspace, RetrainSettings())
    asked = [workspace.retrieval_queries()[place] for place in options.queries]
    if not (out / "scores.npz").is_file():
        queries = workspace.encode(asked, "queries")
        np.savez(out / "scores.npz", **score_rows(workspace, rows, queries, options))
    with np.load(out / "scores.npz") as stored:
        score_NQ, seconds = stored["score"], float(stored["seconds"])
    labels = {row.example_id: row.extra["label"] for row in workspace.corpus.train}
    label_N = np.array([labels[name] for name in rows.ids])
    areas = [
        float(auprc(one_N, label_N == one.extra["label"]))
        for one_N, one in zip(score_NQ.T, asked, strict=True)
    ]
    print(f"{seconds:.0f} processor seconds, AUPRC {', '.join(f'{one:.3f}' for one in areas)}")
    path = pathlib.Path(options.results) if options.results else root / "results.json"
    found = read_json(path).get(options.case, {}) if path.is_file() else {}
    sums = add_sums(score_NQ, found)
    for name, own in sums.items():
        print(name)
        print_correlations(found[name] | own)
    write_json(out / "results.json", {"auprc": {NAME: areas}, "seconds": seconds} | sums)


if __name__ == "__main__":
    command.start(run, Options())
