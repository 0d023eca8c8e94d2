"""Checks the kernels against their twins of plain XLA on this device, then measures them.

  python experiments/bench/kernels.py
  python experiments/bench/kernels.py --params=100000 --size=4096 --rows=500 --batch=8   # a CPU

The defaults are the sizes of the paper: gradients of OLMo-2-7B, 52,000 rows of 65,536 coordinates.
A kernel runs on a GPU only; elsewhere its twin is measured and compared with itself.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
product: tflops of a square product of random bfloat16, seconds.
copy: gb_per_s of a copy (bytes read and written), seconds.
check (one for each kernel): name, worst (largest difference from the twin over the twin's largest
  number; the twin of attention has float32 products), bound (what rounding explains).
signs: columns, mean_over_sigma (mean of the signs of a row in standard deviations: its root mean
  square over rows is 1 for random signs), inner_over_sigma (the same for inner products of two
  rows), worst_inner (the largest). Rows are sketches of unit vectors by the dense kernel.
dense (one for each tile): tile (columns x examples, warps), seconds, tflops.
binned: seconds, gb_per_s (bytes of float32 gradients).
attention (one for each length): length, rows, seconds of a forward and backward pass, seconds_twin.
tails: seconds of the scores of all rows in the device's memory for one query with the rows of both
  tails, gb_per_s (bytes of the rows).
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line
from raslik_jax.base.settings import setting
from raslik_jax.index import search
from raslik_jax.models import attention
from raslik_jax.parallel import meshes
from raslik_jax.sketch import families, hashing, kernels

_KEYS: Any = tuple(
    hashing.stream_keys(1, stream) for stream in (hashing.ROW_STREAM, hashing.COLUMN_STREAM)
)
# (columns, examples, warps) of the dense kernel that are tried beside its own choice.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4), (256, 128, 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    params: int = setting(8_388_608, "P, coordinates of a gradient.", low=2048)
    size: int = setting(65_536, "K, coordinates of a sketch.", low=64)
    batch: int = setting(64, "Gradients of a binned sketch; the dense ones are 128 and 256.", low=1)
    dense: tuple[int, ...] = setting((128, 256), "Gradients of a dense sketch.", low=1)
    rows: int = setting(52_000, "Rows of the index whose tails are found.", low=8)
    tail: int = setting(300, "Rows of a tail.", low=1)
    tokens: int = setting(8192, "Tokens of a batch of attention.", low=64)
    lengths: tuple[int, ...] = setting((128, 512), "Tokens of a row of attention.", low=8)
    heads: int = setting(32, "Heads of attention, of width 128.", low=1)
    side: int = setting(8192, "Rows and columns of the square product.", low=64)
    stages: tuple[str, ...] = setting(
        ("check", "signs", "ceilings", "binned", "tails", "attention", "dense"),
        "What is measured.",
        choices=("check", "signs", "ceilings", "binned", "tails", "attention", "dense"),
    )
    tiles: bool = setting(False, "Also measure the dense kernel with other tiles.")
    repeats: int = setting(5, "Repetitions. Medians are reported.", low=1)


def seconds_of(options: Options, **calls: Callable[[], Any]) -> dict[str, float]:
    """Returns the median seconds of each call, taken in turns."""
    taken = harness.take_turns(calls, options.repeats)
    return {name: seconds.median() for name, seconds in taken.items()}


def ceilings(options: Options) -> Iterator[Line]:
    """Yields what this device reaches without us."""
    keys, side = jax.random.split(jax.random.key(options.seed)), options.side
    left, right = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    copied = jax.random.bits(keys[0], (options.rows, options.size // 2), jnp.uint32)
    found = seconds_of(
        options,
        product=functools.partial(jax.jit(jnp.matmul), left, right),
        copy=functools.partial(jax.jit(lambda words: words ^ np.uint32(1)), copied),
    )
    yield {
        "stage": "product",
        "seconds": found["product"],
        "tflops": 2 * side**3 / found["product"] / 1e12,
    }
    yield {
        "stage": "copy",
        "seconds": found["copy"],
        "gb_per_s": 2 * copied.nbytes / found["copy"] / 1e9,
    }


def worst(found: jax.Array, twin: jax.Array) -> float:
    """Returns the largest difference over the twin's largest number."""
    found, twin = (jnp.asarray(array, jnp.float32) for array in (found, twin))
    return float(jnp.max(jnp.abs(found - twin)) / jnp.max(jnp.abs(twin)))


