"""What a run will do and take, before there are weights or data: its units and their costs.

Every unit's step is traced at the shapes of batches that it will meet (`programs`), and `cost`
counts its jaxpr: no unit has arithmetic of its own.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from raslik_jax.config import STAGES, Config
from raslik_jax.data import encoding, tokenization
from raslik_jax.evaluate import perplexity
from raslik_jax.models import decoder, quantize
from raslik_jax.report.tables import Column, Table
from raslik_jax.run import checking, cost, plan
from raslik_jax.run.programs import AbstractRun, Program, Sizes
from raslik_jax.run.stages import (
    backbone,
    corpus,
    discriminator,
    finetune,
    generate,
    references,
    retrieve,
    sketch,
    unlearn,
)
from raslik_jax.run.units import Plan, Unit
from raslik_jax.run.workspace import Workspace

# Seconds that a program takes to compile where none was compiled to know: of small models on a CPU.
_COMPILE_SECONDS = 5.0


class Step(NamedTuple):
    """One unit of work of the run.

    Attributes:
      name: of the unit.
      is_done: its result is there and up to date.
      operations: multiplications and additions of matrix products.
      bytes_moved: read from or written to device memory.
      device_bytes: memory of the device; 0 for work on the host.
      disk_bytes: what it leaves.
      memory: where device_bytes comes from: "traced" from the jaxpr, or "XLA" of the compiled
        program.
      num_programs: that it compiles; those that an earlier unit has compiled count there.
    """

    name: str
    is_done: bool
    operations: float
    bytes_moved: float
    device_bytes: float
    disk_bytes: float
    memory: str
    num_programs: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Returns the larger of the two times, at these rates, without compiling."""
        return max(self.operations / flops_per_second, self.bytes_moved / bytes_per_second)


class Forecast(NamedTuple):
    """What a run will do and take.

    Attributes:
      model: name of the checkpoint, and of the preset that its shapes come from.
      sizes: rows.
      queries: how many of which.
      num_weights: of the frozen base.
      base_bytes: it takes, as stored on the device.
      num_params: P, LoRA parameters.
      sketch_size: K.
      row_bytes: one sketch, in the index's dtype.
      mean_tokens: of a training example.
      steps: units in order.
      compile_seconds: that a program takes to compile.
      width: inputs and outputs of the model's widest kernel.
      notes: what is taken for granted.
    """

    model: str
    sizes: Sizes
    queries: Mapping[str, int]
    num_weights: int
    base_bytes: int
    num_params: int
    sketch_size: int
    row_bytes: int
    mean_tokens: float
    steps: tuple[Step, ...]
    compile_seconds: float
    width: tuple[int, int]
    notes: tuple[str, ...]

    @property
    def index_bytes(self) -> int:
        """N x K x dtype, rows alone."""
        return self.sizes.train * self.row_bytes


class _Work(NamedTuple):
    """What a unit leaves on disk, its programs, each so many times over, and what is beside."""

    disk_bytes: int | float = 0
    programs: tuple[tuple[Program, int], ...] = ()
    operations: float = 0.0
    bytes_moved: float = 0.0


def _answers(run: AbstractRun, prompts: int, models: int) -> _Work:
    return _Work(500.0 * models * prompts, ((run.decoding(prompts), models),))


def _perplexity(run: AbstractRun, models: int) -> _Work:
    """Returns the likelihoods of some rows under each model, and of its own answers."""
    rows = len(perplexity.SETS) * run.config.evaluate.perplexity_examples + run.num_measured
    return _Work(100.0 * models * rows, ((run.likelihoods(rows), models),))


def _questions(run: AbstractRun, models: int) -> _Work:
    """Returns the dataset's own questions: answers, and the likelihood of given ones."""
    asked, given = run.config.corpus.count_questions(run.config.evaluate.questions)
    work = _answers(run, asked, models)
    return work._replace(programs=(*work.programs, (run.likelihoods(given), models)))


def _scores(run: AbstractRun) -> _Work:
    rows = run.sizes.train
    products = 2.0 * rows * run.sketch_size * run.queries["retrieval"]
    return _Work(4.0 * rows, (), products, float(rows * run.row_bytes))


def _exact_scores(run: AbstractRun) -> _Work:
    """Returns gradients that are made for the mean, and again for the scores."""
    passes = 2 if run.config.retrieve.center else 1
    program = run.sketching(run.sizes.train, size=run.num_flat)
    return _Work(4.0 * run.sizes.train, ((program, passes),))


def _unlearned(run: AbstractRun, strategy: str, name: str) -> _Work:
    settings = run.config.unlearn
    kept = run.base_bytes if settings.parameters == "all" else 4 * run.num_params
    return _Work(float(settings.epochs * kept), ((run.unlearning(name), 1),))


def _of_models(
    work: Callable[[AbstractRun, int], _Work],
) -> Callable[[AbstractRun, generate.Variant | None], _Work]:
    """Returns the work on a variant's model of every epoch, or on both models before unlearning."""
    return lambda run, variant: work(run, len(run.workspace.epochs(*variant)) if variant else 2)


