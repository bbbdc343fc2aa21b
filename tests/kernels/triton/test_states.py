"""Convolutions and recurrences that carry a state, against float64 token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from kernels import ssm
from kernels.interface import ScanInputs, ScanWeights, StateRows
from kernels.triton.states import causal_conv, diagonal_scan, linear_scan
from tests.kernels.tolerance import assert_close

SPANS = (3, 1, 0, 6, 2)
TOKENS, ROWS = sum(SPANS), 9
OF = StateRows(
    torch.tensor([0, 3, 4, 4, 10, 12], dtype=torch.int32),
    torch.tensor([4, 0, 5, 2, 3]),
    torch.tensor([(2, 6), (7, 7), (9, 1), (9, 8)]),
)

#: heads, heads of keys, size of values, size of keys; then what else is by key.
KINDS = {
    "mamba 1": (70, 1, 1, 16, False, True, False),
    "mamba 2": (4, 2, 18, 24, False, False, False),
    "large heads": (2, 1, 70, 128, False, False, False),
    "delta": (4, 2, 18, 24, True, False, False),
    "kimi delta": (2, 2, 20, 20, True, False, True),
}


def scan(kind: str, dtype: torch.dtype) -> tuple[ScanInputs, ScanWeights, Tensor]:
    heads, key_heads, value, key, delta, decays, rates = KINDS[kind]
    rate = heads * key if rates else heads
    sizes = (key_heads * key, key_heads * key, heads * value, rate, heads)
    parts = torch.randn(TOKENS, sum(sizes)).to(dtype).split(sizes, dim=1)
    q, k = (part.unflatten(1, (key_heads, key)) for part in parts[:2])
    rates_of_tokens = parts[3].unflatten(1, (heads, key)) if rates else parts[3]
    inputs = ScanInputs(
        q, k, parts[2].unflatten(1, (heads, value)), rates_of_tokens, parts[4] if delta else None
    )
    weights = ScanWeights(
        decay=-torch.rand(heads, key) if decays else -torch.rand(heads),
        rate_bias=torch.randn(heads, key) * 3 if rates else torch.randn(heads) * 3,
        skip=None if delta else torch.randn(heads),
        limits=(0.0, float("inf")) if delta else (0.05, 4.0),
        delta=delta,
    )
    return inputs, weights, torch.randn(ROWS, heads, value, key)


def part_of(inputs: ScanInputs, tokens: slice) -> ScanInputs:
    beta = None if inputs.beta is None else inputs.beta[tokens]
    parts = (inputs.q, inputs.k, inputs.v, inputs.rate)
    return ScanInputs(*(part[tokens] for part in parts), beta)


def chunks(lengths: tuple[int, ...]) -> list[tuple[slice, StateRows]]:
    """The fourth sequence's six tokens in chunks, with the saves that lie in each."""
    first, cut = 4, []
    assert OF.saves is not None
    for length in lengths:
        ends = [(end - first, row) for end, row in OF.saves.tolist() if 0 < end - first <= length]
        starts = torch.tensor([0, length], dtype=torch.int32)
        saves = torch.tensor(ends).reshape(-1, 2) if ends else None
        cut.append((slice(first, first + length), StateRows(starts, torch.tensor([2]), saves)))
        first += length
    return cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_takes_in_one_token_after_the_other(kind: str, dtype: torch.dtype) -> None:
    """In float64; what is saved between two tokens is what a shorter step would leave."""
    inputs, weights, states = scan(kind, dtype)
    wide = ScanInputs(
        *(part.double() for part in (inputs.q, inputs.k, inputs.v, inputs.rate)),
        None if inputs.beta is None else inputs.beta.double(),
    )
    after = states.double()
    expected = ssm.linear_scan(wide, weights, after, OF)
    got = linear_scan(inputs, weights, states, OF)
    assert got.dtype == dtype
    assert_close(got, expected, dtype, 20.0 if dtype == torch.float32 else 1.0)
    assert_close(states, after, torch.float32, 20.0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", ["mamba 1", "mamba 2", "kimi delta"])
def test_bits_depend_neither_on_cuts_nor_on_neighbours(kind: str, stored: torch.dtype) -> None:
    inputs, weights, states = scan(kind, torch.float32)
    scales = states.abs().amax(-1) / 127 if stored == torch.int8 else None
    states = (states if scales is None else (states / scales[..., None]).round()).to(stored)
    first = (states.clone(), None if scales is None else scales.clone())
    together = linear_scan(inputs, weights, first[0], OF, first[1])
    for lengths in ((1, 1, 1, 1, 1, 1), (4, 2), (2, 3, 1)):
        second = (states.clone(), None if scales is None else scales.clone())
        for tokens, of in chunks(lengths):
            got = linear_scan(part_of(inputs, tokens), weights, second[0], of, second[1])
            assert torch.equal(got, together[tokens])
        for one, other in zip(first, second, strict=True):
            for row in (2, 7, 1, 8):
                assert one is None or other is None or torch.equal(one[row], other[row])


@pytest.mark.parametrize(("stored", "error"), [(torch.bfloat16, 0.02), (torch.int8, 0.05)])
def test_states_in_few_bits_are_near_to_float64(stored: torch.dtype, error: float) -> None:
    inputs, weights, states = scan("delta", torch.float32)
    expected = ssm.linear_scan(inputs, weights, states.double(), OF)
    scales = states.abs().amax(-1) / 127 if stored == torch.int8 else None
    states = (states if scales is None else (states / scales[..., None]).round()).to(stored)
    got = linear_scan(inputs, weights, states, OF, scales)
    assert (got - expected).abs().max() < error * expected.abs().max()


def test_a_state_in_int8_that_is_no_number_stays_so() -> None:
    inputs, weights, states = scan("mamba 2", torch.float32)
    inputs.v[0, 1, 2] = float("nan")
    scales = torch.ones(states.shape[:-1])
    out = linear_scan(inputs, weights, states.to(torch.int8), OF, scales)
    assert out[2, 1, 2].isnan()
    assert out[2, 1, :2].isfinite().all()


def test_small_rates_keep_their_digits() -> None:
    """A rate of 1e-6 is what a state takes in of a token: 1 + exp(x) alone would round it away."""
    inputs, weights, states = scan("mamba 2", torch.float32)
    inputs.rate.zero_()
    weights = replace(weights, rate_bias=torch.full((4,), -14.0), limits=(0.0, 1.0), skip=None)
    after = states.double().zero_()
    wide = ScanInputs(*(p.double() for p in (inputs.q, inputs.k, inputs.v, inputs.rate)))
    expected = ssm.linear_scan(wide, weights, after, OF)
    got = linear_scan(inputs, weights, states.zero_(), OF)
    assert_close(got, expected, torch.float32, 20.0)


@pytest.mark.parametrize(
    ("width", "bias", "silu", "dtype"),
    [
        (4, True, True, torch.float32),
        (3, False, False, torch.float32),
        (1, False, True, torch.float32),
        (4, True, True, torch.bfloat16),
    ],
)
def test_a_convolution_sees_the_inputs_of_earlier_steps(
    width: int, bias: bool, silu: bool, dtype: torch.dtype
) -> None:
    """In float64; in chunks the same bits, and the same histories."""
    channels = 150
    x = torch.randn(TOKENS, channels + 9).to(dtype)[:, :channels]
    weight, states = torch.randn(width, channels), torch.randn(ROWS, width - 1, channels)
    added = torch.randn(channels) if bias else None
    after, cut = states.double(), states.clone()
    wide = None if added is None else added.double()
    expected = ssm.causal_conv(x.double(), after, weight.double(), wide, OF, silu=silu)
    got = causal_conv(x, states, weight, added, OF, silu=silu)
    assert_close(got, expected, dtype, 4.0 if dtype == torch.float32 else 1.0)
    assert_close(states, after, torch.float32)
    for tokens, of in chunks((2, 1, 3)):
        assert torch.equal(causal_conv(x[tokens], cut, weight, added, of, silu=silu), got[tokens])
    assert torch.equal(cut[[2, 7, 1, 8]], states[[2, 7, 1, 8]])


def test_a_diagonal_scan_takes_in_one_token_after_the_other() -> None:
    channels = 150
    x, decay, states = (
        torch.randn(TOKENS, channels), torch.rand(TOKENS, channels), torch.randn(ROWS, channels),
    )  # fmt: skip
    after, cut = states.double(), states.clone()
    expected = ssm.diagonal_scan(x.double(), decay.double(), after, OF)
    got = diagonal_scan(x, decay, states, OF)
    assert_close(got, expected, torch.float32, 4.0)
    assert_close(states, after, torch.float32, 4.0)
    for tokens, of in chunks((1, 5)):
        assert torch.equal(diagonal_scan(x[tokens], decay[tokens], cut, of), got[tokens])
    assert torch.equal(cut[[2, 7, 1, 8]], states[[2, 7, 1, 8]])


def test_a_sequence_without_tokens_writes_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its row may be one that another sequence writes at the same time."""
    written: list[Tensor] = []
    store = interpreter._interpreter.store

    def record(addresses, values, mask):  # type: ignore[no-untyped-def]
        written.append(torch.from_numpy(addresses[mask].astype("int64")))
        return store(addresses, values, mask)

    monkeypatch.setattr(interpreter._interpreter, "store", record)
    inputs, weights, states = scan("mamba 2", torch.float32)
    x, history = torch.randn(TOKENS, 20), torch.randn(ROWS, 3, 20)
    numbers = torch.randn(ROWS, 20)
    for table, call in (
        (states, lambda: linear_scan(inputs, weights, states, OF)),
        (history, lambda: causal_conv(x, history, torch.randn(4, 20), None, OF)),
        (numbers, lambda: diagonal_scan(x, x, numbers, OF)),
    ):
        written.clear()
        call()
        rows = (torch.cat(written) - table.data_ptr()) // table[0].nbytes
        assert {*rows.tolist()} & {*range(ROWS)} == {4, 0, 2, 3, 6, 7, 1, 8}


def test_what_does_not_go_together_is_refused() -> None:
    inputs, weights, states = scan("delta", torch.float32)
    ints = replace(OF, rows=OF.rows.int())
    for call, words in (
        (lambda: linear_scan(inputs, weights, states, ints), "rows"),
        (lambda: linear_scan(inputs, weights, states.half(), OF), "states"),
        (lambda: linear_scan(inputs, weights, states, replace(OF, saves=OF.saves.int())), "saves"),
        (lambda: causal_conv(inputs.beta.T, states[0], weights.decay[None], None, OF), "together"),
        (lambda: diagonal_scan(inputs.beta, inputs.beta, states[:, 0, 0, :4], OF), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
