"""Attention without a causal mask, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.tolerance import assert_close


def expected_attention(q: Tensor, k: Tensor, v: Tensor, length: int, reach: int) -> Tensor:
    """[T, H, D] in float64, sequence by sequence."""
    out = torch.empty(q.shape, dtype=torch.float64)
    positions = torch.arange(length)
    hidden = (positions[:, None] - positions[None, :]).abs() > (reach or length)
    for first in range(0, len(q), length):
        rows = slice(first, first + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[rows].double())
        scores = (scores * q.shape[2] ** -0.5).masked_fill(hidden, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows].double())
    return out


def make_qkv(num_seqs: int, length: int, size: int) -> list[Tensor]:
    """Queries, keys and values [T, 3, size], side by side as a fused layer gives them."""
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(num_seqs * length, 3, 3, size, generator=generator)
    return list(qkv.unbind(1))


@pytest.mark.parametrize("reach", [0, 1, 20])
@pytest.mark.parametrize(
    ("num_seqs", "length", "size"), [(1, 1, 32), (3, 1, 64), (2, 7, 72), (1, 300, 64), (4, 33, 20)]
)
def test_each_token_sees_its_sequence_and_no_other(kernels, num_seqs, length, size, reach):
    q, k, v = make_qkv(num_seqs, length, size)
    out = kernels.encoder_attention(q, k, v, length, reach=reach)
    assert_close(out, expected_attention(q, k, v, length, reach), torch.float32, 2.0)


@pytest.mark.parametrize("length", [1, 8, 301])
def test_rounded_inputs_are_as_near_as_bfloat16(kernels, threads, length):
    q, k, v = make_qkv(2, length, 64)
    out = kernels.encoder_attention(q, k, v, length, round_inputs=True)
    assert out.dtype == torch.float32
    expected = expected_attention(q, k, v, length, 0)
    assert (out - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("round_inputs", [False, True])
def test_a_sequence_has_the_same_bits_beside_others(compiled, round_inputs):
    q, k, v = make_qkv(5, 150, 64)
    together = compiled.encoder_attention(q, k, v, 150, round_inputs=round_inputs)
    rows = slice(300, 450)
    isolated = compiled.encoder_attention(q[rows], k[rows], v[rows], 150, round_inputs=round_inputs)
    assert torch.equal(together[rows], isolated)
