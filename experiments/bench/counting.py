"""The operations of a traced function: multiplications and additions of its products.

The jaxpr of the function that will run is walked. The body of a scan counts once per step. A
condition counts as its most expensive branch.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

from jax.extend import core


def count(jaxpr: core.Jaxpr, *, trips: int = 1) -> float:
    """Returns the operations of a jaxpr; loops of a length known at run time run `trips` times.

    Inside a loop of a known length the trips are divided among its steps.
    """
    found = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inside = [
            times * count(part, trips=-(-trips // times) if name == "scan" else trips)
            for part, times in _inner(equation, trips)
        ]
        found += _count_own(equation) + (max(inside) if name == "cond" else sum(inside))
    return found


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


def _count_own(equation: core.JaxprEqn) -> float:
    """Returns the operations of an equation without those of the jaxprs inside."""
    given, out = equation.invars, cast(Any, equation.outvars[0].aval if equation.outvars else None)
    numbers: Any = equation.params.get("dimension_numbers")
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = numbers
        return (
            2.0 * out.size * math.prod(cast(Any, given[0].aval).shape[axis] for axis in contracted)
        )
    if equation.primitive.name == "conv_general_dilated":
        kernel = cast(Any, given[1].aval)
        return 2.0 * out.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
    return 0.0
