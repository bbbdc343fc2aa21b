"""The two acceptance methods, by statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.contract.sampling_params import SamplingParams
from engine.sampling.rejection_sampler import TypicalAcceptanceSampler, filtered_probabilities
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler
from engine.worker.sampling_io import accepted_after

VOCAB, DRAWS = 12, 6000
#: The 99.99th percentile of chi-square with 11 degrees of freedom: fixed seeds, so no chance.
MAX_CHI_SQUARE = 37.4
TYPICAL = TypicalAcceptanceSampler(0.09, 0.3)


def states(params: SamplingParams, count: int = DRAWS, seed: int = 0) -> list[RequestSamplingState]:
    seeds = np.random.default_rng(seed).integers(2**63, size=count).tolist()
    return [RequestSamplingState(params, [1], [], one) for one in seeds]


def shares(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=VOCAB).double()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    expected = expected * counts.sum()
    some = expected > 0
    assert counts[~some].sum() == 0
    return float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
    ],
)
def test_the_probabilities_that_drafts_are_judged_by_are_those_of_the_draws(
    params: SamplingParams,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB) * 1.5
    expected = filtered_probabilities(logits, [params])[0]
    assert float(expected.sum()) == pytest.approx(1.0)
    drawn = Sampler().sample(logits.repeat(DRAWS, 1), states(params)).token_ids
    assert chi_square(shares(drawn), expected) < MAX_CHI_SQUARE


def test_the_rejection_sampler_leaves_the_distribution_as_it_is() -> None:
    """Drafts of another distribution, drawn with the same random numbers: what comes out is the
    model's, at the draft's place and behind it, and more drafts hold than independent ones would.
    """
    torch.manual_seed(1)
    params = SamplingParams(temperature=0.9)
    target, after, other = (torch.randn(1, VOCAB) for _ in range(3))
    other = target + 0.7 * other
    p, q, third = (
        torch.softmax(logits[0].double() / 0.9, dim=-1) for logits in (target, other, after)
    )
    rows = states(params)
    drafts = Sampler().sample(other.repeat(DRAWS, 1), rows).token_ids.tolist()
    local_values = Sampler().sample(target.repeat(DRAWS, 1), rows).token_ids.tolist()
    next_rows = [row.with_drafts([token])[0] for row, token in zip(rows, local_values, strict=True)]
    second = Sampler().sample(after.repeat(DRAWS, 1), next_rows).token_ids.tolist()
    got = [
        [first, *accepted_after([draft], [first], [more])]
        for draft, first, more in zip(drafts, local_values, second, strict=True)
    ]
    allocated_tokens = [tokens for tokens in got if len(tokens) == 2]
    assert all(tokens[0] == draft for tokens, draft in zip(got, drafts, strict=True) if tokens[1:])
    assert chi_square(shares(torch.tensor([tokens[0] for tokens in got])), p) < MAX_CHI_SQUARE
    assert (
        chi_square(shares(torch.tensor([tokens[1] for tokens in allocated_tokens])), third)
        < MAX_CHI_SQUARE
    )
    assert len(allocated_tokens) / DRAWS > float((p * q).sum()) + 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_typical_sampler_takes_what_is_likely_enough_and_else_draws(
    temperature: float,
) -> None:
    torch.manual_seed(2)
    params = SamplingParams(temperature=temperature)
    logits = torch.randn(1, VOCAB) * 2
    p = torch.softmax(logits[0].double() / temperature, dim=-1)
    entropy = -sum(float(one) * math.log(float(one)) for one in p)
    minimum = min(0.09, 0.3 * math.exp(-entropy))
    accepted = []
    for draft in range(VOCAB):
        rows = states(params, 1000, seed=draft)
        sampler = Sampler(acceptance=TYPICAL)
        drafts = dict.fromkeys(range(1000), draft)
        drawn = sampler.sample(logits.repeat(1000, 1), rows, drafts=drafts).token_ids
        if float(p[draft]) > minimum:
            accepted.append(draft)
            assert set(drawn.tolist()) == {draft}
        else:
            baseline_token_ids = Sampler().sample(logits.repeat(1000, 1), rows).token_ids
            assert torch.equal(drawn, baseline_token_ids)
    assert 0 < len(accepted) < VOCAB


def test_lower_thresholds_accept_more() -> None:
    torch.manual_seed(3)
    logits, row = torch.randn(200, VOCAB) * 2, states(SamplingParams(), 200)
    drafts = dict(enumerate(torch.randint(VOCAB, (200,)).tolist()))
    counts = [
        len(TypicalAcceptanceSampler(threshold, alpha).accepted(logits, row, drafts))
        for threshold, alpha in ((0.9, 1.0), (0.09, 0.3), (0.01, 0.1), (1e-9, 1e-9))
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2] < counts[3] == 200


def test_greedy_rows_and_what_may_not_come_are_as_without() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, VOCAB) / 10
    rows = [
        RequestSamplingState(params, [1], [], 7)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(allowed_token_ids=[1, 2]),
            SamplingParams(logit_bias={3: -100.0}),
            SamplingParams(top_k=1),
        )
    ]
    likeliest = int(logits[3].argmax())
    drafts = {0: int(logits[0].argmin()), 1: 5, 2: 3, 3: (likeliest + 1) % VOCAB}
    baseline_token_ids = Sampler().sample(logits.clone(), rows).token_ids
    typical = Sampler(acceptance=TypicalAcceptanceSampler(1e-9, 1e-9))
    assert torch.equal(
        typical.sample(logits.clone(), rows, drafts=drafts).token_ids, baseline_token_ids
    )


def test_the_scores_are_those_of_the_token_that_was_taken() -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, VOCAB)
    row = [RequestSamplingState(SamplingParams(logprobs=0), [1], [], 7)]
    output = Sampler(acceptance=TYPICAL).sample(
        logits.clone(), row, drafts={0: int(logits.argmax())}
    )
    scores = output.logprobs[0]
    assert scores is not None
    assert scores.token_ids[0] == int(logits.argmax()) == output.token_ids.item()
    assert scores.logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0], 0).max()))
