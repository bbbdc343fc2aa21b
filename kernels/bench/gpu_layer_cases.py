"""GPU benchmark cases of linear layers: plain, in few bits, and adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.bench.gpu_case import GpuCase, compare
from kernels.interface import KernelSet
from kernels.triton import grouped

ALLOWED = {None: 1e-2, "int4": 1e-2, "int8": 2e-2, "fp8": 6e-2}
"""Against the product with the weights that a layer stands for: activations are rounded too."""


def linear_case(
    kernels: KernelSet, quantization: str | None, rows: int, shape: tuple[int, int]
) -> GpuCase:
    """rows x K with a weight [N, K] = `shape`."""
    columns, depth = shape
    made = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **made)  # type: ignore[call-overload]
    weight = torch.randn(columns, depth, **made) / depth**0.5  # type: ignore[call-overload]
    layer = kernels.PackedLinear(weight, quantization=quantization)

    def check() -> None:
        some = torch.arange(min(columns, 256), device=x.device)
        expected = x.float() @ layer.rows(some).t()
        compare(layer(x)[:, : len(some)], expected, ALLOWED[quantization])

    few = rows <= 64
    return GpuCase(
        f"linear, {quantization or 'bf16'}", f"{rows} x {columns} x {depth}", lambda: layer(x),
        check, bytes=layer.nbytes if few else 0, flops=0 if few else 2 * rows * columns * depth,
    )  # fmt: skip


def lora_case(kernels: KernelSet, rows: int, shape: tuple[int, int], rank: int = 16) -> GpuCase:
    """Shrink and expand of 8 adapters for rows of which some have none."""
    columns, depth = shape
    made = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **made)  # type: ignore[call-overload]
    a = torch.randn(8, rank, depth, **made) / depth**0.5  # type: ignore[call-overload]
    b = torch.randn(8, columns, rank, **made) / rank**0.5  # type: ignore[call-overload]
    adapters = torch.randint(-1, 8, (rows,), device=kernels.device, dtype=torch.int32)
    out = torch.zeros(rows, columns, **made)  # type: ignore[call-overload]

    def run() -> None:
        groups = grouped.lora_groups(adapters, 8)
        grouped.lora_expand(grouped.lora_shrink(x, a, groups), b, groups, out)

    def check() -> None:
        out.zero_()
        run()
        expected = torch.zeros(rows, columns, device=x.device)
        for row, adapter in enumerate(adapters.tolist()):
            if adapter >= 0:
                expected[row] = b[adapter].float() @ (a[adapter].float() @ x[row].float())
        compare(out, expected, 2e-2)

    used = min(8, rows)
    return GpuCase(
        "lora", f"{rows} rows, 8 adapters of {rank}, {columns} x {depth}", run, check,
        bytes=used * rank * (columns + depth) * 2 + 2 * out.nbytes + x.nbytes,
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
    yield lora_case(kernels, 5 if small else 64, (48, 64) if small else (4096, 4096))
