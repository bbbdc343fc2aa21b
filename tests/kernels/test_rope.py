"""QK norm, rotation and the cache write against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.kernels import oracle
from tests.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table(positions: int, rotary: int) -> torch.Tensor:
    """cos_sin [positions, rotary]."""
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
    angle = torch.arange(positions).float()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1)


class Step:
    """q, k and v as views of one fused output, and caches full of a marker."""

    def __init__(self, tokens, heads, kv_heads, size, dtype=torch.float32, cache_dtype=None):
        torch.manual_seed(tokens * size)
        fused = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        self.q, self.k, self.v = fused.split([heads, kv_heads, kv_heads], 1)
        self.positions = torch.randint(0, 50, (tokens,))
        shape = (9, kv_heads, 8, size)
        self.keys = torch.full(shape, 7.0, dtype=cache_dtype or dtype)
        self.values = torch.full(shape, 7.0, dtype=cache_dtype or dtype)
        self.slots = torch.randperm(9 * 8)[:tokens]

    def run(self, kernels, cos_sin, **options):
        kernels.rope_and_cache(
            self.q, self.k, self.v, self.positions, cos_sin, self.keys, self.values, self.slots,
            **options,
        )  # fmt: skip

    def cached(self, cache, token):
        slot = int(self.slots[token])
        return cache[slot // 8, :, slot % 8]


@covering(
    indirect=["threads"], threads=[1, 2], dtype=DTYPES, neox=[True, False],
    sizes=[(32, 32), (64, 16), (80, 32), (96, 96), (128, 128)],
)  # fmt: skip
def test_rotates_in_place_and_writes(kernels, threads, dtype, neox, sizes):
    size, rotary = sizes
    step, cos_sin = Step(5, 4, 2, size, dtype), table(50, rotary)
    q = oracle.rope(step.q, step.positions, cos_sin, neox)
    k = oracle.rope(step.k, step.positions, cos_sin, neox)
    v = step.v.clone()
    step.run(kernels, cos_sin, neox=neox)
    assert_close(step.q, q, dtype)
    assert_close(step.k, k, dtype)
    assert torch.equal(step.v, v)
    for token in range(5):
        assert torch.equal(step.cached(step.keys, token), step.k[token])
        assert torch.equal(step.cached(step.values, token), v[token])
    assert int((step.keys == 7.0).sum()) == (9 * 8 - 5) * 2 * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_before_they_turn(kernels, dtype):
    step, cos_sin = Step(3, 3, 1, 64, dtype), table(50, 64)
    weights = [(1 + torch.rand(64)).to(dtype) for _ in range(2)]
    expected = []
    for x, weight in zip((step.q, step.k), weights):
        normed = oracle.rms_norm(x.flatten(0, 1), weight, 1e-6).view(x.shape)
        expected.append(oracle.rope(normed, step.positions, cos_sin, True))
    step.run(kernels, cos_sin, q_norm_weight=weights[0], k_norm_weight=weights[1])
    assert_close(step.q, expected[0], dtype)
    assert_close(step.k, expected[1], dtype)


def test_a_cache_of_another_dtype(kernels):
    step = Step(4, 2, 2, 32, torch.float32, torch.bfloat16)
    step.run(kernels, table(50, 32))
    for token in range(4):
        assert torch.equal(step.cached(step.keys, token), step.k[token].bfloat16())
        assert torch.equal(step.cached(step.values, token), step.v[token].bfloat16())


def test_an_int8_cache(kernels):
    step = Step(4, 2, 2, 40, torch.float32, torch.int8)
    step.k[1, 0] = 0
    scales = [torch.full((9, 2, 8), 7.0) for _ in range(2)]
    step.run(kernels, table(50, 32), key_scales=scales[0], value_scales=scales[1])
    for cache, scale, written in ((step.keys, scales[0], step.k), (step.values, scales[1], step.v)):
        for token in range(4):
            slot = int(step.slots[token])
            of = scale[slot // 8, :, slot % 8]
            assert torch.allclose(of, written[token].abs().amax(-1) / 127)
            off = step.cached(cache, token) * of[:, None] - written[token]
            assert (off.abs() <= of[:, None] * 0.501).all()
        assert int((scale != 7.0).sum()) == 4 * 2


def as_int8(row: torch.Tensor) -> tuple[np.ndarray, np.float32]:
    """A row's integers, the even one of two neighbours, and its scale, in float32's own steps."""
    x = row.numpy()
    largest = np.abs(x).max()
    if not np.isfinite(largest):
        return np.zeros(len(x), np.int8), np.float32(np.nan)
    inverse = np.float32(127) / largest if largest > 1e-36 else np.float32(0)
    return np.rint(x * inverse).astype(np.int8), largest / np.float32(127)


@pytest.mark.parametrize("size", [1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 40, 80, 96, 112, 127, 256])
def test_an_int8_cache_holds_the_same_bytes_whatever_the_width_of_a_vector(compiled, size):
    step = Step(12, 2, 2, size, torch.float32, torch.int8)
    rows = step.k
    rows[0, 0] = 0
    rows[1, 0], rows[1, 1] = 3e38, 1e-40  # the largest, and one whose 1 / scale is infinite
    rows[2, 0, -1], rows[2, 1, 0] = math.nan, math.inf
    rows[3, 0, size // 2], rows[3, 1, -1] = -math.inf, math.nan
    rows[4, 0] = torch.arange(size) - size / 2  # halves: as near to one integer as to the next
    rows[4, 0, 0], rows[4, 1] = 127, torch.where(torch.arange(size) % 2 > 0, -0.5, 127.0)
    scales = [torch.full((9, 2, 8), 7.0) for _ in range(2)]
    expected = [[as_int8(row) for row in token] for token in rows]
    step.run(compiled, None, key_scales=scales[0], value_scales=scales[1])
    for token, of in enumerate(expected):
        slot = int(step.slots[token])
        for head, (integers, scale) in enumerate(of):
            assert np.array_equal(step.cached(step.keys, token)[head].numpy(), integers)
            got = scales[0][slot // 8, head, slot % 8].numpy()
            assert np.array_equal(got, scale, equal_nan=True)


def test_the_reference_tells_of_what_no_integer_stands_for(kernels):
    step = Step(3, 2, 1, 40, torch.float32, torch.int8)
    step.v[0, 0, 7], step.v[1] = math.nan, 1e-40
    scales = [torch.full((9, 1, 8), 7.0) for _ in range(2)]
    step.run(kernels, None, key_scales=scales[0], value_scales=scales[1])
    assert not step.cached(step.values, 0).any()
    assert not step.cached(step.values, 1).any()
    written = [scales[1][slot // 8, 0, slot % 8] for slot in step.slots.tolist()]
    assert [math.isnan(scale) for scale in written] == [True, False, False]


def test_without_a_table_nothing_turns(kernels):
    step = Step(2, 2, 1, 32)
    q = step.q.clone()
    step.run(kernels, None)
    assert torch.equal(step.q, q)
    assert torch.equal(step.cached(step.keys, 1), step.k[1])


def test_keys_need_no_queries(kernels):
    step, with_queries = Step(5, 2, 2, 32), Step(5, 2, 2, 32)
    with_queries.run(kernels, None)
    step.q = step.k[:, :0]
    step.run(kernels, None)
    assert torch.equal(step.keys, with_queries.keys)
    assert torch.equal(step.values, with_queries.values)


def test_a_slot_of_minus_one_writes_nothing(kernels):
    step = Step(3, 2, 1, 32)
    step.slots = torch.full((3,), -1)
    step.run(kernels, table(50, 32))
    assert (step.keys == 7.0).all()
    assert (step.values == 7.0).all()


def test_no_tokens(kernels):
    step = Step(0, 2, 1, 32)
    step.run(kernels, table(50, 32))
    assert (step.keys == 7.0).all()


def test_what_lies_outside_is_refused_before_anything_is_written(compiled):
    for name, value, words in (
        ("positions", 50, "position"), ("positions", -1, "position"),
        ("slots", 72, "slot"), ("slots", -2, "slot"),
    ):  # fmt: skip
        step = Step(3, 2, 1, 32)
        initial_copy = step.q.clone()
        getattr(step, name)[2] = value
        with pytest.raises(ValueError, match=words):
            step.run(compiled, table(50, 32))
        assert torch.equal(step.q, initial_copy)
        assert (step.keys == 7.0).all()


def test_shapes_that_do_not_go_together_are_refused(compiled):
    step, cos_sin = Step(3, 2, 1, 32), table(50, 32)
    step.v = step.v[:2]
    with pytest.raises(ValueError, match="don't go with"):
        step.run(compiled, cos_sin)
    with pytest.raises(ValueError, match="cos_sin"):
        Step(3, 2, 1, 32).run(compiled, table(50, 64))
    with pytest.raises(ValueError, match="norm weight"):
        Step(3, 2, 1, 32).run(compiled, cos_sin, q_norm_weight=torch.ones(31))


@covering(dtype=DTYPES, cache_dtype=[torch.float8_e4m3fn, torch.float8_e5m2], scaled=[True, False])
def test_fp8_caches_hold_rounded_parts_of_a_heads_scale(kernels, dtype, cache_dtype, scaled):
    """What is too large becomes the largest value, and NaN stays."""
    step = Step(5, 2, 2, 64, dtype, torch.float32)
    step.keys, step.values = step.keys.to(cache_dtype), step.values.to(cache_dtype)
    step.k[0] *= torch.logspace(-8, 5, 64, 10.0).to(dtype)
    step.v[1, 0, 3], step.v[2, 1, 5], step.v[3, 0, 0] = math.nan, math.inf, -math.inf
    scales = [torch.tensor([0.25, 3.0]), torch.tensor([0.01, 1.0])] if scaled else [None, None]
    step.run(kernels, None, key_scales=scales[0], value_scales=scales[1])
    limit = torch.finfo(cache_dtype).max
    for cache, x, scale in zip((step.keys, step.values), (step.k, step.v), scales):
        for token in range(5):
            size = x[token].float() if scale is None else x[token].float() / scale[:, None]
            expected = size.clamp(-limit, limit).to(cache_dtype).float()
            torch.testing.assert_close(
                step.cached(cache, token).float(), expected, rtol=0, atol=0, equal_nan=True
            )
