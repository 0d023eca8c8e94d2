"""Measures a step of each unlearning algorithm against plain LoRA training on the same tokens.

  python experiments/bench_unlearn.py
  python experiments/bench_unlearn.py --model=smollm2-135m --batch_size=4 --length=64 --rounds=5
  python experiments/bench_unlearn.py --model=pythia-2.8b --dtype=bfloat16 --batch_size=8 \\
    --length=512 --remat --algorithms=ga_gdr,ga_klr,npo_klr

The model has the preset's shapes and random weights, both LoRA factors among them. Plain training
takes the forget and the retain batch as one batch of twice as many examples; every step ends with
the same AdamW. Each program is compiled and run once before anything is timed; then all run in
turn, --rounds times, each waited for, so that other load on the machine falls on all of them.
Before, the first loss of GA_GDR is held against the two losses of which it is the difference.
Progress goes to stderr.

With --json stdout is one JSON object a line, the keys of which are
  stage: matmul, lora, or the name of an algorithm.
  seconds, cpu_seconds: medians of wall clock and of this process's time on all cores, one step.
  tflops: operations of the step over seconds. Counted are 4 a weight and token (the frozen weights
    have no gradient), the head at targets alone, and 2 for a pass of the reference.
  share_of_matmul: tflops over that of the line matmul, which is the rate at which the products of
    all layers run with as many rows in one program, layer after layer.
  ratio, cpu_ratio: seconds and cpu_seconds over those of lora; median over rounds of each round's.
  tokens_per_s: of both batches.
  model, dtype, device, cpus, jax, seed, batch_size (of each set), length, targets (of each
    example), rounds, remat, micro_batch_size: what was measured, in every line.
"""