def heads_of(options: Options, length: int, rows: int) -> tuple[jax.Array, ...]:
    """Returns random queries, keys, values and a cotangent of a batch in bfloat16."""
    keys = jax.random.split(jax.random.key(options.seed + length), 4)
    shape = rows, length, options.heads, 128
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)


def attend(mix: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the jitted passes of a batch, forward and backward: mixed heads, three gradients."""

    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        mixed, back = jax.vjp(jax.vmap(mix), query, key, value)
        return mixed, *back(cotangent.astype(mixed.dtype))

    return jax.jit(both)


def dense_pair(gradients_BP: jax.Array, size: int, operand: str) -> tuple[jax.Array, jax.Array]:
    """Returns the dense sums by the kernel and by its twin."""
    ours, twin = (
        jax.jit(functools.partial(sums, size=size, operand=operand, keys=_KEYS))(gradients_BP)
        for sums in (kernels.dense_sums, kernels.dense_sums_xla)
    )
    return ours, twin


def checks(options: Options) -> Iterator[Line]:
    """Yields the agreement of every kernel with its twin, and stops where there is none."""
    random = np.random.default_rng(options.seed)
    small = min(options.params, 70_001), min(options.size, 3_000)
    whole = jnp.asarray(random.integers(-8, 9, (20, small[0])), jnp.float32)
    uneven = jnp.asarray(random.standard_normal((20, small[0])), jnp.float32)
    table: Any = jnp.asarray(
        families.binned_table(
            families.ProjectionSpec(family="binned", num_params=small[0], size=small[1], seed=1)
        )
    )
    long = jax.random.normal(jax.random.key(4), (8, options.params), jnp.bfloat16)
    found: list[tuple[str, jax.Array, jax.Array, float]] = [
        # Small integers have one sum in any order.
        ("dense bfloat16, integers", *dense_pair(whole, small[1], "bfloat16"), 0.0),
        ("dense float32, integers", *dense_pair(whole, small[1], "float32"), 0.0),
        ("dense bfloat16", *dense_pair(uneven, small[1], "bfloat16"), 5e-6),
        ("dense float32", *dense_pair(uneven, small[1], "float32"), 5e-6),
        ("dense bfloat16, all coordinates", *dense_pair(long, 256, "bfloat16"), 1e-5),
    ]
    rows = jax.jit(kernels.binned_sums_by_row)(table, uneven)
    found.append(("binned", jax.jit(kernels.binned_sums)(table, uneven), rows, 0.0))
    for length in options.lengths:
        heads = heads_of(options, length, 2)
        wide = [head.astype(jnp.float32) for head in heads]
        with jax.default_matmul_precision("highest"):
            twins = attend(functools.partial(attention._attend_by_products, 128**-0.5))(*wide)
        ours = attend(attention.attend_narrow)(*heads)
        names = ("mixed heads", "queries", "keys", "values")
        for name, one, twin in zip(names, ours, twins, strict=True):
            found.append((f"attention {length}, {name}", one, twin, 2e-2))
    for name, one, twin, bound in found:
        difference = worst(one, twin)
        yield {"stage": "check", "name": name, "worst": difference, "bound": bound}
        if not difference <= bound:
            raise ValueError(
                f"{name} must agree with its twin to {bound}, differs by {difference:.3g}: "
                "nothing was timed"
            )


def signs(options: Options) -> Line:
    """Returns how random the signs of the dense kernel look."""
    places = np.random.default_rng(options.seed).choice(options.params, 64, replace=False)
    unit = jnp.zeros((64, options.params), jnp.float32).at[jnp.arange(64), places].set(1.0)
    size = options.size
    sums = jax.jit(functools.partial(kernels.dense_sums, size=size, keys=_KEYS, operand="bfloat16"))
    sign_RK = np.asarray(sums(unit), np.float64)
    if not (np.abs(sign_RK) == 1).all():
        raise ValueError("the sketch of a unit vector must be of signs, it has other numbers")
    inner_RR = (sign_RK @ sign_RK.T / np.sqrt(size))[np.triu_indices(64, 1)]
    return {
        "stage": "signs",
        "columns": size,
        "mean_over_sigma": float(np.sqrt(np.mean(np.square(sign_RK.mean(1) * np.sqrt(size))))),
        "inner_over_sigma": float(np.sqrt(np.mean(np.square(inner_RR)))),
        "worst_inner": float(np.abs(inner_RR).max()),
    }


def dense(options: Options, batch: int) -> Iterator[Line]:
    """Yields the time of dense sketches, by the kernel's own tile and by others."""
    gradients_BP = jax.random.normal(jax.random.key(batch), (batch, options.params), jnp.bfloat16)
    given: dict[str, Any] = {"size": options.size, "operand": "bfloat16", "keys": _KEYS}
    own = kernels.dense_blocks(batch, options.params, options.size)
    tiles = {own}
    if options.tiles and meshes.runs_kernels() and jax.default_backend() == "gpu":
        tiles |= {
            kernels.DenseBlocks(columns, examples, 1, warps)
            for columns, examples, warps in _TILES
            if examples <= batch
        }
    for tile in sorted(tiles, key=lambda tile: tile != own):
        sums: Any = kernels.dense_sums
        if tile != own:
            sums = functools.partial(kernels.dense_sums_pallas, blocks=tile)
        call = functools.partial(jax.jit(functools.partial(sums, **given)), gradients_BP)
        seconds = seconds_of(options, dense=call)["dense"]
        yield {
            "stage": "dense",
            "batch": batch,
            "tile": f"{tile.columns} x {tile.examples}, {tile.warps}",
            "seconds": seconds,
            "tflops": 2.0 * batch * options.params * options.size / seconds / 1e12,
        }


def binned(options: Options) -> Line:
    """Returns the time of binned sketches."""
    spec = families.ProjectionSpec(
        family="binned", num_params=options.params, size=options.size, seed=1
    )
    table = jnp.asarray(families.binned_table(spec))
    gradients_BP = jax.random.normal(jax.random.key(2), (options.batch, options.params))
    call = functools.partial(jax.jit(kernels.binned_sums), table, gradients_BP)
    seconds = seconds_of(options, binned=call)["binned"]
    return {
        "stage": "binned",
        "batch": options.batch,
        "seconds": seconds,
        "gb_per_s": gradients_BP.nbytes / seconds / 1e9,
    }


def mixing(options: Options, length: int) -> Line:
    """Returns the time of attention's passes on rows of a length."""
    rows = max(options.tokens // length, 1)
    heads = heads_of(options, length, rows)
    twin = functools.partial(attention._attend_by_products, 128**-0.5)
    found = seconds_of(
        options,
        kernel=functools.partial(attend(attention.attend_narrow), *heads),
        twin=functools.partial(attend(twin), *heads),
    )
    line = {"stage": "attention", "length": length, "rows": rows, "seconds": found["kernel"]}
    return line | {"seconds_twin": found["twin"]}


def tails(options: Options) -> Line:
    """Returns the time of both tails of an index in the device's memory, in bfloat16."""
    shape = options.rows, options.size
    row_NK = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16) / options.size**0.5
    random = np.random.default_rng(options.seed)
    # A shared direction as real gradients have it, and one query.
    mean_K = 0.1 * random.standard_normal(options.size) / options.size**0.5
    queries = search.center_queries(random.standard_normal((1, options.size)), mean_K)
    columns = jax.device_put(search.to_columns(queries, aggregate="mean", dtype="bfloat16"))

    @jax.jit
    def find(row_NK: jax.Array, columns: search.Columns) -> Any:
        score_N = search.block_scores(row_NK, jnp.ones(len(row_NK)), columns)[:, 0]
        tail = min(options.tail, len(row_NK))
        return jax.lax.top_k(score_N, tail), jax.lax.top_k(-score_N, tail)

    call = functools.partial(find, row_NK, columns)
    seconds = seconds_of(options, tails=call)["tails"]
    return {"stage": "tails", "seconds": seconds, "gb_per_s": row_NK.nbytes / seconds / 1e9}


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    stages: dict[str, Callable[[], Iterable[Line]]] = {
        "check": lambda: checks(options),
        "signs": lambda: [signs(options)],
        "ceilings": lambda: ceilings(options),
        "binned": lambda: [binned(options)],
        "tails": lambda: [tails(options)],
        "attention": lambda: (mixing(options, length) for length in options.lengths),
        "dense": lambda: (line for batch in options.dense for line in dense(options, batch)),
    }
    for name in options.stages:
        yield from stages[name]()


if __name__ == "__main__":
    harness.start(Options(), measure)
