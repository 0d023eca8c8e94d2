"""A run's largest programs, compiled ahead of time and without weights.

XLA says of a compiled program how much memory it takes on this kind of device, and compiling it
says how long that takes. Nothing is run and no weight is allocated.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from raslik_jax.axes import Tree
from raslik_jax.models import decode, decoder
from raslik_jax.run.stages import training
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import costs
from raslik_jax.train import finetune, steps
from raslik_jax.train.objectives import TokenBatch


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

    def tokens(self) -> TokenBatch:
        """Returns a batch of this shape without values."""
        size = (self.batch, self.length)
        shapes: Any = (
            jax.ShapeDtypeStruct(size, jnp.int32),
            jax.ShapeDtypeStruct(size, jnp.bool_),
        )
        return TokenBatch(*shapes)


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
    tx = finetune.adamw(1e-3, weight_decay=0.1, clip=1.0)
    step = finetune.training_step(
        training.backbone_losses(decoder.bind(graphdef)),
        tx,
        mean="examples",
        micro_batch=0,
        dropout_key=None,
    )
    state = jax.eval_shape(lambda params: finetune.start_fit(params, tx).state, base)
    return _compile(step, state, {}, shape.tokens(), num_targets=shape.targets)


def finetuning(workspace: Workspace, shape: Shape) -> Program:
    """Returns the program of one step of fine-tuning."""
    settings, model = workspace.config.finetune, workspace.model
    tx = finetune.adamw(
        settings.learning_rate,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
    )
    step = finetune.training_step(
        training.adapter_losses(model.decoder_for(remat=settings.remat)),
        tx,
        mean=settings.mean,
        micro_batch=settings.micro_batch_size,
        dropout_key=jax.random.key(0) if settings.lora_dropout else None,
    )
    state = jax.eval_shape(lambda params: finetune.start_fit(params, tx).state, model.initial)
    return _compile(step, state, model.base, shape.tokens(), num_targets=shape.targets)


def unlearning(workspace: Workspace, shape: Shape, name: str) -> Program:
    """Returns the program of one step of an algorithm, on an adapter or on all weights."""
    model = workspace.model
    algorithm, step = workspace.unlearning_step(name, 1e-5)
    params: Tree = model.initial
    if workspace.config.unlearn.parameters == "all":
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.base
        )
    return _compile(
        step,
        jax.eval_shape(algorithm.init, params),
        steps.Frozen(base=model.base, reference=model.initial),
        shape.tokens(),
        shape.tokens() if algorithm.reads_retain else None,
        forget_targets=shape.targets,
        retain_targets=shape.targets if algorithm.reads_retain else 0,
    )


def decoding(workspace: Workspace, *, rows: int, length: int) -> Program:
    """Returns the program that answers a batch of prompts greedily."""
    model = workspace.model
    keys: Callable[[], jax.Array] = lambda: jax.random.split(jax.random.key(0), rows)  # noqa: E731
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return _compile(
        decode._generate_batch,
        model.initial,
        model.base,
        *Shape(rows, length, 0).tokens(),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.eval_shape(keys),
        scalar,
        scalar,
        decoder=model.decoder,
        max_new_tokens=workspace.config.references.max_new_tokens,
        sampled=False,
        nucleus=False,
    )
