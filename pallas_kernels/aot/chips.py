"""The GPUs that kernels are compiled for, as XLA describes them to its compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU model.

    Attributes:
        device_kind: The name that the driver reports.
        major: Of the compute capability.
        minor: Of the compute capability.
        features: XLA's name of the instruction set: "ACCELERATED_FEATURES" is the `a` in sm_90a.
        cores: Streaming multiprocessors.
        lanes: Float32 lanes per multiprocessor.
        threads: Most resident threads per multiprocessor.
        shared_bytes: Most shared memory of one thread block.
        shared_bytes_core: Shared memory of one multiprocessor.
        memory_bytes: Device memory.
        bandwidth: Of device memory, bytes/s.
        l2_bytes: Second-level cache.
        clock_ghz: Boost clock.
    """

    device_kind: str
    major: int
    minor: int
    features: str = "ACCELERATED_FEATURES"
    cores: int
    lanes: int = 128
    threads: int = 2048
    shared_bytes: int = 232_448
    shared_bytes_core: int = 233_472
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float

    @property
    def target(self) -> str:
        """The architecture as the assembler names it."""
        suffix = "a" if self.features == "ACCELERATED_FEATURES" else ""
        return f"sm_{self.major}{self.minor}{suffix}"

    def mesh(self, num_devices: int = 1, axis: str = "tensor") -> Mesh:
        """Return a mesh of this many chips of one host; arrays on it exist only abstractly.

        Needs a process that sees the CUDA plugin.
        """
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=self._target_config(), topology=f"1x1x{num_devices}"
        )
        return Mesh(np.array(topology.devices), (axis,))

    def _target_config(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` in text form."""
        return _TARGET_CONFIG.format(chip=self)


_TARGET_CONFIG = """
platform_name: "CUDA"
device_description_str: "{chip.device_kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
gpu_device_info {{
  name: "{chip.device_kind}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{
    major: {chip.major} minor: {chip.minor} feature_extension: {chip.features}
  }}
  core_count: {chip.cores} fpus_per_core: {chip.lanes} clock_rate_ghz: {chip.clock_ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {chip.threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {chip.shared_bytes}
  shared_memory_per_core: {chip.shared_bytes_core}
  device_memory_size: {chip.memory_bytes} memory_bandwidth: {chip.bandwidth}
  l2_cache_size: {chip.l2_bytes}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
"""

CHIPS: dict[str, Chip] = {
    "a100": Chip(
        device_kind="NVIDIA A100-SXM4-80GB",
        major=8,
        minor=0,
        features="NONE",
        cores=108,
        lanes=64,
        shared_bytes=166_912,
        shared_bytes_core=167_936,
        memory_bytes=85_100_068_864,
        bandwidth=2_039_040_000_000,
        l2_bytes=41_943_040,
        clock_ghz=1.41,
    ),
    "l4": Chip(
        device_kind="NVIDIA L4",
        major=8,
        minor=9,
        features="NONE",
        cores=58,
        threads=1536,
        shared_bytes=101_376,
        shared_bytes_core=102_400,
        memory_bytes=23_609_475_072,
        bandwidth=300_096_000_000,
        l2_bytes=50_331_648,
        clock_ghz=2.04,
    ),
    "h100": Chip(
        device_kind="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        cores=132,
        memory_bytes=84_942_979_072,
        bandwidth=3_352_320_000_000,
        l2_bytes=52_428_800,
        clock_ghz=1.98,
    ),
    "b200": Chip(
        device_kind="NVIDIA B200",
        major=10,
        minor=0,
        cores=148,
        memory_bytes=191_514_411_008,
        bandwidth=7_672_320_000_000,
        l2_bytes=132_644_864,
        clock_ghz=1.965,
    ),
    "rtx_pro_6000": Chip(
        device_kind="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        major=12,
        minor=0,
        cores=188,
        threads=1536,
        shared_bytes=101_376,
        shared_bytes_core=102_400,
        memory_bytes=102_000_000_000,
        bandwidth=1_600_000_000_000,
        l2_bytes=134_217_728,
        clock_ghz=2.4,
    ),
}
"""One chip per generation, oldest first."""


@contextmanager
def targeting(mesh: Mesh) -> Iterator[None]:
    """Trace and compile for the mesh's chips inside the block."""
    # Mosaic takes the chip from the default device, Triton from the abstract mesh.
    with (
        jax.default_device(mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield
