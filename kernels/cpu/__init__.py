"""The compiled CPU kernels: C++ behind a plain C interface, built at first use."""

from kernels.cpu.kernel_set import CpuKernels
from kernels.errors import CpuKernelsUnavailable

__all__ = ["CpuKernels", "CpuKernelsUnavailable"]
