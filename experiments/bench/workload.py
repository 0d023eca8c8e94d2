"""What the benchmark of sketches runs: a model, a projection, and batches of planned lengths."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.messages import shown
from raslik_jax.models import decoder as decoders
from raslik_jax.models import quantize
from raslik_jax.models.lora import LORA_PRESETS, LoRAConfig
from raslik_jax.run import cost
from raslik_jax.settings import setting
from raslik_jax.sketch import gradients, hashing, loss, projections, theory
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.loss import SketchLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    model: str = setting("pythia-14m", "Shapes of the model, a preset's name.")
    lora: str = setting("", f"Adapter, of {', '.join(LORA_PRESETS)}; empty: the family's.")
    family: str = setting("binned", "Projection family.", family=PROJECTIONS)
    size: int = setting(65536, "K, coordinates of a sketch; at most P.", low=1)
    operand: Literal["float32", "bfloat16"] = setting(
        "float32", "dense_rademacher: dtype of its products."
    )
    lengths: str = setting("alpaca", "Tokens of a row: alpaca for the real ones, or one number.")
    fixed_targets: int = setting(
        0, "Targets of a row of one fixed length; 0 for half of it.", low=0
    )
    max_len: int = setting(512, "Where Alpaca's rows are cut, in tokens.", low=8)
    batch_tokens: int = setting(8192, "Tokens of a batch, at most.", low=8)
    micro_tokens: int = setting(0, "Tokens of a batch that are held at a time; 0 for all.", low=0)
    num_buckets: int = setting(12, "Padded lengths, at most.", low=1)
    quantize: Literal["none", "int8", "nf4"] = setting("none", "Format of the base's kernels.")
    remat: bool = setting(False, "Recompute each layer in the backward pass.")
    attention: Literal["auto", "xla", "cudnn"] = setting("auto", "Kind; auto: as JAX chooses.")
    loss: SketchLoss = setting("next_token", "What is sketched.")
    compare: Literal["none", "torch_loop"] = setting("none", "A peer to measure in the same run.")
    torch_examples: int = setting(
        48, "Rows of the peer's sample in each repetition, spread over all lengths.", low=1
    )
    breakdown: bool = setting(False, "Time the parts of a gradient too.")
    repeats: int = setting(3, "Repetitions; medians are reported.", low=1)
    clock: Literal["wall", "processor"] = setting(
        "wall",
        "What seconds are: processor counts this process's own, over all cores; for a CPU that is "
        "shared with other work, with the process pinned to one core (taskset -c 0).",
    )

    def problems(self) -> list[str]:
        found, presets = [*super().problems()], ", ".join(LORA_PRESETS)
        if self.lora and self.lora not in LORA_PRESETS:
            found.append(f"--lora must be one of {presets}, got {shown(self.lora)}")
        if self.lengths == "alpaca":
            return found
        if not self.lengths.isdecimal() or int(self.lengths) < 2:
            got = shown(self.lengths)
            found.append(f"--lengths must be alpaca or a number of 2 or more tokens, got {got}")
        elif self.fixed_targets >= int(self.lengths):
            found.append(f"--fixed_targets must be below --lengths, got {self.fixed_targets}")
        return found

    @property
    def micro(self) -> int | None:
        """Tokens held at a time; None for all."""
        return self.micro_tokens or None

    def micro_batch(self, batch: int, length: int) -> int:
        """Returns the rows of a batch that are held at a time."""
        return min(batch, max(self.micro_tokens // length, 1)) if self.micro_tokens else batch


class Subject(NamedTuple):
    """What is measured: a model and a projection of its gradients."""

    model: harness.Model
    adapter: LoRAConfig
    decoder: decoders.Decoder
    base: Any  # quantized, if so asked; the model's own is what the peer copies
    projection: projections.Projection

    @property
    def is_float32(self) -> bool:
        """Whether the products of the model are float32."""
        return self.model.dtype == jnp.float32


class Shape(NamedTuple):
    """One batch of one bucket, on the device, and how often the plan has its like."""

    length: int
    num_targets: int
    batches: int
    tokens_BL: jax.Array
    target_mask_BL: jax.Array

    @property
    def batch(self) -> int:
        return int(self.tokens_BL.shape[0])

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """What a loss reads."""
        return self.tokens_BL, self.target_mask_BL

    def rows_with_targets(self, count: int) -> list[int]:
        """Returns the first rows that have targets, at most `count`."""
        return np.flatnonzero(np.asarray(self.target_mask_BL).any(axis=1))[:count].tolist()


class Plan(NamedTuple):
    """The rows, and a batch of every shape."""

    length_N: np.ndarray
    target_N: np.ndarray
    shapes: tuple[Shape, ...]
    padding_waste: float

    @property
    def commonest(self) -> Shape:
        """The shape that most rows have."""
        return max(self.shapes, key=lambda shape: shape.batches * shape.batch)


class Compiled(NamedTuple):
    """The two variants of one shape."""

    shape: Shape
    gradients: Callable[[], Any]
    sketch: Callable[[], gradients.Sketches]
    seconds_compile: float
    memory_xla_bytes: int
    memory_traced_bytes: float


def make_subject(options: Options) -> Subject:
    """Returns the model of the options and its projection."""
    preset = LORA_PRESETS.get(options.lora)
    lora_config = preset or harness.preset_adapter(options)
    model_config = harness.MODEL_PRESETS[options.model]
    # Checked before the weights of a large model are drawn.
    _, lora_shapes, _ = decoders.abstract(model_config, lora_config, jnp.dtype("float32"))
    projection = projections.init_projection(
        options.seed,
        options.family,
        projections.count_params(lora_shapes),
        options.size,
        operand=options.operand,
    )
    model = harness.draw_model(options, lora_config)
    base = model.base
    if options.quantize != "none":
        pack = functools.partial(
            quantize.quantize_base, format=options.quantize, double_quant=False
        )
        base = jax.jit(pack)(base)
        if options.compare == "none":
            model = model._replace(base=base)  # frees the other
    attention: Any = None if options.attention == "auto" else options.attention
    decoder = decoders.bind(model.graphdef, remat=options.remat, attention=attention)
    return Subject(model, lora_config, decoder, base, projection)


def draw_lengths(options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and targets of every row."""
    if options.lengths == "alpaca":
        return load_alpaca_lengths(max_len=options.max_len)
    length = int(options.lengths)
    targets = options.fixed_targets or length // 2
    rows = options.batch_tokens // length
    return np.full(rows, length), np.full(rows, targets)


