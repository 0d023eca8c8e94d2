"""jax and optax, loaded when first used: families can be listed by tools that compute nothing.

Modules of records (objectives, projections) take them from here, so that settings, help texts and
reports never wait for jax:

    from raslik_jax.base.lazy import Array, jax, jnp
"""

import importlib
from typing import TYPE_CHECKING, Any


class Module:
    """A module that is imported when something of it is asked for."""

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
