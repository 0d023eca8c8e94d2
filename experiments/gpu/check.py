"""Compiles the steps of real models for GPUs that need not be there, and holds them to bounds.

  make gpu-check                                   every model and step
  PYTHONPATH=.venv-gpu python experiments/gpu/check.py --models=olmo2-7b --steps=sketch_binned

Prints the memory that XLA gives every step, and a roofline of its compiled text: operations and
bytes, the best possible time at the GPU's rates, the share of that time which the useful matrix
products alone would take, and what takes longest. Exits with 1 where a step takes more memory or
time than `stated.json` says, keeps what it should not, or has lost a kernel.
"""

import collections
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu import roofline
from raslik_jax import files
from raslik_jax.cli import command
from raslik_jax.config import BackboneConfig, Config, FinetuneConfig, SketchConfig
from raslik_jax.index import search
from raslik_jax.index.format import DTYPES
from raslik_jax.models.lora import ATTENTION_TARGETS
from raslik_jax.report import tables
from raslik_jax.run import cost, gpus
from raslik_jax.run.programs import AbstractRun, Program, Shape
from raslik_jax.run.workspace import Workspace
from raslik_jax.settings import Settings, setting
from raslik_jax.train.objectives import OBJECTIVES

# Preset -> its name on the hub, and the layers that get an adapter of rank 8.
MODELS = {
    "pythia-14m": ("EleutherAI/pythia-14m", ("query_key_value",)),
    "pythia-2.8b": ("EleutherAI/pythia-2.8b", ("query_key_value",)),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", ATTENTION_TARGETS),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", ATTENTION_TARGETS),
}
_SIZE = 65_536
_GIB = 2**30


# "{gpu} {model} {step}" -> [GiB, useful share].
_STATED = pathlib.Path(__file__).with_name("stated.json")
# A step may take so much more memory, and reach so much less of the best possible time.
_SLACK, _SHARE_SLACK = 1.03, 0.02


class Step(NamedTuple):
    """A step to compile: its program of an abstract run, its batch, the kernels it must call."""

    program: Callable[[AbstractRun], Program]
    shape: Shape
    kernels: tuple[str, ...] = ()


class Compiled(NamedTuple):
    """A compiled step: its text, the memory and the time that XLA took, the useful operations."""

    text: str
    memory_bytes: float
    seconds: float
    useful: float
    params: int
    vocab: int


def _abstract_run(model: str, mesh: Any, **sketching: Any) -> AbstractRun:
    """Returns a run on a published model in bfloat16, by its shapes."""
    checkpoint, targets = MODELS[model]
    config = Config(
        name=model,
        backbone=BackboneConfig(checkpoint=checkpoint, dtype="bfloat16"),
        finetune=FinetuneConfig(lora_rank=8, lora_targets=targets),
        sketch=SketchConfig(size=_SIZE, **sketching),
    )
    nowhere = pathlib.Path(tempfile.gettempdir()) / "no-such-run"
    return AbstractRun(config, Workspace(nowhere, config), mesh=mesh)


def _sketch(family: str) -> Callable[[AbstractRun], Program]:
    def program(run: AbstractRun) -> Program:
        of_family = _abstract_run(run.config.name, run.mesh, projection=family)
        return of_family.sketching(64).programs[0]

    return program


def _unlearn(name: str) -> Callable[[AbstractRun], Program]:
    return lambda run: run.unlearning("raslik", name).programs[0]


