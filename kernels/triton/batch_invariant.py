"""`InvariantTritonKernels`: a row's result has the same bits whatever else is in the batch.

Matrix units and libraries choose the order of their sums by the size of a batch. Here the tiles of
an operation don't depend on the number of rows, and a row is always summed in the same order: over
the keys of a sequence from the first on, and over the columns of a weight from the first on,
without splits. So the logits of a position are the same in its decode, in any chunk and beside any
other rows. The price is the speed of splits and of tiles for each phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import LinearLayer
from kernels.layers import PerHeadLinear
from kernels.linear_factory import RowSlice, WeightFormat
from kernels.tensors import describe
from kernels.triton.attention import latent_attention, paged_attention
from kernels.triton.kernel_set import TritonKernels
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.linear import BatchedHeadLinears, TorchLinear, check_heads
from kernels.triton.moe import fused_experts
from kernels.triton.quantized.linear import QuantizedLinear

ROWS = 64
"""Tiles are chosen as for this number of rows, whatever the actual number is."""
#: Rows, columns and depth of a tile, by bytes of an operand.
_TILES = {2: (64, 128, 64), 4: (32, 64, 32)}


@triton.jit(do_not_specialize=("rows",))
def linear_kernel(
    out, x, weight, bias, rows, x_stride, x_head, out_stride, out_head,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x weight^T + bias, summed from column 0 on. Grid (blocks of columns, blocks of rows, heads).

    The weights of the heads are stacked. WIDE converts operands to float32: those of different
    dtypes, or of a dtype that the interpreter can't multiply.
    """
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    row_mask, column_mask = row < rows, column < COLUMNS
    head = tl.program_id(2).to(tl.int64)
    lhs = x + head * x_head + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    rhs = weight + head * COLUMNS * DEPTH
    rhs += column.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, DEPTH, BK):
        inside = start + depth < DEPTH
        a = tl.load(lhs + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
        b = tl.load(rhs + start, mask=inside[:, None] & column_mask[None, :], other=0.0)
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column_mask, other=0.0)[None, :].to(tl.float32)
    to = out + head * out_head + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [T, heads, N] = x [T, heads, K] weight^T, with a weight per head or one [N, K] for one
    head.
    """
    columns, depth = weight.shape[-2:]
    wide = x.dtype != weight.dtype or (INTERPRETED and x.dtype == torch.bfloat16)
    floats = wide or x.dtype == torch.float32
    bm, bn, bk = (16, 32, 32) if INTERPRETED else _TILES[4 if floats else 2]
    rows, heads = x.shape[:2]
    launch(
        linear_kernel, (triton.cdiv(columns, bn), triton.cdiv(rows, bm), heads), out, x, weight,
        bias, rows, x.stride(0), x.stride(1), out.stride(0), out.stride(1), COLUMNS=columns,
        DEPTH=depth, BM=bm, BN=bn, BK=bk, BIAS=bias is not None, WIDE=wide,
        PRECISION="tf32x3" if floats else "tf32", num_warps=4, num_stages=2 if floats else 3,
    )  # fmt: skip


class InvariantHeadLinears(BatchedHeadLinears):
    """The linear layers of all heads, computed by `linear_kernel`."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        check_heads(x, out, self.weight)
        multiply(out, x, self.weight, None)


class InvariantLinear(TorchLinear):
    """A layer of float weights, computed by `linear_kernel` with one tile size."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x {describe(x)} doesn't go with {self.in_features} columns")
        x = x if x.stride(1) == 1 else x.contiguous()
        shape = (len(x), self.out_features)
        result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        if result.shape != shape or not result.is_contiguous():
            raise ValueError(f"out {describe(result)} must be contiguous {list(shape)}")
        weight = self.weight = self.weight.contiguous()
        multiply(result.unsqueeze(1), x.unsqueeze(1), weight, self.bias)
        return result


class InvariantTritonKernels(TritonKernels):
    """`TritonKernels` with tiles that don't depend on the batch.

    Norms, activations, rotary embedding, routing and sampling compute each row by itself anyway.
    """

    version = "batch-invariant"
    batch_invariant = True
    expert_rows = ROWS

    def __init__(self, device: torch.device | str, why: str) -> None:
        super().__init__(device, f"{why}; batch-invariant")

    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        added = None if bias is None else bias.to(self.device)
        if quantization is not None:
            return _pin_tile(self._quantized([weight], added, quantization, group_size))
        return InvariantLinear(weight.to(self.device), added, round_inputs=round_inputs)

    def make_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[RowSlice],
        form: WeightFormat,
        bias: Tensor | None = None,
    ) -> LinearLayer:
        return _pin_tile(super().make_linear(shape, slices, form, bias))

    def head_linears(self, layers: Sequence[LinearLayer]) -> PerHeadLinear:
        return InvariantHeadLinears(layers)

    paged_attention = staticmethod(partial(paged_attention, invariant=True))
    mla_attention = staticmethod(partial(latent_attention, invariant=True))
    fused_experts = staticmethod(partial(fused_experts, tile=ROWS))


def _pin_tile(layer: LinearLayer) -> LinearLayer:
    """Make a quantized layer use the tile for `ROWS` rows."""
    if isinstance(layer, QuantizedLinear):
        layer.fixed_tile = ROWS
    return layer
