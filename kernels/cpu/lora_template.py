"""Adapters of one layout, packed for the CPU's kernels without looking at each tensor."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import structs as c
from kernels.cpu.library import DTYPES, Library, check
from kernels.cpu.lora import COLUMNS, AddressedLora, depth, in_pairs, packed_width
from kernels.lora import LoraTemplate, PackedLora, PlannedLora

#: Numbers to which what is packed is aligned: 64 bytes at least.
_ALIGNED = 32


class TemplateLora(AddressedLora):
    """One linear layer's share of an adapter that was packed as a whole."""

    def __init__(self, plan: PlannedLora, rank: int, nbytes: int, address: int, held: object):
        """`held`: all memory that is pointed to."""
        self.in_features, self.out_features = plan.in_features, plan.out_features
        self.rank, self.nbytes, self.address, self._held = rank, nbytes, address, held


class _Memory:
    """An adapter's numbers in one piece, in huge pages: each step reads through all of it."""

    def __init__(self, library: Library, nbytes: int) -> None:
        """Raises MemoryError where there is none."""
        self.address = library.allocate_lora(nbytes)
        if self.address is None:
            raise MemoryError(f"{nbytes} bytes for an adapter could not be allocated")
        # At the end of the process a step may still be reading there.
        weakref.finalize(self, library.free_lora, self.address).atexit = False


class CpuLoraTemplate(LoraTemplate):
    """See `KernelSet.lora_template`.

    The structs that kernels read are kept with offsets in the place of addresses.
    """

    def __init__(self, library: Library, plans: Sequence[PlannedLora], dtype: torch.dtype) -> None:
        self._library, self._plans, self._dtype = library, plans, dtype
        inputs: list[c.LoraInputs] = []
        outputs: list[c.LoraOutputs] = []
        self._size = 0
        #: By plan: rank and bytes.
        self._told: list[tuple[int, int]] = []
        linears = (c.LoraLinear * len(plans))()
        parts = (c.LoraPart * sum(len(plan.parts) for plan in plans))()
        first = 0
        for plan, linear in zip(plans, linears, strict=True):
            begun = self._size
            linear.parts, linear.num_parts = first * ctypes.sizeof(c.LoraPart), len(plan.parts)
            linear.pairs = in_pairs(library, dtype, round_inputs=plan.round_inputs)
            self._place_inputs(plan, linear, inputs)
            own = parts[first : first + len(plan.parts)]
            self._place_outputs(plan, own, outputs, pairs=bool(linear.pairs))
            first += len(plan.parts)
            self._told.append((linear.rank, (self._size - begun) * dtype.itemsize))
        ends = [part.at + part.columns * part.rank for plan in plans for part in plan.parts]
        ends += [at + ranks * plan.in_features for plan in plans for at, ranks in plan.a]
        self._least = max(ends, default=0)
        self._inputs = (c.LoraInputs * len(inputs))(*inputs)
        self._outputs = (c.LoraOutputs * len(outputs))(*outputs)
        self._linears, self._parts = _numbers(linears).copy(), _numbers(parts).copy()

    def _place_inputs(
        self, plan: PlannedLora, linear: c.LoraLinear, inputs: list[c.LoraInputs]
    ) -> None:
        """Give the numbers of one layer's a their places."""
        rank, done, k = sum(ranks for _, ranks in plan.a), 0, plan.in_features
        for at, ranks in plan.a:
            inputs.append(c.LoraInputs(at, self._size, rank, done, ranks, k))
            done += ranks
        linear.a, linear.dtype = self._size * self._dtype.itemsize, DTYPES[self._dtype]
        linear.n, linear.rank, linear.k = plan.out_features, rank, k
        self._take(rank * depth(k))

    def _place_outputs(
        self,
        plan: PlannedLora,
        entries: Sequence[c.LoraPart],
        outputs: list[c.LoraOutputs],
        *,
        pairs: bool,
    ) -> None:
        """Give the numbers of one layer's parts their places."""
        for part, entry in zip(plan.parts, entries, strict=True):
            outputs.append(c.LoraOutputs(part.at, self._size, part.columns, part.rank, pairs))
            entry.b = self._size * self._dtype.itemsize
            entry.first, entry.columns, entry.start = part.first, part.columns, part.start
            entry.rank, entry.scale = part.rank, part.scale
            width = packed_width(part.rank, pairs=pairs)
            self._take(-(-part.columns // COLUMNS) * COLUMNS * width)

    def _take(self, count: int) -> None:
        self._size += -(-count // _ALIGNED) * _ALIGNED

    def fill(self, values: Tensor) -> list[PackedLora] | None:
        """See `LoraTemplate.fill`."""
        if values.dtype != self._dtype or not values.is_contiguous():
            raise ValueError(f"values {values.dtype} must be dense numbers of {self._dtype}")
        if values.numel() < self._least:
            raise ValueError(f"there are {values.numel()} numbers, but {self._least} are named")
        library, given = self._library, values.data_ptr()
        if not library.all_numbers(given, values.numel(), DTYPES[self._dtype]):
            return None
        kept = _Memory(library, self._size * self._dtype.itemsize)
        tables = (self._inputs, len(self._inputs), self._outputs, len(self._outputs))
        status = library.fill_lora(kept.address, given, *tables, self._dtype.itemsize)
        if status:
            check(status)
        linears, parts = self._linears.copy(), self._parts.copy()
        parts[:, _field(c.LoraPart, "b")] += kept.address
        linears[:, _field(c.LoraLinear, "a")] += kept.address
        linears[:, _field(c.LoraLinear, "parts")] += parts.ctypes.data
        address, step = linears.ctypes.data, ctypes.sizeof(c.LoraLinear)
        held = (kept, linears, parts)
        return [
            TemplateLora(plan, rank, nbytes, address + index * step, held)
            for index, (plan, (rank, nbytes)) in enumerate(
                zip(self._plans, self._told, strict=True)
            )
        ]


def _numbers(table: ctypes.Array[Any]) -> np.ndarray:
    """int64 [entries, fields]: all structs here are of whole words."""
    words = (
        np.frombuffer(memoryview(table), dtype=np.int64)
        if len(table)
        else np.empty(0, dtype=np.int64)
    )
    return words.reshape(len(table), ctypes.sizeof(table._type_) // 8)


def _field(struct: type[ctypes.Structure], name: str) -> int:
    return int(getattr(struct, name).offset) // 8
