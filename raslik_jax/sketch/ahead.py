"""Programs of a jitted step that a thread compiles while other programs run."""

import concurrent.futures
import contextvars
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import jax

from raslik_jax.base.axes import Tree

# Names of threads that compile begin so.
THREAD = "raslik-compile"


class Ahead:
    """A jitted step of (*fixed, rows) whose next program is compiled while one of them runs.

    Each shape of `rows` has its program. After a call a thread compiles the program of the next
    shape in the given order, unless it is still busy. `start` compiles the first one, for which no
    arrays are needed. The step itself compiles any program that the thread has not begun.

    The thread reads shapes and dtypes alone. Arrays must be on the default device and have no
    layout. Settings of `jax.config.update` apply to the thread. Settings of a context such as
    `jax.default_matmul_precision` do not.

    Example:
      with Ahead(jax.jit(step), weights, rows=batches) as step:
          results = [step(weights, batch) for batch in batches]

    Args:
      step: a jitted function.
      fixed: the first arguments, or their shapes and dtypes.
      rows: the last arguments of later calls in their order, or their shapes and dtypes.
    """

    def __init__(self, step: Any, *fixed: Tree, rows: Iterable[Tree]):
        self._step, self._fixed = step, jax.tree.map(_abstract, fixed)
        abstract = (jax.tree.map(_abstract, one) for one in rows)
        self._rows = {_shape_of(one): one for one in abstract}
        self._order = [*self._rows]
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._begun: dict[Any, concurrent.futures.Future[jax.stages.Compiled]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, THREAD)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False)

    def start(self) -> None:
        """Begins with the first program."""
        self._begin(0)

    def __call__(self, *arguments: Tree) -> Any:
        """Returns step(*fixed, rows)."""
        shape = _shape_of(arguments[-1])
        if shape in self._begun:
            self._programs[shape] = self._begun.pop(shape).result()
        found = self._programs.setdefault(shape, self._step)(*arguments)
        if shape in self._rows:
            self._begin(self._order.index(shape) + 1)
        return found

    def _begin(self, place: int) -> None:
        is_busy = any(not program.done() for program in self._begun.values())
        for shape in self._order[place : place + 1]:
            if not is_busy and shape not in self._programs and shape not in self._begun:
                # The project's own settings of the caller, such as the platform to trace for.
                run = contextvars.copy_context().run
                self._begun[shape] = self._pool.submit(run, self._compile, self._rows[shape])

    def _compile(self, rows: Tree) -> jax.stages.Compiled:
        return self._step.lower(*self._fixed, rows).compile()


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    is_weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)


def _shape_of(rows: Tree) -> Any:
    leaves, structure = jax.tree.flatten(rows)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
