"""Attention gives a query the same bits in a decode, in any chunk and beside anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention_args import AttentionArgs, BlockSparse
from kernels.interface import KernelSet
from tests.covering import covering
from tests.kernels.batches import Batch, make_batch
from tests.kernels.conftest import BUILDS, load

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 70},
    "narrow window": {"sliding_window": 3},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"alibi_slopes": torch.linspace(0.05, 0.6, 6)},
    "sparse": {"sparse": BlockSparse(16, 2, 5, 1)},
    "sinks": {"sinks": torch.tensor([-3.0, 0.0, 2.0, 9.0, 0.5, -0.5])},
    "all": {
        "sliding_window": 130,
        "soft_cap": 3.0,
        "alibi_slopes": torch.linspace(0.05, 0.6, 6),
        "sinks": torch.linspace(-2, 5, 6),
    },
}
CACHES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
#: Cache dtypes, and whether queries and weights may be rounded.
FORMATS = [*((dtype, False) for dtype in CACHES), (torch.bfloat16, True), (torch.int8, True)]


def cached(batch: Batch, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """The batch's arguments with the caches in `dtype`, of which int8 has a scale a row."""
    arguments = {**batch.arguments(), **options}
    for name in ("key", "value"):
        cache = arguments[f"{name}_cache"]
        if dtype == torch.int8:
            scales = cache.nan_to_num().abs().amax(-1) / 127
            arguments[f"{name}_scales"] = scales
            cache = (cache / scales[..., None]).nan_to_num().round()
        arguments[f"{name}_cache"] = cache.to(dtype)
    return arguments


def run(
    kernels: KernelSet, full: dict[str, Any], spans: list[tuple[int, int]], threads: int = 1
) -> list[Tensor]:
    """What each [begin, end) of the one sequence's queries gives, all of them in one call."""
    ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
    counts = torch.tensor([0, *(end - begin for begin, end in spans)])
    arguments = {
        **full,
        "q": torch.cat([full["q"][begin:end] for begin, end in spans]),
        "seq_lens": ends,
        "block_tables": full["block_tables"].expand(len(spans), -1).contiguous(),
        "query_start_loc": counts.cumsum(0).to(torch.int32),
    }
    initial_num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = kernels.paged_attention(AttentionArgs(**arguments))
    finally:
        torch.set_num_threads(initial_num_threads)
    return list(out.split(counts[1:].tolist()))


def check(kernels: KernelSet, full: dict[str, Any], length: int, spans: list[tuple[int, int]]):
    expected = run(kernels, full, [(0, length)])[0]
    for threads in (1, 2):
        for (begin, end), got in zip(spans, run(kernels, full, spans, threads)):
            assert torch.equal(got, expected[begin:end]), (begin, end, threads)


@pytest.mark.parametrize(("dtype", "rounds"), FORMATS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_decode_gives_what_a_chunk_gives(compiled, name, dtype, rounds):
    length = 421
    batch = make_batch([(length, length)], heads=6, kv_heads=2)
    full = cached(batch, dtype, {**OPTIONS[name], "round_inputs": rounds})
    decodes = [(start, start + 1) for start in (0, 1, 15, 16, 127, 128, 129, 255, 256, 300, 420)]
    check(compiled, full, length, [*decodes, (7, 300), (420, 421), (100, 102), (119, 400)])


@pytest.mark.parametrize(("dtype", "rounds"), FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}], ids=str)
@pytest.mark.parametrize("bad", [130, 131])
def test_a_value_that_is_no_number_shows_where_it_is_seen(compiled, dtype, rounds, options, bad):
    length = 300
    batch = make_batch([(length, length)], heads=6, kv_heads=2)
    full_copies = cached(batch, dtype, {**options, "round_inputs": rounds})
    expected = run(compiled, full_copies, [(0, length)])[0]
    spoilt = "value_scales" if dtype == torch.int8 else "value_cache"
    full_copies[spoilt] = full_copies[spoilt].clone()
    full_copies[spoilt][batch.block_tables[0, bad // 16], :, bad % 16] = float("nan")
    seen = range(bad, min(length, bad + options.get("sliding_window", length)))
    unseen = [index for index in range(length) if index not in seen]
    chunk = run(compiled, full_copies, [(0, length)])[0]
    decodes = torch.cat(run(compiled, full_copies, [(index, index + 1) for index in range(length)]))
    for got in (chunk, decodes):
        assert torch.equal(got[unseen], expected[unseen])
        assert not torch.isfinite(got[list(seen)]).any()


@covering(
    form=FORMATS, size=[4, 20, 33, 36, 40, 72, 80, 96, 128, 160, 200, 256],
    shape=[(3, 3, 16), (5, 1, 8), (9, 1, 32), (28, 4, 1)],
)  # fmt: skip
def test_odd_heads(compiled, form, size, shape):
    heads, kv_heads, block = shape
    dtype, rounds = form
    batch = make_batch([(150, 150)], heads=heads, kv_heads=kv_heads, size=size, block_size=block)
    check(
        compiled, cached(batch, dtype, {"round_inputs": rounds}), 150,
        [(149, 150), (128, 129), (60, 61), (2, 149), (148, 150)],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(compiled, dtype):
    batch = make_batch([(200, 200)], dtype=dtype, cache_dtype=dtype)
    check(compiled, batch.arguments(), 200, [(199, 200), (30, 31), (100, 140)])


@pytest.mark.parametrize("isa", BUILDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cut(isa, data):
    dtype, rounds = data.draw(st.sampled_from(FORMATS))
    options = {**OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)))], "round_inputs": rounds}
    length = data.draw(st.integers(2, 700))
    batch = make_batch(
        [(length, length)], heads=6, kv_heads=data.draw(st.sampled_from([1, 2, 3, 6])),
        size=data.draw(st.sampled_from([16, 24, 64, 80])),
        block_size=data.draw(st.sampled_from([4, 16, 48])), seed=length,
    )  # fmt: skip
    begins = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=6))
    lengths = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, length))
    spans = [(begin, min(length, begin + data.draw(lengths))) for begin in begins]
    check(load(isa), cached(batch, dtype, options), length, spans)
