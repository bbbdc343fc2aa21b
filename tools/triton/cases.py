"""Calls that together launch every kernel in the forms that serving uses, without a device.

Tensors are "meta": they have shapes and dtypes and no data. `tools.triton.report` compiles what
the calls launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.interface import (
    ActivationSpec,
    ExpertLayers,
    LinearLayer,
    ScanInputs,
    ScanWeights,
    StateRows,
)
from kernels.logit_edits import PenaltyRows, TokenTable
from kernels.lora import EMBEDDING, EMBEDDING_ROWS, EXPERTS, LoraMapping, MoeLoraMapping
from kernels.triton import attention, rope, sampling, states
from kernels.triton import elementwise as norm
from kernels.triton import moe as grouped
from kernels.triton.batch_invariant import InvariantLinear
from kernels.triton.elementwise import gelu_and_mul, silu_and_mul
from kernels.triton.linear import TorchLinear
from kernels.triton.lora import TritonLoraSlots
from kernels.triton.moe.fused_moe import AddedToExperts
from kernels.triton.moe.grouped_gemm import tile_rows
from kernels.triton.quantized import Fp8Linear, GroupedExperts, quantized_linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUPS = {"int8": 128, "int4": 32, "fp8": 0}
Case = Callable[[], object]


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """int32 without data."""
    return empty(*shape, dtype=torch.int32)


def paged(
    sequences: int,
    queries: int,
    *,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    size: int = 128,
    page: int = 16,
    heads: tuple[int, int] = (32, 8),
    scales: str = "none",
    features: bool = False,
    window: bool = False,
    spans: bool = False,
    invariant: bool = False,
) -> None:
    """Attention of `sequences` times `queries` tokens in a context of 8192."""
    kv = empty(4096, heads[1], page, size, dtype=cache or dtype)
    scale = {"none": None, "tensor": empty(1), "token": empty(*kv.shape[:3])}[scales]
    more: dict[str, Any] = {}
    if window:
        more = {"sliding_window": 4096, "sinks": empty(heads[0])}
    if spans:
        more = {"sliding_window": 4096, "visible_ends": ints(sequences * queries)}
    if features:
        more = {
            "sliding_window": 4096, "soft_cap": 50.0, "sinks": empty(heads[0]),
            "alibi_slopes": empty(heads[0]),
        }  # fmt: skip
    attention.paged_attention(
        AttentionArgs(
            empty(sequences * queries, heads[0], size, dtype=dtype),
            kv,
            kv,
            ints(sequences, 8192 // page),
            ints(sequences),
            ints(sequences + 1),
            size**-0.5,
            key_scales=scale,
            value_scales=scale,
            **more,
        ),
        invariant=invariant,
    )


def rotary(dtype: torch.dtype, cache: torch.dtype, scales: str, *, norms: bool, neox: bool) -> None:
    """Rotation and cache write of 64 tokens."""
    kv = empty(4096, 8, 16, 128, dtype=cache)
    scale = {"none": None, "tensor": empty(1), "token": empty(*kv.shape[:3])}[scales]
    weight = empty(128) if norms else None
    longs = empty(64, dtype=torch.int64)
    rope.rope_and_cache(
        empty(64, 32, 128, dtype=dtype), empty(64, 8, 128, dtype=dtype),
        empty(64, 8, 128, dtype=dtype), longs, empty(8192, 128), kv, kv, longs,
        q_norm_weight=weight, k_norm_weight=weight, neox=neox, key_scales=scale,
        value_scales=scale,
    )  # fmt: skip


def sampled() -> None:
    """Sampling from 256 x 128k logits, with all edits and log probabilities."""
    rows, vocab = 256, 128_256
    logits, longs = empty(rows, vocab), empty(rows, dtype=torch.int64)
    doubles = empty(rows, dtype=torch.float64)
    edits, floats = sampling.TritonLogitEdits(), empty(rows)
    edits.mask_tokens(logits, longs, longs)
    edits.add_bias(logits, longs, longs, floats)
    edits.apply_bitmask(logits, longs, ints(rows, -(-vocab // 32)), empty(rows, dtype=torch.bool))
    table = TokenTable(ints(rows, 2048), ints(rows, 2048))
    edits.update_token_table(table, ints(4, rows))
    penalized = PenaltyRows(ints(rows), ints(rows), floats, floats, floats)
    edits.apply_penalties(logits, penalized, table, ints(rows))
    sampling.sample(logits, empty(rows), longs, doubles, doubles, doubles)
    sampling.argmax(logits)
    sampling.token_logprobs(logits, longs)


def experts(tokens: int, dtype: torch.dtype) -> None:
    """A mixture of 128 experts, 8 a token."""
    weights, ids = grouped.route(empty(tokens, 128, dtype=dtype), 8)
    grouped.fused_experts(
        empty(tokens, 2048, dtype=dtype), empty(128, 1536, 2048, dtype=dtype),
        empty(128, 2048, 768, dtype=dtype), weights, ids,
    )  # fmt: skip


def quantized_experts(quantization: str, tokens: int) -> None:
    """The same in few bits, of one layer's shapes."""

    def layer(rows: int, columns: int) -> LinearLayer:
        return quantized_linear([empty(rows, columns)], None, quantization, GROUPS[quantization])

    up, down = layer(1536, 2048), layer(2048, 768)
    experts = ExpertLayers(
        router=TorchLinear(empty(128, 2048, dtype=BF16), None), gate_up=[up] * 128,
        down=[down] * 128, top_k=8, softmax_first=True, renormalize=True,
        activation=ActivationSpec(),
    )  # fmt: skip
    GroupedExperts(_Gates, experts)(empty(tokens, 2048, dtype=BF16))