# What a unit does, by the function that makes it and with that one's arguments; others work on the
# host alone.
_WORK: dict[Callable[..., None], Callable[..., _Work]] = {
    corpus.make_corpus: lambda run: _Work(500.0 * run.sizes.train),
    backbone.make_backbone: lambda run: _Work(run.base_bytes, ((run.pretraining(), 1),)),
    finetune.make_adapter: lambda run: _Work(
        4.0 * (2 + run.config.finetune.trajectory_points) * run.num_params,
        ((run.finetuning(), 1),),
    ),
    references.make_retrieval_answers: lambda run: _answers(run, run.num_answered, 1),
    references.make_references: lambda run: _answers(run, run.num_measured, 2),
    references.make_perplexities: lambda run: _perplexity(run, 2),
    discriminator.make_discriminator: lambda run: _Work(
        quantize.num_bytes(run.classifier()[1]), ((run.classifying(), 1),)
    ),
    sketch.make_index: lambda run: _Work(
        float(run.sizes.train * run.row_bytes), ((run.sketching(run.sizes.train), 1),)
    ),
    sketch.make_query_sketches: lambda run: _Work(
        4.0 * run.sketch_size * run.queries["retrieval"],
        ((run.sketching(run.queries["retrieval"]), 1),),
    ),
    sketch.make_diagnosis: lambda run: _Work(
        0.0, ((run.sketching(run.config.sketch.diagnose), 1),)
    ),
    retrieve.make_scores: _scores,
    retrieve.make_embeddings: lambda run: _Work(
        4.0 * 768 * run.sizes.train, ((run.embedding(run.sizes.train), 1),)
    ),
    retrieve.make_exact_scores: _exact_scores,
    retrieve.make_sets: lambda run, strategy: _Work(500.0 * (run.sizes.forget + run.sizes.retain)),
    unlearn.unlearn: _unlearned,
    generate.write_answers: _of_models(lambda run, models: _answers(run, run.num_measured, models)),
    generate.write_perplexities: _of_models(_perplexity),
    generate.write_questions: _of_models(_questions),
}


def forecast(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    compiles: bool = False,
) -> Forecast:
    """Returns what a run will do and take, unit by unit; needs no weights, no data, no network.

    A corpus that is there, in the work directory or as a user's own files, is counted, and checked
    as the run checks it.

    Args:
      config: of the run.
      workdir: where finished units are looked for; nothing is written.
      stages: those that will run.
      compiles: compile the largest program of every kind that is still to run, for the default
        device, to say how much memory it takes and how long compiling does.

    Raises:
      ValueError: a checkpoint whose shapes are unknown, adapter targets that it does not have, or
        a corpus that the stages cannot take.
    """
    workspace = Workspace(workdir, config)
    run = AbstractRun(config, workspace)
    if run.corpus:
        checking.check_corpus(config, run.corpus, _find_rows(run), stages=stages)
    units = plan.plan_units(config, workspace)
    done = Plan(workdir, units).survey().done
    found = [(unit.name in done, *_step_of(run, unit)) for unit in units if unit.stage in stages]
    # Units share what is compiled; finished ones compile nothing.
    largest: dict[str, Program] = {}
    to_come: list[Step] = []
    for is_done, step, programs in found:
        new = [program for program in programs if not is_done]
        count = sum(len(program.shapes) for program in new if program.name not in largest)
        for program in new:
            other = largest.get(program.name, program)
            largest[program.name] = max(program, other, key=Program.peak)
        to_come.append(step._replace(is_done=is_done, num_programs=count))
    seconds = list[float]()
    if compiles:
        analyzed = {name: cost.compile_step(p.trace(p.largest)) for name, p in largest.items()}
        seconds = [took for _, took in analyzed.values()]
        for place, (_, _, programs) in enumerate(found):
            peaks = [analyzed[p.name][0] for p in programs if p.name in analyzed]
            if peaks:
                to_come[place] = to_come[place]._replace(device_bytes=max(peaks), memory="XLA")
    kernels = [leaves["kernel"] for leaves in run.plain["layers"].values() if "kernel" in leaves]
    return Forecast(
        model=run.name,
        sizes=run.sizes,
        queries=run.queries,
        num_weights=decoder.count_parameters(run.plain),
        base_bytes=run.base_bytes,
        num_params=run.num_params,
        sketch_size=run.sketch_size,
        row_bytes=run.row_bytes,
        mean_tokens=float(run.length_N.mean()),
        steps=tuple(to_come),
        compile_seconds=float(np.median(seconds)) if seconds else _COMPILE_SECONDS,
        width=max((kernel.shape[-2:] for kernel in kernels), key=np.prod),
        notes=_notes(config, is_compiled=bool(seconds)),
    )


def _step_of(run: AbstractRun, unit: Unit) -> tuple[Step, list[Program]]:
    """Returns what a unit costs, and its programs."""
    bound: Any = unit.run  # a function of the workspace and more, bound to all but the folder
    work = _WORK[bound.func](run, *bound.args[1:]) if bound.func in _WORK else _Work()
    operations, moved, device = work.operations, work.bytes_moved, 0.0
    programs = [(program, times) for program, times in work.programs if program.shapes]
    for program, times in programs:
        total = program.total()
        operations, moved = operations + times * total[0], moved + times * total[1]
        device = max(device, program.peak())
    step = Step(unit.name, False, operations, moved, device, work.disk_bytes, "traced", 0)
    return step, [program for program, _ in programs]


