"""What the benchmarks share: models with random weights, taking turns, the clock, the output.

A benchmark is a dataclass of options and a generator of measurements, each a JSON-ready dict whose
key "stage" says what it is of. The first is the "setup": all options, device, cpus and jax.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from raslik_jax.axes import Tree
from raslik_jax.cli import command
from raslik_jax.messages import shown
from raslik_jax.models import decoder as decoders
from raslik_jax.models import quantize
from raslik_jax.models.lora import LORA_PRESETS, LoRAConfig
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.report import tables
from raslik_jax.settings import Settings, setting

flags.disclaim_key_flags()

Line = dict[str, Any]
_STARTED = time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of every benchmark."""

    seed: int = setting(0, "Seed of all that is drawn.", low=0)
    json: bool = setting(False, "Print one JSON object per line, no tables.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of benchmarks of a model with random weights."""

    model: str = setting("smollm2-135m", "Shapes of the model, a preset's name.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Dtype of the base; auto: float32 on a CPU, else bfloat16."
    )

    def problems(self) -> list[str]:
        presets = ", ".join(MODEL_PRESETS)
        is_known = self.model in MODEL_PRESETS
        return [] if is_known else [f"--model must be one of {presets}, got {shown(self.model)}"]


class Model(NamedTuple):
    """A model with random weights, both LoRA factors among them."""

    config: Any
    graphdef: Any
    lora: Tree
    base: Tree

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the embedding, and so of the products."""
        return self.base["embed"]["embedding"].dtype


def preset_adapter(options: ModelOptions) -> LoRAConfig:
    """Returns the adapter preset of the model's family."""
    family = MODEL_PRESETS[options.model].model_type
    return LORA_PRESETS["pythia" if family == "gpt_neox" else family]


def draw_model(options: ModelOptions, lora_config: LoRAConfig | None) -> Model:
    """Returns a model of the preset's shapes; its weights are drawn on the device."""
    say(f"drawing the weights of {options.model}")
    config = MODEL_PRESETS[options.model]
    name = {"auto": "float32" if jax.default_backend() == "cpu" else "bfloat16"}
    dtype = jnp.dtype(name.get(options.dtype, options.dtype))

    @jax.jit
    def draw(key: jax.Array) -> tuple[Tree, Tree]:
        _, lora, base = decoders.create(config, lora_config, key=key, dtype=dtype)
        leaves, structure = jax.tree.flatten(lora)
        keys = jax.random.split(key, max(len(leaves), 1))
        # B = 0 would leave half of the gradient zero.
        leaves = [
            leaf + 0.02 * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=False)
        ]
        return jax.tree.unflatten(structure, leaves), base

    graphdef, _, _ = decoders.abstract(config, lora_config, dtype)
    return Model(config, graphdef, *draw(jax.random.key(options.seed)))


class Cost(NamedTuple):
    """What one call took, in seconds."""

    wall: float
    processor: float  # of this process, on all cores


