"""Paged attention in Triton's interpreter against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention_args import AttentionArgs
from kernels.triton.attention import merge_attention_states, paged_attention
from kernels.triton.attention import tile_sizes as tiles
from kernels.triton.launch import Target, watch
from tests.kernels import oracle
from tests.kernels.batches import Batch, make_batch
from tests.kernels.tolerance import assert_close
from tools.triton.cases import paged

DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (0, 9), (2, 40)]
#: Over 16 tokens a sequence: tiles of prompts, one that is full and some that have a bit more.
PROMPTS = [(1, 17), (49, 56), (0, 9), (16, 16)]
#: Fewer: they go as decodes do.
CHUNKS = [(7, 7), (0, 9), (1, 17), (17, 33)]


def check(batch: Batch, programs: int | None = None, **options) -> None:
    arguments = batch.arguments()
    args = AttentionArgs(**arguments, **options)
    expected = oracle.paged_attention(args)
    got = paged_attention(args, programs=programs)
    assert_close(got, expected, batch.q.dtype, 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS, PROMPTS], ids=["decode", "chunk", "prompt"])
def test_ragged_batches(sequences, dtype):
    check(make_batch(sequences, dtype=dtype, size=32, seed=len(sequences)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (20, 1)])
def test_groups_of_heads(heads, kv_heads):
    check(make_batch([(1, 17), (3, 20)], heads=heads, kv_heads=kv_heads, size=32))


@pytest.mark.parametrize("size", [40, 64, 80, 256])
def test_head_sizes(size):
    check(make_batch([(1, 17), (5, 20)], size=size, heads=2, kv_heads=1))


@pytest.mark.parametrize("block_size", [4, 32, 64, 128])
def test_block_sizes(block_size):
    sequences = [(1, 150), (9, 130), (1, block_size), (3, block_size + 1)]
    check(make_batch(sequences, block_size=block_size, size=32, heads=2, seed=block_size))


@pytest.mark.parametrize("sequences", [[(1, 90), (2, 33), (1, 7)], PROMPTS], ids=["few", "many"])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 33},
        {"sliding_window": 1000},
        {"soft_cap": 5.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"sinks": torch.tensor([-3.0, 0.0, 2.0, 9.0])},
        {
            "sliding_window": 20,
            "soft_cap": 3.0,
            "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "sinks": torch.tensor([0.5, -0.5, 1.0, 0.0]),
        },
    ],
    ids=lambda options: "+".join(options),
)
def test_variations(sequences, options):
    check(make_batch(sequences, size=32), **options)


@pytest.mark.parametrize("sequences", [[(3, 20), (1, 9)], [(40, 50), (1, 20), (25, 25)]])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "soft_cap": 3.0}])
def test_tokens_of_a_span_see_one_another(sequences, options):
    """The last ones of the first sequence, the first ones of the last; also as few as decodes."""
    batch = make_batch(sequences, size=32)
    ends = torch.cat([torch.arange(length - count, length) + 1 for count, length in sequences])
    ends = ends.int()
    count, length = sequences[0]
    ends[count - 2 : count] = length
    count, _ = sequences[-1]
    ends[-count:] = ends[-count:].clamp(min=min(int(ends[-1]), 18))
    check(batch, visible_ends=ends, **options)
    check(batch, programs=3, visible_ends=ends, **options)


def test_spans_have_no_slopes():
    batch = make_batch([(2, 2)], size=32)
    args = AttentionArgs(
        **batch.arguments(),
        visible_ends=torch.tensor([2, 2], dtype=torch.int32),
        alibi_slopes=torch.ones(4),
    )
    with pytest.raises(ValueError, match="no bidirectional attention"):
        paged_attention(args)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 40, "sinks": torch.tensor([1.0, -1.0, 0.0, 5.0])}]
)
def test_splits_of_the_keys(splits, options):
    """More splits than some sequences have tiles: those find nothing to do."""
    check(make_batch([(1, 200), (1, 1), (3, 70)], size=32), programs=splits, **options)


def test_work_is_shared_out_whatever_the_lengths():
    """One long sequence among short and empty ones, by more programs than there are sequences."""
    lengths = [(1, 3), (0, 5), (1, 333), (1, 1), *[(1, 7)] * 6, (0, 0), (2, 66)]
    batch = make_batch(lengths, size=16, heads=2, kv_heads=1)
    for programs in (3, 14):
        check(batch, programs=programs)


@pytest.mark.parametrize("sequences", [PROMPTS, [(33, 150), (20, 20)]], ids=["many", "long"])
@pytest.mark.parametrize(
    ("page", "dtype", "sinks"),
    [(8, torch.bfloat16, None), (64, torch.float32, torch.tensor([-3.0, 0.0, 2.0, 9.0]))],
)
def test_keys_ahead_of_values_change_no_bit(sequences, page, dtype, sinks, monkeypatch):
    """As prompts go on Hopper."""
    batch = make_batch(sequences, size=40, block_size=page, dtype=dtype)
    args = AttentionArgs(**batch.arguments(), sinks=sinks)
    tile = tiles.INTERPRETED["prefill"]
    assert tile.ahead
    got = paged_attention(args, programs=1)
    assert_close(got, oracle.paged_attention(args), dtype, 4.0)
    monkeypatch.setitem(tiles.INTERPRETED, "prefill", replace(tile, ahead=0))
    assert torch.equal(paged_attention(args, programs=1), got)


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({}, True), ({"cache": torch.float8_e4m3fn}, False), ({"window": True}, False),
        ({"features": True}, False), ({"invariant": True}, False), ({"size": 256}, True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_which_prompts_go_ahead(changes, goes, capability):
    """Those of Hopper, where registers are left for it."""
    launches = []
    with watch(lambda *launch: launches.append(launch), Target(capability, 132)):
        paged(1, 8192, **changes)
    (options,) = [options for _, _, _, options in launches]
    assert options["AHEAD"] == (goes and capability == 90)


@pytest.mark.parametrize("queries", [2, 9, 16])
def test_a_few_tokens_a_sequence_are_verified_together(queries):
    """As speculation has them: a tile holds all of a sequence's, and drafts see one another."""
    check(make_batch([(queries, 70), (queries, queries), (1, 9)], size=16, heads=4, kv_heads=2))


