"""Convolutions and recurrences that carry a state, against float64 token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.interface import KernelSet, ScanInputs, ScanWeights, StateRows
from tests.kernels.tolerance import assert_close

ROWS, SPANS = 6, (5, 1, 0, 17, 2)
TOKENS = sum(SPANS)


def whose(spans: tuple[int, ...] = SPANS) -> StateRows:
    starts = torch.tensor([0, *torch.tensor(spans).cumsum(0).tolist()], dtype=torch.int32)
    return StateRows(starts, torch.tensor([4, 0, 5, 2, 3])[: len(spans)])


def scan(delta: bool, heads: int, key_heads: int, value: int, key: int) -> tuple[
    ScanInputs, ScanWeights, Tensor
]:  # fmt: skip
    """Queries, keys and values lie side by side, as a layer's products do."""
    sizes = (key_heads * key, key_heads * key, heads * value, heads, heads)
    q, k, v, rate, beta = torch.randn(TOKENS, sum(sizes)).split(sizes, dim=1)
    inputs = ScanInputs(
        q.unflatten(1, (key_heads, key)),
        k.unflatten(1, (key_heads, key)),
        v.unflatten(1, (heads, value)),
        rate,
        beta if delta else None,
    )
    weights = ScanWeights(
        decay=-torch.rand(heads) * 2,
        rate_bias=torch.randn(heads) * 3,
        skip=None if delta else torch.randn(heads),
        limits=(0.0, math.inf) if delta else (0.05, 4.0),
        delta=delta,
    )
    return inputs, weights, torch.randn(ROWS, heads, value, key)


