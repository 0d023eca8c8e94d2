"""GPUs that need not exist: XLA compiles for them on any machine and runs nothing.

It needs three wheels of XLA's CUDA compiler (see `wheels`) in addition to a jaxlib for CPUs, and
none of CUDA's libraries. The result is the program for a GPU: optimized, with assembled kernels and
its memory. Without a device nothing is timed. XLA chooses the tiles of each product by rule and
calls no cuBLAS.
"""

import importlib.metadata
import importlib.resources
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax


class Device(NamedTuple):
    """One kind of device: its memory and its rates.

    `flops_per_second` is of bfloat16 matrix products of a training step's size, in place of the
    989e12 of the data sheet. An H100 reached 670e12 to 730e12. `bytes_per_second` is of device
    memory. A copy on an H100 reached 3.0e12.
    """

    title: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float = 600e12

    @property
    def usable_bytes(self) -> int:
        """The memory of a GPU that programs may take, by the share that JAX reserves."""
        return int(SHARE * self.memory_bytes)

    @property
    def spec(self) -> str:
        """The GpuTargetConfigProto from which XLA compiles, as in its gpu/target_config/specs."""
        text = importlib.resources.files("raslik_jax.run") / "hopper.textproto"
        return text.read_text("utf-8").format(**self._asdict())


# The share of a GPU's memory that JAX reserves; its default is 75 %. CUDA itself takes about 1 GB.
SHARE = 0.95
GPUS = {
    "h100-80gb": Device("NVIDIA H100 80GB HBM3", 84_929_347_584, 3.35e12),
    # Measured copies reach 4.3 of the 4.8 TB/s of its data sheet.
    "h200": Device("NVIDIA H200", 150_754_820_096, 4.3e12),
}


def wheels() -> list[str]:
    """Returns the packages for `pip install --no-deps`: compiler, runtime and assembler."""
    version = importlib.metadata.version("jax")
    return [
        f"jax-cuda12-plugin=={version}",
        f"jax-cuda12-pjrt=={version}",
        "nvidia-cuda-nvcc-cu12",
    ]


def prepare() -> None:
    """Prepares this process to compile for a GPU; call it before jax looks for devices.

    It raises a ValueError if XLA's CUDA compiler is not installed.
    """
    from raslik_jax.data.words import refused

    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise refused("gpu_compiler", wheels=" ".join(wheels()))
    # The CPU stays the default; the plugin does not ask a driver for devices.
    os.environ["JAX_PLATFORMS"] = ""
    if "jax" in sys.modules:  # it has read the variable
        sys.modules["jax"].config.update("jax_platforms", "")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it says at length that there is no driver


def mesh_of(gpu: Device, *, data: int = 1) -> "jax.sharding.Mesh":
    """Returns a mesh of GPUs of one machine that need not exist."""
    from jax.experimental import topologies

    from raslik_jax.parallel import meshes

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.spec, topology=f"1x1x{data}"
    )
    return meshes.mesh_of(topology.devices)
