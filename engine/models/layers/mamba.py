"""Layers with a recurrent state instead of attention, and the storage of sequences' states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder_spec import MambaSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.norm import Norm, RMSNorm, Transform, make_norm
from engine.models.layers.weights import LruWeights, StateWeights
from kernels import KernelSet, LinearLayer
from kernels.interface import ScanInputs, ScanWeights, StateRows
from kernels.tensors import to_device

#: Epsilon of the norm in lightning attention, independent of the model's other norms.
LIGHTNING_NORM_EPS = 1e-6


@dataclass(slots=True)
class LayerStateCache:
    """One layer's states of sequences, by block.

    Attributes:
        conv: [num_blocks, width - 1, channels], the convolution's latest inputs.
        scan: [num_blocks, heads, value_size, key_size].
        of: the step's sequences.
        scales: [num_blocks, heads, value_size] for a scan in int8; or None.
    """

    conv: Tensor
    scan: Tensor
    of: StateRows
    scales: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Return the states, by block."""
        return [part for part in (self.conv, self.scan, self.scales) if part is not None]

    def run_scan(self, ops: KernelSet, inputs: ScanInputs, weights: ScanWeights) -> Tensor:
        """Update the states, and return the heads' outputs [num_tokens, values]."""
        return ops.linear_scan(inputs, weights, self.scan, self.of, self.scales).flatten(1)


class StateTable:
    """Blocks of states of all layers of a model, on the kernels' device.

    Convolutions' inputs are float32: if they were rounded at a step's end, results would depend on
    the chunks of a prompt. Scans have the state's dtype, and are rounded after each token.

    A block takes memory when it is first written.
    """

    def __init__(self, state: MambaSpec, ops: KernelSet, num_blocks: int) -> None:
        no_rows = StateRows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
        conv = (num_blocks, state.conv_width - 1, state.channels)
        vectors = (num_blocks, state.num_heads, state.value_size)
        dtype, device = getattr(torch, state.dtype), ops.device
        self._device = device
        self.layers: dict[int, LayerStateCache] = {
            layer: LayerStateCache(
                ops.new_kv_cache(conv, torch.float32),
                ops.new_kv_cache((*vectors, state.key_size), dtype),
                no_rows,
                ops.new_kv_cache(vectors, torch.float32) if dtype == torch.int8 else None,
            )
            for layer, carried in enumerate(state.layers)
            if carried
        }
        #: Number of tokens that each block's state includes, on the host; -1 while a step updates
        #: it.
        self.num_tokens = torch.zeros(num_blocks, dtype=torch.int64)
        #: The step's blocks, and the number of tokens that their states will include.
        self._under_way = no_rows.rows, no_rows.rows

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the states' tensors, whose first dimension is the block."""
        parts = [part for layer in self.layers.values() for part in layer.parts]
        return (*parts, self.num_tokens)

    def begin_step(self, context: AttentionMetadata) -> StateRows:
        """Prepare a step's blocks, and return its sequences with these.

        A recorded step reads them from `context.state_rows`; `prepare` comes before each replay.
        """
        states, rows, saves = context.states, context.state_rows, None
        if rows is None:
            self.prepare(context)
            if states is None:
                raise RuntimeError("the step doesn't say where its states are")
            rows = to_device(states.blocks, self._device)
            saves = to_device(states.saves, self._device) if len(states.saves) else None
        of = StateRows(context.query_start_loc, rows, saves)
        for layer in self.layers.values():
            layer.of = of
        return of

    def prepare(self, context: AttentionMetadata) -> None:
        """Copy `copies`, then clear the blocks of sequences at position 0.

        Raises RuntimeError for a sequence whose state isn't at its first position in the step.
        """
        states, host = context.states, context.host or context
        if states is None:
            raise RuntimeError("the step doesn't say where its states are")
        for source, target in states.copies:
            self.num_tokens[target] = self.num_tokens[source]
            for layer in self.layers.values():
                for part in layer.parts:
                    part[target] = part[source]
        starts, blocks = host.query_start_loc.long(), states.blocks
        first, counts = host.positions[starts[:-1]], starts.diff()
        new = blocks[first == 0]
        self.num_tokens[new] = 0
        if not torch.equal(self.num_tokens[blocks], first):
            raise RuntimeError(
                f"states of {self.num_tokens[blocks].tolist()} tokens can't go on at positions "
                f"{first.tolist()}"
            )
        ends, saved = states.saves.unbind(1)
        # A failed step may update only some layers; then its sequences must start again.
        self.num_tokens[blocks] = self.num_tokens[saved] = -1
        if len(new):
            cleared = to_device(new, self._device)
            for layer in self.layers.values():
                for part in layer.parts:
                    part.index_fill_(0, cleared, 0)
        self._under_way = (
            torch.cat((blocks, saved)),
            torch.cat((first + counts, host.positions[ends - 1] + 1)),
        )

    def finish_step(self) -> None:
        """Record that all layers have processed the tokens of the step that was prepared."""
        blocks, num_tokens = self._under_way
        self.num_tokens[blocks] = num_tokens
        self._under_way = blocks[:0], num_tokens[:0]


