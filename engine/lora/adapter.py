"""An adapter as read from its files: matrices by the module that they modify."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.lora import WEIGHTS_FILE
from engine.contract.validation import format_value

_DTYPES = ("F32", "BF16", "F16")


def tensor_error(name: str, why: str, file: str = WEIGHTS_FILE) -> InvalidRequest:
    return InvalidRequest(f"{file}: {format_value(name)} {why}.", param=name[:200])


def check_entry(name: str, entry: Any) -> None:
    """Raise for a dtype that adapters don't support; `entry` is from safetensors."""
    if entry.get_dtype() not in _DTYPES:
        raise tensor_error(name, f"is kept as {entry.get_dtype()}, which isn't supported")


def shape_error(shape: tuple[int, ...], expected: tuple[int, ...], vocab: int = 0) -> str:
    """Explain a wrong shape. `vocab`: for a table, or a change to one, its expected rows."""
    if vocab in expected and len(shape) == len(expected):
        axis = expected.index(vocab)
        if shape[:axis] + shape[axis + 1 :] == expected[:axis] + expected[axis + 1 :]:
            return (
                f"is for a vocabulary of {shape[axis]} tokens, "
                f"but the adapter's table is for {vocab}"
            )
    return f"has shape {list(shape)}, but it must be {list(expected)}"


def check_rank(rank: int, max_rank: int | None) -> None:
    """Raise for a rank above the operator's limit; None: unlimited."""
    if max_rank is not None and rank > max_rank:
        raise InvalidRequest(
            f"The adapter's rank {rank} is over max_lora_rank ({max_rank}).", param="r"
        )


Kind = Literal[
    "a",
    "b",
    "b_bias",
    "magnitude",
    "embedding_a",
    "embedding_b",
    "bias",
    "table",
    "tokens",
    "unused",
]

PREFIX = "base_model.model."
#: Name endings, longer ones first; older PEFT versions wrote no `.weight` after a magnitude.
_ENDINGS: tuple[tuple[str, Kind], ...] = (
    (".lora_A.weight", "a"),
    (".lora_B.weight", "b"),
    (".lora_B.bias", "b_bias"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".lora_magnitude_vector", "magnitude"),
    (".lora_embedding_A", "embedding_a"),
    (".lora_embedding_B", "embedding_b"),
    (".token_adapter.trainable_tokens_delta", "tokens"),
    (".token_adapter.base_layer.weight", "table"),
    (".base_layer.weight", "table"),
    (".original_module.weight", "unused"),
    (".original_module.bias", "unused"),
    (".base_layer.bias", "bias"),
    (".modules_to_save.weight", "table"),
    (".modules_to_save.bias", "bias"),
    (".weight", "table"),
    (".bias", "bias"),
)


class Key(NamedTuple):
    """A tensor's module, and its role there.

    Kinds: `a` [rank, inputs] and `b` [outputs, rank] with its bias; `magnitude` [outputs] of DoRA,
    for an embedding [hidden]; `embedding_a` [rank, vocabulary] and `embedding_b` [hidden, rank];
    `bias` and `table` replace the module's; `tokens` [some, hidden] replaces rows of a table;
    `unused` is superseded by another tensor.
    """

    module: str
    kind: Kind


@lru_cache(maxsize=8192)  # all adapters of a model have the same names
def parse_key(name: str) -> Key | None:
    """Parse a tensor's name; None if it isn't a known one."""
    bare = name.removeprefix(PREFIX)
    for ending, kind in _ENDINGS:
        if bare.endswith(ending) and len(bare) > len(ending):
            return Key(bare.removesuffix(ending), kind)
    return None


