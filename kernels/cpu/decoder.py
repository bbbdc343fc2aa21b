"""`CompiledDecoder` of the CPU: the layers as a table of addresses that C++ walks through."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.cpu.library import CACHE_DTYPES, Library, check
from kernels.cpu.linear import CpuLinear
from kernels.cpu.threads import num_threads
from kernels.interface import CompiledDecoder, DecoderLayerWeights, DecoderShape, LinearLayer

GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
L, N, F, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _Shape(ctypes.Structure):
    """`DecoderShape` of decoder.cpp."""

    _fields_ = [
        *((name, L) for name in ("hidden", "q_heads", "kv_heads", "head_size", "inner")),
        *((name, L) for name in ("num_blocks", "block_size", "max_position", "rotary")),
        *((name, F) for name in ("eps", "scale", "soft_cap")),
        *((name, N) for name in ("cache_dtype", "neox", "gate")),
    ]


class _Layer(ctypes.Structure):
    """`DecoderLayer` of decoder.cpp."""

    _fields_ = [
        *((name, P) for name in ("input_norm", "qkv", "q_norm", "k_norm", "cos_sin")),
        *((name, P) for name in ("key_cache", "value_cache", "key_scales", "value_scales")),
        ("window", L),
        *((name, P) for name in ("sinks", "o", "attention_out_norm", "mlp_norm", "gate_up")),
        *((name, P) for name in ("down", "mlp_out_norm")),
        ("group", L),
    ]


class _Group(ctypes.Structure):
    """`DecoderGroup` of decoder.cpp."""

    _fields_ = [("slots", P), ("block_tables", P), ("table_stride", L)]


class CpuDecoder(CompiledDecoder):
    """See `KernelSet.compile_decoder`. Keeps the tensors and layers that it points to."""

    def __init__(
        self,
        library: Library,
        shape: DecoderShape,
        layers: list[DecoderLayerWeights],
        final_norm: Tensor,
    ) -> None:
        _check(shape, layers, final_norm)
        self.hidden_size = shape.hidden_size
        self._kept = (layers, final_norm)
        table = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        handle = library.decoder_new(
            ctypes.byref(_shape(shape, layers[0])), table, len(layers), final_norm.data_ptr()
        )
        if not handle:
            raise MemoryError("no memory for the decoder's table of layers")
        self._handle, self._run = handle, library.decoder_run
        weakref.finalize(self, library.decoder_free, handle)

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor | None = None,
        others: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """See `CompiledDecoder.__call__`."""
        tokens, sequences = hidden.shape[0], block_tables.shape[0]
        _vector("hidden", hidden, (tokens, self.hidden_size), torch.float32)
        _vector("positions", positions, (tokens,), torch.int64)
        groups = (_Group * (1 + len(others)))()
        for group, (slots, tables) in zip(groups, ((slot_mapping, block_tables), *others)):
            _vector("slot_mapping", slots, (tokens,), torch.int64)
            _vector("block_tables", tables, (sequences, tables.shape[-1]), torch.int32)
            group.slots, group.block_tables = slots.data_ptr(), tables.data_ptr()
            group.table_stride = tables.shape[-1]
        _vector("seq_lens", seq_lens, (sequences,), torch.int32)
        _vector("query_start_loc", query_start_loc, (sequences + 1,), torch.int32)
        wanted, at_rows = -1, None  # no address says "all": an empty tensor has none either
        if rows is not None:
            _vector("rows", rows, rows.shape, torch.int64)
            wanted, at_rows = rows.shape[0], rows.data_ptr()
        out = torch.empty((tokens if rows is None else wanted, self.hidden_size))
        status = self._run(
            self._handle, out.data_ptr(), hidden.data_ptr(), tokens, positions.data_ptr(), groups,
            len(groups), seq_lens.data_ptr(), query_start_loc.data_ptr(), sequences,
            at_rows, wanted, num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out


def _vector(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        wanted = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} {list(x.shape)} {x.dtype} must be contiguous {wanted}")


def _shape(shape: DecoderShape, layer: DecoderLayerWeights) -> _Shape:
    blocks, _, block_size, _ = layer.key_cache.shape
    most, rotary = (0, 0) if layer.cos_sin is None else layer.cos_sin.shape
    return _Shape(
        shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        shape.intermediate_size, blocks, block_size, most, rotary, shape.norm_eps, shape.scale,
        shape.soft_cap, CACHE_DTYPES[layer.key_cache.dtype], shape.neox, GATES[shape.activation],
    )  # fmt: skip


def _layer(layer: DecoderLayerWeights) -> _Layer:
    def at(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    def packed(linear: LinearLayer) -> int:
        return cast(CpuLinear, linear).handle  # _check refuses others

    return _Layer(
        at(layer.input_norm), packed(layer.qkv), at(layer.q_norm), at(layer.k_norm),
        at(layer.cos_sin), at(layer.key_cache), at(layer.value_cache), at(layer.key_scales),
        at(layer.value_scales), layer.sliding_window,
        at(layer.sinks), packed(layer.o), at(layer.attention_out_norm), at(layer.mlp_norm),
        packed(layer.gate_up), packed(layer.down), at(layer.mlp_out_norm), layer.group,
    )  # fmt: skip


def _check(shape: DecoderShape, layers: list[DecoderLayerWeights], final_norm: Tensor) -> None:
    """Raise ValueError for what doesn't fit together."""
    if not layers or shape.num_heads % shape.num_kv_heads:
        raise ValueError("a decoder needs layers, and query heads that share the key/value heads")
    if shape.activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(GATES)}; got {shape.activation!r}")
    _vector("final_norm", final_norm, (shape.hidden_size,), torch.float32)
    first = layers[0]
    if min(layer.group for layer in layers) < 0:
        raise ValueError("a layer's group must not be negative")
    for layer in layers:
        for name, linear, sizes in _linears(shape, layer):
            if not isinstance(linear, CpuLinear):
                raise ValueError(f"{name} is no layer of these kernels")
            if (linear.in_features, linear.out_features) != sizes:
                raise ValueError(f"{name} must map {sizes[0]} to {sizes[1]}")
        for name, x, size in _vectors(shape, layer):
            if x is not None:
                _vector(name, x, (size,), torch.float32)
        _check_caches(shape, layer, first)