@pytest.mark.parametrize("sequences", [DECODES, PROMPTS], ids=["decode", "prompt"])
def test_a_scale_of_nothing_weighs_all_keys_alike(sequences):
    """As of a cache whose keys were all 0 when its scale was found."""
    batch = make_batch(sequences, size=32)
    args = AttentionArgs(**{**batch.arguments(), "scale": 0.0})
    assert_close(paged_attention(args), oracle.paged_attention(args), torch.float32, 4.0)


def test_long_contexts_are_split_unasked():
    check(make_batch([(1, 600)], size=32, heads=2, kv_heads=1))


EIGHT_BITS = [
    (dtype, scaling)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    for scaling in ("none", "tensor", "head", "token")
    if (dtype, scaling) != (torch.int8, "none")
]


def in_eight_bits(batch, dtype, scaling):
    """Round the batch's caches; (what they stand for, their scales)."""
    scales, baseline = [], {}
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        unit = 1 / 20 if dtype == torch.int8 else 1
        full_tensor = (cache.nan_to_num() / unit).to(dtype)
        scale = {
            "none": torch.ones(1), "tensor": (torch.rand(1) + 0.5) * unit,
            "head": (torch.rand(cache.shape[1]) + 0.5) * unit,
            "token": (torch.rand(cache.shape[:3]) + 0.5) * unit,
        }[scaling]  # fmt: skip
        shaped = scale
        if scaling != "none":
            shaped = scale[..., None] if scaling == "token" else scale.view(-1, 1, 1)
        baseline[name] = full_tensor.double() * shaped.double()
        setattr(batch, name, full_tensor)
        scales.append(scale)
    value = {} if scaling == "none" else dict(zip(("key_scales", "value_scales"), scales))
    return baseline, value


