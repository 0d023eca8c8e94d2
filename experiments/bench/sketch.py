"""Measures how fast per-example gradients are made and sketched, stage by stage, in one run.

  python experiments/bench/sketch.py
  python experiments/bench/sketch.py --model=smollm2-135m --length=128 --json
  python experiments/bench/sketch.py --model=olmo2-7b --batch_tokens=8192   # an H100

The model has the preset's shapes and random weights, made on the device. Lengths are those of
Alpaca's 52,002 rows (a histogram comes with the package), planned into length buckets as the
pipeline plans them; one batch of every bucket is timed and counted as often as the plan has it.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
plan: lora, num_params, dtype (of the base), rows, shapes (batches of one shape), batches,
  mean_tokens and mean_targets (per row), padding_waste (share of all computed tokens that are pads,
  dummy rows included), head_waste (share of all rows of the head that are no targets).
check: worst_cosine (lowest cosine between our sketch and that of a plain loop over examples, with
  all logits, projected in NumPy on the host), examples.
shape (one for each bucket): length, batch (rows), batches (in the plan), seconds_gradients and
  seconds_sketch (a batch's gradients alone, and with the sketch; medians).
matmul: tflops (of the products of all layers and the head, with the rows of the commonest shape, in
  the base's dtype), seconds.
projection: seconds (of projecting one batch of gradients that lie in memory), batch, gb_per_s
  (bytes of float32 gradients read per second).
summary: examples_per_s, tokens_per_s (real tokens: pads do not count), seconds_corpus (all rows,
  by the plan), tflops and share_of_matmul (4 operations per weight and computed token, pads
  included, of the layers, and per weight and target of the head), gradients_examples_per_s,
  sketch_overhead (seconds with the sketch over seconds without, less 1), projection_share (seconds
  of the projection stage over those of the gradients of the same shape), peak_bytes (of the
  device's allocator; on a CPU the resident peak of the process).

Tokenizing and writing an index are not timed: gradients and sketches only. The study of speed
compares with other programs.
"""

import functools
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import harness, workload
from experiments.bench.harness import Line, say
from experiments.bench.workload import Options, Plan, Shape, Subject
from raslik_jax.sketch import gradients, loss, projections
from raslik_jax.sketch.families import PROJECTIONS


def check(subject: Subject, shape: Shape) -> Line:
    """Returns the agreement with a plain loop: all logits, projected by NumPy."""

    def plain_loss(lora: Any, base: Any, tokens_L: Any, mask_L: Any) -> Any:
        rows: Any = (subject.decoder, lora, base, tokens_L, mask_L)
        targets = loss.find_targets(*rows, num_targets=shape.length, loss="next_token")
        logits_TV = subject.decoder.logits(lora, base, targets.hidden_TE)
        nll_T = optax.softmax_cross_entropy_with_integer_labels(logits_TV, targets.label_T)
        return loss.mean_over_targets(nll_T, targets.is_counted_T)

    gradient = jax.jit(lambda *row: projections.flatten_gradients(jax.grad(plain_loss)(*row)))
    spec, ours, cosines = subject.projection.spec, np.asarray(shape.sketch().unit_BK), []
    for place, *row in shape.sample():
        flat_P = np.asarray(gradient(subject.model.lora, subject.model.base, *row))
        if PROJECTIONS[spec.family].bins:
            sign_P, bin_P = workload.signs_and_bins(spec)
            sketch_K = np.bincount(bin_P, sign_P * flat_P, spec.size)
        else:
            sketch_K = np.asarray(projections.project(subject.projection, jnp.asarray(flat_P)))
        cosines.append(float(ours[place] @ sketch_K / np.linalg.norm(sketch_K)))
    # Rounding: a bfloat16 base adds in another order, and attention may be another kernel.
    least = 0.99999 if subject.model.dtype == jnp.float32 else 0.99
    if not min(cosines) >= least:
        raise ValueError(
            f"our sketch and that of a plain loop must have a cosine of {least} or more, got "
            f"{min(cosines):.6f}: nothing was timed"
        )
    return {"stage": "check", "worst_cosine": min(cosines), "examples": len(cosines)}


