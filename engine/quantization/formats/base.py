"""`CheckpointFormat`: the interface of a quantized checkpoint format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.contract.safe_pattern import SafePattern
from engine.quantization.packing import WeightSource

#: Maximum length of a pattern in a message.
_MAX_MESSAGE_CHARS = 64


class ConfigFields:
    """An object of config.json. `ModelLoadError` says what is wrong, with its path as `param`."""

    def __init__(self, values: Any, path: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise ModelLoadError(f"config.json: {path} must be an object.", param=path)
        self._values, self.path = values, path

    def error(self, name: str, why: str) -> ModelLoadError:
        """Return an error that names the field."""
        path = f"{self.path}.{name}"
        return ModelLoadError(f"config.json: {path} {why}.", param=path)

    def get(self, name: str) -> Any:
        """Return a field's value of any type; None if missing."""
        return self._values.get(name)

    def names(self) -> Iterable[str]:
        return self._values.keys()

    def integer(self, name: str, default: int | None, choices: Iterable[int] = ()) -> int:
        """Return an integer, of `choices` if given."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int:
            raise self.error(name, f"must be a whole number, not {value!r}")
        if choices and value not in choices:
            raise self.error(name, f"is {value}; known are {', '.join(map(str, choices))}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def string(self, name: str, default: str = "") -> str:
        """Return a string, in lower case."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value.lower()

    def words(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(name, "must be a list of strings")
        return value

    def object(self, name: str) -> ConfigFields | None:
        """Return a nested object; None if missing."""
        value = self._values.get(name)
        return None if value is None else ConfigFields(value, f"{self.path}.{name}")

    def pair(self, name: str) -> tuple[int, int] | None:
        """Return two positive integers; None if missing."""
        value = self._values.get(name)
        if value is None:
            return None
        sound = isinstance(value, list) and len(value) == 2
        if not sound or not all(type(size) is int and size > 0 for size in value):
            raise self.error(name, f"must be two positive whole numbers, not {value!r}")
        return value[0], value[1]


def pattern(fields: ConfigFields, name: str, text: str) -> SafePattern:
    """Compile a `re:` pattern in a list of layers. Raises `ModelLoadError` if unsupported."""
    try:
        return SafePattern(text)
    except ValueError as error:
        raise fields.error(
            name, f"has the pattern {text[:_MAX_MESSAGE_CHARS]!r}, which {error}"
        ) from error


Dtypes = Collection[torch.dtype]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Bias of the exponents of power-of-two scales.
POWERS = (torch.float8_e8m0fnu,)
#: Exponent that means NaN.
NAN_EXPONENT = 255


class TensorSource(Protocol):
    """Source of a checkpoint's tensors."""

    @property
    def where(self) -> str:
        """The checkpoint's name, for messages."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata in the files' headers."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """Return all names."""

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, by the header."""

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's dtype, by the header; None: an unknown one."""

    def stored(self, name: str) -> Tensor:
        """Return a tensor as stored, with any dtype, backed by the mapped file.

        Raises `ModelLoadError` if it is missing or has an unknown dtype.
        """


class LayerTensors:
    """The tensors of one packed weight, by the suffix after the layer's name.

    Each is validated when read. `ModelLoadError` names the tensor, and has the suffix as `param`.
    """

    def __init__(self, tensors: TensorSource, module: str, joint: str = ".") -> None:
        self.tensors, self.module, self._joint = tensors, module, joint

    def __contains__(self, suffix: str) -> bool:
        return self.name(suffix) in self.tensors

    def name(self, suffix: str) -> str:
        """Return a tensor's full name."""
        return f"{self.module}{self._joint}{suffix}"

    def error(self, suffix: str, why: str) -> ModelLoadError:
        """Return an error that names the tensor."""
        return ModelLoadError(f"{self.tensors.where}: {self.name(suffix)!r} {why}.", param=suffix)

    def shape(self, suffix: str, dims: int) -> tuple[int, ...]:
        """Return a tensor's shape, which must have that many dimensions, none of size 0."""
        if suffix not in self:
            raise self.error(suffix, "isn't there, and the layer's other tensors need it")
        shape = self.tensors.stored_shape(self.name(suffix))
        if len(shape) != dims or 0 in shape:
            raise self.error(suffix, f"has shape {shape}, not {dims} dimensions")
        return shape

    def read(self, suffix: str, dtypes: Dtypes, shape: tuple[int, ...] | None = None) -> Tensor:
        if suffix not in self:
            raise self.error(suffix, "isn't there, and the layer's other tensors need it")
        tensor = self.tensors.stored(self.name(suffix))
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(suffix, f"is kept as {str(tensor.dtype)[6:]}, not as {expected}")
        if shape is not None and tuple(tensor.shape) != shape:
            raise self.error(suffix, f"has shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def number(self, suffix: str, dtypes: Dtypes) -> int:
        """Return the value of a tensor with one integer."""
        tensor = self.read(suffix, dtypes)
        if tensor.numel() != 1:
            raise self.error(suffix, f"has shape {tuple(tensor.shape)}, not one number")
        return int(tensor)

    def scales(self, suffix: str, *shapes: tuple[int, ...], dtypes: Dtypes = FLOATS) -> Tensor:
        """Return a tensor of finite scales with one of these shapes."""
        tensor = self.read(suffix, dtypes)
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise self.error(suffix, f"has shape {tuple(tensor.shape)}, not {expected}")
        if not bool(torch.isfinite(tensor.float()).all()):
            raise self.error(suffix, "has values that aren't finite")
        return tensor

    def scalar(self, suffix: str) -> float:
        """Return a single scale, finite and not zero."""
        value = float(self.scales(suffix, (), (1,), (1, 1)).float().flatten()[0])
        if value == 0.0:
            raise self.error(suffix, "is zero")
        return value


def modules_with(tensors: TensorSource, suffix: str) -> list[str]:
    """Return the layers that have a tensor with that suffix."""
    tail = f".{suffix}"
    return sorted(name.removesuffix(tail) for name in tensors.names() if name.endswith(tail))


class CheckpointFormat(ABC):
    """How one method stores weights. See docs/extending.md.

    Args:
        fields: the checkpoint's `quantization_config`. Raises `ModelLoadError` for an unsupported
            one, with the field's path as `param`.
    """

    name: str

    @abstractmethod
    def __init__(self, fields: ConfigFields) -> None: ...

    @abstractmethod
    def modules(self, tensors: TensorSource) -> Iterable[str]:
        """Return names of packed layers, without `.weight`."""

    @abstractmethod
    def suffixes(self) -> Iterable[str]:
        """Return suffixes that a packed layer's tensors may have, including unused tensors."""

    def tensors_of(self, module: str) -> Iterable[str]:
        """Return names that a packed layer's tensors may have."""
        return (f"{module}.{suffix}" for suffix in self.suffixes())

    @abstractmethod
    def matrix(self, parts: LayerTensors) -> WeightSource:
        """Return a packed layer's weight [N, K], which refers only to views of the file.

        Raises `ModelLoadError` if its tensors are inconsistent, or scales aren't finite.
        """
