"""What a run will do and take, before there are weights or data: its units and their costs.

Every unit's step is traced at the shapes of batches that it will meet (`programs`), and `cost`
counts its jaxpr: no unit has arithmetic of its own.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from raslik_jax.config import STAGES, Config
from raslik_jax.data.tokens import encoding, prompts, tokenization
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.report.tables import Column, Table
from raslik_jax.run import checking, cost, plan, programs
from raslik_jax.run.programs import AbstractRun, Program, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import (
    backbone,
    chance,
    corpus,
    discriminator,
    finetune,
    generate,
    references,
    retrieve,
    robustness,
    scores,
    sketch,
    tokens,
    unlearn,
)
from raslik_jax.run.units import Plan, Unit
from raslik_jax.run.workspace import Workspace, read_tokenizer

# Seconds that a program takes to compile where none was compiled to know: of small models on a CPU.
COMPILE_SECONDS = 5.0


class Step(NamedTuple):
    """One unit of work of the run.

    Attributes:
      operations: multiplications and additions of matrix products.
      device_bytes: memory of the device; 0 for work on the host. Of `memory`: "traced" from the
        jaxpr, or "XLA" of the compiled program.
      num_programs: that it compiles; those that an earlier unit has compiled count there.
    """

    name: str
    stage: str
    operations: float
    bytes_moved: float
    device_bytes: float
    memory: str
    disk_bytes: float
    is_done: bool
    num_programs: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Returns the larger of the two times, at these rates, without compiling."""
        return max(self.operations / flops_per_second, self.bytes_moved / bytes_per_second)


class Forecast(NamedTuple):
    """What a run will do and take: its sizes, its units in order, and how long compiling takes."""

    run: AbstractRun
    steps: tuple[Step, ...]
    compile_seconds: float
    notes: tuple[str, ...]


def _of_models(work: Callable[[AbstractRun, int], Work]) -> Callable[..., Work]:
    """Returns the work on a variant's model of every epoch, or on both models before unlearning."""
    return lambda run, variant: work(run, len(run.workspace.epochs(*variant)) if variant else 2)


def _robustness(run: AbstractRun, attack: robustness.Attack) -> Work:
    """Returns the work of a measure of robustness, on one model or on both before unlearning."""
    name, config, models = attack.measure, run.config, 1 if attack.algorithm else 2
    taken = ROBUSTNESS[name].cost(config.evaluate[name])
    rows, count = config.evaluate.robustness_rows, models * taken.readings
    work = run.answering(min(rows, run.num_measured), count + models * taken.answers)
    found = [*work.programs, *[run.likelihoods(rows)] * (count + models * taken.given)]
    found += [run.likelihoods(taken.texts)] * models if taken.texts else []
    if taken.steps:
        own = config.unlearn
        decoder = run.model.decoder_for(remat=own.remat)
        held = own.micro_batch_size or own.batch_size
        steps = robustness.relearning(decoder, 1e-3, held)
        shapes = run.drawn(taken.rows, models * taken.steps)
        # The adapter is folded into the weights, which are quantized no more.
        found.append(run.training(name, steps, run.model.initial, run.plain, shapes=shapes))
    return work._replace(programs=found)


# What a unit does, by the function that makes it and with that one's arguments; others work on the
# host alone.
WORK: dict[Callable[..., None], Callable[..., Work]] = {
    corpus.make_corpus: lambda run: Work(500.0 * run.sizes.train),
    backbone.make_backbone: AbstractRun.pretraining,
    finetune.make_adapter: AbstractRun.finetuning,
    finetune.adopt_model: lambda run: Work(8.0 * run.num_params),
    references.make_retrieval_answers: lambda run: run.answering(run.num_answered, 1),
    references.make_references: lambda run: run.answering(run.num_measured, 2),
    references.make_perplexities: lambda run: run.perplexities(2),
    discriminator.make_discriminator: AbstractRun.classifying,
    sketch.make_index: lambda run: run.sketching(run.sizes.train, run.index_bytes),
    sketch.make_query_sketches: lambda run: run.sketching(
        run.queries["retrieval"], 4.0 * run.sketch_size * run.queries["retrieval"]
    ),
    sketch.make_diagnosis: lambda run: run.sketching(run.config.sketch.diagnose),
    scores.make_scores: lambda run: run.scoring(run.queries["retrieval"], 1),
    chance.make_null: lambda run: run.scoring(run.num_null, run.num_null),
    chance.make_chance: lambda run: Work(32.0 * run.sizes.train),
    # A gradient, and the transpose of one, which takes two: for a row and for the answer.
    tokens.make_tokens: lambda run: run.sketching(6 * run.config.retrieve.token_rows),
    scores.make_embeddings: AbstractRun.embedding,
    scores.make_exact_scores: lambda run: run.sketching(
        run.sizes.train, 4.0 * run.sizes.train, is_exact=True
    ),
    retrieve.make_sizes: lambda run: Work(100.0),
    retrieve.make_sets: lambda run, strategy: Work(500.0 * (run.sizes.forget + run.sizes.retain)),
    unlearn.unlearn: lambda run, variant: run.unlearning(*variant),
    generate.write_answers: _of_models(lambda run, models: run.answering(run.num_measured, models)),
    generate.write_perplexities: _of_models(AbstractRun.perplexities),
    scores.make_traced: lambda run: run.traced(2),
    generate.write_traced: _of_models(AbstractRun.traced),
    generate.write_questions: _of_models(AbstractRun.questions),
    robustness.write_robustness: _robustness,
}