class _Gates:
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)


def latent(sequences: int, heads: int, queries: int = 1, *, cache: torch.dtype = BF16) -> None:
    """Attention over DeepSeek's latents, in a context of 8192."""
    cache_rows = empty(4096, 1, 64, 576, dtype=cache)
    attention.latent_attention(
        MlaArgs(
            q=empty(sequences * queries, heads, 576, dtype=BF16),
            cache=cache_rows,
            latent=512,
            block_tables=ints(sequences, 128),
            seq_lens=ints(sequences),
            query_start_loc=ints(sequences + 1),
            scale=0.1,
            scales=empty(*cache_rows.shape[:3]) if cache == torch.int8 else None,
        )
    )


def adapters(rows: int, dtype: torch.dtype = BF16) -> None:
    """LoRA of rank 16 of a fused QKV layer [6144, 4096] and of an embedding, with 8 adapters."""
    key = (0, "qkv")
    slots_by_key = {key: 3, (1, EMBEDDING): 1, (1, EMBEDDING_ROWS): 0}
    slots = TritonLoraSlots(slots_by_key, 8, 16, dtype, torch.device("meta"))
    tiles = slots.max_tiles(rows)
    mapping = LoraMapping(ints(tiles * slots.tile(rows)), ints(tiles), ints(1))
    slots.add(key, empty(rows, 6144, dtype=dtype), empty(rows, 4096, dtype=dtype), mapping)
    slots.embed(1, empty(rows, 4096), empty(rows, dtype=torch.int64), mapping)


def adapted_experts(tokens: int) -> None:
    """LoRA of rank 16 of both products of 128 experts, 8 of them a token, with 8 adapters."""
    slots_by_key = {(0, EXPERTS["up"]): 2, (0, EXPERTS["down"]): 1}
    slots = TritonLoraSlots(slots_by_key, 8, 16, BF16, torch.device("meta"), experts=128)
    tiles, rows = slots.max_tiles(tokens), 8 * tokens
    mapping = LoraMapping(ints(tiles * slots.tile(tokens)), ints(tiles), ints(1))
    groups = grouped.align(ints(rows), 128, tile_rows(rows, 128))
    adding = AddedToExperts(MoeLoraMapping(slots, 0, mapping), groups, tokens, 8)
    adding.up(empty(rows, 1536, dtype=BF16), empty(tokens, 2048, dtype=BF16))
    adding.down(empty(rows, 2048), empty(rows, 768, dtype=BF16))


def product(quantization: str, rows: int, dtype: torch.dtype = BF16) -> None:
    """A layer [6144, 4096] in few bits."""
    layer = quantized_linear([empty(6144, 4096)], empty(6144), quantization, GROUPS[quantization])
    layer(empty(rows, 4096, dtype=dtype))


def block_product(rows: int) -> None:
    """The same in e4m3 with scales for blocks of 128 columns, as checkpoints have it."""
    bits = empty(6144, 4096, dtype=torch.uint8)
    Fp8Linear(bits, empty(32, 6144), empty(6144), 128)(empty(rows, 4096, dtype=BF16))


def dense_product(rows: int, dtype: torch.dtype) -> None:
    """A layer [6144, 4096] of floats, batch-invariant."""
    layer = InvariantLinear(empty(6144, 4096, dtype=dtype), empty(6144, dtype=dtype))
    layer(empty(rows, 4096, dtype=dtype))


def small() -> None:
    """Norms and gates."""
    x = empty(64, 4096, dtype=BF16)
    norm.rms_norm(x, empty(4096), 1e-5)
    norm.fused_add_rms_norm(x, x, empty(4096), 1e-5)
    silu_and_mul(empty(64, 28672, dtype=BF16))
    gelu_and_mul(empty(64, 28672, dtype=BF16), "tanh")
    state, lse = empty(64, 32, 128, dtype=BF16), empty(64, 32)
    attention.merge_attention_states(state, lse, state, lse)


