"""Ranks the statements of a fact for a question about it: the task `recall` of bergson.

  python experiments/studies/which_method/recall.py --model=FOLDER/smollm2 --facts=BERGSON \\
    --embedding=FOLDER/bge-small-en-v1.5 --python=ENV/bin/python

rule.md says what is measured. BERGSON is a checkout of EleutherAI/bergson. Its own generator makes
the facts, so both programs read the same texts. Each part leaves its files in --workdir, and a file
that is there is not made again. The measures go to recall.json in this folder, by seed.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
from jaxtyping import Bool, Float

from experiments.studies.replay import ekfac
from experiments.studies.which_gradient import cells
from experiments.studies.which_gradient import measure as passes
from experiments.studies.which_method import measure
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data.examples import Example
from raslik_jax.run.workspace import Workspace

NAME, EPOCHS, MAX_LEN = "recall", 3, 64
# How many places count: those of bergson's task and of DATE-LM's.
BEST, MORE = 10, 50
RESULTS = measure.HERE / "recall.json"
# Runs in the folder of bergson's module, which needs the standard library alone.
_GENERATE = """
import json, sys
from facts import fact_generator
for row in fact_generator(4 * int(sys.argv[2]), path=sys.argv[1], seed=int(sys.argv[3])):
    print(json.dumps(row))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    facts: str = setting("", "Checkout of EleutherAI/bergson.")
    embedding: str = setting("", "Folder of the sentence encoder; empty: none.")
    python: str = setting("", "Python with bergson; empty: none.")
    workdir: str = setting("runs/which_method", "Where adapters, vectors and scores go.")
    people: int = setting(25, "People, with four facts each.", low=1)
    seed: int = setting(0, "Seed of the facts and of the training.", low=0)

    @property
    def name(self) -> str:
        """Returns how the files of this seed begin."""
        return f"{NAME}_{self.seed}" if self.seed else NAME


def generate(checkout: pathlib.Path, people: int, seed: int) -> list[dict[str, Any]]:
    """Returns the statements of bergson's generator, several for each fact."""
    line = [sys.executable, "-c", _GENERATE, str(checkout / "data"), str(people), str(seed)]
    folder = checkout / "bergson" / "recall"
    if not (folder / "facts.py").is_file():
        raise ValueError(f"--facts must have bergson/recall/facts.py, got {checkout}: see --help")
    done = subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True)
    return [json.loads(row) for row in done.stdout.splitlines()]


def fact_of(row: Mapping[str, Any]) -> str:
    """Returns the fact of a statement: a person and a field."""
    return f"{row['identifier']} {row['field']}"


def train(options: Options) -> Workspace:
    """Returns the run with the adapter that is trained on the statements."""
    rows = generate(pathlib.Path(options.facts).resolve(), options.people, options.seed)
    asked = {fact_of(row): f"{row['question']} {row['answer']}" for row in rows}
    parts: dict[str, Sequence[Mapping[str, Any]]] = {
        "train": [{"text": row["fact"], "label": fact_of(row)} for row in rows],
        "queries": [{"text": t, "label": n, "split": "retrieval"} for n, t in asked.items()],
    }
    root = pathlib.Path(options.workdir).resolve() / options.name
    how: Any = {"max_len": MAX_LEN, "epochs": EPOCHS, "seed": options.seed}
    return measure.train_rows(root, parts, options.model, **how)


def ranks(
    score_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]
) -> Float[np.ndarray, " targets"]:
    """Returns the places of the targets, from 1; equal scores are in the order of the rows."""
    place_N = np.empty(len(score_N))
    place_N[np.argsort(-score_N, kind="stable")] = np.arange(1, len(score_N) + 1)
    return place_N[is_target_N]


