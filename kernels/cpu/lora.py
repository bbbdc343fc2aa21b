"""Adapters on the CPU, packed for the library's kernels, and tables of them by layer."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import abi as c
from kernels.cpu.library import DTYPES, Library, address, check, check_dense
from kernels.cpu.memory import num_threads
from kernels.lora import (
    LayerLoras,
    LoraLayout,
    LoraSegment,
    LoraSlice,
    LoraTable,
    LoraTemplate,
    LoraWeights,
    PackedLora,
    TableSegment,
    check_lora,
)

#: `kLoraColumns` and `kLoraLanes` of lora.h.
COLUMNS, LANES = 32, 32
_SLOTS = (
    "qkv", "o", "up", "down", "router", "shared_up", "shared_down", "shared_gate",
    "state_in", "state_selection", "state_rates", "state_gates", "state_out",
)  # fmt: skip
#: Slots of experts, with the field that lists their adapters.
_LISTS = {"up": "expert_ups", "down": "expert_downs"}


class NativeLora(PackedLora):
    """A `c.LoraLinear` in memory, with the memory to which it points.

    Attributes:
        address: address of the struct.
    """

    address: int


class CpuLora(NativeLora):
    """See `KernelSet.pack_lora`. Owns the memory to which it points."""

    def __init__(self, library: Library, lora: LoraWeights) -> None:
        check_lora(lora)
        self._a = _pack_inputs(library, lora.a)
        # Copied, since the caller's memory may be a mapped file, or change.
        self._vectors = [vector.clone() if vector is not None else None
                         for vector in (lora.gain, lora.shift)]  # fmt: skip
        pairs = in_pairs(library, lora.a.dtype, round_inputs=lora.round_inputs)
        self._packed = [_pack_outputs(library, part.b, pairs=pairs) for part in lora.parts]
        self._parts = (c.LoraPart * len(lora.parts))(
            *(_part(part, packed) for part, packed in zip(lora.parts, self._packed, strict=True))
        )
        self.rank, self.in_features = lora.a.shape
        self.out_features = lora.out_features
        tensors = [self._a, *self._packed, *self._vectors]
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
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
    """Return whether weights are multiplied as pairs of bf16."""
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


def _part(part: LoraSlice, packed: Tensor) -> c.LoraPart:
    columns, rank = part.b.shape
    return c.LoraPart(
        b=packed.data_ptr(),
        first=part.first,
        columns=columns,
        start=part.start,
        rank=rank,
        scale=part.scale,
    )


def add_lora(library: Library, y: Tensor, x: Tensor, uses: Sequence[LoraSegment]) -> None:
    """See `KernelSet.add_lora`."""
    rows, n = y.shape
    check_dense("y", y, (rows, n), torch.float32)
    if x.dtype != torch.float32 or x.dim() != 2 or len(x) != rows or x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} {x.dtype} must be {rows} dense rows of float32")
    table = (c.LoraUse * len(uses))()
    for entry, (lora, lora_rows) in zip(table, uses, strict=True):
        if not isinstance(lora, NativeLora):
            raise ValueError("an adapter must be packed by these kernels")
        if (lora.in_features, lora.out_features) != (x.shape[1], n):
            raise ValueError(f"an adapter maps {lora.in_features} to {lora.out_features} values")
        check_dense("rows", lora_rows, (len(lora_rows),), torch.int64)
        entry.linear, entry.rows, entry.count = lora.address, lora_rows.data_ptr(), len(lora_rows)
    status = library.add_lora(
        y.data_ptr(), n, x.data_ptr(), x.stride(0), rows, table, len(uses), num_threads()
    )
    if status:
        check(status)


class CpuLoraTable(LoraTable):
    """See `CompiledDecoder.lora_table`."""

    def __init__(self, layers: LayerLoras, sizes: Sequence[dict[str, tuple[int, int]]]) -> None:
        """`sizes`: (inputs, outputs) of each layer's linear layers, by slot."""
        self._references = [dict(layer) for layer in layers]
        self._lists: dict[tuple[int, str], ctypes.Array[ctypes.c_void_p]] = {}
        self._table = (c.LoraLayer * len(sizes))()
        for row, layer, fits in zip(self._table, layers, sizes, strict=True):
            for slot, lora in layer.items():
                kind, _, expert = slot.partition(".")
                is_supported = kind in _LISTS if expert else slot in _SLOTS
                if not is_supported or not isinstance(lora, NativeLora):
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
        """Return the row's list of all experts' addresses, creating it if necessary."""
        key = (ctypes.addressof(row), kind)
        if key not in self._lists:
            count = sum(slot.startswith(f"{kind}.") for slot in fits)
            self._lists[key] = (ctypes.c_void_p * count)()
            setattr(row, _LISTS[kind], ctypes.addressof(self._lists[key]))
        return self._lists[key]


class LoraSegments:
    """A step's tokens by adapter, as an array of C++ structs."""

    def __init__(self, uses: Sequence[TableSegment]) -> None:
        self._references = uses
        self.count = len(uses)
        self.table = (c.LoraGroup * self.count)() if uses else None
        for entry, (table, rows) in zip(self.table or (), uses, strict=True):
            if not isinstance(table, CpuLoraTable):
                raise ValueError("an adapter's table must be of these kernels")
            check_dense("rows", rows, (len(rows),), torch.int64)
            entry.layers, entry.rows, entry.count = table.address, rows.data_ptr(), len(rows)


#: Packed arrays are aligned to this many numbers, which are at least 64 bytes.
_ALIGNED = 32


class TemplateLora(NativeLora):
    """One linear layer's part of an adapter that was packed as a whole."""

    def __init__(self, plan: LoraLayout, rank: int, nbytes: int, address: int, references: object):
        """`references`: all memory to which the struct points."""
        self.in_features, self.out_features = plan.in_features, plan.out_features
        self.rank, self.nbytes, self.address, self._references = rank, nbytes, address, references


