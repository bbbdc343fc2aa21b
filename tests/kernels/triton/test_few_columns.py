"""How products of few rows are cut up for an H200, whatever runs the tests."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.launch import Target, watch
from kernels.triton.quantized import quantized_linear
from kernels.triton.quantized import tile_sizes as tiles

HOPPER = Target(90, 132)


def programs(quantization, columns, rows, monkeypatch, **changes):
    """Of the product of a layer [columns, 256]."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    layer = quantized_linear(
        [torch.empty(columns, 256, device="meta")],
        None,
        quantization,
        128 * (quantization[0] == "i"),
    )
    for name, value in changes.items():
        setattr(layer, name, value)
    grids = []

    def record_launch(kernel, grid, args, options):
        if "product" in kernel.__name__:
            grids.append((grid, options["BN"], options["num_warps"]))

    with watch(record_launch, HOPPER):
        layer(torch.empty(rows, 256, dtype=torch.bfloat16, device="meta"))
    return grids


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_layers_of_few_columns_have_two_programs_for_each_processor(quantization, monkeypatch):
    """4096 columns were 128 programs on 132 processors."""
    for columns, expected in ((4096, (256, 16, 2)), (6144, (384, 16, 2)), (14336, (448, 32, 4))):
        for rows in (1, 16):
            ((grid, *rest),) = programs(quantization, columns, rows, monkeypatch)
            assert (*grid, *rest) == expected
    ((grid, *rest),) = programs(quantization, 4096, 17, monkeypatch)
    assert (*grid, *rest) == (64, 64, 4)


def test_batch_invariant_products_keep_their_one_tile(monkeypatch):
    ((grid, *rest),) = programs("int8", 4096, 1, monkeypatch, fixed_tile=64)
    assert (*grid, *rest) == (64, 64, 4)
