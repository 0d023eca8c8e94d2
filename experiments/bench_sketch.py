"""Measures how fast per-example gradients are made and sketched, stage by stage, in one run.

  python experiments/bench_sketch.py --compare=torch_loop
  python experiments/bench_sketch.py --model=smollm2-135m --lengths=128 --json
  python experiments/bench_sketch.py --model=olmo2-7b --batch_tokens=8192 --remat   # an H200

The model has the preset's shapes and random weights, made on the device. Lengths are those of
Alpaca's 52,002 rows (a histogram comes with the package), planned into length buckets as the
pipeline plans them; one batch of every bucket is timed and counted as often as the plan has it. All
variants of one repetition run in turn, so that other load on the machine falls on all of them. The
result is checked against a plain loop before anything is timed. Progress goes to stderr.

With --json each line of stdout is one object. Its key "stage" says which:

setup: model, lora, family, size, num_params, dtype, quantize, remat, device, cpus, jax, seed,
  repeats, clock.
plan: lengths, rows, shapes (batches of one shape), batches, batch_tokens, micro_tokens (0: the
  whole batch), mean_tokens and mean_targets (per row), padding_waste (share of all computed tokens
  that are pads, dummy rows included).
check: worst_cosine (lowest cosine between our sketch and that of a plain loop over examples, with
  all logits, projected in NumPy on the host), examples.
shape (one for each bucket): length, batch, num_targets (rows of targets per example, static),
  batches (of this shape in the plan), seconds_gradients, seconds_sketch (a batch's gradients
  alone, and with the sketch; medians), seconds_compile (both), memory_xla_bytes (peak by XLA's
  analysis of the sketch), memory_bound_bytes (the formula of sketch/costs.py).
matmul: tflops (of the products of one layer and the head, with the rows of the commonest shape, in
  the base's dtype), seconds, shapes (a list of [rows, inputs, outputs, tflops]).
projection: seconds (of projecting one batch of gradients that lie in memory), batch, bytes_read,
  gb_per_s (bytes of float32 gradients read per second), copy_gb_per_s (a copy of the same array,
  bytes read and written), share_of_copy, tflops (dense_rademacher: 2 P K an example; else null).
breakdown (with --breakdown; one batch of the commonest shape, seconds): length, forward (hidden
  states), layers (gradients through the layers alone), head (values and slopes of the targets
  alone), gradients, sketch.
torch_loop (with --compare=torch_loop): examples_per_s, tokens_per_s, examples, threads, device,
  worst_cosine (between its sketches and ours).
summary: model, family, examples_per_s, tokens_per_s (real tokens: pads do not count),
  seconds_corpus (all rows, by the plan), tflops and share_of_matmul (4 operations per weight and
  computed token, pads included, of the layers, and per weight and target of the head),
  useful_tflops (pads excluded), matmul_tflops, gradients_examples_per_s, sketch_overhead (seconds
  with the sketch over seconds without, less 1), projection_share (seconds of the projection stage
  over those of the gradients of the same shape), padding_waste, seconds_compile, peak_bytes (of the
  device's allocator; on a CPU the resident peak of the process, torch included), memory_xla_bytes
  and memory_bound_bytes (of the largest shape), memory_within_bound, speedup_vs_torch_loop and
  torch_loop_examples_per_s (null without it), worst_cosine.

Attention, norms and the adapters are not counted as operations. Tokenizing and writing an index are
not timed: gradients and sketches only.
"""

import functools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

MODELS = (
    "pythia-14m", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b", "pythia-1.4b",
    "pythia-2.8b", "pythia-6.9b", "pythia-12b", "olmo2-1b", "olmo2-7b", "olmo2-13b", "olmo2-32b",
    "smollm2-135m", "smollm2-360m", "smollm2-1.7b", "tinyllama-1.1b", "llama-2-7b", "llama-2-13b",
    "llama-3.1-8b", "llama-3.2-1b",
)  # fmt: skip
LORAS = ("olmo2", "pythia", "pythia-qkv", "llama")