def _score(dtype: str) -> Callable[[AbstractRun], Program]:
    """Returns the scoring of a block of an index for 24 queries."""

    def program(run: AbstractRun) -> Program:
        queries = search.Queries(np.eye(24, _SIZE), np.zeros(_SIZE))
        columns = search.to_columns(queries, aggregate="mean", dtype=dtype)
        width, stored = (_SIZE // 32, "uint32") if dtype == "sign" else (_SIZE, dtype)

        def score(columns: search.Columns, block: tuple[Any, Any, Any]) -> Any:
            return search.block_scores(*block, columns)

        def block(shape: Shape) -> Any:
            column = jax.ShapeDtypeStruct((shape.rows,), jnp.float32)
            return jax.ShapeDtypeStruct((shape.rows, width), jnp.dtype(stored)), column, column

        return run.program(f"score {dtype}", jax.jit(score), columns, shapes={}, batch=block)

    return program


_FORWARD, _BACKWARD, _SIGNS = "mha_forward", "mha_backward", "dense_rademacher"
_BOTH = (_FORWARD, _BACKWARD)
# Real sizes: 8,192 tokens of gradients, a step of 16 rows, pairs of 8 rows, 32 prompts.
STEPS = {
    "sketch_binned": Step(_sketch("binned"), Shape(64, 128, 64), _BOTH),
    "sketch_hashed": Step(_sketch("binned_hashed"), Shape(64, 128, 64), _BOTH),
    "sketch_dense": Step(_sketch("dense_rademacher"), Shape(64, 128, 64), (*_BOTH, _SIGNS)),
    "sketch_binned_512": Step(_sketch("binned"), Shape(16, 512, 256), _BOTH),
    "finetune": Step(lambda run: run.finetuning().programs[0], Shape(16, 256, 128), _BOTH),
    **{f"unlearn_{name}": Step(_unlearn(name), Shape(8, 256, 128), _BOTH) for name in OBJECTIVES},
    "decode": Step(lambda run: run.answering(32, 1).programs[0], Shape(32, 128, 128)),
    "likelihood": Step(lambda run: run.likelihoods(64), Shape(64, 128, 64), (_FORWARD,)),
    **{f"score_{dtype}": Step(_score(dtype), Shape(4096, 1, 1)) for dtype in DTYPES},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is compiled, and for what."""

    gpu: str = setting("h100-80gb", "GPU to compile for.", choices=tuple(gpus.GPUS))
    models: tuple[str, ...] = setting(tuple(MODELS)[1:], "Models.", choices=tuple(MODELS))
    steps: tuple[str, ...] = setting(tuple(STEPS), "Steps.", choices=tuple(STEPS))
    items: int = setting(5, "Items of each step that are listed.", low=0)
    texts: str = setting("", "Folder for the texts of the compiled programs.")
    markdown: bool = setting(False, "Print the table as Markdown.")
    state: bool = setting(False, "Write what the steps take into stated.json, as what they may.")


def compile_step(step: Step, run: AbstractRun) -> Compiled:
    """Compiles one step for the run's device."""
    program = step.program(run)
    traced = program.trace(step.shape)
    compiled, seconds = cost.compile_step(traced, run.platform)
    return Compiled(
        compiled.as_text() or "",
        cost.analyzed_bytes(compiled),
        seconds,
        program.cost_of(step.shape).operations,
        run.num_params,
        run.model.decoder.config.vocab_size,
    )


def _kernels_of(text: str) -> set[str]:
    """Returns the names of the Pallas kernels that a compiled program calls, assembled."""
    calls = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?op_name="([^"]*)"', text)
    return {call.split("/")[-2] for call in calls if call.endswith("/pallas_call")}


def problems_of(name: str, found: Compiled, gpu: gpus.Gpu) -> Iterator[str]:
    """Yields what is wrong with a compiled step, a sentence each."""
    step, module = STEPS[name], roofline.Program(found.text)
    if found.memory_bytes > gpu.memory_bytes:
        held = f"{gpu.memory_bytes / _GIB:.1f} GiB, takes {found.memory_bytes / _GIB:.1f}"
        yield f"must take at most {held}"
    shapes = list(module.shapes())
    rows = step.shape.rows
    # Gradients of a batch are made layer by layer, and flat once where they are projected. A
    # sketch of fewer parameters than its size is as wide as they are.
    if name.startswith("sketch") and found.params > _SIZE:
        sizes = collections.Counter(
            array for shape in shapes for array in roofline.arrays_of(shape)
        )
        count = sizes["f32", rows * found.params]
        if count > 1:
            yield f"must hold the gradients [B, P] once, holds them {count} times"
    # A step runs the head at targets alone; gradients and likelihoods read it in tiles as well.
    of_row = step.shape.targets if name.startswith(("sketch", "likelihood")) else step.shape.length
    is_logits = re.compile(rf"[\[,]{found.vocab}[\],]")
    logits = {
        size
        for shape in shapes
        for part in re.findall(r"\w+\[[\d,]+\]", shape)
        for _, size in roofline.arrays_of(part)
        if is_logits.search(part) and size >= rows * of_row * found.vocab
    }
    if logits:
        yield f"must not hold all logits, holds {max(logits):,} numbers of a vocabulary"
    for kernel in sorted({*step.kernels} - _kernels_of(found.text)):
        yield f"must call its kernel {kernel}, calls {sorted(_kernels_of(found.text))}"
    for kind in ("infeed", "outfeed", "send", "recv"):
        if re.search(rf" {kind}\(", found.text):
            yield f"must not exchange anything with the host while it runs, has {kind}"
    others = {dtype for dtype, share in module.loop_products() if share > 0.1 and dtype != "bf16"}
    if others and name != "decode" and not name.startswith("score"):
        yield f"large products of the layer loop must be of bf16, some are of {sorted(others)}"