def around_latents() -> None:
    """Rotation of DeepSeek V3's queries and latents with the write, and routing by groups."""
    longs = empty(64, dtype=torch.int64)
    rope.rope_and_cache_latents(
        empty(64, 128, 576, dtype=BF16), empty(64, 1, 576, dtype=BF16), longs, empty(8192, 64),
        empty(4096, 1, 64, 576, dtype=BF16), longs, neox=False,
    )  # fmt: skip
    grouped.route(
        empty(64, 256, dtype=BF16), 8, sigmoid=True, choice_bias=empty(256), groups=8,
        top_groups=4, group_best=2,
    )  # fmt: skip


def of_encoder(size: int, dtype: torch.dtype = BF16, reach: int = 0) -> None:
    """Attention of two pictures of 1,024 patches, side by side in a fused product."""
    q, k, v = empty(2048, 3, 16, size, dtype=dtype).unbind(1)
    attention.encoder_attention(q, k, v, 1024, reach=reach)


def scans(stored: torch.dtype = F32) -> None:
    """A prompt that is saved on its way, by layers of Mamba 1 and 2, Qwen3-Next and Kimi Linear."""
    rows, tokens, sequences = 65, 512, 4
    of = StateRows(
        ints(sequences + 1),
        empty(sequences, dtype=torch.int64),
        empty(2, 2, dtype=torch.int64),
    )
    x = empty(tokens, 2048, dtype=BF16)
    states.causal_conv(x, empty(rows, 3, 2048), empty(4, 2048), empty(2048), of)
    states.diagonal_scan(x, x, empty(rows, 2048), of)
    for heads, key_heads, value, key, by_key in (
        (4096, 1, 1, 16, "decay"),
        (64, 1, 64, 128, ""),
        (32, 16, 128, 128, "delta"),
        (32, 32, 128, 128, "rate"),
    ):
        delta = by_key in ("delta", "rate")
        rates = (heads, key) if by_key == "rate" else (heads,)
        keys = empty(tokens, key_heads, key, dtype=BF16)
        rate = empty(tokens, *rates, dtype=BF16)
        states.linear_scan(
            ScanInputs(
                keys,
                keys,
                empty(tokens, heads, value, dtype=BF16),
                rate,
                empty(tokens, heads, dtype=BF16) if delta else None,
            ),
            ScanWeights(
                empty(heads, key) if by_key == "decay" else empty(heads),
                empty(*rates),
                None if delta else empty(heads),
                delta=delta,
            ),
            empty(rows, heads, value, key, dtype=stored),
            of,
            empty(rows, heads, value) if stored == torch.int8 else None,
        )


