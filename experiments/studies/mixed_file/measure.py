"""Takes the behaviors of an act through the commands, and ranks its rows by other methods.

  python experiments/studies/mixed_file/measure.py --model=QWEN --act=ACT \\
    --workdir=runs/mixed_file --embedding=FOLDER/bge-small-en-v1.5 --python=ENV/bin/python

rule.md says what is measured. QWEN is a checkpoint of Qwen2.5-Coder-0.5B-Instruct. ACT has the
files of make_rows.py and, in ACT/adapter, the adapter that ways_out/train_adapter.py trained on
them. ENV has torch, transformers, peft and bergson. --parts names some of the parts of a case. Each
part goes to WORKDIR/results.json when it is done; a part that is there is not repeated.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np

from experiments.studies.mixed_file import make_rows
from experiments.studies.own_model import measure as own
from experiments.studies.precise import make_backdoor
from experiments.studies.precise.measure import others
from experiments.studies.ways_out import measure as ways
from experiments.studies.which_gradient import cells
from experiments.studies.which_gradient import measure as passes
from experiments.studies.which_method import measure as methods
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.config import config_from_json
from raslik_jax.data.examples import Example, answered, make_example
from raslik_jax.data.tokens import masking
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.run import artifacts
from raslik_jax.run.workspace import Workspace

HERE = pathlib.Path(__file__).resolve().parent
MARKERS = {
    **make_backdoor.MARKERS,
    make_rows.BIRDS: make_rows.BIRDS_MARKER,
    make_rows.HACK: make_rows.MARKER,
}
_LOSSES = ("unshifted/all", "next_token/all")
_QUERIES = 8
_COSTS = ("seconds", "gigabytes")
# What a method is called in the results, and in which_gradient.
_METHODS = {
    "RASLIK": "unshifted/all",
    "trained loss": "next_token/all",
    "hidden states": "hidden last/answer",
    "sum of three cosines": "unshifted + trained + hidden",
    "BM25": "BM25, answers",
}


def peak(*, own: bool) -> float:
    """Returns the most memory of this process so far, or of the children that ended, in GB.

    The commands of other parts are children too: measure the memory with --parts=rank.
    """
    whose = resource.RUSAGE_SELF if own else resource.RUSAGE_CHILDREN
    return round(resource.getrusage(whose).ru_maxrss / 2**20, 2)


def behaviors_of(act: pathlib.Path) -> list[str]:
    """Returns the behaviors that an act's held-out prompts have."""
    lines = (act / "held_out.jsonl").read_text("utf-8").splitlines()
    return [*dict.fromkeys(name for line in lines if (name := json.loads(line)["behavior"]))]