def stated() -> dict[str, Any]:
    """Returns what every step took when it was last looked at, GiB and useful share, and jax."""
    return json.loads(_STATED.read_text())


def excess_of(gib: float, share: float, stated: list[float]) -> Iterator[str]:
    """Yields where a step takes more memory or time than was stated."""
    if gib > _SLACK * stated[0]:
        yield f"must take {stated[0]:.1f} GiB, takes {gib:.1f}"
    if share < stated[1] - _SHARE_SLACK:
        yield f"must be useful for {stated[1]:.0%} of its best time, is for {share:.0%}"


def _print_items(title: str, items: list[roofline.Item], count: int) -> None:
    """Prints what takes longest in a step."""
    print(f"{title}: {sum(item.seconds for item in items) * 1e3:.2f} ms at best", file=sys.stderr)
    for item in items[:count]:
        taken = f"{item.seconds * 1e3:8.2f} ms {item.operations / 1e12:8.2f} T"
        moved = f"{item.bytes_moved / 1e9:8.2f} GB x{item.trips:<4}"
        print(f"  {taken} {moved} {item.shape[:40]} {item.source[-70:]}", file=sys.stderr)


def run(options: Options) -> int:
    """Compiles, prints and checks; returns 1 where a step is not as it must be."""
    gpus.prepare()
    gpu, mesh = gpus.GPUS[options.gpu], gpus.mesh_of(options.gpu)
    may = stated()
    rows: list[Any] = []
    wrong: list[str] = []
    unstated: list[str] = []
    start = time.monotonic()
    for model in options.models:
        abstract = _abstract_run(model, mesh)
        rows.append(model)
        for name in options.steps:
            found, title = compile_step(STEPS[name], abstract), f"{options.gpu} {model} {name}"
            if options.texts:
                folder = pathlib.Path(options.texts)
                folder.mkdir(parents=True, exist_ok=True)
                files.write_text(folder / f"{model}-{name}.hlo", found.text)
            items = roofline.Program(found.text).items(
                flops_per_second=gpu.flops_per_second, bytes_per_second=gpu.bytes_per_second
            )
            _print_items(title, items, options.items)
            seconds, moved = sum(i.seconds for i in items), sum(i.bytes_moved for i in items)
            share = found.useful / gpu.flops_per_second / seconds
            gib = found.memory_bytes / _GIB
            operations = sum(item.operations for item in items)
            rows.append(
                (
                    *(name, f"{gib:.1f}", f"{operations / 1e12:.2f}", f"{moved / 1e9:.1f}"),
                    *(f"{seconds * 1e3:.2f}", f"{share:.0%}", f"{found.seconds:.0f}"),
                )
            )
            problems = list(problems_of(name, found, gpu))
            if options.state:
                may |= {title: [round(gib, 2), round(share, 3)], "jax": jax.__version__}
                files.write_text(_STATED, json.dumps(may, indent=1, sort_keys=True) + "\n")
            elif title in may and may["jax"] == jax.__version__:
                problems += excess_of(gib, share, may[title])
            else:
                unstated.append(title)
            wrong += [f"{model} {name} {problem}" for problem in problems]
    heads = ("GiB", "T operations", "GB moved", "ms at best", "useful", "s to compile")
    columns = (tables.Column("Step"), *(tables.Column(head, "right") for head in heads))
    notes: tuple[str, ...] = (
        f"{gpu.title} at {gpu.flops_per_second:.3g} operations and {gpu.bytes_per_second:.3g} "
        f"bytes a second; jax {jax.__version__}; {time.monotonic() - start:.0f} s.",
        "At best: every instruction takes the longer of its products and its bytes. Useful: the "
        "share of that time that the step's products take, counted once.",
    )
    if unstated:
        compared = f"{len(unstated)} steps are not compared with stated.json, of jax {may['jax']}"
        notes += (f"{compared}: look at them, then give --state.",)
    render = tables.render_markdown if options.markdown else tables.render_terminal
    print(render(tables.Table(columns, tuple(rows), notes)))
    print("\n".join(wrong) or "all steps are within their bounds")
    return int(bool(wrong))


if __name__ == "__main__":
    command.start(run, Options())