import functools
import json
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

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Shapes of the model, a preset's name.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the frozen weights.")
_ALGORITHMS = flags.DEFINE_list("algorithms", ["ga_gdr", "ga_klr"], "What to measure.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "Examples of each set.", 1)
_MICRO = flags.DEFINE_integer("micro_batch_size", 0, "Of these held at a time; 0: all.", 0)
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens of an example.", 8)
_TARGETS = flags.DEFINE_integer("targets", 0, "Tokens whose loss counts; 0: half of them.", 0)
_RANK = flags.DEFINE_integer("lora_rank", 8, "Of the adapter on all attention layers.", 1)
_REMAT = flags.DEFINE_boolean("remat", False, "Gradient checkpointing, of every step.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed steps of each.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights and tokens.", 0)
_JSON = flags.DEFINE_boolean("json", False, "Print JSON objects, no table.")


class Cost(NamedTuple):
    """What one call took, in seconds."""

    wall: float
    cpu: float


def measure(call: Callable[[], Any]) -> Cost:
    """Returns the cost of a call whose results are waited for."""
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def run() -> list[dict[str, Any]]:
    """Returns the lines of the module's docstring."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from raslik_jax.models import decoder, presets
    from raslik_jax.models.lora import LORA_PRESETS, LoRAConfig
    from raslik_jax.sketch import costs
    from raslik_jax.train import finetune, objectives, steps
    from raslik_jax.train.accumulation import value_and_grad

    unknown = sorted(set(_ALGORITHMS.value) - set(steps.ALGORITHMS))
    targets = _TARGETS.value or _LENGTH.value // 2
    if _MODEL.value not in presets.MODEL_PRESETS or unknown or targets >= _LENGTH.value:
        raise ValueError(
            f"a --model of {sorted(presets.MODEL_PRESETS)}, --algorithms of "
            f"{sorted(steps.ALGORITHMS)} and fewer --targets than --length are wanted, got "
            f"{_MODEL.value!r}, {_ALGORITHMS.value} and {targets} of {_LENGTH.value}: correct them"
        )
    if _MICRO.value and _BATCH_SIZE.value % _MICRO.value:
        raise ValueError(
            f"--micro_batch_size={_MICRO.value} does not divide --batch_size={_BATCH_SIZE.value}"
        )

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    config = presets.MODEL_PRESETS[_MODEL.value]
    names = {"gpt_neox": "pythia", "olmo2": "olmo2", "llama": "llama"}
    lora_config = LoRAConfig(
        rank=_RANK.value, alpha=32.0, targets=LORA_PRESETS[names[config.model_type]].targets
    )
    say(f"drawing the weights of {_MODEL.value}")
    graphdef, lora, base = decoder.create(
        config, lora_config, key=jax.random.key(_SEED.value), dtype=jnp.dtype(_DTYPE.value)
    )
    lora = jax.tree.map(lambda leaf: leaf + 0.01, lora)
    bound = decoder.bind(graphdef, remat=_REMAT.value)
    batch_size, length = _BATCH_SIZE.value, _LENGTH.value
    rng = np.random.default_rng(_SEED.value)

    def draw() -> objectives.TokenBatch:
        tokens_BL = rng.integers(0, config.vocab_size, (batch_size, length)).astype(np.int32)
        mask_BL = np.broadcast_to(np.arange(length) >= length - targets, (batch_size, length))
        return objectives.TokenBatch(jnp.asarray(tokens_BL), jnp.asarray(mask_BL))

    forget, retain = draw(), draw()
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), forget, retain)
    frozen = steps.Frozen(base=base, reference=jax.tree.map(lambda leaf: 1.1 * leaf, lora))
    # The rate is of no account to the time.
    tx = finetune.adamw(1e-5, weight_decay=0.0, clip=1.0)

    @jax.jit
    def train(state: finetune.TrainState, base: Any, batch: objectives.TokenBatch) -> Any:
        def loss(params: Any, part: objectives.TokenBatch) -> tuple[jax.Array, None]:
            nll_B = objectives.nll_by_example(bound, params, base, part, num_targets=targets)
            total = jnp.asarray(float(2 * batch_size))
            return objectives.weighted_mean(nll_B, part, total=total), None

        (value, _), grads = value_and_grad(loss, state.params, batch, micro_batch=2 * _MICRO.value)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return finetune.TrainState(
            optax.apply_updates(state.params, updates), opt_state, state.step + 1
        ), value

    plain = finetune.start_fit(lora, tx).state
    calls: dict[str, Callable[[], Any]] = {
        "lora": functools.partial(train, plain, base, both),
    }
    options = steps.Options(micro_batch=_MICRO.value)
    static = ("forget_targets", "retain_targets")
    for name in _ALGORITHMS.value:
        algorithm = steps.ALGORITHMS[name](bound, tx, options)
        calls[name] = functools.partial(
            jax.jit(algorithm.step, static_argnames=static),
            algorithm.init(lora),
            frozen,
            forget,
            retain if algorithm.reads_retain else None,
            forget_targets=targets,
            retain_targets=targets,
        )

    shapes, rows = costs.linear_shapes(base), 2 * batch_size * length
    dtype = base["embed"]["embedding"].dtype
    calls["matmul"] = functools.partial(
        jax.jit(products_of_layers),
        tuple(jnp.full((rows, inputs), 0.5, dtype) for inputs, _ in shapes.layer),
        tuple(jnp.full((shapes.num_layers, *pair), 0.5, dtype) for pair in shapes.layer),
    )

    results = {}
    for name, call in calls.items():
        say(f"compiling {name}")
        results[name] = jax.block_until_ready(call())
    if "ga_gdr" in results:
        nll = jax.jit(functools.partial(objectives.nll, bound, num_targets=targets))
        expected = float(nll(lora, base, retain)) - float(nll(lora, base, forget))
        if abs(float(results["ga_gdr"][1].loss) - expected) > 1e-2:
            raise ValueError(f"GA_GDR gives {results['ga_gdr'][1].loss}, {expected} was expected")
    timed: dict[str, list[Cost]] = {name: [] for name in calls}
    for number in range(1, _ROUNDS.value + 1):
        say(f"round {number} of {_ROUNDS.value}")
        for name, call in calls.items():
            timed[name].append(measure(call))

    half = costs.gradient_operations(
        shapes, tokens=batch_size * length, targets=batch_size * targets
    )
    operations = {
        "lora": 2 * half,
        "matmul": 2.0 * rows * shapes.num_layers * sum(a * b for a, b in shapes.layer),
    }
    for name in _ALGORITHMS.value:
        passes = 1 + (name not in ("ga", "npo"))
        forward = name.startswith("npo") + name.endswith("klr")
        operations[name] = (passes + 0.5 * forward) * half
    device = jax.devices()[0]
    about = {
        "model": _MODEL.value,
        "dtype": _DTYPE.value,
        "device": f"{device.platform}: {device.device_kind}",
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "seed": _SEED.value,
        "batch_size": batch_size,
        "length": length,
        "targets": targets,
        "rounds": _ROUNDS.value,
        "remat": _REMAT.value,
        "micro_batch_size": _MICRO.value,
    }
    wall = {name: statistics.median(cost.wall for cost in timed[name]) for name in timed}
    rate = {name: operations[name] / wall[name] / 1e12 for name in timed}
    lines = []
    for name in ("matmul", "lora", *_ALGORITHMS.value):
        line = {
            "stage": name,
            "seconds": wall[name],
            "cpu_seconds": statistics.median(cost.cpu for cost in timed[name]),
            "tflops": rate[name],
        }
        if name != "matmul":
            pairs = list(zip(timed[name], timed["lora"], strict=True))
            line |= {
                "share_of_matmul": rate[name] / rate["matmul"],
                "ratio": statistics.median(own.wall / other.wall for own, other in pairs),
                "cpu_ratio": statistics.median(own.cpu / other.cpu for own, other in pairs),
                "tokens_per_s": 2 * batch_size * length / wall[name],
            }
        lines.append(line | about)
    return lines


def products_of_layers(inputs: tuple[Any, ...], stacked: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the last layer's products of inputs [rows, i] and stacked kernels [layers, i, o]."""
    import jax
    import jax.numpy as jnp

    def layer(_: Any, kernels: tuple[Any, ...]) -> tuple[tuple[Any, ...], None]:
        pairs = zip(inputs, kernels, strict=True)
        return tuple(jnp.matmul(x, w, preferred_element_type=jnp.float32) for x, w in pairs), None

    start = tuple(
        jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
        for x, w in zip(inputs, stacked, strict=True)
    )
    return jax.lax.scan(layer, start, stacked)[0]


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the measurements as a table for the terminal."""
    from raslik_jax.report import tables

    about = lines[0]
    columns = [tables.Column("step")] + [
        tables.Column(name, "right")
        for name in ("seconds", "CPU seconds", "ratio", "CPU ratio", "of the matmul rate")
    ]
    return tables.render_terminal(
        tables.Table(
            columns=tuple(columns),
            rows=tuple(
                (
                    line["stage"],
                    f"{line['seconds']:.3f}",
                    f"{line['cpu_seconds']:.3f}",
                    f"{line['ratio']:.2f}",
                    f"{line['cpu_ratio']:.2f}",
                    f"{line['share_of_matmul']:.1%}",
                )
                for line in lines[1:]
            ),
            notes=(
                f"{about['model']}, {about['dtype']}, {about['batch_size']} examples of each set, "
                f"{about['length']} tokens, {about['targets']} targets, {about['rounds']} rounds; "
                f"matmul rate {about['tflops']:.3f} TFLOP/s; {about['device']}, {about['cpus']} "
                f"CPUs, jax {about['jax']}.",
            ),
        )
    )


def main() -> None:
    lines = run()
    print("\n".join(map(json.dumps, lines)) if _JSON.value else report(lines))


if __name__ == "__main__":
    command.start(main)
