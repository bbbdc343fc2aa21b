"""What is timed of attention over latents: the attention itself, and the layers of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.gpu_case import GpuCase, compare
from kernels.attention_args import MlaArgs
from kernels.interface import KernelSet
from kernels.reference import ReferenceKernels


def latent_case(
    kernels: KernelSet, name: str, sequences: int, queries: int, length: int, heads: int,
    sizes: tuple[int, int] = (512, 64), page: int = 64,
) -> GpuCase:  # fmt: skip
    """`sizes`: of a latent, and of what is rotated beside it."""
    device, latent, size = kernels.device, sizes[0], sum(sizes)
    blocks = -(-length // page)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    order = torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks)
    args = MlaArgs(
        q=torch.randn(sequences * queries, heads, size, **options),
        cache=torch.randn(sequences * blocks, 1, page, size, **options),
        latent=latent,
        block_tables=order.contiguous(),
        seq_lens=torch.full((sequences,), length, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(sequences + 1, dtype=torch.int32, device=device) * queries,
        scale=size**-0.5,
    )
    args.out = args.new_out()

    def check() -> None:
        wide = replace(args, q=args.q.float(), cache=args.cache.float(), out=None)
        compare(kernels.mla_attention(args), ReferenceKernels.mla_attention(wide), 1e-2)

    seen = sequences * sum(range(length - queries + 1, length + 1))
    decode = queries <= 8
    return GpuCase(
        f"latent {name}",
        f"{sequences} x {queries} of {length}, {heads} heads, {latent} + {sizes[1]}",
        lambda: kernels.mla_attention(args),
        check,
        bytes=sequences * length * size * 2 if decode else 0,
        flops=2 * heads * (size + latent) * seen,
    )


def heads_case(
    kernels: KernelSet, rows: int, heads: int, columns: int = 512, depth: int = 128
) -> GpuCase:
    """A layer [columns, depth] for each head, as it takes keys into queries."""
    options: dict[str, Any] = {"device": kernels.device, "dtype": torch.bfloat16}
    weights = torch.randn(heads, columns, depth, **options)
    layers = kernels.head_linears([kernels.PackedLinear(weight) for weight in weights])
    x, out = (
        torch.randn(rows, heads, depth, **options),
        torch.empty(rows, heads, columns, **options),
    )

    def check() -> None:
        layers(x, out)
        compare(out, torch.einsum("thk,hnk->thn", x.float(), weights.float()), 1e-2)

    return GpuCase(
        "latent heads",
        f"{rows} rows, {heads} x [{columns}, {depth}]",
        lambda: layers(x, out),
        check,
        bytes=weights.nbytes,
        flops=2 * rows * weights.numel(),
    )


def latent_cases(kernels: KernelSet, small: bool = False) -> Iterator[GpuCase]:
    """DeepSeek V2 Lite's heads and V3's, or small ones that only prove that the cases run."""
    if small:
        yield latent_case(kernels, "decode", 2, 1, 40, 3, (16, 16), 16)
        yield latent_case(kernels, "prefill", 1, 20, 40, 3, (16, 16), 16)
        yield heads_case(kernels, 3, 2, 16, 24)
        return
    for heads in (16, 128):
        yield latent_case(kernels, "decode", 64, 1, 8192, heads)
        yield latent_case(kernels, "decode", 1, 1, 32768, heads)
        yield latent_case(kernels, "prefill", 1, 4096, 4096, heads)
        for rows in (1, 64, 4096):
            yield heads_case(kernels, rows, heads)