def by_definition(
    inputs: ScanInputs, weights: ScanWeights, states: Tensor, of: StateRows
) -> tuple[Tensor, Tensor]:
    """What comes out, and the states afterwards, in float64 and one head at a time."""
    states, out = states.double(), torch.zeros(inputs.v.shape, dtype=torch.float64)
    shared = inputs.v.shape[1] // inputs.k.shape[1]
    for i, row in enumerate(of.rows.tolist()):
        for t in range(int(of.starts[i]), int(of.starts[i + 1])):
            for head in range(inputs.v.shape[1]):
                q, k = (x[t, head // shared].double() for x in (inputs.q, inputs.k))
                v, state = inputs.v[t, head].double(), states[row, head]
                raw = inputs.rate[t, head].double() + weights.rate_bias[head].double()
                rate = torch.log1p(raw.exp()).clamp(*weights.limits)
                state = state * torch.exp(rate * weights.decay[head].double())
                if weights.delta:
                    q, k = (x / torch.sqrt(x @ x + 1e-6) for x in (q, k))
                    q = q / math.sqrt(len(q))
                    assert inputs.beta is not None
                    rate = 1 / (1 + torch.exp(-inputs.beta[t, head].double()))
                    v = v - state @ k
                states[row, head] = state = state + rate * torch.outer(v, k)
                out[t, head] = state @ q
                if weights.skip is not None:
                    out[t, head] += weights.skip[head].double() * v
    return out, states


@pytest.mark.parametrize("sizes", [(4, 1, 32, 8), (6, 3, 7, 20), (2, 2, 16, 64)])
@pytest.mark.parametrize("delta", [False, True])
def test_a_scan_takes_in_one_token_after_the_other(
    kernels: KernelSet, threads: int, delta: bool, sizes: tuple[int, int, int, int]
) -> None:
    inputs, weights, states = scan(delta, *sizes)
    expected_out, after = by_definition(inputs, weights, states, whose())
    got = kernels.linear_scan(inputs, weights, states, whose())
    assert_close(got, expected_out, torch.float32, 20.0)
    assert_close(states, after, torch.float32, 20.0)


@pytest.mark.parametrize(("value_size", "key_size"), [(1, 20), (7, 20), (7, 64)])
def test_each_key_of_a_head_may_have_a_decay(
    kernels: KernelSet, threads: int, value_size: int, key_size: int
) -> None:
    inputs, weights, states = scan(False, 40, 1, value_size, key_size)
    weights = replace(weights, decay=-torch.rand(40, key_size) * 2)
    expected_out, after = by_definition(inputs, weights, states, whose())
    got = kernels.linear_scan(inputs, weights, states, whose())
    assert_close(got, expected_out, torch.float32, 20.0)
    assert_close(states, after, torch.float32, 20.0)


def test_each_key_of_a_head_may_have_a_rate(kernels: KernelSet, threads: int) -> None:
    """Kimi delta attention: a head's keys decay each at a rate that the token brings."""
    inputs, weights, states = scan(True, 4, 4, 18, 20)
    inputs = replace(inputs, rate=torch.randn(TOKENS, 4, 20))
    weights = replace(weights, rate_bias=torch.randn(4, 20))
    of, after = whose(), states.double()
    expected_tensor = torch.zeros(TOKENS, 4, 18, dtype=torch.float64)
    rates = torch.nn.functional.softplus(inputs.rate.double() + weights.rate_bias.double())
    decay = torch.exp(rates * weights.decay.double()[:, None])
    assert inputs.beta is not None
    beta = inputs.beta.double().sigmoid()
    for i, row in enumerate(of.rows.tolist()):
        for t in range(int(of.starts[i]), int(of.starts[i + 1])):
            for head in range(4):
                q, k = (
                    x[t, head].double() / (x[t, head].double().square().sum() + 1e-6).sqrt()
                    for x in (inputs.q, inputs.k)
                )
                state = after[row, head] * decay[t, head]
                missing = inputs.v[t, head].double() - state @ k
                after[row, head] = state + beta[t, head] * torch.outer(missing, k)
                expected_tensor[t, head] = after[row, head] @ q / math.sqrt(20)
    got = kernels.linear_scan(inputs, weights, states, of)
    assert_close(got, expected_tensor, torch.float32, 20.0)
    assert_close(states, after, torch.float32, 20.0)


def test_a_diagonal_scan_takes_in_one_token_after_the_other(
    kernels: KernelSet, threads: int
) -> None:
    channels = 300
    x, decay = torch.randn(TOKENS, channels), torch.rand(TOKENS, channels)
    states = torch.randn(ROWS, channels)
    of, after = replace(whose(), saves=torch.tensor([(8, 1)])), states.double()
    expected = torch.zeros(TOKENS, channels, dtype=torch.float64)
    for i, row in enumerate(of.rows.tolist()):
        for t in range(int(of.starts[i]), int(of.starts[i + 1])):
            after[row] = expected[t] = decay[t].double() * after[row] + x[t].double()
            if t == 7:
                after[1] = after[row]
    assert_close(kernels.diagonal_scan(x, decay, states, of), expected, torch.float32, 4.0)
    assert_close(states, after, torch.float32, 4.0)
    with pytest.raises(ValueError, match="don't go together"):
        kernels.diagonal_scan(x, decay[1:], states, of)


def test_inputs_of_a_gated_unit_are_exact_where_hardly_anything_decays(
    kernels: KernelSet, threads: int
) -> None:
    heads, size = 3, 37
    x, gates = torch.randn(TOKENS, heads * size), torch.randn(TOKENS, heads, 2 * size) * 3
    biases, positions = torch.randn(heads, 2 * size), torch.arange(TOKENS) % 9
    decay = -torch.logspace(-9, 1, heads * size)
    chosen = torch.sigmoid(gates.double() + biases.double())
    inputs, log_decay = chosen[..., :size].flatten(1), chosen[..., size:].flatten(1) * decay
    root = torch.where(positions[:, None] == 0, 1.0, torch.expm1(2 * log_decay).neg().sqrt())
    got, decays = kernels.lru_inputs(x, gates, biases, decay, positions)
    torch.testing.assert_close(got.double(), x * inputs * root, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(decays.double(), log_decay.exp(), rtol=2e-6, atol=1e-12)
    with pytest.raises(ValueError, match="don't go together"):
        kernels.lru_inputs(x, gates, biases, decay[1:], positions)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.int8, 0.05)])
