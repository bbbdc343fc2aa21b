"""Adapters by groups of rows: near float64, and each row the same bits alone and among others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.interface import ActivationSpec, ExpertLayers, KernelSet, LinearLayer
from kernels.lora import LoraLayout, LoraSlice, LoraSliceLayout, LoraWeights, PackedLora
from kernels.moe import SequentialMoe

K = 203


def make(rank: int, dtype: torch.dtype = torch.float32, *, gain: bool = False) -> LoraWeights:
    """An adapter of a fused layer: parts of different ranks, and a column range without one."""
    widths, ranks = [70, 33, 40], [rank, max(1, rank // 2), 0]
    parts, first, start = [], 0, 0
    for width, local_rank in zip(widths, ranks, strict=True):
        parts.append(LoraSlice(first, torch.randn(width, local_rank).to(dtype), start, 0.75))
        first, start = first + width + 3, start + local_rank
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
            out_columns = slice(part.first, part.first + columns)
            y[rows, out_columns] += 0.75 * h[:, part.start : part.start + rank] @ part.b.double().T
            if lora.gain is not None and lora.shift is not None:
                y[rows, out_columns] = (
                    y[rows, out_columns] * lora.gain[out_columns] + lora.shift[out_columns]
                )
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
    expected_y = expected(y, x, uses)
    compiled.add_lora(y, x, packed(compiled, uses))
    torch.testing.assert_close(y.double(), expected_y, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("num_rows", [1, 5, 90])
def test_rounded_inputs_cost_no_more_than_their_rounding(
    compiled: KernelSet, threads: int, num_rows: int
) -> None:
    loras = [rounding(make(rank, torch.bfloat16, gain=rank == 16)) for rank in (3, 8, 16, 61, 128)]
    uses = deal(num_rows, loras)
    x, y = torch.randn(num_rows, K), torch.zeros(num_rows, loras[0].out_features)
    expected_y = expected(y, x, uses)
    # x is off by 2**-9 of itself at most, and so is h again; each gain is below 1.5.
    sizes = [(replace(lora, a=lora.a.abs(), gain=None, shift=None,
                      parts=[replace(part, b=part.b.abs()) for part in lora.parts]), rows)
             for lora, rows in uses]  # fmt: skip
    bound = 1.5 * 2**-8 * expected(y, x.abs(), sizes) + 1e-3
    compiled.add_lora(y, x, packed(compiled, uses))
    assert bool(((y.double() - expected_y).abs() <= bound).all())


def rounding(lora: LoraWeights) -> LoraWeights:
    return replace(lora, round_inputs=True)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "rounding"])
def test_a_row_has_the_same_bits_alone_and_among_others(
    compiled: KernelSet, threads: int, kind: str
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    loras = [replace(make(rank, dtype), round_inputs=kind == "rounding") for rank in (4, 8, 64, 7)]
    uses = deal(75, loras)
    x, y = torch.randn(75, K), torch.randn(75, loras[0].out_features)
    together = y.clone()
    ready = packed(compiled, uses)
    compiled.add_lora(together, x, ready)
    for lora, rows in ready:
        for row in rows.tolist():
            isolated_copy = y[row : row + 1].clone()
            compiled.add_lora(isolated_copy, x[row : row + 1], [(lora, torch.tensor([0]))])
            assert torch.equal(isolated_copy[0], together[row])
    other_rows = sorted(set(range(75)) - {row for _, rows in uses for row in rows.tolist()})
    assert torch.equal(together[other_rows], y[other_rows])


def test_what_does_not_fit_is_refused(compiled: KernelSet) -> None:
    lora = compiled.pack_lora(make(8))
    y = torch.zeros(2, lora.out_features)
    with pytest.raises(ValueError, match="maps"):
        compiled.add_lora(y, torch.zeros(2, K + 1), [(lora, torch.tensor([0]))])
    with pytest.raises(ValueError, match="row doesn't exist"):
        compiled.add_lora(y, torch.zeros(2, K), [(lora, torch.tensor([2]))])
    weights = make(8)
    with pytest.raises(ValueError, match="ranks"):
        compiled.pack_lora(LoraWeights(a=weights.a[:3], parts=weights.parts, out_features=152))


@pytest.mark.parametrize(
    ("dtype", "rounds"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_a_template_packs_what_a_file_holds_as_it_is_packed_one_by_one(
    compiled: KernelSet, dtype: torch.dtype, rounds: bool
) -> None:
    """Two layers whose numbers lie in one file in another order; the second has one a for both."""
    first, second = make(8, dtype), make(4, dtype)
    shared = replace(second, a=second.a[:4], parts=[replace(part, start=0, b=part.b[:, :2])
                                                    for part in second.parts[:2]])  # fmt: skip
    first, shared = (replace(lora, round_inputs=rounds) for lora in (first, shared))
    chunks: list[Tensor] = []

    def address_of(tensor: Tensor) -> int:
        chunks.append(tensor.flatten())
        return sum(len(chunk) for chunk in chunks[:-1])

    plans = []
    for lora in (first, shared):
        parts = [
            LoraSliceLayout(
                address_of(part.b), part.first, len(part.b), part.start, part.b.shape[1], part.scale
            )
            for part in lora.parts
        ]
        cut = len(lora.a) // 2
        a = [(address_of(chunk), len(chunk)) for chunk in (lora.a[:cut], lora.a[cut:])]
        plans.append(
            LoraLayout(
                a=a,
                parts=parts,
                in_features=K,
                out_features=lora.out_features,
                round_inputs=rounds,
            )
        )
    template = compiled.lora_template(plans, dtype)
    assert template is not None
    values = torch.cat(chunks)
    packed_loras = template.fill(values)
    assert packed_loras is not None
    for invalid in (math.nan, math.inf, -math.inf):
        spoiled = values.clone()
        spoiled[-1] = invalid
        assert template.fill(spoiled) is None
    with pytest.raises(ValueError, match="are named"):
        template.fill(values[:-1])
    values.zero_()  # nothing of the file is kept
    x, rows = torch.randn(3, K), torch.arange(3)
    for lora, packed in zip((first, shared), packed_loras, strict=True):
        y = torch.randn(3, lora.out_features)
        ours, theirs = y.clone(), y.clone()
        compiled.add_lora(ours, x, [(packed, rows)])
        compiled.add_lora(theirs, x, [(compiled.pack_lora(lora), rows)])
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, y)


def mixture(kernels: KernelSet) -> ExpertLayers:
    """Five experts and one of all tokens."""

    def linear(rows: int, columns: int) -> LinearLayer:
        return kernels.PackedLinear(0.1 * torch.randn(rows, columns), None)

    return ExpertLayers(
        router=linear(5, 48),
        gate_up=[linear(80, 48) for _ in range(5)],
        down=[linear(48, 40) for _ in range(5)],
        top_k=2,
        softmax_first=True,
        renormalize=True,
        activation=ActivationSpec("silu"),
        shared_gate_up=linear(64, 48),
        shared_down=linear(48, 32),
        shared_gate=linear(1, 48),
    )


def of_mixture(experts: ExpertLayers, rank: int, *remaining_out: str) -> dict[str, LoraWeights]:
    """An adapter of all its layers but some."""
    return {
        slot: LoraWeights(
            a=0.2 * torch.randn(rank, layer.in_features),
            parts=[LoraSlice(0, 0.2 * torch.randn(layer.out_features, rank), 0, 0.75)],
            out_features=layer.out_features,
        )
        for slot, layer in experts.linears().items()
        if slot not in remaining_out
    }


def test_rows_of_experts_get_what_their_adapters_add(compiled: KernelSet, threads: int) -> None:
    experts = mixture(compiled)
    loras = [of_mixture(experts, 4), of_mixture(experts, 16, "router", "up.1", "down.3")]
    x, owner = torch.randn(31, 48), torch.randint(-1, 2, (31,))
    rows = [(owner == index).nonzero().flatten() for index in range(2)]
    packed = [
        {slot: compiled.pack_lora(weights) for slot, weights in lora.items()} for lora in loras
    ]
    uses = list(zip(packed, rows, strict=True))
    fused = compiled.compile_experts(experts)
    together = fused.forward_with_adapters(x, uses)
    baseline = SequentialMoe(compiled, experts).forward_with_adapters(x, uses)
    torch.testing.assert_close(together, baseline, rtol=1e-4, atol=1e-4)
    assert torch.equal(together[owner < 0], fused(x)[owner < 0])
    for lora, local_tensor in uses:
        for row in local_tensor.tolist():
            isolated = fused.forward_with_adapters(x[row : row + 1], [(lora, torch.tensor([0]))])
            assert torch.equal(isolated[0], together[row])
            assert not torch.equal(isolated, fused(x[row : row + 1]))
    with pytest.raises(ValueError, match="row doesn't exist"):
        fused.forward_with_adapters(x, [(packed[0], torch.tensor([31]))])
