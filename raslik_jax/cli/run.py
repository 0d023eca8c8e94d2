"""From one bad generation to an unlearned model and a report.

The command finds the training examples that taught a behavior, and others that are far from it
(RASLIK and its baselines). It forgets the first set while training on the second. It measures the
forgotten behavior and the other answers.

  raslik run --flagfile=experiments/flags/demo.flags

Every stage writes its results and a manifest into --workdir. It does not run again while they are
up to date. Put the flag file first, because later flags replace earlier ones.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Literal

from raslik_jax.base import settings
from raslik_jax.base.settings import setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import STAGES, Config, MeshConfig
from raslik_jax.incident import making
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.run import gpus, written

WHEN_STOPPED = command.GOES_ON
FLAGS = tuple(settings.leaves(Config()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobConfig):
    """Options of a run on which its results do not depend."""

    workdir: str = setting("", "Folder for the results (default: runs/<name>).")
    stages: tuple[str, ...] = setting(STAGES, "Stages to run.", choices=STAGES)
    measure: Literal["none", "full"] = setting(
        "full", "full: measure the sets and the models. none: only make them."
    )
    update: bool = setting(
        False, "Replace the run in --workdir. Parts that do not change are kept."
    )
    verify: bool = setting(False, "List damaged files in --workdir and run nothing.")
    dry_run: bool = setting(
        False, "Print stages, sizes, memory, operations and time, and run nothing."
    )
    compile: bool = setting(True, "Compile the largest programs to know their memory (--dry_run).")
    mesh: MeshConfig = MeshConfig()
    gpu: str = setting(
        "",
        "With --dry_run: compile for this GPU and use its rates. The machine need not have one.",
        choices=("", *gpus.GPUS),
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.coordinator and (self.dry_run or self.verify):
            name = "--verify" if self.verify else "--dry_run"
            yield f"{name} runs in a single process: leave out --coordinator"
        if self.gpu and not self.dry_run:
            yield "--gpu compiles for a GPU and runs nothing: add --dry_run"


def run(options: Options) -> int:
    """Runs, plans or verifies; returns the exit status."""
    config = setting_flags.read(Config())
    workdir = pathlib.Path(options.workdir or f"runs/{config.name}")
    if options.verify:
        found = written.verify_run(workdir)
        print("\n".join(found) or f"{workdir}: no result is damaged")
        return int(bool(found))
    if options.dry_run:
        _print_plan(config, workdir, options)
        return 0
    why = making.make(
        config,
        workdir,
        mesh=options.mesh,
        update=options.update,
        stages=options.stages,
        is_measured=options.measure != "none",
    )
    if why:
        print(f"finding: {why}")
    return 0


def _print_plan(config: Config, workdir: pathlib.Path, options: Options) -> None:
    """Prints the stages and the cost of a run; writes nothing."""
    if options.gpu:
        gpus.prepare()
    from raslik_jax.parallel import meshes  # for the same reason, here
    from raslik_jax.report import forecast as shown
    from raslik_jax.report import tables, writing
    from raslik_jax.run import checking, cost, forecast

    gpu = gpus.GPUS[options.gpu] if options.gpu else None
    if gpu:
        mesh = gpus.mesh_of(gpu, data=options.mesh.data or 1)
    else:
        mesh = meshes.make_mesh(options.mesh.data)
    config = cost.settled(config, workdir, is_here=not gpu)
    checking.check_mesh(config, mesh.size, stages=options.stages)
    found = forecast.forecast(
        config,
        workdir,
        stages=options.stages,
        is_measured=options.measure != "none",
        more=writing.UNITS,
        compiles=options.compile,
        mesh=mesh if gpu or mesh.size > 1 else None,
        layout=options.mesh.base,
        memory=gpu.usable_bytes if gpu else meshes.device_memory(),
    )
    device = gpu or cost.measure(*found.run.widest_kernel, config.backbone.dtypes)
    print(f"{config.name}, seed {config.seed}, in {workdir}\n")
    for table in (shown.sizes_table(found.run), shown.steps_table(found, device)):
        print(tables.render_terminal(table) + "\n")
    if gpu:
        unknown = "The memory of a GPU is not known without --compile."
        print(shown.describe_memory(found, gpu) if options.compile else unknown)
