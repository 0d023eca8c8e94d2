"""Measures how fast per-example gradients are made and sketched, stage by stage, in one run.

  python experiments/bench/sketch.py --compare=torch_loop
  python experiments/bench/sketch.py --model=smollm2-135m --lengths=128 --json
  python experiments/bench/sketch.py --model=olmo2-7b --batch_tokens=8192 --remat   # an H200

The model has the preset's shapes and random weights, made on the device. Lengths are those of
Alpaca's 52,002 rows (a histogram comes with the package), planned into length buckets as the
pipeline plans them; one batch of every bucket is timed and counted as often as the plan has it. All
variants of one repetition run in turn, so that other load on the machine falls on all of them. The
result is checked against a plain loop before anything is timed. Progress goes to stderr.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
model: lora, num_params, dtype (of the base).
plan: rows, shapes (batches of one shape), batches, mean_tokens and mean_targets (per row),
  padding_waste (share of all computed tokens that are pads, dummy rows included).
check: worst_cosine (lowest cosine between our sketch and that of a plain loop over examples, with
  all logits, projected in NumPy on the host), examples.
shape (one for each bucket): length, batch, num_targets (rows of targets per example, static),
  batches (of this shape in the plan), seconds_gradients, seconds_sketch (a batch's gradients
  alone, and with the sketch; medians), seconds_compile (both), memory_xla_bytes (peak by XLA's
  analysis of the sketch), memory_traced_bytes (of the values in
  its jaxpr, before XLA fuses any).
matmul: tflops (of the products of all layers and the head, with the rows of the commonest shape, in
  the base's dtype), seconds, shapes (a list of [rows, inputs, outputs, tflops]).
projection: seconds (of projecting one batch of gradients that lie in memory), batch, bytes_read,
  gb_per_s (bytes of float32 gradients read per second), copy_gb_per_s (a copy of the same array,
  bytes read and written), share_of_copy, tflops (dense_rademacher: 2 P K an example; else null).
breakdown (with --breakdown; one batch of the commonest shape, seconds): length, forward (hidden
  states), layers (gradients through the layers alone), head (values and slopes of the targets
  alone), gradients, sketch.
torch_loop (with --compare=torch_loop): examples_per_s, tokens_per_s, examples, threads, device,
  worst_cosine (between its sketches and ours), speedup (our examples per second over its).
summary: examples_per_s, tokens_per_s (real tokens: pads do not count), seconds_corpus (all rows,
  by the plan), tflops and share_of_matmul (4 operations per weight and computed token, pads
  included, of the layers, and per weight and target of the head), useful_tflops (pads excluded),
  gradients_examples_per_s, sketch_overhead (seconds with the sketch over seconds without, less 1),
  projection_share (seconds of the projection stage over those of the gradients of the same shape),
  seconds_compile, peak_bytes (of the device's allocator; on a CPU the resident peak of the process,
  torch included), memory_xla_bytes and memory_traced_bytes (of the largest shape).

Attention, norms and the adapters are not counted as operations. Tokenizing and writing an index are
not timed: gradients and sketches only.
"""

import functools
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import harness, workload
from experiments.bench.harness import Line, say
from experiments.bench.workload import Compiled, Options, Plan, Shape, Subject
from raslik_jax.cli import command
from raslik_jax.sketch import head, loss, projections
from raslik_jax.sketch.families import PROJECTIONS


def plain_sketches(options: Options, subject: Subject, shape: Shape, rows: Sequence[int]) -> Any:
    """Returns unit sketches of some rows the slow way: a loop, all logits, NumPy's projection."""

    def plain_loss(lora: Any, base: Any, tokens_L: Any, target_mask_L: Any) -> Any:
        targets = loss.find_targets(
            subject.decoder,
            lora,
            base,
            tokens_L,
            target_mask_L,
            num_targets=shape.length,
            loss=options.loss,
        )
        logits_TV = subject.decoder.logits(lora, base, targets.hidden_TE)
        nll_T = optax.softmax_cross_entropy_with_integer_labels(logits_TV, targets.label_T)
        return loss.mean_over_targets(nll_T, targets.is_counted_T)

    gradient = jax.jit(lambda *row: projections.flatten_gradients(jax.grad(plain_loss)(*row)))
    spec = subject.projection.spec
    found = []
    for row in rows:
        arrays = (array_BL[row] for array_BL in shape.rows)
        flat_P = np.asarray(gradient(subject.model.lora, subject.base, *arrays))
        if PROJECTIONS[spec.family].bins:
            sign_P, bin_P = workload.signs_and_bins(spec)
            sketch_K = np.bincount(bin_P, sign_P * flat_P, spec.size)
        else:
            sketch_K = np.asarray(projections.project(subject.projection, jnp.asarray(flat_P)))
        found.append(sketch_K / np.linalg.norm(sketch_K))
    return np.stack(found)


