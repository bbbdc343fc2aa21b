"""The weights of a GGUF file under their names in `transformers`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoints.gguf import file as types
from engine.checkpoints.gguf.block_formats import FORMATS, READERS
from engine.checkpoints.gguf.file import GGUFFiles, Metadata, TensorInfo, heads_of
from engine.checkpoints.gguf.names import expert_of, gguf_name
from engine.checkpoints.safetensors import MappedFile, PeriodicTrim, ReadProgress, trim_heap
from engine.contract.errors import ModelLoadError
from engine.quantization.formats.matrices import row_numbers
from engine.quantization.packing import DequantizedSource, Rows, WeightSource
from kernels.interface import IntegerRows

# -- Weights that are one tensor in checkpoints and several in GGUF.


_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_DELTA = re.compile(r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight")


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """The composition of a checkpoint's tensor from a file's.

    Attributes:
        stored: names of the file's tensors.
        sizes: the number of rows that each of them must have.
        row_sources: returns each row's tensor and its row there; int64 [rows] each.
    """

    stored: tuple[str, str]
    sizes: tuple[int, int]
    row_sources: Callable[[], tuple[Tensor, Tensor]]


def fused_of(name: str, values: Metadata) -> FusedTensor | None:
    """Return the composition of a checkpoint's tensor; None if it is one tensor in the file."""
    if match := _SHARED.fullmatch(name):
        return _gate_and_up(f"blk.{match.group(1)}.", values)
    match = _DELTA.fullmatch(name)
    if match is None or values.has(f"blk.{match.group(1)}.ssm_in.weight"):
        return None
    return _by_key_head(f"blk.{match.group(1)}.", values)


def _gate_and_up(prefix: str, values: Metadata) -> FusedTensor:
    """Granite's MLP; with experts it is the shared one, which every token passes."""
    kind = "" if values.has(f"{prefix}ffn_gate.weight") else "_shexp"
    gate, up = (f"{prefix}ffn_{part}{kind}.weight" for part in ("gate", "up"))
    info = values.header.tensors.get(gate)
    size = 0 if info is None else info.shape[0]

    def row_sources() -> tuple[Tensor, Tensor]:
        rows = torch.arange(2 * size)
        return rows // size, rows % size

    return FusedTensor((gate, up), (size, size), row_sources)


def _by_key_head(prefix: str, values: Metadata) -> FusedTensor:
    """Qwen3-Next: checkpoints have query, key, values and gates of each key head in turn; a file
    has all queries, all keys and all values, and separate gates.
    """
    heads, key = values.count("ssm.group_count"), values.count("ssm.state_size")
    wide, keys = values.count("ssm.inner_size") // heads, heads * key

    def row_sources() -> tuple[Tensor, Tensor]:
        by_key = torch.arange(keys).view(heads, key)
        by_value = torch.arange(heads * wide).view(heads, wide)
        row_of = torch.cat((by_key, keys + by_key, 2 * keys + by_value, by_value), dim=1)
        gates = torch.arange(row_of.shape[1]) >= 2 * key + wide
        return gates.long().repeat(heads), row_of.flatten()

    stored = f"{prefix}attn_qkv.weight", f"{prefix}attn_gate.weight"
    return FusedTensor(stored, (2 * keys + heads * wide, heads * wide), row_sources)


# -- A tensor of a GGUF file as a `WeightSource`.


_FLOATS = {types.F32: torch.float32, types.F16: torch.float16, types.BF16: torch.bfloat16}
#: Temporary bytes for reading a value of a quantized block: integers, floats, copies of both.
_READ_BYTES = 32


