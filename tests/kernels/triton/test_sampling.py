"""Sampling in Triton's interpreter, against sorting whole rows in float64.

Blocks are small in the interpreter, so that short rows already take several passes.
"""

from __future__ import annotations

import pytest
import torch

from kernels.reference import sampling as reference
from kernels.triton.sampling import argmax, penalise, sample, token_logprobs
from tests.kernels.test_sampling import FILTERS, settings


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 64, 65, 300])
def test_argmax_takes_the_first(vocab):
    logits = torch.randn(4, vocab)
    logits[3, vocab // 2] = logits[3, -1] = 50
    expected = logits.argmax(-1)
    expected[3] = vocab // 2
    assert torch.equal(argmax(logits), expected)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [3, 250])
def test_draws_what_sorting_draws(options, vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    logits *= torch.tensor([0.0, 1.0, 6.0, 30.0])[:, None]
    chosen = settings(4, **options)
    assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_borders_are_found_at_any_scale(spread):
    """More logits beside the border than are sorted at once, some of them equal."""
    made = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 300, generator=made) * 4).round(decimals=1) * spread
    for options in ({"top_k": 100}, {"top_p": 0.6}, {"top_k": 150, "top_p": 0.7}):
        chosen = settings(2, temperature=2.0 * spread, seed=5, **options)
        assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()


def test_what_is_not_finite_breaks_its_row_alone():
    logits = torch.randn(6, 100)
    logits[0, 7] = float("nan")
    logits[1, 40] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    for tokens in (argmax(logits), sample(logits, **settings(6, top_k=40, top_p=0.9))):
        assert tokens[:3].tolist() == [-1, -1, -1]
        assert (tokens[3:] >= 0).all()
        assert int(tokens[3]) < 5


def test_rows_of_all_kinds_share_a_launch():
    logits = torch.randn(4, 90)
    chosen = settings(4)
    chosen["temperature"] = torch.tensor([0.0, 1.0, 0.5, 2.0])
    chosen["top_k"] = torch.tensor([5, 1 << 40, 3, 50])
    chosen["top_p"] = torch.tensor([0.5, 1.0, 0.5, 0.8]).double()
    assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()


def test_the_ends_of_the_unit_interval():
    logits = torch.full((2, 100), float("-inf"))
    logits[:, 20], logits[:, 80] = 0.0, 0.0
    chosen = settings(2)
    chosen["uniforms"] = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert sample(logits, **chosen).tolist() == [20, 80]


def test_no_rows():
    assert sample(torch.empty(0, 10), **settings(0)).shape == (0,)
    assert argmax(torch.empty(0, 10)).shape == (0,)


def test_wrong_settings_are_refused():
    logits = torch.randn(2, 10)
    with pytest.raises(ValueError, match="top_k"):
        sample(logits, **{**settings(2), "top_k": torch.ones(2)})
    with pytest.raises(ValueError, match="logits"):
        argmax(logits.double())


def test_penalties_touch_only_what_is_named():
    logits = torch.randn(3, 50)
    rows = torch.tensor([0, 0, 2, 2, 2])
    ids = torch.tensor([3, 49, 0, 7, 8])
    counts = torch.tensor([1.0, 0.0, 2.0, 0.0, 5.0])
    repetition = torch.tensor([1.5, 9.0, 0.8])
    frequency, presence = torch.tensor([0.5, 9.0, -1.0]), torch.tensor([0.3, 9.0, 2.0])
    expected = logits.double()
    for row, token, count in zip(rows.tolist(), ids.tolist(), counts.tolist()):
        value = float(expected[row, token])
        factor = float(repetition[row])
        value = value / factor if value > 0 else value * factor
        value -= float(frequency[row]) * count + (float(presence[row]) if count else 0.0)
        expected[row, token] = value
    penalise(logits, rows, ids, counts, repetition, frequency, presence)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)


def test_no_penalties():
    logits, none = torch.randn(1, 5), torch.empty(0, dtype=torch.int64)
    one = torch.ones(1)
    before = logits.clone()
    penalise(logits, none, none, none.float(), one, one, one)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 17, 3000])
def test_log_probabilities_and_ranks(vocab):
    logits = torch.randn(5, vocab) * 3
    logits[1] += 1000
    logits[2, vocab // 2 :] = float("-inf") if vocab > 1 else 0.0
    tokens = torch.randint(0, max(1, vocab // 2), (5,))
    found, normalizer, rank = token_logprobs(logits, tokens)
    expected = torch.log_softmax(logits.double(), -1)
    chosen = expected.gather(1, tokens[:, None])
    torch.testing.assert_close(found.double(), chosen[:, 0], rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(normalizer.double(), logits.double().logsumexp(-1))
    assert torch.equal(rank, (expected > chosen).sum(-1) + 1)
