"""A short convolution over each sequence's last inputs, for prompts and decodes alike."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ssm import StateRows, check_conv
from kernels.tensors import describe
from kernels.triton.elementwise import activate
from kernels.triton.launch import launch
from kernels.triton.states.segments import first_saves, has_tokens, num_saves, segment

TOKENS, CHANNELS = 8, 128
"""Tokens and channels of a tile. The tokens of decodes belong to different sequences."""


@triton.jit(do_not_specialize=("num_tokens", "num_seqs"))
def conv_kernel(
    out, x, states, weight, bias, starts, rows, num_tokens, num_seqs, stride, channels,
    WIDTH: tl.constexpr, SILU: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, blocks of channels). 2^STEPS must exceed num_seqs."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    owner = tl.zeros([TOKENS], tl.int32)
    above = owner + num_seqs
    for _ in range(STEPS):  # counts the sequences that end at or before the token
        middle = (owner + above) // 2
        end = tl.load(starts + middle + 1, mask=middle < num_seqs, other=0x7FFFFFFF)
        above = tl.where(end <= token, above, middle)
        owner = tl.where(end <= token, middle + 1, owner)
    exists = (token < num_tokens) & (owner < num_seqs)
    first = tl.load(starts + owner, mask=exists, other=0).to(tl.int64)
    row = tl.load(rows + owner, mask=exists, other=0)
    inside = exists[:, None] & (channel < channels)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1 - tap)
        is_new = (source >= first)[:, None]
        offset = source[:, None] * stride + channel
        value = tl.load(x + offset, mask=inside & is_new, other=0.0).to(tl.float32)
        if tap < WIDTH - 1:
            stored = (row * (WIDTH - 1) + (WIDTH - 1) + source - first)[:, None] * channels
            past = tl.load(states + stored + channel, mask=inside & (is_new == 0), other=0.0)
            value = tl.where(is_new, value, past)
        total += value * tl.load(weight + tap * channels + channel, mask=channel < channels)
    if SILU:
        total = activate(total, 0)
    tl.store(out + token[:, None] * channels + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def history_kernel(
    x, states, starts, rows, saves, first_saves, stride, channels, HISTORY: tl.constexpr,
    PADDED: tl.constexpr, SAVES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of each segment. Grid (sequences, blocks of channels)."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    position = tl.arange(0, PADDED)[:, None]
    inside = (position < HISTORY) & (channel < channels) & has_tokens(starts, sequence)
    first = tl.load(starts + sequence).to(tl.int64)
    current = tl.load(rows + sequence)
    save, last = num_saves(first_saves, sequence, SAVES)
    for index in range(save, last + 1):
        end, row = segment(starts, rows, saves, sequence, index, last, SAVES)
        token = end - HISTORY + position
        is_new = token >= first
        new = tl.load(x + token * stride + channel, mask=inside & is_new, other=0.0)
        stored = (current * HISTORY + HISTORY + token - first) * channels + channel
        past = tl.load(states + stored, mask=inside & (is_new == 0), other=0.0)
        value = tl.where(is_new, new.to(tl.float32), past)
        # The current row is written last, by the threads that read it.
        tl.debug_barrier()
        tl.store(states + (row * HISTORY + position) * channels + channel, value, mask=inside)


def causal_conv(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of: StateRows,
    *,
    silu: bool = True,
) -> Tensor:
    """See `KernelSet.causal_conv`; states, weight and bias are float32."""
    check_conv(x, states, weight, bias, of)
    width, channels = weight.shape
    if x.stride(1) != 1:
        raise ValueError(f"x {describe(x)} must hold each token without gaps")
    for name, part in (("states", states), ("weight", weight), ("bias", bias)):
        if part is not None and (part.dtype != torch.float32 or not part.is_contiguous()):
            raise ValueError(f"{name} {describe(part)} must be contiguous float32")
    saves, count, tokens = first_saves(of), len(of.rows), len(x)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, CHANNELS)
    launch(
        conv_kernel, (triton.cdiv(tokens, TOKENS), blocks), out, x, states, weight, bias, of.starts,
        of.rows, tokens, count, x.stride(0), channels, WIDTH=width, SILU=silu,
        STEPS=count.bit_length(), TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    if width > 1:
        launch(
            history_kernel, (count, blocks), x, states, of.starts, of.rows, of.saves, saves,
            x.stride(0), channels, HISTORY=width - 1, PADDED=triton.next_power_of_2(width - 1),
            SAVES=saves is not None, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
    return out
