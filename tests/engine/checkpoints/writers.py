"""Weights in the layouts of the formats, written from their documents: independent of the readers.

Each writer takes a float32 weight [N, K] and gives the tensors that a checkpoint keeps of it, by
what follows the layer's name, and the float32 weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 words [rows, ...] of integers [rows, n], bit after bit, the lowest first."""
    planes = (values[..., None].astype(np.int64) >> np.arange(bits)) & 1
    flat = planes.reshape(values.shape[0], -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    packed = np.packbits(flat.reshape(values.shape[0], -1, 8), axis=-1, bitorder="little")
    return packed.reshape(values.shape[0], -1).view("<i4")


def grid(
    weight: Tensor, bits: int, group: int, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [N, K], float16 scales and zero points [N, groups]."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    positions = torch.arange(columns) // group if order is None else order
    groups, max_code = int(positions.max()) + 1, (1 << bits) - 1
    values = torch.zeros(rows, columns)
    scales, zeros = torch.zeros(rows, groups), torch.zeros(rows, groups)
    for number in range(groups):
        part = weight[:, positions == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale = (2 * part.abs().amax(1) / max_code).half().float()
            zero = torch.full_like(scale, (max_code + 1) // 2)
        else:
            scale = ((high - low) / max_code).half().float()
            zero = (-low / scale).round().clamp(0, max_code)
        codes = (part / scale[:, None] + zero[:, None]).round().clamp(0, max_code)
        values[:, positions == number] = codes
        scales[:, number], zeros[:, number] = scale, zero
    return values, scales, zeros


def dequantize(values: Tensor, scales: Tensor, zeros: Tensor, index: Tensor) -> Tensor:
    return (values - zeros[:, index]) * scales[:, index]


def gptq(
    bits: int = 4, group: int = 32, symmetric: bool = True, sorted_: bool = False, version: int = 1
) -> Writer:
    def write(weight: Tensor) -> Written:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        positions = torch.arange(columns) // size
        if sorted_:
            positions = positions[
                torch.randperm(columns, generator=torch.Generator().manual_seed(5))
            ]
        values, scales, zeros = grid(weight, bits, group, symmetric, positions)
        stored_zeros = (zeros - (1 if version == 1 else 0)) % (1 << bits)
        tensors = {
            "qweight": torch.from_numpy(stream(values.numpy(), bits).copy()).T.contiguous(),
            "qzeros": torch.from_numpy(stream(stored_zeros.T.numpy(), bits).copy()),
            "scales": scales.T.half().contiguous(),
            "g_idx": positions.to(torch.int32),
        }
        return tensors, dequantize(values, scales, zeros, positions)

    return write


def awq(group: int = 32, bits: int = 4) -> Writer:
    order = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]

    def packed(values: Tensor) -> Tensor:  # [n, N] -> int32 [n, N * bits / 32]
        turned = values.view(len(values), -1, len(order))[..., order]
        return torch.from_numpy(stream(turned.flatten(1).numpy(), bits).copy())

    def write(weight: Tensor) -> Written:
        positions = torch.arange(weight.shape[1]) // group
        values, scales, zeros = grid(weight, bits, group, symmetric=False)
        tensors = {
            "qweight": packed(values.T.contiguous()),
            "qzeros": packed(zeros.T.contiguous()),
            "scales": scales.T.half().contiguous(),
        }
        return tensors, dequantize(values, scales, zeros, positions)

    return write


def fp8(
    kind: str,
    suffix: str = "weight_scale",
    block: int = 32,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Writer:
    largest = torch.finfo(dtype).max

    def write(weight: Tensor) -> Written:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "row": (1, columns), "block": (block, block)}[kind]
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        scales = blocks.abs().amax((1, 3)) / largest
        factors = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        values = (weight / factors).to(dtype)
        stored_scales = scales.flatten() if kind == "tensor" else scales
        return {"weight": values, suffix: stored_scales}, values.float() * factors

    return write


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [N, K / 2], the first of two in the low half, and what they stand for."""
    codes = (scaled[..., None] - _E2M1).abs().argmin(-1)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), _E2M1[codes]


def nvfp4(weight: Tensor) -> Written:
    """As ModelOpt keeps it."""
    groups = weight.unflatten(1, (-1, 16))
    overall = float(weight.abs().max()) / (448 * 6)
    scales = (groups.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
    factors = scales.float() * overall
    packed, values = e2m1(groups / factors.clamp(min=1e-12)[..., None])
    tensors = {
        "weight": packed.flatten(1),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(overall),
        "input_scale": torch.tensor(1.0),
    }
    return tensors, (values * factors[..., None]).flatten(1)


def packed_nvfp4(weight: Tensor) -> Written:
    """As compressed-tensors keeps it: the scale for all of them is its inverse."""
    parts, full = nvfp4(weight)
    tensors = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": 1 / parts["weight_scale_2"].reshape(1),
    }
    return tensors, full


def hqq(bits: int, group: int = 32) -> Writer:
    parts = {8: 1, 4: 2, 3: 10, 2: 4}[bits]

    def write(weight: Tensor) -> Written:
        rows, columns = weight.shape
        flat = weight.view(-1, group)
        low, high = flat.amin(1, True), flat.amax(1, True)
        scale = ((high - low) / ((1 << bits) - 1)).half().float()
        zero = (-low / scale).half().float()
        values = (flat / scale + zero).round().clamp(0, (1 << bits) - 1)
        padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % parts)).long()
        packed = torch.zeros(len(padded) // parts, group, dtype=torch.long)
        for part, rows_of in enumerate(padded.chunk(parts)):
            packed |= rows_of << (parts - 1 - part) * bits
        tensors = {
            "W_q": packed.to(torch.int32 if bits == 3 else torch.uint8),
            "scale": scale.half(),
            "zero": zero.half(),
            "shape": torch.tensor([rows, columns]),
            "nbits": torch.tensor([bits]),
            "group_size": torch.tensor([group]),
            "axis": torch.tensor(1),
        }
        return tensors, ((values - zero) * scale).view(rows, columns)

    return write


def squeezellm(weight: Tensor) -> Written:
    table = torch.stack([row.quantile(torch.linspace(0, 1, 16)) for row in weight]).half()
    codes = (weight[..., None] - table.float()[:, None]).abs().argmin(-1)
    words = torch.from_numpy(stream(codes.numpy(), 4).copy()).T.contiguous()
    return {"qweight": words, "lookup_table": table}, table.float().gather(1, codes)


def aqlm(weight: Tensor) -> Written:
    """Two codebooks of 256 vectors of 1 x 8, drawn at random."""
    draw = torch.Generator().manual_seed(3)
    rows, num_groups = weight.shape[0], weight.shape[1] // 8
    codes = torch.randint(0, 256, (rows, num_groups, 2), generator=draw)
    books = torch.randn(2, 256, 1, 8, generator=draw).half() * 0.1
    scales = torch.rand(rows, 1, 1, 1, generator=draw).half() + 0.5
    total = sum(books[book, codes[..., book], 0].float() for book in range(2))
    tensors = {"codes": (codes - 256 * (codes > 127)).to(torch.int8), "codebooks": books}
    return tensors | {"scales": scales}, total.flatten(1) * scales.view(rows, 1).float()


def bitsandbytes_int8(weight: Tensor) -> Written:
    top = weight.abs().amax(1)
    values = (weight * 127 / top[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": top, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * top[:, None] / 127


def mxfp4(weights: Tensor) -> Written:
    """Of experts [E, rows, K]: gpt-oss keeps `_blocks` and `_scales`."""
    groups = weights.unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-120, 120)
    packed, values = e2m1(groups / exponents.exp2()[..., None])
    tensors = {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}
    return tensors, (values * exponents.exp2()[..., None]).flatten(2)


def dense_mxfp4(weight: Tensor) -> Written:
    """As compressed-tensors keeps it."""
    parts, full = mxfp4(weight[None])
    packed = parts["_blocks"][0].flatten(1)
    return {"weight_packed": packed, "weight_scale": parts["_scales"][0]}, full[0]


def state_of(quant_state: dict[str, Any]) -> Tensor:
    """bitsandbytes' JSON as bytes."""
    return torch.tensor(list(json.dumps(quant_state).encode()), dtype=torch.uint8)
