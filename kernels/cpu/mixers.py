"""Layers with a recurrent state as structs of addresses; `StateLayer` describes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.compiled_decoder import DecoderShape, StateLayer
from kernels.cpu import abi as c
from kernels.cpu.latents import heads_address
from kernels.cpu.library import (
    CACHE_DTYPES,
    address,
    check_dense,
    describe_norm,
    vector_address,
)
from kernels.cpu.moe import handle_of
from kernels.interface import NO_NORM
from kernels.ssm import STATE_DTYPES
from kernels.tensors import describe

#: Kinds of layers by their number in src/mixers.h.
KINDS = {
    "mamba2": 0, "mamba1": 1, "delta": 2, "conv": 3, "lightning": 4, "kda": 5, "rg_lru": 6,
}  # fmt: skip


def describe_state(shape: DecoderShape, state: StateLayer) -> c.StateLayer:
    """Return the struct of a layer. Raises ValueError for inconsistent sizes."""
    kind, scan, hidden = state.kind, state.scan, shape.hidden_size
    if kind not in KINDS:
        raise ValueError(f"some of its layers carry a state of the kind {kind}")
    blocks, heads, value_size, key_size = state.scan_states.shape
    values, keys = heads * value_size, state.key_heads * key_size
    width, channels = state.conv.shape
    mixed = values if kind in ("mamba1", "conv", "rg_lru") else values + 2 * keys
    if channels != mixed or heads % state.key_heads:
        raise ValueError("a state's convolution is over its values, or values, keys and queries")
    if state.scan_states.dtype not in STATE_DTYPES or not state.scan_states.is_contiguous():
        raise ValueError(f"states {describe(state.scan_states)} must be contiguous, of few bits")
    check_dense("conv", state.conv, (width, channels), torch.float32)
    check_dense("conv_states", state.conv_states, (blocks, width - 1, channels), torch.float32)
    if (state.scan_scales is None) == (state.scan_states.dtype == torch.int8):
        raise ValueError("states of int8, and they alone, have scales")
    if state.scan_scales is not None:
        check_dense("scan_scales", state.scan_scales, (blocks, heads, value_size), torch.float32)
    if (scan is None) != (kind in ("conv", "rg_lru")) or (
        scan is not None and scan.delta != (kind in ("delta", "kda"))
    ):
        raise ValueError(f"a layer of the kind {kind} has another scan")
    inputs = {
        "mamba2": values + channels + heads,
        "mamba1": 2 * values,
        "delta": values + channels,
        "conv": 3 * values,
        "lightning": values + channels,
        "kda": channels + 2 * _rank(state) + heads,
        "rg_lru": 2 * values,
    }[kind]
    described = c.StateLayer(
        inputs=handle_of("inputs", state.inputs, (hidden, inputs)),
        output=handle_of("output", state.output, (values, hidden)),
        input_scales=vector_address("input_scales", state.input_scales, inputs),
        conv=state.conv.data_ptr(),
        conv_bias=vector_address("conv_bias", state.conv_bias, channels),
        norm=vector_address("norm", state.norm, value_size if kind in ("delta", "kda") else values),
        conv_states=state.conv_states.data_ptr(),
        scan_states=state.scan_states.data_ptr(),
        scan_scales=address(state.scan_scales),
        num_blocks=blocks,
        heads=heads,
        key_heads=state.key_heads,
        value_size=value_size,
        key_size=key_size,
        width=width,
        channels=channels,
        least_rate=0.0 if scan is None else scan.limits[0],
        most_rate=0.0 if scan is None else scan.limits[1],
        output_scale=state.output_scale,
        eps=state.eps,
        kind=KINDS[kind],
        norm_before_gate=state.norm_before_gate,
        states_dtype=CACHE_DTYPES[state.scan_states.dtype],
    )
    if scan is not None:
        by_key = (heads, key_size)
        described.rate_bias = _numbers("rate_bias", scan.rate_bias, heads, by_key, kind == "kda")
        described.decay = _numbers("decay", scan.decay, heads, by_key, kind == "mamba1")
        described.skip = vector_address("skip", scan.skip, heads)
    if kind == "lightning":
        _check_normed(state, (heads, key_size) == (state.key_heads, value_size))
    if kind == "delta":
        _check_normed(state, state.rates is not None)
        described.rates = handle_of("rates", state.rates, (hidden, 2 * heads))
    if kind == "kda":
        _check_normed(state, (heads, state.gates is None) == (state.key_heads, False))
        described.rates = handle_of("rates", state.rates, (_rank(state), keys))
        described.gates = handle_of("gates", state.gates, (_rank(state), values))
    if kind == "mamba1":
        _describe_selection(described, state, values, key_size)
    if kind == "rg_lru":
        _describe_lru(described, state, heads, value_size)
    return described


def _rank(state: StateLayer) -> int:
    """Return the number of inputs of `rates`; 0 without rates."""
    return 0 if state.rates is None else state.rates.in_features


def _numbers(
    name: str, numbers: Tensor, heads: int, by_key: tuple[int, int], has_keys: bool
) -> int:
    """Return the address of numbers [heads], or by key."""
    check_dense(name, numbers, by_key if has_keys else (heads,), torch.float32)
    return numbers.data_ptr()


def _check_normed(state: StateLayer, fits: bool) -> None:
    if state.norm is None or not fits:
        raise ValueError(f"a layer of the kind {state.kind} lacks a part, or its heads don't fit")


def _describe_lru(described: c.StateLayer, state: StateLayer, heads: int, value_size: int) -> None:
    lru = state.lru
    if lru is None or state.scan_states.dtype != torch.float32:
        raise ValueError("a real-gated linear recurrent unit has gates, and float32 states")
    check_dense("gate_biases", lru.gate_biases, (heads, 2 * value_size), torch.float32)
    check_dense("decay", lru.decay, (heads * value_size,), torch.float32)
    sizes = value_size, 2 * value_size
    described.head_gates = heads_address("head_gates", lru.gates, heads, sizes)
    described.gate_biases, described.decay = lru.gate_biases.data_ptr(), lru.decay.data_ptr()


def _describe_selection(
    described: c.StateLayer, state: StateLayer, values: int, key_size: int
) -> None:
    if state.rates is None or state.selection is None:
        raise ValueError("a layer of Mamba 1 has a selection and rates")
    rank = state.rates.row_size
    described.rates = handle_of("rates", state.rates, (rank, values))
    described.selection = handle_of("selection", state.selection, (values, rank + 2 * key_size))
    rates, keys, queries = state.selection_norms or (NO_NORM,) * 3
    described.rates_norm = describe_norm("rates_norm", rates, rank)
    described.key_norm = describe_norm("key_norm", keys, key_size)
    described.query_norm = describe_norm("query_norm", queries, key_size)
