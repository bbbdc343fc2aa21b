"""The compiled CPU kernels: C++ behind a plain C interface, built at first use."""

from kernels.cpu.errors import CpuKernelsUnavailable
from kernels.cpu.kernel_set import CpuKernels

__all__ = ["CpuKernels", "CpuKernelsUnavailable"]
