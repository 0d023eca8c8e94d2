"""Unlearns by objectives from the same trace and measures what changed with the behavior.

  python experiments/studies/precise/measure.py --model=FOLDER/smollm2 --workdir=runs/precise

FOLDER/smollm2 is made by own_model/checkpoint.py. rule.md says what is validation and what is test.
A case is one trace with the default settings, of the first held-out answer that shows the behavior,
and one unlearning by each objective from a copy of it. Results go to WORKDIR/results.json cell by
cell; a cell that is there is not repeated.
"""

import dataclasses
import json
import pathlib
import re
import shutil
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.own_model import measure as own
from experiments.studies.precise import make_backdoor
from experiments.studies.ways_out import measure as ways
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.train.objectives import OBJECTIVES

HERE = pathlib.Path(__file__).resolve().parent
VALIDATION = ("rude", "workshop")


def cases(backdoors: str = "") -> dict[str, ways.Case]:
    """Returns the cases by their names: validation, then test.

    `backdoors` is a folder that has those of make_backdoor.py, each with its adapter in smollm2.
    """
    lists = json.loads((HERE / "rows.json").read_text())["behaviors"]
    markers = {name: re.compile(lists[name]["marker"], re.IGNORECASE) for name in VALIDATION}
    found = {name: ways.Case(HERE, name, one) for name, one in markers.items()} | ways.cases()
    if backdoors:
        for name, marker in make_backdoor.MARKERS.items():
            folder = pathlib.Path(backdoors).resolve() / name
            found[name] = ways.Case(folder, name, re.compile(marker))
    return found


def run_case(case: ways.Case, options: "Options", workdir: pathlib.Path, seed: int) -> Any:
    """Takes one case through a trace and all objectives; returns costs and answers of each."""
    model, name = pathlib.Path(options.model).resolve(), f"{case.behavior}-{seed}"
    prompts = [own.prompt_of(row) for row in case.rows("held_out")]
    before = own.ask(model, case.adapter, prompts)
    rows = zip(case.rows("held_out"), prompts, before, strict=True)
    asked = [pair for row, *pair in rows if row["behavior"] == case.behavior]
    shown = [prompt for prompt, answer in asked if case.marker.search(answer)]
    if not shown:
        return {"finding": "no held-out answer shows the behavior"}
    traced = workdir / f"run-{case.folder.name}-{seed}"
    trace = ["trace", "--checkpoint", model, "--adapter", case.adapter, "--prompt", shown[0]]
    trace += ["--train_file", case.folder / "train.jsonl", "--workdir", traced, "--update"]
    found: dict[str, Any] = {}
    with (workdir / f"{name}.txt").open("w") as log:
        found["trace"] = ways.run([*trace, f"--seed={seed}"], log)
        found["before"] = ways.measure_answers(case, before, before) | others(case, before, before)
        if not [*traced.glob("retrieve/*/forget.jsonl")]:
            return found | {"finding": "no row stands out"}
        for objective in options.objectives:
            run, out = workdir / f"run-{name}-{objective}", workdir / f"out-{name}-{objective}"
            for folder in (run, out):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(traced, run)
            words = ["unlearn", "--run", run, "--out", out, f"--unlearn.algorithms={objective}"]
            is_study = objective not in OBJECTIVES
            cost = ways.run([*words, *options.flags], log, is_study=is_study)
            after = own.ask(model, out, prompts)
            answers = ways.measure_answers(case, before, after) | others(case, before, after)
            (probes,) = (run / "unlearn").glob("*/probes.json")
            probed = json.loads(probes.read_text())
            steps = {name: probed[name] for name in ("kept", "end")}
            found[objective] = {**answers, **steps, "cost": cost, "answers": after}
    return found


def others(case: ways.Case, before: list[str], after: list[str]) -> dict[str, int]:
    """Returns how many prompts of other behaviors are answered as before, word for word."""
    kinds = [row["behavior"] for row in case.rows("held_out")]
    pairs = [
        pair
        for kind, *pair in zip(kinds, before, after, strict=True)
        if kind not in ("", case.behavior)
    ]
    return {"other_prompts": len(pairs), "other_same": sum(old == new for old, new in pairs)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    workdir: str = setting("runs/precise", "Where runs and results go.")
    backdoors: str = setting("", "Folder of the cases of BackdoorLLM; empty: without them.")
    cases: tuple[str, ...] = setting((), "Cases; empty: all.")
    seeds: tuple[int, ...] = setting((0, 1, 2), "Seeds of the sketch and of the orders.")
    objectives: tuple[str, ...] = setting(("base_klr", "cap_klr"), "Objectives of unlearning.")
    flags: tuple[str, ...] = setting((), "A further flag of raslik unlearn.", is_repeated=True)


def main(options: Options) -> None:
    """Measures the cases that are named, or all."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    workdir = pathlib.Path(options.workdir).resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    path, known = workdir / "results.json", cases(options.backdoors)
    if strange := {*options.cases} - {*known}:
        raise ValueError(f"--cases must be of {', '.join(known)}, got {', '.join(strange)}")
    for seed in options.seeds:
        for name in options.cases or known:
            results = json.loads(path.read_text()) if path.is_file() else {}
            if f"{name}/{seed}" not in results:
                results[f"{name}/{seed}"] = run_case(known[name], options, workdir, seed)
                path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}/{seed}", json.dumps(results[f"{name}/{seed}"])[:600], flush=True)


if __name__ == "__main__":
    command.start(main, Options())
