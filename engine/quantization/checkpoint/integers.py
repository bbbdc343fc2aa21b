"""compressed-tensors' integers, packed into words or a byte each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.quantization.checkpoint.bits import (
    WORD,
    pack_factor,
    pick,
    pick_stream,
    unpack_columns,
    unpack_stream,
)
from engine.quantization.checkpoint.gptq import group_order
from engine.quantization.checkpoint.grouped import GroupedMatrix
from engine.quantization.checkpoint.schemes import WeightScheme
from engine.quantization.checkpoint.tensors import Parts
from engine.quantization.matrix import Matrix, Rows


def packed_matrix(parts: Parts, scheme: WeightScheme) -> Matrix:
    """`weight_packed`: counted from 0, so that 2^(bits - 1) stands for nothing."""
    bits = scheme.bits
    rows, columns = _packed_shape(parts, bits)
    words = parts.take("weight_packed", (torch.int32,))

    def values(at: Rows) -> Tensor:
        picked = words[at]
        if picked.shape[1] == -(-columns * bits // WORD) and WORD % bits:
            return unpack_stream(_padded(picked, bits), bits)[:, :columns]
        return unpack_columns(picked, bits, columns)

    group, groups, scales = _scales(parts, scheme, rows, columns)
    zeros: Callable[[Rows], Tensor] | int = 1 << (bits - 1)
    if not scheme.symmetric:
        zeros = _packed_zeros(parts, bits, rows, groups)
    elif "weight_zero_point" in parts:
        _refuse_others(parts, _packed_zeros(parts, bits, rows, groups), 1 << (bits - 1))
    return GroupedMatrix(
        f"compressed-tensors int{bits} g{group}",
        (rows, columns),
        group,
        bits,
        values,
        scales,
        zeros,
        _order(parts, columns, groups, group),
    )


def plain_matrix(parts: Parts, scheme: WeightScheme) -> Matrix:
    """`weight` int8."""
    rows, columns = parts.shape("weight", 2)
    stored = parts.take("weight", (torch.int8,))
    group, groups, scales = _scales(parts, scheme, rows, columns)
    name = f"compressed-tensors int8 g{group}"
    if scheme.symmetric:
        if "weight_zero_point" in parts:
            points = parts.take("weight_zero_point", (torch.int8,))
            _refuse_others(parts, _plain_zeros(parts, rows, groups, points, 0), 0)
        return GroupedMatrix(
            name, (rows, columns), group, 8, lambda at: stored[at], scales,
            group_of=_order(parts, columns, groups, group),
        )  # fmt: skip
    points = parts.take("weight_zero_point", (torch.int8,))
    return GroupedMatrix(
        name, (rows, columns), group, 8,
        lambda at: stored[at].to(torch.int32) + 128,
        scales,
        _plain_zeros(parts, rows, groups, points, 128),
        _order(parts, columns, groups, group),
    )  # fmt: skip


def _plain_zeros(
    parts: Parts, rows: int, groups: int, points: Tensor, middle: int
) -> Callable[[Rows], Tensor]:
    """Zero points int8, a byte each, counted from -`middle` on."""
    if points.numel() not in (1, rows * groups):
        raise parts.wrong("weight_zero_point", f"has shape {tuple(points.shape)}")
    shaped = points.reshape(-1, 1 if points.numel() == 1 else groups).expand(rows, groups)
    return lambda at: shaped[at].to(torch.int32) + middle


def _refuse_others(parts: Parts, zeros: Callable[[Rows], Tensor], middle: int) -> None:
    """Of a weight that config.json says has no zero points: those that are there stand for none."""
    if bool((zeros(slice(None)) != middle).any()):
        raise parts.wrong("weight_zero_point", "is there, but config.json says symmetric")


def _padded(words: Tensor, bits: int) -> Tensor:
    """With whole runs of `bits` words."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % bits))


def _packed_shape(parts: Parts, bits: int) -> tuple[int, int]:
    """What `weight_shape` says, held against the words that are there."""
    said = parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    rows, words = parts.shape("weight_packed", 2)
    columns = said[1]
    fitting = -(-columns * bits // WORD), -(-columns // pack_factor(bits))
    if said[0] != rows or columns < 1 or words not in fitting:
        raise parts.wrong(
            "weight_shape", f"says {tuple(said)}, but weight_packed is {(rows, words)} words"
        )
    return rows, columns


def _scales(parts: Parts, scheme: WeightScheme, rows: int, columns: int) -> tuple[int, int, Tensor]:
    """Group size, number of groups and scales [N, groups]."""
    group = min(scheme.group or columns, columns)
    groups = -(-columns // group)
    if scheme.block is not None:
        high, wide = scheme.block
        found = parts.scales("weight_scale", (-(-rows // high), -(-columns // wide)))
        return wide, found.shape[1], found.repeat_interleave(high, 0)[:rows]
    if scheme.group:
        return group, groups, parts.scales("weight_scale", (rows, groups))
    found = parts.scales("weight_scale", (rows, 1), (rows,), (1,), (1, 1), ())
    return group, 1, found.reshape(-1, 1).expand(rows, 1)


def _packed_zeros(parts: Parts, bits: int, rows: int, groups: int) -> Callable[[Rows], Tensor]:
    words = parts.take("weight_zero_point", (torch.int32, torch.int8))
    if words.dtype == torch.int8:  # one for the whole weight isn't packed
        return _plain_zeros(parts, rows, groups, words, 1 << (bits - 1))
    dense, loose = -(-rows * bits // WORD), -(-rows // pack_factor(bits))
    if words.dim() != 2 or words.shape[1] != groups or words.shape[0] not in (dense, loose):
        raise parts.wrong(
            "weight_zero_point",
            f"has shape {tuple(words.shape)}, not {(dense, groups)}",
        )
    if words.shape[0] == loose:
        return lambda at: pick(words.T, at, bits, rows).T
    stream = _padded(words.T, bits)
    return lambda at: pick_stream(stream, at, bits, rows).T


def _order(parts: Parts, columns: int, groups: int, group: int) -> Tensor | None:
    if "weight_g_idx" not in parts:
        return None
    found = parts.take("weight_g_idx", (torch.int32, torch.int64), (columns,))
    if bool((found == -1).all()):  # what was begun without being sorted
        return None
    return group_order(parts, "weight_g_idx", columns, groups, group)