_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: Integer dtype of the same size as a float dtype, and infinity's bits as such an integer.
_BITS = {
    torch.float32: (torch.int32, 0x7F80 << 16),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
#: Number of values that are checked at a time.
_AT_ONCE = 1 << 18


class TensorFile:
    """A file whose header `safe_open` has validated.

    An adapter has hundreds of small tensors, and requesting one takes longer than reading it. So if
    all have the same float dtype, they are views of one tensor; otherwise they are read one by one.
    """

    def __init__(self, path: Path, file: Any) -> None:
        """`file`: the file, opened by `safe_open`."""
        self._file = file
        self._views: dict[str, Tensor] = {}
        #: Whether all values are known to be finite, so that no tensor needs a check.
        self._finite = False
        try:
            self._map_file(path)
        except (ValueError, KeyError, TypeError, RuntimeError):
            self._views = {}  # the file was replaced meanwhile, which the reader detects later

    def _map_file(self, path: Path) -> None:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        header.pop("__metadata__", None)
        kinds = {entry["dtype"] for entry in header.values()}
        dtype = _TORCH_DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
        start, end = 8 + length, path.stat().st_size
        if dtype is None or start % dtype.itemsize or end <= start:
            return
        content = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
        values = content[start:].view(dtype)
        self._finite = all_finite(values)
        for name, entry in header.items():
            first, last = (offset // dtype.itemsize for offset in entry["data_offsets"])
            self._views[name] = values[first:last].view(entry["shape"])

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises `InvalidRequest` unless all values are finite."""
        tensor = self._views.get(name)
        if tensor is None:
            tensor = self._file.get_tensor(name)
        if not self._finite and not all_finite(tensor):
            raise tensor_error(name, "holds NaN or infinity")
        return tensor


def all_finite(values: Tensor) -> bool:
    """Whether no exponent is all ones. Integers are compared, which is much faster than with narrow
    floats, and in one thread, since the other threads are computing a step.
    """
    bits, infinity = _BITS[values.dtype]
    integers = values.contiguous().view(bits).numpy().reshape(-1)
    return all(
        (integers[start : start + _AT_ONCE] & torch.iinfo(bits).max).max() < infinity
        for start in range(0, len(integers), _AT_ONCE)
    )


@dataclass(slots=True, kw_only=True)
class LoRALayer:
    """The change of one module: y = x W^T + bias + scale * (x A^T) B^T.

    Attributes:
        a: [rank, inputs]; for an embedding [rank, vocabulary].
        b: [outputs, rank]; for an embedding [hidden, rank].
        scale: see `AdapterConfig.scale_of`.
        b_bias: [outputs], added to the output of B before scaling; None: no bias.
        magnitude: [outputs] of DoRA: the norm of each row of W + scale * B A; for an embedding
            [hidden], of each column of the changed table.
        bias: [outputs] that replaces the module's.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    b_bias: Tensor | None = None
    magnitude: Tensor | None = None
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """Rank of the matrices; 0 if only a bias is replaced."""
        return 0 if self.a is None else self.a.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        for tensor in (self.a, self.b, self.b_bias, self.magnitude, self.bias):
            if tensor is not None:
                yield tensor


@dataclass(slots=True, kw_only=True)
class LoRAAdapter:
    """A complete adapter in host memory.

    Attributes:
        digest: sha256 of its content, see `engine.contract.lora.adapter_digest`.
        modules: changes of linear layers and experts, by the checkpoint's names.
        embedding, head: changes of the tables; None: unchanged.
        tables: weights [vocabulary, hidden] that replace the model's, by "embedding" or "head".
        tokens: ids, int64 ascending, and their rows [ids, hidden], which replace rows of a table,
            by "embedding" or "head".
        classifier: tensors that replace those of a classifier's head, by the checkpoint's names.
        dense: changes of linear layers of that head, by the checkpoint's names.
        vocab_size: vocabulary of its requests if it adds tokens; 0: the model's.
    """

    digest: str
    modules: dict[str, LoRALayer] = field(default_factory=dict)
    embedding: LoRALayer | None = None
    head: LoRALayer | None = None
    tables: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    classifier: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, LoRALayer] = field(default_factory=dict)
    vocab_size: int = 0

    def iter_layers(self) -> Iterator[LoRALayer]:
        """Return the changes of all modules, tables included."""
        yield from self.modules.values()
        yield from self.dense.values()
        yield from (table for table in (self.embedding, self.head) if table is not None)

    def tensors(self) -> Iterator[Tensor]:
        for delta in self.iter_layers():
            yield from delta.tensors()
        yield from self.tables.values()
        yield from (rows for _, rows in self.tokens.values())
        yield from self.classifier.values()

    @property
    def rank(self) -> int:
        """Maximum rank of its modules."""
        return max((delta.rank for delta in self.iter_layers()), default=0)

    @property
    def num_parameters(self) -> int:
        """Number of its parameters."""
        return sum(tensor.numel() for tensor in self.tensors())

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def target_modules(self) -> list[str]:
        """Last components of the names of changed modules, sorted."""
        names = {name.rsplit(".", 1)[-1] for name in (*self.modules, *self.dense)}
        changed = {"embedding": self.embedding, "head": self.head}
        names |= {name.split(".")[0] for name in self.classifier}
        names |= {name for name, delta in changed.items() if delta is not None}
        return sorted(names | self.tables.keys() | self.tokens.keys())
