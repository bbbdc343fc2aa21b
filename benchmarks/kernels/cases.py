"""What is timed: each case runs the same work through the kernels and through torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import Run
from kernels.attention_args import AttentionArgs
from kernels.interface import KernelSet, LinearLayer
from kernels.linear_factory import CodeFormat, CodeRows

BEYOND_CACHE_BYTES = 384 << 20
"""Bytes of weights to take turns with, so that no cache serves them."""


@dataclass(slots=True)
class Case:
    """One row of the table."""

    op: str
    shape: str
    variants: dict[str, Run]
    bytes: int = 0
    """Read and written by the kernels' variant; 0: not limited by memory."""
    flops: int = 0


def linear_cases(kernels: KernelSet, rows: list[int], n: int, k: int) -> Iterator[Case]:
    """Linear layers k -> n in each format."""
    for kind, dtype in FORMATS.items():
        weight = torch.randn(n, k).to(dtype)
        count = max(2, BEYOND_CACHE_BYTES // (n * k * 4))
        layers = [kernels.PackedLinear(weight, quantization=kind if kind in ROUNDED else None)
                  for _ in range(count)]  # fmt: skip
        dense = [weight.clone() for _ in range(count)] if kind not in ROUNDED else []
        yield from _rows_of(kind, layers, dense, rows, dtype)
    for kind, coding in CODINGS.items():
        if coding.kind in kernels.codings:
            layers = [
                _coded(kernels, n, k, coding) for _ in range(BEYOND_CACHE_BYTES // (n * k * 4))
            ]
            yield from _rows_of(kind, layers, [], rows, torch.float32)


def _rows_of(
    kind: str,
    layers: list[LinearLayer],
    dense: list[Tensor],
    rows: list[int],
    dtype: torch.dtype,
) -> Iterator[Case]:
    n, k = layers[0].out_features, layers[0].in_features
    for m in rows:
        x = torch.randn(m, k)
        variants = {"quire": _turns(layers, x)}
        if dense:
            variants["torch"] = _torch_linear(dense, x.to(dtype))
        yield Case(
            f"linear {kind}", f"{m} x {k} -> {n}", variants,
            bytes=layers[0].nbytes + 4 * m * (n + k), flops=2 * m * n * k,
        )  # fmt: skip


def _coded(kernels: KernelSet, n: int, k: int, coding: CodeFormat) -> LinearLayer:
    codes = torch.randint(0, 120 if coding.bits == 8 else 16, (n, k), dtype=torch.uint8)
    scales = torch.rand(n, -(-k // coding.group_size))
    return kernels.make_linear((n, k), [CodeRows(codes, scales)], coding)


FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
    "int4": torch.float32,
}
ROUNDED = ("int8", "int4")
CODINGS = {
    "fp8": CodeFormat("e4m3", 256),
    "e2m1": CodeFormat("e2m1", 32),
    "table of 16": CodeFormat("table", 64, tuple(n / 8 - 1 for n in range(16))),
}
"""Of checkpoints: FP8 with a scale a row, MXFP4, nf4."""


def _turns(layers: list[LinearLayer], x: Tensor) -> Run:
    return lambda turn: layers[turn % len(layers)](x)


def _torch_linear(weights: list[Tensor], x: Tensor) -> Run:
    return lambda turn: torch.nn.functional.linear(x, weights[turn % len(weights)])


def attention_cases(kernels: KernelSet) -> Iterator[Case]:
    """Prefill, a chunk behind a long prefix, and decode."""
    for name, sequences, heads, kv_heads, size in (
        ("prefill", [(512, 512)], 12, 4, 64),
        ("prefill", [(2048, 2048)], 32, 8, 64),
        ("chunk", [(512, 4096)], 32, 8, 128),
        ("decode", [(1, 4096)] * 8, 16, 8, 128),
        ("decode", [(1, 8192)], 32, 8, 64),
        ("decode", [(1, 512)] * 32, 12, 4, 64),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            yield _attention(kernels, name, sequences, heads, kv_heads, size, dtype)


def _attention(
    kernels: KernelSet,
    name: str,
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
) -> Case:
    block_size = 16
    counts = [-(-length // block_size) for _, length in sequences]
    shape = (sum(counts), kv_heads, block_size, size)
    caches = [kernels.new_kv_cache(shape, dtype).normal_() for _ in range(2)]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    num_blocks = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[num_blocks : num_blocks + count]
        num_blocks += count
    q = torch.randn(sum(queries for queries, _ in sequences), heads, size)
    lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
    starts = torch.tensor([0, *(queries for queries, _ in sequences)]).cumsum(0).int()
    seen = sum(sum(range(length - n + 1, length + 1)) for n, length in sequences)
    decodes = all(queries == 1 for queries, _ in sequences)
    n, length = sequences[0]
    return Case(
        f"{name} {str(dtype).removeprefix('torch.')}",
        f"{len(sequences)} x {n} of {length}, {heads}/{kv_heads} x {size}",
        {
            "quire": lambda _: kernels.paged_attention(
                AttentionArgs(q, caches[0], caches[1], tables, lengths, starts, size**-0.5)
            ),
            "torch": _sdpa(q, sequences, kv_heads, dtype),
        },
        bytes=int(lengths.sum()) * 2 * kv_heads * size * dtype.itemsize if decodes else 0,
        flops=4 * heads * size * seen,
    )


def _sdpa(q: Tensor, sequences: list[tuple[int, int]], kv_heads: int, dtype: torch.dtype) -> Run:
    """Contiguous keys and values, repeated for each head beforehand: torch's best case."""
    n, length = sequences[0]
    batch, heads, size = len(sequences), q.shape[1], q.shape[2]
    queries = q.view(batch, n, heads, size).transpose(1, 2).to(dtype)
    keys, values = (torch.randn(batch, heads, length, size).to(dtype) for _ in range(2))
    mask = None
    if n > 1:
        positions = torch.arange(length - n, length)[:, None]
        mask = torch.arange(length)[None, :] <= positions
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda _: attend(queries, keys, values, attn_mask=mask)


def small_cases(kernels: KernelSet, rows: int, width: int) -> Iterator[Case]:
    """Norms, gates and sampling."""
    x, residual = torch.randn(rows, width), torch.randn(rows, width)
    weight, gated = torch.randn(width), torch.randn(rows, 2 * width)
    logits = torch.randn(rows, 32768)
    norm, silu = torch.nn.functional.rms_norm, torch.nn.functional.silu
    shape = f"{rows} x {width}"

    def add_and_norm(_: int) -> Tensor:
        residual.add_(x)
        return norm(residual, (width,), weight, 1e-6)

    pairs: list[tuple[str, str, Run, Run, int]] = [
        (
            "add_rms_norm", shape,
            lambda _: kernels.fused_add_rms_norm(x, residual, weight, 1e-6), add_and_norm,
            4 * x.nbytes,
        ),
        (
            "silu_and_mul", shape,
            lambda _: kernels.silu_and_mul(gated),
            lambda _: silu(gated[:, :width]) * gated[:, width:],
            3 * x.nbytes,
        ),
        (
            "argmax", f"{rows} x 32768",
            lambda _: kernels.argmax(logits), lambda _: logits.argmax(-1), logits.nbytes,
        ),
        (
            "sample p=0.9", f"{rows} x 32768", _sampler(kernels, logits), _torch_sampler(logits),
            logits.nbytes,
        ),
    ]  # fmt: skip
    for op, of, ours, torchs, size in pairs:
        yield Case(op, of, {"quire": ours, "torch": torchs}, bytes=size)


def _sampler(kernels: KernelSet, logits: Tensor) -> Run:
    rows = len(logits)
    settings = (
        torch.ones(rows), torch.full((rows,), 1 << 40), torch.full((rows,), 0.9).double(),
        torch.zeros(rows).double(), torch.rand(rows).double(),
    )  # fmt: skip
    return lambda _: kernels.sample(logits, *settings)


def _torch_sampler(logits: Tensor) -> Run:
    def run(_: int) -> Tensor:
        weights, ids = torch.softmax(logits, -1).sort(descending=True)
        weights[weights.cumsum(-1) - weights >= 0.9] = 0
        return ids.gather(1, torch.multinomial(weights, 1))

    return run


Suite = Callable[[KernelSet], Iterator[Case]]
SUITES: dict[str, Suite] = {
    "linear": lambda kernels: linear_cases(kernels, [1, 4, 8, 16, 32, 128, 512], 8192, 2048),
    "attention": attention_cases,
    "small": lambda kernels: (
        case for rows in (1, 16, 512) for case in small_cases(kernels, rows, 2048)
    ),
}
