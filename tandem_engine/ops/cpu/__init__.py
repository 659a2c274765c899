"""The op layer on CPUs: C++ kernels, from a platform wheel or compiled on the machine they run on."""

from tandem_engine.ops.cpu.compile import KernelsUnavailable
from tandem_engine.ops.cpu.ops import CpuOps, load_cpu_ops

__all__ = ["CpuOps", "KernelsUnavailable", "load_cpu_ops"]
