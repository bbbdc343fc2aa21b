"""Errors of the compiled kernels."""

from __future__ import annotations

from kernels.errors import KernelsUnavailable


class CpuKernelsUnavailable(KernelsUnavailable):
    """The library can't be built or loaded here; the message says why. Plain torch still works."""


class VariantUnavailable(CpuKernelsUnavailable):
    """One variant can't be had here; a lesser one may."""
