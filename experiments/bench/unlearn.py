"""Measures a step of each unlearning algorithm against plain LoRA training on the same tokens.

  python experiments/bench/unlearn.py
  python experiments/bench/unlearn.py --model=smollm2-135m --batch_size=4 --length=64 --repeats=5
  python experiments/bench/unlearn.py --model=pythia-2.8b --dtype=bfloat16 --batch_size=8 \\
    --length=512 --remat --algorithms=ga_gdr,ga_klr,cap_klr

The model has the preset's shapes and random weights, both LoRA factors among them. Plain training
takes the forget and the retain batch as one batch of twice as many examples; every step ends with
the same AdamW. The forget loss that each algorithm reports is held against a plain one.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
matmul: tflops (of the products of all layers and the head, with as many rows), seconds.
step (one for "lora", plain training, and for each algorithm): name, seconds, cpu_seconds (medians
  of wall clock and of this process's time on all cores), tflops (operations of the step,
  counted from its jaxpr, over seconds), share_of_matmul, ratio and cpu_ratio (seconds and
  cpu_seconds over those of lora; median of each repetition's), tokens_per_s (of both batches).
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import counting, harness
from experiments.bench.harness import Line
from raslik_jax.base.axes import Tree
from raslik_jax.base.settings import setting
from raslik_jax.data.batches import Batch
from raslik_jax.models import decoder as decoders
from raslik_jax.train import loop, losses, steps
from raslik_jax.train.objectives import OBJECTIVES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    algorithms: tuple[str, ...] = setting(
        ("ga_gdr", "ga_klr"), "What to measure.", family=OBJECTIVES
    )
    batch_size: int = setting(4, "Examples of each set.", low=1)
    micro_batch_size: int = setting(
        0, "Examples in memory at a time; 0: all.", low=0, divides="batch_size"
    )
    length: int = setting(64, "Tokens of an example, half of them targets.", low=8)
    lora_rank: int = setting(8, "Rank of the adapter.", low=1)
    remat: bool = setting(False, "Use gradient checkpointing.")
    repeats: int = setting(5, "Timed steps of each. Medians are reported.", low=1)
    profile: str = setting("", "Folder for a profile of one more repetition; empty: none.")


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    preset = harness.preset_adapter(options)
    targets = options.length // 2
    adapter = dataclasses.replace(preset, rank=options.lora_rank, alpha=32.0)
    model = harness.draw_model(options, adapter)
    decoder = decoders.bind(model.graphdef, remat=options.remat)
    size = options.batch_size, options.length
    random = np.random.default_rng(options.seed)

    def draw() -> Batch:
        tokens_BL = random.integers(0, model.config.vocab_size, size).astype(np.int32)
        mask_BL = np.broadcast_to(np.arange(options.length) >= options.length - targets, size)
        return Batch(jnp.asarray(tokens_BL), jnp.asarray(mask_BL), targets)

    forget, retain = draw(), draw()
    # The rate is of no account to the time.
    tx = loop.adamw(1e-5)
    frozen = steps.Frozen(model.base, reference=jax.tree.map(lambda leaf: 1.1 * leaf, model.lora))
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), forget, retain)
    plain = steps.supervised(decoder, tx, micro_batch=2 * options.micro_batch_size)
    calls: dict[str, Callable[[], Any]] = {
        "lora": functools.partial(jax.jit(plain.step), plain.init(model.lora), model.base, both)
    }
    for name in options.algorithms:
        algorithm = steps.unlearning(
            OBJECTIVES[name], decoder, tx, steps.Options(micro_batch=options.micro_batch_size)
        )
        calls[name] = functools.partial(
            jax.jit(algorithm.step),
            algorithm.init(model.lora),
            frozen,
            (forget, retain if OBJECTIVES[name].retain else None),
        )

    def nll(lora: Tree, base: Tree, batch: Batch) -> jax.Array:
        outputs = losses.Outputs(losses.BoundModel(decoder, lora, base), batch)
        return losses.nll_by_example(outputs)

    nll_B = jax.jit(nll)(model.lora, model.base, forget)
    expected = float(losses.weighted_mean(nll_B, forget))
    for name in options.algorithms:
        loss = float(calls[name]()[1].forget_nll)
        if not abs(loss - expected) <= 1e-2:
            raise ValueError(
                f"the forget loss of {name} must be {expected}, got {loss}: nothing was timed"
            )
    tokens = 2 * options.batch_size * options.length
    products = harness.matrix_products(
        model.base, tokens=tokens, targets=2 * options.batch_size * targets
    )
    timed = calls | {name: product.call for name, product in products.items()}
    taken = harness.take_turns(timed, options.repeats, profile=options.profile)
    matmul = harness.matmul_line(products, {name: taken[name].median() for name in products})
    yield matmul
    for name, call in calls.items():
        seconds = taken[name].median()
        tflops = counting.count(jax.jit(call).trace().jaxpr.jaxpr) / seconds / 1e12
        yield {
            "stage": "step",
            "name": name,
            "seconds": seconds,
            "cpu_seconds": taken[name].median("processor"),
            "tflops": tflops,
            "share_of_matmul": tflops / matmul["tflops"],
            "ratio": float(np.median(taken[name].wall / taken["lora"].wall)),
            "cpu_ratio": float(np.median(taken[name].processor / taken["lora"].processor)),
            "tokens_per_s": tokens / seconds,
        }


if __name__ == "__main__":
    harness.start(Options(), measure)
