"""Sparse weights and Marlin's orders, as their authors' programs write them."""

from __future__ import annotations

import numpy as np
import torch
from compressed_tensors.utils.permutations_24 import get_permutations_24
from torch import Tensor

from tests.engine.checkpoints.writers import Writer, Written


def two_of_four(weight: Tensor) -> Tensor:
    """The weight without the two smaller of each four neighbours."""
    fours = weight.view(-1, 4)
    retained_tensor = torch.zeros_like(fours, dtype=torch.bool)
    retained_tensor.scatter_(1, fours.abs().topk(2, 1).indices, True)
    return (fours * retained_tensor).view(weight.shape)


def _rounded(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0, float16 scales [N, groups], and what both stand for."""
    parts = weight.view(len(weight), -1, group or weight.shape[1])
    middle = 1 << (bits - 1)
    scales = (parts.abs().amax(-1) / (middle - 0.5)).half()
    signed = (parts / scales[..., None].float()).round().clamp(-middle, middle - 1)
    baseline_view = (signed * scales[..., None].float()).view(weight.shape)
    return signed.view(weight.shape) + middle, scales, baseline_view


def _packed(values: Tensor, order: Tensor, bits: int) -> Tensor:
    """Integers [K, N] as words of tiles."""
    depth, width = values.shape
    tiles = values.view(depth // 16, 16, width // 16, 16).transpose(1, 2)
    ordered = tiles.reshape(-1, order.numel())[:, order].view(depth // 16, -1).numpy()
    factor = 32 // bits
    words = np.zeros((len(ordered), ordered.shape[1] // factor), np.uint32)
    for index in range(factor):
        words |= ordered[:, index::factor].astype(np.uint32) << np.uint32(bits * index)
    return torch.from_numpy(words.view(np.int32))


def marlin(group: int | None) -> Writer:
    """IST-DASLab's dense layout of 4 bits."""
    order: list[int] = []
    for lane in range(32):
        first = [
            16 * row + lane // 4 + 8 * half
            for half in (0, 1)
            for row in (2 * (lane % 4) + extra for extra in (0, 1, 8, 9))
        ]
        order += [index + 256 * tile for tile in range(4) for index in first]
    positions = np.array(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()

    def write(weight: Tensor) -> Written:
        values, scales, baseline = _rounded(weight, 4, group)
        by_group = scales.T.contiguous()
        if len(by_group) > 1:
            of_scales = [i + 8 * j for i in range(8) for j in range(8)]
        else:
            of_scales = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        by_group = by_group.view(-1, len(of_scales))[:, of_scales].view(by_group.shape)
        words = _packed(values.T.contiguous(), torch.from_numpy(positions), 4)
        workspace = torch.zeros(len(weight) // 128 * 8, dtype=torch.int32)
        return {"B": words, "s": by_group, "workspace": workspace}, baseline

    return write


def _in_cutlass_order(signed: Tensor) -> tuple[Tensor, Tensor]:
    """The two of four that are kept [N, K / 2], and int16 [K / 32, 2 N] that says which."""
    rows, columns = signed.shape
    fours = signed.view(-1, 4)
    # Where fewer than two aren't zero, the third and the fourth come first.
    rank = 10 * (fours != 0) + torch.tensor([0, 0, 2, 1])
    values = rank.topk(2, 1).indices.sort(1).values
    retained_view = fours.gather(1, values).view(rows, columns // 2)
    shifts = torch.tensor([0, 4, 8, 12])
    codes = (values[:, 0] | values[:, 1] << 2).view(rows, columns // 16, 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns // 16)
    index = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
    # The words of a square of two by two: those beside its diagonal change places.
    upper, lower = (index % 2 == 0) & (column % 2 == 1), (index % 2 == 1) & (column % 2 == 0)
    index, column = index + upper.int() - lower.int(), column - upper.int() + lower.int()
    words = torch.zeros(rows * columns // 16, dtype=torch.int64)
    words[column // 2 * rows * 2 + index * 2 + column % 2] = (codes << shifts).sum(-1)
    return retained_view, words.to(torch.int16).view(columns // 32, 2 * rows)


def marlin_24(bits: int, group: int | None, names: tuple[str, str, str]) -> Writer:
    """The 2:4 sparse layout, as compressed-tensors 0.9 wrote it, by its permutations."""
    order, of_scales, _ = get_permutations_24(bits)

    def write(weight: Tensor) -> Written:
        values, scales, baseline = _rounded(two_of_four(weight), bits, group)
        middle = 1 << (bits - 1)
        ordered, meta = _in_cutlass_order(values - middle)
        words = _packed((ordered + middle).T.contiguous(), order, bits)
        by_group = scales.T.contiguous()
        if len(by_group) > 1:
            by_group = by_group.view(-1, len(of_scales))[:, of_scales].view(by_group.shape)
        return dict(zip(names, (words, by_group, meta), strict=True)), baseline

    return write


def bitmask(dtype: torch.dtype, *, fours: bool, scaled: bool = False) -> Writer:
    """compressed-tensors' masks; `fours`: two of four are kept, as rows of one length."""

    def write(weight: Tensor) -> Written:
        sparse = two_of_four(weight)
        scales = sparse.abs().amax(1, keepdim=True) / 100 if scaled else torch.ones(1)
        stored = (sparse / scales).to(dtype)
        if dtype == torch.int8:
            stored = (sparse / scales).round().to(dtype)
        baseline = stored.float() * scales
        mask = sparse != 0 if fours else baseline != 0
        raw = stored.view(torch.uint8) if dtype.itemsize == 1 else stored
        values = raw[mask].view(dtype)
        packed = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
        parts = {"bitmask": packed, "shape": torch.tensor(weight.shape)}
        if fours:
            parts |= {"compressed": values.view(len(weight), -1), "shape": parts["shape"][:, None]}
        else:
            counts = mask.sum(1)
            parts |= {"compressed": values, "row_offsets": counts.cumsum(0) - counts}
        return {**parts, **({"weight_scale": scales} if scaled else {})}, baseline

    return write
