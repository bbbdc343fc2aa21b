"""Errors of choosing kernels, and of ranks."""

from __future__ import annotations


class KernelsUnavailable(ValueError):
    """The kernels that are asked for don't exist or can't run here; the message says why.

    Attributes:
        param: the environment variable that asks for them.
    """

    def __init__(self, message: str, param: str = "QUIRE_KERNELS") -> None:
        super().__init__(message)
        self.param = param


class CpuKernelsUnavailable(KernelsUnavailable):
    """The library can't be built or loaded; the message says why. Plain torch still works."""


class VariantUnavailable(CpuKernelsUnavailable):
    """One variant can't be had here; a lesser one may."""


class RankError(RuntimeError):
    """Another rank has failed, or did not come to a gather in time."""


class RankTimeout(RankError):
    """A rank lives, and did not send what others wait for in time.

    Attributes:
        rank: its number among those that wait.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