_MODEL = flags.DEFINE_enum("model", "pythia-14m", MODELS, "Shapes of the model.")
_LORA = flags.DEFINE_enum(
    "lora", None, LORAS, "Preset of the adapter (default: that of the model's family)."
)
_FAMILY = flags.DEFINE_enum(
    "family", "binned", ["binned", "binned_hashed", "dense_rademacher"], "Projection family."
)
_SIZE = flags.DEFINE_integer("size", 65536, "K, coordinates of a sketch; at most P.", 1)
_OPERAND = flags.DEFINE_enum(
    "operand", "float32", ["float32", "bfloat16"], "dense_rademacher: dtype of its products."
)
_LENGTHS = flags.DEFINE_string(
    "lengths", "alpaca", "Tokens of a row: alpaca for the real ones, or one number for all."
)
_FIXED_TARGETS = flags.DEFINE_integer(
    "fixed_targets", None, "Targets of a row of one fixed length (default: half of it).", 1
)
_MAX_LEN = flags.DEFINE_integer("max_len", 512, "Where Alpaca's rows are cut, in tokens.", 8)
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "Tokens of a batch, at most.", 8)
_MICRO_TOKENS = flags.DEFINE_integer(
    "micro_tokens", 0, "Tokens of a batch that are held at a time; 0 for all.", 0
)
_NUM_BUCKETS = flags.DEFINE_integer("num_buckets", 12, "Padded lengths, at most.", 1)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Of the base (default: float32 on a CPU)."
)
_QUANTIZE = flags.DEFINE_enum("quantize", "none", ["none", "int8", "nf4"], "Of the base's kernels.")
_REMAT = flags.DEFINE_boolean("remat", False, "Recompute each layer in the backward pass.")
_ATTENTION = flags.DEFINE_enum(
    "attention", None, ["xla", "cudnn"], "Kind of attention (default: as JAX chooses)."
)
_LOSS = flags.DEFINE_enum("loss", "next_token", ["next_token", "unshifted"], "What is sketched.")
_COMPARE = flags.DEFINE_enum(
    "compare", "none", ["none", "torch_loop"], "A peer to measure in the same run."
)
_TORCH_EXAMPLES = flags.DEFINE_integer(
    "torch_examples",
    48,
    "Rows of the peer's sample in each repetition, spread over all lengths.",
    1,
)
_BREAKDOWN = flags.DEFINE_boolean("breakdown", False, "Time the parts of a gradient too.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Repetitions; medians are reported.", 1)
_CLOCK = flags.DEFINE_enum(
    "clock", "wall", ["wall", "processor"],
    "What seconds are: processor counts this process's own, over all cores; for a CPU that is "
    "shared with other work, with the process pinned to one core (taskset -c 0).",
)  # fmt: skip
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the tokens and the projection.", 0)
_JSON = flags.DEFINE_boolean("json", False, "Print JSON lines, no table.")


class Model(NamedTuple):
    """A model of a preset's shapes with random weights."""

    decoder: Any
    lora: Any
    base: Any
    plain_base: Any  # before quantization, for the peer to copy; else the base
    lora_config: Any
    projection: Any


class Shape(NamedTuple):
    """One batch of one bucket, on the device, and how often the plan has its like."""

    length: int
    num_targets: int
    batches: int
    tokens_BL: Any
    target_mask_BL: Any

    @property
    def batch(self) -> int:
        return int(self.tokens_BL.shape[0])


class Plan(NamedTuple):
    """The rows, and a batch of every shape."""

    length_N: Any
    target_N: Any
    shapes: tuple[Shape, ...]
    padding_waste: float

    @property
    def commonest(self) -> Shape:
        """The shape that most rows have."""
        return max(self.shapes, key=lambda shape: shape.batches * shape.batch)


class Timing(NamedTuple):
    """Seconds of every repetition, by name."""

    seconds: dict[str, list[float]]

    def add(self, name: str, function: Callable[[], Any], *, calls: int = 1) -> None:
        """Calls a function so often, waits for its arrays, and notes the time of one call."""
        import jax

        start = now()
        jax.block_until_ready([function() for _ in range(calls)][-1])
        self.seconds.setdefault(name, []).append((now() - start) / calls)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def now() -> float:
    """Returns the seconds of the clock that is asked for."""
    return time.perf_counter() if _CLOCK.value == "wall" else time.process_time()


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


_STARTED = time.perf_counter()


