"""A classifier's head that can be made anew with an adapter's tensors in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from engine.models.experts import Weights
from engine.models.norms import Transform
from engine.quantization.matrix import DenseMatrix, Matrix


class HeadMaker:
    """Makes a head, and keeps what it is made of.

    Args:
        weights: the checkpoint's.
        make: reads a head from weights.

    Attributes:
        head: as the checkpoint has it.
        tensors: what that is made of, by name, in float32.
        shapes: of its tensors, by their names.
    """

    def __init__(self, weights: Weights, make: Callable[[Weights], Transform]) -> None:
        tensors = dict[str, Tensor]()
        self._make, self.tensors = make, tensors
        self.head = make(_Recorded(weights, tensors))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def with_tensors(self, given: Mapping[str, Tensor]) -> Transform:
        """The head with these in the place of its own, or biases that it has none of."""
        return self._make(_Held({**self.tensors, **given}))


class _Recorded:
    """A checkpoint's weights; what is read of them is kept."""

    def __init__(self, inner: Weights, read: dict[str, Tensor]) -> None:
        self._inner, self._read = inner, read

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`."""
        self._read[name] = self._inner.get(name, shape).float().clone()
        return self._read[name]

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `Weights.matrix`."""
        return DenseMatrix(self.get(name, shape))

    def release(self) -> None:
        """See `Weights.release`."""
        self._inner.release()


class _Held:
    """Weights in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`."""
        return self._tensors[name].float()

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `Weights.matrix`."""
        return DenseMatrix(self.get(name, shape))

    def release(self) -> None:
        """See `Weights.release`: there is nothing to give back."""