def forecast(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    is_measured: bool = True,
    more: Sequence[Recipe] = (),
    compiles: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    layout: str = "replicated",
    memory: int = 0,
    costs: programs.Costs | None = None,
) -> Forecast:
    """Returns what a run will do and take, unit by unit; needs no weights, no data, no network.

    A corpus that is there, in the work directory or as a user's own files, is counted, and checked
    as the run checks it. Finished units are looked for in `workdir`; nothing is written. With
    `compiles` the largest program of every kind that is still to run is compiled for the default
    device, or for a mesh of others (`gpus`), to say how much memory it takes and how long compiling
    does.
    """
    workspace = Workspace(workdir, config)
    how: Any = {"layout": layout, "memory": memory, "costs": costs}
    run = AbstractRun(config, workspace, mesh=mesh, **how)
    if run.corpus:
        shapes = run.model.decoder.config if config.backbone.checkpoint else None
        checking.check_corpus(config, run.corpus, _find_rows(run), stages=stages, shapes=shapes)
        is_measured = is_measured and checking.is_measurable(config, run.corpus)
    units = plan.plan_units(config, workspace, is_measured=is_measured, more=more)
    done = Plan(workdir, units).survey().done
    works: list[tuple[Unit, Work]] = []
    for unit in (unit for unit in units if unit.stage in stages):
        works.append((unit, work_of(run, unit)))
    largest: dict[str, Program] = {}
    for unit, work in works:
        for program in () if unit.name in done else work.programs:
            other = largest.get(program.name, program)
            largest[program.name] = max(other, program, key=Program.peak)
    analyzed = {}
    for name, program in largest.items() if compiles else ():
        compiled, took = cost.compile_step(program.trace(program.largest), run.platform or None)
        analyzed[name] = cost.analyzed_bytes(compiled), took
    of_name: dict[str, list[Program]] = {}
    for program in (program for _, work in works for program in work.programs):
        of_name.setdefault(program.name, []).append(program)
    cost_of = {name: programs.find_costs(alike) for name, alike in of_name.items()}
    to_compile = set(largest)
    steps = []
    for unit, work in works:
        by_name = {program.name: program for program in work.programs}
        new = set() if unit.name in done else to_compile & by_name.keys()
        to_compile -= new
        totals = [program.total(cost_of[program.name]) for program in work.programs]
        peaks = [analyzed[name][0] for name in by_name if name in analyzed]
        traced = [program.peak() for program in work.programs]
        steps.append(
            Step(
                unit.name,
                unit.stage,
                operations=work.operations + sum(total[0] for total in totals),
                bytes_moved=work.bytes_moved + sum(total[1] for total in totals),
                device_bytes=max(peaks or traced, default=0.0),
                memory="XLA" if peaks else "traced",
                disk_bytes=work.disk_bytes,
                is_done=unit.name in done,
                num_programs=sum(len(by_name[name].shapes) for name in new),
            )
        )
    seconds = [took for _, took in analyzed.values()] or [COMPILE_SECONDS]
    return Forecast(run, tuple(steps), float(np.median(seconds)), _notes(run, bool(analyzed)))


def work_of(run: AbstractRun, unit: Unit) -> Work:
    """Returns what a unit does, with the programs that it calls at all; nothing for the host's."""
    bound: Any = unit.run  # a function of the workspace and more, bound to all but the folder
    work = WORK[bound.func](run, *bound.args[1:]) if bound.func in WORK else Work(0)
    return work._replace(programs=[program for program in work.programs if program.shapes])