def test_states_in_few_bits_are_rounded_after_each_token(
    compiled: KernelSet, threads: int, dtype: torch.dtype, error: float, delta: bool
) -> None:
    """Near to float64, and to the bit the same in one piece and token by token."""
    inputs, weights, states = scan(delta, 4, 2, 18, 24)
    expected_out, _ = by_definition(inputs, weights, states, whose())
    scales = states.abs().amax(-1) / 127 if dtype == torch.int8 else None
    narrow = (states if scales is None else (states / scales[..., None]).round()).to(dtype)
    first = narrow.clone(), None if scales is None else scales.clone()
    saves = torch.tensor([(8, 1)])
    of = replace(whose(), saves=saves)
    got = compiled.linear_scan(inputs, weights, first[0], of, first[1])
    assert (got - expected_out).abs().max() < error * expected_out.abs().max()
    second = narrow.clone(), None if scales is None else scales.clone()
    for i, row in enumerate(whose().rows):
        for t in range(int(of.starts[i]), int(of.starts[i + 1])):
            one = StateRows(torch.tensor([0, 1], dtype=torch.int32), row[None].clone())
            parts = (inputs.q, inputs.k, inputs.v, inputs.rate, inputs.beta)
            cut = ScanInputs(*(part if part is None else part[t : t + 1] for part in parts))
            step = compiled.linear_scan(cut, weights, second[0], one, second[1])
            assert torch.equal(step, got[t : t + 1])
            if t == 7:
                for part, save in zip(second, first, strict=True):
                    assert part is None or save is None or torch.equal(part[row], save[1])
    second[0][1] = first[0][1]
    assert torch.equal(first[0], second[0])


def test_a_state_in_int8_that_is_no_number_stays_so(compiled: KernelSet) -> None:
    inputs, weights, states = scan(False, 4, 2, 8, 24)
    inputs.v[0, 1, 2] = math.nan
    scales = torch.ones(states.shape[:-1])
    out = compiled.linear_scan(inputs, weights, states.to(torch.int8), whose(), scales)
    assert out[4, 1, 2].isnan()
    assert out[4, 1, :2].isfinite().all()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_sees_the_inputs_of_earlier_steps(
    kernels: KernelSet, threads: int, bias: bool, silu: bool
) -> None:
    channels, width = 300, 4
    x = torch.randn(TOKENS, channels + 9)[:, :channels]
    weight, states = torch.randn(width, channels), torch.randn(ROWS, width - 1, channels)
    added = torch.randn(channels) if bias else None
    expected_tensor, after = torch.zeros(TOKENS, channels, dtype=torch.float64), states.double()
    of = whose()
    for i, row in enumerate(of.rows.tolist()):
        start, end = int(of.starts[i]), int(of.starts[i + 1])
        past = torch.cat((states[row], x[start:end])).double()
        for t in range(end - start):
            total = (past[t : t + width] * weight.double()).sum(0)
            total = total if added is None else total + added.double()
            expected_tensor[start + t] = total / (1 + torch.exp(-total)) if silu else total
        after[row] = past[len(past) - width + 1 :]
    got = kernels.causal_conv(x, states, weight, added, of, silu=silu)
    assert_close(got, expected_tensor, torch.float32, 4.0)
    assert_close(states, after, torch.float32)


@pytest.mark.parametrize("delta", [False, True])
def test_states_between_two_tokens_are_kept_too(
    kernels: KernelSet, threads: int, delta: bool
) -> None:
    """What a step that ends there leaves, and nothing else changes."""
    inputs, weights, states = scan(delta, 4, 2, 18, 24)
    x, weight, conv = torch.randn(TOKENS, 40), torch.randn(4, 40), torch.randn(ROWS + 3, 3, 40)
    states = torch.cat((states, torch.zeros(3, *states.shape[1:])))
    # The fourth sequence has the tokens [6, 23), the fifth [23, 25).
    ends = (7, 20, 25)
    saves = torch.tensor([(end, ROWS + i) for i, end in enumerate(ends)])
    baseline_states, baseline_conv = states.clone(), conv.clone()
    expected_out = kernels.linear_scan(inputs, weights, baseline_states, whose())
    expected_conv = kernels.causal_conv(x, baseline_conv, weight, None, whose())
    for i, end in enumerate(ends):
        start, row = ((6, 2), (6, 2), (23, 3))[i]
        cut_states, cut_conv = states.clone(), conv.clone()
        one = StateRows(torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([row]))
        cut = ScanInputs(
            *(part[start:end] for part in (inputs.q, inputs.k, inputs.v, inputs.rate)),
            None if inputs.beta is None else inputs.beta[start:end],
        )
        kernels.linear_scan(cut, weights, cut_states, one)
        kernels.causal_conv(x[start:end], cut_conv, weight, None, one)
        baseline_states[ROWS + i], baseline_conv[ROWS + i] = cut_states[row], cut_conv[row]
    of = StateRows(whose().starts, whose().rows, saves)
    assert torch.equal(kernels.linear_scan(inputs, weights, states, of), expected_out)
    assert torch.equal(kernels.causal_conv(x, conv, weight, None, of), expected_conv)
    torch.testing.assert_close(states, baseline_states)
    torch.testing.assert_close(conv, baseline_conv)