def timed(call: Callable[[], Any], *, calls: int = 1) -> tuple[Any, Cost]:
    """Returns the last result of a call, whose arrays are waited for, and the cost of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return result, Cost(
        (time.perf_counter() - wall) / calls, (time.process_time() - processor) / calls
    )


def take_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Cost]]:
    """Returns the costs of each call in each repetition.

    Each is called once to warm up. In every repetition all run in turn, so that other load on the
    machine falls on all of them; what is over in less than 50 ms runs several times at each turn,
    or launching it would be timed too.
    """
    say("warming up")
    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        _, first = timed(call)
        counts[name] = min(max(round(0.05 / max(first.wall, 1e-9)), 1), 50)
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for repeat in range(1, repeats + 1):
        say(f"repetition {repeat} of {repeats}")
        for name, call in calls.items():
            costs[name].append(timed(call, calls=counts[name])[1])
    return costs


def median_seconds(costs: Sequence[Cost], clock: str = "wall") -> float:
    """Returns the median of one clock."""
    return statistics.median(getattr(cost, clock) for cost in costs)


class Products(NamedTuple):
    """The matrix products of a model's layers and head, each shape timed alone.

    Attributes:
      calls: what is to be timed, by name.
      shapes: (rows, inputs, outputs) by the same name.
      times: how often a pass through the model has each.
    """

    calls: dict[str, Callable[[], Any]]
    shapes: dict[str, tuple[int, int, int]]
    times: dict[str, int]

    def line(self, seconds: Mapping[str, float]) -> Line:
        """Returns their rate as one sum: tflops, seconds, and shapes with the rate of each."""
        operations = {name: 2.0 * rows * i * o for name, (rows, i, o) in self.shapes.items()}
        total = sum(seconds[name] * self.times[name] for name in self.calls)
        return {
            "stage": "matmul",
            "tflops": sum(operations[n] * self.times[n] for n in self.calls) / total / 1e12,
            "seconds": total,
            "shapes": [
                [*shape, operations[name] / seconds[name] / 1e12]
                for name, shape in self.shapes.items()
            ],
        }


class LinearShapes(NamedTuple):
    """The matrix products of a decoder: (inputs, outputs) of each kernel of one layer and the head.

    The head is [E, V], tied or not.
    """

    num_layers: int
    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]


def linear_shapes(base: Tree) -> LinearShapes:
    """Returns the kernels of base weights, quantized or not, or of their shapes."""
    kernels = [
        quantize.kernel_shape(leaves["kernel"])
        if quantize.is_quantized(leaves["kernel"])
        else leaves["kernel"].shape
        for _, leaves in sorted(base["layers"].items())
        if "kernel" in leaves
    ]
    vocab_size, width = base["embed"]["embedding"].shape
    layer = tuple((inputs, outputs) for _, inputs, outputs in kernels)
    return LinearShapes(kernels[0][0], layer, (width, vocab_size))


def gradient_operations(shapes: LinearShapes, *, tokens: float, targets: float) -> float:
    """Returns the operations of per-example gradients: 4 per weight and token.

    Two forward and two for the gradient of the inputs; the frozen weights have none. The head
    counts at the targets only. Attention, norms and adapters are left out: below 3 % of it in
    models of 135M parameters and up.
    """
    layer = sum(inputs * outputs for inputs, outputs in shapes.layer)
    return 4.0 * (shapes.num_layers * layer * tokens + math.prod(shapes.head) * targets)


def matrix_products(base: Tree, *, tokens: int, targets: int) -> Products:
    """Returns the products of a forward pass in the base's dtype; the head runs at targets."""
    linear = linear_shapes(base)
    dtype = base["embed"]["embedding"].dtype
    multiply = jax.jit(jnp.matmul)
    rows = {pair: tokens for pair in linear.layer} | {linear.head: targets}
    calls: dict[str, Callable[[], Any]] = {}
    shapes, times = {}, {}
    for pair, count in rows.items():
        name = f"matmul {count} {pair[0]} {pair[1]}"
        left, right = jnp.ones((count, pair[0]), dtype), jnp.ones(pair, dtype)
        calls[name] = functools.partial(multiply, left, right)
        shapes[name] = (count, *pair)
        times[name] = linear.layer.count(pair) * linear.num_layers + (pair == linear.head)
    return Products(calls, shapes, times)


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def start(options: Options, measure: Callable[[Any], Iterator[Line]]) -> None:
    """Runs a benchmark as a command: `measure` yields the lines of given options."""

    def main(chosen: Options) -> None:
        # JAX says for every kind of accelerator that there is none.
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
        lines = run(chosen, measure)
        if not chosen.json:
            print("\n\n".join(map(tables.render_terminal, line_tables(lines))))

    command.start(main, options)


def run(options: Options, measure: Callable[[Any], Iterator[Line]]) -> dict[str, list[Line]]:
    """Returns the lines by stage; with --json prints each as it comes."""
    setup = {
        "stage": "setup",
        **dataclasses.asdict(options),
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
    }
    found: dict[str, list[Line]] = {}

    def add(line: Line) -> None:
        found.setdefault(line["stage"], []).append(line)
        if options.json:
            print(json.dumps(line), flush=True)

    add(setup)
    for line in measure(options):
        add(line)
    return found


def line_tables(lines: Mapping[str, Sequence[Line]]) -> list[tables.Table]:
    """Returns the lines as tables: stages of several lines by row, then all others by value."""
    several = [rows for rows in lines.values() if len(rows) > 1]
    single = [rows[0] for name, rows in lines.items() if len(rows) == 1 and name != "setup"]
    found = [
        tables.Table(
            tuple(tables.Column(key, "right") for key in rows[0] if key != "stage"),
            tuple(tuple(_format(row[key]) for key in row if key != "stage") for row in rows),
        )
        for rows in several
    ]
    titles = (tables.Column("stage"), tables.Column("measured"), tables.Column("value", "right"))
    values = tuple(
        (line["stage"], key, _format(value))
        for line in single
        for key, value in line.items()
        if key != "stage" and not isinstance(value, list)
    )
    found += [tables.Table(titles, values)] if values else []
    (setup,) = lines["setup"]
    note = ", ".join(f"{key} {_format(value)}" for key, value in setup.items() if value != "")
    return [*found[:-1], found[-1]._replace(notes=(note.removeprefix("stage setup, ") + ".",))]


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, tuple):
        return "/".join(map(_format, value))
    return "-" if value is None else str(value)
