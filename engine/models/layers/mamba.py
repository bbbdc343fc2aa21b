"""Layers that carry a state in the place of attention, and where the sequences' states are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder_spec import MambaSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.linear import StateWeights
from engine.models.layers.norm import Transform
from kernels import KernelSet
from kernels.interface import ScanInputs, StateRows

#: Rows of a table at first; it grows as sequences come.
_FEWEST_ROWS = 4


@dataclass(slots=True)
class LayerStateCache:
    """What one layer keeps of each sequence, by its row of the running batch.

    Attributes:
        conv: [rows, width - 1, channels], the last inputs of the convolution.
        scan: [rows, heads, value_size, key_size].
        of: the sequences of the step.
    """

    conv: Tensor
    scan: Tensor
    of: StateRows


class StateTable:
    """The states of all layers of a model, float32 on the kernels' device.

    A row's memory is taken when its first sequence comes, and kept for the next one.
    """

    def __init__(self, state: MambaSpec, ops: KernelSet) -> None:
        self._state, self._ops = state, ops
        nobody = StateRows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
        self.layers: dict[int, LayerStateCache] = {
            layer: LayerStateCache(*self._rows(0), nobody)
            for layer, carried in enumerate(state.layers)
            if carried
        }
        #: Tokens that each row's state has taken in; -1 while a step is under way.
        self._tokens = torch.zeros(0, dtype=torch.int64)
        #: The step's rows, and what their states will have taken in.
        self._under_way = nobody.rows, nobody.rows

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Empty states of so many sequences."""
        state = self._state
        conv = (count, state.conv_width - 1, state.channels)
        scan = (count, state.num_heads, state.value_size, state.key_size)
        device = self._ops.device
        return torch.zeros(conv, device=device), torch.zeros(scan, device=device)

    def gather_states(self, context: AttentionMetadata) -> None:
        """Make the tables ready for a step's sequences: those at position 0 start anew.

        Raises RuntimeError for a sequence that goes on from where its state isn't.
        """
        rows = context.sequence_rows
        if rows is None:
            raise RuntimeError("the step doesn't say whose sequences these are")
        starts = context.query_start_loc.long()
        first, counts = context.positions[starts[:-1]], starts.diff()
        if len(rows) and int(rows.max()) >= len(self._tokens):
            self._grow(int(rows.max()) + 1)
        fresh = rows[first == 0]
        self._tokens[fresh] = 0
        if not torch.equal(self._tokens[rows], first):
            raise RuntimeError(
                f"states of {self._tokens[rows].tolist()} tokens can't go on at positions "
                f"{first.tolist()}"
            )
        # A step that fails leaves some layers ahead of others: its sequences must start anew.
        self._tokens[rows] = -1
        of = StateRows(context.query_start_loc, rows)
        for layer in self.layers.values():
            layer.of = of
            if len(fresh):
                layer.conv[fresh] = 0.0
                layer.scan[fresh] = 0.0
        self._under_way = rows, first + counts

    def scatter_states(self) -> None:
        """All layers have taken in the step's tokens."""
        rows, tokens = self._under_way
        self._tokens[rows] = tokens

    def _grow(self, count: int) -> None:
        held = len(self._tokens)
        count = max(count, 2 * held, _FEWEST_ROWS)
        for layer in self.layers.values():
            conv, scan = self._rows(count)
            conv[:held], scan[:held] = layer.conv, layer.scan
            layer.conv, layer.scan = conv, scan
        self._tokens = torch.cat((self._tokens, torch.zeros(count - held, dtype=torch.int64)))


@dataclass(slots=True, kw_only=True)
class MambaMixer:
    """One layer's product, convolution, recurrence, gated norm and product.

    Attributes:
        weights: of the layer.
        output: what follows the gated norm: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    output: Transform
    eps: float

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        """[num_tokens, hidden] of the same. Takes the step's tokens into their states."""
        weights, state = self.weights, self.weights.state
        delta = state.kind == "delta"
        gate, mixed, rate, beta = self._delta(x) if delta else self._mamba2(x)
        conv = self.ops.causal_conv(mixed, cache.conv, weights.conv, weights.conv_bias, cache.of)
        keys, values = state.keys, state.values
        sizes = (keys, keys, values) if delta else (values, keys, keys)
        first, second, third = conv.split(sizes, dim=-1)
        q, k, v = (first, second, third) if delta else (third, second, first)
        by_key = (state.num_key_heads, state.key_size)
        inputs = ScanInputs(
            q.unflatten(-1, by_key),
            k.unflatten(-1, by_key),
            v.unflatten(-1, (state.num_heads, state.value_size)),
            rate,
            beta,
        )
        found = self.ops.linear_scan(inputs, weights.scan, cache.scan, cache.of).flatten(1)
        return self.output(self._normed(found, gate))

    def _mamba2(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gates, what goes through the convolution, rates."""
        state = self.weights.state
        parts = self.weights.inputs(x).split((state.values, state.channels, state.num_heads), -1)
        return *parts, None

    def _delta(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gates, what goes through the convolution, rates, betas: sorted out by key head."""
        state, rates = self.weights.state, self.weights.rates
        if rates is None:
            raise RuntimeError("a layer by the delta rule has rates")
        shared = state.num_heads // state.num_key_heads
        wide = shared * state.value_size
        by_head = self.weights.inputs(x).unflatten(-1, (state.num_key_heads, -1))
        q, k, v, gate = by_head.split((state.key_size, state.key_size, wide, wide), dim=-1)
        beta, rate = rates(x).unflatten(-1, (state.num_key_heads, 2, shared)).unbind(-2)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        return gate.flatten(1), mixed, rate.flatten(1), beta.flatten(1)

    def _normed(self, found: Tensor, gate: Tensor) -> Tensor:
        """The gated norm: by head before the gate ("delta"), or behind it by key head."""
        ops, state, weight = self.ops, self.weights.state, self.weights.norm
        if state.kind == "delta":
            rows = found.reshape(-1, state.value_size)
            found = ops.rms_norm(rows, weight, self.eps).view(found.shape)
            return ops.silu_and_mul(torch.cat((gate, found), dim=-1))
        gated = ops.silu_and_mul(torch.cat((gate, found), dim=-1))
        if state.num_key_heads == 1:
            return ops.rms_norm(gated, weight, self.eps)
        size = state.values // state.num_key_heads
        ones = torch.ones(size, dtype=weight.dtype, device=weight.device)
        rows = ops.rms_norm(gated.view(-1, size), ones, self.eps)
        return rows.view(gated.shape).mul_(weight)
