"""Adapters of one layout, packed for the CPU's kernels without looking at each tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import structs as c
from kernels.cpu.library import DTYPES
from kernels.cpu.lora import COLUMNS, AddressedLora
from kernels.lora import LoraTemplate, PackedLora, PlannedLora

#: Numbers to which what is packed is aligned: 64 bytes at least.
_ALIGNED = 32
#: Integers of a number's size: they are moved as they are.
_MOVED = {2: torch.int16, 4: torch.int32}


class TemplateLora(AddressedLora):
    """One linear layer's share of an adapter that was packed as a whole."""

    def __init__(self, plan: PlannedLora, rank: int, nbytes: int, address: int, held: object):
        """`held`: all memory that is pointed to."""
        self.in_features, self.out_features = plan.in_features, plan.out_features
        self.rank, self.nbytes, self.address, self._held = rank, nbytes, address, held


class CpuLoraTemplate(LoraTemplate):
    """See `KernelSet.lora_template`.

    The structs that kernels read are kept with offsets in the place of addresses.
    """

    def __init__(self, plans: Sequence[PlannedLora], dtype: torch.dtype) -> None:
        self._plans, self._dtype = plans, dtype
        #: Of rows that are taken as they are: from, to, count.
        self._copies: list[tuple[int, int, int]] = []
        #: Of each b: from, to, columns, rank.
        self._packs: list[tuple[int, int, int, int]] = []
        self._size = 0
        #: By plan: rank and bytes.
        self._told: list[tuple[int, int]] = []
        linears = (c.LoraLinear * len(plans))()
        parts = (c.LoraPart * sum(len(plan.parts) for plan in plans))()
        first = 0
        for plan, linear in zip(plans, linears, strict=True):
            own = (linear, [parts[first + index] for index in range(len(plan.parts))])
            self._place(plan, *own, first * ctypes.sizeof(c.LoraPart))
            first += len(plan.parts)
        self._linears, self._parts = _numbers(linears).copy(), _numbers(parts).copy()

    def _place(
        self, plan: PlannedLora, linear: c.LoraLinear, parts: list[c.LoraPart], first: int
    ) -> None:
        """Give one layer's numbers their places; `first`: the offset of its parts."""
        begun, width = self._size, self._dtype.itemsize
        rank = 0
        for at, ranks in plan.a:
            count = ranks * plan.in_features
            self._copies.append((at, begun + rank * plan.in_features, count))
            rank += ranks
        self._take(rank * plan.in_features)
        for part, entry in zip(plan.parts, parts, strict=True):
            if part.rank:
                self._packs.append((part.at, self._size, part.columns, part.rank))
            entry.b = self._size * width
            entry.first, entry.columns, entry.start = part.first, part.columns, part.start
            entry.rank, entry.scale = part.rank, part.scale
            self._take(-(-part.columns // COLUMNS) * COLUMNS * part.rank)
        linear.a, linear.parts, linear.num_parts = begun * width, first, len(parts)
        linear.n, linear.rank, linear.k = plan.out_features, rank, plan.in_features
        linear.dtype = DTYPES[self._dtype]
        self._told.append((rank, (self._size - begun) * width))

    def _take(self, count: int) -> None:
        self._size += -(-count // _ALIGNED) * _ALIGNED

    def fill(self, values: Tensor) -> list[PackedLora]:
        """See `LoraTemplate.fill`."""
        if values.dtype != self._dtype or not values.is_contiguous():
            raise ValueError(f"values {values.dtype} must be dense numbers of {self._dtype}")
        kind = _MOVED[self._dtype.itemsize]
        kept = torch.empty(self._size, dtype=kind)
        given, packed = values.view(kind).numpy(), kept.numpy()
        for at, to, count in self._copies:
            packed[to : to + count] = given[at : at + count]
        for at, to, columns, rank in self._packs:
            _pack(packed[to:], given[at : at + columns * rank].reshape(columns, rank))
        linears, parts = self._linears.copy(), self._parts.copy()
        parts[:, _field(c.LoraPart, "b")] += kept.data_ptr()
        linears[:, _field(c.LoraLinear, "a")] += kept.data_ptr()
        linears[:, _field(c.LoraLinear, "parts")] += parts.ctypes.data
        address, step = linears.ctypes.data, ctypes.sizeof(c.LoraLinear)
        held = (kept, linears, parts)
        return [
            TemplateLora(plan, rank, nbytes, address + index * step, held)
            for index, (plan, (rank, nbytes)) in enumerate(
                zip(self._plans, self._told, strict=True)
            )
        ]


def _pack(to: np.ndarray, b: np.ndarray) -> None:
    """As `quire_pack_lora` does."""
    columns, rank = b.shape
    whole = columns // COLUMNS
    blocks = to[: -(-columns // COLUMNS) * COLUMNS * rank].reshape(-1, rank, COLUMNS)
    blocks[:whole] = b[: whole * COLUMNS].reshape(whole, COLUMNS, rank).transpose(0, 2, 1)
    if left := columns % COLUMNS:
        blocks[whole, :, :left] = b[whole * COLUMNS :].T
        blocks[whole, :, left:] = 0


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