@pytest.mark.parametrize("saves", [[(0, 1)], [(26, 1)], [(7, 6)], [(7, 1), (6, 1)]])
def test_states_that_nothing_can_be_kept_in_are_refused(
    compiled: KernelSet, saves: list[tuple[int, int]]
) -> None:
    of = StateRows(whose().starts, whose().rows, torch.tensor(saves))
    with pytest.raises(ValueError, match="contradict"):
        compiled.causal_conv(
            torch.randn(TOKENS, 8), torch.randn(ROWS, 3, 8), torch.randn(4, 8), None, of
        )


@pytest.mark.parametrize(
    ("kind", "key_size"), [("mamba1", 20), ("mamba2", 24), ("mamba2", 128), ("delta", 24)]
)
def test_bits_depend_neither_on_chunks_nor_on_neighbours(
    compiled: KernelSet, kind: str, key_size: int
) -> None:
    """Other sequences and a prompt in one piece, or each token by itself."""
    inputs, weights, states = scan(kind == "delta", 4, 2, 18, key_size)
    if kind == "mamba1":
        inputs, weights, states = scan(False, 40, 1, 1, key_size)
        weights = replace(weights, decay=-torch.rand(40, key_size))
    of, isolated_copy, conv = whose(), states.clone(), torch.randn(ROWS, 3, 40)
    x, weight, apart = torch.randn(TOKENS, 40), torch.randn(4, 40), conv.clone()
    together = compiled.linear_scan(inputs, weights, states, of)
    full = compiled.causal_conv(x, conv, weight, None, of)
    for i, row in enumerate(of.rows):
        for t in range(int(of.starts[i]), int(of.starts[i + 1])):
            one = StateRows(torch.tensor([0, 1], dtype=torch.int32), row[None].clone())
            token_slice = slice(t, t + 1)
            parts = (inputs.q, inputs.k, inputs.v, inputs.rate, inputs.beta)
            cut = ScanInputs(*(part if part is None else part[token_slice] for part in parts))
            assert torch.equal(
                compiled.linear_scan(cut, weights, isolated_copy, one), together[token_slice]
            )
            assert torch.equal(
                compiled.causal_conv(x[token_slice], apart, weight, None, one), full[token_slice]
            )
    assert torch.equal(isolated_copy, states)
    assert torch.equal(apart, conv)


def test_what_does_not_go_together_is_refused(compiled: KernelSet) -> None:
    inputs, weights, states = scan(True, 4, 2, 8, 8)
    of = whose()
    for invalid, words in [
        ((replace(inputs, k=inputs.k[:, :1]), weights, states, of), "don't go together"),
        ((replace(inputs, beta=inputs.beta[:, :1]), weights, states, of), "beta"),  # type: ignore[index]
        ((inputs, replace(weights, decay=weights.decay[:2]), states, of), "decay"),
        ((inputs, weights, states.double(), of), "states"),
        ((inputs, weights, states, replace(of, rows=of.rows + 4)), "contradict"),
        ((inputs, weights, states, replace(of, starts=of.starts + 1)), "contradict"),
        ((inputs, weights, states, replace(of, rows=of.rows.int())), "rows"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            compiled.linear_scan(*invalid)
    conv, weight = torch.zeros(ROWS, 3, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="don't go together"):
        compiled.causal_conv(torch.zeros(TOKENS, 9), conv, weight, None, of)
    with pytest.raises(ValueError, match="contradict"):
        compiled.causal_conv(
            torch.zeros(TOKENS, 8), conv, weight, None, replace(of, rows=of.rows + 4)
        )
