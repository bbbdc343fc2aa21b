"""Sampling in Triton's interpreter, against sorting whole rows in float64.

Blocks are small in the interpreter, so that short rows already take several passes.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels.logit_edits import PenaltyRows, TokenTable
from kernels.reference import sampling as reference
from kernels.triton.launch import launch
from kernels.triton.sampling import TritonLogitEdits, argmax, sample, token_logprobs
from tests.kernels.test_sampling import FILTERS, settings

module = importlib.import_module("kernels.triton.sampling.sample")
EDITS = TritonLogitEdits()


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 64, 65, 300])
def test_argmax_takes_the_first(vocab):
    logits = torch.randn(4, vocab)
    logits[3, vocab // 2] = logits[3, -1] = 50
    expected = logits.argmax(-1)
    expected[3] = vocab // 2
    assert torch.equal(argmax(logits), expected)


@pytest.mark.parametrize("vocab", [3, 130])
def test_draws_what_sorting_draws(vocab):
    """A row of each filter and spread, all in one launch."""
    rows = [
        (options, spread)
        for index, options in enumerate(FILTERS)
        for spread in ((0.0, 1.0, 6.0, 30.0)[index % 4 :: 2] if vocab > 3 else (6.0,))
    ]
    row_settings = [settings(1, seed=index, **options) for index, (options, _) in enumerate(rows)]
    chosen = {name: torch.cat([one[name] for one in row_settings]) for name in row_settings[0]}
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
    logits *= torch.tensor([spread for _, spread in rows])[:, None]
    assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()


def peaked(rows, vocab):
    """Logits of which a handful weigh nearly everything, far apart and side by side."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab, generator=generator)
    logits[:, [1, 2, 70, 140, 141]] += torch.tensor([9.0, 10.0, 11.0, 9.5, 10.5])
    return logits


def test_rows_that_few_logits_decide_are_not_searched(monkeypatch):
    """What is settled before the search of a whole row by one program, and what is left to it."""
    row_settings = []

    def without_the_search(kernel, grid, *args, **options):
        if kernel is module.search_kernel:
            row_settings.extend((args[5][:, -2] != 2147483647).tolist())
        else:
            launch(kernel, grid, *args, **options)

    monkeypatch.setattr(module, "launch", without_the_search)
    ways = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.8, "temperature": 0.7}, {"min_p": 0.1, "top_p": 0.8},
        {"min_p": 0.1, "top_k": 4},
    ]  # fmt: skip
    new_settings = [settings(1, seed=index, **options) for index, options in enumerate(ways)]
    chosen = {name: torch.cat([one[name] for one in new_settings]) for name in new_settings[0]}
    logits = peaked(len(ways), 200)
    assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()
    assert not any(row_settings)
    row_settings.clear()
    sample(torch.zeros(2, 200), **settings(2, top_p=0.9))
    sample(torch.randn(1, 200), **settings(1, top_k=100))
    assert row_settings == [True, True, True]


@pytest.mark.parametrize("spread", [1e-6, 1e6])
def test_borders_are_found_at_any_scale(spread):
    """More logits beside the border than are sorted at once, some of them equal."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 300, generator=generator) * 4).round(decimals=1) * spread
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


def penalized(rows, slots):
    tensors = [torch.tensor(indexes, dtype=torch.int32) for indexes in (rows, slots)]
    return PenaltyRows(
        *tensors, torch.tensor([1.5, 0.8]), torch.tensor([0.5, -1.0]), torch.tensor([0.3, 2.0])
    )


def test_penalties_touch_only_what_is_named():
    logits = torch.randn(3, 50)
    table = TokenTable(*(torch.full((4, 600), 7, dtype=torch.int32) for _ in range(2)))
    changes = [(3, 0, 3, 1), (3, 1, 49, 0), (1, 0, 0, 2), (1, 1, 7, 0), (1, 2, 8, 5)]
    EDITS.update_token_table(table, torch.tensor(changes, dtype=torch.int32).T)
    assert int((table.ids != 7).sum()) == 4
    expected, factors = logits.double(), penalized([0, 2], [3, 1])
    for slot, _, token, count in changes:
        index = 0 if slot == 3 else 1
        value, factor = float(expected[2 * index, token]), float(factors.repetition[index])
        value = value / factor if value > 0 else value * factor
        value -= float(factors.frequency[index]) * count
        expected[2 * index, token] = value - (float(factors.presence[index]) if count else 0.0)
    EDITS.apply_penalties(logits, factors, table, torch.tensor([2, 3], dtype=torch.int32))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)


def test_no_penalties():
    logits = torch.randn(1, 5)
    table = TokenTable(*(torch.zeros((0, 0), dtype=torch.int32) for _ in range(2)))
    initial_copy = logits.clone()
    none = torch.empty(0, dtype=torch.int32)
    empty = PenaltyRows(none, none, none.float(), none.float(), none.float())
    EDITS.update_token_table(table, torch.empty((4, 0), dtype=torch.int32))
    EDITS.apply_penalties(logits, empty, table, none)
    assert torch.equal(logits, initial_copy)


def test_edits_of_single_places():
    logits = torch.randn(3, 5000)
    expected = logits.clone()
    rows, ids = torch.arange(600) % 3, torch.randperm(5000)[:600]
    values = torch.randn(600)
    expected[rows, ids] += values
    EDITS.add_bias(logits, rows, ids, values)
    assert torch.equal(logits, expected)
    expected[rows, ids] = float("-inf")
    EDITS.mask_tokens(logits, rows.repeat(2), ids.repeat(2))
    assert torch.equal(logits, expected)


def test_edits_that_do_not_fit_are_refused():
    logits, one = torch.randn(2, 50), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="too few"):
        EDITS.apply_bitmask(logits, one, torch.zeros((1, 1), dtype=torch.int32), None)
    with pytest.raises(ValueError, match="bits"):
        EDITS.apply_bitmask(logits, one, torch.zeros((1, 2)), None)
    with pytest.raises(ValueError, match="values"):
        EDITS.add_bias(logits, one, one, torch.zeros(2))
    table = TokenTable(*(torch.zeros((1, 4), dtype=torch.int32) for _ in range(2)))
    with pytest.raises(ValueError, match="changes"):
        EDITS.update_token_table(table, torch.zeros((3, 1), dtype=torch.int32))


@pytest.mark.parametrize("vocab", [1, 17, 3000])
def test_log_probabilities_and_ranks(vocab):
    logits = torch.randn(5, vocab) * 3
    logits[1] += 1000
    logits[2, vocab // 2 :] = float("-inf") if vocab > 1 else 0.0
    tokens = torch.randint(0, max(1, vocab // 2), (5,))
    tensor, normalizer, rank = token_logprobs(logits, tokens)
    expected = torch.log_softmax(logits.double(), -1)
    chosen = expected.gather(1, tokens[:, None])
    torch.testing.assert_close(tensor.double(), chosen[:, 0], rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(normalizer.double(), logits.double().logsumexp(-1))
    assert torch.equal(rank, (expected > chosen).sum(-1) + 1)
