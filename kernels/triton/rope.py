"""QK norm, rotary embedding and the write to the KV cache, fused."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tensors import check_caches, check_rotary, check_vector, describe, token_stride
from kernels.triton.attention.paged import check_cache_scales
from kernels.triton.fp8 import KINDS, quantize
from kernels.triton.launch import launch

HEADS_AT_ONCE = 8
SCALING = {"none": 0, "tensor": 1, "token": 2, "head": 3}
"""Codes for `store_kv`."""


@triton.jit
def rotate(
    x, stride, token, heads, HEADS: tl.constexpr, norm, cos_sin, position, eps,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Return the heads of one token, normed and rotated, float32 [heads, PADDED].

    The rotation partner of each value is loaded as well, instead of exchanging registers: the GPU
    has it in its cache, and so the same code serves both layouts and any rotary width.
    """
    dims = tl.arange(0, PADDED)
    row_pointers = x + token * stride + heads[:, None] * HEAD_SIZE
    inside = (heads < HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    values = tl.load(row_pointers + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        if NEOX:
            partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
            angle = dims % HALF
            second = dims >= HALF
        else:
            partner = dims ^ 1
            angle = dims // 2
            second = dims % 2 == 1
        turned = dims < ROTARY
        partner = tl.where(turned, partner, dims)
        partner_values = tl.load(row_pointers + partner[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    if NORM:
        inverse = tl.rsqrt(tl.sum(values * values, 1) / HEAD_SIZE + eps)[:, None]
        weight = tl.load(norm + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
        values = values * inverse * weight[None, :]
        if ROTARY > 0:
            partner_weight = tl.load(norm + partner, mask=dims < HEAD_SIZE, other=0.0).to(
                tl.float32
            )
            partner_values = partner_values * inverse * partner_weight[None, :]
    if ROTARY > 0:
        row = cos_sin + position * ROTARY
        cosine = tl.load(row + angle, mask=turned, other=1.0)
        sine = tl.load(row + HALF + angle, mask=turned, other=0.0)
        sine = tl.where(second, sine, -sine)
        values = values * cosine[None, :] + partner_values * sine[None, :]
    return values


@triton.jit
def store_kv(
    values, cache, scales, slot, heads, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write float32 [heads, PADDED] to a slot.

    SCALES: 0 for none; 1 for a given scale per cache, 3 per KV head; 2 for a scale per token and
    head, which is computed and stored here.
    """
    dims = tl.arange(0, values.shape[1])
    offsets = ((slot // PAGE) * KV_HEADS + heads) * PAGE + slot % PAGE
    inside = (heads < KV_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    if SCALES == 1:
        values = values / tl.load(scales)
    elif SCALES == 3:
        values = values / tl.load(scales + heads, mask=heads < KV_HEADS, other=1.0)[:, None]
    elif SCALES == 2:
        scale = tl.max(tl.abs(values), 1) / LIMIT
        tl.store(scales + offsets, scale, mask=heads < KV_HEADS)
        values = values * tl.where(scale > 0, 1.0 / tl.maximum(scale, 1e-38), 0.0)[:, None]
    stored = quantize(values.to(tl.float32), KIND).to(cache.dtype.element_ty)
    tl.store(cache + offsets[:, None] * HEAD_SIZE + dims[None, :], stored, mask=inside)


@triton.jit
def rope_kernel(
    q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping, q_norm, k_norm,
    key_scales, value_scales, q_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    ROTARY: tl.constexpr, NEOX: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    PAGE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads + blocks of KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token)
    heads = tl.arange(0, BLOCK)
    dims = tl.arange(0, PADDED)
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    if block < QUERY_BLOCKS:
        mine = block * BLOCK + heads
        values = rotate(
            q, q_stride, token, mine, HEADS, q_norm, cos_sin, position, eps,
            HEAD_SIZE, PADDED, ROTARY, NEOX, Q_NORM,
        )  # fmt: skip
        # All partners must be read before any is overwritten.
        tl.debug_barrier()
        inside = (mine < HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
        to = q + token * q_stride + mine[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(to, values.to(q.dtype.element_ty), mask=inside)
    else:
        mine = (block - QUERY_BLOCKS) * BLOCK + heads
        keys = rotate(
            k, k_stride, token, mine, KV_HEADS, k_norm, cos_sin, position, eps,
            HEAD_SIZE, PADDED, ROTARY, NEOX, K_NORM,
        )  # fmt: skip
        tl.debug_barrier()
        inside = (mine < KV_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
        offsets = mine[:, None] * HEAD_SIZE + dims[None, :]
        rounded = keys.to(k.dtype.element_ty)
        tl.store(k + token * k_stride + offsets, rounded, mask=inside)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            values = tl.load(v + token * v_stride + offsets, mask=inside, other=0.0).to(tl.float32)
            store_kv(
                rounded.to(tl.float32), key_cache, key_scales, slot, mine,
                KV_HEADS, HEAD_SIZE, PAGE, KIND, SCALES, LIMIT,
            )  # fmt: skip
            store_kv(
                values, value_cache, value_scales, slot, mine,
                KV_HEADS, HEAD_SIZE, PAGE, KIND, SCALES, LIMIT,
            )  # fmt: skip


@triton.jit
def rope_latents_kernel(
    q, latents, positions, cos_sin, cache, slot_mapping, scales, q_stride, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    WIDTH: tl.constexpr, NEOX: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and write. Grid (tokens, blocks of query heads + 1); of queries only the rotated part
    is read.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token)
    if block < tl.num_programs(1) - 1:
        heads = block * BLOCK + tl.arange(0, BLOCK)
        part = tl.arange(0, WIDTH)
        turned = rotate(
            q, q_stride, token, heads, HEADS, q, cos_sin, position, 0.0, SIZE, WIDTH, ROTARY, NEOX,
            False,
        )  # fmt: skip
        # All partners must be read before any is overwritten.
        tl.debug_barrier()
        pointers = q + token * q_stride + heads[:, None] * SIZE + part[None, :]
        inside = (heads < HEADS)[:, None] & (part < SIZE)[None, :]
        tl.store(pointers, turned.to(q.dtype.element_ty), mask=inside)
    else:
        one = tl.arange(0, 1)
        dims = tl.arange(0, PADDED)
        values = rotate(
            latents, stride, token, one, 1, latents, cos_sin, position, 0.0, SIZE, PADDED, ROTARY,
            NEOX, False,
        )  # fmt: skip
        tl.debug_barrier()
        rounded = values.to(latents.dtype.element_ty)
        to = latents + token * stride + one[:, None] + dims[None, :]
        tl.store(to, rounded, mask=(dims < SIZE)[None, :])
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            store_kv(
                rounded.to(tl.float32), cache, scales, slot, one, 1, SIZE, PAGE, KIND, SCALES, LIMIT
            )


def rope_and_cache_latents(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    neox: bool = True,
    scales: Tensor | None = None,
) -> None:
    """See `KernelSet.rope_and_cache_mla`, and `rope_and_cache` for scales and checks."""
    tokens, heads, size = q.shape
    shape = check_caches(cache, cache, size)
    if latents.shape != (tokens, 1, size) or shape[1] != 1 or latents.dtype != q.dtype:
        raise ValueError(
            f"latents {describe(latents)} don't go with q {describe(q)} and a cache "
            f"{describe(cache)}"
        )
    check_vector("positions", positions, tokens, torch.int64)
    check_vector("slot_mapping", slot_mapping, tokens, torch.int64)
    _, rotary = check_rotary(cos_sin, size)
    kind, limit = _kind(cache)
    named = SCALING[check_cache_scales(cache, scales, scales)]
    block = min(HEADS_AT_ONCE, triton.next_power_of_2(max(heads, 1)))
    turned = triton.cdiv(heads, block) if rotary else 0
    launch(
        rope_latents_kernel, (tokens, turned + 1), q, latents, positions, cos_sin,
        cache.view(torch.uint8) if kind in (1, 2) else cache, slot_mapping, scales,
        token_stride(q), token_stride(latents), HEADS=heads, SIZE=size,
        PADDED=triton.next_power_of_2(size), ROTARY=rotary,
        WIDTH=triton.next_power_of_2(max(rotary, 2)), NEOX=neox, PAGE=shape[2], KIND=kind,
        SCALES=named, LIMIT=limit, BLOCK=block, num_warps=2,
    )  # fmt: skip


def _kind(cache: Tensor) -> tuple[int, float]:
    """Return the code of the cache's values (see `quantize`), and the largest value."""
    kind = 3 if cache.dtype == torch.int8 else KINDS.get(cache.dtype, 0)
    return kind, {0: 1.0, 1: 448.0, 2: 57344.0, 3: 127.0}[kind]


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    neox: bool = True,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """See `KernelSet.rope_and_cache`; positions and slots aren't checked on a GPU.

    fp8 caches have scales as in `paged_attention`: values are divided by the caller's scale of the
    cache or KV head, or a scale per token and head is computed and stored here.
    """
    tokens, heads, size = q.shape
    shape = check_caches(key_cache, value_cache, size)
    kv_heads, page = shape[1], shape[2]
    if k.shape != (tokens, kv_heads, size) or v.shape != k.shape:
        raise ValueError(
            f"k {describe(k)} and v {describe(v)} don't go with q {describe(q)} and the cache"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}")
    check_vector("positions", positions, tokens, torch.int64)
    check_vector("slot_mapping", slot_mapping, tokens, torch.int64)
    _, rotary = check_rotary(cos_sin, size)
    for weight in (q_norm_weight, k_norm_weight):
        if weight is not None and (weight.shape != (size,) or not weight.is_contiguous()):
            raise ValueError(f"norm weight {describe(weight)} doesn't fit heads of {size}")
    scales = check_cache_scales(key_cache, key_scales, value_scales)
    kind, limit = _kind(key_cache)
    if kind in (1, 2):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block = min(HEADS_AT_ONCE, triton.next_power_of_2(max(heads, kv_heads)))
    launch(
        rope_kernel, (tokens, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block)),
        q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping, q_norm_weight,
        k_norm_weight, key_scales, value_scales, token_stride(q), token_stride(k),
        token_stride(v), eps, HEADS=heads, KV_HEADS=kv_heads, HEAD_SIZE=size,
        PADDED=triton.next_power_of_2(size), ROTARY=rotary, NEOX=neox,
        Q_NORM=q_norm_weight is not None, K_NORM=k_norm_weight is not None, PAGE=page, KIND=kind,
        SCALES=SCALING[scales], LIMIT=limit, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
