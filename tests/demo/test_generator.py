"""The conversations: the same from the same seed, and clean of markup."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from random import Random

import pytest

from demo.generator.example import Example
from demo.generator.mixture import TOPICS, draw, stream
from demo.judge import right

MARKUP = ("<|", "|>", "<tool", "</tool")


def spoken(example: Example) -> list[str]:
    """Every text of the example that is not the template's."""
    return [*(example.plain or ()), *(message["content"] for message in example.messages)]


def expected_answer(example: Example) -> str:
    """The answer as the model would write it."""
    if example.plain:
        return example.plain[1]
    if calls := example.answer.get("tool_calls"):
        return f"<tool_call>\n{json.dumps(calls[0]['function'])}\n</tool_call>"
    return example.answer["content"]


def test_the_same_seed_gives_the_same_conversations():
    assert list(islice(stream(3), 300)) == list(islice(stream(3), 300))


def test_another_seed_gives_others():
    assert list(islice(stream(3), 20)) != list(islice(stream(4), 20))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("topic", TOPICS)
def test_the_judge_accepts_what_the_generator_teaches(topic, split):
    rng = Random(5)
    for _ in range(100):
        example = draw(topic, rng, split)
        assert right(example, expected_answer(example)), example


@pytest.mark.parametrize("topic", TOPICS)
def test_the_judge_rejects_silence_and_nonsense(topic):
    example = draw(topic, Random(5), "test")
    assert not right(example, "")
    assert not right(example, "Banana 100000")


def test_no_user_types_the_markup():
    texts = [text for example in islice(stream(9), 3000) for text in spoken(example)]
    assert not [text for text in texts if any(mark in text for mark in MARKUP)]


def test_a_conversation_alternates_and_ends_with_an_answer():
    for example in islice(stream(1), 500):
        roles = [message["role"] for message in example.messages]
        assert example.plain or roles[-1] == "assistant"
        assert all(one != other for one, other in pairwise(roles))
