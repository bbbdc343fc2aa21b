"""What counts as a right answer."""

from __future__ import annotations

import pytest

from demo.generator.example import Example, exchange
from demo.judge import right


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("The capital of France is Paris.", True),
        ("paris", True),
        ("Parisian", False),
        ("The capital of France is Rome.", False),
    ],
)
def test_words_have_to_be_there(answer, verdict):
    assert right(exchange("capitals", "Capital of France?", "", "Paris"), answer) is verdict


@pytest.mark.parametrize(("answer", "verdict"), [("3 + 4 = 7", True), ("7 + 4 = 11", False)])
def test_a_sum_ends_with_its_result(answer, verdict):
    assert right(exchange("arithmetic", "3 + 4", "", "7", check="number"), answer) is verdict


def test_a_brief_answer_is_brief():
    example = exchange("system", "Capital of France?", "", "Paris", check="brief")
    assert right(example, "Paris")
    assert not right(example, "As far as I know, the capital is Paris.")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "add", \n</tool_call>', False),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', False),
    ],
)
def test_a_call_has_the_right_name_and_arguments(answer, verdict):
    expect = {"name": "add", "arguments": {"a": 1, "b": 2}}
    example = Example("tools", [], ("1 + 2",), check="tool_call", expect=expect)
    assert right(example, answer) is verdict


def test_a_story_is_long_enough():
    example = exchange("stories", "A story", "", "fox", "end", check="story")
    assert not right(example, "A fox. The end.")
    assert right(example, "A fox. " + "It ran and ran. " * 20 + "The end.")
