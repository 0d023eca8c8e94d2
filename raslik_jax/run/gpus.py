"""GPUs that need not exist: XLA compiles for them on any machine and runs nothing.

It needs three wheels of XLA's CUDA compiler (see `wheels`) in addition to a jaxlib for CPUs, and
none of CUDA's libraries. The result is the program for a GPU: optimized, with assembled kernels and
its memory. Without a device nothing is timed. XLA chooses the tiles of each product by rule and
calls no cuBLAS.
"""

import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

# A GpuTargetConfigProto, as XLA keeps them in xla/backends/gpu/target_config/specs.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bytes_per_second:.0f} device_memory_size: {memory_bytes}
  l2_cache_size: 52428800 clock_rate_ghz: 1.98
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{title}"
"""


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
        """The description from which XLA compiles."""
        return _HOPPER.format(**self._asdict())


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
