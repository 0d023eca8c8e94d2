"""Measures sketches of a model whose layers are written out one by one.

  python experiments/studies/gpu/unrolled.py --model=olmo2-7b --dtype=bfloat16 --length=128 --json

The flags and the lines are those of `experiments/bench/sketch.py`. There, and in the product, the
layers are the steps of a loop, and XLA copies the weights of each out of a stacked array.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import numpy as np

from experiments.bench import harness, sketch, workload
from raslik_jax.models import layers

_scan = jax.lax.scan


def scan_unrolled(body: Any, start: Any, each: Any) -> Any:
    """Is `jax.lax.scan` with all its steps in one program, if they are layers (a tuple)."""
    return _scan(body, start, each, unroll=isinstance(each, tuple))


def measure(options: workload.Options) -> Iterator[harness.Line]:
    """Yields the lines of the benchmark of sketches; it is checked against the loop."""
    subject = workload.make_subject(options)
    plans = [workload.make_plan(options, subject) for _ in range(2)]
    looped, ours = (plan.shapes[0].sketch for plan in plans)
    expected_BK = np.asarray(looped().unit_BK)
    with mock.patch.object(layers.jax.lax, "scan", scan_unrolled):
        cosine_B = np.sum(np.asarray(ours().unit_BK) * expected_BK, axis=1)
        if not cosine_B.min() >= 0.99:
            raise ValueError(f"the loop must have the same sketches, got {cosine_B.min():.6f}")
        yield {"stage": "check", "worst_cosine": float(cosine_B.min()), "examples": len(cosine_B)}
        yield from sketch.measure_times(options, subject, plans[1])


if __name__ == "__main__":
    harness.start(workload.Options(), measure)
