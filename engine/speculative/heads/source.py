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

    def positive(self, key: str, default: float) -> float:
        """A number of config.json above 0."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self.wrong(f"{key} must be a positive number, got {value!r:.80}")
        return float(value)

    def whole_numbers(self, name: str, count: int) -> Tensor:
        """A tensor of so many whole numbers, int64."""
        if name not in self.weights:
            raise self.wrong(f"the checkpoint has no {name!r}")
        self.weights.mark_read([name])
        found = self.weights.stored(name).clone()
        if found.dtype not in (torch.int64, torch.int32) or tuple(found.shape) != (count,):
            raise self.wrong(f"{name!r} must be [{count}] whole numbers")
        return found.long()

    def same(self, key: str, size: int) -> None:
        """Raise `ModelLoadError` unless a size of config.json, where it has it, is the model's."""
        if self.whole(key, 1, default=size) != size:
            raise self.wrong(f"{key} is {self.config[key]}, the model's is {size}")

    def prefix(self, *known: str) -> str:
        """That of `known` which the checkpoint's names begin with, maybe behind `model.`; the
        first, where none does.
        """
        names = list(self.weights.names())
        found = (
            before + prefix
            for prefix in known
            for before in ("", "model.")
            if any(name.startswith(before + prefix) for name in names)
        )
        return next(found, known[0])

    @property
    def feeds(self) -> torch.dtype:
        """What linear layers are best given."""
        return self.ops.activation_dtype(self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """float32 [size], on the kernels' device."""
        return self.weights.get(name, (size,)).float().clone().to(self.ops.device)

    def linear(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> LinearLayer:
        """A linear layer, or a table of rows, of the weight [rows, columns]."""
        return self.pack(self.weights.matrix(name, (rows, columns)), bias)

    def stacked(self, parts: list[tuple[str, int]], columns: int) -> LinearLayer:
        """A linear layer of several weights over each other: names without `.weight`, and rows;
        with the biases that the checkpoint has.
        """
        matrices = [self.weights.matrix(f"{name}.weight", (rows, columns)) for name, rows in parts]
        biases = [
            self.vector(f"{name}.bias", rows)
            for name, rows in parts
            if f"{name}.bias" in self.weights
        ]
        if biases and len(biases) < len(parts):
            raise self.wrong(f"some of {', '.join(name for name, _ in parts)} have no bias")
        return self._packed(matrices, torch.cat(biases) if biases else None)

    def pack(self, matrix: Matrix | Tensor, bias: Tensor | None = None) -> LinearLayer:
        """The same of a weight that was read."""
        return self._packed([DenseMatrix(matrix) if isinstance(matrix, Tensor) else matrix], bias)

    def _packed(self, matrices: list[Matrix], bias: Tensor | None) -> LinearLayer:
        stack = Stack(matrices, None, self.weights.release, Scratch())
        layer = stack.pack(self.ops, bias, self.dtype, self.quantization, False)
        self.weights.release()
        self.nbytes += layer.nbytes
        return layer

    def wrong(self, why: str) -> ModelLoadError:
        """What is raised for a checkpoint that can't be used."""
        return ModelLoadError(f"{self.folder}: {why}.", param="model")
