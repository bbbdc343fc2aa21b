"""Errors of kernel selection and of ranks."""

from __future__ import annotations


class KernelsUnavailable(ValueError):
    """The requested kernels don't exist or can't run here; the message says why.

    Attributes:
        param: the environment variable that requested them.
    """

    def __init__(self, message: str, param: str = "QUIRE_KERNELS") -> None:
        super().__init__(message)
        self.param = param


class CpuKernelsUnavailable(KernelsUnavailable):
    """The library can't be built or loaded; the message says why. Plain torch works without it."""


class VariantUnavailable(CpuKernelsUnavailable):
    """A variant is unavailable here; a lesser one may be available."""


class RankError(RuntimeError):
    """Another rank failed, or didn't reach a gather in time."""


class RankTimeout(RankError):
    """A rank is alive but didn't send data in time.

    Attributes:
        rank: its number in the group.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
