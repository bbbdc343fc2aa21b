"""From a checkpoint's tensors to an encoder's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.rotary import RopeSpec, cos_sin_table
from engine.models.adapters import AdaptedLinear, CurrentStep
from engine.models.description import LinearDescription, LinearPart
from engine.models.encoders.attention import BidirectionalAttention, Sequences
from engine.models.encoders.spec import EncoderSpec
from engine.models.experts import Weights
from engine.models.norms import LayerNorm, NoNorm, Norm, Transform, chain
from kernels import KernelSet, LinearLayer
from kernels.activations import activation, gated_activation
from kernels.interface import ActivationSpec


@dataclass(slots=True)
class EncoderLayer:
    """Attention and MLP, with norms after the residual ("post") or before ("pre")."""

    attention: BidirectionalAttention
    attention_norm: Norm
    mlp: Transform
    mlp_norm: Norm
    pre: bool

    def __call__(self, x: Tensor, positions: Tensor, sequences: Sequences) -> Tensor:
        """[T, hidden] of the same."""
        if self.pre:
            x = x + self.attention(self.attention_norm(x), positions, sequences)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm.add(self.attention(x, positions, sequences), x)
        return self.mlp_norm.add(self.mlp(x), x)


def encoder_linears(spec: EncoderSpec) -> list[dict[str, LinearDescription]]:
    """Each layer's linear layers by the slots that adapters name, by names without the prefix."""
    inner, names = spec.num_heads * spec.head_dim, spec.names
    found = []
    for index in range(spec.num_layers):
        at = names.layer.format(index)

        def linear(
            parts: Sequence[str], rows: int, columns: int, bias: bool, at: str = at
        ) -> LinearDescription:
            each = tuple(LinearPart(at + name, rows // len(parts)) for name in parts)
            return LinearDescription(parts=each, columns=columns, bias=bias)

        up = spec.intermediate_size * (2 if spec.gated else 1)
        found.append(
            {
                "qkv": linear(names.qkv, 3 * inner, spec.hidden_size, spec.qkv_bias),
                "o": linear([names.o], spec.hidden_size, inner, spec.o_bias),
                "up": linear(names.up, up, spec.hidden_size, spec.mlp_bias),
                "down": linear(
                    [names.down], spec.hidden_size, spec.intermediate_size, spec.mlp_bias
                ),
            }
        )
    return found


class EncoderBuilder:
    """Builds layers from weights, one at a time.

    Args:
        dtype: in which linear weights are kept. Norms, biases and tables of positions are float32.
        max_model_len: length of the rotary tables.
        step: says which adapters the rows of a step go through.

    Attributes:
        linears: of each layer, by slot, without adapters.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        ops: KernelSet,
        dtype: torch.dtype,
        max_model_len: int,
        weights: Weights,
        step: CurrentStep,
    ) -> None:
        self._step, self._described = step, encoder_linears(spec)
        self.linears: list[dict[str, LinearLayer]] = [{} for _ in self._described]
        self.spec, self.ops, self.dtype, self.weights = spec, ops, dtype, weights
        self._max_model_len = max_model_len
        self._tables: list[tuple[RopeSpec, Tensor]] = []
        whole = f"{spec.names.prefix}{spec.names.embedding}.weight"
        self._prefix = spec.names.prefix if whole in weights else ""
        self._bias_table: Tensor | None = None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of the encoder, in the checkpoint's dtype, maybe backed by the mapped file."""
        return self.weights.get(self._prefix + name, shape)

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor of our own, in float32, on the kernels' device."""
        return self.tensor(name, *shape).float().clone().to(self.ops.device)

    def norm(self, name: str) -> Norm:
        """The LayerNorm of this name; "" for none."""
        if not name:
            return NoNorm()
        size = self.spec.hidden_size
        # torch's norm wants its weights in the dtype of what is normed.
        kept = self.ops.activation_dtype(self.dtype)
        bias = self.vector(f"{name}.bias", size).to(kept) if self.spec.norm_bias else None
        weight = self.vector(f"{name}.weight", size).to(kept)
        return LayerNorm(size, weight, bias, self.spec.norm_eps)

    def linear(self, index: int, slot: str) -> LinearLayer:
        """A linear layer, whose rows get what their adapters add."""
        described = self._described[index][slot]
        weight = torch.cat(
            [
                self.tensor(f"{part.name}.weight", part.rows, described.columns)
                for part in described.parts
            ]
        )
        biased = described.parts if described.bias else ()
        biases = [self.vector(f"{part.name}.bias", part.rows) for part in biased]
        layer = self.ops.PackedLinear(
            weight.to(self.dtype).contiguous(), torch.cat(biases) if biases else None
        )
        self.linears[index][slot] = layer
        return AdaptedLinear(self.ops, layer, (index, slot), self._step)

    def layer(self, index: int) -> EncoderLayer:
        """One layer."""
        spec, names, at = self.spec, self.spec.names, self.spec.names.layer.format(index)
        has_norm = spec.wiring == "post" or spec.first_norm or index > 0
        return EncoderLayer(
            attention=self._attention(index),
            attention_norm=self.norm(at + names.attention_norm if has_norm else ""),
            mlp=self._mlp(index),
            mlp_norm=self.norm(at + names.mlp_norm),
            pre=spec.wiring == "pre",
        )

    def _attention(self, index: int) -> BidirectionalAttention:
        spec = self.spec
        return BidirectionalAttention(
            project=self.linear(index, "qkv"),
            output=self.linear(index, "o"),
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            cos_sin=self._table(spec.ropes[index]) if spec.ropes else None,
            reach=spec.reach[index] if spec.reach else 0,
            bias_table=self._relative_bias(),
        )

    def _relative_bias(self) -> Tensor | None:
        """The table of relative position biases, one for all layers."""
        spec = self.spec
        if spec.relative_buckets and self._bias_table is None:
            name = f"{spec.names.relative_bias}.weight"
            self._bias_table = self.vector(name, spec.relative_buckets, spec.num_heads)
        return self._bias_table

    def _table(self, rope: RopeSpec) -> Tensor:
        """The rotary table, one for all layers with the same embedding."""
        for known, table in self._tables:
            if known == rope:
                return table
        table = cos_sin_table(rope, self._max_model_len).to(self.ops.device)
        self._tables.append((rope, table))
        return table

    def _mlp(self, index: int) -> Transform:
        spec = self.spec
        act = (
            gated_activation(self.ops, ActivationSpec(spec.activation))
            if spec.gated
            else activation(spec.activation)
        )
        return chain(self.linear(index, "up"), act, self.linear(index, "down"))
