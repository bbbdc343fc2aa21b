"""What is timed on a GPU: each case checks itself against the reference before it runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gpu_case import GpuCase, compare
from benchmarks.kernels.gpu_edit_cases import edit_cases
from benchmarks.kernels.gpu_latent_cases import latent_cases
from benchmarks.kernels.gpu_layer_cases import layer_cases
from kernels.attention_args import AttentionArgs
from kernels.interface import KernelSet
from kernels.reference import ReferenceKernels
from kernels.triton import moe as grouped
from kernels.triton.attention import merge_attention_states

Paged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, key cache, value cache, block tables, lengths, query starts."""


def paged_batch(
    sequences: int, queries: int, length: int, *, heads: int, kv_heads: int, size: int,
    page: int, device: str, dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> Paged:  # fmt: skip
    """Arguments of paged attention over blocks in random order."""
    blocks = -(-length // page)
    shape = (sequences * blocks, kv_heads, page, size)
    caches = [
        torch.randn(shape, device=device, dtype=dtype).to(cache_dtype or dtype) for _ in range(2)
    ]
    order = torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * queries
    q = torch.randn(sequences * queries, heads, size, device=device, dtype=dtype)
    return q, caches[0], caches[1], order.contiguous(), lengths, starts


def _pages(cache: Tensor, ids: Tensor) -> Tensor:
    """float32 copies of pages; eight-bit floats can't be indexed as such everywhere."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[ids.long()].view(cache.dtype).float()
    return cache[ids.long()].float()


def attention_case(
    kernels: KernelSet, name: str, sequences: int, queries: int, length: int, goal: float,
    page: int = 16, cache_dtype: torch.dtype | None = None,
    shape: tuple[int, int, int] = (32, 8, 128),
) -> GpuCase:  # fmt: skip
    """`shape`: query heads, KV heads, head size."""
    heads, kv_heads, size = shape
    batch = paged_batch(
        sequences, queries, length, heads=heads, kv_heads=kv_heads, size=size, page=page,
        device=str(kernels.device), cache_dtype=cache_dtype,
    )  # fmt: skip
    scale = size**-0.5
    out = torch.empty_like(batch[0])

    def check() -> None:
        q, keys, values, tables, lengths, _ = batch
        got = kernels.paged_attention(AttentionArgs(*batch, scale))[:queries]
        starts = torch.tensor([0, queries], dtype=torch.int32, device=q.device)
        ours, theirs = _pages(keys, tables[0]), _pages(values, tables[0])
        in_order = torch.arange(tables.shape[1], dtype=torch.int32, device=q.device)[None]
        expected = ReferenceKernels.paged_attention(
            AttentionArgs(q[:queries].float(), ours, theirs, in_order, lengths[:1], starts, scale)
        )
        compare(got, expected, 1e-2)

    seen = sequences * sum(range(length - queries + 1, length + 1))
    width = (cache_dtype or torch.bfloat16).itemsize
    decode = queries <= 8
    return GpuCase(
        name,
        f"{sequences} x {queries} of {length}, {heads}/{kv_heads} x {size}, page {page}",
        lambda: kernels.paged_attention(AttentionArgs(*batch, scale, out=out)),
        check,
        bytes=sequences * length * 2 * kv_heads * size * width if decode else 0,
        flops=0 if decode else 4 * heads * size * seen,
        goal=goal,
    )


def sampling_cases(kernels: KernelSet, rows: int, vocab: int) -> Iterator[GpuCase]:
    """Of random logits, which are flatter than a trained model's: the harder case."""
    device = kernels.device
    logits = torch.randn(rows, vocab, device=device) * 2
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, vocab, 1.0, 0.0),
        ("plain", 1.0, vocab, 1.0, 0.0),
        ("top-k 50, top-p 0.9", 0.8, 50, 0.9, 0.0),
        ("top-p 0.9", 1.0, vocab, 0.9, 0.0),
        ("top-k 2000", 1.0, 2000, 1.0, 0.0),
        ("min-p 0.05", 1.0, vocab, 1.0, 0.05),
    ):
        settings = (
            torch.full((rows,), temperature, device=device),
            torch.full((rows,), top_k, dtype=torch.int64, device=device),
            torch.full((rows,), top_p, dtype=torch.float64, device=device),
            torch.full((rows,), min_p, dtype=torch.float64, device=device),
            uniforms,
        )
        yield GpuCase(
            f"sample, {name}",
            f"{rows} x {vocab}",
            functools.partial(kernels.sample, logits, *settings),
            functools.partial(_same_tokens, kernels, logits, settings),
            bytes=logits.nbytes,
        )


