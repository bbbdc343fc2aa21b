"""What a checkpoint format must tell: `CheckpointFormat`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from engine.quantization.checkpoint.fields import Fields
from engine.quantization.checkpoint.tensors import Parts, Tensors
from engine.quantization.matrix import Matrix


class CheckpointFormat(ABC):
    """How one method keeps weights. See docs/extending/quantization-format.md.

    Args:
        fields: the checkpoint's `quantization_config`. Raises `ModelLoadError` for one that the
            format doesn't know, with the field's path as `param`.
    """

    name: str

    @abstractmethod
    def __init__(self, fields: Fields) -> None: ...

    @abstractmethod
    def modules(self, tensors: Tensors) -> Iterable[str]:
        """Names of the layers that are packed, without `.weight`."""

    @abstractmethod
    def suffixes(self) -> Iterable[str]:
        """What may follow a packed layer's name: its tensors, those that aren't needed included."""

    def tensors_of(self, module: str) -> Iterable[str]:
        """Names of the tensors that may be a packed layer's."""
        return (f"{module}.{suffix}" for suffix in self.suffixes())

    @abstractmethod
    def matrix(self, parts: Parts) -> Matrix:
        """A packed layer's weight [N, K].

        Raises `ModelLoadError` where its tensors don't fit each other, and for scales that aren't
        finite. Holds nothing but views of the file.
        """
