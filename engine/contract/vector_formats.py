"""Vectors as bytes, in the number formats that vLLM's pooling endpoints have. Torch-free."""

from __future__ import annotations

import sys
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from engine.contract.similarity import Vectors

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
EMBED_DTYPES: tuple[EmbedDtype, ...] = get_args(EmbedDtype)
#: Bits of the mantissa and the exponent's bias.
_FP8 = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}


def packed(values: Vectors, dtype: EmbedDtype, endianness: Endianness = "native") -> bytes:
    """The numbers of float32 `values`, one after another, each rounded to the nearest of `dtype`.

    Ties go to the even one. Of e4m3, which has no infinity, the largest stands for all beyond it.
    """
    numbers = _converted(np.ascontiguousarray(values, dtype=np.float32), dtype)
    if endianness not in ("native", sys.byteorder):
        numbers = numbers.byteswap()
    return numbers.tobytes()


def _converted(values: Vectors, dtype: EmbedDtype) -> NDArray[np.generic]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    return _as_bfloat16(values) if dtype == "bfloat16" else _as_fp8(values, *_FP8[dtype])


def _as_bfloat16(values: Vectors) -> NDArray[np.uint16]:
    """float32's upper half."""
    bits = values.view(np.uint32)
    upper = (bits >> 16) & 1
    rounded = ((bits + np.uint32(0x7FFF) + upper) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _as_fp8(values: Vectors, mantissa: int, bias: int) -> NDArray[np.uint8]:
    """A magnitude's place among all of them is its code; e5m2's infinity stands for 65,536."""
    last = 0x7E if mantissa == 3 else 0x7C
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    ladder = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    middles = (ladder[:-1] + ladder[1:]) / 2
    missing = np.isnan(values)
    magnitude = np.abs(np.where(missing, 0, values).astype(np.float64))
    code = np.searchsorted(middles, magnitude)
    tie = magnitude == middles[np.minimum(code, last - 1)]
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(missing, 0x7F, code)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)
