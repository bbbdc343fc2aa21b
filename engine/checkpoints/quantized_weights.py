"""A quantized checkpoint through the same interface as any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoints.safetensors import FLOATS, PeriodicTrim, WeightReader, trim_heap
from engine.checkpoints.torch_files import open_hub_folder
from engine.contract.errors import ModelLoadError
from engine.quantization.formats.base import CheckpointFormat, LayerTensors
from engine.quantization.packing import WeightSource

_WEIGHT = ".weight"
#: Number of layers whose tensors are checked before their pages are released.
_CHECKED_AT_ONCE = 64


class QuantizedWeights(WeightReader):
    """Wraps a `WeightReader` and presents its packed layers under their plain names.

    Every packed layer's tensors are checked first: `ModelLoadError` before anything is allocated.
    """

    def __init__(self, inner: WeightReader, form: CheckpointFormat) -> None:
        self._inner, self.form, self.folder = inner, form, inner.folder
        self._packed: dict[str, WeightSource] = {}
        self._trim = PeriodicTrim()
        apart = "weight" not in form.suffixes()
        for number, module in enumerate(form.modules(inner)):
            parts = LayerTensors(inner, module)
            if apart and "weight" in parts:
                raise parts.error("weight", f"is there beside what {form.name} keeps of it")
            self._packed[module] = form.matrix(parts)
            if number % _CHECKED_AT_ONCE == 0:
                inner.release()
        inner.release()
        if not self._packed:
            raise ModelLoadError(
                f"{inner.where}: config.json says that the weights are quantized ({form.name}), "
                "but no layer's are.",
                param="quantization_config",
            )

    def __contains__(self, name: str) -> bool:
        return self._module(name) is not None or name in self._inner

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightReader.get`; packed weights are returned as float32."""
        if self._module(name) is None:
            self._refuse_packed(name)
            return self._inner.get(name, shape)
        return self.matrix(name, (shape[0], shape[1])).floats(slice(None))

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        module = self._module(name)
        if module is None:
            self._refuse_packed(name)
            return self._inner.matrix(name, shape)
        packed = self._packed[module]
        if packed.shape != shape:
            raise ModelLoadError(
                f"{self.folder}: {module!r} is packed with shape {packed.shape}, "
                f"but config.json asks for {shape}."
            )
        self._inner.mark_used(self.form.tensors_of(module))
        return packed

    def _refuse_packed(self, name: str) -> None:
        """Raise `ModelLoadError` for a tensor that belongs to the format but can't be read."""
        if name not in self._inner:
            why = f"isn't there, nor what {self.form.name} keeps of it"
        elif self._inner.stored_dtype(name) in FLOATS:
            return
        else:
            why = (
                f"is kept as {str(self._inner.stored_dtype(name)).removeprefix('torch.')}, and "
                f"nothing beside it says how {self.form.name} quantized it"
            )
        raise ModelLoadError(f"{self.folder}: {name!r} {why}.", param=name.rpartition(".")[2])

    def _module(self, name: str) -> str | None:
        module = name.removesuffix(_WEIGHT)
        return module if module in self._packed else None

    def numbers(self, name: str) -> Tensor | None:
        return self._inner.numbers(name)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._inner.tensors()

    def is_packed(self, name: str) -> bool:
        """Whether a layer's weight is packed; `name` without `.weight`."""
        return name in self._packed

    def packed(self) -> Iterator[tuple[str, WeightSource]]:
        """Return all packed layers and their weights."""
        yield from self._packed.items()

    @property
    def metadata(self) -> Mapping[str, str]:
        """See `TensorSource`."""
        return self._inner.metadata

    @property
    def where(self) -> str:
        """See `TensorSource`."""
        return self._inner.where

    def names(self) -> Iterable[str]:
        """See `TensorSource`."""
        return self._inner.names()

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._inner.stored_shape(name)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource`."""
        return self._inner.stored_dtype(name)

    def stored(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._inner.stored(name)

    def mark_used(self, names: Iterable[str]) -> None:
        self._inner.mark_used(names)

    def release(self) -> None:
        self._inner.release()
        self._trim()

    def unused_names(self) -> list[str]:
        return self._inner.unused_names()

    def close(self) -> None:
        self._packed.clear()
        self._inner.close()
        trim_heap()


def dequantized_tensors(
    folder: Path, form: CheckpointFormat, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, with packed layers dequantized to `dtype`.

    Raises `ModelLoadError` for invalid files, and for experts that are packed together, whose plain
    names only the native decoder knows.
    """
    weights = QuantizedWeights(open_hub_folder(folder), form)
    tensors: dict[str, Tensor] = {}
    for module, matrix in weights.packed():
        if "#" in module:
            raise ModelLoadError(
                f"{folder}: {module!r} is packed by {form.name}, which only models that Quire runs "
                "natively can have."
            )
        tensors[f"{module}.weight"] = matrix.floats(slice(None)).to(dtype)
        weights.mark_used(form.tensors_of(module))
        weights.release()
    for name in weights.unused_names():
        if weights.stored_dtype(name) in FLOATS:
            tensors[name] = weights.stored(name).clone()
    weights.close()
    return tensors