def run_ekfac(
    workspace: Workspace, texts: Sequence[Example], folder: pathlib.Path, options: Any
) -> np.ndarray:
    """Returns bergson's EK-FAC scores of the rows for the queries; all other places are 0."""
    folder.mkdir(exist_ok=True)
    own = ekfac.Options(model=options.model, python=options.python, out=str(folder))
    parts = (workspace.corpus.train, workspace.corpus.queries["retrieval"])
    encoded = (workspace.encode(rows, targets="all") for rows in parts)
    score_NQ = ekfac.score_rows(workspace, *encoded, own)["score"]
    gram_MM = np.zeros((len(texts), len(texts)))
    gram_MM[len(score_NQ) :, : len(score_NQ)] = score_NQ.T
    return gram_MM


# Not all processors have products of bfloat16.
_BERGSON = functools.partial(measure.run_bergson, dtype="float32")
PEERS = measure.PEERS | {"bergson": ("python", _BERGSON), "ekfac": ("python", run_ekfac)}


def all_scores(run: cells.Run, out: pathlib.Path) -> Iterator[tuple[str, np.ndarray, float | None]]:
    """Yields the scores of every method, and the processor seconds of another program."""
    yield from ((name, score_QN, None) for name, score_QN in run.scores())
    for peer in PEERS:
        path = out / f"{run.name}.{peer}.npz"
        if path.is_file():
            with np.load(path) as kept:
                number = len(run.labels)
                yield peer, kept["gram"][number:, :number], float(kept["seconds"])


def measure_run(run: cells.Run, out: pathlib.Path) -> dict[str, Any]:
    """Returns the measures of every method, as bergson takes them."""
    asked = [one["behavior"] for one in run.stored["queries"]]
    is_target_QN = np.array(asked)[:, None] == run.labels[None]
    found, base_Q = list[dict[str, Any]](), np.zeros(len(asked))
    for name, score_QN, seconds in all_scores(run, out):
        places = [ranks(*pair) for pair in zip(score_QN, is_target_QN, strict=True)]
        first_Q = np.array([place.min() for place in places])
        base_Q = 1 / first_Q if name == measure.DEFAULT else base_Q
        one = {
            "mrr": (1 / first_Q).mean(),
            "recall": (first_Q <= BEST).mean(),
            "strict_recall": np.mean([(place <= BEST).mean() for place in places]),
            "strict_recall_50": np.mean([(place <= MORE).mean() for place in places]),
        }
        found.append({"method": name, **{key: round(float(x), 4) for key, x in one.items()}})
        found[-1] |= {"mrr_gain": measure.paired_interval(1 / first_Q - base_Q)}
        found[-1] |= {"seconds": seconds, "reciprocal": [round(1 / x, 4) for x in first_Q.tolist()]}
    return {
        "rows": len(run.labels),
        "queries": len(asked),
        "tokens": round(float(run.arrays["fields"][:, 3].mean()), 1),
        "nll": round(float(np.median(run.arrays["fields"][: len(run.labels), 0])), 4),
        "methods": found,
    }


def main(options: Options) -> None:
    """Makes what is missing, and measures what is there."""
    if not options.model or not options.facts:
        raise ValueError("--model and --facts must name folders, got none: see --help")
    out = pathlib.Path(options.workdir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    workspace = train(options)
    if not (out / f"{options.name}.json").is_file():
        start = time.process_time()
        labels = [str(row.extra["label"]) for row in workspace.corpus.train]
        given = [
            passes.Traced(row, str(row.extra["label"]), True)
            for row in workspace.corpus.queries["retrieval"]
        ]
        place = out / options.name
        passes.store(workspace, given, labels, labels, place, measure.LOSSES, seconds=start)
    measure.run_peers(options.name, workspace, out, options, PEERS)
    run = next(one for one in cells.read_runs(out) if one.name == options.name)
    measured = measure_run(run, out) | {"pass_seconds": run.stored["seconds"]}
    stored = read_json(RESULTS) if RESULTS.is_file() else {}
    write_json(RESULTS, stored | {str(options.seed): measured})


if __name__ == "__main__":
    command.start(main, Options())
