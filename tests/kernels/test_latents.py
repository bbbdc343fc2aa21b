"""Attention over latents, their write to the cache, and a linear layer for each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.interface import KernelSet
from kernels.reference import ReferenceKernels
from tests.covering import covering
from tests.kernels import oracle
from tests.kernels.batches import Batch, make_batch
from tests.kernels.test_rope import table
from tests.kernels.tolerance import assert_close

MIX = [(1, 1), (7, 7), (1, 33), (15, 50), (1, 17), (16, 16), (0, 9), (33, 40), (2, 19), (1, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def latents(heads: int, size: int, **options: Any) -> Batch:
    """A batch whose keys are its values."""
    batch = make_batch(MIX, heads=heads, kv_heads=1, size=size, **options)
    batch.value_cache = batch.key_cache
    return batch


def make_args(batch: Batch, latent: int, scales: Tensor | None = None) -> MlaArgs:
    return MlaArgs(
        q=batch.q,
        cache=batch.key_cache,
        latent=latent,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        scale=batch.scale,
        scales=scales,
    )


def expected(batch: Batch, latent: int) -> Tensor:
    return oracle.paged_attention(AttentionArgs(**batch.arguments()))[..., -latent:]


@pytest.mark.parametrize(
    ("heads", "size", "latent"), [(16, 576, 512), (128, 72, 64), (4, 24, 16), (5, 30, 20)]
)
def test_a_token_is_key_and_value_of_all_heads(
    kernels: KernelSet, threads: int, heads: int, size: int, latent: int
) -> None:
    batch = latents(heads, size)
    attended = kernels.mla_attention(make_args(batch, latent))
    assert_close(attended, expected(batch, latent), torch.float32, 4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_dtypes(kernels: KernelSet, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = latents(6, 40, dtype=dtype, cache_dtype=cache_dtype, strided=True)
    tensor = kernels.mla_attention(make_args(batch, 32))
    assert tensor.dtype == dtype
    assert_close(tensor, expected(batch, 32), dtype, 4.0)


def test_the_reference_judges_itself_in_float64() -> None:
    batch = latents(4, 24, dtype=torch.float64)
    attended = ReferenceKernels().mla_attention(make_args(batch, 16))
    torch.testing.assert_close(attended, expected(batch, 16), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.int8])
def test_a_decode_gives_what_a_chunk_gives(compiled: KernelSet, cache_dtype: torch.dtype) -> None:
    length = 300
    batch = make_batch([(length, length)], heads=16, kv_heads=1, size=72)
    cache, scales = batch.key_cache, None
    if cache_dtype == torch.int8:
        scales = cache.nan_to_num().abs().amax(-1) / 127
        cache = (cache / scales[..., None]).nan_to_num().round()
    batch.key_cache = cache.to(cache_dtype)
    full = compiled.mla_attention(make_args(batch, 64, scales))
    for begin, end in [(0, 1), (127, 128), (128, 129), (299, 300), (5, 200), (290, 300)]:
        part = make_args(batch, 64, scales)
        part.q = batch.q[begin:end]
        part.seq_lens = torch.tensor([end], dtype=torch.int32)
        part.query_start_loc = torch.tensor([0, end - begin], dtype=torch.int32)
        assert torch.equal(compiled.mla_attention(part), full[begin:end])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rotated_comes_first(kernels: KernelSet, dtype: torch.dtype, neox: bool) -> None:
    torch.manual_seed(1)
    q, latents = torch.randn(11, 4, 24).to(dtype), torch.randn(11, 1, 24).to(dtype)
    cache, cos_sin = torch.full((3, 1, 8, 24), 7.0, dtype=dtype), table(50, 8)
    positions, slots = torch.randint(0, 50, (11,)), torch.randperm(24)[:11]
    slots[3] = -1
    expected = [oracle.rope(x, positions, cos_sin, neox) for x in (q, latents)]
    kernels.rope_and_cache_mla(q, latents, positions, cos_sin, cache, slots, neox)
    for got, right in zip((q, latents), expected, strict=True):
        assert_close(got, right, dtype)
    flat_cache = cache.flatten(0, 2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat_cache[slot], latents[token, 0])
    assert int((flat_cache == 7.0).all(-1).sum()) == 24 - 10


def test_rounded_latents_have_one_scale_a_token(kernels: KernelSet) -> None:
    torch.manual_seed(2)
    q, retained_tensor = torch.randn(5, 2, 24), torch.randn(5, 1, 24)
    retained_tensor *= torch.tensor([1, 9, 3, 2, 5])[:, None, None]
    cache = torch.zeros((1, 1, 8, 24), dtype=torch.int8)
    scales = torch.zeros((1, 1, 8))
    kernels.rope_and_cache_mla(
        q, retained_tensor, torch.arange(5), table(8, 8), cache, torch.arange(5), scales=scales
    )
    back = cache[0, 0, :5].float() * scales[0, 0, :5, None]
    assert float((back - retained_tensor[:, 0]).abs().max()) <= float(scales.max()) * 0.51
    assert torch.allclose(scales[0, 0, :5], retained_tensor[:, 0].abs().amax(-1) / 127)


@covering(
    indirect=["threads"], threads=[1, 2], dtype=DTYPES,
    sizes=[(1, 128, 512), (3, 24, 40), (37, 16, 20), (600, 8, 33)],
)  # fmt: skip
def test_a_layer_for_each_head(
    kernels: KernelSet, threads: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, k, n = sizes
    torch.manual_seed(rows)
    weights = [torch.randn(n, k) for _ in range(5)]
    layers = kernels.head_linears([kernels.PackedLinear(weight) for weight in weights])
    x = torch.randn(rows, 5, k + 3).to(dtype)[..., 3:]
    full_tensor = torch.full((rows, 5, n + 4), 7.0, dtype=dtype)
    layers(x, full_tensor[..., 2 : n + 2])
    right = torch.einsum("thk,hnk->thn", x.double(), torch.stack(weights).double())
    assert_close(full_tensor[..., 2 : n + 2], right, dtype, 4.0)
    assert bool((full_tensor[..., [0, 1, n + 2, n + 3]] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_each_head_is_the_same_alone(compiled: KernelSet, dtype: torch.dtype) -> None:
    layers = [compiled.PackedLinear(torch.randn(40, 96).to(dtype)) for _ in range(6)]
    every, x = compiled.head_linears(layers), torch.randn(530, 6, 96)
    full_tensor = torch.empty(530, 6, 40)
    every(x, full_tensor)
    for begin, end in [(0, 1), (529, 530), (255, 257), (3, 20), (100, 500)]:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            part = torch.empty(end - begin, 6, 40)
            every(x[begin:end], part)
            assert torch.equal(part, full_tensor[begin:end])
    by_hand = torch.stack([layer(x[:, head]) for head, layer in enumerate(layers)], 1)
    assert torch.equal(by_hand, full_tensor)


def test_what_doesnt_fit_is_refused(kernels: KernelSet, compiled: KernelSet) -> None:
    narrow, wide = (kernels.PackedLinear(torch.randn(8, k)) for k in (4, 5))
    with pytest.raises(ValueError, match="have 2 shapes"):
        kernels.head_linears([narrow, wide])
    layers = compiled.head_linears([compiled.PackedLinear(torch.randn(8, 4))] * 2)
    out = torch.empty(3, 2, 8)
    for x, problem in [
        (torch.randn(3, 2, 5), "must be"),
        (torch.randn(3, 1, 4), "must be"),
        (torch.randn(3, 2, 4).half(), "one dtype"),
        (torch.randn(3, 4, 2).transpose(1, 2), "side by side"),
    ]:
        with pytest.raises(ValueError, match=problem):
            layers(x, out)
    foreign = [ReferenceKernels().PackedLinear(torch.randn(8, 4))] * 2
    with pytest.raises(ValueError, match="none of these kernels"):
        compiled.head_linears(foreign)