@pytest.mark.parametrize(("dtype", "scaling"), EIGHT_BITS)
def test_eight_bit_caches(dtype, scaling):
    batch = make_batch([(1, 37), (3, 40), (1, 70)], size=32)
    baseline, scales = in_eight_bits(batch, dtype, scaling)
    expected = oracle.paged_attention(AttentionArgs(**{**batch.arguments(), **baseline}))
    got = paged_attention(AttentionArgs(**batch.arguments(), **scales))
    assert_close(got, expected, torch.float32, 8.0)


@pytest.mark.parametrize("size", [16, 33, 40, 256])
@pytest.mark.parametrize(("dtype", "scaling"), [EIGHT_BITS[1], EIGHT_BITS[4], EIGHT_BITS[-1]])
def test_heads_of_every_size_meet_caches_of_eight_bits(dtype, scaling, size):
    """Of an even size they are read by pairs of bytes in decodes, and by single ones in prompts."""
    for sequences in ([(1, 37), (0, 9), (3, 70)], [(17, 40)]):
        batch = make_batch(sequences, size=size, heads=2, kv_heads=1)
        baseline, scales = in_eight_bits(batch, dtype, scaling)
        expected = oracle.paged_attention(AttentionArgs(**{**batch.arguments(), **baseline}))
        got = paged_attention(AttentionArgs(**batch.arguments(), **scales))
        assert_close(got, expected, torch.float32, 8.0)


@pytest.mark.parametrize(
    ("dtype", "scaling"),
    [(torch.float8_e4m3fn, "head"), (torch.float8_e5m2, "none"), (torch.int8, "token")],
)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0}], ids=["plain", "capped"])
def test_bfloat16_queries_of_every_size_meet_caches_of_eight_bits(dtype, scaling, options):
    """With fp8 they are multiplied in float16, in which they wouldn't all fit as they are."""
    batch = make_batch([(1, 37), (9, 40), (1, 70)], size=32, dtype=torch.bfloat16)
    sizes = torch.tensor([1e-38, 1e-12, 1.0, 1e3, 1e6, 0.0, 1.0, 3e-5, 1e9, 0.1, 2.0])
    batch.q.mul_(sizes[:, None, None])
    baseline, scales = in_eight_bits(batch, dtype, scaling)
    expected = oracle.paged_attention(AttentionArgs(**{**batch.arguments(), **baseline}, **options))
    got = paged_attention(AttentionArgs(**batch.arguments(), **scales, **options))
    assert got.isfinite().all()
    assert_close(got, expected, torch.bfloat16, 4.0)


def test_an_int8_cache_needs_its_scales():
    batch = make_batch(DECODES, size=32)
    batch.key_cache, batch.value_cache = (torch.zeros_like(batch.key_cache).char(),) * 2
    with pytest.raises(ValueError, match="scales"):
        paged_attention(AttentionArgs(**batch.arguments()))


@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(1, 1)]])
def test_small_batches(sequences):
    check(make_batch(sequences, heads=1, kv_heads=1, size=32))


def test_queries_may_be_strided():
    batch = make_batch(PROMPTS, strided=True, size=32)
    assert not batch.q.is_contiguous()
    check(batch)


