"""GPU benchmark cases of linear layers: plain, in few bits, and adapters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kernels.bench.gpu_case import GpuCase, compare
from kernels.interface import KernelSet
from kernels.lora import LoraPart, LoraWeights
from kernels.lora_slots import LoraRows
from kernels.triton.lora import TritonLoraSlots
from kernels.triton.quantized import Fp8Linear
from kernels.triton.quantized.scaled import MANY_ROWS

ALLOWED = {None: 1e-2, "int4": 1e-2, "int8": 2e-2, "fp8": 6e-2}
"""Against the product with the weights that a layer stands for: activations are rounded too."""


def linear_case(
    kernels: KernelSet,
    quantization: str | None,
    rows: int,
    shape: tuple[int, int],
    by_library: bool = True,
) -> GpuCase:
    """rows x K with a weight [N, K] = `shape`. Without `by_library` fp8 is multiplied by our kernel
    however many rows there are."""
    columns, depth = shape
    made = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **made)  # type: ignore[call-overload]
    weight = torch.randn(columns, depth, **made) / depth**0.5  # type: ignore[call-overload]
    layer = kernels.PackedLinear(weight, quantization=quantization)
    name = quantization or "bf16"
    if isinstance(layer, Fp8Linear) and not by_library:
        layer.by_library = False
        name += ", by our kernel"

    def check() -> None:
        some = torch.arange(min(columns, 256), device=x.device)
        expected = x.float() @ layer.rows(some).t()
        compare(layer(x)[:, : len(some)], expected, ALLOWED[quantization])

    few = rows <= 64
    return GpuCase(
        f"linear, {name}", f"{rows} x {columns} x {depth}", lambda: layer(x),
        check, bytes=layer.nbytes if few else 0, flops=0 if few else 2 * rows * columns * depth,
    )  # fmt: skip


def lora_case(kernels: KernelSet, rows: int, shape: tuple[int, int], rank: int = 16) -> GpuCase:
    """Shrink and expand of 8 adapters for rows of which some have none."""
    columns, depth = shape
    made = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **made)  # type: ignore[call-overload]
    out = torch.zeros(rows, columns, **made)  # type: ignore[call-overload]
    pairs = [
        (torch.randn(rank, depth) / depth**0.5, torch.randn(columns, rank) / rank**0.5)
        for _ in range(8)
    ]
    place = (0, "o")
    slots = TritonLoraSlots({place: 1}, 8, rank, torch.bfloat16, kernels.device)
    tables = []
    for a, b in pairs:
        lora = LoraWeights(a=a, parts=[LoraPart(0, b, 0)], out_features=columns)
        tables.append(slots.put([{"o": slots.pack(lora)}]))
    # Whoever has a table keeps what its slot points to.
    held = list(zip(tables, pairs, strict=True))
    owner = np.random.default_rng(0).integers(-1, 8, rows)
    groups = [
        (table.slot, np.flatnonzero(owner == index))
        for index, table in enumerate(tables)
        if (owner == index).any()
    ]
    sorted_rows = slots.sort(groups, rows, padded=True)
    there = LoraRows(*(torch.from_numpy(array).to(kernels.device) for array in sorted_rows))

    def check() -> None:
        out.zero_()
        slots.add(place, out, x, there)
        expected = torch.zeros(rows, columns, device=x.device)
        for row, adapter in enumerate(owner.tolist()):
            if adapter >= 0:
                pair = held[adapter][1]
                a, b = (matrix.bfloat16().float().to(x.device) for matrix in pair)
                expected[row] = b @ (a @ x[row].float())
        compare(out, expected, 2e-2)

    return GpuCase(
        "lora", f"{rows} rows, 8 adapters of {rank}, {columns} x {depth}",
        lambda: slots.add(place, out, x, there), check,
        bytes=len(groups) * rank * (columns + depth) * 2 + 2 * out.nbytes + x.nbytes,
    )  # fmt: skip


LAYERS = {
    "QKV": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
"""[N, K] of the products of a layer of Llama 3 8B."""


def layer_cases(kernels: KernelSet, small: bool = False) -> Iterator[GpuCase]:
    """All products of a layer for one row, batches and a prompt."""
    shapes = {"small": (48, 64)} if small else LAYERS
    for rows in (3,) if small else (1, 16, 64, 4096):
        for shape in shapes.values():
            for quantization in (None, *kernels.quantizations):
                yield linear_case(kernels, quantization, rows, shape)
            if "fp8" in kernels.quantizations and (small or rows >= MANY_ROWS):
                yield linear_case(kernels, "fp8", rows, shape, by_library=False)
    yield lora_case(kernels, 5 if small else 64, (48, 64) if small else (4096, 4096))
