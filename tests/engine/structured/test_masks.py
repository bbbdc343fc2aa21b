"""Bits to logits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from engine.contract.sampling_params import SamplingParams
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler
from engine.sampling.token_bitmask import TokenBitmask, unpack_bits, unpack_on_device
from engine.structured_output.bitmask import INLINE_BUDGET_S, BitmaskBuilder, BitmaskRow
from engine.structured_output.grammar import GrammarState

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 384])
def test_both_ways_of_unpacking_agree(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    bits = rng.integers(-(2**31), 2**31, (3, 12), dtype=np.int64).astype(np.int32)
    expected = [[bool(row[t // 32] >> (t % 32) & 1) for t in range(vocab)] for row in bits.tolist()]
    assert unpack_bits(bits, vocab, CPU).tolist() == expected
    assert unpack_on_device(torch.from_numpy(bits), vocab).tolist() == expected


def test_only_the_named_rows_are_masked_and_forced_tokens_come_anyway() -> None:
    logits = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    initial_copy = logits.clone()
    logits[2, 1] = float("-inf")  # min_tokens, say
    bits = np.array([[0b0101], [0b0010]], dtype=np.int32)
    TokenBitmask([0, 2], bits, eos_only=[1]).apply(logits)
    never = float("-inf")
    assert logits[0].tolist() == [0.0, never, 2.0, never]
    assert torch.equal(logits[1], initial_copy[1])
    assert logits[2].tolist() == [never, 0.0, never, never]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_takes_allowed_tokens_only(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 64) * 4
    logits[:, 5] = 50.0
    states = [
        RequestSamplingState(SamplingParams(temperature=temperature, seed=row), [1], [], row)
        for row in range(8)
    ]
    bits = np.zeros((4, 2), dtype=np.int32)
    bits[:, 1] = 0b1110
    mask = TokenBitmask([0, 2, 4, 6], bits, [])
    output = Sampler().sample(logits.clone(), states, mask)
    chosen = output.token_ids.tolist()
    assert all(token in (33, 34, 35) for token in chosen[::2])
    assert chosen[1::2] == [5, 5, 5, 5]
    assert not output.errors
    # The masks of one step aren't kept for the next.
    assert Sampler().sample(logits.clone(), states).token_ids.tolist() == [5] * 8


def test_masks_are_made_beside_the_step_only_if_they_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, threads, clock = BitmaskBuilder(2, [1]), [], [0.0]
    took, make = [INLINE_BUDGET_S / 3] * 99, maker._output

    def output(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        clock[0] += took.pop()
        return make(*args)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(maker, "_output", output)
    row = BitmaskRow(7, GrammarState(None, None), False)
    for step in range(30):
        future = maker.begin(step, [row, row])
        assert future.result().seq_ids == [7, 7]
    took.append(INLINE_BUDGET_S * 100)  # one that was slow is expected to be so again
    maker.begin(30, [row, row]).result()
    maker.begin(31, [row, row]).result()
    maker.close()
    first_quick = threads.index(True)
    assert 0 < first_quick < 30
    assert all(threads[first_quick:31])
    assert threads[31:] == [False]


def test_what_goes_wrong_with_quick_masks_is_told_as_from_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker = BitmaskBuilder(2, [1])
    maker._row_s = 0.0
    monkeypatch.setattr(maker, "_output", lambda *args: 1 / 0)
    future = maker.begin(1, [BitmaskRow(7, GrammarState(None, None), False)])
    assert isinstance(future.exception(), ZeroDivisionError)
    maker.close()
