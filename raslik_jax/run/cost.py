"""What a compiled step costs, counted from its jaxpr: operations, bytes and memory.

`count` walks the jaxpr of the very function that will run: the body of a scan counts as often as
it runs, a condition as its most expensive branch. Nothing is compiled and no weight is allocated,
but in `compile_step`, for XLA's own analysis of the memory.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from raslik_jax.parallel import meshes


class Cost(NamedTuple):
    """What one call of a function costs.

    Attributes:
      operations: multiplications and additions of its matrix products and convolutions.
      bytes_moved: by products, gathers and scatters, into which elementwise work is fused.
      device_bytes: the most memory that its arguments and values take at a time, in the order of
        the jaxpr; fused or shared buffers make it less.
    """

    operations: float
    bytes_moved: float
    device_bytes: float


def trace(
    function: Callable[..., Any],
    *args: Any,
    mesh: jax.sharding.Mesh | None = None,
    **static: Any,
) -> jax.stages.Traced:
    """Returns a function traced at these shapes; what is not jitted has no static arguments.

    On a mesh, of devices that need not be there, every device holds its parts of split leaves, its
    rows of batches, and all else.
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

    Inside a loop of a known length those are shared among its steps.
    """
    operations, moved = _count(closed.jaxpr, trips)
    given = sum(map(_size, {*closed.jaxpr.invars, *closed.jaxpr.constvars}))
    return Cost(operations, moved, float(given + _peak(closed.jaxpr)))


def _inner(equation: core.JaxprEqn, trips: int) -> Iterator[tuple[core.Jaxpr, int]]:
    """Yields the jaxprs inside an equation, each with how often it runs."""
    params, name = equation.params, equation.primitive.name
    times = {"scan": params.get("length", 1), "while": trips}.get(name, 1)
    if name == "pallas_call":
        times = math.prod(params["grid_mapping"].grid)
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)  # closed ones hold theirs
            if isinstance(part, core.Jaxpr):
                yield part, times


def _count(jaxpr: core.Jaxpr, trips: int) -> tuple[float, float]:
    """Returns the operations and the bytes moved of one run of a jaxpr."""
    operations = moved = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        found = [
            (times * inner[0], times * inner[1])
            for part, times in _inner(equation, trips)
            for inner in [_count(part, -(-trips // times) if name == "scan" else trips)]
        ]
        own = _count_own(equation)
        if name == "cond":
            found = [max(found)]
        operations += sum(pair[0] for pair in found) + own[0]
        # What a kernel reads and writes inside itself never leaves the chip.
        moved += (0.0 if name == "pallas_call" else sum(pair[1] for pair in found)) + own[1]
    return operations, moved


def _count_own(equation: core.JaxprEqn) -> tuple[float, float]:
    """Returns the operations and the bytes moved of an equation, without those of jaxprs inside."""
    given, made = equation.invars, equation.outvars
    out: Any = made[0].aval if made else None
    params = equation.params
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


# Values that no program holds: XLA makes them where they are read, or reads their operand.
_VIRTUAL = frozenset(
    {"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "convert_element_type"}
)


def _size(variable: Any) -> int:
    """Returns the bytes of a variable or literal."""
    aval = variable.aval
    if not hasattr(aval, "dtype"):
        return 0
    return aval.size * getattr(aval.dtype, "itemsize", 4)


def _peak(jaxpr: core.Jaxpr) -> int:
    """Returns the most bytes of values made inside a jaxpr that are needed at a time.

    A value is there from the equation that makes it to the last one that reads it.
    """
    last = {
        variable: place
        for place, equation in enumerate(jaxpr.eqns)
        for variable in equation.invars
        if isinstance(variable, core.Var)
    }
    last |= {out: len(jaxpr.eqns) for out in jaxpr.outvars if isinstance(out, core.Var)}
    held: dict[Any, int] = {}
    now = most = 0
    for place, equation in enumerate(jaxpr.eqns):
        inside = max((_peak(part) for part, _ in _inner(equation, 1)), default=0)
        is_virtual = equation.primitive.name in _VIRTUAL
        made = {out: 0 if is_virtual else _size(out) for out in equation.outvars}
        new = sum(made.values())
        # The results of a call are among the values inside; those of a loop are beside its body's.
        is_loop = equation.primitive.name in ("scan", "while")
        most = max(most, now + (new + inside if is_loop else max(new, inside)))
        held |= {out: size for out, size in made.items() if out in last}
        now += sum(held[out] for out in made if out in held)
        for variable in {v for v in equation.invars if isinstance(v, core.Var)}:
            if last[variable] == place:
                now -= held.pop(variable, 0)
    return most


def compile_step(
    traced: jax.stages.Traced, platform: str | None = None
) -> tuple[jax.stages.Compiled, float]:
    """Returns a compiled step and the seconds it took; the platform is None for the default one."""
    start = time.monotonic()
    compiled = traced.lower(lowering_platforms=(platform,) if platform else None).compile()
    return compiled, time.monotonic() - start


def analyzed_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of arguments, results and work space by XLA, shared ones once."""
    found = compiled.memory_analysis()
    if found is None:
        backend = jax.default_backend()
        raise ValueError(f"{backend} must have an analysis of memory: use --nocompile")
    held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return int(held - found.alias_size_in_bytes)


class Rates(NamedTuple):
    """What a device does in a second: operations of a matrix product, bytes moved by a copy."""

    operations: float
    bytes_moved: float
    device: str


def measure_rates(*, inputs: int, outputs: int, dtype: Any) -> Rates:
    """Returns the rates of the default device, the product's at a kernel of the model's width."""
    vector = jnp.ones(2**24 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    return Rates(
        operations=measure_product(inputs=inputs, outputs=outputs, dtype=dtype),
        bytes_moved=2.0 * vector.nbytes / _shortest(jax.jit(lambda x: x + 1), vector),
        device=jax.devices()[0].device_kind,
    )


def measure_product(*, inputs: int, outputs: int, dtype: Any) -> float:
    """Returns the operations a second of a product of rows with a kernel, on the default device."""
    most = 2e9 if jax.default_backend() == "cpu" else 2e12
    rows = int(min(8192, max(16, most // (2 * inputs * outputs))))
    kernel = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    return 2.0 * rows * inputs * outputs / _shortest(jax.jit(jnp.matmul), *kernel)


def _shortest(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of the fastest of five calls, compiled before."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
