"""Log probabilities of the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.contract.sampling_params import SamplingParams
from engine.sampling import RequestSamplingState, Sampler, prompt_logprobs


def state(**fields):
    return RequestSamplingState(SamplingParams(**fields), [1], [2], 3)


def log_softmax(logits):
    x = logits.double().numpy()
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


def test_logprobs_are_raw_whatever_the_sampling_does():
    logits = torch.randn(3, 200)
    expected = log_softmax(logits)
    states = [
        state(logprobs=5, temperature=0.2, top_k=3, repetition_penalty=1.9),
        state(temperature=0.0),
        state(logprobs=0, allowed_token_ids=[4, 9], logit_bias={4: 50.0}),
    ]
    output = Sampler().sample(logits.clone(), states)
    first, none, last = output.logprobs
    tokens = output.token_ids.tolist()
    assert none is None
    assert first.token_ids[0] == tokens[0]
    assert first.token_ids[1:] == logits[0].topk(5).indices.tolist()
    assert first.ranks[1:] == [1, 2, 3, 4, 5]
    assert first.logprobs == pytest.approx(expected[0, first.token_ids], abs=1e-5)
    assert last.token_ids == [tokens[2]] == [4]
    assert last.ranks == [int((logits[2] > logits[2, 4]).sum()) + 1]
    assert last.logprobs == pytest.approx([expected[2, 4]], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_may_want_some_and_the_logits_may_stay(temperature):
    logits = torch.randn(4, 50)
    states = [state(logprobs=k, temperature=temperature) for k in range(4)]
    output = Sampler().sample(logits, states)
    expected = log_softmax(logits)
    for row, entry in enumerate(output.logprobs):
        assert len(entry.token_ids) == len(entry.ranks) == row + 1
        assert entry.logprobs == pytest.approx(expected[row, entry.token_ids], abs=1e-5)


def test_named_tokens_are_scored_in_place_of_the_top_ones():
    logits = torch.randn(3, 200)
    expected = log_softmax(logits)
    states = [
        state(logprob_token_ids=[7, 150, 3], temperature=0.3, top_k=5),
        state(logprobs=4),
        state(logprob_token_ids=[9], logit_bias={9: 100.0}, temperature=0.0),
    ]
    output = Sampler().sample(logits.clone(), states)
    named, top, sampled = output.logprobs
    assert named.token_ids[1:] == [7, 150, 3]
    assert top.token_ids[1:] == logits[1].topk(4).indices.tolist()
    assert sampled.token_ids == [9, 9]
    for row, entry in enumerate(output.logprobs):
        assert entry.logprobs == pytest.approx(expected[row, entry.token_ids], abs=1e-5)
        num_exceeding = [int((logits[row] > logits[row, token]).sum()) for token in entry.token_ids]
        assert entry.ranks == [count + 1 for count in num_exceeding]


def test_equal_logits_share_a_rank():
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 2.0]])
    output = Sampler().sample(logits, [state(logprobs=5, logit_bias={4: 50.0})])
    assert output.logprobs[0].ranks == [3, 1, 1, 3, 3, 5]


def test_more_logprobs_than_vocabulary():
    output = Sampler().sample(torch.zeros(1, 3), [state(logprobs=20)])
    assert len(output.logprobs[0].token_ids) == 4


@pytest.mark.parametrize("n", [0, 1, 300])
def test_prompt_logprobs(n):
    logits, following = torch.randn(n, 60), torch.randint(60, (n,))
    entries = prompt_logprobs(logits.to(torch.bfloat16), following, 3)
    expected = log_softmax(logits.to(torch.bfloat16).float())
    assert len(entries) == n
    for row, entry in enumerate(entries):
        assert entry.token_ids[0] == following[row]
        assert entry.logprobs == pytest.approx(expected[row, entry.token_ids], abs=1e-5)
        assert (
            entry.ranks[0]
            == (logits[row].bfloat16() > logits[row].bfloat16()[following[row]]).sum() + 1
        )
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)


def test_prompt_logprobs_without_top_tokens():
    (entry,) = prompt_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), 0)
    assert entry.token_ids == [1]
    assert entry.ranks == [1]
    assert entry.logprobs == pytest.approx([-np.log(2)])
