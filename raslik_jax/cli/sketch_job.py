"""Helps with the index of a run. Any number of these jobs make its sketches together.

  raslik run --workdir=/shared/run ... --stages=corpus,backbone,finetune
  raslik sketch_job --workdir=/shared/run     # on as many machines as there are
  raslik run --workdir=/shared/run ...        # goes on with the finished index

On a machine with several GPUs start one job for each, with CUDA_VISIBLE_DEVICES=0, 1 and so on.

Jobs claim chunks. They need only the shared folder and no network between them. A dead job harms no
other: its chunk goes to the next. `raslik run` itself may be at its sketch stage at the same time.
With GPUs it needs another machine, because it takes all GPUs that it sees.
"""

import dataclasses
import pathlib

from raslik_jax.base.settings import Settings, setting

WHEN_STOPPED = "stopped; what was committed stays, the same command goes on from here"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Which run is helped."""

    workdir: str = setting("", "Work directory of the run.")


def run(options: Options) -> None:
    """Makes sketches until none is missing and prints what was done."""
    if not options.workdir:
        raise ValueError("a run must be named: give its work directory as --workdir")
    _help(pathlib.Path(options.workdir))


def _help(workdir: pathlib.Path) -> None:
    from raslik_jax.config import config_from_json
    from raslik_jax.run import artifacts, checking, units
    from raslik_jax.run.plan import plan_units
    from raslik_jax.run.stages import sketch as sketch_stage
    from raslik_jax.run.workspace import Workspace

    makes = "`raslik run` with --stages=corpus,backbone,finetune makes"
    mend = f"{makes} a work directory that can be helped"
    config = config_from_json(artifacts.CONFIG.read(workdir, mend))
    workspace = Workspace(workdir, config)
    plan = units.Plan(workdir, plan_units(config, workspace)).survey()
    if "sketch" not in plan.units:
        got = ",".join(config.retrieve.strategies)
        raise ValueError(f"{workdir} must have a strategy that ranks by sketches, got {got}")
    sketch = plan.units["sketch"]
    missing = plan.missing(sketch)
    if missing:
        raise ValueError(f"{workdir} must hold up-to-date results of {missing}: {makes} them")
    if sketch.name in plan.done:
        print("the index is up to date")
        return
    checking.check_sketching(config, workspace.shapes)
    folder = units.join_unit(workdir, sketch, plan.key(sketch).value)
    try:
        store, made = sketch_stage.fill_index(workspace, folder)
        print(f"the index is complete, {made:,} of {store.num_rows:,} sketches were made here")
    except (ValueError, OSError):
        # The run moves a finished index to its place, also while another job looks at it.
        if not plan.check(sketch):
            raise
        print("the index is complete, the run has taken it over")
