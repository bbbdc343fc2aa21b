"""A GPU benchmark case of adapters."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.kernels.gpu_case import GpuCase, compare
from kernels.interface import KernelSet
from kernels.lora import LoraMapping, LoraSlice, LoraWeights
from kernels.triton.lora import TritonLoraSlots


def lora_case(kernels: KernelSet, rows: int, shape: tuple[int, int], rank: int = 16) -> GpuCase:
    """Shrink and expand of 8 adapters for rows of which some have none."""
    columns, depth = shape
    options = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **options)  # type: ignore[call-overload]
    out = torch.zeros(rows, columns, **options)  # type: ignore[call-overload]
    pairs = [
        (torch.randn(rank, depth) / depth**0.5, torch.randn(columns, rank) / rank**0.5)
        for _ in range(8)
    ]
    key = (0, "o")
    slots = TritonLoraSlots({key: 1}, 8, rank, torch.bfloat16, kernels.device)
    tables = []
    for a, b in pairs:
        lora = LoraWeights(a=a, parts=[LoraSlice(0, b, 0)], out_features=columns)
        tables.append(slots.put([{"o": slots.pack(lora)}]))
    # Whoever has a table keeps what its slot points to.
    loaded = list(zip(tables, pairs, strict=True))
    owner = np.random.default_rng(0).integers(-1, 8, rows)
    groups = [
        (table.slot, np.flatnonzero(owner == index))
        for index, table in enumerate(tables)
        if (owner == index).any()
    ]
    sorted_rows = slots.sort(groups, rows, padded=True)
    mapping = LoraMapping(*(torch.from_numpy(array).to(kernels.device) for array in sorted_rows))

    def check() -> None:
        out.zero_()
        slots.add(key, out, x, mapping)
        expected = torch.zeros(rows, columns, device=x.device)
        for row, adapter in enumerate(owner.tolist()):
            if adapter >= 0:
                pair = loaded[adapter][1]
                a, b = (matrix.bfloat16().float().to(x.device) for matrix in pair)
                expected[row] = b @ (a @ x[row].float())
        compare(out, expected, 2e-2)

    return GpuCase(
        "lora", f"{rows} rows, 8 adapters of {rank}, {columns} x {depth}",
        lambda: slots.add(key, out, x, mapping), check,
        bytes=len(groups) * rank * (columns + depth) * 2 + 2 * out.nbytes + x.nbytes,
    )  # fmt: skip
