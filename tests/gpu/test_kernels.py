"""The Triton kernels on a GPU, at real shapes, against the plain torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.gpu_case import compare
from benchmarks.kernels.gpu_cases import all_cases, paged_batch
from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.logit_edits import PenaltyRows, TokenTable
from kernels.reference import ReferenceKernels
from kernels.triton.attention import latent_attention, merge_attention_states, paged_attention
from kernels.triton.kernel_set import load
from kernels.triton.linear import TorchLinear
from kernels.triton.moe import align
from kernels.triton.moe.grouped_gemm import grouped_gemm
from kernels.triton.rope import rope_and_cache
from kernels.triton.sampling import TritonLogitEdits, token_logprobs

ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def attend(batch, dtype, allowed=None, **options):
    """Compare a batch with the reference in float32, on caches of float32."""
    q, keys, values, *rest = batch
    scale = q.shape[-1] ** -0.5
    got = paged_attention(AttentionArgs(*batch, scale, **options))
    scaled = {k: v for k, v in options.items() if not k.endswith("_scales")}
    expected = ReferenceKernels.paged_attention(
        AttentionArgs(
            q.float(),
            widened(keys, options.get("key_scales")),
            widened(values, options.get("value_scales")),
            *rest,
            scale,
            **scaled,
        ),
    )
    compare(got, expected, allowed or ALLOWED[dtype])


def widened(cache, scales):
    wide = cache.float()
    if scales is None:
        return wide
    return wide * (scales if scales.numel() == 1 else scales[..., None])


def batch_of(device, large, *, sequences=8, queries=1, length=None, **changes):
    length = length or (2000 if large else 40)
    shape = {"heads": 8, "kv_heads": 2, "size": 128 if large else 32, "page": 16, **changes}
    return paged_batch(sequences if large else 2, queries, length, device=device, **shape)


@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("queries", [1, 3, 37])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_attention(device, large, dtype, queries, page):
    attend(batch_of(device, large, queries=queries, page=page, dtype=dtype), dtype)


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 37])
def test_head_sizes(device, large, size, queries):
    attend(batch_of(device, large, size=size, queries=queries), torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 100}, {"soft_cap": 20.0}, {"sinks": True}, {"alibi_slopes": True},
        {"sliding_window": 333, "soft_cap": 30.0, "sinks": True, "alibi_slopes": True},
        {"programs": 7},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
@pytest.mark.parametrize("queries", [1, 37])
def test_variations(device, large, options, queries):
    tensors = {
        name: torch.rand(8, device=device) if name in ("sinks", "alibi_slopes") else value
        for name, value in options.items()
    }
    batch = batch_of(device, large, queries=queries, dtype=torch.float16)
    splits = tensors.pop("programs", None)
    if splits is None:
        attend(batch, torch.float16, **tensors)
    else:
        scale = batch[0].shape[-1] ** -0.5
        compare(
            paged_attention(AttentionArgs(*batch, scale), programs=splits),
            paged_attention(AttentionArgs(*batch, scale)),
            2e-3,
        )


@pytest.mark.parametrize("scaling", ["none", "tensor", "token"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("queries", [1, 37])
def test_fp8_caches(device, large, dtype, scaling, queries):
    batch = batch_of(device, large, queries=queries, cache_dtype=dtype)
    shape = {"none": None, "tensor": (1,), "token": batch[1].shape[:3]}[scaling]
    scales = None if shape is None else torch.rand(shape, device=device) + 0.5
    attend(batch, torch.bfloat16, key_scales=scales, value_scales=scales)


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 37])
def test_int8_caches(device, large, dtype, queries, size):
    """All of an int8's values, and a scale a token."""
    batch = batch_of(
        device, large, queries=queries, size=size if large else 32, dtype=dtype,
        cache_dtype=torch.int8,
    )  # fmt: skip
    for cache in batch[1:3]:
        cache.random_(-127, 128)
    scales = (torch.rand(batch[1].shape[:3], device=device) + 0.5) / 64
    attend(batch, dtype, key_scales=scales, value_scales=scales)


