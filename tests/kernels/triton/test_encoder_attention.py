"""Encoders' attention in Triton's interpreter against float64, and a tower on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM
from engine.models.vision.family import VisionDecoder
from engine.multimodal.processor import MediaProcessor
from kernels.triton import TritonKernels
from kernels.triton.attention import encoder_attention
from tests.engine.multimodal.models import FAMILIES, picture
from tests.kernels.test_encoder_attention import expected_attention, make_qkv
from tests.kernels.tolerance import assert_close


@pytest.mark.parametrize("reach", [0, 1, 20, 90])
@pytest.mark.parametrize(
    ("num_seqs", "length", "size"), [(1, 1, 32), (2, 7, 72), (1, 150, 64), (2, 65, 20)]
)
def test_each_token_sees_its_sequence_and_no_other(num_seqs, length, size, reach):
    q, k, v = make_qkv(num_seqs, length, size)
    out = encoder_attention(q, k, v, length, reach=reach)
    assert_close(out, expected_attention(q, k, v, length, reach), torch.float32, 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(2, 70, 80))
    out = encoder_attention(q, k, v, 70)
    assert out.dtype == dtype
    assert_close(out, expected_attention(q, k, v, 70, 0), dtype, 4.0)


def test_a_sequence_has_the_same_bits_beside_others():
    q, k, v = make_qkv(3, 100, 64)
    rows = slice(100, 200)
    together = encoder_attention(q, k, v, 100)[rows]
    assert torch.equal(together, encoder_attention(q[rows], k[rows], v[rows], 100))


def test_tokens_that_make_no_whole_sequence_are_refused():
    q, k, v = make_qkv(1, 7, 32)
    with pytest.raises(ValueError, match="whole sequences of 4"):
        encoder_attention(q, k, v, 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llava", "float32"), ("llava", "bfloat16"), ("minicpmv", "bfloat16")],
)
def test_a_tower_gives_the_vectors_of_other_kernels(
    forced, tmp_path: Path, monkeypatch, name: str, dtype: str
) -> None:
    FAMILIES[name](tmp_path)
    tensors = MediaProcessor(tmp_path).prepare(picture(1, 60, 40)).tensors
    options = {"dtype": dtype, "num_gpu_blocks_override": 16, "device": "cpu"}
    vectors = []
    for kernels in ("triton", "reference"):
        monkeypatch.setenv("QUIRE_KERNELS", kernels)
        model = LLM(str(tmp_path), **options).core.executor.worker.loaded.model
        assert isinstance(model, VisionDecoder)
        assert isinstance(model.ops, TritonKernels) == (kernels == "triton")
        vectors.append(model.encode("image", tensors))
    assert torch.allclose(*vectors, atol=1e-4)
