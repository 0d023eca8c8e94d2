"""The steps that are compiled for GPUs: models, programs and batches of real sizes."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.config import (
    BackboneConfig,
    Config,
    FinetuneConfig,
    SketchConfig,
    UnlearnConfig,
)
from raslik_jax.index import search
from raslik_jax.index.format import DTYPES
from raslik_jax.models.lora import ATTENTION_TARGETS
from raslik_jax.run import forecast, gpus
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import AbstractRun, Program, Shape
from raslik_jax.run.stages import finetune, generate, sketch, unlearn
from raslik_jax.train.objectives import OBJECTIVES

# Coordinates of a sketch.
SIZE = 65_536


class Step(NamedTuple):
    """A step to compile: its program of an abstract run, a device's batch, and what it may do.

    Attributes:
      kernels: Pallas kernels that it must call.
      gradients: how often it may hold a gradient of every row.
      is_tiled: whether its head runs a tile at a time; else it may hold the logits of targets.
      sums: whether devices add up gradients; else they send nothing but weights.
    """

    program: Callable[[AbstractRun], Program]
    shape: Shape
    kernels: tuple[str, ...] = ()
    gradients: int = 0
    is_tiled: bool = False
    sums: bool = False

    def shape_for(self, model: "Model") -> Shape:
        """Returns the shape of a device's batch for a model."""
        return self.shape._replace(rows=max(self.shape.rows // model.fewer_rows, 1))


class Model(NamedTuple):
    """A published model, the steps that are compiled for it, and for how many devices.

    Attributes:
      targets: linear layers that get an adapter of rank 8.
      layout: of `--mesh.base`.
      remat: whether training keeps the input of a layer alone.
      fewer_rows: what a step's rows are divided by.
    """

    checkpoint: str
    targets: tuple[str, ...] = ATTENTION_TARGETS
    devices: int = 1
    layout: str = "replicated"
    remat: bool = False
    fewer_rows: int = 1
    steps: tuple[str, ...] = ()


class Compiled(NamedTuple):
    """A compiled step, of one device: its text, and what XLA says of it.

    Attributes:
      params: P, of one adapter.
      base_bytes: the model's weights, those of all devices together.
    """

    text: str
    memory_bytes: float
    seconds: float
    params: int
    vocab: int
    base_bytes: float

    def record(self) -> dict[str, float]:
        """Returns what a device takes, as `stated.json` keeps it: GiB."""
        return {"gib": float(f"{self.memory_bytes / 2**30:.4g}")}


# Preset -> what is compiled for it; no steps: all that one device runs.
_MESH_STEPS = ("sketch_binned", "finetune", "unlearn_ga_klr", "decode")
_EIGHT: dict[str, Any] = {"devices": 8, "layout": "sharded", "steps": _MESH_STEPS}
MODELS = {
    "pythia-14m": Model("EleutherAI/pythia-14m", ("query_key_value",)),
    "pythia-2.8b": Model("EleutherAI/pythia-2.8b", ("query_key_value",)),
    "olmo2-7b": Model("allenai/OLMo-2-1124-7B"),
    "llama-3.1-8b": Model("meta-llama/Llama-3.1-8B"),
    "olmo2-7b-mesh": Model("allenai/OLMo-2-1124-7B", devices=8, steps=_MESH_STEPS[:3]),
    "olmo2-13b": Model("allenai/OLMo-2-1124-13B", **_EIGHT),
    "olmo2-32b": Model("allenai/OLMo-2-0325-32B", **_EIGHT, remat=True, fewer_rows=2),
    "llama-3.1-70b": Model("meta-llama/Llama-3.1-70B", **_EIGHT, remat=True, fewer_rows=4),
}


def abstract_run(model: str, mesh: jax.sharding.Mesh, **sketching: Any) -> AbstractRun:
    """Returns a run on a model in bfloat16, by its shapes, on a mesh of its number of devices."""
    found = MODELS[model]
    config = Config(
        name=model,
        backbone=BackboneConfig(checkpoint=found.checkpoint, dtype="bfloat16"),
        finetune=FinetuneConfig(lora_rank=8, lora_targets=found.targets, remat=found.remat),
        sketch=SketchConfig(size=SIZE, **sketching),
        unlearn=UnlearnConfig(remat=found.remat),
    )
    nowhere = pathlib.Path(tempfile.gettempdir()) / "no-such-run"
    return forecast.abstract_run(config, nowhere, mesh=mesh, layout=found.layout)


def _sketch(family: str) -> Callable[[AbstractRun], Program]:
    def program(run: AbstractRun) -> Program:
        assert run.mesh is not None
        of_family = abstract_run(run.config.name, run.mesh, projection=family)
        return sketch.count_sketches(of_family, 64).programs[0]

    return program


def _unlearn(name: str) -> Callable[[AbstractRun], Program]:
    return lambda run: unlearn.count_unlearning(run, Variant("raslik", name)).programs[0]


def _score(dtype: str) -> Callable[[AbstractRun], Program]:
    """Returns the scoring of a block of an index for 24 queries."""

    def program(run: AbstractRun) -> Program:
        queries = search.Queries(np.eye(24, SIZE), np.zeros(SIZE))
        columns = search.to_columns(queries, aggregate="mean", dtype=dtype)

        def score(columns: search.Columns, block: tuple[Any, Any]) -> Any:
            return search.block_scores(*block, columns)

        def block(shape: Shape) -> Any:
            column = jax.ShapeDtypeStruct((shape.rows,), jnp.float32)
            return jax.ShapeDtypeStruct((shape.rows, SIZE), jnp.dtype(dtype)), column

        return run.program(f"score {dtype}", jax.jit(score), columns, shapes={}, batch=block)

    return program


_FORWARD, _BACKWARD, _SIGNS = "mha_forward", "mha_backward", "dense_rademacher"
_BOTH = (_FORWARD, _BACKWARD)
_BINNED = (*_BOTH, "binned_transpose", "binned_sums")
_OF_GRADIENTS: dict[str, Any] = {"gradients": 1, "is_tiled": True}
_TWICE = _OF_GRADIENTS | {"gradients": 2}  # also transposed
# Real sizes: 8,192 tokens of gradients, a step of 16 rows, pairs of 8 rows, 32 prompts.
STEPS = {
    "sketch_binned": Step(_sketch("binned"), Shape(64, 128, 64), _BINNED, **_TWICE),
    "sketch_dense": Step(
        _sketch("dense_rademacher"), Shape(64, 128, 64), (*_BOTH, _SIGNS), **_OF_GRADIENTS
    ),
    "sketch_binned_512": Step(_sketch("binned"), Shape(16, 512, 256), _BINNED, **_TWICE),
    "finetune": Step(
        lambda run: finetune.count_finetuning(run).programs[0],
        Shape(16, 256, 128),
        _BOTH,
        sums=True,
    ),
    **{
        f"unlearn_{name}": Step(_unlearn(name), Shape(8, 256, 128), _BOTH, sums=True)
        for name in OBJECTIVES
    },
    "decode": Step(
        lambda run: generate.count_answers(run, 32, 1).programs[0],
        Shape(32, 128, 128),
    ),
    "likelihood": Step(
        lambda run: generate.count_likelihoods(run, 64),
        Shape(64, 128, 64),
        (_FORWARD,),
        is_tiled=True,
    ),
    **{f"score_{dtype}": Step(_score(dtype), Shape(4096, 1, 1)) for dtype in DTYPES},
}


def steps_of(model: str) -> tuple[str, ...]:
    """Returns the steps that are compiled for a model."""
    return MODELS[model].steps or tuple(STEPS)


def compile_step(model: str, name: str, gpu: str) -> Compiled:
    """Compiles one step of a model for so many GPUs of a kind as it takes."""
    step, found = STEPS[name], MODELS[model]
    run = abstract_run(model, gpus.mesh_of(gpus.GPUS[gpu], data=found.devices))
    program, shape = step.program(run), step.shape_for(found)
    given = shape._replace(rows=shape.rows * found.devices)
    return Compiled(
        *program.compile(given),
        run.num_params,
        run.model.decoder.config.vocab_size,
        run.base_bytes,
    )
