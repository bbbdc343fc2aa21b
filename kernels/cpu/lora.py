"""Adapters on the CPU: packed for the library's kernels, and tables of them by layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu import structs as c
from kernels.cpu.checks import address, check_dense
from kernels.cpu.library import DTYPES, Library, check
from kernels.cpu.threads import num_threads
from kernels.lora import (
    LayerLoras,
    LoraPart,
    LoraTable,
    LoraUse,
    LoraWeights,
    PackedLora,
    TableUse,
    check_lora,
)

#: `kLoraColumns` and `kLoraLanes` of lora.h.
COLUMNS, LANES = 32, 32
_SLOTS = ("qkv", "o", "up", "down", "router", "shared_up", "shared_down", "shared_gate")
#: Of experts, with the field that lists them all.
_LISTS = {"up": "expert_ups", "down": "expert_downs"}


class AddressedLora(PackedLora):
    """A `c.LoraLinear` in memory, and what it points to.

    Attributes:
        address: of it.
    """

    address: int


class CpuLora(AddressedLora):
    """See `KernelSet.pack_lora`. Keeps the memory that it points to."""

    def __init__(self, library: Library, lora: LoraWeights) -> None:
        check_lora(lora)
        self._a = _pack_inputs(library, lora.a)
        # The caller's memory may be a mapped file, or change.
        self._vectors = [each.clone() if each is not None else None
                         for each in (lora.gain, lora.shift)]  # fmt: skip
        pairs = in_pairs(library, lora.a.dtype, round_inputs=lora.round_inputs)
        self._packed = [_pack_outputs(library, part.b, pairs=pairs) for part in lora.parts]
        self._parts = (c.LoraPart * len(lora.parts))(
            *(_part(part, packed) for part, packed in zip(lora.parts, self._packed, strict=True))
        )
        self.rank, self.in_features = lora.a.shape
        self.out_features = lora.out_features
        held = [self._a, *self._packed, *self._vectors]
        self.nbytes = sum(tensor.nbytes for tensor in held if tensor is not None)
        self._table = c.LoraLinear(
            a=self._a.data_ptr(),
            n=lora.out_features,
            rank=self.rank,
            k=self.in_features,
            parts=ctypes.addressof(self._parts),
            num_parts=len(lora.parts),
            gain=address(self._vectors[0]),
            shift=address(self._vectors[1]),
            dtype=DTYPES[self._a.dtype],
            pairs=pairs,
        )
        self.address = ctypes.addressof(self._table)


def depth(in_features: int) -> int:
    """`lora_depth` of lora.h."""
    return -(-in_features // LANES) * LANES


def _pack_inputs(library: Library, a: Tensor) -> Tensor:
    a = a.contiguous()
    rank, k = a.shape
    packed = torch.empty(rank * depth(k), dtype=a.dtype)
    library.pack_lora_inputs(packed.data_ptr(), a.data_ptr(), rank, k, a.element_size())
    return packed


def in_pairs(library: Library, dtype: torch.dtype, *, round_inputs: bool) -> bool:
    """Whether weights are multiplied as pairs of bf16."""
    return round_inputs and dtype == torch.bfloat16 and bool(library.has_bf16())


def packed_width(rank: int, *, pairs: bool) -> int:
    """`lora_width` of lora.h."""
    return rank + rank % 2 if pairs else rank


def _pack_outputs(library: Library, b: Tensor, *, pairs: bool) -> Tensor:
    b = b.contiguous()
    columns, rank = b.shape
    width = packed_width(rank, pairs=pairs)
    packed = torch.empty(-(-columns // COLUMNS), width, COLUMNS, dtype=b.dtype)
    library.pack_lora_outputs(
        packed.data_ptr(), b.data_ptr(), columns, rank, pairs, b.element_size()
    )
    return packed


def _part(part: LoraPart, packed: Tensor) -> c.LoraPart:
    columns, rank = part.b.shape
    return c.LoraPart(
        b=packed.data_ptr(),
        first=part.first,
        columns=columns,
        start=part.start,
        rank=rank,
        scale=part.scale,
    )


def add_lora(library: Library, y: Tensor, x: Tensor, uses: Sequence[LoraUse]) -> None:
    """See `KernelSet.add_lora`."""
    rows, n = y.shape
    check_dense("y", y, (rows, n), torch.float32)
    if x.dtype != torch.float32 or x.dim() != 2 or len(x) != rows or x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} {x.dtype} must be {rows} dense rows of float32")
    table = (c.LoraUse * len(uses))()
    for each, (lora, own) in zip(table, uses, strict=True):
        if not isinstance(lora, AddressedLora):
            raise ValueError("an adapter must be packed by these kernels")
        if (lora.in_features, lora.out_features) != (x.shape[1], n):
            raise ValueError(f"an adapter maps {lora.in_features} to {lora.out_features} values")
        check_dense("rows", own, (len(own),), torch.int64)
        each.linear, each.rows, each.count = lora.address, own.data_ptr(), len(own)
    status = library.add_lora(
        y.data_ptr(), n, x.data_ptr(), x.stride(0), rows, table, len(uses), num_threads()
    )
    if status:
        check(status)


class CpuLoraTable(LoraTable):
    """See `CompiledDecoder.lora_table`."""

    def __init__(self, layers: LayerLoras, sizes: Sequence[dict[str, tuple[int, int]]]) -> None:
        """`sizes`: inputs and outputs of each layer's linear layers, by their slots."""
        self._kept = [dict(layer) for layer in layers]
        self._lists: dict[tuple[int, str], ctypes.Array[ctypes.c_void_p]] = {}
        self._table = (c.LoraLayer * len(sizes))()
        for row, layer, fits in zip(self._table, layers, sizes, strict=True):
            for slot, lora in layer.items():
                kind, _, expert = slot.partition(".")
                known = kind in _LISTS if expert else slot in _SLOTS
                if not known or not isinstance(lora, AddressedLora):
                    raise ValueError(f"{slot} isn't adapted in one call")
                if (lora.in_features, lora.out_features) != fits.get(slot):
                    raise ValueError(f"an adapter of {slot} must map {fits.get(slot)}")
                if expert:
                    self._list(row, kind, fits)[int(expert)] = lora.address
                else:
                    setattr(row, slot, lora.address)
        self.address = ctypes.addressof(self._table)

    def _list(
        self, row: c.LoraLayer, kind: str, fits: dict[str, tuple[int, int]]
    ) -> ctypes.Array[ctypes.c_void_p]:
        """The row's list of all experts' addresses, made where there is none yet."""
        key = (ctypes.addressof(row), kind)
        if key not in self._lists:
            count = sum(slot.startswith(f"{kind}.") for slot in fits)
            self._lists[key] = (ctypes.c_void_p * count)()
            setattr(row, _LISTS[kind], ctypes.addressof(self._lists[key]))
        return self._lists[key]


class LoraGroups:
    """The groups of a step as C++ reads them."""

    def __init__(self, uses: Sequence[TableUse]) -> None:
        self._kept = uses
        self.count = len(uses)
        self.table = (c.LoraGroup * self.count)() if uses else None
        for each, (table, rows) in zip(self.table or (), uses, strict=True):
            if not isinstance(table, CpuLoraTable):
                raise ValueError("an adapter's table must be of these kernels")
            check_dense("rows", rows, (len(rows),), torch.int64)
            each.layers, each.rows, each.count = table.address, rows.data_ptr(), len(rows)
