"""`RotaryLayer`, a layer of vision towers with rotary embedding by row and column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.encoders.encoder import LengthBatches
from engine.models.layers.norm import Norm, Transform
from kernels import KernelSet


class Rotation:
    """A rotation by angles [n, head_dim / 2]."""

    __slots__ = ("_cos", "_sin")

    def __init__(self, angles: Tensor) -> None:
        self._cos, self._sin = angles.cos()[:, None, None], angles.sin()[:, None, None]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [n, k, heads, head_dim], the first half of each head with the second."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(slots=True, kw_only=True)
class RotaryLayer:
    """Attention and MLP with a norm before each. For `round_attention` see
    `KernelSet.encoder_attention`.
    """

    ops: KernelSet
    round_attention: bool
    attention_norm: Norm
    qkv: Transform
    output: Transform
    mlp_norm: Norm
    mlp: Transform
    num_heads: int

    def __call__(self, x: Tensor, rotation: Rotation, sequences: LengthBatches) -> Tensor:
        """Return [n, hidden] of x [n, hidden]. Patches attend within each of `sequences`."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), 3, self.num_heads, -1)
        qkv = torch.cat((rotation(qkv[:, :2]), qkv[:, 2:]), dim=1)
        x = x + self.output(self._attend(qkv, sequences))
        return x + self.mlp(self.mlp_norm(x))

    def _attend(self, qkv: Tensor, sequences: LengthBatches) -> Tensor:
        """Return attention within sequences, [n, 3, heads, head_dim] -> [n, heads * head_dim]."""
        ordered = sequences.sorted(qkv)
        parts = []
        for length, first, end in sequences.groups:
            q, k, v = ordered[first:end].unbind(1)
            parts.append(
                self.ops.encoder_attention(q, k, v, length, round_inputs=self.round_attention)
            )
        return sequences.restored(torch.cat(parts)).flatten(1)
