"""The weights of a GGUF file under the names that `transformers` has for them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.gguf import types
from engine.models.gguf.fused import Fused, fused_of
from engine.models.gguf.gathered import Gathered
from engine.models.gguf.matrix import GGUFMatrix
from engine.models.gguf.metadata import Metadata, heads_of
from engine.models.gguf.names import expert_of, gguf_name
from engine.models.gguf.parts import GGUFFiles
from engine.models.gguf.reader import TensorInfo
from engine.models.gguf.turns import bias_tensors, expert_tensors, in_turns
from engine.models.heap import SparingTrim, trim_heap
from engine.models.read_tally import ReadTally
from engine.quantization.matrix import Matrix

#: Of the tokenizer and of rotary embedding, which config.json has.
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Gated norms behind a state, which have no offset in any family.
_STATE_NORMS = (".mamba.norm.weight", ".linear_attn.norm.weight")


class GGUFWeights:
    """`Weights` of a GGUF file. Raises `ModelLoadError` for a file that isn't sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = GGUFFiles(path)
        header = self._files.header
        self._tensors = header.tensors
        self._values = Metadata(header)
        self._architecture, self._family = self._values.architecture, self._values.family
        self._heads = heads_of(header)
        self._read: set[str] = set()
        self._trim = SparingTrim()
        self._tally = ReadTally(sum(info.nbytes for info in self._tensors.values()))

    def __contains__(self, name: str) -> bool:
        fused = fused_of(name, self._values)
        stored = fused.stored if fused else (self._stored(expert_of(name)[0]),)
        return all(part in self._tensors for part in stored)

    def _stored(self, name: str) -> str:
        """The file's name of a tensor. Without experts the shared one is the MLP."""
        stored = gguf_name(name, self._architecture)
        shared = stored in self._tensors or ".shared_mlp." not in name
        return stored if shared else stored.replace("_shexp", "")

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A tensor of two dimensions, to be read some rows at a time. Raises as `get`."""
        if self._family.in_turns and (found := expert_tensors(name)):
            return self._expert_in_turns(*found, shape)
        if fused := fused_of(name, self._values):
            return self._gathered(fused, shape)
        return self._matrix(name, shape, shape)

    def _gathered(self, fused: Fused, shape: tuple[int, int]) -> Gathered:
        infos = [self._info(stored) for stored in fused.stored]
        parts = [
            self._made(info, (size, shape[1]), None)
            for info, size in zip(infos, fused.sizes, strict=True)
        ]
        if sum(fused.sizes) != shape[0]:
            raise ModelLoadError(
                f"{self.path}: {' and '.join(fused.stored)} have {sum(fused.sizes)} rows, "
                f"but the metadata asks for {shape[0]}.",
                param="model",
            )
        for info in infos:
            self._tally.add(info.name, info.nbytes)
        return Gathered(parts, *fused.places())

    def is_packed(self, name: str) -> bool:
        """Whether `matrix` gives one of the experts that checkpoints have as one tensor.

        `name` is the expert's, without `.weight`.
        """
        return self._family.in_turns and expert_tensors(f"{name}.weight") is not None

    def _expert_in_turns(self, names: list[str], expert: int, shape: tuple[int, int]) -> Matrix:
        rows = shape[0] // len(names)
        parts = []
        for stored in names:
            info = self._info(stored)
            parts.append(self._made(self._one_expert(info, expert), (rows, shape[1]), None))
            self._tally.add(f"{stored} {expert}", info.nbytes // info.shape[0])
        return parts[0] if len(parts) == 1 else in_turns(*parts)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in a float dtype.

        Raises `ModelLoadError` if it's absent or misshapen. The tensor may be backed by the mapped
        file: copy or convert it before keeping it.
        """
        if self._family.in_turns and (stored := bias_tensors(name)):
            rows = (shape[0], shape[1] // len(stored))
            biases = [self._made(self._info(part), rows, None) for part in stored]
            return torch.stack([bias.floats(slice(None)) for bias in biases], -1).flatten(1)
        matrix = self._matrix(name, shape, (shape[0], math.prod(shape[1:])))
        floats = matrix.floats(slice(None)).view(shape)
        if name.endswith(".A_log"):
            return self._logarithm(name, floats.float())
        offset = self._family.offset_norms and not name.endswith(_STATE_NORMS)
        if offset and name.endswith("norm.weight"):
            return floats.float() - 1.0  # kept as what norms multiply with
        return floats

    def _logarithm(self, name: str, decay: Tensor) -> Tensor:
        """Of rates of decay, which a file keeps as they are, below zero."""
        if not bool(((decay < 0) & decay.isfinite()).all()):
            raise ModelLoadError(
                f"{self.path}: {self._stored(name)!r} has values that aren't below zero.",
                param="model",
            )
        return decay.neg().log()

    def _matrix(self, name: str, shape: tuple[int, ...], as_rows: tuple[int, int]) -> GGUFMatrix:
        whole, expert = expert_of(name)
        stored = self._stored(whole)
        info = self._info(stored)
        info = info if expert is None else self._one_expert(info, expert)
        if info.shape != shape and _without_ones(info.shape, shape) == _without_ones(shape, shape):
            info = TensorInfo(info.name, shape, info.kind, info.offset, info.nbytes)
        if len(shape) == 1 and types.BLOCKS[info.kind].values > 1:
            raise ModelLoadError(f"{self.path}: {stored!r} is quantised.", param="model")
        self._tally.add(stored if expert is None else f"{stored} {expert}", info.nbytes)
        return self._made(info, shape, self._order(name, shape[0]), as_rows)

    def _info(self, stored: str) -> TensorInfo:
        info = self._tensors.get(stored)
        if info is None:
            raise ModelLoadError(f"{self.path} has no {stored!r}.", param="model")
        return info

    def _made(
        self,
        info: TensorInfo,
        shape: tuple[int, ...],
        order: Tensor | None,
        as_rows: tuple[int, int] | None = None,
    ) -> GGUFMatrix:
        """A tensor that must have this shape, as rows of another one."""
        if info.shape != shape:
            raise ModelLoadError(
                f"{self.path}: {info.name!r} has shape {info.shape}, "
                f"but the metadata asks for {shape}.",
                param="model",
            )
        self._read.add(info.name)
        return GGUFMatrix(
            self._files.file_of(info.name), info, as_rows or (shape[0], shape[1]), order
        )

    def _one_expert(self, info: TensorInfo, expert: int) -> TensorInfo:
        """That of a tensor [experts, rows, columns]."""
        count = info.shape[0]
        if len(info.shape) != 3 or expert >= count:
            raise ModelLoadError(
                f"{self.path}: {info.name!r} of shape {info.shape} has no expert {expert}.",
                param="model",
            )
        each = info.nbytes // count
        return TensorInfo(info.name, info.shape[1:], info.kind, info.offset + expert * each, each)

    def _order(self, name: str, rows: int) -> Tensor | None:
        """How queries' and keys' rows come back to the order of `transformers`.

        For Llama and its like GGUF keeps the rows of each head so that rotation pairs neighbours.
        """
        if not self._family.turned or ".self_attn." not in name:
            return None
        kind = name.rsplit(".", 2)[-2]
        heads = {"q_proj": self._heads[0], "k_proj": self._heads[1]}.get(kind)
        if heads is None:
            return None
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def release(self) -> None:
        """Give back the memory of what has been read; tensors stay valid."""
        self._files.release()
        self._trim()

    def unread(self) -> list[str]:
        """Names that nobody asked for."""
        return sorted(self._tensors.keys() - self._read - set(_IGNORED))

    def close(self) -> None:
        """Let the file go; tensors that are still held keep it."""
        self._tensors = {}
        trim_heap()


def _without_ones(found: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """What must be equal of two shapes: a vector may lie in rows, and sizes of 1 mean nothing."""
    return (math.prod(found),) if len(shape) == 1 else tuple(size for size in found if size > 1)
