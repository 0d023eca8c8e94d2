"""GPUs that need not be there: what is said without their compiler."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raslik_jax.parallel import meshes
from raslik_jax.run import gpus
from raslik_jax.run.programs import Forward, Program, Shape
from raslik_jax.sketch import head


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"XLA's CUDA compiler must be installed.*pip install --no-deps"
    ):
        gpus.prepare()
    assert f"jax-cuda12-plugin=={jax.__version__}" in gpus.wheels()


def test_a_description_has_memory_bandwidth_and_name():
    spec = gpus.GPUS["h200"].spec
    for part in ("device_memory_size: 150754820096", "memory_bandwidth: 4300000000000", '"NVIDIA'):
        assert part in spec
    assert spec.count("{") == spec.count("}")


def test_a_step_for_a_mesh_is_that_of_its_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    how = {"fixed": (), "shapes": {}, "model": Forward(0.0), "batch": lambda shape: rows}
    here, there = (
        Program("product", lambda x: x @ x.T, mesh=one, **how).compile(Shape(8, 16, 16))
        for one in (None, mesh)
    )
    assert here.memory_bytes == there.memory_bytes == 4 * (8 * 16 + 8 * 8)


def test_tiles_of_the_head_are_those_of_the_platform():
    here = head.tile_shape()
    with meshes.traced_for("gpu"):
        assert head.tile_shape() > here
    assert head.tile_shape() == here
