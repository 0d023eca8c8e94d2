"""Helps with the index of a run: any number of these make its sketches together.

  python experiments/run.py --workdir=/shared/run ... --stages=corpus,backbone,finetune
  python experiments/sketch_job.py --workdir=/shared/run     # on as many machines as there are
  python experiments/run.py --workdir=/shared/run ...        # goes on with the finished index

Jobs claim chunks and need no network between them, only the shared folder. One that dies harms no
other: its chunk goes to the next. run.py itself may be at its sketch stage at the same time.
"""

import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

_WORKDIR = flags.DEFINE_string("workdir", "", "Work directory of the run.")


def join(workdir: pathlib.Path) -> str:
    """Makes sketches until none is missing; returns a line that says what was done."""
    from raslik_jax import files
    from raslik_jax.config import config_from_json
    from raslik_jax.run import units
    from raslik_jax.run.plan import plan_units
    from raslik_jax.run.stages import sketch as sketch_stage
    from raslik_jax.run.workspace import Workspace

    config = config_from_json(files.read_json(workdir / "config.json"))
    workspace = Workspace(workdir, config)
    plan = units.Plan(workdir, plan_units(config, workspace)).survey()
    if "sketch" not in plan.units:
        raise ValueError(
            f"{workdir} must have a strategy that ranks by sketches, got "
            f"{','.join(config.retrieve.strategies)}: there is no index to make"
        )
    sketch = plan.units["sketch"]
    missing = plan.missing(sketch)
    if missing:
        raise ValueError(
            f"{workdir} must hold the results of {missing}, they are missing or out of date: run "
            "run.py with --stages=corpus,backbone,finetune first"
        )
    if sketch.name in plan.done:
        return "the index is up to date"
    folder = units.join_unit(workdir, sketch, plan.key(sketch).value)
    try:
        work = sketch_stage.open_index(workspace, folder)
        made = sketch_stage.fill_index(work)
    except (ValueError, OSError):
        # The run moves a finished index to its place, also while another job looks at it.
        if not plan.check(sketch):
            raise
        return "the index is complete, the run has taken it over"
    return f"the index is complete, {made:,} of {work.store.num_rows:,} sketches were made here"


def main() -> None:
    if not _WORKDIR.value:
        raise ValueError("a run must be named: give its work directory as --workdir")
    print(join(pathlib.Path(_WORKDIR.value)))


if __name__ == "__main__":
    command.start(
        main,
        when_stopped="stopped; what was committed stays, the same command goes on from here",
    )
