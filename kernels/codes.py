"""Weights that are codes of floats: what they stand for, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.quantization import MOST

CodeKind = Literal["e4m3", "e2m1", "table"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Floats of a sign, two bits of an exponent and one of a mantissa."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How codes become weights.

    Attributes:
        kind: "e4m3": codes are floats of 8 bits; "e2m1": numbers of `E2M1`; "table": of `table`.
        group_size: neighbours of a row that share a scale, a multiple of 16 up to 256.
        table: 16 floats.
    """

    kind: CodeKind
    group_size: int
    table: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.kind == "e4m3" else 4


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of weights: codes uint8 [N, K], scales float32 [N, ceil(K / group_size)].

    weight = value of the code * scale. Codes of 4 bits lie in [0, 15].
    """

    codes: Tensor
    scales: Tensor


def check_coding(coding: Coding) -> None:
    """Raise ValueError for a coding that no kernel has."""
    size = coding.group_size
    if size < 16 or size > MOST or size % 16:
        raise ValueError(f"group_size must be a multiple of 16 in [16, {MOST}], got {size}")
    if coding.kind not in ("e4m3", "e2m1", "table"):
        raise ValueError(f"a coding is e4m3, e2m1 or table, not {coding.kind!r}")
    if len(coding.table) != (16 if coding.kind == "table" else 0):
        raise ValueError("a coding by table has 16 floats, others have none")


def check_codes(piece: Codes, width: int, coding: Coding) -> None:
    """Raise ValueError unless a piece's tensors fit each other and their layer."""
    codes, scales = piece.codes, piece.scales
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] != width:
        raise ValueError(f"codes must be uint8 [N, {width}]")
    if scales.shape != (len(codes), -(-width // coding.group_size)):
        raise ValueError(f"scales {list(scales.shape)} don't fit codes {list(codes.shape)}")
    if coding.bits == 4 and codes.numel() and int(codes.max()) > 15:
        raise ValueError("codes of 4 bits must lie in [0, 15]")


def decoded(piece: Codes, coding: Coding) -> Tensor:
    """The float32 weights [N, K] that codes stand for."""
    codes, width = piece.codes, piece.codes.shape[1]
    if coding.kind == "e4m3":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = torch.tensor(coding.table or E2M1)[codes.long()]
    scales = piece.scales.float().repeat_interleave(coding.group_size, 1)[:, :width]
    return values * scales


def check_order(order: Tensor | None, width: int) -> None:
    """Raise ValueError unless it names each of `width` inputs once."""
    if order is None:
        return
    if order.shape != (width,) or not torch.equal(order.sort().values, torch.arange(width)):
        raise ValueError(f"order must name each of the {width} inputs once")


def unsorted(weight: Tensor, order: Tensor | None) -> Tensor:
    """Columns that are sorted by `order`, where they belong."""
    if order is None:
        return weight
    placed = torch.empty_like(weight)
    placed[:, order] = weight
    return placed
