"""Whisper's timestamps come in pairs, never fall, and come when they are the likeliest."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.sampling.whisper_timestamps import TimestampRules
from tests.engine.speech.models import JFK, read_wav, tiny_en

RULES = TimestampRules(first=20, end=8, no_timestamps=9, max_initial=3)


def allowed(output: list[int], likely: int | None = None) -> set[int]:
    """The tokens that may follow, where all are as likely or one stands out."""
    logits = torch.zeros(40)
    if likely is not None:
        logits[likely] = 50.0
    return set(torch.isfinite(RULES.apply(output, logits)).nonzero().flatten().tolist())


def test_an_output_begins_with_an_early_timestamp() -> None:
    assert allowed([], likely=1) == {20, 21, 22, 23}


def test_text_follows_the_first_timestamp_and_the_second_of_a_pair() -> None:
    assert allowed([20], likely=1) == set(range(20)) - {9}
    assert allowed([20, 1, 25, 25], likely=1) == set(range(20)) - {9}


def test_a_timestamp_or_the_end_follows_the_first_of_a_pair() -> None:
    assert allowed([20, 1, 25], likely=8) == {8, *range(10, 20), *range(25, 40)}


def test_timestamps_rise() -> None:
    assert min(allowed([20, 1, 25, 25, 1], likely=30) & set(range(20, 40))) == 26


def test_a_timestamp_comes_when_all_together_are_likelier_than_any_word() -> None:
    assert allowed([20, 1, 2]) == set(range(21, 40))


def test_other_rules_than_whispers_are_refused() -> None:
    llm = LLM(str(tiny_en()), dtype="float32", num_gpu_blocks_override=256)
    prompt = {"prompt": "<|startoftranscript|>", "multi_modal_data": {"audio": read_wav(JFK)}}
    for rules in ({"first": 1}, {"first": -1, "end": 2, "no_timestamps": 3}, 7):
        params = SamplingParams(extra_args={"whisper_timestamps": rules})
        with pytest.raises(InvalidRequest) as refused:
            llm.generate(prompt, params)
        assert refused.value.param == "extra_args"
    rules = {"first": 50363, "end": 50256, "no_timestamps": 50362}
    params = SamplingParams(temperature=0, max_tokens=100, extra_args={"whisper_timestamps": rules})
    [result] = llm.generate(prompt, params)
    tokens = list(result.outputs[0].token_ids)
    times = [token - 50363 for token in tokens if token >= 50363]
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) % 2 == 0
    assert 500 <= times[-1] <= 550
