"""Recurrences of heads whose state is a matrix: Mamba 1 and 2, the gated delta rule, Kimi delta
attention, lightning attention.

The state stays in registers from the first to the last token of a step, as in fused recurrent
kernels of arXiv 2412.06464.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ssm import STATE_DTYPES, ScanInputs, ScanWeights, StateRows, check_scan
from kernels.tensors import describe
from kernels.triton.fp8 import round_half_even
from kernels.triton.launch import launch
from kernels.triton.states.segments import first_saves, has_tokens, num_saves, segment

ELEMENTS = 4096
"""State values per tile: 32 registers of each of a program's 128 threads."""
MAX_VECTORS = 64


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate also for small exp(x) (log1p by Kahan's correction)."""
    small = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + small
    exact = tl.where(
        more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0))
    )
    return tl.where(x > 20.0, x, exact)


@triton.jit
def linear_scan_kernel(
    out, q, k, v, rate, beta, decay, rate_bias, skip, states, scales, starts, rows, saves,
    first_saves, q_stride, k_stride, v_stride, rate_stride, beta_stride, min_rate, max_rate, root,
    HEADS: tl.constexpr, SHARED: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    PADDED: tl.constexpr, VECTORS: tl.constexpr, ONE_HEAD: tl.constexpr, DELTA: tl.constexpr,
    DECAY_BY_KEY: tl.constexpr, RATE_BY_KEY: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of state vectors, sequences).

    A tile [VECTORS, PADDED] has vectors of one head (ONE_HEAD), or of several heads with fewer than
    VECTORS each. Values per head have the shape [1, .] or [VECTORS, .]. SHARED is the number of
    heads with the same key and query.
    """
    block, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, VECTORS)[:, None]
    if ONE_HEAD:
        PARTS: tl.constexpr = (VALUES + VECTORS - 1) // VECTORS
        head = tl.zeros([1, 1], tl.int64) + block // PARTS
        value = block % PARTS * VECTORS + lane
        vector, exists = head * VALUES + value, value < VALUES
    else:
        vector = block * VECTORS + lane
        head, exists = vector // VALUES, vector < HEADS * VALUES
    exists = exists & has_tokens(starts, sequence)
    key = tl.arange(0, PADDED)[None, :]
    by_head, by_key = head < HEADS, (head < HEADS) & (key < KEYS)
    inside = exists & (key < KEYS)
    bias = head * KEYS + key if RATE_BY_KEY else head
    bias = tl.load(rate_bias + bias, mask=by_key if RATE_BY_KEY else by_head, other=0.0)
    fall = head * KEYS + key if DECAY_BY_KEY else head
    fall = tl.load(decay + fall, mask=by_key if DECAY_BY_KEY else by_head, other=0.0)
    row = tl.load(rows + sequence)
    first_vector = row * HEADS * VALUES + vector
    state = tl.load(states + first_vector * KEYS + key, mask=inside, other=0.0).to(tl.float32)
    scale = tl.zeros([VECTORS, 1], tl.float32)
    if scales is not None:
        scale = tl.load(scales + first_vector, mask=exists, other=0.0)
    start = tl.load(starts + sequence).to(tl.int64)
    save, last = num_saves(first_saves, sequence, SAVES)
    for index in range(save, last + 1):
        end, row = segment(starts, rows, saves, sequence, index, last, SAVES)
        for token in range(start, end):
            if RATE_BY_KEY:
                step = tl.load(
                    rate + token * rate_stride + head * KEYS + key, mask=by_key, other=0.0
                )
            else:
                step = tl.load(rate + token * rate_stride + head, mask=by_head, other=0.0)
            step = softplus(step.to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, min_rate), max_rate)
            shared = head // SHARED * KEYS + key
            keys = tl.load(k + token * k_stride + shared, mask=by_key, other=0.0).to(tl.float32)
            queries = tl.load(q + token * q_stride + shared, mask=by_key, other=0.0).to(tl.float32)
            if DELTA:
                keys *= 1.0 / tl.sqrt(tl.sum(keys * keys, 1, keep_dims=True) + 1e-6)
                queries *= root / tl.sqrt(tl.sum(queries * queries, 1, keep_dims=True) + 1e-6)
            values = tl.load(v + token * v_stride + vector, mask=exists, other=0.0).to(tl.float32)
            if scales is not None:
                state = state * scale
            state = state * tl.exp(step * fall)
            update = values
            if DELTA:
                update = values - tl.sum(state * keys, 1, keep_dims=True)
            if beta is not None:
                share = tl.load(beta + token * beta_stride + head, mask=by_head, other=0.0)
                update = update / (1.0 + tl.exp(-share.to(tl.float32)))
            else:
                update = update * step
            state = state + update * keys
            answer = tl.sum(state * queries, 1, keep_dims=True)
            if skip is not None:
                answer += tl.load(skip + head, mask=by_head, other=0.0) * values
            offset = token * HEADS * VALUES + vector
            tl.store(out + offset, answer.to(out.dtype.element_ty), mask=exists)
            if scales is not None:
                # The sum is NaN if one of the values isn't finite.
                top = tl.max(tl.abs(state), 1, keep_dims=True)
                scale = top / 127.0 + tl.sum(state * 0.0, 1, keep_dims=True)
                factor = tl.where(top > 1e-30, 127.0 / tl.maximum(top, 1e-30), 0.0)
                state = round_half_even(state * factor)
            else:
                state = state.to(states.dtype.element_ty).to(tl.float32)
        saved = row * HEADS * VALUES + vector
        tl.store(states + saved * KEYS + key, state.to(states.dtype.element_ty), mask=inside)
        if scales is not None:
            tl.store(scales + saved, scale, mask=exists)
        start = end


def linear_scan(
    inputs: ScanInputs,
    weights: ScanWeights,
    states: Tensor,
    of: StateRows,
    scales: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.linear_scan`. A layer's weights are float32."""
    check_scan(inputs, weights, states, scales)
    tokens, heads, values = inputs.v.shape
    key_heads, keys = inputs.k.shape[1:]
    if states.dtype not in STATE_DTYPES or not states.is_contiguous():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise ValueError(f"states {describe(states)} must be contiguous, and one of {names}")
    if weights.rate_bias.dim() == 2 and inputs.beta is None:
        raise ValueError("rates by key need a beta")
    padded = triton.next_power_of_2(keys)
    vectors = min(MAX_VECTORS, max(1, ELEMENTS // padded))
    one_head = values >= vectors
    blocks = heads * triton.cdiv(values, vectors)
    if not one_head:
        blocks = triton.cdiv(heads * values, vectors)
    saves, beta = first_saves(of), inputs.beta
    out = torch.empty((tokens, heads, values), dtype=inputs.v.dtype, device=inputs.v.device)
    launch(
        linear_scan_kernel, (blocks, len(of.rows)), out, inputs.q, inputs.k, inputs.v, inputs.rate,
        beta, weights.decay, weights.rate_bias, weights.skip, states, scales, of.starts, of.rows,
        of.saves, saves, _stride("q", inputs.q), _stride("k", inputs.k), _stride("v", inputs.v),
        _stride("rate", inputs.rate), 0 if beta is None else _stride("beta", beta),
        *weights.limits, keys**-0.5, HEADS=heads, SHARED=heads // key_heads, VALUES=values,
        KEYS=keys, PADDED=padded, VECTORS=vectors, ONE_HEAD=one_head, DELTA=weights.delta,
        DECAY_BY_KEY=weights.decay.dim() == 2, RATE_BY_KEY=weights.rate_bias.dim() == 2,
        SAVES=saves is not None, num_warps=4,
    )  # fmt: skip
    return out


def _stride(name: str, x: Tensor) -> int:
    """Return the stride between tokens; a token's values must be contiguous."""
    if len(x) and not x[0].is_contiguous():
        raise ValueError(f"{name} {describe(x)} must hold each token without gaps")
    return x.stride(0)
