"""Linear layers whose weights stay quantized in GPU memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.interface import IntegerRows, LinearLayer
from kernels.linear_factory import restore_column_order
from kernels.reference.linear import dequantize, quantize
from kernels.tensors import describe
from kernels.triton.launch import INTERPRETED, Target, launch, target_of
from kernels.triton.moe.grouped_gemm import Groups
from kernels.triton.quantized.activations import (
    E4M3_MAX,
    library_multiplies,
    round_groups,
    round_rows,
    scaled_product,
)
from kernels.triton.quantized.kernels import (
    fp8_product_kernel,
    int4_few_rows_kernel,
    int4_product_kernel,
    int8_product_kernel,
)
from kernels.triton.quantized.tile_sizes import (
    ProductTile,
    counters,
    depth_splits,
    four_bit_tile,
    narrowed,
    product_tile,
)

FP8_DEPTH = 32 if INTERPRETED else 128
INT4_BYTES = 32 if INTERPRETED else 64
"""Bytes of a row of four-bit weights that are unpacked together, at least a group."""
FEW_ROWS = 16
"""Maximum rows for which unpacking four-bit weights is most of a product's work."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows that are multiplied by one of several matrices each.

    Attributes:
        groups: the rows sorted by matrix.
        shared: number of consecutive rows with the same row of x.
        scales: float32 factors of the rows' results; None for 1.
    """

    groups: Groups
    shared: int
    scales: Tensor | None


class QuantizedLinear(LinearLayer):
    """A linear layer of a quantized format.

    `rows` doesn't check ids, since that would wait for the GPU.
    """

    bias: Tensor | None
    packed_tensors: tuple[str, ...]
    """Names of the attributes that are its tensors or None."""
    narrows_tile: bool = False
    """Whether layers with few columns get narrower tiles; otherwise products of few rows split the
    depth.
    """
    fixed_tile: int = 0
    """The number of rows for which tiles are chosen; 0 for the actual number."""
    order: Tensor | None = None
    """int64 [K], the index of the value of x for each column of the weights; None for x's own
    order.
    """

    def sort_inputs(self, order: Tensor) -> None:
        """Multiply column i of the weights by value order[i] of x."""
        self.order = order
        self.nbytes += order.nbytes

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in (*self.packed_tensors, "order")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in _FLOATS:
            raise ValueError(f"x {describe(x)} doesn't go with {self.in_features} columns")
        if self.order is not None:
            x = x.index_select(1, self.order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        shape = (len(x), self.out_features)
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out {describe(out)} must be contiguous {list(shape)}")
        self._multiply(x, out, None)
        return out

    def sorted_product(self, x: Tensor, by: SortedRows, dtype: torch.dtype) -> Tensor:
        """Return [rows of `by`, N] for rows with one matrix each; this layer's tensors are
        [matrices, ...].
        """
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in _FLOATS:
            raise ValueError(f"x {describe(x)} doesn't go with {self.in_features} columns")
        if len(x) * by.shared != by.groups.rows:
            raise ValueError(f"x {describe(x)} doesn't go with {by.groups.rows} sorted rows")
        out = torch.empty((by.groups.rows, self.out_features), dtype=dtype, device=x.device)
        self._multiply(x if x.stride(1) == 1 else x.contiguous(), out, by)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        # Rows that are padded to whole groups are cut to K columns.
        return restore_column_order(self._rows(ids), self.order).contiguous()

    @abstractmethod
    def _rows(self, ids: Tensor) -> Tensor:
        """Return rows in the weights' own order of columns."""

    @abstractmethod
    def _multiply(self, x: Tensor, out: Tensor, by: SortedRows | None) -> None:
        """Write the product of x, whose rows are contiguous, to `out`."""

    def _cut(
        self, rows: int, by: SortedRows | None, device: torch.device
    ) -> tuple[ProductTile, tuple[int, ...]]:
        """Return the tile, and the grid of `rows_and_columns`."""
        if by is not None:
            tile = self._fitted(product_tile(by.groups.tile), by.groups.tile, None)
            return tile, (triton.cdiv(self.out_features, tile.columns), len(by.groups.group))
        counted = self.fixed_tile or rows
        tile = self._fitted(product_tile(counted), counted, target_of(device))
        blocks = triton.cdiv(rows, tile.rows) * triton.cdiv(self.out_features, tile.columns)
        return tile, (blocks,)

    def _fitted(self, tile: ProductTile, rows: int, target: Target | None) -> ProductTile:
        """Adapt the tile to the layer; `target` is None for sorted rows."""
        if target is None or not self.narrows_tile:
            return tile
        return narrowed(tile, target, self.out_features)