def test_out_is_used():
    batch = make_batch(DECODES, size=32)
    out = torch.empty(batch.q.shape)
    assert paged_attention(AttentionArgs(**batch.arguments(), out=out)) is out


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70, "sinks": torch.rand(2)}])
def test_a_decoding_row_is_the_same_to_the_bit_in_every_batch(options):
    """Where keys are split, and in which order splits are added, is the sequence's own affair."""
    batch = make_batch([(1, 330), (1, 5), (2, 129), (1, 64)], size=32, heads=2, kv_heads=1)
    together = paged_attention(AttentionArgs(**batch.arguments(), **options))
    for row in (0, 2):
        begin, end = batch.query_start_loc[row : row + 2].tolist()
        length = int(batch.seq_lens[row])
        isolated_arguments = batch.arguments() | {
            "q": batch.q[begin:end], "seq_lens": batch.seq_lens[row : row + 1],
            "block_tables": batch.block_tables[row : row + 1, : -(-length // 16)].contiguous(),
            "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
        }  # fmt: skip
        for programs in (1, 3):
            got = paged_attention(AttentionArgs(**isolated_arguments, **options), programs=programs)
            assert torch.equal(got, together[begin:end])


@pytest.mark.parametrize("length", [50, 150])
def test_a_sink_of_minus_infinity_is_none(length):
    sinks = torch.tensor([float("-inf"), 1.0, float("-inf"), 0.0])
    for queries in (1, 20):
        # With the window some rows see nothing of the first keys that their tile walks over.
        check(make_batch([(queries, length)], size=32), sinks=sinks, sliding_window=9)


@pytest.mark.parametrize("splits", [1, 3])
def test_blocks_that_left_the_window_are_not_read(splits):
    batch = make_batch([(1, 100), (5, 90), (17, 200)], size=32)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), sliding_window=16))
    for row, low in enumerate((84, 69, 167)):
        gone = batch.block_tables[row, : low // 16].long()
        batch.key_cache[gone] = float("nan")
        batch.value_cache[gone] = float("inf")
        batch.block_tables[row, : low // 16] = 1 << 30
    got = paged_attention(AttentionArgs(**batch.arguments(), sliding_window=16), programs=splits)
    assert_close(got, expected, torch.float32, 4.0)


def test_scores_far_apart_stay_finite():
    batch = make_batch([(1, 40), (20, 50)], size=32)
    batch.q *= 1e3
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments()))
    got = paged_attention(AttentionArgs(**batch.arguments()))
    assert_close(got, expected, torch.float32, 1e4)  # scores of thousands, rounded to float32


@pytest.mark.parametrize("splits", [1, 2])
def test_states_of_two_halves_merge_into_the_whole(splits):
    full_batch = make_batch([(1, 48), (1, 100), (1, 20)], size=40)
    expected = oracle.paged_attention(AttentionArgs(**full_batch.arguments()))
    parts = []
    for low, high in ((0, 2), (2, 99)):
        part = full_batch.arguments()
        length = full_batch.seq_lens.clamp(max=high * 16) - low * 16
        part["block_tables"] = full_batch.block_tables[:, low:high].contiguous()
        part["seq_lens"] = length.clamp(min=0)
        # A sequence without keys in this half: its query sees nothing.
        lse = torch.full(full_batch.q.shape[:2], float("nan"))
        parts += [paged_attention(AttentionArgs(**part), lse=lse, programs=splits), lse]
    merged, lse = merge_attention_states(*parts)
    assert_close(merged, expected, torch.float32, 4.0)
    assert parts[3][2].tolist() == [float("-inf")] * 4
    full = torch.empty_like(lse)
    paged_attention(AttentionArgs(**full_batch.arguments()), lse=full)
    torch.testing.assert_close(lse, full, rtol=1e-5, atol=1e-5)


def test_what_contradicts_itself_is_refused():
    batch = make_batch(DECODES, size=32)

    def refused(words, **changes):
        with pytest.raises(ValueError, match=words):
            paged_attention(AttentionArgs(**{**batch.arguments(), **changes}))

    refused("seq_lens", seq_lens=batch.seq_lens.long())
    refused("query_start_loc", query_start_loc=batch.query_start_loc[:-1])
    refused("sinks", sinks=torch.zeros(3))
    refused("share", q=batch.q[:, :3].contiguous())
    refused("caches", value_cache=batch.value_cache[:-1])
    refused("q ", q=batch.q.double())
    refused("block_tables", block_tables=batch.block_tables.long())
    refused("out", out=torch.empty(1))
    refused("scales", key_scales=torch.ones(1))
    with pytest.raises(ValueError, match="lse"):
        paged_attention(AttentionArgs(**batch.arguments()), lse=torch.empty(3))