def _find_rows(run: AbstractRun) -> encoding.Encoded | None:
    """Returns the training examples as token ids, if a tokenizer is here."""
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
        "Time: operations of matrix products and bytes of device memory over the rates, whichever "
        "takes longer, and compiling. Files and work on the host are left out.",
        "Memory of the device: traced is what the values of the largest step take, in the order of "
        "its program and before XLA fuses any.",
        "Rows are taken to be as long as Alpaca's with Pythia's tokenizer.",
    ]
    if run.num_devices > 1:
        notes[0] += f" All of one device: {run.num_devices} share the rows of every batch."
    if is_compiled:
        notes[1] += (
            " XLA is its analysis of the same step, compiled for "
            f"{_device_kind(run)}; another kind of device needs another amount."
        )
    if run.config.retrieve.select != "count":
        notes.append(
            "The rule of --retrieve.select decides the sizes of the sets; those shown are by count."
        )
    return tuple(notes)


def _device_kind(run: AbstractRun) -> str:
    return run.mesh.devices.flat[0].device_kind if run.mesh else jax.default_backend()


def sizes_table(run: AbstractRun) -> Table:
    """Returns the table of a run's sizes."""
    sizes, gradient = run.sizes, 4 * run.num_gradient
    is_lora = run.num_gradient == run.num_params
    rows = {
        "Model": run.name,
        "Frozen weights": f"{run.num_weights:,}, {format_bytes(run.base_bytes)} on the device",
        **run.layout,
        **({} if is_lora else {"Weights in a gradient, P": f"{run.num_gradient:,}"}),
        f"LoRA parameters{', P' if is_lora else ''}": f"{run.num_params:,}",
        "Training examples, N": f"{sizes.train:,}, of them {sizes.targets:,} targets",
        "Forget set, retain set": f"{sizes.forget:,} and {sizes.retain:,}",
        "Queries": "; ".join(f"{name}: {count}" for name, count in run.queries.items()),
        "Sketch, K": f"{run.sketch_size:,} of {run.num_gradient:,} coordinates",
        "One gradient, one sketch": f"{format_bytes(gradient)} and {format_bytes(run.row_bytes)}, "
        f"{gradient / run.row_bytes:.3g} to 1",
        "Index, N x K": format_bytes(run.index_bytes),
    }
    return Table((Column("What"), Column("Size")), tuple(rows.items()))


def steps_table(
    found: Forecast, *, flops_per_second: float, bytes_per_second: float, origin: str = "as given"
) -> Table:
    """Returns the table of a run's stages: what is done, what is left, and what it takes.

    Units of one stage that cost the same stand in one row. `origin` says where the rates come from.
    """
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in found.steps:
        groups.setdefault(step[1:6], []).append(step)  # from the stage to the memory
    rows: list[tuple[str, ...]] = []
    total = left = 0.0
    for group in groups.values():
        first, last = group[0], group[-1].name.removeprefix(f"{group[0].stage}/")
        seconds = first.seconds(flops_per_second, bytes_per_second)
        compiling = found.compile_seconds * sum(step.num_programs for step in group)
        done, count = sum(step.is_done for step in group), len(group)
        total += count * seconds + compiling
        left += (count - done) * seconds + compiling
        moved, disk = count * first.bytes_moved, sum(step.disk_bytes for step in group)
        held = f"{format_bytes(first.device_bytes)}, {first.memory}"
        rows.append(
            (
                first.name + (f" ... {last}" if count > 1 else ""),
                f"{done} of {count}",
                f"{count * first.operations:.2e}" if first.operations else "-",
                format_bytes(moved) if moved else "-",
                _seconds(count * seconds + compiling) if seconds or compiling else "-",
                held if first.device_bytes else "-",
                format_bytes(disk) if disk else "-",
            )
        )
    disk = sum(step.disk_bytes for step in found.steps)
    rows.append(("all", "", "", "", _seconds(total), "", format_bytes(disk)))
    rows.append(("left to do", "", "", "", _seconds(left), "", ""))
    names = ("Done", "Operations", "Bytes moved", "Time", "Device memory", "Disk")
    rates = (
        f"Rates: {flops_per_second:.3g} operations and {bytes_per_second:.3g} bytes a second, "
        f"{origin}; about {sum(step.num_programs for step in found.steps)} programs to compile, "
        f"{found.compile_seconds:.2g} s each."
    )
    columns = (Column("Stage"), *(Column(name, "right") for name in names))
    return Table(columns, tuple(rows), (rates, *found.notes))


def format_bytes(count: int | float) -> str:
    """Returns a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