def peak_bytes() -> int:
    """Returns the most memory taken so far: the device's, or on a CPU the process's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    subject = workload.make_subject(options)
    adapter = subject.adapter
    plan = workload.make_plan(options, subject)
    yield {
        "stage": "plan",
        "lora": f"r={adapter.rank} on {','.join(adapter.targets)}",
        "num_params": subject.projection.spec.num_params,
        "dtype": str(subject.model.dtype),
        "rows": len(plan.rows.ids),
        "shapes": len(plan.shapes),
        "batches": sum(shape.times for shape in plan.shapes),
        "mean_tokens": float(plan.rows.lengths_N.mean()),
        "mean_targets": float(plan.rows.num_targets_N.mean()),
        "padding_waste": plan.padding_waste,
        "head_waste": plan.head_waste,
    }
    say("checking against a plain loop")
    yield check(subject, plan.shapes[0])
    yield from measure_times(options, subject, plan)


def measure_times(options: Options, subject: Subject, plan: Plan) -> Iterator[Line]:
    """Yields all that is timed, taken in turn in each repetition."""
    common = max(plan.shapes, key=lambda shape: shape.times * shape.size)
    num_params = subject.projection.spec.num_params
    products = harness.matrix_products(
        subject.model.base,
        tokens=common.size * common.length,
        targets=int(common.batch.target_mask_BL.sum()),
    )
    calls: dict[str, Any] = {name: product.call for name, product in products.items()}
    # Rows that are held at a time.
    micro_tokens = workload.held_tokens(options, subject)
    held = gradients.micro_rows(common.size, common.length, micro_tokens)
    gradients_BP = jax.random.normal(jax.random.key(1), (held, num_params))
    project = jax.jit(jax.vmap(projections.project, in_axes=(None, 0)))
    calls["projection"] = functools.partial(project, subject.projection, gradients_BP)
    for shape in plan.shapes:
        calls[f"gradients {shape.length}"] = shape.gradients
        calls[f"sketch {shape.length}"] = shape.sketch
    taken = harness.take_turns(calls, options.repeats, profile=options.profile)
    medians = {name: seconds.median(options.clock) for name, seconds in taken.items()}
    for shape in plan.shapes:
        yield {
            "stage": "shape",
            "length": shape.length,
            "batch": shape.size,
            "batches": shape.times,
            "seconds_gradients": medians[f"gradients {shape.length}"],
            "seconds_sketch": medians[f"sketch {shape.length}"],
        }
    matmul, alone = harness.matmul_line(products, medians), medians["projection"]
    yield matmul
    gb_per_s = 4 * held * num_params / alone / 1e9
    yield {"stage": "projection", "seconds": alone, "batch": held, "gb_per_s": gb_per_s}
    taken_R = {name: getattr(seconds, options.clock) for name, seconds in taken.items()}
    share = alone * common.size / (medians[f"gradients {common.length}"] * held)
    line = summary_line(subject, plan, taken_R)
    line |= {"share_of_matmul": line["tflops"] / matmul["tflops"], "projection_share": share}
    yield line


def summary_line(subject: Subject, plan: Plan, taken_R: Mapping[str, np.ndarray]) -> Line:
    """Returns what all rows of the plan take, by the seconds of each repetition."""
    sketch_R, gradients_R = (
        np.sum([shape.times * taken_R[f"{name} {shape.length}"] for shape in plan.shapes], axis=0)
        for name in ("sketch", "gradients")
    )
    rows, tokens = len(plan.rows.ids), float(plan.rows.lengths_N.sum())
    seconds = float(np.median(sketch_R))
    operations = harness.gradient_operations(
        harness.linear_shapes(subject.model.base),
        tokens=float(sum(shape.times * shape.size * shape.length for shape in plan.shapes)),
        targets=float(plan.rows.num_targets_N.sum()),
    )
    return {
        "stage": "summary",
        "examples_per_s": rows / seconds,
        "tokens_per_s": tokens / seconds,
        "seconds_corpus": seconds,
        "tflops": operations / seconds / 1e12,
        "gradients_examples_per_s": rows / float(np.median(gradients_R)),
        "sketch_overhead": float(np.median(sketch_R / gradients_R - 1)),
        "peak_bytes": peak_bytes(),
    }


if __name__ == "__main__":
    harness.start(Options(), measure)