@pytest.mark.parametrize("rows", [511, 512, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_products_in_fp8(device, large, rows, biased):
    """Many rows, of the vendor's library where torch has it, as by our kernel."""
    columns, depth = (4096, 1024) if large else (48, 64)
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(rows if large else 5, depth, **options)
    bias = torch.randn(columns, **options) if biased else None
    layer = load(device).PackedLinear(
        torch.randn(columns, depth, **options), bias, quantization="fp8"
    )
    got = layer(x)
    layer.by_library = False
    compare(got, layer(x).float(), 1e-2)


def test_long_context_of_one_sequence(device, large):
    batch = batch_of(device, large, sequences=1, length=100_000 if large else 300)
    attend(batch, torch.bfloat16)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("queries", [1, 4, 37])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(device, large, heads, queries, cache):
    """DeepSeek's: a latent of 512 values behind 64 that are rotated."""
    shape = {"heads": heads if large else 3, "kv_heads": 1, "size": 576, "dtype": torch.bfloat16}
    q, keys, _, *rest = batch_of(
        device, large, queries=queries, length=2000 if large else 60, cache_dtype=cache, **shape
    )
    scales = None
    if cache == torch.int8:
        keys.random_(-127, 128)
        scales = (torch.rand(keys.shape[:3], device=device) + 0.5) / 64
    names = ("block_tables", "seq_lens", "query_start_loc")
    lengths = dict(zip(names, rest, strict=True))
    mla_args = MlaArgs(q=q, cache=keys, latent=512, scale=0.05, scales=scales, **lengths)
    wide = replace(mla_args, q=q.float(), cache=widened(keys, scales), scales=None)
    compare(latent_attention(mla_args), ReferenceKernels.mla_attention(wide), 1e-2)


@pytest.mark.parametrize("dtype", list(ALLOWED))
def test_a_layer_for_each_head(device, large, dtype):
    """Into a part of what attention takes, as models have it."""
    heads, options = 16 if large else 3, {"device": device, "dtype": dtype}
    weights = torch.randn(heads, 512, 128, **options)
    x = torch.randn(33 if large else 3, heads, 192, **options)[..., :128]
    out = torch.zeros(len(x), heads, 576, **options)
    load(device).head_linears([TorchLinear(weight, None) for weight in weights])(x, out[..., 64:])
    exact = torch.einsum("thk,hnk->thn", x.double(), weights.double())
    compare(out[..., 64:], exact.float(), ALLOWED[dtype] * 4)
    assert not out[..., :64].any()


def test_states_merge(device, large):
    q, keys, values, tables, lengths, starts = batch_of(device, large, length=64)
    scale, parts = q.shape[-1] ** -0.5, []
    for part in (tables[:, :2], tables[:, 2:]):
        lse = torch.empty(q.shape[:2], device=device)
        half = (q, keys, values, part.contiguous(), lengths // 2, starts)
        parts += [paged_attention(AttentionArgs(*half, scale), lse=lse), lse]
    full = paged_attention(AttentionArgs(q, keys, values, tables, lengths, starts, scale))
    compare(merge_attention_states(*parts)[0], full, 1e-2)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("neox", [True, False])
def test_rope_and_cache(device, cache, neox):
    tokens, heads, kv_heads, size = 77, 32, 8, 128
    fused = torch.randn(tokens, heads + 2 * kv_heads, size, device=device).bfloat16()
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    q2, k2, v2 = (x.clone().float() for x in (q, k, v))
    angles = torch.rand(100, size // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 100, (tokens,), device=device)
    slots = torch.randperm(8 * 16, device=device)[:tokens]
    weight = torch.rand(size, device=device) + 0.5
    caches = [torch.zeros(8, kv_heads, 16, size, device=device).to(cache) for _ in range(2)]
    baseline_tensors = [torch.zeros(8, kv_heads, 16, size, device=device) for _ in range(2)]
    options = {"q_norm_weight": weight, "k_norm_weight": weight, "neox": neox}
    rope_and_cache(q, k, v, positions, table, *caches, slots, **options)
    ReferenceKernels.rope_and_cache(
        q2, k2, v2, positions, table, *baseline_tensors, slots, **options
    )
    allowed = 1e-2 if cache == torch.bfloat16 else 6e-2
    for got, expected in ((q, q2), (k, k2)):
        compare(got, expected, 1e-2)
    for got, expected in zip(caches, baseline_tensors, strict=True):
        compare(got.float(), expected, allowed)


def test_grouped_products(device, large):
    rows, depth, columns, groups = (300, 512, 384, 9) if large else (20, 40, 24, 3)
    x = torch.randn(rows, depth, device=device).bfloat16()
    matrices = (torch.randn(groups, columns, depth, device=device) / depth**0.5).bfloat16()
    ids = torch.randint(0, groups, (rows,), device=device, dtype=torch.int32)
    expected = torch.einsum("rk,rnk->rn", x.float(), matrices.float()[ids.long()])
    for tile in (16, 64, 128):
        compare(grouped_gemm(x, matrices, align(ids, groups, tile)), expected, 1e-2)


def test_edits_and_logprobs(device):
    edits, logits = TritonLogitEdits(), torch.randn(4, 5000, device=device)
    ints = {"dtype": torch.int32, "device": device}
    ids = torch.randperm(5000, device=device)[:12].view(4, 3)
    counts = torch.arange(12, device=device).view(4, 3)
    table = TokenTable(torch.zeros(4, 64, **ints), torch.zeros(4, 64, **ints))
    slots = torch.tensor([2, 0, 3, 1], **ints)
    positions = torch.arange(3, **ints).expand(4, 3)
    changes = torch.stack((slots[:, None].expand(4, 3), positions, ids.int(), counts.int()))
    edits.update_token_table(table, changes.flatten(1))
    factor = torch.full((4,), 1.3, device=device)
    rows = torch.arange(4, **ints)
    penalized = PenaltyRows(rows, slots, factor, factor, factor)
    expected = logits.clone()
    value = expected.gather(1, ids)
    value = torch.where(value > 0, value / 1.3, value * 1.3) - 1.3 * counts - 1.3 * (counts > 0)
    expected.scatter_(1, ids, value)
    edits.apply_penalties(logits, penalized, table, torch.full((4,), 3, **ints))
    torch.testing.assert_close(logits, expected)
    allowed = torch.rand(4, 5024, device=device) < 0.5
    words = (allowed.view(4, -1, 32).long() << torch.arange(32, device=device)).sum(-1)
    masked = logits.clone()
    edits.apply_bitmask(masked, rows.long(), words.int(), None)
    assert torch.equal(masked, logits.masked_fill(~allowed[:, :5000], float("-inf")))
    tokens = ids[:, 0].contiguous()
    tensor, normalizer, rank = token_logprobs(logits, tokens)
    baseline = torch.log_softmax(logits.double(), -1)
    chosen = baseline.gather(1, tokens[:, None])
    torch.testing.assert_close(tensor.double(), chosen[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalizer.double(), logits.double().logsumexp(-1))
    assert torch.equal(rank, (baseline > chosen).sum(-1) + 1)


def test_every_case_of_the_benchmark_agrees(device, large):
    for case in all_cases(load(device), small=not large):
        case.check()
