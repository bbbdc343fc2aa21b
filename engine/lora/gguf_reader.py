"""Adapters in one GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes them.

A tensor has the name of the base's with the suffix `.lora_a` [rank, inputs] or `.lora_b` [outputs,
rank], for experts with another dimension; an embedding's `lora_a` is [vocabulary, rank]. For Llama
and similar models the rows of queries and keys are in GGUF's order, as in the base. There is one
alpha for all, and a file without one has scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoints.gguf import file as types
from engine.checkpoints.gguf.file import Header, TensorInfo, read_header
from engine.checkpoints.gguf.names import expert_of, family_of, gguf_name
from engine.checkpoints.gguf.weights import GGUFMatrix
from engine.checkpoints.safetensors import MappedFile
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.validation import format_value
from engine.lora.adapter import LoRAAdapter, LoRALayer, check_rank, shape_error
from engine.lora.target_modules import TargetModules

_SUPPORTED_KEYS = frozenset({"adapter.type", "adapter.lora.alpha", "adapter.lora.task_name"})


def read_gguf_adapter(
    path: Path, digest: str, modules: TargetModules, max_rank: int | None = None
) -> LoRAAdapter:
    """Read an adapter for the model of these modules into host memory.

    Raises `InvalidRequest`, which names the key or the tensor, for unsupported content, tensors
    that don't fit the model, and values that aren't finite.
    """
    try:
        file = MappedFile(path)
        header = read_header(file.buffer)
    except (ModelLoadError, OSError, ValueError) as error:
        reason = error.message if isinstance(error, ModelLoadError) else str(error)
        raise InvalidRequest(f"The GGUF file can't be read: {reason}", param="path") from error
    architecture, alpha = _check_metadata(header)
    pairs = _pairs(header, _Names(modules, architecture), max_rank)
    adapter = LoRAAdapter(digest=digest)
    for pair in pairs:
        a, b = (_read(file, info) for info in (pair.a, pair.b))
        scale = alpha / pair.rank if alpha else 1.0
        for module, delta in pair.deltas(a, b, scale):
            if module == modules.embedding:
                adapter.embedding = delta
            elif module == modules.head:
                adapter.head = delta
            else:
                adapter.modules[module] = delta
    return adapter


def _check_metadata(header: Header) -> tuple[str, float]:
    """Return the base's architecture, and alpha."""
    values = header.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if values.get(key) != expected:
            raise _refused(key, f"must be {expected}, got {format_value(values.get(key))}")
    for key in values:
        if key.startswith("adapter.") and key not in _SUPPORTED_KEYS:
            raise _refused(key, "isn't supported")
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _refused("general.architecture", "must be a name")
    alpha = values.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        raise _refused("adapter.lora.alpha", f"must be a finite number, got {format_value(alpha)}")
    return architecture, float(alpha)


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The GGUF file: {format_value(name).strip(chr(39))} {why}.", param=name[:200]
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the base.

    Attributes:
        modules: its name, or those of all experts.
        rows, columns: of each module.
        heads: of queries and keys whose rows are reordered; 0: in the checkpoint's order.
        kind: "" for a linear layer, "experts", or "embedding".
        is_table: whether it has a row for each token.
    """

    modules: tuple[str, ...]
    rows: int
    columns: int
    heads: int = 0
    kind: str = ""
    is_table: bool = False

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Expected shapes of A and B."""
        if self.kind == "embedding":
            return (self.rows, rank), (self.columns, rank)
        a, b = (rank, self.columns), (self.rows, rank)
        if self.kind == "experts":
            count = len(self.modules)
            return (count, *a), (count, *b)
        return a, b


class _Names:
    """Return the model's modules by GGUF's names of their weights."""

    def __init__(self, modules: TargetModules, architecture: str) -> None:
        self._targets: dict[str, _Target] = {}
        heads = dict(zip(("q_proj", "k_proj"), modules.heads, strict=True))
        experts: dict[str, list[str]] = {}
        for layer in modules.layers:
            for linear in layer.values():
                for part in linear.parts:
                    tensor_name, expert = expert_of(f"{part.name}.weight")
                    name = gguf_name(tensor_name, architecture)
                    if expert is not None:
                        experts.setdefault(name, []).append(part.name)
                        every = tuple(experts[name])
                        target = _Target(every, part.rows, linear.columns, kind="experts")
                    else:
                        turned = heads.get(part.name.rpartition(".")[2], 0)
                        num_heads = turned if family_of(architecture).turned else 0
                        target = _Target((part.name,), part.rows, linear.columns, num_heads)
                    self._targets[name] = target
        vocab, hidden = modules.vocab_size, modules.hidden_size
        for module, kind in ((modules.embedding, "embedding"), (modules.head, "")):
            name = gguf_name(f"{module}.weight", architecture)
            self._targets[name] = _Target((module,), vocab, hidden, kind=kind, is_table=True)

    def find(self, name: str) -> _Target | None:
        """Return the base's tensor of this name."""
        return self._targets.get(name)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The pair of tensors that changes one of the base's."""

    target: _Target
    rank: int
    a: TensorInfo
    b: TensorInfo

    def deltas(self, a: Tensor, b: Tensor, scale: float) -> Iterator[tuple[str, LoRALayer]]:
        """Return the changes by module."""
        target = self.target
        if target.kind == "embedding":
            a = a.T.contiguous()
        if target.heads:
            order = torch.arange(len(b)).view(target.heads, -1, 2).transpose(1, 2).flatten()
            b = b[order]
        for index, module in enumerate(target.modules):
            matrices = (a[index], b[index]) if target.kind == "experts" else (a, b)
            yield module, LoRALayer(a=matrices[0], b=matrices[1], scale=scale)


def _pairs(header: Header, names: _Names, max_rank: int | None) -> list[_Pair]:
    """Return all pairs of a file after checking their shapes."""
    parts_by_base: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.tensors.items():
        base, _, part = name.rpartition(".")
        if part not in ("lora_a", "lora_b"):
            raise _refused(name, "is nothing that a LoRA adapter has")
        parts_by_base.setdefault(base, {})[part] = info
    if not parts_by_base:
        raise InvalidRequest("The GGUF file holds no tensors.", param="path")
    return [_pair(names.find(base), parts, max_rank) for base, parts in parts_by_base.items()]


def _pair(target: _Target | None, parts: dict[str, TensorInfo], max_rank: int | None) -> _Pair:
    first = next(iter(parts.values()))
    if target is None:
        raise _refused(first.name, "belongs to no module of this model that an adapter can change")
    if len(parts) != 2:
        raise _refused(first.name, "has no partner: lora_a and lora_b go together")
    a, b = parts["lora_a"], parts["lora_b"]
    rank = b.shape[-1]
    check_rank(rank, max_rank)
    for info, expected in zip((a, b), target.shapes(rank), strict=True):
        if info.shape != expected:
            vocab = target.rows if target.is_table else 0
            raise _refused(info.name, shape_error(info.shape, expected, vocab))
    return _Pair(target, rank, a, b)


def _read(file: MappedFile, info: TensorInfo) -> Tensor:
    """Return a copy with a float dtype."""
    block, columns = types.BLOCKS[info.kind], info.shape[-1]
    shape = (info.nbytes // (columns // block.values * block.nbytes), columns)
    values = GGUFMatrix(file, info, shape, None).floats(slice(None)).clone().view(info.shape)
    if not bool(values.sum(dtype=torch.float64).isfinite()):
        raise _refused(info.name, "holds NaN or infinity")
    return values