def make_plan(options: Options, vocab_size: int) -> Plan:
    """Returns the rows of the options, planned into batches, with one batch of each shape."""
    length_N, target_N = draw_lengths(options)
    plans = batches.plan_batches(
        length_N,
        target_N,
        ids=[f"{row:06d}" for row in range(len(length_N))],
        num_buckets=options.num_buckets,
        batch_tokens=options.batch_tokens,
    )
    random = np.random.default_rng(options.seed)
    shapes = []
    for length in sorted({plan.length for plan in plans}):
        bucket = [plan for plan in plans if plan.length == length]
        # A full batch with about the bucket's mean number of targets.
        counts = [int(target_N[plan.rows[plan.rows >= 0]].sum()) for plan in bucket]
        full = [i for i, plan in enumerate(bucket) if (plan.rows >= 0).all()] or [0]
        mean = sum(counts) / len(counts)
        _, chosen = min((abs(counts[i] - mean), i) for i in full)
        plan = bucket[chosen]
        row_L = np.arange(length)[None]
        length_B1, target_B1 = (
            np.where(plan.rows >= 0, x_N[plan.rows], 0)[:, None] for x_N in (length_N, target_N)
        )
        is_real_BL = row_L < length_B1
        tokens_BL = random.integers(1, vocab_size, is_real_BL.shape, dtype=np.int32)
        shapes.append(
            Shape(
                length=length,
                num_targets=plan.num_targets,
                batches=len(bucket),
                tokens_BL=jnp.asarray(np.where(is_real_BL, tokens_BL, 0)),
                target_mask_BL=jnp.asarray(is_real_BL & (row_L >= length_B1 - target_B1)),
            )
        )
    return Plan(length_N, target_N, tuple(shapes), batches.padding_waste(plans, length_N))


def compile_shape(options: Options, subject: Subject, shape: Shape) -> Compiled:
    """Returns both variants of one shape, compiled, with what XLA and the formula say of memory."""
    example_loss = functools.partial(
        loss.example_loss, subject.decoder, num_targets=shape.num_targets, loss=options.loss
    )

    def norms(lora: Any, base: Any, tokens_BL: Any, target_mask_BL: Any) -> Any:
        # No sketch: every gradient is read once, for its norm.
        def norm(tokens_L: Any, target_mask_L: Any) -> Any:
            grads = jax.grad(example_loss)(lora, base, tokens_L, target_mask_L)
            return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)])

        return gradients.in_micro_batches(
            jax.vmap(norm), tokens_BL, target_mask_BL, micro_tokens=options.micro
        )

    sketch_rows = functools.partial(
        gradients.sketch_gradients, example_loss, micro_tokens=options.micro
    )
    lora = subject.model.lora
    plain = lora, subject.base, *shape.rows
    arguments = subject.projection, (lora,), subject.base, *shape.rows
    start = time.perf_counter()
    alone = jax.jit(norms).lower(*plain).compile()
    traced = cost.trace(sketch_rows, *arguments)
    sketch = traced.lower().compile()
    seconds = time.perf_counter() - start
    return Compiled(
        shape=shape,
        gradients=functools.partial(alone, *plain),
        sketch=functools.partial(sketch, *arguments),
        seconds_compile=seconds,
        memory_xla_bytes=cost.analyzed_bytes(sketch),
        memory_traced_bytes=cost.count(traced.jaxpr).device_bytes,
    )


def signs_and_bins(spec: projections.ProjectionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sign and the bin of every coordinate, for a family that has bins."""
    keys = hashing.stream_keys(spec.seed, hashing.SIGN_STREAM)
    word_P = hashing.counter_hash(np.arange(spec.num_params, dtype=np.uint32), keys)
    return np.where(word_P >> np.uint32(31) == 1, -1.0, 1.0), theory.bin_of_coordinate(spec)
