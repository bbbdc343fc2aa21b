"""Layers with a recurrent state: the arguments of all kernels, and an implementation in torch.

`causal_conv`: a short convolution over a sequence's last inputs. `linear_scan`: each head has a
matrix S [value_size, key_size], updated by one token after the other:

    rate = softplus(rate + bias), within limits;  S = exp(rate * decay) * S
    Mamba (arXiv 2312.00752), Mamba 2 (arXiv 2405.21060):  S += rate * v k^T
    gated delta rule (arXiv 2412.06464):  S += sigmoid(beta) * (v - S k) k^T,
        with k and q normalized to length 1, q over sqrt(key_size)
    y = S q + skip * v

A head has one decay factor, or one per key, which comes from decays per key (Mamba, whose heads
have one value) or from rates per key (Kimi delta attention, arXiv 2510.26692). Consecutive heads
share a key and a query if there are fewer of these than heads.

`diagonal_scan`: each channel has a number h, which a token replaces by decay * h + x (the
real-gated linear recurrent unit, arXiv 2402.19427). `lru_inputs` computes both for that unit:

    decay = exp(sigmoid(recurrence gate) * log decay)
    x = sigmoid(input gate) * input * sqrt(1 - decay^2), without the root at position 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tensors import describe


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step.

    Attributes:
        starts: int32 [n + 1]; sequence i has the tokens [starts[i], starts[i + 1]).
        rows: int64 [n], each sequence's row in the state tables, without duplicates.
        saves: int64 [m, 2] of (end, row), `end` ascending: the state after the step's token end - 1
            is also written to this row, which no sequence uses. None for no saves.
    """

    starts: Tensor
    rows: Tensor
    saves: Tensor | None = None

    def saves_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (end, row) of the saves of the sequence with the tokens [start, end)."""
        saves = [] if self.saves is None else self.saves.tolist()
        return [(last, row) for last, row in saves if start < last <= end]


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The inputs of T tokens, with any stride between tokens.

    Attributes:
        q, k: [T, key_heads, key_size].
        v: [T, heads, value_size].
        rate: [T, heads] or [T, heads, key_size], before bias and softplus.
        beta: [T, heads], before the sigmoid; None to use the rate instead.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    beta: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """A layer's parameters, float32 [heads].

    Attributes:
        decay: below 0; [heads], or [heads, key_size] unless `delta`.
        rate_bias: added to rates, with their shape; per key only if `delta`.
        skip: the factor of v that is added to the output; None for none.
        limits: minimum and maximum rate.
        delta: whether to use the gated delta rule.
    """

    decay: Tensor
    rate_bias: Tensor
    skip: Tensor | None = None
    limits: tuple[float, float] = (0.0, math.inf)
    delta: bool = False


#: Dtypes of stored states.
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def check_scan(
    inputs: ScanInputs, weights: ScanWeights, states: Tensor, scales: Tensor | None
) -> None:
    """Raise ValueError for inconsistent shapes."""
    heads, key_heads = inputs.v.shape[1], inputs.k.shape[1]
    shape = (inputs.v.shape[0], heads)
    expected = (states.shape[0], heads, inputs.v.shape[2], inputs.k.shape[2])
    same = inputs.q.shape == inputs.k.shape and inputs.k.shape[0] == shape[0]
    if not same or not key_heads or heads % key_heads or states.shape != expected:
        raise ValueError(
            f"q {describe(inputs.q)}, k {describe(inputs.k)}, v {describe(inputs.v)} and states "
            f"{describe(states)} don't go together"
        )
    if (scales is not None) != (states.dtype == torch.int8) or (
        scales is not None and scales.shape != states.shape[:-1]
    ):
        raise ValueError("states of int8, and they alone, have scales [rows, heads, value_size]")
    by_head, by_key = [(heads,)], [(heads,), (heads, inputs.k.shape[2])]
    if inputs.beta is not None and inputs.beta.shape != shape:
        raise ValueError(f"beta {describe(inputs.beta)} must be {list(shape)}")
    for name, of, shapes in (
        ("decay", weights.decay, by_head if weights.delta else by_key),
        ("rate_bias", weights.rate_bias, by_key if weights.delta else by_head),
        ("skip", weights.skip, by_head),
    ):
        if of is not None and tuple(of.shape) not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} {describe(of)} must be {allowed}")
    if inputs.rate.shape != (shape[0], *weights.rate_bias.shape):
        raise ValueError(
            f"rate {describe(inputs.rate)} must be {[shape[0], *weights.rate_bias.shape]}"
        )


def check_conv(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, of: StateRows
) -> None:
    """Raise ValueError for inconsistent shapes."""
    width, channels = weight.shape
    fits = x.shape[1:] == (channels,) and states.shape[1:] == (width - 1, channels)
    if not fits or (bias is not None and bias.shape != (channels,)):
        raise ValueError(
            f"x {describe(x)}, states {describe(states)} and weight {describe(weight)} don't go "
            "together"
        )


def causal_conv(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of: StateRows,
    *,
    silu: bool = True,
) -> Tensor:
    """See `KernelSet.causal_conv`."""
    check_conv(x, states, weight, bias, of)
    out, history = torch.empty_like(x), weight.shape[0] - 1
    for start, end, row in _sequence_spans(of):
        if start == end:
            continue
        past = torch.cat((states[row].to(x.dtype), x[start:end]))
        windows = past.unfold(0, history + 1, 1)  # [count, C, W]
        sums = (windows * weight.T.to(x.dtype)).sum(-1)
        sums = sums if bias is None else sums + bias
        out[start:end] = torch.nn.functional.silu(sums) if silu else sums
        for last, target in of.saves_between(start, end):
            states[target] = past[last - start : last - start + history].to(states.dtype)
        states[row] = past[len(past) - history :].to(states.dtype)
    return out


def linear_scan(
    inputs: ScanInputs,
    weights: ScanWeights,
    states: Tensor,
    of: StateRows,
    scales: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.linear_scan`."""
    check_scan(inputs, weights, states, scales)
    kind = torch.float64 if states.dtype == torch.float64 else torch.float32
    repeat = inputs.v.shape[1] // inputs.k.shape[1]
    v, rate = inputs.v.to(kind), inputs.rate.to(kind)
    q, k = (part.to(kind).repeat_interleave(repeat, dim=1) for part in (inputs.q, inputs.k))
    rate = torch.nn.functional.softplus(rate + weights.rate_bias.to(kind)).clamp(*weights.limits)
    decays = weights.decay.to(kind).view(weights.decay.shape[0], 1, -1)
    decay = (rate.view(*v.shape[:2], 1, -1) * decays).exp()  # [T, heads, 1, 1 or key_size]
    beta = (rate if inputs.beta is None else inputs.beta.to(kind).sigmoid())[..., None]
    if weights.delta:
        q = _unit(q) * q.shape[-1] ** -0.5
        k = _unit(k)
    out = torch.empty_like(v)
    for start, end, row in _sequence_spans(of):
        state = _opened(states, scales, row).to(kind)
        saves = of.saves_between(start, end)
        for t in range(start, end):
            state = state * decay[t]
            update = v[t]
            if weights.delta:
                update = update - (state @ k[t].unsqueeze(-1)).squeeze(-1)
            state = state + (update * beta[t]).unsqueeze(-1) * k[t].unsqueeze(-2)
            out[t] = (state @ q[t].unsqueeze(-1)).squeeze(-1)
            if states.dtype != kind:
                _round(state, states, scales, row)
                state = _opened(states, scales, row).to(kind)
            for last, target in saves:
                if last == t + 1:
                    _round(state, states, scales, target)
        _round(state, states, scales, row)
    if weights.skip is not None:
        out += weights.skip.to(kind)[:, None] * v
    return out.to(inputs.v.dtype)


