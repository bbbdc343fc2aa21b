"""Shapes that fill nothing, and values that are no numbers: what they spoil is theirs alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from kernels.attention_args import AttentionArgs
from kernels.interface import KernelSet
from kernels.layers import ACTIVATIONS, ActivationSpec, ExpertLayers
from tests.covering import covering
from tests.kernels import oracle
from tests.kernels.batches import make_batch
from tests.kernels.test_attention import check
from tests.kernels.test_linear import product
from tests.kernels.test_rope import Step, table
from tests.kernels.test_sampling import settings
from tests.kernels.tolerance import assert_close

EDGES = [(1, 1), (1, 127), (1, 128), (1, 129), (1, 255), (1, 256), (1, 257), (3, 130), (130, 131)]
FORMATS = [
    (torch.float32, None), (torch.bfloat16, None), (torch.float16, None),
    (torch.float32, "int8"), (torch.float32, "int4"),
]  # fmt: skip


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"),
    [
        (5, 1, 40, 7), (7, 7, 112, 128), (6, 2, 192, 1), (15, 3, 24, 64), (7, 1, 80, 16),
        (12, 4, 256, 5),
    ],
)  # fmt: skip
def test_edges_of_chunks_tiles_and_blocks(compiled, heads, kv_heads, size, block_size):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block_size": block_size}
    check(compiled, make_batch(EDGES, seed=size, **shape))


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_any_number_of_rows(compiled, dtype, quantization):
    """Beside float64: the rows of every number from 1 to 130 are those of the largest."""
    torch.manual_seed(13)
    weight, x = torch.randn(37, 213).to(dtype), torch.randn(130, 213)
    layer = compiled.PackedLinear(weight, quantization=quantization)
    full_layer, expected = layer(x), product(x, weight)
    off = {None: 1e-5, "int8": 0.012, "int4": 0.11}[quantization]
    assert float((full_layer - expected).norm() / expected.norm()) < off
    for rows in range(1, 130):
        assert torch.equal(layer(x[:rows]), full_layer[:rows])


def test_the_last_of_many_positions(compiled):
    step, cos_sin = Step(3, 2, 1, 16), table(1 << 17, 16)
    step.positions = torch.tensor([(1 << 17) - 1, 0, 99_999])
    expected = oracle.rope(step.q, step.positions, cos_sin, True)
    step.run(compiled, cos_sin)
    assert_close(step.q, expected, torch.float32)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_groups_of_zeros_beside_outliers(compiled, quantization):
    weight = torch.zeros(20, 96)
    weight[3, 40], weight[7, 64:] = 1e4, 1e-3
    x = torch.randint(-127, 128, (5, 96)).float()
    x[:, ::32] = 127  # nothing is lost by rounding x
    x[2] = 0
    got = compiled.PackedLinear(weight, quantization=quantization, group_size=32)(x)
    expected = product(x, weight).float()
    assert not got[2].any()
    torch.testing.assert_close(got[:, 3], expected[:, 3], rtol=0.002, atol=1.0)
    torch.testing.assert_close(got[:, 7], expected[:, 7], rtol=0.01, atol=1e-4)
    assert not got[:, [c for c in range(20) if c not in (3, 7)]].any()


# -- values that are no numbers -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_a_row_that_is_no_numbers_shows_and_spoils_no_other(compiled, dtype, quantization, bad):
    torch.manual_seed(14)
    layer = compiled.PackedLinear(torch.randn(70, 300).to(dtype), quantization=quantization)
    x = torch.randn(20, 300)
    clean = layer(x)
    x[7, 290] = bad
    got = layer(x)
    assert not torch.isfinite(got[7]).any()
    assert torch.equal(layer(x[7:8]).isfinite(), got[7:8].isfinite())
    other_rows = [row for row in range(20) if row != 7]
    assert torch.equal(got[other_rows], clean[other_rows])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_no_numbers_show(compiled, quantization, bad):
    weight = torch.randn(70, 300)
    weight[3, 5], weight[69, 299] = bad, bad
    got = compiled.PackedLinear(weight, quantization=quantization)(torch.randn(2, 300))
    assert not torch.isfinite(got[:, [3, 69]]).any()
    assert torch.isfinite(got).sum() == 2 * 68


def test_weights_too_large_for_their_scale_show(compiled):
    weight = torch.randn(40, 64)
    weight[9, 9] = 1e7  # / 8 is more than float16 holds
    got = compiled.PackedLinear(weight, quantization="int4")(torch.randn(2, 64))
    assert not torch.isfinite(got[:, 9]).any()
    assert torch.isfinite(got).sum() == 2 * 39


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_and_values_that_are_no_numbers_stay_in_their_sequence(
    compiled, cache_dtype, rounds, bad
):
    """From the write to the cache to the result; a sequence's earlier tokens may notice."""
    heads, size, block = 2, 40, 8
    tokens = torch.randn(12, 3 * heads, size)
    tokens[5, heads, 3], tokens[5, 2 * heads, 3] = bad, bad
    q, k, v = (part.contiguous() for part in tokens.split(heads, 1))
    caches = [torch.zeros((4, heads, block, size), dtype=cache_dtype) for _ in range(2)]
    scales = [torch.zeros((4, heads, block)) for _ in range(2)]
    of_scales = (
        {"key_scales": scales[0], "value_scales": scales[1]} if cache_dtype == torch.int8 else {}
    )
    slots = torch.tensor([0, 1, 2, 3, 8, 9, 16, 17, 18, 24, 25, 26])
    compiled.rope_and_cache(q, k, v, torch.zeros(12).long(), None, *caches, slots, **of_scales)
    got = compiled.paged_attention(
        AttentionArgs(
            q,
            *caches,
            block_tables=torch.tensor([[0], [1], [2], [3]], dtype=torch.int32),
            seq_lens=torch.tensor([4, 2, 3, 3], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 4, 6, 9, 12], dtype=torch.int32),
            scale=size**-0.5,
            round_inputs=rounds,
            **of_scales,
        ),
    )
    assert not torch.isfinite(got[5, 0]).all()
    other_rows = [row for row in range(12) if row not in (4, 5)]
    assert torch.isfinite(got[other_rows]).all()


