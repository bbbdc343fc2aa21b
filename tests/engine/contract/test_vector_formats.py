"""Vectors in narrow number formats: every rounding as torch does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.contract.pooling_params import EMBED_DTYPES, EmbedDtype, encode_vector

KINDS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_every_number_is_rounded_as_torch_rounds_it(dtype: EmbedDtype) -> None:
    kind = KINDS.get(dtype) or getattr(torch, dtype)
    rng = np.random.default_rng()
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = [halves, rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)]
    numbers = np.concatenate([*values, rng.standard_normal(50_000).astype(np.float32)])
    if dtype == "fp8_e4m3":  # beyond its largest number releases of torch differ
        numbers = numbers[~(np.abs(numbers) > 448)]
        assert encode_vector(np.float32([1e9, -np.inf]), dtype) == b"\x7e\xfe"
    expected = torch.from_numpy(numbers).to(kind).float()
    decoded = torch.frombuffer(bytearray(encode_vector(numbers, dtype)), dtype=kind).float()
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(
        decoded.nan_to_num(nan=0.0).signbit(), expected.nan_to_num(nan=0.0).signbit()
    )
    assert torch.equal(decoded.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_bytes_of_each_number_are_turned_round() -> None:
    numbers = np.float32([1.5, -2])
    little, big = (
        encode_vector(numbers, "float32", "little"),
        encode_vector(numbers, "float32", "big"),
    )
    assert little == np.asarray(numbers, "<f4").tobytes()
    assert big == np.asarray(numbers, ">f4").tobytes()
    assert encode_vector(numbers, "fp8_e5m2", "big") == encode_vector(numbers, "fp8_e5m2", "little")
