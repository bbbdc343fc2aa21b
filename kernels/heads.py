"""A linear layer for each head, as one function."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.layers import LinearLayer


class HeadLinears:
    """y[:, h] = x[:, h] W_h^T, one head after the other: on any set of kernels.

    Attributes:
        nbytes: that one pass over all weights reads.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """`layers`: of each head. Raises ValueError unless they are of one shape."""
        shapes = {(layer.in_features, layer.out_features) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"the heads' layers have {len(shapes)} shapes")
        self.layers = list(layers)
        self.nbytes = sum(layer.nbytes for layer in layers)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write [T, heads, N] of x [T, heads, K]; a head's values lie side by side in both."""
        for head, layer in enumerate(self.layers):
            out[:, head] = layer(x[:, head])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; none where its memory isn't torch's."""
        return {
            f"{head}.{name}": tensor
            for head, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
