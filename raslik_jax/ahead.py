"""Programs of a jitted step that a thread compiles while others run."""

import concurrent.futures
import contextvars
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import jax

from raslik_jax.axes import Tree

# What `jax.monitoring` calls the span in which a call waits for its program.
WAITING = "/jax/core/compile/waiting"


class Ahead:
    """A jitted step of (*fixed, rows) whose next program is compiled while one of them runs.

    Each shape of `rows` has its program. When one is first called, a thread begins with that of the
    shape behind it in the order given. `start` begins with the first one, when there may be no
    arrays yet: the thread reads shapes and dtypes alone. On one device; a program is compiled for
    arrays that have no layout.

    Example:
      with Ahead(jax.jit(step), weights, rows=batches) as step:
          results = [step(weights, batch) for batch in batches]

    Args:
      step: What `jax.jit` returns.
      fixed: The first arguments, or their shapes and dtypes.
      rows: The last arguments of calls that are to come, in their order, or shapes and dtypes.
    """

    def __init__(self, step: Any, *fixed: Tree, rows: Iterable[Tree]):
        self._step, self._fixed = step, jax.tree.map(_abstract, fixed)
        abstract = (jax.tree.map(_abstract, one) for one in rows)
        self._rows = {_shape_of(one): one for one in abstract}
        self._order = [*self._rows]
        self._programs: dict[Any, concurrent.futures.Future[jax.stages.Compiled]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "compile")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self) -> None:
        """Begins with the first program."""
        self._begin(0)

    def __call__(self, *arguments: Tree) -> Any:
        """Returns step(*fixed, rows)."""
        shape = _shape_of(arguments[-1])
        if shape not in self._rows:
            self._rows[shape] = jax.tree.map(_abstract, arguments[-1])
            self._order.append(shape)
        place = self._order.index(shape)
        self._begin(place)
        found = _wait_for(self._programs[shape])(*arguments)
        self._begin(place + 1)
        return found

    def _begin(self, place: int) -> None:
        if place < len(self._order) and self._order[place] not in self._programs:
            shape = self._order[place]
            # The settings of the caller's context, such as the platform to trace for.
            run = contextvars.copy_context().run
            self._programs[shape] = self._pool.submit(run, self._compile, self._rows[shape])

    def _compile(self, rows: Tree) -> jax.stages.Compiled:
        return self._step.lower(*self._fixed, rows).compile()


def _wait_for(program: concurrent.futures.Future[jax.stages.Compiled]) -> jax.stages.Compiled:
    if not program.done():  # whoever counts the seconds of compiling counts these
        begin = time.time()
        concurrent.futures.wait([program])
        jax.monitoring.record_event_time_span(WAITING, begin, time.time())
    return program.result()


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shape_of(rows: Tree) -> Any:
    leaves, structure = jax.tree.flatten(rows)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
