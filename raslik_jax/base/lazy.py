"""jax and optax, loaded at their first use: tools that compute nothing can list families.

Modules of records (objectives, projections) import them from here. Settings, help texts and reports
then never wait for jax:

    from raslik_jax.base.lazy import Array, jax, jnp
"""

import importlib
from typing import TYPE_CHECKING, Any


class Module:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import optax
    from jax import Array
else:

    class _ArrayType(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, jax.Array)

    class Array(metaclass=_ArrayType):
        """`jax.Array` in annotations."""

    jax, jnp, optax = Module("jax"), Module("jax.numpy"), Module("optax")

__all__ = ["Array", "Module", "jax", "jnp", "optax"]
