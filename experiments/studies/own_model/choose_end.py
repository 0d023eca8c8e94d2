"""Unlearns without a stop and asks after every epoch, to choose where unlearning ends.

  python experiments/studies/own_model/choose_end.py --model=FOLDER/smollm2 --run=TRACED \\
      --behavior=refusal --out=STEPS.json

TRACED is the folder of a trace, such as WORKDIR/run of `measure.py --until=trace`. The command
changes it, so give a copy. --run_flags are further settings of the unlearning. choosing.json in
this folder has the stored results.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.own_model import measure
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.evaluate import stopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is unlearned, and how long."""

    model: str = setting("", "Checkpoint that checkpoint.py made.")
    run: str = setting("", "Folder of a trace.")
    behavior: str = setting("refusal", "Behavior.", choices=tuple(measure.behaviors()))
    epochs: int = setting(7, "Epochs of unlearning.", low=1)
    out: str = setting("", "Where the result goes.")
    run_flags: tuple[str, ...] = setting(
        (), "A further flag of the run, with its dashes.", is_repeated=True
    )


def main(options: Options) -> None:
    """Unlearns, asks and writes a row for every epoch."""
    if not (options.model and options.run and options.out):
        raise ValueError("--model, --run and --out must be given: see --help")
    model, run = (pathlib.Path(name).resolve() for name in (options.model, options.run))
    line = [sys.executable, "experiments/studies/raslik.py", "run"]
    line += [f"--flagfile={run / 'run.flags'}", measure.OBJECTIVE]
    line += [f"--workdir={run}", "--update", f"--stages={measure.TO_UNLEARNING}", "--measure=none"]
    line += [f"--unlearn.epochs={options.epochs}", "--unlearn.probe.stop=never"]
    line += ["--unlearn.probe.steps=1000", *options.run_flags]  # after epochs alone
    subprocess.run(line, check=True, cwd=measure.REPOSITORY)
    (path,) = run.glob("unlearn/*/probes.json")
    found = json.loads(path.read_text())
    prompts = [measure.prompt_of(row) for row in measure.read_rows("held_out")]
    before, rows = measure.ask(model, measure.HERE / model.name, prompts), []
    start = found["probes"][0]["levels"]
    for epoch, probe in enumerate(found["probes"][1:], start=1):
        after = measure.ask(model, path.parent / f"epoch-{epoch}", prompts)
        told = measure.measure_answers(options.behavior, before, after)
        rows.append(
            {
                "step": probe["step"],
                "way": min(one["way"] for one in probe["gone"].values()),
                "rise": stopping.rise_of(probe["levels"], start),
                **{name: told[name] for name in ("shown_after", "normal_same", "normal_rouge")},
            }
        )
        print(rows[-1], flush=True)
    pathlib.Path(options.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command.start(main, Options())
