"""How a conversation becomes the model's prompt."""

from __future__ import annotations

import json
from random import Random

import pytest

from demo.generator.mixture import TOPICS, draw
from demo.render import render, render_prompt

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
USER = {"role": "user", "content": "Hello"}


def rendered(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def test_a_user_turn_and_the_generation_prompt(tokenizer):
    assert rendered(tokenizer, [USER], add_generation_prompt=True) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_turn_comes_first(tokenizer):
    text = rendered(tokenizer, [{"role": "system", "content": "Be brief."}, USER])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


def test_an_answer_is_closed(tokenizer):
    text = rendered(tokenizer, [USER, {"role": "assistant", "content": "Hi!"}])
    assert text.endswith("<|im_start|>assistant\nHi!<|im_end|>\n")


def test_tools_are_listed_in_the_system_turn(tokenizer):
    text = rendered(tokenizer, [USER], tools=[WEATHER, WEATHER])
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    assert text.startswith("<|im_start|>system\n")
    assert [json.loads(line) for line in listed] == [WEATHER, WEATHER]


def test_tools_follow_the_systems_own_words(tokenizer):
    text = rendered(tokenizer, [{"role": "system", "content": "Be brief."}, USER], tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_a_tool_call_is_json_between_tags(tokenizer, arguments):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    text = rendered(tokenizer, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    inside = text.split("<tool_call>\n")[1].split("\n</tool_call><|im_end|>")[0]
    assert json.loads(inside) == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_two_calls_stand_one_under_the_other(tokenizer):
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    assert "</tool_call>\n<tool_call>" in rendered(tokenizer, [USER, turn])


def test_a_tools_result_is_a_turn_of_its_own(tokenizer):
    text = rendered(tokenizer, [USER, {"role": "tool", "content": '{"time": 3}'}])
    assert text.endswith(
        '<|im_start|>tool\n<tool_response>\n{"time": 3}\n</tool_response><|im_end|>\n'
    )


@pytest.mark.parametrize("topic", TOPICS)
def test_training_sees_what_serving_renders(tokenizer, topic):
    example = draw(topic, Random(4), "train")
    assert render(example).startswith(render_prompt(example))
    if not example.plain:
        more = {"tools": example.tools or None, "add_generation_prompt": True}
        assert render_prompt(example) == rendered(tokenizer, example.prompt, **more)