def make_model() -> Model:
    """Returns the model of the flags; its weights are drawn on the device."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.models import decoder as decoders
    from raslik_jax.models import quantize
    from raslik_jax.models.lora import LORA_PRESETS
    from raslik_jax.models.presets import MODEL_PRESETS
    from raslik_jax.sketch import projections

    config = MODEL_PRESETS[_MODEL.value]
    families = {"gpt_neox": "pythia", "olmo2": "olmo2", "llama": "llama"}
    lora_config = LORA_PRESETS[_LORA.value or families[config.model_type]]
    dtype = jnp.dtype(_DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    graphdef, lora_shapes, _ = decoders.abstract(config, lora_config, dtype)
    # Checked before the weights of a large model are drawn.
    projection = projections.init_projection(
        _SEED.value,
        _FAMILY.value,
        projections.count_params(lora_shapes),
        _SIZE.value,
        operand=_OPERAND.value,
    )

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, Any]:
        _, lora, base = decoders.create(config, lora_config, key=key, dtype=dtype)
        leaves, structure = jax.tree.flatten(lora)
        keys = jax.random.split(key, len(leaves))
        # B = 0 would leave half of the gradient zero.
        leaves = [
            leaf + 0.02 * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves), base

    lora, plain_base = draw(jax.random.key(_SEED.value))
    base = plain_base
    if _QUANTIZE.value != "none":
        pack = functools.partial(quantize.quantize_base, format=_QUANTIZE.value, double_quant=False)
        base = jax.jit(pack)(plain_base)
    if _COMPARE.value == "none":
        plain_base = base
    decoder = decoders.bind(graphdef, remat=_REMAT.value, attention=_ATTENTION.value)
    return Model(decoder, lora, base, plain_base, lora_config, projection)


def make_plan(vocab_size: int) -> Plan:
    """Returns the rows of the flags, planned into batches, with one batch of each shape."""
    import jax.numpy as jnp
    import numpy as np

    from raslik_jax.data import batches
    from raslik_jax.data.alpaca_lengths import load_alpaca_lengths

    if _LENGTHS.value == "alpaca":
        length_N, target_N = load_alpaca_lengths(max_len=_MAX_LEN.value)
    else:
        if not _LENGTHS.value.isdecimal() or int(_LENGTHS.value) < 2:
            raise ValueError(
                f"--lengths is alpaca or a number of tokens from 2 up, got {_LENGTHS.value!r}"
            )
        length = int(_LENGTHS.value)
        targets = _FIXED_TARGETS.value or length // 2
        if targets >= length:
            raise ValueError(f"--fixed_targets={targets} leaves no prompt in {length} tokens")
        rows = _BATCH_TOKENS.value // length
        length_N, target_N = np.full(rows, length), np.full(rows, targets)
    plans = batches.plan_batches(
        length_N,
        target_N,
        ids=[f"{row:06d}" for row in range(len(length_N))],
        num_buckets=_NUM_BUCKETS.value,
        batch_tokens=_BATCH_TOKENS.value,
    )
    random = np.random.default_rng(_SEED.value)
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


def is_float32(model: Model) -> bool:
    """Whether the products of the model are float32."""
    return bool(model.base["embed"]["embedding"].dtype == "float32")


def rows_with_targets(shape: Shape, count: int) -> list[int]:
    """Returns the first rows of a batch that have targets, at most `count`."""
    import numpy as np

    return np.flatnonzero(np.asarray(shape.target_mask_BL).any(axis=1))[:count].tolist()


def example_loss(model: Model, num_targets: int) -> Callable:
    """Returns the loss of one example."""
    from raslik_jax.sketch import loss

    kind: Any = _LOSS.value
    return functools.partial(loss.example_loss, model.decoder, num_targets=num_targets, loss=kind)


def sketch_batch(model: Model, num_targets: int) -> Callable:
    """Returns the function under test: gradients and sketches of a batch."""
    from raslik_jax.sketch import gradients

    return functools.partial(
        gradients.sketch_gradients,
        example_loss(model, num_targets),
        micro_tokens=_MICRO_TOKENS.value or None,
    )


def gradients_only(model: Model, num_targets: int) -> Callable:
    """Returns the same without the sketch: every gradient is read once, for its norm."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.sketch import gradients

    def norm(lora: Any, base: Any, tokens_L: Any, target_mask_L: Any) -> Any:
        grads = jax.grad(example_loss(model, num_targets))(lora, base, tokens_L, target_mask_L)
        return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)])

    def norms(lora: Any, base: Any, tokens_BL: Any, target_mask_BL: Any) -> Any:
        return gradients.in_micro_batches(
            jax.vmap(functools.partial(norm, lora, base)),
            tokens_BL,
            target_mask_BL,
            micro_tokens=_MICRO_TOKENS.value or None,
        )

    return norms


