"""Experts of gpt-oss: checkpoints have rows of gate and up in turns, GGUF keeps them apart."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.gguf.matrix import GGUFMatrix
from engine.quantization.checkpoint.bits import row_numbers
from engine.quantization.matrix import Plain, Rows
from kernels.interface import Integers

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)#(\d+)\.weight")
_BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)_bias")
_PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def expert_tensors(name: str) -> tuple[list[str], int] | None:
    """The file's tensors that a checkpoint's tensor of one expert is made of, and its number."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, kind, expert = match.groups()
    return [f"blk.{layer}.{part}.weight" for part in _PARTS[kind]], int(expert)


def bias_tensors(name: str) -> list[str]:
    """The same of the biases of all experts; none for another name."""
    match = _BIAS.fullmatch(name)
    if match is None:
        return []
    layer, kind = match.groups()
    return [f"blk.{layer}.{part}.bias" for part in _PARTS[kind]]


class InTurns(Plain):
    """A `Matrix` of rows of two others in turns."""

    def __init__(self, first: GGUFMatrix, second: GGUFMatrix) -> None:
        self._parts = first, second
        self.shape = (first.shape[0] * 2, first.shape[1])
        self.row_bytes = max(first.row_bytes, second.row_bytes)
        sources = dict.fromkeys((first.source, second.source))
        self.source = ", ".join(sources)
        self.stored_bits = max(first.stored_bits, second.stored_bits)
        self.quantized = first.quantized or second.quantized
        self.integers = first.integers if first.integers == second.integers else None

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`."""
        return self._taken(rows, lambda part, at: [part.floats(at)])[0]

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        if self.integers is None:
            raise ValueError(f"{self.source} has no format of the kernels")
        whole: list[Integers] = []

        def read(part: GGUFMatrix, at: Tensor) -> list[Tensor]:
            whole.append(part.as_integers(at))
            found = whole[-1].values, whole[-1].scales, whole[-1].second
            return [tensor for tensor in found if tensor is not None]

        values, scales, *second = self._taken(rows, read)
        minima, zeros = (
            second[0] if second and getattr(whole[0], kind) is not None else None
            for kind in ("minima", "zeros")
        )
        return Integers(values, scales, minima, zeros)

    def _taken(
        self, rows: Rows, read: Callable[[GGUFMatrix, Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """What `read` gives of some rows of each part, in the order of `rows`."""
        numbers = row_numbers(rows, self.shape[0])
        places = [(numbers % 2 == turn).nonzero().flatten() for turn in (0, 1)]
        read_of = [
            (at, read(part, numbers[at] // 2))
            for part, at in zip(self._parts, places, strict=True)
            if len(at)
        ]
        found = []
        for tensors in zip(*(tensors for _, tensors in read_of), strict=True):
            dtype = torch.promote_types(tensors[0].dtype, tensors[-1].dtype)
            out = torch.empty((len(numbers), tensors[0].shape[1]), dtype=dtype)
            for (at, _), tensor in zip(read_of, tensors, strict=True):
                out[at] = tensor.to(dtype)
            found.append(out)
        return found
