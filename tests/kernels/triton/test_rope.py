"""QK norm, rotation and the cache write in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.rope import rope_and_cache
from tests.kernels import oracle
from tests.kernels.test_rope import DTYPES, Step, table
from tests.kernels.tolerance import assert_close

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


class Stub:
    """What `Step` calls."""

    rope_and_cache = staticmethod(rope_and_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("size", "rotary"), [(32, 32), (64, 16), (80, 32)])
def test_rotates_in_place_and_writes(dtype, neox, size, rotary):
    step, cos_sin = Step(5, 11, 2, size, dtype), table(50, rotary)
    q = oracle.rope(step.q, step.positions, cos_sin, neox)
    k = oracle.rope(step.k, step.positions, cos_sin, neox)
    v = step.v.clone()
    step.run(Stub, cos_sin, neox=neox)
    assert_close(step.q, q, dtype)
    assert_close(step.k, k, dtype)
    assert torch.equal(step.v, v)
    for token in range(5):
        assert torch.equal(step.cached(step.keys, token), step.k[token])
        assert torch.equal(step.cached(step.values, token), v[token])
    assert int((step.keys == 7.0).sum()) == (9 * 8 - 5) * 2 * size


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_before_they_turn(dtype, neox):
    step, cos_sin = Step(3, 3, 1, 64, dtype), table(50, 48)
    weights = [(1 + torch.rand(64)).to(dtype) for _ in range(2)]
    expected = []
    for x, weight in zip((step.q, step.k), weights):
        normed = oracle.rms_norm(x.flatten(0, 1), weight, 1e-6).view(x.shape)
        expected.append(oracle.rope(normed, step.positions, cos_sin, neox))
    step.run(Stub, cos_sin, q_norm_weight=weights[0], k_norm_weight=weights[1], neox=neox)
    assert_close(step.q, expected[0], dtype)
    assert_close(step.k, expected[1], dtype)


@pytest.mark.parametrize("dtype", FP8)
def test_an_fp8_cache_rounds_as_torch_does(dtype):
    step = Step(6, 2, 2, 40, torch.float32, dtype)
    step.v *= torch.logspace(-9, 4, 40)  # subnormals of both formats, and what is too large
    step.v[0, 0, 0] = 0.0
    step.run(Stub, None)
    top = torch.finfo(dtype).max
    for token in range(6):
        for cache, written in ((step.keys, step.k), (step.values, step.v)):
            expected = written[token].clamp(-top, top).to(dtype)
            got = step.cached(cache, token)
            assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("dtype", [*FP8, torch.int8])
def test_a_scale_for_each_head_of_a_token(dtype):
    step = Step(4, 2, 2, 40, torch.float32, dtype)
    step.k[1, 0] = 0
    scales = [torch.full((9, 2, 8), 7.0) for _ in range(2)]
    step.run(Stub, table(50, 32), key_scales=scales[0], value_scales=scales[1])
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    error = {torch.float8_e4m3fn: 0.04, torch.float8_e5m2: 0.08, torch.int8: 0.004}[dtype]
    for cache, scale, written in ((step.keys, scales[0], step.k), (step.values, scales[1], step.v)):
        for token in range(4):
            slot = int(step.slots[token])
            of = scale[slot // 8, :, slot % 8]
            largest = written[token].abs().amax(-1)
            torch.testing.assert_close(of, largest / limit)
            off = step.cached(cache, token).float() * of[:, None] - written[token]
            assert (off.abs() <= largest[:, None] * error).all()
        assert int((scale != 7.0).sum()) == 4 * 2


@pytest.mark.parametrize("dtype", FP8)
def test_one_scale_for_a_cache(dtype):
    step = Step(3, 2, 2, 32, torch.bfloat16, dtype)
    scales = torch.tensor([0.25]), torch.tensor([4.0])
    step.run(Stub, None, key_scales=scales[0], value_scales=scales[1])
    for token in range(3):
        for cache, scale, written in ((step.keys, 0.25, step.k), (step.values, 4.0, step.v)):
            expected = (written[token].float() / scale).to(dtype)
            assert torch.equal(step.cached(cache, token).float(), expected.float())


@pytest.mark.parametrize("dtype", FP8)
def test_a_given_scale_for_each_head(dtype):
    step = Step(3, 4, 3, 40, torch.float32, dtype)
    scales = torch.tensor([0.25, 1.0, 3.0]), torch.tensor([4.0, 0.5, 0.1])
    step.run(Stub, None, key_scales=scales[0], value_scales=scales[1])
    for token in range(3):
        for cache, scale, written in zip((step.keys, step.values), scales, (step.k, step.v)):
            expected = (written[token] / scale[:, None]).to(dtype)
            assert torch.equal(step.cached(cache, token).float(), expected.float())


@pytest.mark.parametrize("dtype", FP8)
def test_what_is_not_a_number_stays_so(dtype):
    """A broken sequence isn't healed by its cache."""
    step = Step(2, 2, 1, 32, torch.float32, dtype)
    step.k[1, 0, 5] = float("nan")
    step.run(Stub, None)
    assert int(step.cached(step.keys, 1).float().isnan().sum()) == 1
    key = step.cached(step.keys, 1).float()
    assert bool(key[0, 5].isnan())


def test_a_cache_of_another_dtype():
    step = Step(4, 2, 2, 32, torch.float32, torch.bfloat16)
    step.run(Stub, table(50, 32))
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    assert_close(step.cached(step.keys, 1), step.k[1], torch.bfloat16)


def test_without_a_table_nothing_turns():
    step = Step(2, 2, 1, 32)
    q = step.q.clone()
    step.run(Stub, None)
    assert torch.equal(step.q, q)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_slot_of_minus_one_writes_nothing(tokens):
    step = Step(tokens, 2, 1, 32)
    step.slots = torch.full((tokens,), -1)
    step.run(Stub, table(50, 32))
    assert (step.keys == 7.0).all()
    assert (step.values == 7.0).all()


def test_shapes_that_do_not_go_together_are_refused():
    step, cos_sin = Step(3, 2, 1, 32), table(50, 32)
    step.v = step.v[:2]
    with pytest.raises(ValueError, match="don't go with"):
        step.run(Stub, cos_sin)
    with pytest.raises(ValueError, match="cos_sin"):
        Step(3, 2, 1, 32).run(Stub, table(50, 64))
    with pytest.raises(ValueError, match="norm weight"):
        Step(3, 2, 1, 32).run(Stub, cos_sin, q_norm_weight=torch.ones(31))