def plain_sketches(model: Model, shape: Shape, examples: Sequence[int]) -> Any:
    """Returns unit sketches of some rows the slow way: a loop, all logits, NumPy's projection."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from raslik_jax.sketch import hashing, loss, projections, theory

    kind: Any = _LOSS.value

    def plain_loss(lora: Any, base: Any, tokens_L: Any, target_mask_L: Any) -> Any:
        target = loss.target_logits(
            model.decoder,
            lora,
            base,
            tokens_L,
            target_mask_L,
            num_targets=shape.length,
            loss=kind,
        )
        return loss.mean_over_targets(loss.token_nll(target), target.is_counted_T)

    gradient = jax.jit(lambda *row: projections.flatten_gradients(jax.grad(plain_loss)(*row)))
    spec = model.projection.spec
    rows = []
    for row in examples:
        flat_P = np.asarray(
            gradient(model.lora, model.base, shape.tokens_BL[row], shape.target_mask_BL[row])
        )
        if spec.family in theory.BINNED_FAMILIES:
            keys = hashing.stream_keys(spec.seed, hashing.SIGN_STREAM)
            word_P = hashing.counter_hash(np.arange(spec.num_params, dtype=np.uint32), keys)
            signed_P = np.where(word_P >> np.uint32(31) == 1, -1.0, 1.0) * flat_P
            sketch_K = np.bincount(theory.bin_of_coordinate(spec), signed_P, spec.size)
        else:
            sketch_K = np.asarray(projections.project(model.projection, jnp.asarray(flat_P)))
        rows.append(sketch_K / np.linalg.norm(sketch_K))
    return np.stack(rows)


def check(model: Model, shape: Shape, unit_BK: Any) -> dict[str, Any]:
    """Returns the agreement with the plain loop, or raises where there is none."""
    import numpy as np

    examples = rows_with_targets(shape, 2)
    ours = np.asarray(unit_BK, np.float64)[examples]
    worst = float(np.sum(ours * plain_sketches(model, shape, examples), axis=1).min())
    # Rounding: a bfloat16 base adds in another order, and attention may be another kernel.
    wanted = 0.99999 if is_float32(model) else 0.99
    if not worst >= wanted:
        raise ValueError(
            f"our sketch and that of a plain loop have cosine {worst:.6f}, and {wanted} was "
            f"wanted: nothing was timed"
        )
    return {"stage": "check", "worst_cosine": worst, "examples": len(examples)}


class Compiled(NamedTuple):
    """The two variants of one shape."""

    shape: Shape
    gradients: Callable[[], Any]
    sketch: Callable[[], Any]
    seconds_compile: float
    memory_xla_bytes: int
    memory_bound_bytes: int


def compile_shape(model: Model, shape: Shape) -> Compiled:
    """Returns both variants of one shape, compiled, with what XLA and the formula say of memory."""
    import jax

    from raslik_jax.sketch import costs

    weights = model.lora, model.base
    rows = shape.tokens_BL, shape.target_mask_BL
    start = time.perf_counter()
    gradients = jax.jit(gradients_only(model, shape.num_targets)).lower(*weights, *rows).compile()
    arguments = (model.projection, (model.lora,), model.base, *rows)
    sketch = jax.jit(sketch_batch(model, shape.num_targets)).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    micro_batch = shape.batch
    if _MICRO_TOKENS.value:
        micro_batch = min(shape.batch, max(_MICRO_TOKENS.value // shape.length, 1))
    bound = costs.memory_bound(
        model.base,
        (model.lora,),
        model.projection.table,
        num_heads=model.decoder.config.num_attention_heads,
        batch=shape.batch,
        micro_batch=micro_batch,
        length=shape.length,
        num_targets=shape.num_targets,
        size=model.projection.spec.size,
        remat=_REMAT.value,
    )
    return Compiled(
        shape=shape,
        gradients=functools.partial(gradients, *weights, *rows),
        sketch=functools.partial(sketch, *arguments),
        seconds_compile=seconds,
        memory_xla_bytes=costs.analyzed_bytes(sketch),
        memory_bound_bytes=bound.total,
    )


def matmul_functions(model: Model, shape: Shape) -> dict[str, Callable]:
    """Returns a product of each shape in one layer and the head, in the base's dtype."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.sketch import costs

    shapes = costs.linear_shapes(model.base)
    dtype = model.base["embed"]["embedding"].dtype
    multiply = jax.jit(jnp.matmul)
    rows = {pair: shape.batch * shape.length for pair in shapes.layer}
    rows[shapes.head] = int(shape.target_mask_BL.sum())
    return {
        f"matmul {count} {pair[0]} {pair[1]}": functools.partial(
            multiply, jnp.ones((count, pair[0]), dtype), jnp.ones(pair, dtype)
        )
        for pair, count in rows.items()
    }


