"""Errors of choosing kernels."""

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
    """The library can't be built or loaded here; the message says why. Plain torch still works."""


class VariantUnavailable(CpuKernelsUnavailable):
    """One variant can't be had here; a lesser one may."""


class StructMismatch(KernelsUnavailable):
    """A struct of the library isn't laid out as Python fills it in.

    The two come from different versions: nothing falls back, since only a new installation helps.

    Attributes:
        struct: its name in C++.
        field: the first field that differs, or None where the whole struct does.
    """

    def __init__(self, struct: str, field: str | None, told: str) -> None:
        name = struct if field is None else f"{struct}.{field}"
        super().__init__(
            f"the CPU kernels' library doesn't go with this version of Quire: {name} is {told}"
        )
        self.struct, self.field = struct, field