CASES: dict[str, Case] = {
    "states": scans,
    "states bf16": lambda: scans(BF16),
    "states int8": lambda: scans(torch.int8),
    "decode bf16 head 64": lambda: paged(64, 1, size=64),
    "decode bf16 head 128": lambda: paged(64, 1),
    "decode bf16 head 128, one sequence": lambda: paged(1, 1),
    "decode bf16 head 128, 4 tokens": lambda: paged(64, 4),
    "decode bf16 head 128, 8 tokens": lambda: paged(64, 8),
    "decode bf16 head 128, 9 tokens": lambda: paged(64, 9),
    "decode bf16 head 256, all features": lambda: paged(64, 1, size=256, features=True),
    "decode bf16 head 128, page 128": lambda: paged(64, 1, page=128),
    "decode bf16, e4m3 KV, a scale": lambda: paged(64, 1, cache=E4M3, scales="tensor"),
    "decode fp16, e5m2 KV": lambda: paged(64, 1, dtype=F16, cache=E5M2),
    "decode bf16, int8 KV": lambda: paged(64, 1, cache=torch.int8, scales="token"),
    "decode fp32": lambda: paged(64, 1, dtype=F32),
    "decode bf16 head 128, groups of 48": lambda: paged(64, 1, heads=(48, 1)),
    "decode bf16 head 64, groups of 71": lambda: paged(64, 1, size=64, heads=(71, 1)),
    "decode bf16 head 128, groups of 128": lambda: paged(64, 1, heads=(128, 1)),
    "prefill bf16 head 128, groups of 128": lambda: paged(1, 8192, heads=(128, 1)),
    "prefill bf16 head 64": lambda: paged(1, 8192, size=64),
    "prefill bf16 head 128": lambda: paged(1, 8192),
    "prefill bf16 head 64, window and sinks": lambda: paged(1, 8192, size=64, window=True),
    "prefill bf16 head 128, window and sinks": lambda: paged(1, 8192, window=True),
    "prefill bf16 head 128, a short prompt": lambda: paged(1, 300),
    "prefill bf16 head 256": lambda: paged(1, 8192, size=256),
    "prefill bf16 head 256, window and spans": lambda: paged(1, 8192, size=256, spans=True),
    "prefill bf16 head 256, e4m3 KV": lambda: paged(1, 8192, size=256, cache=E4M3, scales="tensor"),
    "prefill bf16 head 128, all features": lambda: paged(1, 8192, features=True),
    "prefill bf16, e4m3 KV, a scale": lambda: paged(1, 8192, cache=E4M3, scales="tensor"),
    "prefill bf16, e4m3 KV, scales by token": lambda: paged(1, 8192, cache=E4M3, scales="token"),
    "prefill fp32": lambda: paged(1, 8192, dtype=F32),
    "latent bf16, 16 heads": lambda: latent(64, 16),
    "latent bf16, 128 heads": lambda: latent(64, 128),
    "latent bf16, 16 heads, 4 tokens": lambda: latent(64, 16, 4),
    "latent bf16, 16 heads, prefill": lambda: latent(1, 16, 8192),
    "latent bf16, 128 heads, prefill": lambda: latent(1, 128, 8192),
    "latent bf16, e4m3 KV": lambda: latent(64, 16, cache=E4M3),
    "latent bf16, int8 KV": lambda: latent(64, 16, cache=torch.int8),
    "latents: rotation, groups": around_latents,
    "batch-invariant attention bf16": lambda: paged(1, 8192, features=True, invariant=True),
    "batch-invariant product bf16": lambda: dense_product(64, BF16),
    "batch-invariant product fp32": lambda: dense_product(64, F32),
    "encoder bf16 head 64": lambda: of_encoder(64),
    "encoder bf16 head 72": lambda: of_encoder(72),
    "encoder bf16 head 80, windows": lambda: of_encoder(80, reach=64),
    "encoder fp32 head 64": lambda: of_encoder(64, F32),
    "rope bf16": lambda: rotary(BF16, BF16, "none", norms=False, neox=True),
    "rope bf16, norms, e4m3 KV": lambda: rotary(BF16, E4M3, "tensor", norms=True, neox=False),
    "rope bf16, int8 KV": lambda: rotary(BF16, torch.int8, "token", norms=True, neox=True),
    "norms, gates, merge": small,
    "sampling": sampled,
    "experts bf16, decode": lambda: experts(64, BF16),
    "experts bf16, prefill": lambda: experts(4096, BF16),
    "experts int8, decode": lambda: quantized_experts("int8", 64),
    "experts int8, prefill": lambda: quantized_experts("int8", 4096),
    "experts int4, decode": lambda: quantized_experts("int4", 64),
    "experts int4, prefill": lambda: quantized_experts("int4", 4096),
    "experts fp8, decode": lambda: quantized_experts("fp8", 64),
    "experts fp8, prefill": lambda: quantized_experts("fp8", 4096),
    "lora bf16, decode": lambda: adapters(64),
    "lora bf16, prefill": lambda: adapters(4096),
    "lora f32": lambda: adapters(64, F32),
    "lora of experts bf16, decode": lambda: adapted_experts(64),
    "lora of experts bf16, prefill": lambda: adapted_experts(4096),
    "int8 product, decode": lambda: product("int8", 16),
    "int8 product, 64 rows": lambda: product("int8", 64),
    "int8 product, prefill": lambda: product("int8", 4096),
    "int4 product, 8 rows": lambda: product("int4", 8),
    "int4 product, decode": lambda: product("int4", 16),
    "int4 product, 64 rows": lambda: product("int4", 64),
    "int4 product, prefill": lambda: product("int4", 4096),
    "fp8 product, decode": lambda: product("fp8", 16),
    "fp8 product, 64 rows": lambda: product("fp8", 64),
    "fp8 product by blocks, decode": lambda: block_product(16),
    "fp8 product by blocks, 64 rows": lambda: block_product(64),
    "fp8 product by blocks, prefill": lambda: block_product(4096),
    "fp8 product, prefill": lambda: product("fp8", 4096, F16),
}
"""Each case launches one kernel or a few."""

CORE = (
    "decode bf16 head 128, one sequence",
    "decode bf16, e4m3 KV, a scale",
    "prefill bf16 head 128",
    "latent bf16, 16 heads",
    "latent bf16, 16 heads, prefill",
    "latents: rotation, groups",
    "encoder bf16 head 72",
    "batch-invariant product bf16",
    "rope bf16, norms, e4m3 KV",
    "norms, gates, merge",
    "sampling",
    "states",
    "experts bf16, decode",
    "lora bf16, decode",
    "lora of experts bf16, decode",
    "int8 product, decode",
    "int4 product, decode",
    "int4 product, 64 rows",
    "fp8 product, decode",
)
"""Cases that between them launch every kernel once."""
