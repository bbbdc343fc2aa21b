"""Low-rank adapters of linear layers (Hu et al. 2021, "LoRA"), by groups of rows.

Rows of one batch may go through different adapters, or none: each group of rows has its own, with
its own rank. A row's result doesn't depend on the other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to neighbouring columns of a linear layer's result.

    Attributes:
        first: the first of the columns.
        b: [columns, rank]; of rank 0 where nothing is added.
        start: of h = x A^T, with the layer's A, columns [start, start + rank) meet b.
        scale: of what comes of it.
    """

    first: int
    b: Tensor
    start: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """What an adapter does to a linear layer: y = gain * (y + added) + shift.

    Attributes:
        a: [rank, K], of all parts over each other; float32, bfloat16 or float16, as each b.
        parts: of columns that don't overlap. Columns that no part names stay as they are.
        out_features: columns of y.
        gain, shift: float32 [N]; None: 1 and 0.
        round_inputs: let bfloat16 weights meet x and h rounded to bfloat16, where that is faster.
    """

    a: Tensor
    parts: Sequence[LoraPart]
    out_features: int
    gain: Tensor | None = None
    shift: Tensor | None = None
    round_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingWeights:
    """What an adapter does to an embedding's rows: replaces them, then adds scale * inner b^T.

    Attributes:
        table: [vocabulary, hidden]; None: the model's own.
        tokens: ids, int64 ascending, and their rows [ids, hidden] in the place of the table's.
        inner, b: [vocabulary, rank] and [hidden, rank]; None: nothing is added.
    """

    table: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None
    inner: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


def check_lora(lora: LoraWeights) -> None:
    """Raise ValueError for what doesn't fit together."""
    rank, n = lora.a.shape[0], lora.out_features
    if lora.a.dim() != 2 or lora.a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError("a must be [rank, K] of float32, bfloat16 or float16")
    for part in lora.parts:
        columns, own = part.b.shape
        if part.b.dtype != lora.a.dtype or not 0 <= part.start <= part.start + own <= rank:
            raise ValueError(f"a part's b {list(part.b.shape)} must be of a's dtype and ranks")
        if not 0 <= part.first <= part.first + columns <= n:
            raise ValueError(f"a part's columns must be among the layer's {n}")
    for vector in (lora.gain, lora.shift):
        if vector is not None and (vector.shape != (n,) or vector.dtype != torch.float32):
            raise ValueError(f"gain and shift must be float32 [{n}]")


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A `LoraPart` whose b begins at number `at` of a file.

    Attributes:
        first, columns, start, rank, scale: as in `LoraPart`; b is [columns, rank].
    """

    at: int
    first: int
    columns: int
    start: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLora:
    """Where a file has the numbers of `LoraWeights`, which have neither gain nor shift.

    Attributes:
        a: where the pieces of a begin that lie over each other, and their ranks.
        parts: of columns that don't overlap.
        in_features, out_features: K and N.
        round_inputs: see `LoraWeights`.
    """

    a: Sequence[tuple[int, int]]
    parts: Sequence[PlannedPart]
    in_features: int
    out_features: int
    round_inputs: bool = False


class LoraTemplate(ABC):
    """Adapters whose files have the same numbers in the same places."""

    @abstractmethod
    def fill(self, values: Tensor) -> list[PackedLora] | None:
        """What `KernelSet.pack_lora` makes of each plan, of a file's numbers; nothing is kept of
        them. None where one of them is NaN or infinite. Any thread may call it.
        """


class PackedLora(ABC):
    """`LoraWeights` as a set of kernels likes them best."""

    in_features: int
    out_features: int
    rank: int
    nbytes: int


class LoraTable:
    """An adapter's `PackedLora` of all layers, for a `CompiledDecoder` to walk through."""


#: Rows of a step, int64 and ascending, and what they go through.
LoraUse = tuple[PackedLora, Tensor]
TableUse = tuple[LoraTable, Tensor]
#: What an adapter does to a mixture of experts, by the slots of `ExpertLayers.linears`.
ExpertUse = tuple[Mapping[str, PackedLora], Tensor]
#: Of each layer, by "qkv", "o", "up" and "down", or the slots of its experts; what an adapter
#: leaves as it is isn't there.
LayerLoras = Sequence[Mapping[str, PackedLora]]


class TorchLora(PackedLora):
    """The weights as they are, for torch."""

    def __init__(self, lora: LoraWeights, device: torch.device) -> None:
        """Raises ValueError for what doesn't fit together."""
        check_lora(lora)
        self.a, self.gain, self.shift = lora.a.to(device), lora.gain, lora.shift
        self.parts = [replace(part, b=part.b.to(device)) for part in lora.parts]
        self.rank, self.in_features = lora.a.shape
        self.out_features = lora.out_features
        self.nbytes = self.a.nbytes + sum(part.b.nbytes for part in self.parts)

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        """See `KernelSet.add_lora`."""
        rows = rows.to(y.device)
        h = x[rows].float() @ self.a.float().T
        for part in self.parts:
            columns, rank = part.b.shape
            at = slice(part.first, part.first + columns)
            scaled = h[:, part.start : part.start + rank] * part.scale
            sums = y[rows, at].float() + scaled @ part.b.float().T
            if self.gain is not None:
                sums *= self.gain[at].to(y.device)
            if self.shift is not None:
                sums += self.shift[at].to(y.device)
            y[rows, at] = sums.to(y.dtype)


def add_each(y: Tensor, x: Tensor, uses: Sequence[LoraUse]) -> None:
    """`KernelSet.add_lora` by torch. Raises ValueError for what other kernels have packed."""
    for lora, rows in uses:
        if not isinstance(lora, TorchLora):
            raise ValueError("an adapter must be packed by these kernels")
        lora.add(y, x, rows)
