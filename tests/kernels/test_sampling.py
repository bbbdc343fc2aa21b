"""Choosing tokens, against sorting whole rows in float64."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels.interface import KernelSet
from kernels.reference import sampling as reference


def settings(rows, temperature=1.0, top_k=1 << 40, top_p=1.0, min_p=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "temperature": torch.full((rows,), temperature),
        "top_k": torch.full((rows,), top_k, dtype=torch.int64),
        "top_p": torch.full((rows,), top_p, dtype=torch.float64),
        "min_p": torch.full((rows,), min_p, dtype=torch.float64),
        "uniforms": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("vocab", [1, 15, 64, 65, 1000, 8192, 33001])
def test_argmax_takes_the_first(kernels, threads, vocab):
    logits = torch.randn(9, vocab)
    logits[3, vocab // 2] = logits[3, -1] = 50
    expected = logits.argmax(-1)
    expected[3] = vocab // 2
    assert torch.equal(kernels.argmax(logits), expected)


def test_what_is_not_finite_breaks_its_row_alone(kernels):
    logits = torch.randn(6, 500)
    logits[0, 7] = float("nan")
    logits[1, 400] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    options = settings(6, top_k=40, top_p=0.9)
    for tokens in (kernels.argmax(logits), kernels.sample(logits, **options)):
        assert tokens[:3].tolist() == [-1, -1, -1]
        assert (tokens[3:] >= 0).all()
        assert tokens[3] < 5


FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 900},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-9},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    {"top_k": 700, "top_p": 0.99, "min_p": 1e-4, "temperature": 2.0},
]


@functools.cache
def drawn(vocab: int) -> list[tuple[dict, torch.Tensor, dict, torch.Tensor]]:
    """For each of the filters: itself, logits, all settings, and what sorting draws."""
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab))
    logits *= torch.tensor([0.0, 1.0, 6.0]).repeat(4)[:, None]
    chosen_settings = [(options, settings(12, **options)) for options in FILTERS]
    return [
        (o, logits, chosen, reference.sample(logits, **chosen)) for o, chosen in chosen_settings
    ]


@pytest.mark.parametrize("vocab", [3, 100, 5000, 40000])
def test_draws_what_sorting_draws(compiled, vocab):
    for options, logits, chosen, expected in drawn(vocab):
        got = compiled.sample(logits, **chosen)
        # A weight summed in another order may move a border past a uniform number: not past two.
        assert int((got != expected).sum()) <= (1 if vocab > 10_000 else 0), options


def test_ties_go_to_the_lower_ids(kernels):
    logits = torch.zeros(200, 1000)
    tokens = kernels.sample(logits, **settings(200, top_k=7))
    assert set(tokens.tolist()) == set(range(7))
    tokens = kernels.sample(logits, **settings(200, top_p=0.0045))
    assert set(tokens.tolist()) == set(range(5))


def test_draws_follow_the_weights(kernels):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 4000
    tokens = kernels.sample(probabilities.log().repeat(count, 1), **settings(count))
    drawn = torch.bincount(tokens, minlength=4) / count
    assert (drawn - probabilities).abs().max() < 0.03


def test_the_ends_of_the_unit_interval(kernels):
    logits = torch.full((2, 300), float("-inf"))
    logits[:, 20], logits[:, 200] = 0.0, 0.0
    chosen = settings(2)
    chosen["uniforms"] = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert kernels.sample(logits, **chosen).tolist() == [20, 200]


def test_a_row_does_not_depend_on_the_others(kernels, threads):
    logits = torch.randn(8, 3000)
    chosen = settings(8, top_p=0.9)
    full_sample = kernels.sample(logits, **chosen)
    isolated_sample = kernels.sample(logits[5:6], **{name: x[5:6] for name, x in chosen.items()})
    assert int(isolated_sample) == int(full_sample[5])


def test_the_reference_sorts_some_rows_at_once(monkeypatch):
    logits, options = torch.randn(7, 100), settings(7, top_p=0.9)
    expected = reference.sample(logits, **options)
    monkeypatch.setattr(reference, "_SORTED_AT_ONCE", 300)
    sorted_rows = []
    argmax = reference.argmax
    monkeypatch.setattr(
        reference, "argmax", lambda rows: (sorted_rows.append(len(rows)), argmax(rows))[1]
    )
    assert torch.equal(reference.sample(logits, **options), expected)
    assert sorted_rows == [3, 3, 1]


def test_no_rows(kernels):
    assert kernels.sample(torch.empty(0, 10), **settings(0)).shape == (0,)
    assert kernels.argmax(torch.empty(0, 10)).shape == (0,)


def test_wrong_settings_are_refused(compiled):
    logits = torch.randn(2, 10)
    with pytest.raises(ValueError, match="top_k"):
        compiled.sample(logits, **{**settings(2), "top_k": torch.ones(2)})
    with pytest.raises(ValueError, match="uniforms"):
        compiled.sample(logits, **{**settings(2), "uniforms": torch.ones(3).double()})
    with pytest.raises(ValueError, match="logits"):
        compiled.argmax(logits.double())
    with pytest.raises(ValueError, match="vocabulary"):
        compiled.argmax(torch.empty(3, 0))


@pytest.mark.parametrize("vocab", [1, 77, 5000])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_top_logprobs(compiled: KernelSet, threads: int, vocab: int, k: int) -> None:
    torch.manual_seed(vocab + k)
    k = min(k, vocab)
    logits = (torch.randn(6, vocab) * 5).round(decimals=1)  # so that some are equal
    logits[1, vocab // 2 :] = float("-inf") if vocab > 1 else 0.0
    tokens = torch.randint(vocab, (6,))
    ids, values, ranks, normalizers = compiled.top_logprobs(logits, tokens, k)
    exact = logits.double()
    expected = exact - exact.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(values.double(), expected.gather(1, ids), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normalizers.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], logits.sort(dim=-1, descending=True, stable=True)[1][:, :k])
    above = (logits[:, None] > logits.gather(1, ids)[:, :, None]).sum(-1)
    assert torch.equal(ranks, above + 1)


def test_top_logprobs_of_broken_rows(compiled: KernelSet) -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    values, normalizers = compiled.top_logprobs(logits, torch.zeros(4).long(), 2)[1::2]
    assert normalizers.isfinite().tolist() == [False, False, False, True]
    assert values.isfinite().all(-1).tolist() == [False, False, False, True]
    with pytest.raises(ValueError, match="k "):
        compiled.top_logprobs(logits, torch.zeros(4).long(), 10)
    for token in (-1, 9):
        with pytest.raises(ValueError, match="row"):
            compiled.top_logprobs(logits, torch.full((4,), token), 1)
