"""The cost of a step, counted from its jaxpr, and its memory once it is compiled.

`count` walks the jaxpr of the function that will run. The body of a scan counts once per step. A
condition counts as its most expensive branch. No weight is allocated. Memory is XLA's analysis of
the compiled step.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from raslik_jax.models import products
from raslik_jax.parallel import meshes


class Cost(NamedTuple):
    """The cost of one call of a function.

    Attributes:
      operations: multiplications and additions of its matrix products and convolutions.
      bytes_moved: bytes that products, gathers and scatters move; elementwise work is fused into
        them.
    """

    operations: float
    bytes_moved: float


def trace(
    function: Callable[..., Any],
    *args: Any,
    mesh: jax.sharding.Mesh | None = None,
    **static: Any,
) -> jax.stages.Traced:
    """Returns a function traced at these shapes; an unjitted one has no static arguments.

    On a mesh (its devices need not exist) every device holds its parts of split leaves, its rows of
    batches and all else.
    """
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    if mesh is None:
        return jitted.trace(*args, **static)

    def placed(leaf: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    platform = meshes.traced_for(mesh.devices.flat[0].platform)
    with platform, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jitted.trace(*meshes.map_specs(placed, args), **static)


def count(closed: core.ClosedJaxpr, *, trips: int = 1) -> Cost:
    """Returns the cost of a jaxpr; loops of a length known at run time only run `trips` times.

    Inside a loop of a known length the trips are divided among its steps.
    """
    return Cost(*_count(closed.jaxpr, trips).tolist())


def _count(jaxpr: core.Jaxpr, trips: int) -> np.ndarray:
    """Returns operations and bytes moved, [2]."""
    found_2 = np.zeros(2)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inside: list[np.ndarray] = [
            times * _count(part, -(-trips // times) if name == "scan" else trips)
            for part, times in _inner(equation, trips)
        ]
        if name == "cond":
            inside = [max(inside, key=tuple)]
        if name == "pallas_call":  # what a kernel reads and writes inside never leaves the chip
            inside = [part_2 * (1, 0) for part_2 in inside]
        found_2 += np.sum([np.array(_count_own(equation)), *inside], axis=0)
    return found_2


def _inner(equation: core.JaxprEqn, trips: int) -> Iterator[tuple[core.Jaxpr, int]]:
    """Yields the jaxprs inside an equation with the number of times that each runs."""
    params, name = equation.params, equation.primitive.name
    times = {"scan": params.get("length", 1), "while": trips}.get(name, 1)
    if name == "pallas_call":
        times = math.prod(params["grid_mapping"].grid)
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)  # closed ones hold theirs
            if isinstance(part, core.Jaxpr):
                yield part, times


def _count_own(equation: core.JaxprEqn) -> tuple[float, float]:
    """Returns operations and bytes moved of an equation without those of the jaxprs inside."""
    given, made, params = equation.invars, equation.outvars, equation.params
    out: Any = made[0].aval if made else None
    all_bytes = float(sum(map(_size, (*given, *made))))
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            inner = math.prod(cast(Any, given[0].aval).shape[axis] for axis in contracted)
            return 2.0 * out.size * inner, all_bytes
        case "conv_general_dilated":
            kernel = cast(Any, given[1].aval)
            outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            return 2.0 * out.size * kernel.size / outputs, all_bytes
        case "pallas_call":
            return 0.0, all_bytes
        case "gather":
            return 0.0, 2.0 * _size(made[0])
        case "scatter" | "scatter-add":  # in place: what is updated is read and written
            return 0.0, 2.0 * _size(given[2])
        case "dynamic_update_slice":
            return 0.0, 2.0 * _size(given[1])
    return 0.0, 0.0


def _size(variable: Any) -> int:
    """Returns the bytes of a variable or literal."""
    aval = variable.aval
    return aval.size * getattr(aval.dtype, "itemsize", 4) if hasattr(aval, "dtype") else 0


def compile_step(
    traced: jax.stages.Traced, platform: str | None = None
) -> tuple[jax.stages.Compiled, float]:
    """Returns a compiled step and the seconds it took; the platform is None for the default one."""
    start = time.monotonic()
    compiled = traced.lower(lowering_platforms=(platform,) if platform else None).compile()
    return compiled, time.monotonic() - start


def analyzed_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns XLA's bytes of arguments, results and work space; shared ones once."""
    found = compiled.memory_analysis()
    if found is None:
        backend = jax.default_backend()
        raise ValueError(
            f"{backend} must report the memory of programs, it does not: give --nocompile"
        )
    held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return int(held - found.alias_size_in_bytes)


class Rates(NamedTuple):
    """A device's rates a second: operations of a matrix product, bytes moved by a copy."""

    operations: float
    bytes_moved: float
    device: str


def measure_rates(*, inputs: int, outputs: int, dtype: Any) -> Rates:
    """Returns the default device's rates; the product has a kernel of the model's width."""
    vector = jnp.ones(2**24 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    return Rates(
        operations=measure_product(inputs=inputs, outputs=outputs, dtype=dtype),
        bytes_moved=2.0 * vector.nbytes / _shortest(jax.jit(lambda x: x + 1), vector),
        device=jax.devices()[0].device_kind,
    )


def measure_product(*, inputs: int, outputs: int, dtype: Any) -> float:
    """Returns the operations a second of a product of rows with a kernel on the default device.

    The dtype is as of `products.Dtypes`.
    """
    most = 2e9 if jax.default_backend() == "cpu" else 2e12
    rows = int(min(8192, max(16, most // (2 * inputs * outputs))))
    stream, kernels = products.Dtypes.of(dtype)
    kernel = products.stored(jnp.ones((inputs, outputs)), kernels)

    def multiply(left_LI: Array, kernel: Array) -> Array:
        return products.product(left_LI, products.read(kernel))

    seconds = _shortest(jax.jit(multiply), jnp.ones((rows, inputs), stream), kernel)
    return 2.0 * rows * inputs * outputs / seconds


def _shortest(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of the fastest of five calls after compilation."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
