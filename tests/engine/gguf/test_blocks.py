"""Each type of block against llama.cpp's own package, and through the packed layers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import kernels
from engine.checkpoints.gguf.block_formats import FORMATS, READERS
from engine.checkpoints.gguf.file import BLOCKS
from kernels.reference import ReferenceKernels
from tests.engine.gguf.files import random_blocks
from tests.kernels.linears import sliced_integers

QUANTIZED = [
    Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K,
    Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
]  # fmt: skip
ROUNDED = (Kind.Q5_1, Kind.Q5_K)
"""Five bits and a minimum: no kernel's."""


def blocks_of(raw: np.ndarray, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(raw).view(len(raw), -1, BLOCKS[int(kind)].nbytes)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_say_what_llama_cpp_reads_in_them(kind: Kind) -> None:
    raw = random_blocks(kind, 5, 768, seed=3)
    got = READERS[int(kind)](blocks_of(raw, kind)).floats()
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_kernels_hold_them_as_they_are(kind: Kind, compiled: bool) -> None:
    stored_format = FORMATS.get(int(kind))
    if stored_format is None:
        assert kind in ROUNDED
        return
    raw = random_blocks(kind, 40, 512, seed=4)
    blocks = READERS[int(kind)](blocks_of(raw, kind))
    ops = kernels.get("cpu") if compiled else ReferenceKernels()
    layer = sliced_integers(
        ops,
        (40, 512), [blocks.integers()], bits=stored_format.bits,
        group_size=stored_format.group_size, with_minima=stored_format.with_minima,
    )  # fmt: skip
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    # Products of a block's scale and a group's are kept in float16.
    torch.testing.assert_close(layer.rows(torch.arange(40)), expected, rtol=1e-3, atol=2e-4)


def test_sizes_are_ggmls() -> None:
    for kind, block in BLOCKS.items():
        assert (block.values, block.nbytes) == gguf.GGML_QUANT_SIZES[Kind(kind)]
        assert block.name == Kind(kind).name
