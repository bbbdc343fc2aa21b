"""Attention over latents in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.triton.attention import latent_attention
from kernels.triton.batch_invariant import InvariantHeadLinears, InvariantLinear
from kernels.triton.launch import Target, watch
from kernels.triton.linear import BatchedHeadLinears, TorchLinear
from kernels.triton.rope import rope_and_cache_latents
from tests.kernels import oracle
from tests.kernels.batches import Batch
from tests.kernels.batches import make_batch as any_batch
from tests.kernels.test_rope import table
from tests.kernels.tolerance import assert_close
from tests.kernels.triton.test_invariant import dot

make_batch = partial(any_batch, kv_heads=1, dtype=torch.float16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_args(batch: Batch, latent: int, **more: Tensor) -> MlaArgs:
    return MlaArgs(
        q=batch.q, cache=batch.key_cache, latent=latent, block_tables=batch.block_tables,
        seq_lens=batch.seq_lens, query_start_loc=batch.query_start_loc, scale=batch.scale, **more,
    )  # fmt: skip


def expected(batch: Batch, latent: int) -> Tensor:
    full_arguments = batch.arguments() | {"value_cache": batch.key_cache.clone()}
    return oracle.paged_attention(AttentionArgs(**full_arguments))[..., -latent:]


def check(batch: Batch, latent: int, programs: int | None = None) -> None:
    got = latent_attention(make_args(batch, latent), programs=programs)
    assert_close(got, expected(batch, latent), batch.q.dtype, 4.0)


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("heads", [3, 33])
def test_prompts_whose_keys_arent_split(heads):
    """Tiles of several queries, or of a part of one's heads."""
    check(make_batch([(17, 30), (20, 20)], heads=heads, size=24), 16, programs=1)


@pytest.mark.parametrize(("size", "latent"), [(24, 16), (30, 20), (35, 33), (9, 1)])
def test_sizes_that_are_no_powers_of_two(size, latent):
    check(make_batch([(1, 70), (2, 9)], heads=4, size=size, dtype=torch.float32), latent)


@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(1, 1)]])
def test_small_batches(sequences):
    check(make_batch(sequences, heads=2, size=32, strided=True), 16)


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("lengths", [[(1, 70), (2, 9)], [(37, 50)]])
def test_caches_of_eight_bits(lengths, cache):
    batch = make_batch(lengths, heads=3, size=48, dtype=torch.float32)
    dense = batch.key_cache.nan_to_num()
    if cache == torch.int8:
        scales = dense.abs().amax(-1) / 127 + 1e-9
        rounded = (dense / scales[..., None]).round().to(cache)
        batch.key_cache = rounded.float() * scales[..., None]
    else:
        scales = torch.tensor([0.25])
        rounded = (dense / 0.25).to(cache)
        batch.key_cache = rounded.float() * 0.25
    right = expected(batch, 32)
    got = latent_attention(replace(make_args(batch, 32), cache=rounded, scales=scales))
    assert_close(got, right, torch.float16, 4.0)


def test_a_decoding_row_is_the_same_to_the_bit_in_every_batch():
    batch = make_batch([(1, 200), (1, 5), (1, 90)], heads=3, size=48)
    full = make_args(batch, 32)
    together = latent_attention(full)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for row in (0, 2):
        one = slice(row, row + 1)
        isolated = replace(
            full, q=full.q[one], block_tables=full.block_tables[one].contiguous(),
            seq_lens=full.seq_lens[one], query_start_loc=starts,
        )  # fmt: skip
        for programs in (1, 3):
            assert torch.equal(latent_attention(isolated, programs=programs)[0], together[row])


def test_with_invariance_a_row_of_a_chunk_is_that_of_its_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    batch = make_batch([(3, 75), (1, 20)], heads=3, size=48)
    together = latent_attention(make_args(batch, 32), invariant=True)
    assert_close(together, expected(batch, 32), torch.float16, 4.0)
    for row, (sequence, length) in enumerate([(0, 73), (0, 74), (0, 75), (1, 20)]):
        isolated = replace(
            make_args(batch, 32), q=batch.q[row : row + 1],
            block_tables=batch.block_tables[sequence : sequence + 1],
            seq_lens=torch.tensor([length], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        )  # fmt: skip
        assert torch.equal(latent_attention(isolated, invariant=True)[0], together[row])


@pytest.mark.parametrize("queries", [1, 9])
def test_parts_of_split_sequences_take_little_more_than_a_gigabyte(queries):
    """256 decodes of DeepSeek V3 in long contexts: by 64 parts each they took 4 GB, drafts 36."""
    states = []

    def record_launch(kernel, grid, args, options):
        states.append(args[0].nbytes)

    meta = {"device": "meta"}
    ints = {"dtype": torch.int32, **meta}
    args = MlaArgs(
        q=torch.empty(256 * queries, 128, 576, dtype=torch.bfloat16, **meta),
        cache=torch.empty(4, 1, 64, 576, dtype=torch.bfloat16, **meta), latent=512,
        block_tables=torch.empty(256, 2560, **ints), seq_lens=torch.empty(256, **ints),
        query_start_loc=torch.empty(257, **ints), scale=1.0,
    )  # fmt: skip
    with watch(record_launch, Target(90, 132)):
        latent_attention(args)
    assert max(states) <= 1.2 * (1 << 30)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 11])
