"""What the benchmarks share: models with random weights, taking turns, the clock, the output.

A benchmark is a dataclass of options and a generator of measurements, each a JSON-ready dict whose
key "stage" says what it is of. The first is the "setup": all options, device, cpus and jax.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from raslik_jax.base.axes import Tree
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.models import decoder as decoders
from raslik_jax.models import products, quantize
from raslik_jax.models.lora import ATTENTION_TARGETS, LoRAConfig
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.report import tables

flags.disclaim_key_flags()

Line = dict[str, Any]
_STARTED = time.perf_counter()
_NEOX_TARGETS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
# The paper gives alpha and dropout for both of its models as 32 and 0.05. Its Pythia table (r = 16
# on four modules) and its count d = 2,621,440 (r = 8 on query_key_value) disagree: both are here.
LORA_PRESETS = {
    name: LoRAConfig(rank=rank, alpha=32.0, dropout=0.05, targets=targets)
    for name, rank, targets in (
        ("olmo2", 8, ATTENTION_TARGETS),
        ("pythia", 16, _NEOX_TARGETS),
        ("pythia-qkv", 8, ("query_key_value",)),
        ("llama", 8, ATTENTION_TARGETS),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of every benchmark."""

    seed: int = setting(0, "Seed of all random numbers.", low=0)
    json: bool = setting(False, "Print JSON objects, one a line, in place of tables.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of benchmarks of a model with random weights."""

    model: str = setting("smollm2-135m", "Model whose shapes are used.", choices=MODEL_PRESETS)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Dtype of the base; auto: float32 on a CPU, else bfloat16."
    )
    operands: Literal["", "bfloat16"] = setting(
        "", "Dtype of the operands of products with a float32 base; empty: that of the base."
    )


class Model(NamedTuple):
    """A model with random weights, both LoRA factors among them."""

    config: Any
    graphdef: Any
    lora: Tree
    base: Tree

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the embedding, and so of the products."""
        return jax.eval_shape(products.read, self.base["embed"]["embedding"]).dtype


def preset_adapter(options: ModelOptions) -> LoRAConfig:
    """Returns the adapter preset of the model's family."""
    family = MODEL_PRESETS[options.model].model_type
    if family == "gpt_neox":
        return LORA_PRESETS["pythia"]
    targets = decoders.ARCHITECTURES[family].lora_targets
    return dataclasses.replace(LORA_PRESETS["llama"], targets=targets)


def draw_model(options: ModelOptions, lora_config: LoRAConfig | None) -> Model:
    """Returns a model of the preset's shapes; its weights are drawn on the device."""
    say(f"drawing the weights of {options.model}")
    config = MODEL_PRESETS[options.model]
    auto = {"auto": "float32" if jax.default_backend() == "cpu" else "bfloat16"}
    dtype = auto.get(options.dtype, options.dtype)
    pair = dtype, options.operands or dtype

    @jax.jit
    def draw(key: jax.Array) -> tuple[Tree, Tree]:
        _, lora, base = decoders.create(config, lora_config, key=key, dtype=pair)
        # B = 0 would leave half of the gradient zero.
        noise = optax.tree.random_like(key, lora)
        return jax.tree.map(lambda leaf, noise: leaf + 0.02 * noise, lora, noise), base

    graphdef, _, _ = decoders.abstract(config, lora_config, pair)
    return Model(config, graphdef, *draw(jax.random.key(options.seed)))


class Seconds(NamedTuple):
    """What a call took in each repetition, [R], by two clocks."""

    wall: np.ndarray
    processor: np.ndarray  # of this process, on all cores

    def median(self, clock: str = "wall") -> float:
        """Returns the median of a clock."""
        return float(np.median(getattr(self, clock)))


