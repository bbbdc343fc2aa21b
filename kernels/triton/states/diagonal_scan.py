"""A recurrence with one number per channel, which each token decays and adds to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ssm import StateRows, check_diagonal
from kernels.tensors import describe
from kernels.triton.launch import launch
from kernels.triton.states.segments import first_saves, has_tokens, num_saves, segment

CHANNELS = 128


@triton.jit
def diagonal_kernel(
    out, x, decay, states, starts, rows, saves, first_saves, channels, SAVES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.program_id(1)
    inside = (channel < channels) & has_tokens(starts, sequence)
    row = tl.load(rows + sequence)
    state = tl.load(states + row * channels + channel, mask=inside, other=0.0)
    start = tl.load(starts + sequence).to(tl.int64)
    save, last = num_saves(first_saves, sequence, SAVES)
    for index in range(save, last + 1):
        end, row = segment(starts, rows, saves, sequence, index, last, SAVES)
        for token in range(start, end):
            offset = token * channels + channel
            decayed = tl.load(decay + offset, mask=inside, other=0.0).to(tl.float32) * state
            state = decayed + tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + offset, state.to(out.dtype.element_ty), mask=inside)
        tl.store(states + row * channels + channel, state, mask=inside)
        start = end


def diagonal_scan(x: Tensor, decay: Tensor, states: Tensor, of: StateRows) -> Tensor:
    """See `KernelSet.diagonal_scan`; states are float32."""
    check_diagonal(x, decay, states)
    for name, part in (("x", x), ("decay", decay), ("states", states)):
        if not part.is_contiguous() or (name == "states" and part.dtype != torch.float32):
            raise ValueError(f"{name} {describe(part)} must be contiguous, and states float32")
    saves, channels = first_saves(of), x.shape[1]
    out = torch.empty_like(x)
    launch(
        diagonal_kernel, (triton.cdiv(channels, CHANNELS), len(of.rows)), out, x, decay, states,
        of.starts, of.rows, of.saves, saves, channels, SAVES=saves is not None, CHANNELS=CHANNELS,
        num_warps=4,
    )  # fmt: skip
    return out
