"""Decoders for the blocks of quantized tensors.

Each type is read as integers with a scale for `group` neighbours: weight = scale * value - minimum.
The layouts are ggml's (ggml-common.h and ggml-quants.c of llama.cpp, whose facts these are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoints.gguf import file as types
from kernels.interface import IntegerRows
from kernels.linear_factory import IntegerFormat


class Blocks(NamedTuple):
    """Decoded rows.

    Attributes:
        values: int8 [n, K], signed around `zero`.
        scales: float32 [n, K / group].
        minima: the same, or None.
        zero: subtracted from a value before it is scaled.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zero: int = 0

    def floats(self) -> Tensor:
        """Return the weights, float32 [n, K]."""
        rows, groups = self.scales.shape
        grouped = self.values.view(rows, groups, -1).float()
        result = (grouped - self.zero) * self.scales[..., None]
        if self.minima is not None:
            result -= self.minima[..., None]
        return result.flatten(1)

    def integers(self) -> IntegerRows:
        """Return the rows in the kernels' form."""
        return IntegerRows(self.values, self.scales, self.minima)


def _half(raw: Tensor, offset: int) -> Tensor:
    """float32 [n, blocks]: the float16 at byte `offset` of each block."""
    return raw[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed & 15, packed >> 4


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _quarters(packed: Tensor) -> Tensor:
    """Return pairs of bits: for each 32 bytes first the lowest pairs, then the next higher ones."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    runs = packed.unflatten(-1, (-1, 1, 32))
    return ((runs >> shifts) & 3).flatten(-3)


def _rows(values: Tensor) -> Tensor:
    """int8 [n, K] from uint8 [n, blocks, ...]."""
    return values.flatten(1).to(torch.int8)


def _q8_0(raw: Tensor) -> Blocks:
    values = raw[..., 2:].contiguous().view(torch.int8).flatten(1)
    # ggml's quantizer never writes -128, which the kernels don't support.
    return Blocks(values.clamp(min=-127), _half(raw, 0))


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_rows(torch.cat(_nibbles(raw[..., 2:]), -1)), _half(raw, 0), zero=8)


def _q4_1(raw: Tensor) -> Blocks:
    values = _rows(torch.cat(_nibbles(raw[..., 4:]), -1))
    return Blocks(values, _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    """The fifth bits of the 32 values precede the nibbles, in four bytes."""
    values = torch.cat(_nibbles(raw[..., 6:]), -1) | _bits(raw[..., 2:6]) << 4
    return Blocks(_rows(values) - 16, _half(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    """Q5_0 with a minimum."""
    values = torch.cat(_nibbles(raw[..., 8:]), -1) | _bits(raw[..., 4:8]) << 4
    return Blocks(_rows(values), _half(raw, 0), -_half(raw, 2))


def _q2_k(raw: Tensor) -> Blocks:
    """Two bits, in groups of 16 with a four-bit scale and a four-bit minimum each."""
    low, high = (part.float() for part in _nibbles(raw[..., :16]))
    scales, minima = low * _half(raw, 80)[..., None], high * _half(raw, 82)[..., None]
    return Blocks(_rows(_quarters(raw[..., 16:80])), scales.flatten(1), minima.flatten(1))


def _q3_k(raw: Tensor) -> Blocks:
    """Two low bits and a high bit (0 subtracts 4); groups of 16 with six-bit scales."""
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    third = ((raw[..., None, :32] >> bits) & 1).flatten(-2)
    values = _quarters(raw[..., 32:96]) | third << 2
    low = torch.cat(_nibbles(raw[..., 96:104]), -1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((raw[..., None, 104:108] >> shifts) & 3).flatten(-2)
    scales = ((low | high << 4).float() - 32) * _half(raw, 108)[..., None]
    # From -4 to 3; the kernels' four bits start at -8.
    return Blocks(_rows(values + 4), scales.flatten(1), zero=8)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q4_K's and Q5_K's scales and minima, float32 [n, 8 blocks]; six bits each."""
    packed = raw[..., 4:16]
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1).float()
    minima = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), -1).float()
    scales, minima = scales * _half(raw, 0)[..., None], minima * _half(raw, 2)[..., None]
    return scales.flatten(1), minima.flatten(1)


