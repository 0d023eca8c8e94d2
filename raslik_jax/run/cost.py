"""What a compiled step costs, counted from its jaxpr: operations, bytes and memory.

`count` walks the jaxpr of the very function that will run, so that a loss, an architecture or an
objective needs no arithmetic of its own: the products of a scan's body count as often as it runs,
those of a branch as its most expensive one. Nothing is compiled and no weight is allocated;
`compile_step` does compile, for XLA's own analysis of the memory.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core


class Cost(NamedTuple):
    """What one call of a function costs.

    Attributes:
      operations: multiplications and additions of its matrix products and convolutions.
      bytes_moved: read and written by products, gathers and scatters; elementwise work is taken to
        be fused into them.
      device_bytes: the most memory that its arguments and values take at a time, in the order of
        the jaxpr; fused or shared buffers make it less.
    """

    operations: float
    bytes_moved: float
    device_bytes: float


def trace_cost(function: Callable[..., Any], *args: Any, trips: int = 1, **static: Any) -> Cost:
    """Returns the cost of a call.

    Args:
      function: jitted, or to be.
      *args: trees of arrays or of their shapes.
      trips: how often the bodies of loops run whose length is known at run time only.
      **static: static arguments, and others by name.
    """
    return count(trace(function, *args, **static).jaxpr, trips=trips)


def trace(function: Callable[..., Any], *args: Any, **static: Any) -> jax.stages.Traced:
    """Returns a function traced at these shapes; what is not jitted has no static arguments."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    return jitted.trace(*args, **static)


def count(closed: core.ClosedJaxpr, *, trips: int = 1) -> Cost:
    """Returns the cost of a jaxpr; `trips` as in `trace_cost`."""
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
            (times * counted[0], times * counted[1])
            for part, times in _inner(equation, trips)
            for counted in [_count(part, trips)]
        ]
        if name == "cond":
            found = [max(found)]
        operations += sum(pair[0] for pair in found) + _OPERATIONS.get(name, _none)(equation)
        # What a kernel reads and writes inside itself never leaves the chip.
        kernel = name == "pallas_call"
        moved += 0.0 if kernel else sum(pair[1] for pair in found)
        moved += _BYTES.get(name, _none)(equation)
    return operations, moved


def _none(equation: core.JaxprEqn) -> float:
    return 0.0


def _aval(variable: Any) -> Any:
    return variable.aval


def _dot_operations(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = _aval(equation.invars[0]), _aval(equation.outvars[0])
    return 2.0 * out.size * math.prod(left.shape[axis] for axis in contracted)


def _convolution_operations(equation: core.JaxprEqn) -> float:
    kernel, out = _aval(equation.invars[1]), _aval(equation.outvars[0])
    outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * out.size * kernel.size / outputs


_OPERATIONS: dict[str, Callable[[core.JaxprEqn], float]] = {
    "dot_general": _dot_operations,
    "conv_general_dilated": _convolution_operations,
}


def _all_bytes(equation: core.JaxprEqn) -> float:
    return float(sum(map(_size, (*equation.invars, *equation.outvars))))


def _written_twice(place: int) -> Callable[[core.JaxprEqn], float]:
    """Returns the bytes of an operand, read and written, of updates in place."""
    return lambda equation: 2.0 * _size(equation.invars[place])


_BYTES: dict[str, Callable[[core.JaxprEqn], float]] = {
    "dot_general": _all_bytes,
    "conv_general_dilated": _all_bytes,
    "pallas_call": _all_bytes,
    "gather": lambda equation: 2.0 * _size(equation.outvars[0]),
    "scatter": _written_twice(2),
    "scatter-add": _written_twice(2),
    "dynamic_update_slice": _written_twice(1),
}
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


def compile_step(traced: jax.stages.Traced) -> tuple[int, float]:
    """Returns the bytes that XLA's own analysis gives for a step, and the seconds to compile it."""
    start = time.monotonic()
    compiled = traced.lower().compile()
    return analyzed_bytes(compiled), time.monotonic() - start


def analyzed_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the peak that XLA's own analysis gives for a compiled function, in bytes.

    Arguments, results and work space, less what they share.

    Raises:
      ValueError: a backend without such an analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(
            f"the backend must have an analysis of memory, got {jax.default_backend()}: use "
            "--nocompile"
        )
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


class Rates(NamedTuple):
    """What the default device does in a second.

    Attributes:
      operations: multiplications and additions of a matrix product.
      bytes_moved: bytes read and written by a copy.
      device: what it is.
    """

    operations: float
    bytes_moved: float
    device: str


def measure_rates(*, inputs: int, outputs: int, dtype: Any) -> Rates:
    """Returns the rates of the default device, measured within about a second.

    The product has the width of the model's own: a narrow one does not reach the rate of a wide.

    Args:
      inputs: of the kernel.
      outputs: of the kernel.
      dtype: of the kernel.
    """
    is_host = jax.default_backend() == "cpu"
    most = 2e9 if is_host else 2e12
    rows = int(min(8192, max(16, most // (2 * inputs * outputs))))
    kernel = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    vector = jnp.ones(2**24 if is_host else 2**28, jnp.float32)
    return Rates(
        operations=2.0 * rows * inputs * outputs / _shortest(jax.jit(jnp.matmul), *kernel),
        bytes_moved=2.0 * vector.nbytes / _shortest(jax.jit(lambda x: x + 1), vector),
        device=jax.devices()[0].device_kind,
    )


def _shortest(function: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of the fastest of some calls, compiled before."""
    call = functools.partial(function, *args)
    jax.block_until_ready(call())
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)