def check(options: Options, subject: Subject, one: Compiled) -> Line:
    """Returns the agreement with the plain loop.

    Raises:
      ValueError: there is none.
    """
    rows = one.shape.rows_with_targets(2)
    ours = np.asarray(one.sketch().unit_BK, np.float64)[rows]
    plain = plain_sketches(options, subject, one.shape, rows)
    worst = float(np.sum(ours * plain, axis=1).min())
    # Rounding: a bfloat16 base adds in another order, and attention may be another kernel.
    least = 0.99999 if subject.is_float32 else 0.99
    if not worst >= least:
        raise ValueError(
            f"our sketch and that of a plain loop must have a cosine of {least} or more, got "
            f"{worst:.6f}: nothing was timed"
        )
    return {"stage": "check", "worst_cosine": worst, "examples": len(rows)}


def projection_calls(subject: Subject, batch: int) -> dict[str, Callable[[], Any]]:
    """Returns the projection of gradients that lie in memory, and a copy of them."""
    shape = batch, subject.projection.spec.num_params
    gradients_BP = jax.jit(lambda: jax.random.normal(jax.random.key(1), shape))()

    @jax.jit
    def project(projection: Any, gradients_BP: Any) -> Any:
        return jax.vmap(functools.partial(projections.project, projection))(gradients_BP)

    return {
        "projection": functools.partial(project, subject.projection, gradients_BP),
        "copy": functools.partial(jax.jit(jnp.copy), gradients_BP),
    }


def breakdown_calls(subject: Subject, shape: Shape) -> dict[str, Callable[[], Any]]:
    """Returns parts of a gradient: hidden states, the layers' gradients, the head."""
    hidden, lora, base = subject.decoder.hidden, subject.model.lora, subject.base

    def forward(lora: Any, base: Any, tokens_BL: Any) -> Any:
        return jax.vmap(functools.partial(hidden, lora, base))(tokens_BL)

    def layers(lora: Any, base: Any, tokens_BL: Any, slope_BLE: Any) -> Any:
        def sums(tokens_L: Any, slope_LE: Any) -> Any:
            _, pull = jax.vjp(lambda lora: hidden(lora, base, tokens_L), lora)
            return [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(pull(slope_LE))]

        return jax.vmap(sums)(tokens_BL, slope_BLE)

    def slopes(base: Any, hidden_BLE: Any, tokens_BL: Any, target_mask_BL: Any) -> Any:
        table, axis = loss.head_table(base)

        def total(hidden_LE: Any, tokens_L: Any, mask_L: Any) -> Any:
            return jnp.sum(head.target_nll(table, hidden_LE, tokens_L, mask_L, axis))

        return jax.vmap(jax.grad(total))(hidden_BLE, tokens_BL, target_mask_BL)

    hidden_BLE = jax.jit(forward)(lora, base, shape.tokens_BL)
    return {
        "forward": functools.partial(jax.jit(forward), lora, base, shape.tokens_BL),
        "layers": functools.partial(jax.jit(layers), lora, base, shape.tokens_BL, hidden_BLE),
        "head": functools.partial(jax.jit(slopes), base, hidden_BLE, *shape.rows),
    }