def _same_tokens(kernels: KernelSet, logits: Tensor, settings: tuple[Tensor, ...]) -> None:
    got = kernels.sample(logits, *settings)
    expected = ReferenceKernels.sample(logits, *settings)
    # A sum rounded in another order may move a border past a random number, seldom.
    num_different = int((got != expected).sum())
    if num_different > max(1, len(got) // 64):
        raise ValueError(f"{num_different} of {len(got)} tokens differ from the reference's")


def small_cases(kernels: KernelSet, rows: int, width: int) -> Iterator[GpuCase]:
    """A norm with its residual, and a gate."""
    options: dict[str, Any] = {"device": kernels.device, "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, width, **options), torch.randn(rows, width, **options)
    weight = torch.rand(width, device=kernels.device)
    gated = torch.randn(rows, 2 * width, **options)

    def check_norm() -> None:
        expected = ReferenceKernels.rms_norm(x.float(), weight, 1e-5)
        compare(kernels.rms_norm(x, weight, 1e-5), expected, 1e-2)

    def check_gate() -> None:
        expected = ReferenceKernels.silu_and_mul(gated.float())
        compare(kernels.silu_and_mul(gated), expected, 1e-2)

    shape = f"{rows} x {width}"
    yield GpuCase(
        "add_rms_norm", shape, lambda: kernels.fused_add_rms_norm(x, residual, weight, 1e-5),
        check_norm, bytes=4 * x.nbytes,
    )  # fmt: skip
    yield GpuCase(
        "silu_and_mul", shape, lambda: kernels.silu_and_mul(gated), check_gate, bytes=3 * x.nbytes
    )


def rope_case(
    kernels: KernelSet, tokens: int, page: int = 16, shape: tuple[int, int, int] = (32, 8, 128)
) -> GpuCase:
    """Rotation with QK norms and the write to the cache, of tokens in random slots."""
    heads, kv_heads, size = shape
    options: dict[str, Any] = {"device": kernels.device, "dtype": torch.bfloat16}
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, **options)
    blocks = -(-tokens // page)
    cache = [torch.zeros(blocks, kv_heads, page, size, **options) for _ in range(2)]
    slots = torch.randperm(blocks * page, device=kernels.device)[:tokens]
    angles = torch.rand(tokens, size // 2, device=kernels.device) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(tokens, device=kernels.device)
    weight = torch.rand(size, device=kernels.device) + 0.5
    norms: dict[str, Any] = {"q_norm_weight": weight, "k_norm_weight": weight}

    def turn(ops: KernelSet | type[ReferenceKernels], x: Tensor, caches: list[Tensor]) -> None:
        q, k, v = x.split([heads, kv_heads, kv_heads], 1)
        ops.rope_and_cache(q, k, v, positions, table, caches[0], caches[1], slots, **norms)

    def check() -> None:
        rotated = [torch.zeros(part.shape, device=part.device) for part in cache]
        ours, theirs = qkv.clone(), qkv.float()
        turn(kernels, ours, cache)
        turn(ReferenceKernels, theirs, rotated)
        for got, expected in ((ours, theirs), *zip(cache, rotated, strict=True)):
            compare(got, expected, 1e-2)

    work = qkv.clone()
    return GpuCase(
        "rope, norms, cache", f"{tokens} x {heads}/{kv_heads} x {size}",
        lambda: turn(kernels, work, cache), check,
        bytes=2 * qkv.nbytes + tokens * kv_heads * size * 4,
    )  # fmt: skip


def merge_case(
    kernels: KernelSet, tokens: int, shape: tuple[int, int, int] = (32, 8, 128)
) -> GpuCase:
    """Two attention states joined."""
    heads, _, size = shape
    options: dict[str, Any] = {"device": kernels.device}
    states = [torch.randn(tokens, heads, size, **options).bfloat16() for _ in range(2)]
    sums = [torch.randn(tokens, heads, **options) for _ in range(2)]

    def run() -> tuple[Tensor, Tensor]:
        return merge_attention_states(states[0], sums[0], states[1], sums[1])

    def check() -> None:
        weights = torch.softmax(torch.stack(sums).double() * math.log(2), 0)[..., None]
        compare(run()[0], (torch.stack(states).double() * weights).sum(0), 1e-2)

    return GpuCase(
        "merge of states", f"{tokens} x {heads} x {size}", run, check, bytes=3 * states[0].nbytes
    )


def experts_case(
    kernels: KernelSet, tokens: int, experts: int = 128, top_k: int = 8,
    shape: tuple[int, int] = (2048, 768),
) -> GpuCase:  # fmt: skip
    """A mixture of experts of `shape`."""
    hidden, inner = shape
    options: dict[str, Any] = {"device": kernels.device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **options)
    up = torch.randn(experts, 2 * inner, hidden, **options) / hidden**0.5
    down = torch.randn(experts, hidden, inner, **options) / inner**0.5
    weights, ids = grouped.route(torch.randn(tokens, experts, device=kernels.device), top_k)

    def check() -> None:
        some = min(tokens, 8)
        expected = torch.zeros(some, hidden, device=x.device)
        for row in range(some):
            for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
                both = up[expert].float() @ x[row].float()
                gate = torch.nn.functional.silu(both[:inner]) * both[inner:]
                expected[row] += weight * (down[expert].float() @ gate)
        compare(grouped.fused_experts(x, up, down, weights, ids)[:some], expected, 2e-2)

    hit = min(experts, tokens * top_k)
    few = tokens * top_k < 16 * experts
    return GpuCase(
        "experts",
        f"{tokens} tokens, {top_k} of {experts}",
        lambda: grouped.fused_experts(x, up, down, weights, ids),
        check,
        bytes=hit * 3 * hidden * inner * 2 if few else 0,
        flops=0 if few else tokens * top_k * 6 * hidden * inner,
    )


def all_cases(kernels: KernelSet, small: bool = False) -> Iterator[GpuCase]:
    """Every case; `small` ones only prove that the suite runs."""
    if small:
        few = (4, 2, 32)
        yield attention_case(kernels, "decode", 2, 1, 40, 0.0, shape=few)
        yield attention_case(kernels, "prefill", 1, 40, 40, 0.0, shape=few)
        yield from sampling_cases(kernels, 2, 300)
        yield from edit_cases(kernels, 2, 300)
        yield from small_cases(kernels, 2, 64)
        yield rope_case(kernels, 5, shape=few)
        yield merge_case(kernels, 3, few)
        yield experts_case(kernels, 3, experts=2, top_k=1, shape=(48, 24))
        yield from layer_cases(kernels, small=True)
        yield from latent_cases(kernels, small=True)
        return
    fp8 = torch.float8_e4m3fn
    yield attention_case(kernels, "decode", 64, 1, 8192, 0.9)
    yield attention_case(kernels, "decode", 1, 1, 8192, 0.0)
    yield attention_case(kernels, "decode, 4 tokens", 64, 4, 8192, 0.0)
    yield attention_case(kernels, "decode, 8 tokens", 64, 8, 8192, 0.0)
    yield attention_case(kernels, "decode", 64, 1, 8192, 0.0, page=64)
    yield attention_case(kernels, "decode, e4m3 KV", 64, 1, 8192, 0.0, cache_dtype=fp8)
    yield attention_case(kernels, "prefill", 1, 8192, 8192, 0.75)
    yield attention_case(kernels, "chunked prefill", 1, 2048, 16384, 0.0)
    yield from sampling_cases(kernels, 256, 128_256)
    yield from edit_cases(kernels, 256, 128_256)
    for rows in (1, 256, 8192):
        yield from small_cases(kernels, rows, 4096)
        yield rope_case(kernels, rows)
    yield merge_case(kernels, 64)
    for tokens in (1, 64, 4096):
        yield experts_case(kernels, tokens)
    yield from layer_cases(kernels)
    yield from latent_cases(kernels)