def _q4_k(raw: Tensor) -> Blocks:
    """Runs of 64 values in 32 bytes: the first half in low nibbles, the second in high ones."""
    runs = raw[..., 16:].unflatten(-1, (4, 32))
    return Blocks(_rows(torch.stack(_nibbles(runs), -2)), *_k_scales(raw))


def _q5_k(raw: Tensor) -> Blocks:
    """Q4_K with a fifth bit: bit j of byte i belongs to value i of the j-th 32 values."""
    runs = torch.stack(_nibbles(raw[..., 48:].unflatten(-1, (4, 32))), -2).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (raw[..., None, 16:48] >> shifts) & 1
    return Blocks(_rows(runs | fifth << 4), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Blocks:
    """Halves of 128 values: 64 bytes of low nibbles, 32 of the two bits above them."""
    low = raw[..., :128].unflatten(-1, (2, 64))
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat(_nibbles(low), -1).unflatten(-1, (4, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    values = nibbles | ((high >> shifts) & 3) << 4
    scales = raw[..., 192:208].contiguous().view(torch.int8).float() * _half(raw, 208)[..., None]
    return Blocks(_rows(values) - 32, scales.flatten(1))


_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)
"""The values of IQ4's nibbles."""
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
_FP4 = torch.cat((_E2M1, -_E2M1))
"""The values of MXFP4's nibbles, times 2."""


def _looked_up(table: Tensor, packed: Tensor) -> Tensor:
    """Return int8 [n, K] from a table: bytes hold a group's first half in low nibbles, its second
    half in high ones.
    """
    return table[torch.cat(_nibbles(packed), -1).flatten(1).long()]


def _iq4_nl(raw: Tensor) -> Blocks:
    return Blocks(_looked_up(_IQ4, raw[..., 2:]), _half(raw, 0))


def _iq4_xs(raw: Tensor) -> Blocks:
    """Eight groups of 32, whose six-bit scales are split into four low and two high bits."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((raw[..., 2:4, None] >> shifts) & 3).flatten(-2)
    low = torch.stack(_nibbles(raw[..., 4:8]), -1).flatten(-2)
    scales = ((low | high << 4).float() - 32) * _half(raw, 0)[..., None]
    return Blocks(_looked_up(_IQ4, raw[..., 8:].unflatten(-1, (8, 16))), scales.flatten(1))


def _mxfp4(raw: Tensor) -> Blocks:
    """A block's scale is a power of two, stored as its exponent."""
    scales = torch.pow(2.0, raw[..., 0].float() - 128)
    return Blocks(_looked_up(_FP4, raw[..., 1:]), scales)


READERS: dict[int, Callable[[Tensor], Blocks]] = {
    types.Q8_0: _q8_0,
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q5_1: _q5_1,
    types.Q2_K: _q2_k,
    types.Q3_K: _q3_k,
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
    types.IQ4_NL: _iq4_nl,
    types.IQ4_XS: _iq4_xs,
    types.MXFP4: _mxfp4,
}
"""Decodes uint8 [n, blocks, bytes of a block]."""

FORMATS: dict[int, IntegerFormat] = {
    types.Q8_0: IntegerFormat(8, 32),
    types.Q5_0: IntegerFormat(8, 32),
    types.Q6_K: IntegerFormat(8, 16),
    types.IQ4_NL: IntegerFormat(8, 32),
    types.IQ4_XS: IntegerFormat(8, 32),
    types.MXFP4: IntegerFormat(8, 32),
    types.Q2_K: IntegerFormat(4, 16, with_minima=True),
    types.Q3_K: IntegerFormat(4, 16),
    types.Q4_0: IntegerFormat(4, 32),
    types.Q4_1: IntegerFormat(4, 32, with_minima=True),
    types.Q4_K: IntegerFormat(4, 32, with_minima=True),
}
"""The kernels' formats that represent a type exactly, except for scales rounded to float16."""