@dataclass(slots=True, kw_only=True)
class MambaMixer:
    """A layer's input projection, convolution, recurrence, gated norm and output projection.

    Attributes:
        weights: the layer's weights, including `scan`.
        output: what follows the gated norm: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    scan: ScanWeights
    output: Transform
    eps: float

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        """Update the states, and return [num_tokens, hidden] for x of that shape."""
        weights, state = self.weights, self.weights.state
        delta = state.kind == "delta"
        gate, mixed, rate, beta = self._delta(x) if delta else self._mamba2(x)
        conv = self.ops.causal_conv(mixed, cache.conv, weights.conv, weights.conv_bias, cache.of)
        keys = state.keys
        sizes = (keys, keys, state.values) if delta else (state.values, keys, keys)
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
        values = cache.run_scan(self.ops, inputs, self.scan)
        if state.norm_before_gate:
            return self.output(_gated(self.ops, self._normed(values), gate))
        return self.output(self._normed(_gated(self.ops, values, gate)))

    def _mamba2(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gates, the convolution's inputs, rates, and None."""
        state, projected = self.weights.state, self.weights.inputs(x)
        if self.weights.input_scales is not None:
            projected.mul_(self.weights.input_scales)
        return *projected.split((state.values, state.channels, state.num_heads), -1), None

    def _delta(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gates, the convolution's inputs, rates and betas. Projections are by key head."""
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

    def _normed(self, values: Tensor) -> Tensor:
        """Apply the norm, if any: by head with a shared weight ("delta"), or by key head."""
        ops, state, weight = self.ops, self.weights.state, self.weights.norm
        if weight is None:
            return values
        if state.kind == "delta":
            rows = values.reshape(-1, state.value_size)
            return ops.rms_norm(rows, weight, self.eps).view(values.shape)
        if state.num_key_heads == 1:
            return ops.rms_norm(values, weight, self.eps)
        size = state.values // state.num_key_heads
        ones = torch.ones(size, dtype=weight.dtype, device=weight.device)
        rows = ops.rms_norm(values.reshape(-1, size), ones, self.eps)
        return rows.view(values.shape).mul_(weight)


@dataclass(slots=True, kw_only=True)
class Mamba1Mixer:
    """A layer of Mamba (arXiv 2312.00752): input projection, convolution, projections of its result
    to rates, keys and queries, recurrence, gate, output projection.

    Attributes:
        weights: the layer's weights, including `scan`, `selection` and `rates`.
        selected: norms of the inputs of `rates`, of keys, of queries.
        output: what follows the gate: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    scan: ScanWeights
    selection: LinearLayer
    rates: LinearLayer
    selected: tuple[Norm, ...]
    output: Transform

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        weights, state = self.weights, self.weights.state
        values, gate = weights.inputs(x).split(state.input_sizes, dim=-1)
        values = self.ops.causal_conv(values, cache.conv, weights.conv, weights.conv_bias, cache.of)
        parts = self.selection(values).split(state.x_sizes, dim=-1)
        rate, k, q = (
            norm(part.contiguous()) for norm, part in zip(self.selected, parts, strict=True)
        )
        inputs = ScanInputs(q.unsqueeze(1), k.unsqueeze(1), values.unsqueeze(-1), self.rates(rate))
        scanned = cache.run_scan(self.ops, inputs, self.scan)
        return self.output(_gated(self.ops, scanned, gate))


@dataclass(slots=True, kw_only=True)
class LightningMixer:
    """A layer of lightning attention (arXiv 2401.04658): input projection, SiLU, recurrence with
    fixed decays, norm, gate, output projection.

    Attributes:
        weights: the layer's weights; its convolution is only SiLU.
        norm: the norm over the outputs of all heads.
        output: what follows the gate: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    scan: ScanWeights
    norm: Norm
    output: Transform

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        weights, state = self.weights, self.weights.state
        mixed, gate = weights.inputs(x).split((state.channels, state.values), dim=-1)
        conv = self.ops.causal_conv(mixed, cache.conv, weights.conv, None, cache.of)
        by_head = conv.unflatten(-1, (state.num_heads, 3, state.value_size))
        q, k, v = (part.contiguous() for part in by_head.unbind(-2))
        rate = x.new_zeros((len(x), state.num_heads))  # limits clamp all rates to 1
        inputs = ScanInputs(q, k, v, rate)
        values = cache.run_scan(self.ops, inputs, self.scan)
        return self.output(self.ops.sigmoid_and_mul(gate, self.norm(values)))


@dataclass(slots=True, kw_only=True)
class KimiDeltaMixer:
    """A layer of Kimi delta attention (arXiv 2510.26692): input projection, convolution, recurrence
    with a decay rate for each key, norm of each head, gate, output projection.

    Attributes:
        weights: the layer's weights, including `scan`, `rates`, `gates` and `norm`.
        norm: the norm of a head's output.
        output: what follows the gate: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    scan: ScanWeights
    rates: LinearLayer
    gates: LinearLayer
    norm: Norm
    output: Transform

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        weights, state = self.weights, self.weights.state
        rank = state.dt_rank
        mixed, rate, gate, beta = weights.inputs(x).split(
            (state.channels, rank, rank, state.num_heads), dim=-1
        )
        conv = self.ops.causal_conv(mixed, cache.conv, weights.conv, None, cache.of)
        q, k, v = (part.unflatten(-1, (state.num_heads, -1)) for part in conv.chunk(3, dim=-1))
        rates = self.rates(rate.contiguous()).unflatten(-1, (state.num_heads, -1))
        values = cache.run_scan(self.ops, ScanInputs(q, k, v, rates, beta), self.scan)
        normed = self.norm(values.view(-1, state.value_size)).view(values.shape)
        return self.output(self.ops.sigmoid_and_mul(self.gates(gate.contiguous()), normed))


@dataclass(slots=True, kw_only=True)
class ShortConvMixer:
    """A layer's input projection, gate, convolution, gate and output projection.

    Attributes:
        weights: the layer's weights.
        output: what follows the second gate: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    output: Transform

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        weights = self.weights
        input_gate, output_gate, values = weights.inputs(x).chunk(3, dim=-1)
        conv = self.ops.causal_conv(
            input_gate * values, cache.conv, weights.conv, weights.conv_bias, cache.of, silu=False
        )
        return self.output(output_gate * conv)


@dataclass(slots=True, kw_only=True)
class RgLruMixer:
    """A layer of Griffin (arXiv 2402.19427): input projection, convolution, real-gated linear
    recurrent unit, gate, output projection.

    Attributes:
        weights: the layer's weights, including `lru`.
        output: what follows the gate: [T, values] -> [T, hidden].
    """

    ops: KernelSet
    weights: StateWeights
    lru: LruWeights
    output: Transform

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerStateCache) -> Tensor:
        weights, lru, state = self.weights, self.lru, self.weights.state
        values, gate = weights.inputs(x).split(state.input_sizes, dim=-1)
        conv = self.ops.causal_conv(
            values, cache.conv, weights.conv, weights.conv_bias, cache.of, silu=False
        )
        by_head = conv.unflatten(-1, (state.num_heads, state.value_size))
        gates = by_head.new_empty((*by_head.shape[:2], 2 * state.value_size))
        lru.gates(by_head, gates)
        inputs, decays = self.ops.lru_inputs(
            conv, gates, lru.gate_biases, lru.decay, context.positions
        )
        scanned = self.ops.diagonal_scan(
            inputs, decays, cache.scan.view(len(cache.scan), -1), cache.of
        )
        both = torch.cat((gate, scanned.to(gate.dtype)), dim=-1)
        return self.output(self.ops.gelu_and_mul(both, "tanh"))