def peak_bytes() -> int:
    """Returns the most memory taken so far: the device's, or on a CPU the process's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def shape_line(one: Compiled, seconds: dict[str, float]) -> Line:
    """Returns what was measured of one bucket."""
    return {
        "stage": "shape",
        "length": one.shape.length,
        "batch": one.shape.batch,
        "num_targets": one.shape.num_targets,
        "batches": one.shape.batches,
        "seconds_gradients": seconds[f"gradients {one.shape.length}"],
        "seconds_sketch": seconds[f"sketch {one.shape.length}"],
        "seconds_compile": one.seconds_compile,
        "memory_xla_bytes": one.memory_xla_bytes,
        "memory_traced_bytes": one.memory_traced_bytes,
    }


def projection_line(
    spec: projections.ProjectionSpec, seconds: dict[str, float], batch: int
) -> Line:
    """Returns the rate of the projection alone, beside a copy of what it reads."""
    size = 4 * batch * spec.num_params
    alone, copy = seconds["projection"], seconds["copy"]
    is_dense = spec.family == "dense_rademacher"
    return {
        "stage": "projection",
        "seconds": alone,
        "batch": batch,
        "bytes_read": size,
        "gb_per_s": size / alone / 1e9,
        "copy_gb_per_s": 2 * size / copy / 1e9,
        "share_of_copy": copy / (2 * alone),
        "tflops": 2.0 * batch * spec.num_params * spec.size / alone / 1e12 if is_dense else None,
    }


def summary_line(
    subject: Subject,
    plan: Plan,
    compiled: Sequence[Compiled],
    corpus: dict[str, list[float]],
    matmul_tflops: float,
    projection_share: float,
) -> Line:
    """Returns the summary; `corpus` has the seconds of all rows in each repetition, by variant."""
    rows, tokens = len(plan.length_N), float(plan.length_N.sum())
    computed = float(sum(s.batches * s.batch * s.length for s in plan.shapes))
    seconds = statistics.median(corpus["sketch"])
    count = functools.partial(
        harness.gradient_operations,
        harness.linear_shapes(subject.base),
        targets=float(plan.target_N.sum()),
    )
    tflops = count(tokens=computed) / seconds / 1e12
    largest = max(compiled, key=lambda one: one.memory_xla_bytes)
    pairs = zip(corpus["sketch"], corpus["gradients"], strict=True)
    return {
        "stage": "summary",
        "examples_per_s": rows / seconds,
        "tokens_per_s": tokens / seconds,
        "seconds_corpus": seconds,
        "tflops": tflops,
        "share_of_matmul": tflops / matmul_tflops,
        "useful_tflops": count(tokens=tokens) / seconds / 1e12,
        "gradients_examples_per_s": rows / statistics.median(corpus["gradients"]),
        "sketch_overhead": statistics.median(s / g - 1 for s, g in pairs),
        "projection_share": projection_share,
        "seconds_compile": sum(one.seconds_compile for one in compiled),
        "peak_bytes": peak_bytes(),
        "memory_xla_bytes": largest.memory_xla_bytes,
        "memory_traced_bytes": largest.memory_traced_bytes,
    }


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    if options.compare == "torch_loop":
        command.require("torch", "peft", "transformers")
    subject = workload.make_subject(options)
    adapter, spec = subject.adapter, subject.projection.spec
    yield {
        "stage": "model",
        "lora": f"r={adapter.rank} on {','.join(adapter.targets)}",
        "num_params": spec.num_params,
        "dtype": str(subject.model.dtype),
    }
    plan = workload.make_plan(options, subject.model.config.vocab_size)
    yield {
        "stage": "plan",
        "rows": len(plan.length_N),
        "shapes": len(plan.shapes),
        "batches": sum(shape.batches for shape in plan.shapes),
        "mean_tokens": float(plan.length_N.mean()),
        "mean_targets": float(plan.target_N.mean()),
        "padding_waste": plan.padding_waste,
    }
    compiled = []
    for number, shape in enumerate(plan.shapes, start=1):
        rows = f"{shape.batch} rows of {shape.length} tokens"
        say(f"compiling shape {number} of {len(plan.shapes)}: {rows}")
        compiled.append(workload.compile_shape(options, subject, shape))
    say("checking against a plain loop")
    yield check(options, subject, compiled[0])
    loop = None
    if options.compare == "torch_loop":
        from experiments.bench import torch_peer

        loop = torch_peer.make_loop(options, subject, plan, compiled[0])
    yield from measure_times(options, subject, plan, compiled, loop)


def measure_times(
    options: Options,
    subject: Subject,
    plan: Plan,
    compiled: Sequence[Compiled],
    loop: Any,
) -> Iterator[Line]:
    """Yields all that is timed, taken in turn in each repetition."""
    common = plan.commonest
    batch = options.micro_batch(common.batch, common.length)
    products = harness.matrix_products(
        subject.base,
        tokens=common.batch * common.length,
        targets=int(common.target_mask_BL.sum()),
    )
    calls = products.calls | projection_calls(subject, batch)
    parts = breakdown_calls(subject, common) if options.breakdown else {}
    calls |= parts
    for number, one in enumerate(compiled):
        calls[f"gradients {one.shape.length}"] = one.gradients
        calls[f"sketch {one.shape.length}"] = one.sketch
        if loop:
            share = slice(number, None, len(compiled))
            calls[f"torch {one.shape.length}"] = functools.partial(loop.run, share)
    costs_of = harness.take_turns(calls, options.repeats)
    medians = {n: harness.median_seconds(c, options.clock) for n, c in costs_of.items()}

    def of_corpus(variant: str, *, weighted: bool = True) -> list[float]:
        """Returns the seconds of the whole plan in each repetition."""
        return [
            sum(
                (one.shape.batches if weighted else 1)
                * getattr(costs_of[f"{variant} {one.shape.length}"][i], options.clock)
                for one in compiled
            )
            for i in range(options.repeats)
        ]

    for one in compiled:
        yield shape_line(one, medians)
    matmul = products.line(medians)
    projection = projection_line(subject.projection.spec, medians, batch)
    yield from (matmul, projection)
    whole = {name: medians[f"{name} {common.length}"] for name in ("gradients", "sketch")}
    if parts:
        found = {name: medians[name] for name in parts}
        yield {"stage": "breakdown", "length": common.length, **found, **whole}
    corpus = {name: of_corpus(name) for name in ("sketch", "gradients")}
    if loop:
        theirs, rows = of_corpus("torch", weighted=False), len(plan.length_N)
        pairs = zip(corpus["sketch"], theirs, strict=True)
        yield {
            "stage": "torch_loop",
            "examples_per_s": len(loop.rows) / statistics.median(theirs),
            "tokens_per_s": loop.tokens / statistics.median(theirs),
            "examples": len(loop.rows),
            "threads": loop.threads,
            "device": loop.device,
            "worst_cosine": loop.worst_cosine,
            "speedup": statistics.median((rows / s) / (len(loop.rows) / t) for s, t in pairs),
        }
    share = projection["seconds"] / (whole["gradients"] * batch / common.batch)
    yield summary_line(subject, plan, compiled, corpus, matmul["tflops"], share)


if __name__ == "__main__":
    harness.start(Options(), measure)