def _group_tensors(by: SortedRows | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if by is None else (by.groups.order, by.groups.group, by.scales)


def _forms(by: SortedRows | None) -> dict[str, Any]:
    if by is None:
        return {"SHARED": 0, "SCALED": False}
    return {"SHARED": by.shared, "SCALED": by.scales is not None}


class Int8Linear(QuantizedLinear):
    """A layer with int8 weights and activations: weights have a float16 scale per group, and each
    step computes a scale for each group of a row's activations.
    """

    packed_tensors = ("values", "scales", "bias")
    narrows_tile = True

    def __init__(self, integers: IntegerRows, width: int, bias: Tensor | None) -> None:
        self.values = integers.values.contiguous()
        self.scales = integers.scales.half().t().contiguous()
        self.out_features, self.in_features = len(self.values), width
        self.group = self.values.shape[1] // len(self.scales)
        self.bias = bias
        self.nbytes = self.values.nbytes + self.scales.nbytes

    def _multiply(self, x: Tensor, out: Tensor, by: SortedRows | None) -> None:
        tile, grid = self._cut(len(x), by, x.device)
        integers, scales = round_groups(x, self.group)
        depth = max(32, triton.next_power_of_2(self.group))
        launch(
            int8_product_kernel, grid, out, integers, scales, self.values, self.scales, self.bias,
            *_group_tensors(by), len(out), COLUMNS=self.out_features, GROUPS=self.scales.shape[-2],
            GROUP=self.group, BM=tile.rows, BN=tile.columns, BK=depth,
            BIAS=self.bias is not None, **_forms(by), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _rows(self, ids: Tensor) -> Tensor:
        scales = self.scales[:, ids].t()
        return dequantize(self.values[ids], scales, None, 8)[:, : self.in_features]


class Int4Linear(QuantizedLinear):
    """A layer with four-bit weights, two per byte, and a float16 scale per group; activations
    aren't rounded.
    """

    packed_tensors = ("packed", "scales", "minima", "bias")

    def __init__(self, integers: IntegerRows, width: int, bias: Tensor | None) -> None:
        groups = integers.scales.shape[1]
        self.out_features, self.in_features = len(integers.values), width
        self.group = integers.values.shape[1] // groups
        self.bias = bias
        odd = groups % 2
        values = integers.values.view(self.out_features, groups, self.group).to(torch.uint8)
        paired = torch.nn.functional.pad(values, (0, 0, 0, odd))
        self.packed = (paired[:, 0::2] | paired[:, 1::2] << 4).flatten(1).contiguous()
        self.scales = self._pad_scales(integers.scales, odd)
        self.minima = None if integers.minima is None else self._pad_scales(integers.minima, odd)
        parts = (self.packed, self.scales, self.minima)
        self.nbytes = sum(part.nbytes for part in parts if part is not None)

    def _fitted(self, tile: ProductTile, rows: int, target: Target | None) -> ProductTile:
        fitted = four_bit_tile(tile, rows)
        return fitted if target is not None else replace(fitted, rows=tile.rows)

    @staticmethod
    def _pad_scales(scales: Tensor, odd: int) -> Tensor:
        return torch.nn.functional.pad(scales.half(), (0, odd)).t().contiguous()

    def _multiply(self, x: Tensor, out: Tensor, by: SortedRows | None) -> None:
        tile, grid = self._cut(len(x), by, x.device)
        spread = max(16, triton.next_power_of_2(self.group))
        tensors = (self.packed, self.scales, self.minima, self.bias)
        shape = (len(out), self.in_features, x.stride(0))
        options: dict[str, Any] = {
            "COLUMNS": self.out_features, "PAIRS": self.scales.shape[-2] // 2, "GROUP": self.group,
            "BM": tile.rows, "BN": tile.columns, "BIAS": self.bias is not None,
            "MINIMA": self.minima is not None, "PRECISION": _precision(x),
            "UPCAST": INTERPRETED and x.dtype == torch.bfloat16,
            "num_stages": tile.stages if x.element_size() == 2 else 2,
        }  # fmt: skip
        few = (self.fixed_tile or len(x)) <= FEW_ROWS if by is None else tile.rows <= FEW_ROWS
        if few or by is not None:
            splits = 1
            if by is None and not self.fixed_tile:
                splits = depth_splits(target_of(x.device), grid[0], options["PAIRS"])
                grid = (*grid, splits)
            partial = arrived = None
            if splits > 1:
                shape_of_all = (splits, *out.shape)
                partial = torch.empty(shape_of_all, dtype=torch.float32, device=x.device)
                arrived = counters(x.device)
            launch(
                int4_few_rows_kernel, grid, out, x, *tensors, *_group_tensors(by), partial, arrived,
                *shape, BK=spread, num_warps=tile.warps,
                SPLITS=splits, UNPADDED=self.in_features == 2 * options["PAIRS"] * self.group,
                ASSEMBLED=target_of(x.device).runs_ptx, **_forms(by), **options,
            )  # fmt: skip
            return
        launch(
            int4_product_kernel, grid, out, x, *tensors, *shape, SPREAD=spread,
            AT_ONCE=max(1, INT4_BYTES // spread), num_warps=tile.warps, **options,
        )  # fmt: skip

    def _rows(self, ids: Tensor) -> Tensor:
        packed = self.packed[ids].view(len(ids), -1, self.group)
        values = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
        minima = None if self.minima is None else self.minima[:, ids].t()
        return dequantize(values, self.scales[:, ids].t(), minima, 4)[:, : self.in_features]


class Fp8Linear(QuantizedLinear):
    """A layer with e4m3 weights and a scale per row, or per group of a row. On devices that
    multiply e4m3 (from 8.9 on) activations are rounded to e4m3, too, with a scale per token
    computed in each step.
    """

    packed_tensors = ("bits", "scales", "bias")
    narrows_tile = True
    by_library: bool = True
    """Whether to multiply many rows by the vendor's library, if it has such a product."""

    def __init__(self, bits: Tensor, scales: Tensor, bias: Tensor | None, group: int = 0) -> None:
        """`scales` float32 [N]; with a `group`, a power of two, [ceil(K / group), N]."""
        self.out_features, self.in_features = bits.shape
        self.bits, self.scales, self.bias, self.group = bits, scales, bias, group
        self.nbytes = bits.nbytes + scales.nbytes

    def _multiply(self, x: Tensor, out: Tensor, by: SortedRows | None) -> None:
        target = target_of(x.device)
        native = target.native_fp8
        eight, scales = native or INTERPRETED, None
        if eight:
            x, scales = round_rows(x)
        may_use_library = by is None and not self.fixed_tile and not self.group and self.by_library
        if (
            scales is not None
            and may_use_library
            and library_multiplies(len(x), self.bits, out.dtype, target)
        ):
            scaled_product(out, x, scales, self.bits, self.scales, self.bias)
            return
        tile, grid = self._cut(len(x), by, x.device)
        wide = x.dtype == torch.float32
        depth = 32 if wide else FP8_DEPTH
        if self.group:
            depth = min(depth, self.group)
        launch(
            fp8_product_kernel, grid, out, x, scales, self.bits, self.scales, self.bias,
            *_group_tensors(by), len(out), x.stride(0), COLUMNS=self.out_features,
            DEPTH=self.in_features, GROUP=self.group, BM=tile.rows, BN=tile.columns, BK=depth,
            BIAS=self.bias is not None, EIGHT=eight, NATIVE=native, PRECISION=_precision(x),
            UPCAST=INTERPRETED, PTX=target.runs_ptx, **_forms(by), num_warps=tile.warps,
            num_stages=2 if wide else tile.stages,
        )  # fmt: skip

    def _fitted(self, tile: ProductTile, rows: int, target: Target | None) -> ProductTile:
        """Narrow the tile for groups on 10.0, where a group's sums don't fit the registers beside
        the total.
        """
        crowded = target is not None and target.capability >= 100
        if crowded and self.group and tile.columns == 128:
            tile = replace(tile, columns=64)
        return super()._fitted(tile, rows, target)

    def _rows(self, ids: Tensor) -> Tensor:
        values = self.bits[ids].view(torch.float8_e4m3fn).float()
        if not self.group:
            return values * self.scales[ids, None]
        scales = self.scales[:, ids].t().repeat_interleave(self.group, 1)
        return values * scales[:, : self.in_features]


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def fp8_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 bits uint8 [N, K] and float32 scales [N]."""
    wide = weight.float()
    scales = wide.abs().amax(1) / E4M3_MAX
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (wide * inverse[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scales


def quantized_linear(
    slices: Iterable[Tensor], bias: Tensor | None, quantization: str, group: int
) -> QuantizedLinear:
    """Quantize a weight whose rows come in slices, on the device, and return its layer.

    `group` is for "int8" and "int4"; "fp8" has none.
    """
    parts, scales, width = [], [], 0
    for row_slice in slices:
        width = row_slice.shape[1]
        fp8 = quantization == "fp8"
        part, scale = fp8_weights(row_slice) if fp8 else quantize(row_slice, quantization, group)
        parts.append(part)
        scales.append(scale)
    tensors = torch.cat(parts), torch.cat(scales)
    if quantization == "fp8":
        return Fp8Linear(*tensors, bias)
    kind = Int8Linear if quantization == "int8" else Int4Linear
    return kind(IntegerRows(*tensors), width, bias)


def coded_linear(bits: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> Fp8Linear:
    """Return the layer of e4m3 uint8 [N, K] with a scale per `group` of a row, [N, groups].

    If all groups of each row have the same scale, as in most checkpoints, it is stored once. The
    scale of NaN weights becomes NaN, so that kernels needn't detect them.
    """
    broken = torch.nn.functional.pad((bits & 0x7F) == 0x7F, (0, -bits.shape[1] % group))
    broken = broken.view(*scales.shape, group).any(2)
    if bool((scales == scales[:, :1]).all()):
        return Fp8Linear(bits, scales[:, 0].masked_fill(broken.any(1), float("nan")), bias)
    group_scales = scales.masked_fill(broken, float("nan"))
    return Fp8Linear(bits, group_scales.t().contiguous(), bias, group)
