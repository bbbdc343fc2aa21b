"""Layers with a recurrent state as structs of addresses; `StateLayer` describes them."""

from __future__ import annotations

import torch

from kernels.compiled_decoder import DecoderShape, StateLayer
from kernels.cpu import abi as c
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
KINDS = {"mamba2": 0, "mamba1": 1, "delta": 2, "conv": 3}


def describe_state(shape: DecoderShape, state: StateLayer) -> c.StateLayer:
    """Return the struct of a layer. Raises ValueError for inconsistent sizes."""
    kind, scan, hidden = state.kind, state.scan, shape.hidden_size
    if kind not in KINDS:
        raise ValueError(f"some of its layers carry a state of the kind {kind}")
    blocks, heads, value_size, key_size = state.scan_states.shape
    values, keys = heads * value_size, state.key_heads * key_size
    width, channels = state.conv.shape
    mixed = values if kind in ("mamba1", "conv") else values + 2 * keys
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
    if (scan is None) != (kind == "conv") or (scan is not None and scan.delta != (kind == "delta")):
        raise ValueError(f"a layer of the kind {kind} has another scan")
    inputs = {
        "mamba2": values + channels + heads,
        "mamba1": 2 * values,
        "delta": values + channels,
        "conv": 3 * values,
    }[kind]
    described = c.StateLayer(
        inputs=handle_of("inputs", state.inputs, (hidden, inputs)),
        output=handle_of("output", state.output, (values, hidden)),
        input_scales=vector_address("input_scales", state.input_scales, inputs),
        conv=state.conv.data_ptr(),
        conv_bias=vector_address("conv_bias", state.conv_bias, channels),
        norm=vector_address("norm", state.norm, value_size if kind == "delta" else values),
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
        kind=KINDS[kind],
        norm_before_gate=state.norm_before_gate,
        states_dtype=CACHE_DTYPES[state.scan_states.dtype],
    )
    if scan is not None:
        described.rate_bias = vector_address("rate_bias", scan.rate_bias, heads)
        described.skip = vector_address("skip", scan.skip, heads)
        decays = (heads, key_size) if kind == "mamba1" else (heads,)
        check_dense("decay", scan.decay, decays, torch.float32)
        described.decay = scan.decay.data_ptr()
    if kind == "delta":
        if state.norm is None or state.rates is None:
            raise ValueError("a layer of the delta rule has rates, and norms its heads")
        described.rates = handle_of("rates", state.rates, (hidden, 2 * heads))
    if kind == "mamba1":
        _describe_selection(described, state, values, key_size)
    return described


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
