"""`DraftHeads`: small networks that say, from one hidden state, what the next tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.checkpoints.safetensors import WeightReader
from engine.contract.errors import ModelLoadError
from engine.quantization.packing import DenseSource, LinearPacker, LoadBuffer, WeightSource
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler
from kernels import KernelSet, LinearLayer
from kernels.tensors import to_device

#: Sizes beyond this are no model's.
_MAX_SIZE = 1 << 20


@dataclass(slots=True)
class HeadCheckpoint:
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

    def integer(self, key: str, low: int, high: int = _MAX_SIZE, default: int | None = None) -> int:
        """A whole number of config.json. Raises `ModelLoadError` for one that isn't in range."""
        value = self.config.get(key, default)
        if value is None:
            raise self.error(f"config.json lacks {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{key} must be a whole number in [{low}, {high}], got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r:.80}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A number of config.json above 0."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self.error(f"{key} must be a positive number, got {value!r:.80}")
        return float(value)

    def integers(self, name: str, count: int) -> Tensor:
        """A tensor of so many whole numbers, int64."""
        if name not in self.weights:
            raise self.error(f"the checkpoint has no {name!r}")
        self.weights.mark_used([name])
        tensor = self.weights.stored(name).clone()
        if tensor.dtype not in (torch.int64, torch.int32) or tuple(tensor.shape) != (count,):
            raise self.error(f"{name!r} must be [{count}] whole numbers")
        return tensor.long()

    def same(self, key: str, size: int) -> None:
        """Raise `ModelLoadError` unless a size of config.json, where it has it, is the model's."""
        if self.integer(key, 1, default=size) != size:
            raise self.error(f"{key} is {self.config[key]}, the model's is {size}")

    def prefix(self, *prefixes: str) -> str:
        """That of `prefixes` which the checkpoint's names begin with, maybe behind `model.`; the
        first, where none does.
        """
        names = list(self.weights.names())
        matches = (
            model_prefix + prefix
            for prefix in prefixes
            for model_prefix in ("", "model.")
            if any(name.startswith(model_prefix + prefix) for name in names)
        )
        return next(matches, prefixes[0])

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
            raise self.error(f"some of {', '.join(name for name, _ in parts)} have no bias")
        return self._packed(matrices, torch.cat(biases) if biases else None)

    def pack(self, matrix: WeightSource | Tensor, bias: Tensor | None = None) -> LinearLayer:
        """The same of a weight that was read."""
        return self._packed([DenseSource(matrix) if isinstance(matrix, Tensor) else matrix], bias)

    def _packed(self, matrices: list[WeightSource], bias: Tensor | None) -> LinearLayer:
        stack = LinearPacker(matrices, None, self.weights.release, LoadBuffer())
        layer = stack.pack(self.ops, bias, self.dtype, self.quantization, False)
        self.weights.release()
        self.nbytes += layer.nbytes
        return layer

    def error(self, why: str) -> ModelLoadError:
        """What is raised for a checkpoint that can't be used."""
        return ModelLoadError(f"{self.folder}: {why}.", param="model")


def apply_linear(layer: LinearLayer, x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 of a linear layer that is best given `dtype`."""
    return layer(x.to(dtype)).float()


class DraftHeads(ABC):
    """Weights in their device's layout.

    Attributes:
        max_drafts: drafts of a sequence.
        nbytes: of the weights.
    """

    max_drafts: int
    nbytes: int

    @abstractmethod
    def start(self, hidden: Tensor) -> Tensor:
        """[n, any] of float32 [n, hidden], the states that the newest tokens were drawn from."""

    @abstractmethod
    def logits(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, vocab] of the draft number `depth`, from 0, and the next one's state.

        `state` is that of the draft before (a selection of its rows), or what `start` gave;
        `tokens` int64 [n]: the newest token of each row, drafts included.
        """


class DraftRounds(Protocol):
    """What heads say of some rows, one draft behind the other."""

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 [n, vocab] of each row's next draft, behind its newest token, int64 [n]."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these of the rows alone."""


class HeadRounds:
    """Of `DraftHeads`, which read nothing but the state that they begin with."""

    def __init__(self, heads: DraftHeads, hidden: Tensor) -> None:
        """`hidden`: float32 [n, hidden], from which the newest tokens were drawn."""
        self._heads, self._state, self._depth = heads, heads.start(hidden), 0

    def logits(self, tokens: Tensor) -> Tensor:
        """See `DraftRounds`."""
        logits, self._state = self._heads.logits(self._depth, self._state, tokens)
        self._depth += 1
        return logits

    def keep(self, rows: list[int]) -> None:
        """See `DraftRounds`."""
        self._state = self._state[rows]


class HeadSampler:
    """Draws from heads' logits as the model draws from its own: with each sequence's parameters
    and, at each place, the same random number.
    """

    def __init__(self, sampler: Sampler, ends: Iterable[int], device: torch.device) -> None:
        """`sampler`: nobody else's. `ends`: tokens behind which no draft stands. `device`: of the
        heads.
        """
        self._sampler, self._ends, self._device = sampler, frozenset(ends), device

    @torch.inference_mode()
    def draw(
        self,
        rounds: DraftRounds,
        tokens: list[int],
        states: list[RequestSamplingState],
        counts: list[int],
    ) -> list[list[int]]:
        """At most `counts[i]` drafts of row i.

        Args:
            rounds: of the heads, over n rows.
            tokens: [n] the newest ones.
            states: of the sequences, with these tokens; they get the drafts.
            counts: [n], >= 1, at most as many as the heads have.
        """
        drafts: list[list[int]] = [[] for _ in counts]
        rows = list(range(len(counts)))
        for _ in range(max(counts)):
            newest = torch.tensor([(drafts[row] or [tokens[row]])[-1] for row in rows])
            logits = rounds.logits(to_device(newest, self._device))
            drawn = self._sampler.sample(logits, [states[row] for row in rows]).token_ids.tolist()
            going = []
            for index, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                if token < 0:  # nothing can be drawn
                    continue
                drafts[row].append(token)
                states[row].output_token_ids.append(token)
                if len(drafts[row]) < counts[row] and token not in self._ends:
                    going.append(index)
            if not going:
                break
            if len(going) < len(rows):
                rows = [rows[index] for index in going]
                rounds.keep(going)
        return drafts
