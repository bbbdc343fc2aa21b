"""The product kernels of the quantized formats."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fp8 import decode_fp8, decode_weights
from kernels.triton.quantized.tile_sizes import block_of_program


@triton.jit
def rows_and_columns(
    order, group_of, rows, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Return a program's (rows of the result, rows of x, columns, index of the matrix).

    SHARED is 0 for a single matrix, on a grid (blocks,). Otherwise rows are sorted by matrix, see
    `Groups`, SHARED consecutive rows have the same row of x, and the grid is (blocks of columns,
    tiles); an unused tile has a negative matrix.
    """
    if SHARED == 0:
        row_block, column_block = block_of_program(tl.program_id(0), rows, COLUMNS, BM, BN)
        row = row_block * BM + tl.arange(0, BM)
        source = row
        matrix = tl.full((), 0, tl.int64)
    else:
        column_block = tl.program_id(0)
        tile = tl.program_id(1)
        matrix = tl.load(group_of + tile).to(tl.int64)
        row = tl.load(order + tile * BM + tl.arange(0, BM))
        source = row // SHARED
    return row, source, column_block * BN + tl.arange(0, BN), matrix


@triton.jit
def store_product(
    out, bias, row_scales, total, row, column, rows, matrix, COLUMNS: tl.constexpr,
    BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write float32 [BM, BN] plus the matrix's bias, with rows multiplied by their scales."""
    if BIAS:
        added = tl.load(bias + matrix * COLUMNS + column, mask=column < COLUMNS, other=0.0)
        total += added.to(tl.float32)[None, :]
    if SCALED:
        total *= tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
    to = out + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_scales(scales, group, groups, column, COLUMNS: tl.constexpr):
    """Load a group's scales of some columns from [groups, COLUMNS]; 0 outside."""
    return tl.load(
        scales + group * COLUMNS + column, mask=(column < COLUMNS) & (group < groups), other=0.0
    )


@triton.jit
def load_near_scales(
    scales, group, groups, column, COLUMNS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Like `load_scales`, but groups past the end get the last one's, mostly without a mask."""
    pointers = scales + tl.minimum(group, groups - 1) * COLUMNS + column
    if COLUMNS % BN == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=column < COLUMNS, other=0.0)


@triton.jit(do_not_specialize=("rows",))
def int8_product_kernel(
    out, x, x_scales, weight, scales, bias, order, group_of, row_scales, rows,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply int8 group by group, and add up the groups in float32.

    Grid of `rows_and_columns`. A group's product is exact and groups are added in order, so that a
    row is rounded equally in every batch. Scales are [GROUPS, COLUMNS], so that the scales of
    adjacent columns are read together. After Xiao et al. 2023 ("SmoothQuant") and the scales by
    group of DeepSeek-V3 (2024).
    """
    row, source, column, matrix = rows_and_columns(order, group_of, rows, COLUMNS, BM, BN, SHARED)
    if matrix < 0:
        return
    weight += matrix * (COLUMNS * GROUPS * GROUP)
    scales += matrix * (GROUPS * COLUMNS)
    depth = tl.arange(0, BK)
    lhs = x + source[:, None].to(tl.int64) * (GROUPS * GROUP) + depth[None, :]
    rhs = weight + column[None, :].to(tl.int64) * (GROUPS * GROUP) + depth[:, None]
    row_mask, column_mask = row < rows, column < COLUMNS
    total = tl.zeros((BM, BN), tl.float32)
    x_scale_rows = x_scales + source.to(tl.int64) * GROUPS
    x_scale = tl.load(x_scale_rows, mask=row_mask, other=0.0)
    weight_scale = load_scales(scales, 0, GROUPS, column, COLUMNS)
    for group in tl.range(0, GROUPS):
        # Load scales one iteration ahead: Triton pipelines only the loads of a product's operands.
        next_x_scale = tl.load(
            x_scale_rows + group + 1, mask=row_mask & (group + 1 < GROUPS), other=0.0
        )
        next_weight_scale = load_scales(scales, group + 1, GROUPS, column, COLUMNS)
        group_start = group * GROUP
        if BK == GROUP:
            a = tl.load(lhs + group_start, mask=row_mask[:, None], other=0)
            b = tl.load(rhs + group_start, mask=column_mask[None, :], other=0)
        else:
            a = tl.load(
                lhs + group_start, mask=row_mask[:, None] & (depth < GROUP)[None, :], other=0
            )
            b = tl.load(
                rhs + group_start, mask=(depth < GROUP)[:, None] & column_mask[None, :], other=0
            )
        product = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
        total += product * (x_scale[:, None] * weight_scale.to(tl.float32)[None, :])
        x_scale, weight_scale = next_x_scale, next_weight_scale
    store_product(out, bias, row_scales, total, row, column, rows, matrix, COLUMNS, BIAS, SCALED)


@triton.jit(do_not_specialize=("rows",))
def int4_product_kernel(
    out, x, weight, scales, minima, bias, rows, width, x_stride,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, AT_ONCE: tl.constexpr, SPREAD: tl.constexpr, BIAS: tl.constexpr,
    MINIMA: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Multiply by four-bit weights, converted to x's dtype before the product. Grid (blocks,).

    A byte contains the same position of two consecutive groups: the low half belongs to the even
    group, the high half to the odd one. So the halves needn't be interleaved; each is multiplied by
    its own columns of x. SPREAD is GROUP rounded up to a power of two; scales and minima are
    [groups, COLUMNS]. After Frantar et al. 2024 ("MARLIN").
    """
    row_block, column_block = block_of_program(tl.program_id(0), rows, COLUMNS, BM, BN)
    row = row_block * BM + tl.arange(0, BM)
    column = column_block * BN + tl.arange(0, BN)
    row_mask, column_mask = row < rows, column < COLUMNS
    lane = tl.arange(0, AT_ONCE * SPREAD)
    inner = lane % SPREAD
    ahead = tl.arange(0, AT_ONCE)
    total = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, PAIRS, AT_ONCE):
        pair = first + lane // SPREAD
        good = (pair < PAIRS) & (inner < GROUP)
        packed = tl.load(
            weight + column[:, None].to(tl.int64) * (PAIRS * GROUP)
            + (pair * GROUP + inner)[None, :],
            mask=column_mask[:, None] & good[None, :], other=0,
        )  # fmt: skip
        for half in tl.static_range(2):
            group = 2 * (first + ahead) + half
            group_mask = column_mask[:, None] & (group < 2 * PAIRS)[None, :]
            scale_offsets = group[None, :] * COLUMNS + column[:, None]
            scale = repeat_values(
                tl.load(scales + scale_offsets, mask=group_mask, other=0.0), BN, AT_ONCE, SPREAD
            )
            bits = ((packed >> (4 * half)) & 15).to(tl.float32)
            if MINIMA:
                minimum = tl.load(minima + scale_offsets, mask=group_mask, other=0.0)
                values = bits * scale - repeat_values(minimum, BN, AT_ONCE, SPREAD)
            else:
                values = (bits - 8.0) * scale
            depth_offsets = (2 * pair + half) * GROUP + inner
            a = tl.load(
                x + row[:, None].to(tl.int64) * x_stride + depth_offsets[None, :],
                mask=row_mask[:, None] & (good & (depth_offsets < width))[None, :], other=0.0,
            )  # fmt: skip
            # x is 0 beyond the last group, and the weights there must be, too.
            b = tl.where(column_mask[:, None] & good[None, :], values, 0.0)
            if UPCAST:
                a = a.to(tl.float32)
            total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision=PRECISION)
    store_product(out, bias, None, total, row, column, rows, 0, COLUMNS, BIAS, False)


