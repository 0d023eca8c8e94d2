"""The plan and the cost of a run before there are weights or data.

Every unit's step is traced at the shapes of its batches (`work`, `programs`). `cost` counts its
jaxpr: no unit has arithmetic of its own.
"""

import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from raslik_jax.config import STAGES, Config
from raslik_jax.data.tokens import encoding, prompts, tokenization
from raslik_jax.run import checking, cost, plan
from raslik_jax.run.programs import AbstractRun, Program, Work, platform_of
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.units import Plan, Unit
from raslik_jax.run.workspace import StoredCorpus, Workspace, read_tokenizer

# Seconds that a program takes to compile where none was compiled to know: of small models on a CPU.
COMPILE_SECONDS = 5.0


class Step(NamedTuple):
    """One unit of work of the run.

    Attributes:
      programs: names of the programs that it calls.
      num_programs: number of programs that are compiled for it and for no earlier unit.
      operations: multiplications and additions of matrix products.
      device_bytes: memory of the device; 0 for work on the host or without compiling.
      is_known: whether the work of the unit is known.
      is_most: whether the unit may end earlier.
    """

    name: str
    stage: str
    programs: tuple[str, ...] = ()
    num_programs: int = 0
    operations: float = 0.0
    bytes_moved: float = 0.0
    device_bytes: float = 0.0
    disk_bytes: float = 0.0
    is_done: bool = False
    is_known: bool = True
    is_most: bool = False

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Returns the larger of the two times at these rates without compiling."""
        return max(self.operations / flops_per_second, self.bytes_moved / bytes_per_second)


class Forecast(NamedTuple):
    """The plan and the cost of a run: sizes, units in order, and seconds of compiling."""

    run: AbstractRun
    steps: tuple[Step, ...]
    compile_seconds: float
    notes: tuple[str, ...]


def abstract_run(config: Config, workspace: Workspace, **how: Any) -> AbstractRun:
    """Returns a run in the abstract, on the existing corpus or by the sizes in the settings.

    The corpus is that of a finished unit or of a user's own files. `how` is of `AbstractRun`.
    """
    first = plan.plan_units(config, workspace)[:1]
    if Plan(workspace.root, first).survey().done:
        how["corpus"] = StoredCorpus(workspace.root / "corpus")
    elif not config.corpus.record.reads:  # its files say how large it is, no settings
        how["corpus"] = config.corpus.load(seed=config.seed)
    return AbstractRun(config, workspace, checking.model_of(config)[1], **how)


def forecast(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    is_measured: bool = True,
    more: Sequence[Recipe] = (),
    compiles: bool = False,
    traces: bool = True,
    **how: Any,
) -> Forecast:
    """Returns the plan and the cost of a run by unit; needs no weights, no data, no network.

    An existing corpus in the work directory or in a user's own files is counted, and checked as the
    run checks it. Finished units are looked for in `workdir`. Nothing is written. With `compiles`
    the largest program of every kind that is still to run is compiled for the default device or for
    a mesh of others (`gpus`). This gives its memory and the seconds of compiling. Without `traces`
    the operations are those of `Program.rule`, which takes no time. `how` is of `AbstractRun`.
    """
    workspace = Workspace(workdir, config)
    run = abstract_run(config, workspace, **how)
    if run.corpus:
        shapes = run.model.decoder.config if config.backbone.checkpoint else None
        checking.check_corpus(config, run.corpus, _find_rows(run), stages=stages, shapes=shapes)
        is_measured = is_measured and checking.is_measurable(config, run.corpus)
    units = plan.plan_units(config, workspace, is_measured=is_measured, more=more)
    done = Plan(workdir, units).survey().done
    units = tuple(unit for unit in units if unit.stage in stages)
    largest: dict[str, Program] = {}
    for unit in units if compiles else ():
        for program in () if unit.name in done else work_of(run, unit).programs:
            other = largest.get(program.name, program)
            largest[program.name] = max(other, program, key=lambda one: one.largest.slots)
    memory, seconds = {}, []
    for name, program in largest.items():
        traced, platform = program.trace(program.largest), platform_of(run.mesh)
        compiled, took = cost.compile_step(traced, platform or None)
        memory[name] = cost.analyzed_bytes(compiled)
        seconds.append(took)
    known: dict[Any, cost.Cost] = {}

    def cost_of(program: Program) -> cost.Cost:
        """Returns what all calls cost; the same program is traced once for a shape."""
        key = program.name, program.mean
        if not traces:
            return program.rule()
        known[key] = known[key] if key in known else program.cost_of(program.mean)
        return program.total(known[key])

    steps = [
        step._replace(device_bytes=max((memory.get(name, 0) for name in step.programs), default=0))
        for step in count_steps(run, units, cost_of, done=done)
    ]
    compile_seconds = float(np.median(seconds or [COMPILE_SECONDS]))
    return Forecast(run, tuple(steps), compile_seconds, _notes(run, compiles))


def count_steps(
    run: AbstractRun,
    units: Sequence[Unit],
    cost_of: Callable[[Program], cost.Cost],
    *,
    done: Collection[str] = (),
) -> list[Step]:
    """Returns the work of units in order by the cost of all calls of a program."""
    compiled: set[Any] = set()
    steps = []
    for unit in units:
        work, is_done = work_of(run, unit), unit.name in done
        own = {(one.name, shape) for one in work.programs for shape in one.shapes if not is_done}
        costs = [cost.Cost(work.operations, work.bytes_moved), *map(cost_of, work.programs)]
        operations, moved = (sum(numbers) for numbers in zip(*costs, strict=True))
        steps.append(
            Step(
                unit.name,
                unit.stage,
                programs=tuple(sorted({one.name for one in work.programs})),
                num_programs=len(own - compiled),
                operations=operations,
                bytes_moved=moved,
                disk_bytes=work.disk_bytes,
                is_done=is_done,
                is_known=unit.work is not None,
            )
        )
        compiled |= own
    return steps


def work_of(run: AbstractRun, unit: Unit) -> Work:
    """Returns a unit's work with the programs that it calls at all; nothing for the host's."""
    work = unit.work(run) if unit.work else Work(0)
    return work._replace(programs=[program for program in work.programs if program.shapes])


def _find_rows(run: AbstractRun) -> encoding.Encoded | None:
    """Returns the training examples as token ids if a tokenizer is here."""
    stored, settings = run.workspace.root / "corpus" / "tokenizer", run.config.backbone
    named = [name for name in (settings.checkpoint, settings.adapter) if name]
    if not run.corpus:
        return None
    if stored.is_dir():
        tokenizer = tokenization.load_tokenizer(stored)
    elif named and all(pathlib.Path(name).is_dir() for name in named):
        tokenizer = read_tokenizer(run.config)
    else:
        return None
    rows = run.corpus.train
    template = prompts.settle_template(run.config.corpus.template, lambda: rows)
    return encoding.encode(rows, tokenizer, template=template)


def _notes(run: AbstractRun, is_compiled: bool) -> tuple[str, ...]:
    notes = [
        "Time: the larger of operations / rate and bytes of device memory / rate, plus compiling. "
        "Files and work on the host are left out."
    ]
    if run.num_devices > 1:
        notes[0] += (
            f" Numbers are of one device. {run.num_devices} devices share the rows of every batch."
        )
    if is_compiled:
        kind = run.mesh.devices.flat[0].device_kind if run.mesh else jax.default_backend()
        notes.append(
            f"Memory of the device: XLA's analysis of the largest step, compiled for {kind}. "
            "Other kinds of device need other amounts."
        )
    notes.append("Rows are assumed to be as long as Alpaca's with Pythia's tokenizer.")
    if run.config.retrieve.select != "count":
        notes.append(
            "The rule of --retrieve.select decides the sizes of the sets. These sizes are "
            "those of the rule count."
        )
    return tuple(notes)


def format_bytes(count: int | float) -> str:
    """Returns a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def format_seconds(seconds: float) -> str:
    """Returns a time with its unit."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