def timed(call: Callable[[], Any], *, calls: int = 1) -> tuple[Any, tuple[float, float]]:
    """Returns the last result of a call, whose arrays are waited for, and what one call took."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    taken = time.perf_counter() - wall, time.process_time() - processor
    return result, (taken[0] / calls, taken[1] / calls)


def take_turns(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, profile: str = ""
) -> dict[str, Seconds]:
    """Returns what each call took.

    Each is called once to warm up. In every repetition all run in turn, so that other load on the
    machine falls on all of them; what is over in less than 50 ms runs several times at each turn,
    or launching it would be timed too. On a GPU each runs for half a second before it is timed: the
    clock depends on what ran before. With `profile` a last one is recorded in that folder.
    """
    counts, ahead = {}, {}
    settling = 0.5 if jax.default_backend() == "gpu" else 0.0
    for name, call in calls.items():
        say(f"warming up: {name}")
        jax.block_until_ready(call())
        _, (wall, _) = timed(call)
        counts[name] = min(max(round(0.05 / max(wall, 1e-9)), 1), 50)
        ahead[name] = min(math.ceil(settling / max(wall, 1e-9)), 500)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(1, repeats + 1):
        say(f"repetition {repeat} of {repeats}")
        for name, call in calls.items():
            if ahead[name]:
                timed(call, calls=ahead[name])
            taken[name].append(timed(call, calls=counts[name])[1])
    if profile:
        with jax.profiler.trace(profile):
            for name, call in calls.items():
                with jax.profiler.TraceAnnotation(name):
                    jax.block_until_ready(call())
    return {name: Seconds(*np.array(pairs).T) for name, pairs in taken.items()}


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


class Product(NamedTuple):
    """A matrix product of a model: operations, how often a pass has it, and how to run it."""

    operations: float
    times: int
    call: Callable[[], Any]


def matrix_products(base: Tree, *, tokens: int, targets: int) -> dict[str, Product]:
    """Returns the products of a forward pass in the base's dtype; the head runs at targets."""
    linear, found = linear_shapes(base), {}
    kernels, stream = base["embed"]["embedding"].dtype, jax.tree.leaves(base["final_norm"])[0].dtype
    for pair, rows in (dict.fromkeys(linear.layer, tokens) | {linear.head: targets}).items():
        times = linear.layer.count(pair) * linear.num_layers + (pair == linear.head)
        left, right = (_random(shape) for shape in ((rows, pair[0]), pair))
        call = functools.partial(
            jax.jit(_multiply), left.astype(stream), products.stored(right, kernels)
        )
        found[f"matmul {rows} {pair}"] = Product(2.0 * left.size * pair[1], times, call)
    return found


def _random(shape: tuple[int, ...]) -> jax.Array:
    """Returns random numbers: a GPU multiplies ones faster than what a model has."""
    return jax.random.normal(jax.random.key(shape[0]), shape)


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    return products.product(left, products.read(right))


def matmul_line(products: Mapping[str, Product], seconds: Mapping[str, float]) -> Line:
    """Returns the rate of the products, each timed alone, as one sum."""
    total = sum(seconds[name] * product.times for name, product in products.items())
    operations = sum(product.operations * product.times for product in products.values())
    return {"stage": "matmul", "tflops": operations / total / 1e12, "seconds": total}


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
    for line in itertools.chain([setup], measure(options)):
        found.setdefault(line["stage"], []).append(line)
        if options.json:
            print(json.dumps(line), flush=True)
    return found


def line_tables(lines: Mapping[str, Sequence[Line]]) -> list[tables.Table]:
    """Returns the lines as tables: stages of several lines by row, then all others by value."""
    found, single = [], []
    for stage, rows in lines.items():
        keys = [key for key in rows[0] if key != "stage"]
        if len(rows) > 1:
            columns = tuple(tables.Column(key, "right") for key in keys)
            cells = tuple(tuple(_format(row[key]) for key in keys) for row in rows)
            found.append(tables.Table(columns, cells))
        elif stage != "setup":
            single += [(stage, key, _format(rows[0][key])) for key in keys]
    titles = (tables.Column("stage"), tables.Column("measured"), tables.Column("value", "right"))
    found += [tables.Table(titles, tuple(single))] if single else []
    (setup,) = lines["setup"]
    note = ", ".join(
        f"{key} {_format(v)}" for key, v in setup.items() if key != "stage" and v != ""
    )
    return [*found[:-1], found[-1]._replace(notes=(f"{note}.",))]


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, tuple):
        return "/".join(map(_format, value))
    return "-" if value is None else str(value)
