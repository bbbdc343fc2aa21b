"""Adapters by groups of rows: near float64, and each row the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.interface import KernelSet
from kernels.lora import LoraPart, LoraWeights, PackedLora

K = 203


def make(rank: int, dtype: torch.dtype = torch.float32, *, gain: bool = False) -> LoraWeights:
    """An adapter of a fused layer: parts of different ranks, and a column range without one."""
    widths, ranks = [70, 33, 40], [rank, max(1, rank // 2), 0]
    parts, first, start = [], 0, 0
    for width, own in zip(widths, ranks, strict=True):
        parts.append(LoraPart(first, torch.randn(width, own).to(dtype), start, 0.75))
        first, start = first + width + 3, start + own
    return LoraWeights(
        a=torch.randn(start, K).to(dtype),
        parts=parts,
        out_features=first,
        gain=torch.rand(first) + 0.5 if gain else None,
        shift=torch.randn(first) if gain else None,
    )


def expected(y: Tensor, x: Tensor, uses: list[tuple[LoraWeights, Tensor]]) -> Tensor:
    y = y.double().clone()
    for lora, rows in uses:
        h = x[rows].double() @ lora.a.double().T
        for part in lora.parts:
            columns, rank = part.b.shape
            at = slice(part.first, part.first + columns)
            y[rows, at] += 0.75 * h[:, part.start : part.start + rank] @ part.b.double().T
            if lora.gain is not None and lora.shift is not None:
                y[rows, at] = y[rows, at] * lora.gain[at] + lora.shift[at]
    return y


def deal(num_rows: int, loras: list[LoraWeights]) -> list[tuple[LoraWeights, Tensor]]:
    """Rows to adapters by chance, some to none."""
    owner = torch.randint(-1, len(loras), (num_rows,))
    return [(lora, (owner == index).nonzero().flatten()) for index, lora in enumerate(loras)]


def packed(
    kernels: KernelSet, uses: list[tuple[LoraWeights, Tensor]]
) -> list[tuple[PackedLora, Tensor]]:
    return [(kernels.pack_lora(lora), rows) for lora, rows in uses]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5, 90])
def test_each_row_gets_what_its_adapter_adds(
    compiled: KernelSet, threads: int, dtype: torch.dtype, num_rows: int
) -> None:
    loras = [make(rank, dtype, gain=rank == 16) for rank in (4, 8, 16, 61, 128)]
    uses = deal(num_rows, loras)
    x, y = torch.randn(num_rows, K), torch.randn(num_rows, loras[0].out_features)
    wanted = expected(y, x, uses)
    compiled.add_lora(y, x, packed(compiled, uses))
    torch.testing.assert_close(y.double(), wanted, rtol=2e-5, atol=2e-3)


def test_a_row_has_the_same_bits_alone_and_among_others(compiled: KernelSet, threads: int) -> None:
    loras = [make(rank) for rank in (4, 8, 64)]
    uses = deal(75, loras)
    x, y = torch.randn(75, K), torch.randn(75, loras[0].out_features)
    together = y.clone()
    ready = packed(compiled, uses)
    compiled.add_lora(together, x, ready)
    for lora, rows in ready:
        for row in rows.tolist():
            alone = y[row : row + 1].clone()
            compiled.add_lora(alone, x[row : row + 1], [(lora, torch.tensor([0]))])
            assert torch.equal(alone[0], together[row])
    others = sorted(set(range(75)) - {row for _, rows in uses for row in rows.tolist()})
    assert torch.equal(together[others], y[others])


def test_what_does_not_fit_is_refused(compiled: KernelSet) -> None:
    lora = compiled.pack_lora(make(8))
    y = torch.zeros(2, lora.out_features)
    with pytest.raises(ValueError, match="maps"):
        compiled.add_lora(y, torch.zeros(2, K + 1), [(lora, torch.tensor([0]))])
    with pytest.raises(ValueError, match="isn't there"):
        compiled.add_lora(y, torch.zeros(2, K), [(lora, torch.tensor([2]))])
    weights = make(8)
    with pytest.raises(ValueError, match="ranks"):
        compiled.pack_lora(LoraWeights(a=weights.a[:3], parts=weights.parts, out_features=152))
