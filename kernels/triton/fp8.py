"""Eight-bit floats by integer arithmetic, for devices without them and for the interpreter.

e4m3 here is the finite variant ("e4m3fn": no infinities, maximum 448). e5m2 has IEEE's layout, but
only finite values are written (maximum 57344). Micikevicius et al. 2022, "FP8 formats for deep
learning".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""Codes of the fp8 dtypes; 0 stands for any other dtype."""


#: Four e4m3 -> bfloat16, exactly; NaN becomes 480. The shifted bits represent values 2^120 times
#: too small, so they are multiplied by 2^120, two at a time.
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 low, high, moved, scale, minus;
    mov.b32 scale, 0x7b807b80;
    mov.b32 minus, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 moved, low, 4;
    and.b32 moved, moved, 0x07f007f0;
    lop3.b32 low, low, 0x80008000, moved, 0xea;
    fma.rn.bf16x2 $0, low, scale, minus;
    shr.u32 moved, high, 4;
    and.b32 moved, moved, 0x07f007f0;
    lop3.b32 high, high, 0x80008000, moved, 0xea;
    fma.rn.bf16x2 $1, high, scale, minus;
}""")
#: The same to float16, with a factor of 2^8.
E4M3_TO_F16 = tl.constexpr("""{
    .reg .b32 low, high, moved, scale, minus;
    mov.b32 scale, 0x5c005c00;
    mov.b32 minus, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 moved, low, 1;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 low, low, 0x80008000, moved, 0xea;
    fma.rn.f16x2 $0, low, scale, minus;
    shr.u32 moved, high, 1;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 high, high, 0x80008000, moved, 0xea;
    fma.rn.f16x2 $1, high, scale, minus;
}""")


@triton.jit
def decode_weights(bits, like: tl.constexpr):
    """Convert e4m3 uint8 without NaN to the dtype `like`, on devices without fp8.

    Not for the interpreter, which can't run assembly.
    """
    if like == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E4M3_TO_BF16, "=&r,=&r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        halves = tl.inline_asm_elementwise(
            E4M3_TO_F16, "=&r,=&r,r", [bits], dtype=tl.float16, is_pure=True, pack=4
        )
        return halves.to(like)


@triton.jit
def decode_fp8(bits, KIND: tl.constexpr):
    """Convert fp8 uint8 to float16, exactly: both formats are float16 with fewer bits.

    e4m3's exponent bias is 8 less than float16's, so its shifted bits represent values 256 times
    too small. Its NaN would become 480.
    """
    wide = bits.to(tl.int16)
    if KIND == 2:
        return (wide << 8).to(tl.float16, bitcast=True)
    sign = (wide & 0x80) << 8
    value = (sign | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def round_half_even(x):
    """Round float32 of magnitude under 2^22 to the nearest integer, as float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_fp8(x, KIND: tl.constexpr):
    """Convert float32 to fp8 uint8, rounded to nearest even; larger values become the maximum.

    NaN stays NaN, so that broken sequences are noticed.
    """
    MANTISSA: tl.constexpr = 3 if KIND == 1 else 2
    LOWEST: tl.constexpr = -6 if KIND == 1 else -14
    LIMIT: tl.constexpr = 448.0 if KIND == 1 else 57344.0
    size = tl.minimum(tl.abs(x), LIMIT)
    bits = size.to(tl.int32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MANTISSA
    half = (1 << (DROPPED - 1)) - 1
    normal = (bits + half + ((bits >> DROPPED) & 1)) >> DROPPED
    normal -= (127 + LOWEST - 1) << MANTISSA
    step = 1.0 / (1 << (MANTISSA - LOWEST))
    small = round_half_even(size * (1 << (MANTISSA - LOWEST))).to(tl.int32)
    code = tl.where(size < step * (1 << MANTISSA), small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def quantize(x, KIND: tl.constexpr):
    """Convert float32 to the values of a cache: KIND 0 leaves x alone, 1 and 2 give fp8, 3 int8."""
    if KIND == 0:
        return x
    elif KIND == 3:
        integers = round_half_even(tl.maximum(tl.minimum(x, 127.0), -127.0))
        return integers.to(tl.int8)
    else:
        return encode_fp8(x, KIND)
