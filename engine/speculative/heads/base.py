"""`DraftHeads`: small networks that predict the next tokens from one hidden state."""

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

#: Maximum plausible size in a config.json.
_MAX_SIZE = 1 << 20


@dataclass(slots=True)
class HeadCheckpoint:
    """Source of heads' weights, and how they are stored.

    Attributes:
        folder, config: the checkpoint's folder, and its config.json.
        weights: its tensors.
        hidden_size, vocab_size: sizes of the model.
        ops, dtype, quantization: how linear weights are stored.
        nbytes: bytes of the weights packed so far.
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
        """Return an integer of config.json. Raises `ModelLoadError` if it is out of range."""
        value = self.config.get(key, default)
        if value is None:
            raise self.error(f"config.json lacks {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{key} must be a whole number in [{low}, {high}], got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r:.80}")
        return value

    def positive(self, key: str, default: float) -> float:
        """Return a positive number of config.json."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self.error(f"{key} must be a positive number, got {value!r:.80}")
        return float(value)

    def integers(self, name: str, count: int) -> Tensor:
        """Return an int64 tensor with a given number of integers."""
        if name not in self.weights:
            raise self.error(f"the checkpoint has no {name!r}")
        self.weights.mark_used([name])
        tensor = self.weights.stored(name).clone()
        if tensor.dtype not in (torch.int64, torch.int32) or tuple(tensor.shape) != (count,):
            raise self.error(f"{name!r} must be [{count}] whole numbers")
        return tensor.long()

    def same(self, key: str, size: int) -> None:
        """Raise `ModelLoadError` if config.json has this size and it isn't the model's."""
        if self.integer(key, 1, default=size) != size:
            raise self.error(f"{key} is {self.config[key]}, the model's is {size}")

    def prefix(self, *prefixes: str) -> str:
        """Return the prefix among `prefixes` that the tensor names have, perhaps after `model.`; by
        default the first one.
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
        """The dtype that linear layers expect as input."""
        return self.ops.activation_dtype(self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """Return a float32 vector [size] on the kernels' device."""
        return self.weights.get(name, (size,)).float().clone().to(self.ops.device)

    def linear(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> LinearLayer:
        """Return a linear layer, or a table of rows, with the weight [rows, columns]."""
        return self.pack(self.weights.matrix(name, (rows, columns)), bias)

    def stacked(self, parts: list[tuple[str, int]], columns: int) -> LinearLayer:
        """Return a linear layer of concatenated weights, given by names without `.weight` and by
        rows; with biases if the checkpoint has them.
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
        """Return a linear layer with a weight that was already read."""
        return self._packed([DenseSource(matrix) if isinstance(matrix, Tensor) else matrix], bias)

    def _packed(self, matrices: list[WeightSource], bias: Tensor | None) -> LinearLayer:
        stack = LinearPacker(matrices, None, self.weights.release, LoadBuffer())
        layer = stack.pack(self.ops, bias, self.dtype, self.quantization, False)
        self.weights.release()
        self.nbytes += layer.nbytes
        return layer

    def error(self, why: str) -> ModelLoadError:
        """Return the error for an unusable checkpoint."""
        return ModelLoadError(f"{self.folder}: {why}.")


def apply_linear(layer: LinearLayer, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a linear layer that expects `dtype`; return float32."""
    return layer(x.to(dtype)).float()


class DraftHeads(ABC):
    """Heads with weights in their device's layout.

    Attributes:
        max_drafts: maximum number of drafts per sequence.
        nbytes: bytes of the weights.
    """

    max_drafts: int
    nbytes: int

    @abstractmethod
    def start(self, hidden: Tensor) -> Tensor:
        """Return the initial state [n, any] from `hidden`, float32 [n, hidden]: the hidden states
        from which the newest tokens were sampled.
        """

    @abstractmethod
    def logits(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 [n, vocab], the logits of draft `depth` (from 0), and the next state.

        `state` is that of the previous draft (a selection of its rows) or from `start`; `tokens`
        int64 [n]: the newest token of each row, drafts included.
        """


class DraftRounds(Protocol):
    """Successive drafts of heads for some rows."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return float32 [n, vocab], the logits after each row's newest token; tokens int64 [n]."""

    def keep(self, rows: list[int]) -> None:
        """Continue with only these rows."""


class HeadRounds:
    """Rounds of `DraftHeads`, which depend only on the initial state and on the drafts."""

    def __init__(self, heads: DraftHeads, hidden: Tensor) -> None:
        """`hidden`: float32 [n, hidden] from which the newest tokens were sampled."""
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
    """Samples from heads' logits as the model samples from its own: with the same parameters and
    the same random number at each position.
    """

    def __init__(self, sampler: Sampler, ends: Iterable[int], device: torch.device) -> None:
        """`sampler`: not shared. `ends`: tokens after which drafting stops. `device`: device of the
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
        """Return at most `counts[i]` drafts of row i.

        Args:
            rounds: rounds of the heads over n rows.
            tokens: [n] newest tokens.
            states: sampling states, including these tokens; the drafts are appended to them.
            counts: [n], >= 1, at most the number that the heads support.
        """
        drafts: list[list[int]] = [[] for _ in counts]
        rows = list(range(len(counts)))
        for _ in range(max(counts)):
            newest = torch.tensor([(drafts[row] or [tokens[row]])[-1] for row in rows])
            logits = rounds.logits(to_device(newest, self._device))
            drawn = self._sampler.sample(logits, [states[row] for row in rows]).token_ids.tolist()
            going = []
            for index, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                if token < 0:  # sampling failed
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
