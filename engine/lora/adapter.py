"""An adapter as it was read: its matrices by the module that they change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class ModuleDelta:
    """What an adapter does to one module: y = x W^T + bias + scale * (x A^T) B^T.

    Attributes:
        a: [rank, inputs]; of an embedding [rank, vocabulary].
        b: [outputs, rank]; of an embedding [hidden, rank].
        scale: see `AdapterConfig.scale_of`.
        b_bias: [outputs], added to what B gives before it is scaled; None: nothing.
        magnitude: [outputs] of DoRA: the length that each row of W + scale * B A is brought to; of
            an embedding [hidden], each column of its changed table.
        bias: [outputs] in the place of the module's own.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    b_bias: Tensor | None = None
    magnitude: Tensor | None = None
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """Of the matrices, 0 where only a bias is another."""
        return 0 if self.a is None else self.a.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds."""
        for tensor in (self.a, self.b, self.b_bias, self.magnitude, self.bias):
            if tensor is not None:
                yield tensor


@dataclass(slots=True, kw_only=True)
class Adapter:
    """A whole adapter, in host memory.

    Attributes:
        digest: sha256 of its content, see `engine.contract.adapters.adapter_digest`.
        modules: by the checkpoint's names of linear layers and experts.
        embedding, head: of the tables; None: it leaves them as they are.
        tables: weights [vocabulary, hidden] in the place of the model's own, by "embedding" or
            "head".
        tokens: ids, int64 ascending, and their rows [ids, hidden] in the place of a table's, by
            "embedding" or "head".
        classifier: tensors in the place of those of a classifier's head, by the checkpoint's names.
        dense: of linear layers of that head, by the checkpoint's names.
        vocab_size: tokens that its requests may hold, where it brings some; 0: the model's.
    """

    digest: str
    modules: dict[str, ModuleDelta] = field(default_factory=dict)
    embedding: ModuleDelta | None = None
    head: ModuleDelta | None = None
    tables: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    classifier: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, ModuleDelta] = field(default_factory=dict)
    vocab_size: int = 0

    def deltas(self) -> Iterator[ModuleDelta]:
        """Of all modules, tables included."""
        yield from self.modules.values()
        yield from self.dense.values()
        yield from (table for table in (self.embedding, self.head) if table is not None)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds."""
        for delta in self.deltas():
            yield from delta.tensors()
        yield from self.tables.values()
        yield from (rows for _, rows in self.tokens.values())
        yield from self.classifier.values()

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max((delta.rank for delta in self.deltas()), default=0)

    @property
    def num_parameters(self) -> int:
        """Numbers that it holds."""
        return sum(tensor.numel() for tensor in self.tensors())

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def target_modules(self) -> list[str]:
        """The last words of the names of modules that it changes, sorted."""
        names = {name.rsplit(".", 1)[-1] for name in (*self.modules, *self.dense)}
        changed = {"embedding": self.embedding, "head": self.head}
        names |= {name.split(".")[0] for name in self.classifier}
        names |= {name for name, delta in changed.items() if delta is not None}
        return sorted(names | self.tables.keys() | self.tokens.keys())