def test_queries_and_latents_turn_and_latents_are_written(heads, dtype, neox):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((7, heads, 40), generator=generator).to(dtype)
    latents = torch.randn((7, 1, 40), generator=generator).to(dtype)
    cache, cos_sin = torch.full((3, 1, 8, 40), 7.0, dtype=dtype), table(50, 12)
    positions, slots = torch.randint(0, 50, (7,)), torch.randperm(24)[:7]
    slots[3] = -1
    expected = [oracle.rope(x, positions, cos_sin, neox) for x in (q, latents)]
    rope_and_cache_latents(q, latents, positions, cos_sin, cache, slots, neox)
    for got, right in zip((q, latents), expected, strict=True):
        assert_close(got, right, dtype)
    flat_cache = cache.flatten(0, 2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat_cache[slot], latents[token, 0])
    assert int((flat_cache == 7.0).all(-1).sum()) == 24 - 6


def test_latents_alone_are_written_for_tokens_without_queries():
    retained_tensor, cache = torch.randn(2, 1, 24), torch.zeros(1, 1, 4, 24)
    unknown_tensor, none = torch.empty(2, 0, 24), torch.arange(2)
    rope_and_cache_latents(unknown_tensor, retained_tensor, none, table(9, 8), cache, none)
    assert torch.equal(cache[0, 0, :2], retained_tensor[:, 0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_latents_are_rounded_as_they_are_written(dtype):
    retained_tensor = torch.randn(5, 1, 24) * torch.tensor([1, 9, 3, 2, 5])[:, None, None]
    cache, positions = torch.zeros((1, 1, 8, 24), dtype=dtype), torch.arange(5)
    scales = torch.zeros(1, 1, 8) if dtype == torch.int8 else torch.tensor([0.5])
    unknown_tensor = torch.empty(5, 0, 24)
    rope_and_cache_latents(
        unknown_tensor, retained_tensor, positions, table(8, 8), cache, positions, scales=scales
    )
    if dtype == torch.int8:
        assert torch.allclose(scales[0, 0, :5], retained_tensor[:, 0].abs().amax(-1) / 127)
        back = cache[0, 0, :5].float() * scales[0, 0, :5, None]
        assert float((back - retained_tensor[:, 0]).abs().max()) <= float(scales.max()) * 0.51
    else:
        assert torch.equal(cache[0, 0, :5].float(), (retained_tensor[:, 0] / 0.5).to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", [False, True])
def test_a_layer_for_each_head(alike, dtype):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn((5, 40, 24), generator=generator).to(dtype)
    linear, every = (TorchLinear, BatchedHeadLinears)
    if alike:
        linear, every = InvariantLinear, InvariantHeadLinears
    layers = every([linear(weight, None) for weight in weights])
    assert set(layers.tensors()) == {"weight"}
    assert layers.nbytes == weights.nbytes
    x = torch.randn((19, 5, 27), generator=generator).to(dtype)[..., 3:]
    full_tensor = torch.full((19, 5, 44), 7.0, dtype=dtype)
    layers(x, full_tensor[..., 2:42])
    right = torch.einsum("thk,hnk->thn", x.double(), weights.double())
    assert_close(full_tensor[..., 2:42], right, dtype, 4.0)
    assert bool((full_tensor[..., [0, 1, 42, 43]] == 7.0).all())


def test_heads_that_do_not_fit_are_refused():
    layers = BatchedHeadLinears([TorchLinear(torch.randn(8, 4), None)] * 2)
    out = torch.empty(3, 2, 8)
    for x, problem in [
        (torch.randn(3, 2, 5), "must be"),
        (torch.randn(3, 1, 4), "must be"),
        (torch.randn(3, 2, 4).half(), "dtype"),
        (torch.randn(3, 4, 2).transpose(1, 2), "side by side"),
    ]:
        with pytest.raises(ValueError, match=problem):
            layers(x, out)
    with pytest.raises(ValueError, match="bias"):
        BatchedHeadLinears([TorchLinear(torch.randn(8, 4), torch.randn(8))])


def test_what_does_not_fit_is_refused():
    good = make_args(make_batch([(1, 9)], heads=2, size=48), 32)

    def refused(words: str, **changes: Tensor | int) -> None:
        with pytest.raises(ValueError, match=words):
            latent_attention(replace(good, **changes))

    refused("latent of 0", latent=0)
    refused("rotated part of 0", latent=48)
    refused("latent of 600", latent=600, q=torch.empty(1, 2, 640))
    refused("rotated part of 200", latent=16, q=torch.empty(1, 2, 216))
    refused("doesn't fit heads", cache=good.cache[..., :32].contiguous())
    refused("int8 cache needs", cache=good.cache.to(torch.int8))
    refused("q ", q=good.q.double())
    refused("block_tables", block_tables=good.block_tables.long())
    refused("seq_lens", seq_lens=good.seq_lens.long())
    refused("out", out=torch.empty(1))
    x = torch.empty(1, 1, 24)
    with pytest.raises(ValueError, match="don't go with"):
        rope_and_cache_latents(
            torch.empty(1, 2, 48), x, torch.zeros(1).long(), None, torch.empty(1, 1, 4, 48),
            torch.zeros(1).long(),
        )  # fmt: skip