class _Memory:
    """An adapter's numbers in one allocation, in huge pages since each step reads all of it."""

    def __init__(self, library: Library, nbytes: int) -> None:
        """Raises MemoryError if it can't be allocated."""
        self.address = library.allocate_lora(nbytes)
        if self.address is None:
            raise MemoryError(f"{nbytes} bytes for an adapter could not be allocated")
        # Not at exit, when a step may still read the memory.
        weakref.finalize(self, library.free_lora, self.address).atexit = False


class CpuLoraTemplate(LoraTemplate):
    """See `KernelSet.lora_template`.

    The structs for the kernels are stored with offsets instead of addresses.
    """

    def __init__(self, library: Library, plans: Sequence[LoraLayout], dtype: torch.dtype) -> None:
        self._library, self._plans, self._dtype = library, plans, dtype
        inputs: list[c.LoraInputs] = []
        outputs: list[c.LoraOutputs] = []
        self._size = 0
        #: Rank and bytes of each plan.
        self._sizes: list[tuple[int, int]] = []
        linears = (c.LoraLinear * len(plans))()
        parts = (c.LoraPart * sum(len(plan.parts) for plan in plans))()
        first = 0
        for plan, linear in zip(plans, linears, strict=True):
            start = self._size
            linear.parts, linear.num_parts = first * ctypes.sizeof(c.LoraPart), len(plan.parts)
            linear.pairs = in_pairs(library, dtype, round_inputs=plan.round_inputs)
            self._add_inputs(plan, linear, inputs)
            entries = parts[first : first + len(plan.parts)]
            self._add_outputs(plan, entries, outputs, pairs=bool(linear.pairs))
            first += len(plan.parts)
            self._sizes.append((linear.rank, (self._size - start) * dtype.itemsize))
        ends = [part.offset + part.columns * part.rank for plan in plans for part in plan.parts]
        ends += [offset + ranks * plan.in_features for plan in plans for offset, ranks in plan.a]
        self._min_values = max(ends, default=0)
        self._inputs = (c.LoraInputs * len(inputs))(*inputs)
        self._outputs = (c.LoraOutputs * len(outputs))(*outputs)
        self._linears, self._parts = _numbers(linears).copy(), _numbers(parts).copy()

    def _add_inputs(
        self, plan: LoraLayout, linear: c.LoraLinear, inputs: list[c.LoraInputs]
    ) -> None:
        """Assign offsets to the numbers of one layer's a."""
        rank, done, k = sum(ranks for _, ranks in plan.a), 0, plan.in_features
        for offset, ranks in plan.a:
            inputs.append(c.LoraInputs(offset, self._size, rank, done, ranks, k))
            done += ranks
        linear.a, linear.dtype = self._size * self._dtype.itemsize, DTYPES[self._dtype]
        linear.n, linear.rank, linear.k = plan.out_features, rank, k
        self._reserve(rank * depth(k))

    def _add_outputs(
        self,
        plan: LoraLayout,
        entries: Sequence[c.LoraPart],
        outputs: list[c.LoraOutputs],
        *,
        pairs: bool,
    ) -> None:
        """Assign offsets to the numbers of one layer's parts."""
        for part, entry in zip(plan.parts, entries, strict=True):
            outputs.append(c.LoraOutputs(part.offset, self._size, part.columns, part.rank, pairs))
            entry.b = self._size * self._dtype.itemsize
            entry.first, entry.columns, entry.start = part.first, part.columns, part.start
            entry.rank, entry.scale = part.rank, part.scale
            width = packed_width(part.rank, pairs=pairs)
            self._reserve(-(-part.columns // COLUMNS) * COLUMNS * width)

    def _reserve(self, count: int) -> None:
        self._size += -(-count // _ALIGNED) * _ALIGNED

    def fill(self, values: Tensor) -> list[PackedLora] | None:
        if values.dtype != self._dtype or not values.is_contiguous():
            raise ValueError(f"values {values.dtype} must be dense numbers of {self._dtype}")
        if values.numel() < self._min_values:
            raise ValueError(
                f"there are {values.numel()} numbers, but {self._min_values} are named"
            )
        library, source = self._library, values.data_ptr()
        if not library.all_numbers(source, values.numel(), DTYPES[self._dtype]):
            return None
        memory = _Memory(library, self._size * self._dtype.itemsize)
        tables = (self._inputs, len(self._inputs), self._outputs, len(self._outputs))
        status = library.fill_lora(memory.address, source, *tables, self._dtype.itemsize)
        if status:
            check(status)
        linears, parts = self._linears.copy(), self._parts.copy()
        parts[:, _field(c.LoraPart, "b")] += memory.address
        linears[:, _field(c.LoraLinear, "a")] += memory.address
        linears[:, _field(c.LoraLinear, "parts")] += parts.ctypes.data
        address, step = linears.ctypes.data, ctypes.sizeof(c.LoraLinear)
        references = (memory, linears, parts)
        return [
            TemplateLora(plan, rank, nbytes, address + index * step, references)
            for index, (plan, (rank, nbytes)) in enumerate(
                zip(self._plans, self._sizes, strict=True)
            )
        ]


def _numbers(table: ctypes.Array[Any]) -> np.ndarray:
    """Return structs as int64 [entries, fields]: all of these consist of whole words."""
    words = (
        np.frombuffer(memoryview(table), dtype=np.int64)
        if len(table)
        else np.empty(0, dtype=np.int64)
    )
    return words.reshape(len(table), ctypes.sizeof(table._type_) // 8)


def _field(struct: type[ctypes.Structure], name: str) -> int:
    return int(getattr(struct, name).offset) // 8
