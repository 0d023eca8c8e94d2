"""What the benchmark of sketches runs: a model, a projection, and batches of planned lengths."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from raslik_jax.base.settings import setting
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.data.tokens import encoding
from raslik_jax.models import decoder as decoders
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.sketch import families, gradients, hashing, head, loss, projections
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.steps import program_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    model: str = setting("pythia-14m", "Model whose shapes are used.", choices=MODEL_PRESETS)
    family: str = setting("binned", "Projection family.", family=PROJECTIONS)
    size: int = setting(65536, "K, coordinates of a sketch; at most P.", low=1)
    operand: Literal["float32", "bfloat16"] = setting(
        "float32", "dense_rademacher: dtype of its products."
    )
    length: int = setting(0, "Tokens of a row, half targets; 0: as Alpaca's rows.", zero_or=2)
    max_len: int = setting(512, "Tokens at which Alpaca's rows are cut.", low=8)
    batch_tokens: int = setting(8192, "Most tokens of a batch.", low=8)
    micro_tokens: int = setting(
        0, "Tokens whose gradients are in memory at a time; 0: as in a run.", low=0
    )
    num_buckets: int = setting(0, "Most padded lengths; 0: the number of the sketch stage.", low=0)
    remat: bool = setting(False, "Recompute each layer in the backward pass.")
    repeats: int = setting(3, "Repetitions. Medians are reported.", low=1)
    profile: str = setting("", "Folder for a profile of one more repetition; empty: none.")
    clock: Literal["wall", "processor"] = setting(
        "wall",
        "Clock. processor: the processor time of this process over all cores. It suits a CPU "
        "that runs other work too, with the process pinned to one core (taskset -c 0).",
    )


class Subject(NamedTuple):
    """What is measured: a model and a projection of its gradients."""

    model: harness.Model
    adapter: LoRAConfig
    decoder: decoders.Decoder
    projection: projections.Projection


class Shape(NamedTuple):
    """One batch of one bucket, on the device, and what is timed of it."""

    batch: batches.Batch
    times: int  # batches of this shape in the plan
    gradients: Callable[[], Any]  # and the norm of each
    sketch: Callable[[], gradients.Sketches]

    @property
    def length(self) -> int:
        return int(self.batch.tokens_BL.shape[1])

    @property
    def size(self) -> int:
        return int(self.batch.tokens_BL.shape[0])

    def sample(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns the place, tokens and mask of the first two rows that have targets."""
        tokens_BL, mask_BL = map(np.asarray, (self.batch.tokens_BL, self.batch.target_mask_BL))
        some = np.flatnonzero(mask_BL.any(axis=1))[:2].tolist()
        return [(row, tokens_BL[row], mask_BL[row]) for row in some]


class Plan(NamedTuple):
    """The rows, and a batch of every shape."""

    rows: encoding.Encoded
    shapes: tuple[Shape, ...]
    padding_waste: float
    head_waste: float


def make_subject(options: Options) -> Subject:
    """Returns the model of the options and its projection."""
    adapter = harness.preset_adapter(options)
    # Checked before the weights of a large model are drawn.
    preset = MODEL_PRESETS[options.model]
    _, lora_shapes, _ = decoders.abstract(preset, adapter, jnp.dtype("float32"))
    projection = projections.init_projection(
        options.seed,
        options.family,
        projections.count_params(lora_shapes),
        options.size,
        operand=options.operand,
    )
    model = harness.draw_model(options, adapter)
    return Subject(model, adapter, decoders.bind(model.graphdef, remat=options.remat), projection)


