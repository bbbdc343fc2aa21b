"""Layers with a recurrent state, computed by the library; `kernels.ssm` defines the operations."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import abi as c
from kernels.cpu.library import CACHE_DTYPES, Library, address, check, check_dense
from kernels.cpu.memory import num_threads
from kernels.ssm import (
    STATE_DTYPES,
    ScanInputs,
    ScanWeights,
    StateRows,
    check_conv,
    check_diagonal,
    check_lru,
    check_scan,
)
from kernels.tensors import check_vector, describe


def causal_conv(
    library: Library,
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of: StateRows,
    *,
    silu: bool,
) -> Tensor:
    """See `KernelSet.causal_conv`; all tensors are float32."""
    check_conv(x, states, weight, bias, of)
    width, channels = weight.shape
    check_dense("states", states, tuple(states.shape), torch.float32)
    check_dense("weight", weight, (width, channels), torch.float32)
    if bias is not None:
        check_dense("bias", bias, (channels,), torch.float32)
    out = torch.empty((x.shape[0], channels))
    args = c.CausalConv(
        out=out.data_ptr(),
        x=x.data_ptr(),
        stride=_stride("x", x),
        channels=channels,
        width=width,
        states=states.data_ptr(),
        weight=weight.data_ptr(),
        bias=address(bias),
        silu=silu,
        of=describe_rows(of, x.shape[0], len(states)),
    )
    if status := library.causal_conv(ctypes.byref(args), num_threads()):
        check(status)
    return out


def linear_scan(
    library: Library,
    inputs: ScanInputs,
    weights: ScanWeights,
    states: Tensor,
    of: StateRows,
    scales: Tensor | None,
) -> Tensor:
    """See `KernelSet.linear_scan`; all tensors except the states are float32."""
    check_scan(inputs, weights, states, scales)
    tokens, heads, value_size = inputs.v.shape
    key_heads, key_size = inputs.k.shape[1:]
    if states.dtype not in STATE_DTYPES or not states.is_contiguous():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise ValueError(f"states {describe(states)} must be contiguous, and one of {names}")
    for name in ("decay", "rate_bias", "skip"):
        vector: Tensor | None = getattr(weights, name)
        if vector is not None:
            check_dense(name, vector, tuple(vector.shape), torch.float32)
    if scales is not None:
        check_dense("scales", scales, tuple(scales.shape), torch.float32)
    beta = inputs.beta
    out = torch.empty((tokens, heads, value_size))
    args = c.LinearScan(
        out=out.data_ptr(),
        q=inputs.q.data_ptr(),
        k=inputs.k.data_ptr(),
        v=inputs.v.data_ptr(),
        rate=inputs.rate.data_ptr(),
        beta=address(beta),
        q_stride=_stride("q", inputs.q),
        k_stride=_stride("k", inputs.k),
        v_stride=_stride("v", inputs.v),
        rate_stride=_stride("rate", inputs.rate),
        beta_stride=0 if beta is None else _stride("beta", beta),
        decay=weights.decay.data_ptr(),
        rate_bias=weights.rate_bias.data_ptr(),
        skip=address(weights.skip),
        states=states.data_ptr(),
        state_scales=address(scales),
        heads=heads,
        key_heads=key_heads,
        value_size=value_size,
        key_size=key_size,
        least_rate=weights.limits[0],
        most_rate=weights.limits[1],
        delta=weights.delta,
        decay_by_key=weights.decay.dim() == 2,
        rate_by_key=weights.rate_bias.dim() == 2,
        states_dtype=CACHE_DTYPES[states.dtype],
        of=describe_rows(of, tokens, len(states)),
    )
    if status := library.linear_scan(ctypes.byref(args), num_threads()):
        check(status)
    return out


def diagonal_scan(
    library: Library, x: Tensor, decay: Tensor, states: Tensor, of: StateRows
) -> Tensor:
    """See `KernelSet.diagonal_scan`; all tensors are float32."""
    check_diagonal(x, decay, states)
    for name, tensor in (("x", x), ("decay", decay), ("states", states)):
        check_dense(name, tensor, tuple(tensor.shape), torch.float32)
    out = torch.empty_like(x)
    args = c.DiagonalScan(
        out=out.data_ptr(),
        x=x.data_ptr(),
        decay=decay.data_ptr(),
        states=states.data_ptr(),
        channels=x.shape[1],
        of=describe_rows(of, x.shape[0], len(states)),
    )
    if status := library.diagonal_scan(ctypes.byref(args), num_threads()):
        check(status)
    return out


def lru_inputs(
    library: Library, x: Tensor, gates: Tensor, biases: Tensor, decay: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `KernelSet.lru_inputs`."""
    check_lru(x, gates, biases, decay, positions)
    for name, tensor in (("x", x), ("gates", gates), ("biases", biases), ("decay", decay)):
        check_dense(name, tensor, tuple(tensor.shape), torch.float32)
    check_vector("positions", positions, len(x), torch.int64)
    inputs, decays = torch.empty_like(x), torch.empty_like(x)
    args = c.LruInputs(
        inputs=inputs.data_ptr(),
        decays=decays.data_ptr(),
        x=x.data_ptr(),
        gates=gates.data_ptr(),
        biases=biases.data_ptr(),
        decay=decay.data_ptr(),
        positions=positions.data_ptr(),
        tokens=x.shape[0],
        heads=biases.shape[0],
        size=biases.shape[1] // 2,
    )
    if status := library.lru_inputs(ctypes.byref(args), num_threads()):
        check(status)
    return inputs, decays


def describe_rows(of: StateRows, tokens: int, num_rows: int) -> c.StateRows:
    """Return the sequences of a call with this number of tokens, over states of `num_rows`."""
    count = len(of.rows)
    check_vector("rows", of.rows, count, torch.int64)
    check_vector("starts", of.starts, count + 1, torch.int32)
    num_saves = 0 if of.saves is None else len(of.saves)
    if of.saves is not None:
        check_dense("saves", of.saves, (num_saves, 2), torch.int64)
    return c.StateRows(
        starts=of.starts.data_ptr(),
        rows=of.rows.data_ptr(),
        saves=address(of.saves),
        num_seqs=count,
        tokens=tokens,
        num_rows=num_rows,
        num_saves=num_saves,
    )


def _stride(name: str, x: Tensor) -> int:
    """Return the stride between tokens; a token's values must be contiguous."""
    if x.dtype != torch.float32 or (len(x) and not x[0].is_contiguous()):
        raise ValueError(f"{name} {describe(x)} must be float32, each token without gaps")
    return x.stride(0)