@dataclass
class Rows:
    """Decoding sequences and prompts side by side: who sees which token of the KV, by row."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    tables: torch.Tensor
    lengths: list[int]
    queries: list[int]
    options: dict[str, Any]

    def run(self, kernels: KernelSet) -> torch.Tensor:
        starts = [0, *accumulate(self.queries)]
        return kernels.paged_attention(
            AttentionArgs(
                self.q,
                *self.caches,
                block_tables=self.tables,
                seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                scale=self.q.shape[2] ** -0.5,
                **self.options,
            ),
        )

    def that_see(self, sequence: int, token: int, window: int = 0) -> list[int]:
        first, count = sum(self.queries[:sequence]), self.queries[sequence]
        lengths = {first + i: self.lengths[sequence] - count + i for i in range(count)}
        return [
            row for row, p in lengths.items() if p >= token and (not window or p - window < token)
        ]


def make_rows(cache_dtype: torch.dtype, size: int = 40, block: int = 8, **options: Any) -> Rows:
    torch.manual_seed(size)
    lengths, queries = [300, 40, 33, 5], [1, 40, 9, 1]
    widest = -(-max(lengths) // block)
    tables = torch.arange(4 * widest, dtype=torch.int32).view(4, widest)
    shape = (4 * widest, 2, block, size)
    if cache_dtype == torch.int8:
        caches = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2)]
        scales = [torch.rand(shape[:3]) * 0.02 for _ in range(2)]
        options |= {"key_scales": scales[0], "value_scales": scales[1]}
    else:
        caches = [torch.randn(shape).to(cache_dtype) for _ in range(2)]
    return Rows(torch.randn(sum(queries), 6, size), caches, tables, lengths, queries, options)


@covering(
    window=[0, 12], which=["key", "value"],
    cache_dtype=[torch.float32, torch.bfloat16, torch.int8],
    index=[(0, 3), (0, 295), (1, 17), (2, 30), (3, 0)],
)  # fmt: skip
def test_a_nan_in_the_cache_reaches_the_rows_that_see_it_and_no_other(
    compiled, cache_dtype, which, index, window
):
    sequence, token = index
    rows = make_rows(cache_dtype, sliding_window=window)
    clean = rows.run(compiled)
    slot = int(rows.tables[sequence, token // 8]), 1, token % 8
    if cache_dtype == torch.int8:
        rows.options[f"{which}_scales"][slot] = math.nan
    else:
        rows.caches[which == "value"][(*slot, 5)] = math.nan
    got = rows.run(compiled)
    seen = rows.that_see(sequence, token, window)
    other_rows = [row for row in range(len(clean)) if row not in seen]
    assert torch.isfinite(clean).all()
    assert got[seen][:, 3:].isnan().flatten(1).any(1).all()  # query heads of the second KV head
    assert torch.equal(got[seen][:, :3], clean[seen][:, :3])
    torch.testing.assert_close(got[other_rows], clean[other_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}, {"sinks": torch.zeros(6)}], ids=str)
def test_a_query_that_is_no_number_shows_in_its_row_alone(kernels, options):
    rows = make_rows(torch.float32, **options)
    clean = rows.run(kernels)
    for row in (0, 11, 45, 50):
        rows.q[row, 4, 39] = math.nan
    got = rows.run(kernels)
    bad = [0, 11, 45, 50]
    assert got[bad, 4].isnan().all()
    clean[bad, 4] = math.nan
    torch.testing.assert_close(got, clean, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_show_nan(compiled, name, half):
    weight = torch.eye(48).repeat(2, 1)
    weight[48 * half + 5, 0] = math.nan
    pack = compiled.PackedLinear
    experts = ExpertLayers(
        router=pack(torch.zeros(1, 48)),
        gate_up=[pack(weight)],
        down=[pack(torch.eye(48))],
        top_k=1,
        softmax_first=True,
        renormalize=False,
        activation=ActivationSpec(name, limit=7.0, alpha=1.7),
    )
    got = compiled.compile_experts(experts)(torch.randn(4, 48))
    assert got.isnan().any(1).all()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5}], ids=str)
def test_extreme_temperatures(kernels, options):
    for temperature in (1e-45, 1e-38, 1e-8, 1e30):
        logits = torch.randn(6, 3000)
        tokens = kernels.sample(logits, **settings(6, temperature=temperature, **options))
        assert (tokens >= 0).all()
        if temperature < 1:
            assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5}], ids=str)
def test_logits_as_far_apart_as_they_can_be(kernels, options):
    logits = torch.full((3, 1000), -3e38)
    logits[:, 5] = 3e38
    logits[2] = -math.inf
    logits[2, 5] = -3e38
    assert kernels.sample(logits, **settings(3, **options)).tolist() == [5, 5, 5]