def make_plan(options: Options, subject: Subject) -> Plan:
    """Returns rows of random tokens, planned into batches, with one batch of each shape."""
    length_N = np.full(options.batch_tokens // max(options.length, 1), options.length)
    target_N = length_N // 2
    if not options.length:
        length_N, target_N = load_alpaca_lengths(max_len=options.max_len)
    random, vocab_size = np.random.default_rng(options.seed), subject.model.config.vocab_size
    tokens = random.integers(1, vocab_size, int(length_N.sum()), dtype=np.int32)
    rows = encoding.Encoded(
        ids=tuple(f"{row:06d}" for row in range(len(length_N))),
        tokens=tuple(np.split(tokens, np.cumsum(length_N)[:-1])),
        start_N=length_N - target_N,
        pad_id=0,
    )
    plans = batches.plan_batches(
        length_N,
        target_N,
        ids=rows.ids,
        num_buckets=options.num_buckets,
        batch_tokens=options.batch_tokens,
        program_tokens=program_tokens(subject.model.config),
    )
    shapes = []
    for length in sorted({plan.length for plan in plans}):
        bucket = [plan for plan in plans if plan.length == length]
        mean = target_N[batches.sketching_order(bucket)].sum() / len(bucket)
        # A full batch with about the bucket's mean number of targets.
        full = [plan for plan in bucket if (plan.rows >= 0).all()] or bucket[:1]
        plan = min(full, key=lambda plan: abs(target_N[plan.rows].sum() - mean))  # noqa: B023
        batch = jax.device_put(batches.make_batch(rows, plan))
        shapes.append(_shape(options, subject, batch, len(bucket)))
    return Plan(
        rows,
        tuple(shapes),
        1.0 - float(length_N.sum()) / sum(plan.rows.size * plan.length for plan in plans),
        _head_waste(plans, target_N, held_tokens(options, subject)),
    )


def held_tokens(options: Options, subject: Subject) -> int | None:
    """Returns the tokens whose gradients are held at a time, None for those of a batch."""
    return options.micro_tokens or gradients.micro_tokens_of(subject.model.config.hidden_size)


def _head_waste(
    plans: Sequence[batches.BatchPlan], target_N: np.ndarray, micro_tokens: int | None
) -> float:
    """Returns the share of rows that the head is run for that are no targets."""
    most, computed = head.tile_shape()[0], 0
    for plan in plans:
        rows = gradients.micro_rows(plan.rows.size, plan.length, micro_tokens)
        chunk = min(most, rows * plan.num_targets)
        for start in range(0, plan.rows.size, rows):
            part = plan.rows[start : start + rows]
            num_targets = int(target_N[part[part != batches.DUMMY_ROW]].sum())
            computed += -(-num_targets // chunk) * chunk
    return 1 - float(target_N.sum()) / computed


def _shape(options: Options, subject: Subject, batch: batches.Batch, times: int) -> Shape:
    """Returns a batch with both variants of what is timed."""
    example_loss = functools.partial(
        loss.example_loss, subject.decoder, num_targets=batch.num_targets, loss="next_token"
    )
    micro_tokens = held_tokens(options, subject)

    @jax.jit
    def norms(lora: Any, base: Any, tokens_BL: Any, target_mask_BL: Any) -> Any:
        # No sketch: every gradient is read once, for its norm.
        def norm(*row: Any) -> Any:
            grads = jax.grad(example_loss)(lora, base, *row)
            return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)])

        return gradients.in_micro_batches(
            jax.vmap(norm), tokens_BL, target_mask_BL, micro_tokens=micro_tokens
        )

    sketch = jax.jit(
        functools.partial(gradients.sketch_gradients, example_loss, micro_tokens=micro_tokens)
    )
    model, rows = subject.model, (batch.tokens_BL, batch.target_mask_BL)
    return Shape(
        batch,
        times,
        functools.partial(norms, model.lora, model.base, *rows),
        functools.partial(sketch, subject.projection, model.lora, model.base, *rows),
    )


def signs_and_bins(spec: families.ProjectionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sign and the bin of every coordinate, for a family that has bins."""
    keys = hashing.stream_keys(spec.seed, hashing.SIGN_STREAM)
    word_P = hashing.counter_hash(np.arange(spec.num_params, dtype=np.uint32), keys)
    bins = families.PROJECTIONS[spec.family].bins
    assert bins
    return np.where(word_P >> np.uint32(31) == 1, -1.0, 1.0), bins(spec)


def manifest_order(names: Sequence[str], lora: Any) -> list[int]:
    """Returns the positions of PEFT's parameters in the order of the flat gradient.

    Ours stacks the layers of one factor: "layers/dense/a" is layer 0's, 1's, ... `dense.lora_A`.
    """
    order = []
    for segment in projections.gradient_manifest(lora):
        _, target, factor = segment.path.split("/")
        for layer in range(segment.shape[0]):
            inside, part = f".layers.{layer}.", f".{target}.lora_{factor.upper()}."
            (match,) = (i for i, name in enumerate(names) if inside in name and part in name)
            order.append(match)
    return order
