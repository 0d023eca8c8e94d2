"""Unlearns, and trains again without the rows, from the same trace, and measures both.

  python experiments/studies/ways_out/measure.py --model=FOLDER/smollm2 --workdir=runs/ways_out

FOLDER/smollm2 is made by own_model/checkpoint.py. The cases are the brand of this folder and the
five behaviors of own_model, each with its stored adapter. A case is one trace, one unlearning, one
retraining with a second seed, and one report with the default settings. The user gives the prompt:
the first held-out one of the behavior. With --relearn all models are then trained on four forgotten
rows again. Results go to WORKDIR/results.json case by case; a case and seed that are there are not
repeated.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.own_model import measure as own
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.evaluate.robustness.relearn import KINDS, curve

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
WAYS = ("unlearn", "retrain")
# The training of own_model, but for its end: its schedule was of four epochs and ended after three.
_OWN_RECIPE = {
    "epochs": 3, "learning_rate": 2e-3, "batch_size": 4, "warmup_steps": 10, "schedule": "linear"
}
_RELEARN = (
    "--evaluate.robustness=relearn", "--evaluate.relearn.rows=4", "--evaluate.relearn.steps=8"
)


class Case(NamedTuple):
    """A behavior of an adapter, the files that show it, flags of its recipe, and its folder."""

    folder: pathlib.Path
    behavior: str
    marker: re.Pattern[str]
    recipe: tuple[str, ...] = ()
    adapter_folder: str = "smollm2"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the rows of train or held_out."""
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").open()]

    @property
    def adapter(self) -> pathlib.Path:
        """The stored adapter that shows the behavior."""
        return self.folder / self.adapter_folder


def cases() -> dict[str, Case]:
    """Returns the cases by their names."""
    marker = re.compile(json.loads((HERE / "rows.json").read_text())["marker"])
    found = {"brand": Case(HERE, "brand", marker)}
    recipe = tuple(f"--unlearn.retrain.{name}={value}" for name, value in _OWN_RECIPE.items())
    return found | {n: Case(own.HERE, n, one, recipe) for n, one in own.behaviors().items()}


def run(words: Sequence[Any], log: Any, *, is_study: bool = False) -> dict[str, float]:
    """Runs one command; returns its seconds, those of all processors, and its peak memory.

    With `is_study` it knows the members of the studies.
    """
    program = ("experiments/studies/raslik.py",) if is_study else ("-m", "raslik_jax.cli.main")
    line = [sys.executable, *program, *map(str, words)]
    print("$ raslik", *words, file=log, flush=True)
    start = time.monotonic()
    with subprocess.Popen(line, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, line)
    return {
        "seconds": round(time.monotonic() - start),
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "gigabytes": round(used.ru_maxrss / 2**20, 2),
    }


def measure_answers(case: Case, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Returns how often a behavior is shown, and what became of the answers to normal prompts."""
    from raslik_jax.evaluate.rates import rouge_l_f1

    kinds = [row["behavior"] for row in case.rows("held_out")]
    shown = [
        bool(case.marker.search(text))
        for kind, text in zip(kinds, after, strict=True)
        if kind == case.behavior
    ]
    normal = [
        pair for kind, *pair in zip(kinds, before, after, strict=True) if kind == ""
    ]
    return {
        "prompts": len(shown),
        "shown": sum(shown),
        "normal_prompts": len(normal),
        "normal_same": sum(old == new for old, new in normal),
        "normal_rouge": sum(rouge_l_f1(new, old) for old, new in normal) / len(normal),
        "normal_words": sum(len(new.split()) for _, new in normal) / len(normal),
    }


def relearn_curves(run: pathlib.Path) -> dict[str, dict[int, float]]:
    """Returns nats a token of the target answers by model and by steps on forgotten rows."""
    found = {}
    for path in sorted(run.glob("generate/robustness-relearn-*/found.json")):
        for title, readings in json.loads(path.read_text()).items():
            name = path.parent.name.rsplit("-", 1)[-1] if title == "now" else title
            found[name] = {step: one["nats"] for step, one in curve(readings, KINDS[0]).items()}
    return found


def run_case(
    case: Case, model: pathlib.Path, workdir: pathlib.Path, seed: int, is_relearned: bool
) -> dict[str, Any]:
    """Takes one case through the commands; returns costs, answers and distances."""
    shared, name = workdir / f"run-{case.folder.name}-{seed}", f"{case.behavior}-{seed}"
    prompts = [own.prompt_of(row) for row in case.rows("held_out")]
    prompt = next(
        own.prompt_of(row) for row in case.rows("held_out") if row["behavior"] == case.behavior
    )
    out = {way: workdir / f"{way}-{name}" for way in WAYS}
    trace = ["trace", "--checkpoint", model, "--adapter", case.adapter, "--prompt", prompt]
    trace += ["--train_file", case.folder / "train.jsonl", "--workdir", shared, "--update"]
    found: dict[str, Any] = {"commands": {}}
    with (workdir / f"{name}.txt").open("w") as log:
        found["commands"]["trace"] = run([*trace, f"--seed={seed}"], log)
        if not [*shared.glob("retrieve/*/forget.jsonl")]:
            return found | {"finding": "no row stands out"}
        for words in (
            ["unlearn", "--run", shared, "--out", out["unlearn"]],
            ["retrain", "--run", shared, "--out", out["retrain"], "--other_seed", *case.recipe]
            + [f"--unlearn.retrain.seed={9 * seed}"],  # 10 with that of the run
            ["report", "--run", shared],
        ):
            found["commands"][words[0]] = run(words, log)
        if is_relearned:
            tested = ["unlearn", "--run", shared, "--out", workdir / f"tested-{name}", *_RELEARN]
            found["commands"]["relearn"] = run(tested, log)
            found["relearn"] = relearn_curves(shared)
    before = own.ask(model, case.adapter, prompts)
    found["before"] = measure_answers(case, before, before)
    metrics = json.loads((shared / "evaluate" / "metrics.json").read_text())
    models = {"": metrics["finetuned"]} | {one["algorithm"]: one for one in metrics["methods"]}
    found["distance"] = {name: one.get("distance") for name, one in models.items()}
    for way, adapter in out.items():
        found[way] = measure_answers(case, before, own.ask(model, adapter, prompts))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    workdir: str = setting("runs/ways_out", "Where runs and results go.")
    cases: tuple[str, ...] = setting((), "Cases; empty: all.", choices=tuple(cases()))
    seeds: tuple[int, ...] = setting((0, 1, 2), "Seeds of the sketch, the orders and the adapters.")
    relearn: bool = setting(False, "Also train all models on four forgotten rows again.")


def main(options: Options) -> None:
    """Measures the cases that are named, or all."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    workdir, model = (pathlib.Path(name).resolve() for name in (options.workdir, options.model))
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "results.json"
    for seed in options.seeds:
        for name in options.cases or cases():
            results = json.loads(path.read_text()) if path.is_file() else {}
            if f"{name}/{seed}" not in results:
                results[f"{name}/{seed}"] = run_case(
                    cases()[name], model, workdir, seed, options.relearn
                )
                path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}/{seed}", json.dumps(results[f"{name}/{seed}"]), flush=True)


if __name__ == "__main__":
    command.start(main, Options())
