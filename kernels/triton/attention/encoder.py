"""Encoder attention: tokens also attend to later tokens of their sequence.

A program computes some rows of one head and reads the keys once (FlashAttention, arXiv 2205.14135).
The bits of a sequence's result don't depend on other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tensors import describe
from kernels.triton.launch import INTERPRETED, launch


@triton.jit
def encoder_attention_kernel(
    out, q, k, v, q_stride, k_stride, v_stride, length, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, REACH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (sequences * HEADS, blocks of rows)."""
    sequence = (tl.program_id(0) // HEADS).to(tl.int64) * length
    head = (tl.program_id(0) % HEADS) * SIZE
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    inside = columns[None, :] < SIZE
    row_offsets = (sequence + rows[:, None]) * q_stride + head + columns[None, :]
    queries = tl.load(q + row_offsets, mask=(rows[:, None] < length) & inside, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, PADDED], tl.float32)
    start = 0
    end = length
    if REACH:
        start = tl.maximum(first - REACH, 0)
        end = tl.minimum(length, first + ROWS + REACH)
    for block in range(start, end, KEYS):
        positions = block + tl.arange(0, KEYS)
        exists = (positions[:, None] < length) & inside
        offsets = sequence + positions[:, None]
        keys = tl.load(k + offsets * k_stride + head + columns[None, :], mask=exists, other=0.0)
        values = tl.load(v + offsets * v_stride + head + columns[None, :], mask=exists, other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        visible = positions[None, :] < length
        if REACH:
            visible &= tl.abs(positions[None, :] - rows[:, None]) <= REACH
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        # The maximum is -inf while a row has seen no key, and -inf - -inf is NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        accumulated = accumulated * decay[:, None]
        accumulated += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = larger
    result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = (sequence + rows[:, None]) * (HEADS * SIZE) + head + columns[None, :]
    tl.store(
        out + out_offsets,
        result.to(out.dtype.element_ty),
        mask=(rows[:, None] < length) & inside,
    )


def encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, length: int, *, reach: int = 0, round_inputs: bool = False
) -> Tensor:
    """See `KernelSet.encoder_attention`; `round_inputs` changes nothing here."""
    tokens, heads, size = q.shape
    if length < 1 or tokens % length:
        raise ValueError(f"q {describe(q)} has no whole sequences of {length} tokens")
    q, k, v = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (q, k, v))
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(size))
    # These tiles fit the registers of every GPU that we compile for, with heads of up to 128.
    rows, keys = (64, 32) if padded * q.element_size() <= 128 else (16, 32)
    launch(
        encoder_attention_kernel,
        (tokens // length * heads, triton.cdiv(length, rows)),
        out, q, k, v, q.stride(0), k.stride(0), v.stride(0), length, size**-0.5,
        HEADS=heads, SIZE=size, PADDED=padded, REACH=reach, ROWS=rows, KEYS=keys,
        UPCAST=INTERPRETED,  # the interpreter's bfloat16 products are wrong
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
