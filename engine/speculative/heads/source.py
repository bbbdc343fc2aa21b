"""`HeadSource`: a checkpoint of heads, checked against the model that they are for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.weights import WeightReader
from engine.quantization.matrix import DenseMatrix, Matrix
from engine.quantization.scratch import Scratch
from engine.quantization.stack import Stack
from kernels import KernelSet, LinearLayer

#: Sizes beyond this are no model's.
_MOST = 1 << 20


@dataclass(slots=True)
class HeadSource:
    """Where heads are read from, and how they are kept.

    Attributes:
        folder, config: the checkpoint's, with its config.json.
        weights: its tensors.
        hidden_size, vocab_size: the model's.
        ops, dtype, quantization: how linear weights are kept.
        nbytes: of what was packed so far.
    """

    folder: Path
    config: dict[str, Any]
    weights: WeightReader
    hidden_size: int
    vocab_size: int
    ops: KernelSet
    dtype: torch.dtype
    quantization: str | None = None
    nbytes: int = 0

    def whole(self, key: str, low: int, high: int = _MOST, default: int | None = None) -> int:
        """A whole number of config.json. Raises `ModelLoadError` for one that isn't in range."""
        value = self.config.get(key, default)
        if value is None:
            raise self.wrong(f"config.json lacks {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(f"{key} must be a whole number in [{low}, {high}], got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, got {value!r:.80}")
        return value

    def same(self, key: str, size: int) -> None:
        """Raise `ModelLoadError` unless a size of config.json, where it has it, is the model's."""
        if self.whole(key, 1, default=size) != size:
            raise self.wrong(f"{key} is {self.config[key]}, the model's is {size}")

    def vector(self, name: str, size: int) -> Tensor:
        """float32 [size]."""
        return self.weights.get(name, (size,)).float().clone()

    def linear(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> LinearLayer:
        """A linear layer, or a table of rows, of the weight [rows, columns]."""
        return self.pack(self.weights.matrix(name, (rows, columns)), bias)

    def pack(self, matrix: Matrix | Tensor, bias: Tensor | None = None) -> LinearLayer:
        """The same of a weight that was read."""
        if isinstance(matrix, Tensor):
            matrix = DenseMatrix(matrix)
        stack = Stack([matrix], None, self.weights.release, Scratch())
        layer = stack.pack(self.ops, bias, self.dtype, self.quantization, False)
        self.weights.release()
        self.nbytes += layer.nbytes
        return layer

    def wrong(self, why: str) -> ModelLoadError:
        """What is raised for a checkpoint that can't be used."""
        return ModelLoadError(f"{self.folder}: {why}.", param="model")