def _halves(template: str, **constants: str) -> tl.constexpr:
    for name, value in constants.items():
        template = template.replace(name, value)
    return tl.constexpr(template)


_HALVES = """{
    .reg .b32 low, high, one, less;
    mov.b32 one, ONE;
    mov.b32 less, LESS;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, ABOVE, 0x4140;
    prmt.b32 $1, low, ABOVE, 0x4342;
    prmt.b32 $2, high, ABOVE, 0x4140;
    prmt.b32 $3, high, ABOVE, 0x4342;
    fma.rn.TYPE $0, $0, one, less;
    fma.rn.TYPE $1, $1, one, less;
    fma.rn.TYPE $2, $2, one, less;
    fma.rn.TYPE $3, $3, one, less;
}"""
#: Four bytes -> their low and high halves, minus 8 or 0, exactly. A byte put above the bits makes
#: them the mantissa of a power of two whose last place is 1.
_BF16 = {"TYPE": "bf16x2", "ONE": "0x3f803f80", "ABOVE": "0x43434343"}
_F16 = {"TYPE": "f16x2", "ONE": "0x3c003c00", "ABOVE": "0x64646464"}
HALVES_TO_BF16 = _halves(_HALVES, LESS="0xc300c300", **_BF16)
HALVES_TO_BF16_LESS_8 = _halves(_HALVES, LESS="0xc308c308", **_BF16)
HALVES_TO_F16 = _halves(_HALVES, LESS="0xe400e400", **_F16)
HALVES_TO_F16_LESS_8 = _halves(_HALVES, LESS="0xe408e408", **_F16)


