"""Paged attention against float64: ragged mixes of prefill, chunks and decode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kernels.attention_args import AttentionArgs, BlockSparse
from kernels.cpu.features import cpu_flags
from tests.covering import covering
from tests.kernels import oracle
from tests.kernels.batches import make_batch
from tests.kernels.tolerance import assert_close

MIX = [(1, 1), (7, 7), (1, 33), (15, 50), (1, 17), (16, 16), (0, 9), (33, 40), (2, 19)]
VARIATIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 9},
    {"sliding_window": 100},
    {"soft_cap": 5.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    {"distance_bias": torch.linspace(-2, 2, 4 * 12).view(4, 12)},
    {"distance_bias": torch.linspace(3, -3, 4 * 60).view(4, 60), "sliding_window": 20},
    {"sinks": torch.tensor([-3.0, 0.0, 2.0, 9.0])},
    {"sparse": BlockSparse(4, 1, 3, 1)},
    {"sparse": BlockSparse(5, 2, 50, 0), "sliding_window": 20},
    {
        "sliding_window": 20,
        "soft_cap": 3.0,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "sinks": torch.tensor([0.5, -0.5, 1.0, 0.0]),
    },
]


def ends_of_spans(spans: list[tuple[int, int, int]]) -> torch.Tensor:
    """`visible_ends` of the batch MIX in which tokens of (sequence, start, end) see each other."""
    ends = []
    for index, (queries, length) in enumerate(MIX):
        for position in range(length - queries, length):
            inside = [
                end for owner, start, end in spans if owner == index and start <= position < end
            ]
            ends.append(max([position + 1, *inside]))
    return torch.tensor(ends, dtype=torch.int32)


VARIATIONS += [
    {"visible_ends": ends_of_spans([(1, 2, 6), (3, 30, 40), (3, 45, 50), (5, 0, 16), (7, 9, 40)])},
    {"visible_ends": ends_of_spans([(3, 36, 50), (7, 10, 25), (7, 26, 31)]), "sliding_window": 20},
]


def check(kernels, batch, slack=4.0, **options):
    arguments = {**batch.arguments(), **options}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = oracle.paged_attention(AttentionArgs(**arguments))
    torch.set_num_threads(threads)
    assert_close(
        kernels.paged_attention(AttentionArgs(**arguments)), expected, batch.q.dtype, slack
    )


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)])
def test_head_sizes_and_groups(kernels, size, heads, kv_heads):
    check(kernels, make_batch(MIX, size=size, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("size", [8, 20, 72])
def test_head_sizes_that_fill_no_vector(kernels, size):
    check(kernels, make_batch(MIX, size=size))


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_block_sizes(kernels, threads, block_size):
    check(kernels, make_batch(MIX, block_size=block_size, seed=block_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(kernels, dtype, cache_dtype):
    check(kernels, make_batch(MIX, dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize("options", VARIATIONS, ids="+".join)
def test_variations(kernels, threads, options):
    check(kernels, make_batch(MIX), **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 200}])
def test_long_sequences(kernels, threads, options):
    lengths = [(1, 700), (1, 256), (1, 257), (150, 400), (1, 513), (40, 300)]
    check(kernels, make_batch(lengths, heads=2, kv_heads=1, size=32), **options)


def int8_cache(batch):
    """The batch with caches that int8 holds, and the arguments that have these in int8."""
    arguments = {}
    for name in ("key", "value"):
        cache = getattr(batch, f"{name}_cache").nan_to_num()
        scales = cache.abs().amax(-1) / 127
        full = (cache / scales[..., None]).nan_to_num().round().to(torch.int8)
        setattr(batch, f"{name}_cache", full * scales[..., None])
        arguments |= {f"{name}_cache": full, f"{name}_scales": scales}
    return {**batch.arguments(), **arguments}


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 30, "soft_cap": 4.0}])
@pytest.mark.parametrize("size", [32, 80])
def test_int8_cache(kernels, threads, size, options, rounds):
    batch = make_batch([*MIX, (1, 300), (40, 280)], size=size, heads=6)
    arguments = int8_cache(batch)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), **options))
    got = kernels.paged_attention(AttentionArgs(**arguments, **options, round_inputs=rounds))
    if rounds:
        assert_near(got, expected)
    else:
        assert_close(got, expected, torch.float32, 4.0)


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def fp8_cache(batch, dtype):
    """The batch with caches that fp8 holds, and the arguments that have these in fp8."""
    arguments = {}
    for name in ("key", "value"):
        cache = getattr(batch, f"{name}_cache")
        scales = torch.linspace(0.01, 3.0, cache.shape[1])
        narrow = (cache / scales[:, None, None]).to(dtype)
        setattr(batch, f"{name}_cache", narrow.float() * scales[:, None, None])
        arguments |= {f"{name}_cache": narrow, f"{name}_scales": scales}
    return {**batch.arguments(), **arguments}


@covering(
    indirect=["threads"], threads=[1, 2], dtype=FP8, rounds=[False, True], size=[32, 80, 20],
    options=[{}, {"sliding_window": 30, "soft_cap": 4.0}],
)  # fmt: skip
def test_fp8_caches_with_a_scale_for_each_head(kernels, threads, dtype, size, options, rounds):
    batch = make_batch([*MIX, (1, 300), (40, 280)], size=size, heads=6)
    arguments = fp8_cache(batch, dtype)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), **options))
    got = kernels.paged_attention(AttentionArgs(**arguments, **options, round_inputs=rounds))
    if rounds:
        assert_near(got, expected)
    else:
        assert_close(got, expected, torch.float32, 4.0)


@pytest.mark.parametrize("dtype", FP8)
def test_each_code_of_fp8_is_read_as_its_value(kernels, dtype):
    """One key a sequence, so that the result is its value; NaN and infinity included."""
    codes = torch.arange(256, dtype=torch.uint8)
    cache = codes.view(dtype).reshape(16, 1, 1, 16).contiguous()
    got = kernels.paged_attention(
        AttentionArgs(
            torch.zeros(16, 1, 16),
            torch.zeros_like(cache.float()).to(dtype),
            cache,
            torch.arange(16, dtype=torch.int32)[:, None],
            torch.ones(16, dtype=torch.int32),
            torch.arange(17, dtype=torch.int32),
            1.0,
        )
    )
    expected = codes.view(dtype).float().reshape(16, 1, 16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_an_fp8_cache_takes_no_other_scales(compiled, shape):
    batch = make_batch(MIX)
    arguments = fp8_cache(batch, FP8[0])
    with pytest.raises(ValueError, match="key_scales"):
        compiled.paged_attention(AttentionArgs(**{**arguments, "key_scales": torch.ones(shape)}))


def assert_near(got, expected):
    """As precise as queries and weights in bfloat16, which has 8 bits."""
    assert_close(got, expected, torch.bfloat16, 4.0)
    assert float((got - expected).norm() / expected.norm()) < 1 / 256


def check_rounded(kernels, batch, **options):
    arguments = {**batch.arguments(), **options, "round_inputs": True}
    expected = oracle.paged_attention(AttentionArgs(**arguments))
    assert_near(kernels.paged_attention(AttentionArgs(**arguments)), expected)


@pytest.mark.parametrize("options", VARIATIONS, ids="+".join)
def test_rounded_variations(kernels, options):
    check_rounded(kernels, make_batch(MIX, cache_dtype=torch.bfloat16), **options)


@pytest.mark.parametrize("block_size", [1, 2, 16, 48])
@pytest.mark.parametrize("size", [20, 33, 64, 128, 576])
def test_rounded_shapes(kernels, size, block_size):
    lengths = [*MIX, (1, 300), (40, 280), (130, 131)]
    batch = make_batch(
        lengths, heads=8, kv_heads=1, size=size, block_size=block_size, cache_dtype=torch.bfloat16
    )
    check_rounded(kernels, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_only_caches_that_lose_nothing_are_multiplied_in_bfloat16(compiled, dtype):
    batch = make_batch(MIX)
    arguments = int8_cache(batch)
    if dtype != torch.int8:
        arguments = batch.arguments()
        for name in ("key_cache", "value_cache"):
            arguments[name] = arguments[name].to(dtype)
    results = [
        compiled.paged_attention(AttentionArgs(**arguments, round_inputs=rounds))
        for rounds in (False, True)
    ]
    rounds = "-avx512-" in compiled.version and dtype in (torch.bfloat16, torch.int8)
    assert torch.equal(*results) != (rounds and "avx512_bf16" in cpu_flags())


def test_an_int8_cache_needs_its_scales(compiled):
    batch = make_batch(MIX)
    batch.key_cache, batch.value_cache = (torch.zeros_like(batch.key_cache).char(),) * 2
    with pytest.raises(ValueError, match="scales"):
        compiled.paged_attention(AttentionArgs(**batch.arguments()))


def test_queries_may_be_strided(kernels):
    batch = make_batch(MIX, strided=True)
    assert not batch.q.is_contiguous()
    check(kernels, batch)


@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(1, 1)], [(1, 300)]])
def test_small_batches(kernels, threads, sequences):
    check(kernels, make_batch(sequences, heads=1, kv_heads=1))


def test_out_is_used(kernels):
    batch = make_batch(MIX)
    out = torch.empty(batch.q.shape)
    assert (
        kernels.paged_attention(AttentionArgs(**batch.arguments(), out=out)).data_ptr()
        == out.data_ptr()
    )
    torch.testing.assert_close(out, kernels.paged_attention(AttentionArgs(**batch.arguments())))


def test_blocks_that_left_the_window_are_not_read(kernels):
    batch = make_batch([(1, 100), (5, 90), (30, 200)])
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), sliding_window=16))
    for row, low in enumerate((84, 69, 154)):
        gone = batch.block_tables[row, : low // 16].long()
        batch.key_cache[gone] = float("nan")
        batch.value_cache[gone] = float("inf")
    got = kernels.paged_attention(AttentionArgs(**batch.arguments(), sliding_window=16))
    assert_close(got, expected, torch.float32, 4.0)


def test_a_decoded_row_does_not_depend_on_its_batch(compiled, threads):
    batch = make_batch([(1, 700), (1, 90), (1, 300), (20, 60)], size=128)
    full = compiled.paged_attention(AttentionArgs(**batch.arguments()))
    for row in range(3):
        isolated_arguments = batch.arguments()
        isolated_arguments["q"] = batch.q[row : row + 1]
        isolated_arguments["block_tables"] = batch.block_tables[row : row + 1]
        isolated_arguments["seq_lens"] = batch.seq_lens[row : row + 1]
        isolated_arguments["query_start_loc"] = torch.tensor([0, 1], dtype=torch.int32)
        assert torch.equal(
            compiled.paged_attention(AttentionArgs(**isolated_arguments))[0], full[row]
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 70}, {"soft_cap": 3.0, "alibi_slopes": torch.linspace(0.1, 0.6, 6)}],
    ids=lambda options: "+".join(options),
)
def test_a_prompt_gives_the_same_however_it_is_cut(compiled, options):
    full_batch = make_batch([(300, 300)], heads=6, kv_heads=2)
    expected = compiled.paged_attention(AttentionArgs(**full_batch.arguments(), **options))
    for cut in (2, 130, 255):
        parts = []
        for begin, end in ((0, cut), (cut, 300)):
            part = full_batch.arguments()
            part["q"] = full_batch.q[begin:end]
            part["seq_lens"] = torch.tensor([end], dtype=torch.int32)
            part["query_start_loc"] = torch.tensor([0, end - begin], dtype=torch.int32)
            parts.append(compiled.paged_attention(AttentionArgs(**part, **options)))
        assert torch.equal(torch.cat(parts), expected)


def test_calls_from_two_threads_at_once(compiled):
    batches = [make_batch(MIX, seed=1), make_batch([(1, 300), (60, 90)], seed=2)]
    expected = [compiled.paged_attention(AttentionArgs(**batch.arguments())) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            calls = [
                pool.submit(compiled.paged_attention, AttentionArgs(**b.arguments()))
                for b in batches
            ]
            for call, right in zip(calls, expected):
                assert torch.equal(call.result(), right)


def test_what_contradicts_itself_is_refused(compiled):
    def refused(words, **changes):
        with pytest.raises(ValueError, match=words):
            compiled.paged_attention(AttentionArgs(**{**make_batch(MIX).arguments(), **changes}))

    batch = make_batch(MIX)
    tables = batch.block_tables.clone()
    tables[3, 2] = 10_000
    refused("block outside", block_tables=tables)
    tables[3, 2] = -1
    refused("block outside", block_tables=tables)
    refused("contradict", block_tables=batch.block_tables[:, :2].contiguous())
    refused("contradict", seq_lens=batch.seq_lens - 5)
    refused("contradict", query_start_loc=batch.query_start_loc + 1)
    refused("contradict", q=batch.q[:-1])
    refused("seq_lens", seq_lens=batch.seq_lens.long())
    refused("sinks", sinks=torch.zeros(3))
    refused("share", q=batch.q[:, :3].contiguous())
    refused("caches", value_cache=batch.value_cache[:-1])
