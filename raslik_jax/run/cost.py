"""The rates of this machine's device, by a matrix product and a copy."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from raslik_jax.models import products
from raslik_jax.run import memory
from raslik_jax.run.gpus import GPUS, Device

# The rates of a device that is not measured, by JAX's name of its kind.
ASSUMED = {"cpu": Device("a CPU", 0, 1e10, 1e11), "gpu": GPUS["h200"]}


def measure(inputs: int, outputs: int, dtype: Any) -> Device:
    """Returns the default device; the product has a kernel of the model's width."""
    vector = jnp.ones(2**24 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    return Device(
        jax.devices()[0].device_kind,
        memory.device_bytes(),
        bytes_per_second=2.0 * vector.nbytes / _shortest(jax.jit(lambda x: x + 1), vector),
        flops_per_second=measure_product(inputs=inputs, outputs=outputs, dtype=dtype),
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
