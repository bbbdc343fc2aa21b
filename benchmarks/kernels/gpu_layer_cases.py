"""GPU benchmark cases of linear layers: plain, in few bits, and with adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.gpu_case import GpuCase, compare
from benchmarks.kernels.gpu_lora_case import lora_case
from kernels.interface import KernelSet
from kernels.triton.quantized import Fp8Linear
from kernels.triton.quantized.activations import MANY_ROWS

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
    options = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **options)  # type: ignore[call-overload]
    weight = torch.randn(columns, depth, **options) / depth**0.5  # type: ignore[call-overload]
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