@triton.jit
def unpack_int4(packed, like: tl.constexpr, LESS_8: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Unpack bytes to (low halves, high halves), as `nibbles` does.

    With ASSEMBLED by assembly, which the interpreter can't run; the compiler's code takes twice as
    many instructions.
    """
    if ASSEMBLED and like == tl.bfloat16:
        TO_BF16: tl.constexpr = HALVES_TO_BF16_LESS_8 if LESS_8 else HALVES_TO_BF16
        low, high = tl.inline_asm_elementwise(
            TO_BF16, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    elif ASSEMBLED and like == tl.float16:
        TO_F16: tl.constexpr = HALVES_TO_F16_LESS_8 if LESS_8 else HALVES_TO_F16
        low, high = tl.inline_asm_elementwise(
            TO_F16, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = nibbles(packed, False, like, 8 if LESS_8 else 0)
        high = nibbles(packed, True, like, 8 if LESS_8 else 0)
    return low, high


@triton.jit
def nibbles(packed, HIGH: tl.constexpr, like: tl.constexpr, OFFSET: tl.constexpr):
    """Return the low or high halves of bytes minus OFFSET, exactly, in the dtype `like`.

    The bits become the mantissa of a power of two whose last place is 1, which is subtracted with
    the offset. This avoids a conversion from integers (Kim et al. 2022, "Who Says Elephants Can't
    Run").
    """
    if HIGH:
        bits = packed >> 4
    else:
        bits = packed & 15
    if like == tl.bfloat16:
        return (bits.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    elif like == tl.float16:
        return (bits.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    else:
        return bits.to(tl.float32) - OFFSET


@triton.jit
def reduce_splits(
    partial, arrived, total, row, column, rows, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Return (the sum of all splits' [BM, BN], whether this program has the sum).

    Each program writes its own part to `partial`, float32 [SPLITS, rows, COLUMNS], and counts
    itself in `arrived`. The last one to arrive adds up the parts, in the order of splits, so that
    the sum doesn't depend on which program was last, and resets `arrived` to 0.
    """
    offsets = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    split_stride = rows.to(tl.int64) * COLUMNS
    tl.store(partial + tl.program_id(1) * split_stride + offsets, total, mask=inside)
    # All values of this program must be written before it is counted.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tl.program_id(0), 1) == SPLITS - 1
    total = tl.zeros_like(total)
    if last:
        for split in tl.static_range(SPLITS):
            total += tl.load(
                partial + split * split_stride + offsets,
                mask=inside,
                other=0.0,
                cache_modifier=".cg",
            )
        tl.store(arrived + tl.program_id(0), 0)
    return total, last


@triton.jit(do_not_specialize=("rows",))
def int4_few_rows_kernel(
    out, x, weight, scales, minima, bias, order, group_of, row_scales, partial, arrived,
    rows, width, x_stride,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
    SCALED: tl.constexpr, MINIMA: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    SPLITS: tl.constexpr, UNPADDED: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Like `int4_product_kernel`, for so few rows that unpacking the weights is most of the work.

    Grid of `rows_and_columns`; (blocks, SPLITS) for a single matrix. Its depth is split if there
    are fewer blocks than the GPU has room for, and the last program of a block adds up the parts.
    The weights are unpacked in registers by bit operations. Each group's product is scaled as a
    whole, in float32, instead of each weight. BK is GROUP rounded up to a power of two. After
    Frantar et al. 2024 ("MARLIN").
    """
    row, source, column, matrix = rows_and_columns(order, group_of, rows, COLUMNS, BM, BN, SHARED)
    if matrix < 0:
        return
    weight += matrix * (COLUMNS * PAIRS * GROUP)
    scales += matrix * (2 * PAIRS * COLUMNS)
    if MINIMA:
        minima += matrix * (2 * PAIRS * COLUMNS)
    row_mask, column_mask = row < rows, column < COLUMNS
    depth = tl.arange(0, BK)
    lhs = weight + column[:, None].to(tl.int64) * (PAIRS * GROUP) + depth[None, :]
    rhs = x + source[None, :].to(tl.int64) * x_stride + depth[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    begin, end = 0, PAIRS
    if SPLITS > 1:
        begin = tl.program_id(1) * ((PAIRS + SPLITS - 1) // SPLITS)
        end = tl.minimum(begin + (PAIRS + SPLITS - 1) // SPLITS, PAIRS)
    like: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    low = load_near_scales(scales, 2 * begin, 2 * PAIRS, column, COLUMNS, BN)
    high = load_near_scales(scales, 2 * begin + 1, 2 * PAIRS, column, COLUMNS, BN)
    for pair in tl.range(begin, end, loop_unroll_factor=2):
        # Load scales one iteration ahead: Triton pipelines only the loads of a product's operands.
        next_low = load_near_scales(scales, 2 * pair + 2, 2 * PAIRS, column, COLUMNS, BN)
        next_high = load_near_scales(scales, 2 * pair + 3, 2 * PAIRS, column, COLUMNS, BN)
        if BK == GROUP and COLUMNS % BN == 0:
            packed = tl.load(lhs + pair * GROUP)
        elif BK == GROUP:
            packed = tl.load(lhs + pair * GROUP, mask=column_mask[:, None], other=0)
        else:
            packed = tl.load(
                lhs + pair * GROUP, mask=column_mask[:, None] & (depth < GROUP)[None, :], other=0
            )
        low_half, high_half = unpack_int4(packed, like, not MINIMA, ASSEMBLED)
        for half in tl.static_range(2):
            group = 2 * pair + half
            depth_offsets = group * GROUP + depth
            if BK == GROUP and UNPADDED:
                b = tl.load(rhs + group * GROUP, mask=row_mask[None, :], other=0.0)
            else:
                b = tl.load(
                    rhs + group * GROUP,
                    mask=((depth < GROUP) & (depth_offsets < width))[:, None] & row_mask[None, :],
                    other=0.0,
                )  # fmt: skip
            if UPCAST:
                b = b.to(tl.float32)
            a = low_half if half == 0 else high_half
            product = tl.dot(a, b, input_precision=PRECISION)
            total += product * (low if half == 0 else high).to(tl.float32)[:, None]
            if MINIMA:
                minimum = load_near_scales(minima, group, 2 * PAIRS, column, COLUMNS, BN).to(
                    tl.float32
                )
                total -= minimum[:, None] * tl.sum(b.to(tl.float32), 0)[None, :]
        low, high = next_low, next_high
    total = tl.trans(total)
    if SPLITS > 1:
        total, last = reduce_splits(partial, arrived, total, row, column, rows, COLUMNS, SPLITS)
        if last == 0:
            return
    store_product(out, bias, row_scales, total, row, column, rows, matrix, COLUMNS, BIAS, SCALED)


@triton.jit
def repeat_values(x, BN: tl.constexpr, AT_ONCE: tl.constexpr, SPREAD: tl.constexpr):
    """Repeat each value SPREAD times: [BN, AT_ONCE] -> float32 [BN, AT_ONCE * SPREAD]."""
    wide = tl.broadcast_to(x.to(tl.float32)[:, :, None], (BN, AT_ONCE, SPREAD))
    return tl.reshape(wide, (BN, AT_ONCE * SPREAD))


@triton.jit(do_not_specialize=("rows",))
def fp8_product_kernel(
    out, x, x_scales, weight, scales, bias, order, group_of, row_scales, rows, x_stride,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, EIGHT: tl.constexpr,
    NATIVE: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    SHARED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply by e4m3 weights with a scale per column; with EIGHT x is e4m3, too, with a scale per
    row.

    With a GROUP, a multiple of BK, weights have a scale for each column and each GROUP of the
    depth, [groups, COLUMNS]; each block of the depth is scaled as a whole (DeepSeek-AI 2024,
    "DeepSeek-V3"). Grid of `rows_and_columns`. Micikevicius et al. 2022, "FP8 formats for deep
    learning".
    """
    row, source, column, matrix = rows_and_columns(order, group_of, rows, COLUMNS, BM, BN, SHARED)
    if matrix < 0:
        return
    weight += matrix * (COLUMNS * DEPTH)
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP if GROUP else 1
    scales += matrix * (COLUMNS * GROUPS)
    depth = tl.arange(0, BK)
    row_mask, column_mask = row < rows, column < COLUMNS
    lhs = x + source[:, None].to(tl.int64) * x_stride + depth[None, :]
    rhs = weight + column[None, :].to(tl.int64) * DEPTH + depth[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    if GROUP:
        weight_scale = load_scales(scales, 0, GROUPS, column, COLUMNS)
    for start in tl.range(0, DEPTH, BK):
        inside = start + depth < DEPTH
        a = tl.load(lhs + start, mask=row_mask[:, None] & inside[None, :], other=0)
        b = tl.load(rhs + start, mask=inside[:, None] & column_mask[None, :], other=0)
        if NATIVE:
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
        elif UPCAST:
            if EIGHT:
                a = decode_fp8(a, 1)
            a = a.to(tl.float32)
            b = decode_fp8(b, 1).to(tl.float32)
        else:
            if PTX:
                b = decode_weights(b, a.dtype)
            else:
                b = decode_fp8(b, 1).to(a.dtype)
        if GROUP:
            # Load scales one iteration ahead: Triton pipelines only the loads of operands.
            next_weight_scale = load_scales(scales, (start + BK) // GROUP, GROUPS, column, COLUMNS)
            product = tl.dot(a, b, input_precision=PRECISION)
            total += product * weight_scale[None, :]
            weight_scale = next_weight_scale
        elif NATIVE:
            # Hopper's matrix units sum with few bits, so each block of the depth is added in
            # float32.
            total = tl.dot(a, b, total, max_num_imprecise_acc=BK)
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if not GROUP:
        total *= tl.load(scales + column, mask=column_mask, other=0.0)[None, :]
    if EIGHT:
        total *= tl.load(x_scales + source, mask=row_mask, other=0.0)[:, None]
    store_product(out, bias, row_scales, total, row, column, rows, matrix, COLUMNS, BIAS, SCALED)
