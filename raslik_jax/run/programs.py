"""A run's largest programs, compiled ahead of time and without weights.

XLA says of a compiled program how much memory it takes on this kind of device, and compiling it
says how long that takes. Nothing is run and no weight is allocated.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from raslik_jax.axes import Tree
from raslik_jax.data.batches import Batch
from raslik_jax.models import decode, decoder
from raslik_jax.run.stages import backbone, finetune
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import costs
from raslik_jax.train import loop, steps
from raslik_jax.train.objectives import OBJECTIVES


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      device_bytes: arguments, results and work space, by XLA's own analysis.
      seconds: it took to compile.
    """

    device_bytes: int
    seconds: float


class Shape(NamedTuple):
    """Rows of a batch, tokens and targets of a row."""

    batch: int
    length: int
    targets: int

    def tokens(self) -> Batch:
        """Returns a batch of this shape without values."""
        size = (self.batch, self.length)
        shapes: Any = (
            jax.ShapeDtypeStruct(size, jnp.int32),
            jax.ShapeDtypeStruct(size, jnp.bool_),
            self.targets,
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )
        return Batch(*shapes)


class Rates(NamedTuple):
    """What the default device does in a second.

    Attributes:
      operations: multiplications and additions of a matrix product.
      bytes_moved: bytes read and written by a copy.
      device: what it is.
    """

    operations: float
    bytes_moved: float
    device: str


def measure_rates(*, inputs: int, outputs: int, dtype: Any) -> Rates:
    """Returns the rates of the default device, measured within about a second.

    The product has the width of the model's own: a narrow one does not reach the rate of a wide.

    Args:
      inputs: of the kernel.
      outputs: of the kernel.
      dtype: of the kernel.
    """
    is_host = jax.default_backend() == "cpu"
    most = 2e9 if is_host else 2e12
    rows = int(min(8192, max(16, most // (2 * inputs * outputs))))
    product = jax.jit(jnp.matmul)
    arguments = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    vector = jnp.ones(2**24 if is_host else 2**28, jnp.float32)
    return Rates(
        operations=2.0 * rows * inputs * outputs / _shortest(product, *arguments),
        bytes_moved=2.0 * vector.nbytes / _shortest(jax.jit(lambda x: x + 1), vector),
        device=jax.devices()[0].device_kind,
    )


def _shortest(function: Any, *args: Any) -> float:
    """Returns the seconds of the fastest of some calls, compiled before."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _compile(step: Any, *args: Any, **static: Any) -> Program:
    start = time.monotonic()
    compiled = step.lower(*args, **static).compile()
    return Program(costs.analyzed_bytes(compiled), time.monotonic() - start)


def pretraining(workspace: Workspace, shape: Shape) -> Program:
    """Returns the program of one step of a backbone's training."""
    graphdef, _, base = decoder.abstract(workspace.model.decoder.config, None)
    algorithm = backbone.pretraining(workspace.config, decoder.bind(graphdef))
    return _compile_step(algorithm, base, {}, shape.tokens())


def finetuning(workspace: Workspace, shape: Shape) -> Program:
    """Returns the program of one step of fine-tuning."""
    model = workspace.model
    algorithm = finetune.finetuning(workspace, num_steps=1)
    return _compile_step(algorithm, model.initial, model.base, shape.tokens())


def unlearning(workspace: Workspace, shape: Shape, name: str) -> Program:
    """Returns the program of one step of an algorithm, on an adapter or on all weights."""
    model = workspace.model
    params: Tree = model.initial
    if workspace.config.unlearn.parameters == "all":
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.base
        )
    frozen = steps.Frozen(base=model.base, reference=model.initial)
    retain = shape.tokens() if OBJECTIVES[name].retain else None
    algorithm = workspace.unlearning(name, 1e-5)
    return _compile_step(algorithm, params, frozen, (shape.tokens(), retain))


def _compile_step(algorithm: loop.Algorithm, params: Tree, frozen: Tree, batch: Any) -> Program:
    state = jax.eval_shape(algorithm.init, params)
    return _compile(jax.jit(algorithm.step), state, frozen, batch)


def decoding(workspace: Workspace, *, rows: int, length: int) -> Program:
    """Returns the program that answers a batch of prompts greedily."""
    model = workspace.model
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return _compile(
        decode._generate_batch,
        model.initial,
        model.base,
        Shape(rows, length, length).tokens(),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.eval_shape(lambda: jax.random.key(0)),
        scalar,
        scalar,
        decoder=model.decoder,
        max_new_tokens=workspace.config.references.max_new_tokens,
        sampled=False,
        nucleus=False,
    )