StateMixer = (
    MambaMixer | Mamba1Mixer | KimiDeltaMixer | LightningMixer | RgLruMixer | ShortConvMixer
)


def make_mixer(ops: KernelSet, weights: StateWeights, output: Transform, eps: float) -> StateMixer:
    """Build the layer with these weights; `output` is what follows it."""
    if weights.lru is not None:
        return RgLruMixer(ops=ops, weights=weights, lru=weights.lru, output=output)
    if weights.scan is None:
        return ShortConvMixer(ops=ops, weights=weights, output=output)
    if weights.state.kind == "lightning" and weights.norm is not None:
        norm = RMSNorm(ops, weights.norm, LIGHTNING_NORM_EPS)
        return LightningMixer(ops=ops, weights=weights, scan=weights.scan, norm=norm, output=output)
    if weights.rates is not None and weights.gates is not None and weights.norm is not None:
        return KimiDeltaMixer(
            ops=ops,
            weights=weights,
            scan=weights.scan,
            rates=weights.rates,
            gates=weights.gates,
            norm=RMSNorm(ops, weights.norm, eps),
            output=output,
        )
    if weights.selection is None or weights.rates is None:
        return MambaMixer(ops=ops, weights=weights, scan=weights.scan, output=output, eps=eps)
    norms = zip(weights.selection_norms, weights.state.x_sizes, strict=True)
    return Mamba1Mixer(
        ops=ops,
        weights=weights,
        scan=weights.scan,
        selection=weights.selection,
        rates=weights.rates,
        selected=tuple(make_norm(ops, norm, size, eps) for norm, size in norms),
        output=output,
    )


def _gated(ops: KernelSet, values: Tensor, gate: Tensor) -> Tensor:
    """Return values * silu(gate)."""
    return ops.silu_and_mul(torch.cat((gate, values), dim=-1))
