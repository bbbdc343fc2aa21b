"""`HeadLinears` of the CPU: all heads in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kernels.cpu.checks import describe
from kernels.cpu.library import DTYPES, Library, check
from kernels.cpu.linear import CpuLinear
from kernels.cpu.threads import num_threads
from kernels.heads import HeadLinears
from kernels.layers import LinearLayer


class CpuHeadLinears(HeadLinears):
    """See `KernelSet.head_linears`. Keeps the layers that it points to."""

    def __init__(self, library: Library, layers: Sequence[LinearLayer]) -> None:
        """Raises ValueError for layers of other kernels, or of several shapes."""
        super().__init__(layers)
        handles = [layer.handle for layer in layers if isinstance(layer, CpuLinear)]
        if len(handles) != len(layers):
            raise ValueError("the heads' layers are none of these kernels")
        self._table = (ctypes.c_void_p * len(handles))(*handles)
        self._at, self._run = ctypes.addressof(self._table), library.linear_heads
        self._sizes = layers[0].in_features, layers[0].out_features

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `HeadLinears.__call__`."""
        rows, heads, (k, n) = len(x), len(self.layers), self._sizes
        if x.shape != (rows, heads, k) or out.shape != (rows, heads, n) or x.dtype != out.dtype:
            raise ValueError(
                f"x {describe(x)} and out {describe(out)} must be [T, {heads}, {k}] and "
                f"[T, {heads}, {n}] of one dtype"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
        if (x.stride(2) != 1 and k > 1) or (out.stride(2) != 1 and n > 1):
            raise ValueError("a head's values must lie side by side")
        status = self._run(
            self._at, heads, out.data_ptr(), out.stride(0), out.stride(1), x.data_ptr(),
            x.stride(0), x.stride(1), rows, DTYPES[x.dtype], num_threads(),
        )  # fmt: skip
        if status:
            check(status)