def _find_rows(run: AbstractRun) -> encoding.Encoded | None:
    """Returns the training examples as token ids, if a tokenizer is here."""
    stored = run.workspace.root / "corpus" / "tokenizer"
    checkpoint = pathlib.Path(run.config.backbone.checkpoint or stored)
    folders = [folder for folder in (stored, checkpoint) if folder.is_dir()]
    if not folders or not run.corpus:
        return None
    tokenizer = tokenization.load_tokenizer(folders[0])
    return encoding.encode(run.corpus.train, tokenizer, template=run.config.corpus.template)


def _notes(config: Config, *, is_compiled: bool) -> tuple[str, ...]:
    notes = [
        "Time: operations of matrix products and bytes of device memory over the rates, whichever "
        "takes longer, and compiling. Files and work on the host are left out.",
        "Memory of the device: traced is what the values of the largest step take, in the order of "
        "its program and before XLA fuses any.",
        "Rows are taken to be as long as Alpaca's with Pythia's tokenizer.",
    ]
    if is_compiled:
        notes[1] += (
            " XLA is its analysis of the same step, compiled for "
            f"{jax.default_backend()}; another kind of device needs another amount."
        )
    if config.retrieve.select != "count":
        notes.append(
            "The rule of --retrieve.select decides the sizes of the sets; those shown are by count."
        )
    return tuple(notes)


def sizes_table(found: Forecast) -> Table:
    """Returns the table of a run's sizes."""
    sizes, gradient = found.sizes, 4 * found.num_params
    rows = [
        ("Model", found.model),
        ("Frozen weights", f"{found.num_weights:,}, {_bytes(found.base_bytes)} on the device"),
        ("LoRA parameters, P", f"{found.num_params:,}"),
        ("Training examples, N", f"{sizes.train:,}, of them {sizes.targets:,} targets"),
        ("Forget set, retain set", f"{sizes.forget:,} and {sizes.retain:,}"),
        ("Queries", "; ".join(f"{name}: {count}" for name, count in found.queries.items())),
        ("Sketch, K", f"{found.sketch_size:,} of {found.num_params:,} coordinates"),
        (
            "One gradient, one sketch",
            f"{_bytes(gradient)} and {_bytes(found.row_bytes)}, "
            f"{gradient / found.row_bytes:.3g} to 1",
        ),
        ("Index, N x K", _bytes(found.index_bytes)),
    ]
    return Table((Column("What"), Column("Size")), tuple(rows))


def steps_table(
    found: Forecast, *, flops_per_second: float, bytes_per_second: float, origin: str = "as given"
) -> Table:
    """Returns the table of a run's stages: what is done, what is left, and what it takes.

    Units of one stage that cost the same stand in one row.

    Args:
      found: the forecast.
      flops_per_second: operations a second that the machine is taken to do.
      bytes_per_second: bytes of memory a second that it is taken to move.
      origin: where the two rates come from.
    """
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in found.steps:
        stage, *rest = step.name.split("/")
        costed = step.operations, step.bytes_moved, step.device_bytes, step.memory
        groups.setdefault((stage, bool(rest), *costed), []).append(step)
    rows: list[tuple[str, ...]] = []
    total = left = 0.0
    for group in groups.values():
        first, count = group[0], len(group)
        seconds = first.seconds(flops_per_second, bytes_per_second)
        compiling = found.compile_seconds * sum(step.num_programs for step in group)
        done = sum(step.is_done for step in group)
        total += count * seconds + compiling
        left += (count - done) * seconds + compiling
        more = f" ... {group[-1].name.partition('/')[2]}" if count > 1 else ""
        moved, disk = count * first.bytes_moved, sum(step.disk_bytes for step in group)
        rows.append(
            (
                first.name + more,
                f"{done} of {count}",
                f"{count * first.operations:.2e}" if first.operations else "-",
                _bytes(moved) if moved else "-",
                _seconds(count * seconds + compiling) if seconds or compiling else "-",
                f"{_bytes(first.device_bytes)}, {first.memory}" if first.device_bytes else "-",
                _bytes(disk) if disk else "-",
            )
        )
    disk = sum(step.disk_bytes for step in found.steps)
    rows.append(("all", "", "", "", _seconds(total), "", _bytes(disk)))
    rows.append(("left to do", "", "", "", _seconds(left), "", ""))
    names = ("Done", "Operations", "Bytes moved", "Time", "Device memory", "Disk")
    rates = (
        f"Rates: {flops_per_second:.3g} operations and {bytes_per_second:.3g} bytes a second, "
        f"{origin}; about {sum(step.num_programs for step in found.steps)} programs to compile, "
        f"{found.compile_seconds:.2g} s each."
    )
    columns = (Column("Stage"), *(Column(name, "right") for name in names))
    return Table(columns, tuple(rows), (rates, *found.notes))


def _bytes(count: int | float) -> str:
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