def projection_functions(model: Model, batch: int) -> dict[str, Callable]:
    """Returns the projection of gradients that lie in memory, and a copy of them."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.sketch import projections

    gradients_BP = jax.jit(
        lambda: jax.random.normal(jax.random.key(1), (batch, model.projection.spec.num_params))
    )()

    @jax.jit
    def run(projection: Any, gradients_BP: Any) -> Any:
        return jax.vmap(functools.partial(projections.project, projection))(gradients_BP)

    return {
        "projection": functools.partial(run, model.projection, gradients_BP),
        "copy": functools.partial(jax.jit(jnp.copy), gradients_BP),
    }


def breakdown_functions(model: Model, shape: Shape) -> dict[str, Callable]:
    """Returns parts of a gradient: hidden states, the layers' gradients, the head."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.sketch import head

    def hidden(lora: Any, base: Any, tokens_L: Any) -> Any:
        return model.decoder.hidden(lora, base, tokens_L)

    def forward(lora: Any, base: Any, tokens_BL: Any) -> Any:
        return jax.vmap(functools.partial(hidden, lora, base))(tokens_BL)

    def layers(lora: Any, base: Any, tokens_BL: Any, slope_BLE: Any) -> Any:
        def sums(tokens_L: Any, slope_LE: Any) -> Any:
            _, pull = jax.vjp(lambda lora: hidden(lora, base, tokens_L), lora)
            return [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(pull(slope_LE))]

        return jax.vmap(sums)(tokens_BL, slope_BLE)

    def slopes(base: Any, hidden_BLE: Any, tokens_BL: Any, target_mask_BL: Any) -> Any:
        table, axis = (
            (base["head"]["kernel"], 1) if "head" in base else (base["embed"]["embedding"], 0)
        )

        def total(hidden_LE: Any, tokens_L: Any, mask_L: Any) -> Any:
            return jnp.sum(head.target_nll(table, hidden_LE, tokens_L, mask_L, axis))

        return jax.vmap(jax.grad(total))(hidden_BLE, tokens_BL, target_mask_BL)

    hidden_BLE = jax.jit(forward)(model.lora, model.base, shape.tokens_BL)
    return {
        "forward": functools.partial(jax.jit(forward), model.lora, model.base, shape.tokens_BL),
        "layers": functools.partial(
            jax.jit(layers), model.lora, model.base, shape.tokens_BL, hidden_BLE
        ),
        "head": functools.partial(
            jax.jit(slopes), model.base, hidden_BLE, shape.tokens_BL, shape.target_mask_BL
        ),
    }


class TorchLoop(NamedTuple):
    """The peer and the rows that it takes: unpadded, spread evenly over the sorted lengths."""

    peer: Callable
    rows: tuple[tuple[Any, Any], ...]
    tokens: int
    worst_cosine: float
    device: str