class GGUFMatrix(DequantizedSource):
    """Rows of a tensor, permuted by `order` (int64 [N]) unless that is None."""

    def __init__(
        self, file: MappedFile, info: TensorInfo, shape: tuple[int, int], order: Tensor | None
    ) -> None:
        block = types.BLOCKS[info.kind]
        self.shape = shape
        self.row_bytes = shape[1] * (_READ_BYTES if info.kind in READERS else block.nbytes)
        dtype = _FLOATS.get(info.kind)
        # Floats are named as those of other checkpoints are, so that they may stay as they are.
        self.source = str(dtype or types.name_of(info.kind)).removeprefix("torch.")
        self.bits = 8 * block.nbytes // block.values
        self.quantized = info.kind in READERS
        self.integers = FORMATS.get(info.kind)
        self._kind, self._order = info.kind, order
        if dtype is None:
            blocks = (shape[0], shape[1] // block.values, block.nbytes)
            self._raw = file.tensor(info.offset, torch.uint8, blocks)
        else:
            self._raw = file.tensor(info.offset, dtype, shape)

    def _of(self, rows: Rows) -> Tensor:
        return self._raw[rows if self._order is None else self._order[rows]]

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        raw = self._of(rows)
        return READERS[self._kind](raw).floats() if self.quantized else raw

    def as_integers(self, rows: Rows) -> IntegerRows:
        """See `WeightSource`."""
        if self.integers is None:
            raise ValueError(f"{types.name_of(self._kind)} has no format of the kernels")
        return READERS[self._kind](self._of(rows)).integers()


# -- A weight whose rows come from several tensors of a file.


class GatheredMatrix(DequantizedSource):
    """A `WeightSource` with rows of other sources.

    Args:
        parts: sources with the same number of columns.
        part_of, row_of: each row's part and its row there; int64 [N].
    """

    def __init__(self, parts: Sequence[GGUFMatrix], part_of: Tensor, row_of: Tensor) -> None:
        self._parts, self._part_of, self._row_of = parts, part_of, row_of
        self.shape = (len(row_of), parts[0].shape[1])
        self.row_bytes = max(part.row_bytes for part in parts)
        self.source = ", ".join(dict.fromkeys(part.source for part in parts))
        self.bits = max(part.bits for part in parts)
        self.quantized = any(part.quantized for part in parts)
        formats = {part.integers for part in parts}
        self.integers = formats.pop() if len(formats) == 1 else None

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        return self._gather(rows, lambda part, part_rows: [part.floats(part_rows)])[0]

    def as_integers(self, rows: Rows) -> IntegerRows:
        """See `WeightSource`."""
        if self.integers is None:
            raise ValueError(f"{self.source} has no format of the kernels")
        by_part: list[IntegerRows] = []

        def read(part: GGUFMatrix, part_rows: Tensor) -> list[Tensor]:
            by_part.append(part.as_integers(part_rows))
            tensors = by_part[-1].values, by_part[-1].scales, by_part[-1].second
            return [tensor for tensor in tensors if tensor is not None]

        values, scales, *second = self._gather(rows, read)
        minima, zeros = (
            second[0] if second and getattr(by_part[0], kind) is not None else None
            for kind in ("minima", "zeros")
        )
        return IntegerRows(values, scales, minima, zeros)

    def _gather(
        self, rows: Rows, read: Callable[[GGUFMatrix, Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """Read rows from their parts and return them in the order of `rows`."""
        numbers = row_numbers(rows, self.shape[0])
        part_of, row_of = self._part_of[numbers], self._row_of[numbers]
        positions_by_part = [
            (part_of == number).nonzero().flatten() for number in range(len(self._parts))
        ]
        read_of = [
            (positions, read(part, row_of[positions]))
            for part, positions in zip(self._parts, positions_by_part, strict=True)
            if len(positions)
        ]
        outputs = []
        for tensors in zip(*(tensors for _, tensors in read_of), strict=True):
            dtype = tensors[0].dtype
            for tensor in tensors[1:]:
                dtype = torch.promote_types(dtype, tensor.dtype)
            out = torch.empty((len(numbers), tensors[0].shape[1]), dtype=dtype)
            for (positions, _), tensor in zip(read_of, tensors, strict=True):
                out[positions] = tensor.to(dtype)
            outputs.append(out)
        return outputs


# -- Experts of gpt-oss: checkpoints interleave rows of gate and up, GGUF separates them.


_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)#(\d+)\.weight")
_BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)_bias")
_PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def expert_tensors(name: str) -> tuple[list[str], int] | None:
    """Return the file's tensors that form a checkpoint's tensor of an expert, and its number."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, kind, expert = match.groups()
    return [f"blk.{layer}.{part}.weight" for part in _PARTS[kind]], int(expert)


def bias_tensors(name: str) -> list[str]:
    """Return the same for the biases of all experts; empty for other names."""
    match = _BIAS.fullmatch(name)
    if match is None:
        return []
    layer, kind = match.groups()
    return [f"blk.{layer}.{part}.bias" for part in _PARTS[kind]]


def interleave_rows(first: GGUFMatrix, second: GGUFMatrix) -> GatheredMatrix:
    """Interleave the rows of two tensors."""
    rows = torch.arange(first.shape[0] * 2)
    return GatheredMatrix((first, second), rows % 2, rows // 2)


#: Tensors of the tokenizer and of rotary embedding, whose content is in config.json.
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Gated norms after a recurrent state, which have no offset in any family.
_STATE_NORMS = (".mamba.norm.weight", ".linear_attn.norm.weight")


class GGUFWeights:
    """`Weights` of a GGUF file. Raises `ModelLoadError` for an invalid file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = GGUFFiles(path)
        header = self._files.header
        self._tensors = header.tensors
        self._values = Metadata(header)
        self._architecture, self._family = self._values.architecture, self._values.family
        self._heads = heads_of(header)
        self._read: set[str] = set()
        self._trim = PeriodicTrim()
        self._tally = ReadProgress(sum(info.nbytes for info in self._tensors.values()))

    def __contains__(self, name: str) -> bool:
        fused = fused_of(name, self._values)
        stored = fused.stored if fused else (self._stored(expert_of(name)[0]),)
        return all(part in self._tensors for part in stored)

    def _stored(self, name: str) -> str:
        """Return the file's name of a tensor. Without experts the shared expert is the MLP."""
        stored = gguf_name(name, self._architecture)
        shared = stored in self._tensors or ".shared_mlp." not in name
        return stored if shared else stored.replace("_shexp", "")

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """Return a 2-dimensional tensor that is read some rows at a time. Raises as `get`."""
        if self._family.in_turns and (packed := expert_tensors(name)):
            return self._expert_in_turns(*packed, shape)
        if fused := fused_of(name, self._values):
            return self._gathered(fused, shape)
        return self._matrix(name, shape, shape)

    def _gathered(self, fused: FusedTensor, shape: tuple[int, int]) -> GatheredMatrix:
        infos = [self._info(stored) for stored in fused.stored]
        parts = [
            self._make_matrix(info, (size, shape[1]), None)
            for info, size in zip(infos, fused.sizes, strict=True)
        ]
        if sum(fused.sizes) != shape[0]:
            raise ModelLoadError(
                f"{self.path}: {' and '.join(fused.stored)} have {sum(fused.sizes)} rows, "
                f"but the metadata asks for {shape[0]}."
            )
        for info in infos:
            self._tally.add(info.name, info.nbytes)
        return GatheredMatrix(parts, *fused.row_sources())

    def is_packed(self, name: str) -> bool:
        """Whether `matrix` returns an expert that checkpoints store in a tensor of all experts.

        `name` is the expert's name without `.weight`.
        """
        return self._family.in_turns and expert_tensors(f"{name}.weight") is not None

    def _expert_in_turns(
        self, names: list[str], expert: int, shape: tuple[int, int]
    ) -> WeightSource:
        rows = shape[0] // len(names)
        parts = []
        for stored in names:
            info = self._info(stored)
            parts.append(self._make_matrix(self._one_expert(info, expert), (rows, shape[1]), None))
            self._tally.add(f"{stored} {expert}", info.nbytes // info.shape[0])
        return parts[0] if len(parts) == 1 else interleave_rows(*parts)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in a float dtype.

        Raises `ModelLoadError` if it is missing or has another shape. The tensor may be backed by
        the mapped file: copy or convert it before keeping it.
        """
        if self._family.in_turns and (stored := bias_tensors(name)):
            rows = (shape[0], shape[1] // len(stored))
            biases = [self._make_matrix(self._info(part), rows, None) for part in stored]
            return torch.stack([bias.floats(slice(None)) for bias in biases], -1).flatten(1)
        matrix = self._matrix(name, shape, (shape[0], math.prod(shape[1:])))
        floats = matrix.floats(slice(None)).view(shape)
        if name.endswith(".A_log"):
            return self._logarithm(name, floats.float())
        offset = self._family.offset_norms and not name.endswith(_STATE_NORMS)
        if offset and name.endswith("norm.weight"):
            return floats.float() - 1.0  # stored with the added 1
        return floats

    def _logarithm(self, name: str, decay: Tensor) -> Tensor:
        """Return log(-x) of decay rates, which a file stores as negative numbers."""
        if not bool(((decay < 0) & decay.isfinite()).all()):
            raise ModelLoadError(
                f"{self.path}: {self._stored(name)!r} has values that aren't below zero."
            )
        return decay.neg().log()

    def _matrix(self, name: str, shape: tuple[int, ...], as_rows: tuple[int, int]) -> GGUFMatrix:
        tensor_name, expert = expert_of(name)
        stored = self._stored(tensor_name)
        info = self._info(stored)
        info = info if expert is None else self._one_expert(info, expert)
        if info.shape != shape and _without_ones(info.shape, shape) == _without_ones(shape, shape):
            info = TensorInfo(info.name, shape, info.kind, info.offset, info.nbytes)
        if len(shape) == 1 and types.BLOCKS[info.kind].values > 1:
            raise ModelLoadError(f"{self.path}: {stored!r} is quantized.")
        self._tally.add(stored if expert is None else f"{stored} {expert}", info.nbytes)
        return self._make_matrix(info, shape, self._order(name, shape[0]), as_rows)

    def _info(self, stored: str) -> TensorInfo:
        info = self._tensors.get(stored)
        if info is None:
            raise ModelLoadError(f"{self.path} has no {stored!r}.")
        return info

    def _make_matrix(
        self,
        info: TensorInfo,
        shape: tuple[int, ...],
        order: Tensor | None,
        as_rows: tuple[int, int] | None = None,
    ) -> GGUFMatrix:
        """Return a tensor, which must have this shape, as a source of rows."""
        if info.shape != shape:
            raise ModelLoadError(
                f"{self.path}: {info.name!r} has shape {info.shape}, "
                f"but the metadata asks for {shape}."
            )
        self._read.add(info.name)
        return GGUFMatrix(
            self._files.file_of(info.name), info, as_rows or (shape[0], shape[1]), order
        )

    def _one_expert(self, info: TensorInfo, expert: int) -> TensorInfo:
        """Return one expert's source from a tensor [experts, rows, columns]."""
        count = info.shape[0]
        if len(info.shape) != 3 or expert >= count:
            raise ModelLoadError(
                f"{self.path}: {info.name!r} of shape {info.shape} has no expert {expert}."
            )
        nbytes = info.nbytes // count
        return TensorInfo(
            info.name, info.shape[1:], info.kind, info.offset + expert * nbytes, nbytes
        )

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Return the permutation that restores the order of query and key rows in `transformers`.

        For Llama and similar families GGUF stores each head's rows so that rotary embedding pairs
        neighbours.
        """
        if not self._family.turned or ".self_attn." not in name:
            return None
        kind = name.rsplit(".", 2)[-2]
        heads = {"q_proj": self._heads[0], "k_proj": self._heads[1]}.get(kind)
        if heads is None:
            return None
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def release(self) -> None:
        """Release the memory of tensors read from the file; results stay valid."""
        self._files.release()
        self._trim()

    def unused_names(self) -> list[str]:
        """Return the names of tensors that weren't read."""
        return sorted(self._tensors.keys() - self._read - set(_IGNORED))

    def close(self) -> None:
        """Close the file; tensors that are still referenced keep it mapped."""
        self._tensors = {}
        trim_heap()


def _without_ones(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of size 1, which may differ between the formats."""
    return (math.prod(sizes),) if len(shape) == 1 else tuple(size for size in sizes if size > 1)
