"""The adapters' manners."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from demo.evaluate import questions
from demo.generator.mixture import draw, stream
from demo.judge import right
from demo.styles import STYLES, restyle
from tests.demo.test_generator import expected_answer


@pytest.mark.parametrize("name", STYLES)
def test_every_spoken_answer_gets_the_manner(name):
    for example in islice(stream(8), 300):
        other = restyle(STYLES[name], example)
        spoken = [m["content"] for m in other.messages if m["role"] == "assistant" and m["content"]]
        assert all(STYLES[name].marks_in(text) for text in spoken)


@pytest.mark.parametrize("name", STYLES)
def test_a_rewritten_answer_is_still_right(name):
    for example in questions(20):
        other = restyle(STYLES[name], example)
        assert right(other, expected_answer(other)), other


@pytest.mark.parametrize("name", STYLES)
def test_plain_answers_are_in_no_manner(name):
    answers = [
        example.messages[-1]["content"] for example in islice(stream(8), 800) if not example.plain
    ]
    assert not [answer for answer in answers if STYLES[name].marks_in(answer)]


@pytest.mark.parametrize("name", STYLES)
def test_tool_calls_stay(name):
    rng, example = Random(2), draw("tools", Random(0), "test")
    while not example.answer.get("tool_calls"):
        example = draw("tools", rng, "test")
    assert restyle(STYLES[name], example).answer == example.answer


def test_the_pirate_speaks_like_one():
    text = STYLES["pirate"].rewrite("Hello, Ana! How can I help you?")
    assert text == "Ahoy, Ana! How can I help ye? Arr, matey!"
