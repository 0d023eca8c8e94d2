"""Compares sketches by a loop over the layers with those by layers written out one by one.

  python experiments/studies/gpu/unrolled.py --model=olmo2-7b --dtype=bfloat16 --length=128 \\
    --batch_tokens=8192 --json

In the product the layers are the steps of a loop, and XLA copies the weights of each out of a
stacked array. Flags as in `experiments/bench/sketch.py`; the first shape of its plan is timed.
Each line is a JSON object. Its key "stage" says which:

check: worst_cosine between both sketches of a row, examples.
matmul: as in the benchmark of sketches.
loop, unrolled: first_seconds (of the first call, with its compilation), seconds, rows_per_s,
  tflops, share (of the rate of products).
"""

import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import numpy as np

from experiments.bench import harness, workload
from raslik_jax.models import layers

_scan = jax.lax.scan


def scan_unrolled(body: Any, start: Any, each: Any) -> Any:
    """Is `jax.lax.scan` with all its steps in one program, if they are layers (a tuple)."""
    return _scan(body, start, each, unroll=isinstance(each, tuple))


def measure(options: workload.Options) -> Iterator[harness.Line]:
    """Yields the lines of the module's docstring."""
    subject = workload.make_subject(options)
    loop, unrolled = (workload.make_plan(options, subject).shapes[0] for _ in range(2))
    first, begin = {}, time.perf_counter()
    expected_BK = np.asarray(loop.sketch().unit_BK)
    first["loop"], begin = time.perf_counter() - begin, time.perf_counter()
    with mock.patch.object(layers.jax.lax, "scan", scan_unrolled):
        cosine_B = np.sum(np.asarray(unrolled.sketch().unit_BK) * expected_BK, axis=1)
    first["unrolled"] = time.perf_counter() - begin
    if not cosine_B.min() >= 0.99:
        raise ValueError(f"the loop must have the same sketches, got {cosine_B.min():.6f}")
    yield {"stage": "check", "worst_cosine": float(cosine_B.min()), "examples": len(cosine_B)}
    targets, tokens = int(loop.batch.target_mask_BL.sum()), loop.size * loop.length
    products = harness.matrix_products(subject.model.base, tokens=tokens, targets=targets)
    calls: dict[str, Any] = {name: product.call for name, product in products.items()}
    calls |= {"loop": loop.sketch, "unrolled": unrolled.sketch}
    taken = harness.take_turns(calls, options.repeats, profile=options.profile)
    medians = {name: seconds.median(options.clock) for name, seconds in taken.items()}
    matmul = harness.matmul_line(products, medians)
    yield matmul
    operations = harness.gradient_operations(
        harness.linear_shapes(subject.model.base), tokens=float(tokens), targets=float(targets)
    )
    for name, first_seconds in first.items():
        tflops = operations / medians[name] / 1e12
        yield {
            "stage": name,
            "first_seconds": first_seconds,
            "seconds": medians[name],
            "rows_per_s": loop.size / medians[name],
            "tflops": tflops,
            "share": tflops / matmul["tflops"],
        }


if __name__ == "__main__":
    harness.start(workload.Options(), measure)