def diagonal_scan(x: Tensor, decay: Tensor, states: Tensor, of: StateRows) -> Tensor:
    """See `KernelSet.diagonal_scan`."""
    check_diagonal(x, decay, states)
    out = torch.empty_like(x)
    for start, end, row in _sequence_spans(of):
        state, saves = states[row].to(x.dtype), of.saves_between(start, end)
        for t in range(start, end):
            state = decay[t] * state + x[t]
            out[t] = state
            for last, target in saves:
                if last == t + 1:
                    states[target] = state.to(states.dtype)
        states[row] = state.to(states.dtype)
    return out


def check_diagonal(x: Tensor, decay: Tensor, states: Tensor) -> None:
    """Raise ValueError for inconsistent shapes."""
    if x.dim() != 2 or decay.shape != x.shape or states.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"x {describe(x)}, decay {describe(decay)} and states {describe(states)} don't go "
            "together"
        )


def lru_inputs(
    x: Tensor, gates: Tensor, biases: Tensor, decay: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `KernelSet.lru_inputs`."""
    check_lru(x, gates, biases, decay, positions)
    halves = (gates + biases).sigmoid().chunk(2, dim=-1)
    input_gate, recurrence_gate = (half.flatten(1) for half in halves)
    log_decay = recurrence_gate * decay
    norm = torch.expm1(2 * log_decay).neg_().sqrt_()
    # A sequence's first token is used unchanged: there is no state to decay.
    norm = torch.where((positions == 0)[:, None], 1.0, norm)
    return x * input_gate * norm, log_decay.exp()


def check_lru(x: Tensor, gates: Tensor, biases: Tensor, decay: Tensor, positions: Tensor) -> None:
    """Raise ValueError for inconsistent shapes."""
    heads, both = biases.shape
    fits = gates.shape == (len(x), heads, both) and x.shape == (len(x), heads * both // 2)
    if not fits or decay.shape != x.shape[1:] or positions.shape != x.shape[:1]:
        raise ValueError(
            f"x {describe(x)}, gates {describe(gates)}, biases {describe(biases)} and decay "
            f"{describe(decay)} don't go together"
        )


def _opened(states: Tensor, scales: Tensor | None, row: int) -> Tensor:
    """Return one row of the states, multiplied by its scales."""
    return states[row] if scales is None else states[row] * scales[row].unsqueeze(-1)


def _round(state: Tensor, states: Tensor, scales: Tensor | None, row: int) -> None:
    """Write one row of the states, with a scale for each vector."""
    if scales is not None:
        scales[row] = state.abs().amax(-1) / 127
        state = (state / scales[row].clamp(min=1e-38).unsqueeze(-1)).round()
    states[row] = state.to(states.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _sequence_spans(of: StateRows) -> list[tuple[int, int, int]]:
    """Return (first token, end, row) of each sequence."""
    starts = of.starts.tolist()
    return list(zip(starts[:-1], starts[1:], of.rows.tolist(), strict=True))


class StateOperations:
    """The operations of a `KernelSet`, here in torch."""

    def causal_conv(
        self,
        x: Tensor,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of: StateRows,
        *,
        silu: bool = True,
    ) -> Tensor:
        """Return silu(each channel's weighted sum of a sequence's last W inputs), or the sum, [T,
        C].

        x [T, C], with any stride between tokens; weight [W, C], whose last row is for the token
        itself; bias [C]. `states` [R, W - 1, C] contains previous inputs by row, and is updated to
        the sequences' last tokens. `of`: the rows and tokens of sequences.
        """
        return causal_conv(x, states, weight, bias, of, silu=silu)

    def linear_scan(
        self,
        inputs: ScanInputs,
        weights: ScanWeights,
        states: Tensor,
        of: StateRows,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Return each token's queries applied to its heads' states, [T, heads, value_size].

        `states` [R, heads, value_size, key_size] is float32, bfloat16, or int8 with a scale per
        vector. It is updated and rounded token by token, see `kernels.ssm`. `of`: the rows and
        tokens of sequences.
        """
        return linear_scan(inputs, weights, states, of, scales)

    def diagonal_scan(self, x: Tensor, decay: Tensor, states: Tensor, of: StateRows) -> Tensor:
        """Return decay * state + x of each channel, token by token, [T, C].

        x and decay [T, C], contiguous. `states` [R, C], float32, is updated to the sequences' last
        tokens. `of`: the rows and tokens of sequences.
        """
        return diagonal_scan(x, decay, states, of)

    def lru_inputs(
        self, x: Tensor, gates: Tensor, biases: Tensor, decay: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x and decay of `diagonal_scan` for a real-gated linear recurrent unit.

        x [T, heads * size], contiguous; gates [T, heads, 2 * size]: each head's input gates, then
        its recurrence gates, before `biases` [heads, 2 * size] and the sigmoid; decay [heads *
        size], the logarithm of the decay for a recurrence gate of 1; positions int64 [T].
        """
        return lru_inputs(x, gates, biases, decay, positions)