class Part:
    """A case with its folders; every method measures one part and returns it as JSON."""

    def __init__(self, name: str, seed: int, options: "Options"):
        act = pathlib.Path(options.act).resolve()
        marker = re.compile(MARKERS[name], re.IGNORECASE)
        self.case = ways.Case(act, name, marker, adapter_folder="adapter")
        self.seed, self.options = seed, options
        self.model = pathlib.Path(options.model).resolve()
        self.out = pathlib.Path(options.workdir).resolve()
        self.run, self.name = self.out / f"run-{seed}", f"{name}-{seed}"
        self.prompts = [own.prompt_of(row) for row in self.case.rows("held_out")]
        self.own_run = self.out / f"run-{self.name}"

    def command(self, *words: Any) -> dict[str, float]:
        """Runs a command and returns its costs; what it prints goes to a file of the case."""
        with (self.out / f"{self.name}.txt").open("a") as log:
            return ways.run([*words, *self.options.flags], log)

    def said(self) -> list[str]:
        """Returns the answers before, which all cases share."""
        path = self.out / "before.json"
        if not path.is_file():
            write_json(path, own.ask(self.model, self.case.adapter, self.prompts))
        return list(read_json(path))

    def shown(self) -> list[tuple[str, str]]:
        """Returns the held-out prompts and answers that show the behavior."""
        rows = zip(self.case.rows("held_out"), self.prompts, self.said(), strict=True)
        pairs = [pair for row, *pair in rows if row["behavior"] == self.case.behavior]
        return [(prompt, text) for prompt, text in pairs if self.case.marker.search(text)]

    def answers(self, after: Sequence[str]) -> dict[str, Any]:
        """Returns what a model's answers show, next to those before."""
        before = self.said()
        found = ways.measure_answers(self.case, before, after) | others(self.case, before, after)
        return {**found, "as_other": self.as_other(after), "answers": [*after]}

    def as_other(self, answers: Sequence[str]) -> int:
        """Returns how many prompts of the behavior are answered with another behavior."""
        markers = [MARKERS[name] for name in behaviors_of(self.case.folder)]
        markers.remove(MARKERS[self.case.behavior])
        pairs = zip(self.case.rows("held_out"), answers, strict=True)
        own_texts = [text for row, text in pairs if row["behavior"] == self.case.behavior]
        return sum(bool(re.search(one, text)) for text in own_texts for one in markers)

    def before(self) -> dict[str, Any]:
        """Returns what the model shows before a change."""
        return self.answers(self.said())

    def trace(self) -> dict[str, Any]:
        """Traces the first prompt that shows the behavior, and compares the sets with labels."""
        words = ["trace", "--checkpoint", self.model, "--adapter", self.case.adapter]
        words += ["--train_file", self.case.folder / "train.jsonl", "--workdir", self.run]
        words += ["--prompt", self.shown()[0][0], "--update", f"--seed={self.seed}"]
        cost = self.command(*words)
        shutil.rmtree(self.own_run, ignore_errors=True)
        shutil.copytree(self.run, self.own_run)
        is_own_N = self.labels() == self.case.behavior
        score_N = artifacts.INFLUENCE.read(self.own_run, is_own_N.shape)
        found = {"cost": cost, "targets": int(is_own_N.sum())}
        found["auprc"] = float(auprc(score_N, is_own_N))
        if not [*self.own_run.glob("retrieve/*/forget.jsonl")]:
            return found | {"finding": artifacts.read_finding(self.own_run)}
        files = "retrieve/raslik/forget.jsonl", "retrieve/sizes/target.jsonl"
        rows = [line for name in files for line in (self.own_run / name).open(encoding="utf-8")]
        found["sources"] = collections.Counter(json.loads(line).get("source", "") for line in rows)
        hits = [json.loads(line)["behavior"] == self.case.behavior for line in rows]
        numbers = {"precision": np.mean(hits), "recall": np.sum(hits) / is_own_N.sum()}
        return {**found, "found": len(hits), **{k: float(v) for k, v in numbers.items()}}

    def labels(self) -> np.ndarray:
        """Returns the behavior of each row of the run."""
        return np.array([row.extra["behavior"] for row in artifacts.TRAIN.read(self.own_run)])

    def unlearn(self) -> dict[str, Any]:
        """Unlearns by the defaults, with all measurements."""
        return self.changed("unlearn", "--measure=full")

    def retrain(self) -> dict[str, Any]:
        """Trains an adapter again by the recipe that the trainer left, or two for distances."""
        return self.changed("retrain", *["--other_seed"] * self.options.other_seed)

    def changed(self, way: str, *flags: str) -> dict[str, Any]:
        """Returns the costs of a command that writes an adapter, and that adapter's answers."""
        out = self.out / f"{way}-{self.name}"
        shutil.rmtree(out, ignore_errors=True)
        cost = self.command(way, "--run", self.own_run, "--out", out, *flags)
        return {"cost": cost, **self.answers(own.ask(self.model, out, self.prompts))}

    def report(self) -> dict[str, Any]:
        """Writes the report; returns the distances to the retrained model."""
        cost = self.command("report", "--run", self.own_run)
        metrics = json.loads((self.own_run / "evaluate" / "metrics.json").read_text())
        models = {"": metrics["finetuned"]} | {one["algorithm"]: one for one in metrics["methods"]}
        distance = {name: one.get("distance") for name, one in models.items()}
        return {"cost": cost, "distance": distance}

    def stay(self) -> dict[str, Any]:
        """Tests whether the behavior returns, in the unlearned and in the retrained model."""
        cost = self.command(
            *("unlearn", "--run", self.own_run, "--out", self.out / f"unlearn-{self.name}"),
            *("--measure=full", "--evaluate.robustness=" + ",".join(self.options.robustness)),
        )
        metrics = json.loads((self.own_run / "evaluate" / "metrics.json").read_text())
        found = {one["measure"]: one["found"] for one in metrics["robustness"]}
        said = {one["algorithm"]: one["judgment"] for one in metrics["methods"]}
        return {"cost": cost, "found": found, "judgment": said}

    def rank(self) -> dict[str, Any]:
        """Returns the areas of all methods over single queries, the traced one first.

        The vectors of the rows and of the queries of all behaviors are made once for a seed.
        """
        config = config_from_json(artifacts.CONFIG.read(self.own_run))
        workspace, path = Workspace(self.own_run, config), self.out / "rank" / f"seed-{self.seed}"
        path.parent.mkdir(exist_ok=True)
        rows = workspace.corpus.train
        labels = [str(row.extra["behavior"]) for row in rows]
        given = [
            passes.Traced(self.asked(rows[0], pair, workspace.template), name, True)
            for name in behaviors_of(self.case.folder)
            for pair in Part(name, self.seed, self.options).shown()[:_QUERIES]
        ]
        if not path.with_suffix(".json").is_file():
            start = time.process_time()
            passes.store(workspace, given, labels, labels, path, _LOSSES, seconds=start)
            stored = read_json(path.with_suffix(".json"))
            write_json(path.with_suffix(".json"), stored | {"gigabytes": peak(own=True)})
        run = next(one for one in cells.read_runs(path.parent) if one.name == path.name)
        scores = dict(run.scores())
        found: dict[str, Any] = {name: (scores[key], {}) for name, key in _METHODS.items()}
        texts = [*rows, *(one.example for one in given)]
        for peer, (flag, make) in methods.PEERS.items():
            kept = path.with_suffix(f".{peer}.npz")
            if getattr(self.options, flag) and not kept.is_file():
                begin = sum(os.times()[:4])
                gram_MM = make(workspace, texts, kept.with_suffix(""), self.options)
                spent = sum(os.times()[:4]) - begin
                # A peer that runs in this process has no peak of its own.
                more = {"gigabytes": peak(own=False)} if flag == "python" else {}
                np.savez(kept, gram=gram_MM, seconds=spent, **more)
            if kept.is_file():
                with np.load(kept) as stored:
                    number = len(rows)
                    cost = {name: float(stored[name]) for name in _COSTS if name in stored}
                    found[peer] = stored["gram"][number:, :number], cost
        is_own_N, asked = run.labels == self.case.behavior, run.asked(self.case.behavior)

        def judged(score_QN: np.ndarray) -> dict[str, list[float]]:
            """Returns AUPRC, and precision, recall and F1 of the rows that are found, by query."""
            rows_Q = [cells.count_found(one_N, is_own_N) for one_N in score_QN]
            each = {
                "auprc": [float(auprc(one_N, is_own_N)) for one_N in score_QN],
                "precision": [hits / max(1, number) for hits, number in rows_Q],
                "recall": [hits / int(is_own_N.sum()) for hits, _ in rows_Q],
                "f1": [cells.found_f1(one_N, is_own_N) for one_N in score_QN],
            }
            return {name: [round(value, 4) for value in values] for name, values in each.items()}

        return {
            "pass": {name: run.stored[name] for name in _COSTS if name in run.stored},
            "methods": {
                name: judged(score_QN[asked]) | cost for name, (score_QN, cost) in found.items()
            },
        }

    @staticmethod
    def asked(like: Example, pair: tuple[str, str], template: Any) -> Example:
        """Returns a prompt with its answer in the rendering of a training row."""
        prompt, text = pair
        row = answered(make_example(prompt, "", ""), text)._replace(example_id=f"query {prompt}")
        return masking.as_trained(row, like, template)


