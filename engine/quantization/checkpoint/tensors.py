"""A checkpoint's tensors as they are stored, and those of one layer with their checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError

Dtypes = Collection[torch.dtype]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Powers of two as scales.
POWERS = (torch.float8_e8m0fnu,)
#: Of such a power that isn't a number.
NAN_EXPONENT = 255


class Tensors(Protocol):
    """Where they come from."""

    @property
    def where(self) -> str:
        """Of which checkpoint they are, for messages."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Words of the files' headers."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """All of them."""

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Its shape, by the header."""

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """Its dtype, by the header; None: an unknown one."""

    def stored(self, name: str) -> Tensor:
        """As it is kept, whatever its dtype, backed by the mapped file.

        Raises `ModelLoadError` where it is absent or of an unknown dtype.
        """


class Parts:
    """The tensors that make up one packed weight, by what follows the layer's name.

    Each is checked as it's taken; `ModelLoadError` names the tensor, and as `param` what follows
    the layer's name.
    """

    def __init__(self, tensors: Tensors, module: str, joint: str = ".") -> None:
        self.tensors, self.module, self._joint = tensors, module, joint

    def __contains__(self, suffix: str) -> bool:
        return self.name(suffix) in self.tensors

    def name(self, suffix: str) -> str:
        """A tensor's whole name."""
        return f"{self.module}{self._joint}{suffix}"

    def wrong(self, suffix: str, why: str) -> ModelLoadError:
        """An error that names the tensor."""
        return ModelLoadError(f"{self.tensors.where}: {self.name(suffix)!r} {why}.", param=suffix)

    def shape(self, suffix: str, dims: int) -> tuple[int, ...]:
        """A tensor's shape, which must have that many dimensions, none of them empty."""
        if suffix not in self:
            raise self.wrong(suffix, "isn't there, and the layer's other tensors need it")
        shape = self.tensors.stored_shape(self.name(suffix))
        if len(shape) != dims or 0 in shape:
            raise self.wrong(suffix, f"has shape {shape}, not {dims} dimensions")
        return shape

    def take(self, suffix: str, dtypes: Dtypes, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor of one of these dtypes and, where it's given, this shape."""
        if suffix not in self:
            raise self.wrong(suffix, "isn't there, and the layer's other tensors need it")
        found = self.tensors.stored(self.name(suffix))
        if found.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.wrong(suffix, f"is kept as {str(found.dtype)[6:]}, not as {wanted}")
        if shape is not None and tuple(found.shape) != shape:
            raise self.wrong(suffix, f"has shape {tuple(found.shape)}, not {shape}")
        return found

    def number(self, suffix: str, dtypes: Dtypes) -> int:
        """A tensor of one whole number."""
        found = self.take(suffix, dtypes)
        if found.numel() != 1:
            raise self.wrong(suffix, f"has shape {tuple(found.shape)}, not one number")
        return int(found)

    def scales(self, suffix: str, *shapes: tuple[int, ...], dtypes: Dtypes = FLOATS) -> Tensor:
        """A tensor of scales of one of these shapes, all finite."""
        found = self.take(suffix, dtypes)
        if tuple(found.shape) not in shapes:
            wanted = " or ".join(str(shape) for shape in shapes)
            raise self.wrong(suffix, f"has shape {tuple(found.shape)}, not {wanted}")
        if not bool(torch.isfinite(found.float()).all()):
            raise self.wrong(suffix, "has values that aren't finite")
        return found

    def scalar(self, suffix: str) -> float:
        """A single scale: finite and not zero."""
        value = float(self.scales(suffix, (), (1,), (1, 1)).float().flatten()[0])
        if value == 0.0:
            raise self.wrong(suffix, "is zero")
        return value


def modules_with(tensors: Tensors, suffix: str) -> list[str]:
    """The layers that have a tensor of that name behind theirs."""
    tail = f".{suffix}"
    return sorted(name.removesuffix(tail) for name in tensors.names() if name.endswith(tail))
