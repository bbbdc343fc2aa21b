"""A GGUF file's metadata, each value checked as it's read. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.contract.errors import ModelLoadError
from engine.models.gguf.families import FAMILIES, GGUFFamily
from engine.models.gguf.reader import Header


class Metadata:
    """Values of a file's own architecture, with their types checked."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = architecture_of(header)
        self.family: GGUFFamily = FAMILIES[self.architecture]

    def number(self, key: str, default: Any = None) -> Any:
        """A number. Raises `ModelLoadError` if it's none, or absent without a default."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"The file lacks {self.architecture}.{key}.", param="model")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a number, not {shown(value)}.", param="model"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things: at least 1. Raises as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise ModelLoadError(
                f"{self.architecture}.{key} must be from 1 to 2^31 - 1, not {shown(value)}.",
                param="model",
            )
        return value

    def optional(self, key: str) -> Any:
        """A number, or None where there is none."""
        whole = f"{self.architecture}.{key}"
        return self.number(key) if whole in self.header.metadata else None

    def text(self, key: str) -> str:
        """A string, "" where there is none."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", "")
        return value if isinstance(value, str) else ""

    def flags(self, key: str, count: int) -> list[bool] | None:
        """So many of true or false, one a layer; None where there are none."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.shape != (count,):
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a list of {count}, not {shown(value)}.",
                param="model",
            )
        return [bool(flag) for flag in value]

    def counts(self, key: str, layers: int) -> list[int] | None:
        """So many whole numbers that aren't negative, one a layer; None: there's no such list."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return None
        if value.shape != (layers,) or value.dtype.kind not in "iu" or int(value.min()) < 0:
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a list of {layers} counts, not {shown(value)}.",
                param="model",
            )
        return [int(number) for number in value]

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of that name."""
        return tensor in self.header.tensors


def architecture_of(header: Header) -> str:
    """Raises `ModelLoadError` for one that isn't read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"GGUF files of the architecture {shown(name)} aren't supported. "
            f"Known: {', '.join(FAMILIES)}.",
            param="model",
        )
    return name


def heads_of(header: Header) -> tuple[int, int]:
    """Query heads, and key/value heads."""
    values = Metadata(header)
    heads, key = values.count("attention.head_count"), "attention.head_count_kv"
    if not values.family.states:
        return heads, values.count(key, heads)
    # Layers that carry a state have none.
    by_layer = values.counts(key, values.count("block_count"))
    if by_layer is None:
        return heads, values.count(key, heads)
    kinds = set(by_layer) - {0}
    if len(kinds) > 1:
        raise ModelLoadError(
            f"{values.architecture}.{key}: layers of different numbers aren't supported.",
            param="model",
        )
    return heads, kinds.pop() if kinds else heads


def shown(value: Any) -> str:
    """A value of the file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