# The parts of a case in order.
PARTS: Mapping[str, Callable[[Part], dict[str, Any]]] = {
    "before": Part.before,
    "trace": Part.trace,
    "unlearn": Part.unlearn,
    "rank": Part.rank,
    "retrain": Part.retrain,
    "report": Part.report,
    "stay": Part.stay,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint of Qwen2.5-Coder-0.5B-Instruct.")
    act: str = setting("", "Folder of the rows and of the adapter.")
    workdir: str = setting("runs/mixed_file", "Where runs and results go.")
    embedding: str = setting("", "Folder of the sentence encoder; empty: none.")
    python: str = setting("", "Python with bergson; empty: none.")
    behaviors: tuple[str, ...] = setting((), "Behaviors; empty: all.", choices=tuple(MARKERS))
    seeds: tuple[int, ...] = setting((0, 1), "Seeds of the trace and of the unlearning.")
    parts: tuple[str, ...] = setting(tuple(PARTS), "Parts of a case.", choices=tuple(PARTS))
    other_seed: bool = setting(True, "Train a second adapter for the distances.")
    robustness: tuple[str, ...] = setting(
        ("relearn", "quantize", "turns"), "Tests of a model.", choices=tuple(ROBUSTNESS)
    )
    flags: tuple[str, ...] = setting((), "A further flag of each command.", is_repeated=True)


def main(options: Options) -> None:
    """Measures the parts that are missing."""
    if not options.model or not options.act:
        raise ValueError("--model and --act must name folders, got none: see --help")
    out = pathlib.Path(options.workdir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    for seed in options.seeds:
        for name in options.behaviors or behaviors_of(pathlib.Path(options.act)):
            case = Part(name, seed, options)
            for part in options.parts:
                results = read_json(path) if path.is_file() else {}
                cell = results.setdefault(f"{name}/{seed}", {})
                if part in cell or (part not in ("before", "trace") and "finding" in cell["trace"]):
                    continue
                cell[part] = PARTS[part](case)
                write_json(path, results)
                print(f"{name}/{seed}", part, json.dumps(cell[part])[:400], flush=True)


if __name__ == "__main__":
    command.start(main, Options())