def _linears(
    shape: DecoderShape, layer: DecoderLayerWeights
) -> Iterator[tuple[str, LinearLayer, tuple[int, int]]]:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield "qkv", layer.qkv, (hidden, q + 2 * kv)
    yield "o", layer.o, (q, hidden)
    yield "gate_up", layer.gate_up, (hidden, 2 * inner)
    yield "down", layer.down, (inner, hidden)


def _vectors(
    shape: DecoderShape, layer: DecoderLayerWeights
) -> Iterator[tuple[str, Tensor | None, int]]:
    hidden, head = shape.hidden_size, shape.head_dim
    yield "input_norm", layer.input_norm, hidden
    yield "attention_out_norm", layer.attention_out_norm, hidden
    yield "mlp_norm", layer.mlp_norm, hidden
    yield "mlp_out_norm", layer.mlp_out_norm, hidden
    yield "q_norm", layer.q_norm, head
    yield "k_norm", layer.k_norm, head
    yield "sinks", layer.sinks, shape.num_heads


def _check_caches(
    shape: DecoderShape, layer: DecoderLayerWeights, first: DecoderLayerWeights
) -> None:
    cache, table = first.key_cache, first.cos_sin
    blocks, _, block_size, _ = cache.shape
    wanted = (blocks, shape.num_kv_heads, block_size, shape.head_dim)
    _vector("key_cache", layer.key_cache, wanted, cache.dtype)
    _vector("value_cache", layer.value_cache, wanted, cache.dtype)
    for name, scales in (("key_scales", layer.key_scales), ("value_scales", layer.value_scales)):
        if (scales is None) == (cache.dtype == torch.int8):
            raise ValueError(f"{name} are for int8 caches, which need them")
        if scales is not None:
            _vector(name, scales, wanted[:3], torch.float32)
    if (table is None) != (layer.cos_sin is None):
        raise ValueError("either all layers rotate or none does")
    if table is not None and layer.cos_sin is not None:
        _vector("cos_sin", layer.cos_sin, table.shape, torch.float32)
        if table.shape[1] % 2 or table.shape[1] > shape.head_dim:
            raise ValueError(f"cos_sin {list(table.shape)} doesn't fit heads of {shape.head_dim}")
