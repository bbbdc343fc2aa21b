"""Attention over latents in Triton's interpreter, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.attention.args import AttentionArgs
from kernels.triton.attention import latent_attention
from tests.kernels import oracle
from tests.kernels.batches import Batch
from tests.kernels.batches import make_batch as any_batch
from tests.kernels.tolerance import assert_close

make_batch = partial(any_batch, kv_heads=1, dtype=torch.float16)


def arguments(batch: Batch) -> list:
    cache = batch.key_cache[:, 0].contiguous()
    lengths = (batch.seq_lens, batch.query_start_loc)
    return [batch.q, cache, batch.block_tables, *lengths, batch.scale]


def check(batch: Batch, latent: int, programs: int | None = None) -> None:
    values = batch.key_cache.clone()
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments() | {"value_cache": values}))
    got = latent_attention(*arguments(batch), latent, programs=programs)
    assert_close(got, expected[..., :latent], batch.q.dtype, 4.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deepseeks_latents(dtype):
    """576 and 512, in chunks, prompts and decodes, whose keys are split."""
    batch = make_batch([(1, 150), (0, 9), (3, 20), (1, 1)], heads=17, size=576, dtype=dtype)
    check(batch, 512)


MANY = [(1, 300), (2, 65), (1, 64), *[(1, 3)] * 3, (9, 9)]


@pytest.mark.parametrize(
    ("heads", "page", "programs", "lengths"),
    # More than a tile of heads is dear in the interpreter: few tokens.
    [(1, 4, 1, MANY), (5, 16, 7, MANY), (70, 64, 3, [(1, 130), (2, 65)])],
)
def test_small_latents_of_any_number_of_heads(heads, page, programs, lengths):
    check(make_batch(lengths, heads=heads, size=48, block_size=page), 32, programs)


@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(1, 1)]])
def test_small_batches(sequences):
    check(make_batch(sequences, heads=2, size=32, strided=True), 16)


def test_a_decoding_row_is_the_same_to_the_bit_in_every_batch():
    batch = make_batch([(1, 200), (1, 5), (1, 90)], heads=3, size=48)
    q, cache, tables, lens, _, scale = arguments(batch)
    together = latent_attention(*arguments(batch), 32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for row in (0, 2):
        one = slice(row, row + 1)
        for programs in (1, 3):
            alone = latent_attention(
                q[one], cache, tables[one].contiguous(), lens[one], starts, scale, 32,
                programs=programs,
            )  # fmt: skip
            assert torch.equal(alone[0], together[row])


def test_what_does_not_fit_is_refused():
    batch = make_batch([(1, 9)], heads=2, size=48)
    good = arguments(batch)

    def refused(words: str, latent: int = 32, **changes: torch.Tensor) -> None:
        names = ("q", "cache", "block_tables", "seq_lens", "query_start_loc", "scale")
        given = dict(zip(names, good, strict=True)) | changes
        with pytest.raises(ValueError, match=words):
            latent_attention(*given.values(), latent)

    refused("latent of 40", 40)
    refused("latent of 48", 48)
    refused("rotated part of 8", q=good[0][..., :40])
    refused("doesn't fit heads", cache=good[1][..., :32].contiguous())
    refused("dtype of q", cache=good[1].bfloat16())
    refused("q ", q=good[0].float(), cache=good[1].float())
    refused("block_tables", block_tables=good[2].long())
    refused("seq_lens", seq_lens=good[3].long())
    with pytest.raises(ValueError, match="out"):
        latent_attention(*good, 32, out=torch.empty(1))