def make_torch_loop(model: Model, plan: Plan, first: Compiled) -> TorchLoop:
    """Returns the peer, once its sketches agree with ours."""
    import jax
    import numpy as np
    import torch
    import torch_peer

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    peer = torch_peer.make_peer(
        model.decoder.config,
        model.lora_config,
        model.lora,
        model.plain_base,
        model.projection.spec,
        loss=_LOSS.value,
        device=device,
    )
    ours = np.asarray(first.sketch().unit_BK)
    cosines = []
    for row in rows_with_targets(first.shape, 2):
        mask_L = np.asarray(first.shape.target_mask_BL[row])
        length = int(np.flatnonzero(mask_L)[-1]) + 1
        tokens_L = np.asarray(first.shape.tokens_BL[row])[:length]
        cosines.append(float(peer(tokens_L, mask_L[:length]) @ ours[row]))
    # A quantized base is not copied, and a bfloat16 one rounds at other places.
    wanted = 0.9999 if _QUANTIZE.value == "none" and is_float32(model) else 0.9
    if not min(cosines) >= wanted:
        raise ValueError(
            f"the torch loop's sketch and ours have cosine {min(cosines):.6f}, and {wanted} was "
            f"wanted: nothing was compared"
        )
    random = np.random.default_rng(_SEED.value)
    order = np.argsort(plan.length_N, kind="stable")
    count = min(_TORCH_EXAMPLES.value, len(order))
    # The middle of each of `count` equal slices of the sorted rows, in a mixed order.
    picks = random.permutation(order[(2 * np.arange(count) + 1) * len(order) // (2 * count)])
    rows = []
    for pick in picks:
        length, targets = int(plan.length_N[pick]), int(plan.target_N[pick])
        tokens_L = random.integers(1, model.decoder.config.vocab_size, length, dtype=np.int32)
        rows.append((tokens_L, np.arange(length) >= length - targets))
    return TorchLoop(peer, tuple(rows), int(plan.length_N[picks].sum()), min(cosines), device)


def measure(
    model: Model, plan: Plan, compiled: Sequence[Compiled], loop: TorchLoop | None
) -> tuple[Timing, int]:
    """Returns all times, taken in turn in each repetition, and the batch that was projected."""
    import jax

    common = plan.commonest
    batch = common.batch
    if _MICRO_TOKENS.value:
        batch = min(batch, max(_MICRO_TOKENS.value // common.length, 1))
    extras = {
        **matmul_functions(model, common),
        **projection_functions(model, batch),
        **(breakdown_functions(model, common) if _BREAKDOWN.value else {}),
    }
    timing, warm_up = Timing({}), Timing({})
    say("warming up")
    calls = {}
    for name, function in extras.items():
        jax.block_until_ready(function())
        warm_up.add(name, function)
        # What is over in less than 50 ms is called again, or launching it would be timed too.
        calls[name] = min(max(round(0.05 / warm_up.median(name)), 1), 50)
    for one in compiled:
        warm_up.add("gradients", one.gradients)
        warm_up.add("sketch", one.sketch)
    for repeat in range(_REPEATS.value):
        say(f"repetition {repeat + 1} of {_REPEATS.value}: {len(compiled)} shapes")
        for name, function in extras.items():
            timing.add(name, function, calls=calls[name])
        torch_seconds = 0.0
        for position, one in enumerate(compiled):
            timing.add(f"gradients {one.shape.length}", one.gradients)
            timing.add(f"sketch {one.shape.length}", one.sketch)
            if loop:
                start = now()
                for tokens_L, mask_L in loop.rows[position :: len(compiled)]:
                    loop.peer(tokens_L, mask_L)
                torch_seconds += now() - start
        if loop:
            timing.seconds.setdefault("torch_loop", []).append(torch_seconds)
    return timing, batch


def peak_bytes() -> int:
    """Returns the most memory taken so far: the device's, or on a CPU the process's."""
    import resource

    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def corpus_seconds(compiled: Sequence[Compiled], timing: Timing, name: str) -> list[float]:
    """Returns the seconds of the whole plan in each repetition."""
    return [
        sum(one.shape.batches * timing.seconds[f"{name} {one.shape.length}"][i] for one in compiled)
        for i in range(_REPEATS.value)
    ]


def shape_lines(compiled: Sequence[Compiled], timing: Timing) -> list[dict[str, Any]]:
    """Returns what was measured of each bucket."""
    return [
        {
            "stage": "shape",
            "length": one.shape.length,
            "batch": one.shape.batch,
            "num_targets": one.shape.num_targets,
            "batches": one.shape.batches,
            "seconds_gradients": timing.median(f"gradients {one.shape.length}"),
            "seconds_sketch": timing.median(f"sketch {one.shape.length}"),
            "seconds_compile": one.seconds_compile,
            "memory_xla_bytes": one.memory_xla_bytes,
            "memory_bound_bytes": one.memory_bound_bytes,
        }
        for one in compiled
    ]


def matmul_line(model: Model, timing: Timing) -> dict[str, Any]:
    """Returns the rate of the model's own products: all layers' and the head's, as one sum."""
    from raslik_jax.sketch import costs

    linear = costs.linear_shapes(model.base)
    times = {pair: linear.layer.count(pair) * linear.num_layers for pair in linear.layer}
    times[linear.head] = times.get(linear.head, 0) + 1
    shapes, operations, seconds = [], 0.0, 0.0
    for name in timing.seconds:
        if name.startswith("matmul "):
            rows, inputs, outputs = map(int, name.split()[1:])
            one = timing.median(name)
            shapes.append([rows, inputs, outputs, 2e-12 * rows * inputs * outputs / one])
            operations += times[inputs, outputs] * 2.0 * rows * inputs * outputs
            seconds += times[inputs, outputs] * one
    return {
        "stage": "matmul",
        "tflops": operations / seconds / 1e12,
        "seconds": seconds,
        "shapes": shapes,
    }


def projection_line(model: Model, timing: Timing, batch: int) -> dict[str, Any]:
    """Returns the rate of the projection alone, beside a copy of what it reads."""
    spec = model.projection.spec
    seconds, copy = timing.median("projection"), timing.median("copy")
    size = 4 * batch * spec.num_params
    is_dense = spec.family == "dense_rademacher"
    return {
        "stage": "projection",
        "seconds": seconds,
        "batch": batch,
        "bytes_read": size,
        "gb_per_s": size / seconds / 1e9,
        "copy_gb_per_s": 2 * size / copy / 1e9,
        "share_of_copy": (size / seconds) / (2 * size / copy),
        "tflops": 2.0 * batch * spec.num_params * spec.size / seconds / 1e12 if is_dense else None,
    }


def summarize(
    model: Model,
    plan: Plan,
    compiled: Sequence[Compiled],
    timing: Timing,
    batch: int,
    loop: TorchLoop | None,
    worst_cosine: float,
) -> list[dict[str, Any]]:
    """Returns the objects of the stages that were timed, the summary last."""
    from raslik_jax.sketch import costs

    lines = shape_lines(compiled, timing)
    matmul, projection = matmul_line(model, timing), projection_line(model, timing, batch)
    lines += [matmul, projection]
    common = plan.commonest
    if _BREAKDOWN.value:
        parts = {name: timing.median(name) for name in ("forward", "layers", "head")}
        for name in ("gradients", "sketch"):
            parts[name] = timing.median(f"{name} {common.length}")
        lines.append({"stage": "breakdown", "length": common.length, **parts})
    rows, tokens, targets = (
        len(plan.length_N),
        float(plan.length_N.sum()),
        float(plan.target_N.sum()),
    )
    computed = float(sum(s.batches * s.batch * s.length for s in plan.shapes))
    sketch, gradients = (corpus_seconds(compiled, timing, n) for n in ("sketch", "gradients"))
    seconds = statistics.median(sketch)
    linear = costs.linear_shapes(model.base)
    count = functools.partial(costs.gradient_operations, linear, targets=targets)
    tflops = count(tokens=computed) / seconds / 1e12
    speedup = torch_rate = None
    if loop:
        torch_seconds = timing.seconds["torch_loop"]
        speedup = statistics.median(
            (rows / ours) / (len(loop.rows) / theirs)
            for ours, theirs in zip(sketch, torch_seconds, strict=True)
        )
        torch_rate = len(loop.rows) / statistics.median(torch_seconds)
        import torch

        lines.append(
            {
                "stage": "torch_loop",
                "examples_per_s": torch_rate,
                "tokens_per_s": loop.tokens / statistics.median(torch_seconds),
                "examples": len(loop.rows),
                "threads": torch.get_num_threads(),
                "device": loop.device,
                "worst_cosine": loop.worst_cosine,
            }
        )
    largest = max(compiled, key=lambda one: one.memory_xla_bytes)
    common_seconds = timing.median(f"gradients {common.length}") * batch / common.batch
    lines.append(
        {
            "stage": "summary",
            "model": _MODEL.value,
            "family": _FAMILY.value,
            "examples_per_s": rows / seconds,
            "tokens_per_s": tokens / seconds,
            "seconds_corpus": seconds,
            "tflops": tflops,
            "share_of_matmul": tflops / matmul["tflops"],
            "useful_tflops": count(tokens=tokens) / seconds / 1e12,
            "matmul_tflops": matmul["tflops"],
            "gradients_examples_per_s": rows / statistics.median(gradients),
            "sketch_overhead": statistics.median(
                s / g - 1 for s, g in zip(sketch, gradients, strict=True)
            ),
            "projection_share": projection["seconds"] / common_seconds,
            "padding_waste": plan.padding_waste,
            "seconds_compile": sum(one.seconds_compile for one in compiled),
            "peak_bytes": peak_bytes(),
            "memory_xla_bytes": largest.memory_xla_bytes,
            "memory_bound_bytes": largest.memory_bound_bytes,
            "memory_within_bound": all(
                one.memory_xla_bytes <= one.memory_bound_bytes for one in compiled
            ),
            "speedup_vs_torch_loop": speedup,
            "torch_loop_examples_per_s": torch_rate,
            "worst_cosine": worst_cosine,
        }
    )
    return lines


def setup_line(model: Model) -> dict[str, Any]:
    """Returns what runs, and on what."""
    import jax

    spec = model.projection.spec
    return {
        "stage": "setup",
        "model": _MODEL.value,
        "lora": f"r={model.lora_config.rank} on {','.join(model.lora_config.targets)}",
        "family": spec.family,
        "size": spec.size,
        "num_params": spec.num_params,
        "dtype": str(model.base["embed"]["embedding"].dtype),
        "quantize": _QUANTIZE.value,
        "remat": _REMAT.value,
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "seed": _SEED.value,
        "repeats": _REPEATS.value,
        "clock": _CLOCK.value,
    }


def plan_line(plan: Plan) -> dict[str, Any]:
    """Returns the rows and how they are batched."""
    return {
        "stage": "plan",
        "lengths": _LENGTHS.value,
        "rows": len(plan.length_N),
        "shapes": len(plan.shapes),
        "batches": sum(shape.batches for shape in plan.shapes),
        "batch_tokens": _BATCH_TOKENS.value,
        "micro_tokens": _MICRO_TOKENS.value,
        "mean_tokens": float(plan.length_N.mean()),
        "mean_targets": float(plan.target_N.mean()),
        "padding_waste": plan.padding_waste,
    }


def run() -> list[dict[str, Any]]:
    """Runs every stage and returns its objects, printing each as it comes with --json."""
    lines: list[dict[str, Any]] = []

    def emit(*new: dict[str, Any]) -> None:
        for line in new:
            lines.append(line)
            if _JSON.value:
                print(json.dumps(line), flush=True)

    say(f"drawing {_MODEL.value}")
    model = make_model()
    emit(setup_line(model))
    plan = make_plan(model.decoder.config.vocab_size)
    emit(plan_line(plan))
    compiled = []
    for position, shape in enumerate(plan.shapes):
        say(
            f"compiling shape {position + 1} of {len(plan.shapes)}: "
            f"{shape.batch} rows of {shape.length} tokens"
        )
        compiled.append(compile_shape(model, shape))
    say("checking against a plain loop")
    first = compiled[0]
    emit(check(model, first.shape, first.sketch().unit_BK))
    loop = None
    if _COMPARE.value == "torch_loop":
        say("loading the torch loop")
        loop = make_torch_loop(model, plan, first)
    timing, batch = measure(model, plan, compiled, loop)
    emit(*summarize(model, plan, compiled, timing, batch, loop, lines[-1]["worst_cosine"]))
    say("done")
    return lines


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the lines as tables for a terminal."""
    from raslik_jax.report import tables

    def of(stage: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["stage"] == stage]

    setup, plan, summary = (of(stage)[0] for stage in ("setup", "plan", "summary"))
    columns = ("length", "batch", "batches", "gradients s", "with sketch s", "GB by XLA", "bound")
    shapes = tables.Table(
        columns=tuple(tables.Column(title, "right") for title in columns),
        rows=tuple(
            (
                str(line["length"]),
                str(line["batch"]),
                str(line["batches"]),
                f"{line['seconds_gradients']:.3f}",
                f"{line['seconds_sketch']:.3f}",
                f"{line['memory_xla_bytes'] / 1e9:.2f}",
                f"{line['memory_bound_bytes'] / 1e9:.2f}",
            )
            for line in of("shape")
        ),
    )
    projection = of("projection")[0]
    rows = [
        ("examples / s", f"{summary['examples_per_s']:.1f}"),
        ("tokens / s, pads not counted", f"{summary['tokens_per_s']:,.0f}"),
        ("gradients alone, examples / s", f"{summary['gradients_examples_per_s']:.1f}"),
        ("TFLOP/s", f"{summary['tflops']:.3f}"),
        ("matmul rate at these shapes, TFLOP/s", f"{summary['matmul_tflops']:.3f}"),
        ("share of the matmul rate", f"{summary['share_of_matmul']:.1%}"),
        ("overhead of the sketch, by difference", f"{summary['sketch_overhead']:+.1%}"),
        ("overhead of the sketch, timed alone", f"{summary['projection_share']:.1%}"),
        ("projection alone, GB/s of gradients", f"{projection['gb_per_s']:.1f}"),
        ("copy, GB/s read + written", f"{projection['copy_gb_per_s']:.1f}"),
        ("padding waste", f"{summary['padding_waste']:.1%}"),
        ("compile time, s", f"{summary['seconds_compile']:.1f}"),
        ("peak memory, GB", f"{summary['peak_bytes'] / 1e9:.2f}"),
        ("within the memory bound", str(summary["memory_within_bound"])),
        ("lowest cosine with a plain loop", f"{summary['worst_cosine']:.7f}"),
    ]
    if projection["tflops"] is not None:
        rows.append(("projection alone, TFLOP/s", f"{projection['tflops']:.3f}"))
    for line in of("breakdown"):
        for name in ("forward", "layers", "head", "gradients", "sketch"):
            rows.append((f"{name}, s a batch at L = {line['length']}", f"{line[name]:.4f}"))
    if summary["speedup_vs_torch_loop"] is not None:
        rows.append(("torch loop, examples / s", f"{summary['torch_loop_examples_per_s']:.1f}"))
        rows.append(("speedup over the torch loop", f"{summary['speedup_vs_torch_loop']:.2f}"))
    table = tables.Table(
        columns=(tables.Column("measured"), tables.Column("value", "right")),
        rows=tuple(rows),
        notes=(
            f"{setup['model']}, {setup['lora']}, P = {setup['num_params']:,}, {setup['family']} "
            f"K = {setup['size']:,}, {setup['dtype']}; {plan['rows']:,} rows, {plan['lengths']}; "
            f"{setup['device']}, {setup['cpus']} CPUs, jax {setup['jax']}; medians of "
            f"{setup['repeats']}, {setup['clock']} seconds.",
        ),
    )
    return "\n\n".join(tables.render_terminal(t) for t in (shapes, table))


def main() -> None:
    # JAX says for every kind of accelerator that there is none.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    if _COMPARE.value == "torch_loop":
        command.require("torch", "peft", "transformers")
    lines = run()
    if not _JSON.value:
        print(report(lines))


if __name__ == "__main__":
    command.start(main)
